"""What the keys of a shard say at one moment, and whether its ids are whole: every entry of its sets, and every
payloads key that a scan of all keys comes across.

What is reported was confirmed by one script, `examine`, at one moment: what only looks wrong because it moves while one
looks is not reported. A repair looks once more before it does anything.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from lowq.operate.findings import MAX_NAMED
from lowq.operate.walk import SCANS_TOGETHER, ask, gather, scan_shards
from lowq.sharding import queue_of_layout, shard_of
from lowq.store import Call, Client
from lowq.store.keys import FORMAT, SHARD_KEYS, place_of, shard_prefix
from lowq.store.shard import ShardScripts
from lowq.store.shard_replies import AGAIN, DONE, ExamineReply, SnapshotReply

#: Seconds that a shard's clock may be ahead of the server's: it runs ahead by a microsecond for each job of a push.
CLOCK_TOLERANCE = 2.0
#: Calls that go out together: each takes some 20 microseconds.
SNAPSHOTS_TOGETHER = 100


class Place(NamedTuple):
    """A shard: its queue, its number, and the layout that it belongs to."""

    queue: str
    shard: int
    epoch: int = 0

    @classmethod
    def of_tag(cls, tag: str) -> "Place | None":
        """The shard whose keys have this tag; None: lowq has no such tag."""
        found = place_of(tag)
        if found is None:
            return None
        layout, shard = found
        queue = queue_of_layout(layout)
        epoch = layout[len(queue) + 1 :]
        # What another program wrote may look like an epoch, and be none that lowq would write.
        return (
            None
            if epoch and (len(epoch) > 9 or str(int(epoch)) != epoch or epoch == "0")
            else cls(queue, shard, int(epoch or 0))
        )


_COUNTERS = ("pushed", "processed", "failed", "buried", "released", "kicked", "deleted", "expired", "delivery")


@dataclass(frozen=True, kw_only=True)
class ShardSnapshot(SnapshotReply):
    """What the keys of a shard said at one moment, and what is wrong with that."""

    place: Place

    @property
    def jobs(self) -> int:
        return self.length + self.taken + self.morgue_length

    @property
    def is_moving(self) -> bool:
        """Whether its jobs leave it for another layout, and some have not yet."""
        return "sealed" in self.meta and "moved" not in self.meta

    @property
    def is_left(self) -> bool:
        """Whether all of it was moved to another layout."""
        return "moved" in self.meta

    @property
    def exists(self) -> bool:
        """Whether there is anything of it but a lease."""
        return bool(self.wrong or self.meta or self.jobs)

    @property
    def owner(self) -> str | None:
        """The nonce of whoever holds the lease."""
        return None if self.token is None else self.token.rpartition(":")[0]

    @property
    def seconds_ahead(self) -> float:
        """How far its clock is ahead of the server's."""
        return _number(self.meta.get("clock")) - self.now

    def integrity_errors(self) -> dict[str, str]:
        """Code -> detail, of what is wrong with it taken by itself."""
        if self.wrong:
            return {"wrong_type": ", ".join(self.wrong)}
        found = {}
        if self.seconds_ahead > CLOCK_TOLERANCE:
            found["clock_ahead"] = ""
        if self.jobs and "shards_count" not in self.meta:
            found["meta_lost"] = ""
        if self.missing_features:
            found["features_lost"] = ", ".join(self.missing_features)
        if self.token is not None and self.ttl == -1:
            found["lease_endless"] = ""
        if self.token is not None and self.token != f"{self.meta.get('owner')}:{self.meta.get('fence')}":
            found["lease_disagrees"] = ""
        counters = [name for name in _COUNTERS if not re.fullmatch(r"\d+", self.meta.get(name, "0"))]
        if counters:
            found["counters"] = ", ".join(counters)
        return found


def read_shard_snapshots(
    client: Client, namespace: str, places: Iterable[Place], now: str = ""
) -> dict[Place, ShardSnapshot]:
    """Snapshots of many shards.

    Raises:
        RedisUnavailable, RedisRefused, ScriptError
    """
    listed = list(places)
    calls = [ShardScripts(shard_prefix(namespace, *place)).snapshot(now) for place in listed]
    return {
        place: ShardSnapshot(**vars(said), place=place)
        for place, said in zip(listed, ask(client, calls, SNAPSHOTS_TOGETHER), strict=True)
    }


def _number(text: str | None) -> float:
    try:
        return float(text or 0)
    except ValueError:
        return 0.0


#: In this order: what a repair of the first ones changes is looked at by the later ones.
_FIRST = ("taken", "due", "morgue")
SETS = (*_FIRST, *(key.name for key in SHARD_KEYS if key.has_ids and key.name not in _FIRST))
#: What the keys of payloads begin with.
PAYLOADS = tuple(key.head.encode() for key in SHARD_KEYS if key.name.endswith("<id>"))
#: All other keys that a shard may have.
KNOWN_KEYS = frozenset(key.name.encode() for key in SHARD_KEYS if key.is_one)
#: Keys of one step of the scan, ids of one call that looks, and of one that repairs: a few milliseconds of Redis at
#: most.
SCAN_KEYS = 1000
MAX_EXAMINED = 500
MAX_REPAIRED = 200
#: Ids that are gathered before any of them is looked at: with many shards, a call for a few ids each would be slow.
MAX_GATHERED = 20_000


