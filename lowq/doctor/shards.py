"""Shards as their own keys tell, each read at one moment by the script `shard_snapshot`."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from lowq.inspection.calls import ask
from lowq.sharding import queue_of_layout
from lowq.store import Client
from lowq.store.keys import shard_prefix
from lowq.store.shard import ShardScripts
from lowq.store.shard_replies import SnapshotReply
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
        for place, said in zip(listed, ask(client, calls, TOGETHER), strict=True)
    }


def _number(text: str | None) -> float:
    try:
        return float(text or 0)
    except ValueError:
        return 0.0
