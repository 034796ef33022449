"""Calls that look at many shards, a few at a time."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lowq.errors import RedisUnavailable
from lowq.inspection.pattern import encode_pattern, ids_per_call
from lowq.store import Call, Client
from lowq.store.shard import ShardScripts
from lowq.store.shard_replies import ScanReply, ShardStats
from lowq.store.translate import R_co

#: Calls that go out together. Redis works what one client wrote in one piece, so these must be short as a whole:
#: a walk takes well under a millisecond, a scan two or three, statistics some 20 microseconds a shard.
TOGETHER = 8
SCANS_TOGETHER = 3
STATS_TOGETHER = 200

#: Calls without an answer, by their place among all, as a primary of a cluster is away that others don't need.
Silent = dict[int, RedisUnavailable]


def ask(
    client: Client, calls: Sequence[Call[R_co]], together: int = TOGETHER, silent: Silent | None = None
) -> Iterator[R_co]:
    """The replies to calls, with their fields named. A few calls are sent at a time: other clients of Redis come
    in between. ``silent``: those without an answer are entered there, and their reply is None; without it, they are an
    error.

    Raises:
        RedisUnavailable, RedisRefused, ScriptError: the first error among the replies.
    """
    for start in range(0, len(calls), together):
        for place, reply in enumerate(client.run_many(calls[start : start + together]), start):
            if silent is not None and client.is_cluster and isinstance(reply, RedisUnavailable):
                silent[place] = reply
                if len(silent) == len(calls):
                    raise reply
                yield None  # type: ignore[misc]  # only to those who asked for it
                continue
            if isinstance(reply, Exception):
                raise reply
            yield calls[place].read(reply)


def read_stats(client: Client, prefixes: Sequence[str], now: float | None) -> list[ShardStats]:
    """How these shards are doing.

    Raises:
        RedisUnavailable, RedisRefused, ScriptError
    """
    return list(ask(client, [ShardScripts(prefix).stats(now) for prefix in prefixes], STATS_TOGETHER))


class Scan(NamedTuple):
    """What is looked for, in which set."""

    #: due, retries, morgue or taken.
    base: str
    #: Of ids; "" = any.
    pattern: str
    #: The value wanted: perform_at, retry_count, buried_at or id.
    order: str
    #: Only jobs that are "due" or "later"; "" = any.
    when: str = ""
    #: Only "fresh" or "failed" jobs; "" = any.
    past: str = ""

    def call(self, prefix: str, cursor: bytes, now: str) -> Call[ScanReply]:
        """Asks for the next ids of a shard. It looks at about 1,000, fewer for a dear pattern."""
        wanted = [encode_pattern(self.pattern), self.order.encode(), self.when.encode(), self.past.encode()]
        return ShardScripts(prefix).scan(self.base, cursor, wanted, ids_per_call(self.pattern), now)