@dataclass(slots=True)
class Tally:
    """What was found with one code in one queue."""

    count: int = 0
    repaired: int = 0
    shards: set[Place] = field(default_factory=set)
    ids: dict[bytes, None] = field(default_factory=dict)

    def add(self, shard: Place, job_id: bytes, *, repaired: bool = False) -> None:
        self.count += 1
        self.repaired += repaired
        self.shards.add(shard)
        if len(self.ids) < MAX_NAMED:
            self.ids[job_id] = None


@dataclass
class JobScanner:
    """Examines ids and repairs them if told to, and keeps the tally."""

    client: Client
    namespace: str
    repair: bool
    #: Gets how many ids or keys were looked at.
    on_step: Callable[[int], object]
    #: Stands for the server's clock.
    now: str = ""
    #: (queue, code) -> what was found.
    tallies: defaultdict[tuple[str, str], Tally] = field(default_factory=lambda: defaultdict(Tally))
    #: Some payload keys that the scan came across, as (prefix, key).
    sample: list[tuple[str, bytes]] = field(default_factory=list)

    # --- sets ---

    def examine_sets(self, places: Sequence[Place]) -> None:
        """Every entry of every set of these shards."""
        for what in SETS:

            def call(place: Place, cursor: bytes, what: str = what) -> Call[ExamineReply]:
                return self._scripts(place).examine(what, cursor)

            for place, examined in scan_shards(self.client, places, call):
                self.on_step(examined.looked)
                self._note(place, what, examined.found)

    # --- keys ---

    def examine_keys(
        self,
        wanted: Collection[str] | None,
        shards_count: Callable[[Place], int],
        shard_snapshots: dict[Place, ShardSnapshot],
        sample: int,
    ) -> None:
        """Every payloads key there is of the queues wanted (None: of all). Shards that it comes across and that are not
        in ``shard_snapshots`` are added there. ``shards_count``: how many shards the layout of a shard has, 0 when that
        is not known. ``sample``: so many keys are kept.
        """
        keys = self._payload_keys(wanted, cache(shards_count), shard_snapshots, sample)
        for groups in gather(keys, MAX_EXAMINED, MAX_GATHERED):
            calls = [self._scripts(place).examine_ids(kind, ids) for (place, kind), ids in groups]
            for ((place, kind), _), examined in zip(groups, ask(self.client, calls, SCANS_TOGETHER), strict=True):
                self._note(place, kind.decode(), examined.found)

    def _payload_keys(
        self,
        wanted: Collection[str] | None,
        shards_count: Callable[[Place], int],
        shard_snapshots: dict[Place, ShardSnapshot],
        sample: int,
    ) -> Iterator[tuple[tuple[Place, bytes], bytes]]:
        begin = f"{self.namespace}:{FORMAT}:{{"
        places: dict[bytes, Place | None] = {}
        for keys in self.client.scan(literally(begin) + "*", SCAN_KEYS):
            self.on_step(len(keys))
            for key in keys:
                head, _, tail = key[len(begin.encode()) :].partition(b"}:")
                if head not in places:
                    places[head] = Place.of_tag(head.decode("utf-8", "replace"))
                place = places[head]
                if place is None or (wanted is not None and place.queue not in wanted):
                    continue
                if place not in shard_snapshots:
                    shard_snapshots |= read_shard_snapshots(self.client, self.namespace, [place])
                kind = next((kind for kind in PAYLOADS if tail.startswith(kind)), None)
                if kind is not None and not shard_snapshots[place].wrong:
                    if len(self.sample) < sample:
                        self.sample.append((self._prefix(place), key))
                    job_id, expected = tail[len(kind) :], shards_count(place)
                    if place.shard < expected and shard_of(job_id, expected) != place.shard:
                        self.tallies[place.queue, "wrong_shard"].add(place, job_id)
                    yield (place, kind), job_id
                elif kind is None and tail not in KNOWN_KEYS:
                    self.tallies[place.queue, "unknown_keys"].add(place, tail)

    # --- what was found ---

    def _note(self, place: Place, what: str, found: Sequence[tuple[bytes, str]]) -> None:
        repaired = self._repair_ids(place, what, [job_id for job_id, _ in found]) if self.repair else set()
        for job_id, code in found:
            self.tallies[place.queue, code].add(place, job_id, repaired=job_id in repaired)

    def _repair_ids(self, place: Place, what: str, ids: Sequence[bytes]) -> set[bytes]:
        """Which of them are as they should be now."""
        repaired: set[bytes] = set()
        for start in range(0, len(ids), MAX_REPAIRED):
            pending = list(ids[start : start + MAX_REPAIRED])
            while pending:
                states = self.client.call(self._scripts(place).repair(what, pending, self.now))
                repaired.update(job_id for job_id, state in zip(pending, states, strict=True) if state in (0, DONE))
                pending = [job_id for job_id, state in zip(pending, states, strict=True) if state == AGAIN]
        return repaired

    def _prefix(self, place: Place) -> str:
        return shard_prefix(self.namespace, *place)

    def _scripts(self, place: Place) -> ShardScripts:
        return ShardScripts(self._prefix(place))


def literally(text: str) -> str:
    """A pattern of Redis that only fits the text itself."""
    return "".join("\\" + char if char in "*?[]\\" else char for char in text)
