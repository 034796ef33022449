"""Whether queues, nodes, shards and ids fit together.

**Ids**: every entry of the sets of shards, and every payloads key that a scan of all keys comes across. The script
`examine` confirms at one moment what is reported, so nothing is reported that only moves meanwhile. A repair looks once
more before it changes anything.

**Shards, queues and nodes**: the registries and the leases are read one after the other, so a mismatch may be a shard
between two owners, or a node that has just started or died. Such a *suspicion* is reported if it was there at every
look for longer than anything in order takes: a heartbeat or a head start is never later than lease_ttl / 3.
"""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

from lowq.backend import Backend
from lowq.operate.findings import MAX_NAMED, SAMPLE
from lowq.operate.nodes import NodeEntries, read_node_entries
from lowq.operate.queues import read_registry
from lowq.operate.walk import SCANS_TOGETHER, ask, gather, scan_shards
from lowq.registrations import QueueInfo
from lowq.sharding import Layout, queue_of_layout, shard_of
from lowq.store import Call, Client
from lowq.store.keys import FORMAT, SHARD_KEYS, place_of, shard_prefix
from lowq.store.shard_operations import AGAIN, DONE, ExamineReply, ShardOperations, SnapshotReply

#: Seconds that a shard's clock may be ahead of the server's: it runs ahead by a microsecond for each job of a push.
CLOCK_TOLERANCE = 2.0
#: Calls that go out together: each takes some 20 microseconds.
SNAPSHOTS_TOGETHER = 100
#: Seconds between two looks at suspicions.
LOOK_INTERVAL = 0.5
#: Fields of a shard's `meta` that change as its jobs are moved.
_OF_RESHARD = ("sealed", "moved", "fed", "step")
#: Its code, the queue or node, and all that tells it from others of the same code: it goes on only while all of that
#: stays the same.
Suspicion = tuple[Any, ...]


# --- shards ---


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
        # Another program may have written an epoch that lowq would not write.
        if epoch and (len(epoch) > 9 or str(int(epoch)) != epoch or epoch == "0"):
            return None
        return cls(queue, shard, int(epoch or 0))

    def prefix(self, namespace: str) -> str:
        """The prefix of its keys."""
        return shard_prefix(namespace, *self)


