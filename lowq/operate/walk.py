"""Pages of ids: a queue's sorted sets, merged over all shards, in order, without ever holding a queue.

Two ways lead to a page. A *walk* follows a sorted set in its own order, from the position after which the last page
ended: each call finds it by binary search, however many ids share its score, and whether or not its id is still
there. A *scan* looks at all ids in no order and keeps the best ones: for patterns, for the order by id, and for
what no set is sorted by. Both go in calls that look at about 1,000 ids of one shard, fewer for a dear pattern.

Order is always by (value, id), ids compared as bytes.
"""

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from lowq.errors import RedisUnavailable
from lowq.operate.job_filter import JobFilter, encode_pattern, ids_per_call
from lowq.store import Call, Client
from lowq.store.call import R_co
from lowq.store.scripts import time_argument
from lowq.store.shard import ShardScripts
from lowq.store.shard_replies import Position, RangePage, ScanReply, ShardStats

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


#: The priorities besides 0, which most queues only have.
FURTHER_LEVELS = range(1, 10)


#: Above this many shards a walk asks each for a few ids only. Then more calls go out together, unless each of them may
#: have to look at 1,000 ids to find those few.
MANY_SHARDS, MANY_TOGETHER = 100, 64


# --- a page --------------------------------------------------------------------------------------------------


def find_page(
    client: Client,
    prefixes: Sequence[str],
    wanted: JobFilter,
    limit: int,
    after: Position | None,
    now: float | None,
) -> tuple[list[Position], bool]:
    """The next ``limit`` positions after one, over all shards, and whether there are more."""
    finder = _Finder(client, prefixes, wanted, limit + 1, after, now)
    found = deque(finder.find(), 1).pop()
    return found[:limit], len(found) > limit


def find_page_in_steps(
    client: Client,
    prefixes: Sequence[str],
    wanted: JobFilter,
    limit: int,
    after: Position | None,
    now: float | None,
) -> Iterator[tuple[list[Position], bool]]:
    """As `find_page`, for those who want to see how it gets on: after each call or so the best positions so far, none
    perhaps, and whether there are more. The last ones are the page.
    """
    finder = _Finder(client, prefixes, wanted, limit + 1, after, now, watched=True)
    for found in finder.find():
        yield found[:limit], len(found) > limit


