"""Pages of ids: a queue's sorted sets, merged over all shards, in order, without ever holding a queue.

Two ways lead to a page. A *walk* follows a sorted set in its own order, from the position after which the last page
ended: each call finds it by binary search, however many ids share its score, and whether or not its id is still
there. A *scan* looks at all ids in no order and keeps the best ones: for patterns, for the order by id, and for
what no set is sorted by. Both go in calls that look at about 1,000 ids of one shard, fewer for a dear pattern.

Order is always by (value, id), ids compared as bytes.
"""

import base64
import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lowq.errors import ConfigError
from lowq.inspection.calls import SCANS_TOGETHER, TOGETHER, Scan, ask, read_stats
from lowq.inspection.job_filter import JobFilter
from lowq.job import Job
from lowq.store import Call, Client
from lowq.store.scripts import time_argument
from lowq.store.shard import ShardScripts
from lowq.store.shard_replies import Position, RangePage

#: Most jobs of a page.
MAX_LIMIT = 1000
#: The priorities besides 0, which most queues only have.
FURTHER_LEVELS = range(1, 10)
#: Above this many shards a walk asks each for a few ids only. Then more calls go out together, unless each of them may
#: have to look at 1,000 ids to find those few.
MANY_SHARDS, MANY_TOGETHER = 100, 64


@dataclass(frozen=True, slots=True)
class Page:
    """Some jobs of a queue, in order."""

    #: May be fewer than asked for, even none, before the end: jobs move while one looks.
    jobs: list[Job]
    #: Give it as ``after`` for the next page; None: this was the last.
    cursor: str | None
    #: How many jobs were looked at, where the filter asks what is in them.
    looked: int | None = None

    def __iter__(self) -> Iterator[Job]:
        return iter(self.jobs)

    def __len__(self) -> int:
        return len(self.jobs)


def check_limit(limit: object) -> int:
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_LIMIT:
        raise ConfigError(f"limit={limit!r}: a page holds 1 to {MAX_LIMIT} jobs")
    return limit


# --- cursors -------------------------------------------------------------------------------------------------


def encode_cursor(wanted: JobFilter, position: Position) -> str:
    """A position as text that people carry from page to page."""
    head = f"{order_kind(wanted)}{position[0]!r} ".encode()
    return base64.urlsafe_b64encode(head + position[1]).decode().rstrip("=")


def decode_cursor(wanted: JobFilter, cursor: str) -> Position:
    """The counterpart of `encode_cursor`.

    Raises:
        ConfigError: it is no cursor, or one of a page in another order.
    """
    try:
        data = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        head, _, job_id = data.partition(b" ")
        kind, value = head[:2].decode(), float(head[2:])
        if not job_id or math.isnan(value):
            raise ValueError
    except (ValueError, TypeError):
        raise ConfigError(f"after={cursor!r:.100} is no cursor; give the one that came with a page") from None
    if kind != order_kind(wanted):
        raise ConfigError(
            "after: the cursor is of a page in another order; order_by and reverse must be the same for all pages"
        )
    return value, job_id


def order_kind(wanted: JobFilter) -> str:
    """What a cursor says of its order."""
    return f"{wanted.order[0]}{'-' if wanted.reverse else '+'}"


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
