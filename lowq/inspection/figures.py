"""Queues and shards in figures."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowq.backend import Backend
from lowq.codec import decode_id
from lowq.sharding import Layouts
from lowq.store import untrusted
from lowq.store.keys import nodes_key
from lowq.store.shard_replies import ShardStats


@dataclass(frozen=True, slots=True)
class Stats:
    """A queue in figures, over all its shards."""

    name: str
    shards_count: int
    #: Jobs that wait: due + scheduled, and also fresh + retries.
    length: int
    #: Their time has come.
    due: int
    #: Their time has not come, be it the first or that of a retry.
    scheduled: int
    #: Never failed, or not since they were kicked.
    fresh: int
    #: Failed at least once; due or not.
    retries: int
    #: In flight.
    taken: int
    morgue_length: int
    #: Seconds since the oldest due job became due; 0.0 when none is.
    lag: float
    #: Since the queue was created: jobs performed, failures charged, and times that something was buried.
    processed: int
    failed: int
    buried: int
    #: At least one shard is paused.
    paused: bool
    #: The waiting job that is or was due first, and its perform_at (Unix time, seconds).
    oldest_id: str | None = None
    oldest_at: float | None = None
    #: Since the queue was created: payloads whose ttl had passed before they were taken.
    expired: int = 0
    #: Since the queue was created: payloads that came in, also those that were merged.
    pushed: int = 0
    #: Ids that may wait or be in flight, at most; None: any number.
    capacity: int | None = None
    #: Counts the reshards that have ended.
    epoch: int = 0
    #: While a reshard is under way: the number of shards that the queue is given.
    reshard_to: int | None = None

    @property
    def fill(self) -> float | None:
        """How full it is, from 0 to 1; one of its shards may be full before. None: it has no capacity."""
        return None if self.capacity is None else (self.length + self.taken) / self.capacity


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """A shard and who works it."""

    index: int
    length: int
    taken: int
    morgue_length: int
    #: Seconds since its oldest due job became due.
    lag: float
    #: The process that holds the lease: the node's name if that is known, otherwise its nonce; None: nobody.
    owner: str | None
    #: The fencing token of the lease.
    fence: int | None
    #: Seconds that the lease still runs.
    lease_seconds: float | None
    paused: bool
    #: The waiting job that is or was due first.
    oldest_id: str | None
    #: Of its layout: counts the reshards of the queue.
    epoch: int = 0
    #: While a reshard is under way. sealed: its jobs are being moved to another layout; moved: all of them were; fed:
    #: jobs are being moved to it, and none is taken until all have come.
    sealed: bool = False
    moved: bool = False
    fed: bool = False


def node_names(backend: Backend) -> dict[bytes, bytes]:
    """What the tokens of a node's leases begin with -> the node's name, which ends with it."""
    key = nodes_key(backend.config.namespace)
    return by_nonce(backend.client.command("HKEYS", key, key=key))


def by_nonce(names: Iterable[bytes]) -> dict[bytes, bytes]:
    """As `node_names`, of the names in the registry."""
    return {name.rpartition(b":")[2]: name for name in names}


def shards_of(shards: Sequence[ShardStats], names: Mapping[bytes, bytes], layouts: Layouts) -> list[ShardInfo]:
    """The shards of a queue, from their figures and `node_names`."""
    places = [(layout.epoch, index) for layout in layouts.all for index in range(layout.shards_count)]
    return [shard_info(index, stats, names, epoch) for (epoch, index), stats in zip(places, shards, strict=True)]


def stats_of(name: str, shards: Sequence[ShardStats], options: Mapping[str, Any], layouts: Layouts) -> Stats:
    """The queue in figures, from those of its shards, and its options in the registry."""

    def total(name: str) -> int:
        return sum(getattr(shard, name) for shard in shards)

    firsts = [(shard.oldest_at, shard.oldest_id) for shard in shards if shard.oldest_at is not None]
    oldest_at, oldest_id = min(firsts, default=(None, None))
    length, due, retries = total("length"), total("due"), total("retries")
    return Stats(
        name=name,
        shards_count=layouts.current.shards_count,
        length=length,
        due=due,
        scheduled=length - due,
        fresh=length - retries,
        retries=retries,
        taken=total("taken"),
        morgue_length=total("morgue_length"),
        lag=max(shard.lag for shard in shards),
        processed=total("processed"),
        failed=total("failed"),
        buried=total("buried"),
        paused=any(shard.paused for shard in shards),
        oldest_id=_text(oldest_id),
        oldest_at=untrusted.finite(oldest_at),
        expired=total("expired"),
        pushed=total("pushed"),
        capacity=untrusted.whole(options.get("capacity"), 1),
        epoch=layouts.current.epoch,
        reshard_to=None if layouts.next is None else layouts.next.shards_count,
    )


def shard_info(index: int, stats: ShardStats, names: Mapping[bytes, bytes], epoch: int = 0) -> ShardInfo:
    """A shard, from its figures and `node_names`."""
    owner: bytes | None = None
    fence: int | None = None
    if stats.lease is not None:
        nonce, _, number = stats.lease.rpartition(b":")
        owner = names.get(nonce[:6], nonce)
        fence = untrusted.count(number) if number.isdigit() else None
    return ShardInfo(
        index=index,
        length=stats.length,
        taken=stats.taken,
        morgue_length=stats.morgue_length,
        lag=stats.lag,
        owner=_text(owner),
        fence=fence,
        lease_seconds=None if owner is None else stats.lease_seconds,
        paused=stats.paused,
        oldest_id=_text(stats.oldest_id),
        epoch=epoch,
        sealed=stats.sealed,
        moved=stats.moved,
        fed=stats.fed,
    )


def _text(raw: bytes | None) -> str | None:
    return None if raw is None else decode_id(raw)