class _Finder:
    def __init__(
        self,
        client: Client,
        prefixes: Sequence[str],
        wanted: JobFilter,
        count: int,
        after: Position | None,
        now: float | None,
        *,
        watched: bool = False,
    ) -> None:
        self._client = client
        self._prefixes = prefixes
        self._wanted = wanted
        self._count = count
        self._after = after
        self._now = now
        #: Somebody looks at what is found so far.
        self._watched = watched

    def find(self) -> Iterator[list[Position]]:
        """What is found so far, after each call or so: valid until the next. The last one is the result."""
        wanted, base = self._wanted, self._base
        scanned = self._scanned()
        if scanned is not None:
            yield from self._scan(scanned, wanted.past)
        elif wanted.order == "retry_count":
            yield from self._by_retry_count()
        elif base == "retries" and self._few_fail():
            yield from self._scan(base, wanted.past)
        else:
            yield from self._walk("due" if base == "retries" else base, self._count)

    def _scanned(self) -> str | None:
        """The set whose every id must be looked at, if so."""
        wanted = self._wanted
        if wanted.state == "taken":
            return "taken"
        return self._base if wanted.pattern or wanted.order == "id" else None

    @property
    def _base(self) -> str:
        state = self._wanted.state
        return "morgue" if state == "morgue" else "retries" if state == "retrying" else "due"

    def _few_fail(self) -> bool:
        """Whether all failed jobs are looked through sooner than those among all scheduled ones are found."""
        figures = read_stats(self._client, self._prefixes, self._now)
        later = sum(item.length - item.due for item in figures)
        failed = sum(item.retries for item in figures)
        return failed * 4 < later

    def _by_retry_count(self) -> Iterator[list[Position]]:
        """Jobs that failed are sorted by it already; fresh ones all have -1, and only their ids order them."""
        wanted, after = self._wanted, self._after
        fresh = wanted.past != "failed" and wanted.low <= -1 <= wanted.high
        failed = wanted.past != "fresh"
        if after is not None:  # beyond the first of the two parts already?
            if wanted.reverse:
                failed = failed and after[0] > -1
            else:
                fresh = fresh and after[0] <= -1
        parts: list[Iterator[list[Position]]] = []
        if fresh:
            parts.append(self._scan("due", "fresh"))
        if failed:
            parts.append(self._walk("retries", self._count))
        if wanted.reverse:
            parts.reverse()
        found: list[Position] = []
        for part in parts:
            if len(found) < self._count:
                some: list[Position] = []
                for some in part:
                    yield [*found, *some][: self._count]
                found += some
        yield found[: self._count]

    def _scan(self, base: str, past: str) -> Iterator[list[Position]]:
        """The best positions among the ids that were looked at so far, and at last among all. Never more of them are
        kept than are wanted.
        """
        wanted, after = self._wanted, self._after
        best: list[Position] = []
        scan = Scan(base, wanted.pattern, wanted.order, wanted.when, past)
        cursors = dict.fromkeys(self._prefixes, b"0")
        while cursors:
            some = list(cursors)[:SCANS_TOGETHER]
            calls = [scan.call(prefix, cursors[prefix], time_argument(self._now)) for prefix in some]
            for prefix, scanned in zip(some, ask(self._client, calls), strict=True):
                if scanned.cursor is None:
                    del cursors[prefix]
                else:
                    cursors[prefix] = scanned.cursor
                self._keep_best(best, scanned.found, after)
            yield best[::-1] if wanted.reverse else best[:]

    def _keep_best(self, best: list[Position], found: Iterable[Position], after: Position | None) -> None:
        wanted, count = self._wanted, self._count
        # Most of a million are worse than the worst of the best: they are sorted out first, and cheaply.
        if len(best) == count:
            worst = best[0] if wanted.reverse else best[-1]
            found = [item for item in found if (item > worst if wanted.reverse else item < worst)]
        if after is not None:
            found = [item for item in found if (item < after if wanted.reverse else item > after)]
        for position in found:
            if not wanted.holds(*position):
                continue
            place = bisect_left(best, position)
            if best[place : place + 1] == [position]:  # a scan may come across an id twice
                continue
            best.insert(place, position)
            if len(best) > count:
                best.pop(0 if wanted.reverse else -1)

    def _walk(self, base: str, count: int) -> Iterator[list[Position]]:
        """Merges the walks of all shards; a shard is asked for more when what it gave is used up."""
        wanted = self._wanted
        # With many shards a page needs little of each: what is read of all of them together must stay small.
        many = len(self._prefixes) > MANY_SHARDS
        batch = max(min(count, 2 * count // len(self._prefixes)), 4 if many else 16)
        # Each of its calls may have to look at 1,000 ids to find those few.
        skips = base == "retries" or bool(wanted.past)
        together = MANY_TOGETHER if many and not skips else TOGETHER
        walks = [self._walk_of(prefix, base, None) for prefix in self._prefixes]
        heads: list[tuple[_Key, int]] = []
        found: list[Position] = []
        hungry = list(range(len(walks)))
        while True:
            for _ in self._feed(walks, hungry, heads, batch, together):
                if self._watched and skips:
                    yield self._so_far(found, walks)
            if not heads or len(found) == count:
                yield found
                return
            _, i = heapq.heappop(heads)
            found.append(walks[i].ready.pop())
            hungry = [i] if not walks[i].ready and not walks[i].finished else []
            if walks[i].ready:
                heapq.heappush(heads, (_Key(walks[i].ready[-1], wanted.reverse), i))

    def _walk_of(self, prefix: str, base: str, level: int | None) -> "Walk":
        wanted = self._wanted
        return Walk(
            prefix,
            base,
            bound(wanted.low),
            bound(wanted.high),
            reverse=wanted.reverse,
            when=wanted.when,
            past=wanted.past,
            after=self._after,
            level=level,
        )

    def _feed(
        self, walks: "list[Walk]", hungry: list[int], heads: "list[tuple[_Key, int]]", batch: int, together: int
    ) -> Iterator[None]:
        """Asks the shards of these walks until each has something ready, which goes into ``heads``, or is at its end.
        Yields after each round trip.
        """
        while hungry:
            asked, start = list(hungry), 0
            while start < len(asked):
                some = asked[start : start + together]
                start += together
                calls = [walks[i].call(batch, time_argument(self._now)) for i in some]
                for i, reply in zip(some, ask(self._client, calls, together), strict=True):
                    if walks[i].took(reply):
                        # Each further priority is a walk of its own, with the same positions.
                        others = [self._walk_of(walks[i].prefix, walks[i].base, level) for level in FURTHER_LEVELS]
                        hungry += range(len(walks), len(walks) + len(others))
                        walks += others
                    if walks[i].ready:
                        heapq.heappush(heads, (_Key(walks[i].ready[-1], self._wanted.reverse), i))
                yield
            hungry = [i for i in hungry if not walks[i].ready and not walks[i].finished]

    def _so_far(self, found: list[Position], walks: "list[Walk]") -> list[Position]:
        """Those that are certain, and the best of those that are known: others may come before these."""
        known = sorted((position for walk in walks for position in walk.ready), reverse=self._wanted.reverse)
        return [*found, *known[: self._count - len(found)]]


class _Key:
    """Orders positions forwards or backwards."""

    __slots__ = ("position", "reverse")

    def __init__(self, position: Position, reverse: bool) -> None:
        self.position = position
        self.reverse = reverse

    def __lt__(self, other: "_Key") -> bool:
        if self.reverse:
            return other.position < self.position
        return self.position < other.position


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

    def call(self, limit: int, now: str) -> Call[RangePage]:
        value, job_id = self._position
        level = "" if self._level is None else self._level
        return ShardScripts(self.prefix).range_page([*self._head, limit, value, job_id, *self._tail, level], now)

    def took(self, page: RangePage) -> bool:
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
