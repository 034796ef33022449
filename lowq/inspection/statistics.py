"""A queue in the words of Tarantool's queue module: tasks by state, and calls by verb."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lowq.inspection.calls import STATS_TOGETHER, ask
from lowq.store import Call, Client, Command, untrusted
from lowq.store.shard import ShardScripts
from lowq.store.shard_replies import ShardStats

#: The counters in a shard's `meta`, in the order of `_read`.
_COUNTERS = ("delivery", "released", "kicked", "deleted")


@dataclass(frozen=True, slots=True)
class TaskCounts:
    """How many jobs are in each state. An id in flight with newer payloads, or with older ones in the morgue, is one
    of each.
    """

    #: Due.
    ready: int
    #: In flight.
    taken: int
    #: They wait, and are not due.
    delayed: int
    #: In the morgue.
    buried: int
    #: All of these.
    total: int
    #: Acknowledged, deleted or expired, since the queue was created.
    done: int


@dataclass(frozen=True, slots=True)
class CallCounts:
    """How many jobs each verb was done to since the queue was created; of take how often."""

    #: Payloads that came in, also those that were merged with others.
    put: int
    #: Takes that brought jobs: of a shard, and any number at once.
    take: int
    ack: int
    #: By the word of a handler or a consumer, or when whoever had them ended.
    release: int
    #: Charged a retry.
    fail: int
    #: Also because no retries were left, and as poison.
    bury: int
    kick: int
    delete: int
    #: Not known: it never reaches Redis.
    touch: None = None


@dataclass(frozen=True, slots=True)
class Statistics:
    """What `Queue.statistics` returns."""

    name: str
    tasks: TaskCounts
    calls: CallCounts


def read_statistics(client: Client, name: str, prefixes: Sequence[str], now: float | None) -> Statistics:
    """The statistics of the queue with these shards.

    Raises:
        RedisUnavailable, RedisRefused, ScriptError
    """
    reads: list[Call[Any]] = []
    for prefix in prefixes:
        reads += [ShardScripts(prefix).stats(now), Command(prefix, "HMGET", f"{prefix}meta", *_COUNTERS)]
    replies = list(ask(client, reads, STATS_TOGETHER))
    shards: list[ShardStats] = replies[::2]
    counters = zip(*(map(untrusted.count, row) for row in replies[1::2]), strict=True)
    take, release, kick, delete = map(sum, counters)
    due, taken = sum(shard.due for shard in shards), sum(shard.taken for shard in shards)
    length, buried = sum(shard.length for shard in shards), sum(shard.morgue_length for shard in shards)
    ack = sum(shard.processed for shard in shards)
    total, done = length + taken + buried, ack + delete + sum(shard.expired for shard in shards)
    return Statistics(
        name,
        TaskCounts(ready=due, taken=taken, delayed=length - due, buried=buried, total=total, done=done),
        CallCounts(
            put=sum(shard.pushed for shard in shards), take=take, ack=ack, release=release,
            fail=sum(shard.failed for shard in shards), bury=sum(shard.buried for shard in shards), kick=kick,
            delete=delete,
        ),
    )  # fmt: skip
