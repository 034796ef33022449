"""Shards as their own keys tell, each read at one moment by the script `shard_snapshot`."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lowq.inspection.calls import ask
from lowq.sharding import queue_of_layout
from lowq.store import Call, Client
from lowq.store.keys import shard_prefix
from lowq.store.tags import place_of

#: Seconds that a shard's clock may be ahead of the server's: it runs ahead by a microsecond for each job of a push.
CLOCK_TOLERANCE = 2.0
#: Calls that go out together: each takes some 20 microseconds.
TOGETHER = 100


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


_META = (
    "shards_count", "clock", "owner", "fence", "delivery", "paused", "pushed", "processed", "failed", "buried",
    "released", "kicked", "deleted", "expired", "sealed", "moved", "fed", "step",
)  # fmt: skip
_COUNTERS = ("pushed", "processed", "failed", "buried", "released", "kicked", "deleted", "expired", "delivery")


@dataclass(frozen=True, slots=True)
class ShardSnapshot:
    """What the keys of a shard said at one moment."""

    place: Place
    #: Unix time, seconds, by its server's clock.
    now: float
    #: Names of keys that have a type they must not have. Then nothing else is known.
    wrong: tuple[str, ...]
    #: Token of the lease, None when there is none; and the milliseconds that it still runs, -1 without an end.
    token: str | None = None
    ttl: int = -2
    #: The fields of `meta` that there are.
    meta: Mapping[str, str] = field(default_factory=dict)
    due: int = 0
    length: int = 0
    taken: int = 0
    morgue_length: int = 0
    #: Ids in all sets together; one may be in several.
    entries: int = 0
    #: What its keys show that it uses, and `features` in `meta` does not say.
    missing_features: tuple[str, ...] = ()

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
    calls = [Call("shard_snapshot", shard_prefix(namespace, *place), [now]) for place in listed]
    replies = ask(client, calls, TOGETHER)
    return {place: _shard_snapshot(place, reply) for place, reply in zip(listed, replies, strict=True)}


def _shard_snapshot(place: Place, reply: Sequence[Any]) -> ShardSnapshot:
    now, names, *rest = reply
    wrong = tuple(name.decode() for name in names)
    if wrong:
        return ShardSnapshot(place, float(now), wrong)
    lease, ttl, *rest = rest
    values, sizes = rest[: len(_META)], rest[len(_META) :]
    meta = {name: raw.decode("utf-8", "replace") for name, raw in zip(_META, values, strict=True) if raw is not None}
    due, length, taken, morgue_length, entries, missing = sizes
    return ShardSnapshot(
        place=place,
        now=float(now),
        wrong=wrong,
        token=None if lease is None else lease.decode("utf-8", "replace"),
        ttl=ttl,
        meta=meta,
        due=due,
        length=length,
        taken=taken,
        morgue_length=morgue_length,
        entries=entries,
        missing_features=tuple(word.decode() for word in missing),
    )


def _number(text: str | None) -> float:
    try:
        return float(text or 0)
    except ValueError:
        return 0.0
