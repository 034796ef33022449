"""The bounded walk: positions of jobs in the sets of many shards, in bounded calls, without ever holding a queue.

Two ways lead through the sets. A *walk* follows a sorted set in its own order, from the position after which it ended
before: each call finds that by binary search, however many ids share its score, and whether or not its id is still
there. A *scan* looks at all ids in no order: for patterns, for the order by id, and for what no set is sorted by. Both
go in calls that look at about 1,000 ids of one shard, fewer for a dear pattern, and a few calls go out together: other
clients of Redis come in between.

`lowq.operate.search` merges them over many shards.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

from lowq.errors import RedisUnavailable
from lowq.operate.job_filter import encode_pattern, ids_per_call
from lowq.store import Call, Client
from lowq.store.calls import R_co
from lowq.store.shard import ShardScripts
from lowq.store.shard_replies import Position, RangeReply, ScanReply, StatsReply

#: Calls that go out together. Redis works what one client wrote in one piece, so these must be short as a whole:
#: a walk takes well under a millisecond, a scan two or three, statistics some 20 microseconds a shard, and a command
#: that reads some fields less.
TOGETHER = 8
SCANS_TOGETHER = 3
STATS_TOGETHER = COMMANDS_TOGETHER = 200
#: The priorities besides 0, which most queues only have.
FURTHER_LEVELS = range(1, 10)


# --- calls to many shards ---


def answers(client: Client, calls: Sequence[Call[R_co]], together: int = TOGETHER) -> Iterator[R_co | Exception]:
    """The reply of each call, with its fields named, or its error. A few calls are sent at a time."""
    for start in range(0, len(calls), together):
        yield from client.run_many(calls[start : start + together])


def ask(client: Client, calls: Sequence[Call[R_co]], together: int = TOGETHER) -> Iterator[R_co]:
    """As `answers`, where every reply is needed.

    Raises:
        RedisUnavailable, RedisRefused, ScriptError: the first error among the replies.
    """
    for answer in answers(client, calls, together):
        if isinstance(answer, Exception):
            raise answer
        yield answer


#: Calls without an answer, by their place among all, as a primary of a cluster is away that others don't need.
Silent = dict[int, RedisUnavailable]


def ask_some(
    client: Client, calls: Sequence[Call[R_co]], together: int, silent: Silent | None
) -> Iterator[R_co | None]:
    """As `ask`. On a cluster, a call whose primary does not answer is entered in ``silent`` and yields None; with None
    for that, it is an error.

    Raises:
        RedisUnavailable: nobody answers. RedisRefused, ScriptError
    """
    for place, answer in enumerate(answers(client, calls, together)):
        if silent is not None and isinstance(answer, RedisUnavailable) and client.has_several_primaries:
            silent[place] = answer
            if len(silent) == len(calls):
                raise answer
            yield None
        elif isinstance(answer, Exception):
            raise answer
        else:
            yield answer


def read_stats(client: Client, prefixes: Sequence[str], now: float | None) -> list[StatsReply]:
    """How these shards are doing.

    Raises:
        RedisUnavailable, RedisRefused, ScriptError
    """
    return list(ask(client, [ShardScripts(prefix).stats(now) for prefix in prefixes], STATS_TOGETHER))


# --- scans ---


class _HasCursor(Protocol):
    @property
    def cursor(self) -> bytes | None:
        """Where the set goes on; None: it is at its end."""
        ...


S = TypeVar("S", bound=Hashable)
C = TypeVar("C", bound=_HasCursor)


def scan_shards(
    ask: Callable[[Sequence[S], Sequence[Call[C]]], Iterable[C]],
    shards: Iterable[S],
    call: Callable[[S, bytes], Call[C]],
) -> Iterator[tuple[S, C]]:
    """Goes through a set of each of these shards, from the first shard to the last, a few at a time. ``call``: asks a
    shard for what follows a cursor; b"0" begins. ``ask``: runs such calls to some shards.
    """
    cursors = dict.fromkeys(shards, b"0")
    while cursors:
        some = list(cursors)[:SCANS_TOGETHER]
        for shard, reply in zip(some, list(ask(some, [call(shard, cursors[shard]) for shard in some])), strict=True):
            if reply.cursor is None:
                del cursors[shard]
            else:
                cursors[shard] = reply.cursor
            yield shard, reply


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


# --- walks ---


class Walk:
    """One shard's part of a walk: its set between two bounds, in the form that Redis takes them."""

    def __init__(
        self,
        prefix: str,
        base: str,
        low: str,
        high: str,
        *,
        reverse: bool = False,
        when: str = "",
        past: str = "",
        clock: bytes = b"",
        after: Position | None = None,
        level: int | None = None,
    ) -> None:
        self.prefix = prefix
        self.base = base
        #: None: not known yet whether there is more than one.
        self._level = level
        self.finished = False
        #: Positions that came and are not used yet, the next one last.
        self.ready: list[Position] = []
        self._position: tuple[str | bytes, bytes] = ("", b"") if after is None else (repr(after[0]), after[1])
        self._head = [base, low, high, "1" if reverse else ""]
        self._tail: list[str | bytes] = [when, past, clock]

    def call(self, limit: int, now: str) -> Call[RangeReply]:
        value, job_id = self._position
        level = "" if self._level is None else self._level
        return ShardScripts(self.prefix).range_page([*self._head, limit, value, job_id, *self._tail, level], now)

    def took(self, page: RangeReply) -> bool:
        """Takes note of the reply to `call`. Returns whether it was the first to tell that there are further levels."""
        is_news = page.has_levels and self._level is None
        if is_news:
            self._level = 0
        self.finished = page.finished
        if page.position is not None:
            self._position = page.position
        self.ready = page.found[::-1]
        return is_news


def bound(value: float) -> str:
    """A bound of scores as Redis takes it."""
    return {math.inf: "+inf", -math.inf: "-inf"}.get(value, repr(value))