_COUNTERS = (
    "pushed", "processed", "failed", "buried", "released", "kicked", "deleted", "cancelled", "expired", "delivery",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ShardSnapshot(SnapshotReply):
    """The keys of a shard at one moment, and what is wrong with them."""

    place: Place

    @property
    def jobs(self) -> int:
        return self.length + self.taken + self.morgue_length

    @property
    def is_moving(self) -> bool:
        """Whether its jobs are being moved to another layout."""
        return "sealed" in self.meta and "moved" not in self.meta

    @property
    def is_left(self) -> bool:
        """Whether all its jobs were moved to another layout."""
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
        """Code -> detail of what is wrong with the shard by itself."""
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
    calls = [ShardOperations(place.prefix(namespace)).snapshot(now) for place in listed]
    replies = zip(listed, ask(client, calls, SNAPSHOTS_TOGETHER), strict=True)
    return {place: ShardSnapshot(**vars(reply), place=place) for place, reply in replies}


def _number(text: str | None) -> float:
    try:
        return float(text or 0)
    except ValueError:
        return 0.0


# --- queues, nodes and shards ---


@dataclass(frozen=True, slots=True)
class Inventory:
    """The registries and the shards, as of one look."""

    queues: Mapping[str, QueueInfo]
    #: queue -> its entry, which can't be read.
    unreadable_queues: Mapping[str, str]
    nodes: NodeEntries
    shard_snapshots: Mapping[Place, ShardSnapshot]

    def of_queue(self, queue: str) -> list[ShardSnapshot]:
        """Snapshots of its shards that can be read."""
        return [item for place, item in self.shard_snapshots.items() if place.queue == queue and not item.wrong]

    def served(self, queue: str) -> bool:
        """Whether a node lives that takes jobs of it."""
        return any(queue in node.queues and not node.quiet for node in self.nodes.live)

    def layout(self, place: Place) -> Layout | None:
        """The layout of a shard, if it may have jobs; None: the registry doesn't know it."""
        info = self.queues.get(place.queue)
        return next((each for each in info.layouts.all if each.epoch == place.epoch), None) if info else None

    def shards_count(self, place: Place) -> int:
        """How many shards its layout has; 0: the registry doesn't know it."""
        layout = self.layout(place)
        return 0 if layout is None else layout.shards_count

    def within(self, place: Place) -> bool:
        """Whether the registry knows a layout with this shard."""
        return place.shard < self.shards_count(place)

    def has_nodes(self, item: ShardSnapshot) -> bool:
        """Whether nodes may hold it: a reshard may not have made it yet."""
        place = item.place
        return self.within(place) and (place.epoch == self.queues[place.queue].epoch or "shards_count" in item.meta)

    def following(self, place: Place) -> Layout | None:
        """The layout that its jobs are being moved to, by the registry; None: no reshard is under way."""
        layouts = self.queues[place.queue].layouts if place.queue in self.queues else None
        return layouts.next if layouts is not None and layouts.current.epoch == place.epoch else None


def read_inventory(backend: Backend, wanted: Collection[str] | None, others: Sequence[Place] = ()) -> Inventory:
    """Reads the registries, the shards of the queues wanted (None: all), and some others.

    Raises:
        RedisUnavailable, RedisRefused, ScriptError
    """
    queues, unreadable = read_registry(backend)
    if wanted is not None:
        queues = {name: info for name, info in queues.items() if name in wanted}
        unreadable = {name: text for name, text in unreadable.items() if name in wanted}
    places = [
        Place(name, shard, layout.epoch)
        for name, info in queues.items()
        for layout in info.layouts.all
        for shard in range(layout.shards_count)
    ]
    shard_snapshots = read_shard_snapshots(backend.client, backend.config.namespace, dict.fromkeys([*places, *others]))
    # The nodes last: a node that has just started is seen then, though perhaps not its leases.
    nodes = read_node_entries(backend)
    live = [node for node in nodes.live if node.name not in nodes.unreadable]
    return Inventory(queues, unreadable, replace(nodes, live=live), shard_snapshots)


def suspicions(seen: Inventory) -> dict[Suspicion, list[ShardSnapshot]]:
    """The suspicions of one look, and the shards that each is about."""
    # What a node that is known to be dead said last is kept for people only.
    dead = {node.name for node in seen.nodes.lost} - seen.nodes.silent.keys()
    known = {name.rpartition(":")[2] for name in seen.nodes.names - dead}
    found = {
        (code, item.place.queue, item.place, mark): [item]
        for item in seen.shard_snapshots.values()
        if not item.wrong
        for code, mark in _suspicions_of_shard(seen, item, known)
    }
    return found | dict(_suspicions_of_queues(seen)) | {("node_without_leases", name): [] for name in _idle_nodes(seen)}


def _suspicions_of_shard(seen: Inventory, item: ShardSnapshot, known: Collection[str]) -> Iterator[tuple[str, str]]:
    """Code and mark of each. ``known``: the nonces of the nodes in the registry that are not known to be dead."""
    place, following = item.place, seen.following(item.place)
    sealed, count = item.meta.get("sealed"), item.meta.get("shards_count")
    # Nodes take nothing of a shard whose jobs are being moved, or are still to come: see "reshard_left".
    if item.token is None and sealed is None and "fed" not in item.meta:
        # Each change of owner has a fence of its own: with the same one, nobody was there between two looks.
        fence = item.meta.get("fence", "")
        if item.taken:
            yield "ownerless", fence
        elif seen.served(place.queue) and seen.has_nodes(item):
            yield "shard_unserved", fence
    # A mover of jobs is no node.
    if item.owner is not None and item.owner[:6] not in known and not (item.is_moving and following is not None):
        yield "lease_unknown", item.token or ""
    if count is not None and seen.within(place) and count != str(seen.shards_count(place)):
        yield "shards_count", count
    expected = None if following is None else f"{following.shards_count} {following.epoch}"
    if sealed is not None and sealed != expected and seen.layout(place) is not None:
        yield "shard_sealed", sealed


def _suspicions_of_queues(seen: Inventory) -> Iterator[tuple[Suspicion, list[ShardSnapshot]]]:
    for queue, info in seen.queues.items():
        items = seen.of_queue(queue)
        usable = [item for item in items if seen.has_nodes(item) and not item.is_left]
        if len({"paused" in item.meta for item in usable}) == 2:
            yield ("paused_in_part", queue), [item for item in items if "paused" in item.meta and not item.is_left]
        # A reshard that nobody goes on with: nothing of it changes. A mover holds a lease, and so does a node that
        # finishes what is in flight of a sealed shard.
        items = [item for item in items if seen.within(item.place)]
        if info.reshard is not None and not any(item.is_moving and item.token is not None for item in items):
            state = [
                (item.place, item.is_moving and item.meta.get("fence"), *map(item.meta.get, _OF_RESHARD))
                for item in items
            ]
            yield ("reshard_left", queue, *state), [item for item in items if item.is_moving or "fed" in item.meta]


def _idle_nodes(seen: Inventory) -> Iterator[str]:
    """Nodes that name shards without having the lease of any."""
    for node in seen.nodes.live:
        # It names shards by number: those of two layouts while a reshard is under way.
        places = [
            Place(queue, shard, layout.epoch)
            for queue, shards in node.shards.items()
            if queue in seen.queues
            for layout in seen.queues[queue].layouts.all
            for shard in shards
        ]
        snapshots = map(seen.shard_snapshots.get, places)
        held = [item for item in snapshots if item is not None and not item.wrong]
        nonce = node.name.rpartition(":")[2]
        if held and not any((item.owner or "").startswith(nonce) for item in held):
            yield node.name


def confirm(read: Callable[[], Inventory], patience: float) -> tuple[Inventory, dict[Suspicion, list[ShardSnapshot]]]:
    """The last look, and the suspicions that were there at every look for so many seconds; without any it ends at once.

    Raises:
        RedisUnavailable, RedisRefused, ScriptError
    """
    deadline = time.monotonic() + patience
    seen = read()
    found = suspicions(seen)
    while found and time.monotonic() < deadline:
        time.sleep(max(min(LOOK_INTERVAL, deadline - time.monotonic()), 0.0))
        seen = read()
        found = {suspicion: what for suspicion, what in suspicions(seen).items() if suspicion in found}
    return seen, found


# --- ids ---


#: In this order: a repair of the first sets may change the later ones.
_FIRST = ("taken", "due", "morgue")
SETS = (*_FIRST, *(key.name for key in SHARD_KEYS if key.has_ids and key.name not in _FIRST))
#: The beginnings of the keys of payloads.
PAYLOADS = tuple(key.head.encode() for key in SHARD_KEYS if key.name.endswith("<id>"))
#: All other keys that a shard may have.
KNOWN_KEYS = frozenset(key.name.encode() for key in SHARD_KEYS if key.is_one)
#: Keys of one step of the scan, ids of one call that examines, and of one that repairs: a few milliseconds of Redis at
#: most.
SCAN_KEYS, MAX_EXAMINED, MAX_REPAIRED = 1000, 500, 200
#: Ids that are gathered before any of them is looked at: with many shards, a call for a few ids each would be slow.
MAX_GATHERED = 20_000


@dataclass(slots=True)
class Tally:
    """The ids with one code in one queue."""

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
    """Examines ids, repairs them if it is to, and counts them."""

    client: Client
    namespace: str
    repair: bool
    #: Called with how many more ids or keys were examined.
    on_step: Callable[[int], object]
    #: Stands for the server's clock.
    now: str = ""
    #: By queue and code.
    tallies: defaultdict[tuple[str, str], Tally] = field(default_factory=lambda: defaultdict(Tally))
    #: The first `SAMPLE` payload keys that the scan came across, as (prefix, key).
    sample: list[tuple[str, bytes]] = field(default_factory=list)

    # --- sets ---

    def examine_sets(self, places: Sequence[Place], shards_count: Callable[[Place], int]) -> None:
        """Examines every entry of every set of these shards. ``shards_count``: as of `examine_keys`."""
        for what in SETS:

            def call(place: Place, cursor: bytes, what: str = what) -> Call[ExamineReply]:
                return self._scripts(place).examine(what, cursor)

            for place, examined in scan_shards(self.client, dict.fromkeys(places, 1.0), call):
                self.on_step(len(examined.looked))
                self._note_strays(place, examined.looked if what.endswith("payloads") else (), shards_count(place))
                self._note(place, what, examined.found)

    # --- keys ---

    def examine_keys(
        self,
        wanted: Collection[str] | None,
        shards_count: Callable[[Place], int],
        shard_snapshots: dict[Place, ShardSnapshot],
    ) -> None:
        """Examines every payloads key of the queues wanted (None: of all). Shards that are not in ``shard_snapshots``
        are added there. ``shards_count``: how many shards the layout of a shard has; 0: not known.
        """
        keys = self._payload_keys(wanted, cache(shards_count), shard_snapshots)
        for groups in gather(keys, MAX_EXAMINED, MAX_GATHERED):
            calls = [self._scripts(place).examine_ids(kind, ids) for (place, kind), ids in groups]
            for ((place, kind), _), examined in zip(groups, ask(self.client, calls, SCANS_TOGETHER), strict=True):
                self._note(place, kind.decode(), examined.found)

    def _payload_keys(
        self,
        wanted: Collection[str] | None,
        shards_count: Callable[[Place], int],
        shard_snapshots: dict[Place, ShardSnapshot],
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
                    if len(self.sample) < SAMPLE:
                        self.sample.append((place.prefix(self.namespace), key))
                    self._note_strays(place, [tail[len(kind) :]], shards_count(place))
                    yield (place, kind), tail[len(kind) :]
                elif kind is None and tail not in KNOWN_KEYS:
                    self.tallies[place.queue, "unknown_keys"].add(place, tail)

    # --- what was found ---

    def _note_strays(self, place: Place, ids: Iterable[bytes], shards_count: int) -> None:
        """Notes the ids that belong to other shards. ``shards_count``: of the layout; 0: not known."""
        for job_id in ids if place.shard < shards_count else ():
            if shard_of(job_id, shards_count) != place.shard:
                self.tallies[place.queue, "wrong_shard"].add(place, job_id)

    def _note(self, place: Place, what: str, found: Sequence[tuple[bytes, str]]) -> None:
        repaired = self._repair_ids(place, what, [job_id for job_id, _ in found]) if self.repair else set()
        for job_id, code in found:
            self.tallies[place.queue, code].add(place, job_id, repaired=job_id in repaired)

    def _repair_ids(self, place: Place, what: str, ids: Sequence[bytes]) -> set[bytes]:
        """Repairs ids; returns those that are in order now."""
        repaired: set[bytes] = set()
        for start in range(0, len(ids), MAX_REPAIRED):
            pending = list(ids[start : start + MAX_REPAIRED])
            while pending:
                states = self.client.call(self._scripts(place).repair(what, pending, self.now))
                repaired.update(job_id for job_id, state in zip(pending, states, strict=True) if state in (0, DONE))
                pending = [job_id for job_id, state in zip(pending, states, strict=True) if state == AGAIN]
        return repaired

    def _scripts(self, place: Place) -> ShardOperations:
        return ShardOperations(place.prefix(self.namespace))


def literally(text: str) -> str:
    """A pattern of Redis that matches only the text itself."""
    return "".join("\\" + char if char in "*?[]\\" else char for char in text)
