"""The bounded walk: positions of jobs in the sets of many shards, in bounded calls.

A *walk* follows a sorted set in its own order, from the position where it ended before: each call finds that by binary
search, however many ids share its score, and whether or not its id is still there. A *scan* looks at all ids in no
order: for patterns, for the order by id, and for values that no set is sorted by. Both make calls that look at about
1,000 ids of one shard, fewer for an expensive pattern. A few calls go out together, and other clients of Redis come in
between.

A *search* merges them over many shards: the first places in the order of all jobs of some queues.
"""

import heapq
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from lowq.errors import RedisUnavailable, ScriptError
from lowq.operate.job_filter import JobFilter, encode_pattern, ids_per_call
from lowq.store import Call, Client, Command, untrusted
from lowq.store.calls import R_co, time_argument
from lowq.store.shard_operations import ExamineReply, Position, RangeReply, ScanReply, ShardOperations, StatsReply

#: Calls that go out together. Redis carries out one client's write in one piece, so it must be short as a whole: a walk
#: takes well under a millisecond, a scan two or three, statistics some 20 microseconds a shard, a command that reads
#: some fields less.
TOGETHER = 8
SCANS_TOGETHER = 3
STATS_TOGETHER = COMMANDS_TOGETHER = 200
#: Calls that go out together at most where each does little.
MANY_TOGETHER = 64
#: The priorities besides 0.
FURTHER_LEVELS = range(1, 10)


# --- calls to many shards ---


def answers(client: Client, calls: Sequence[Call[R_co]], together: int = TOGETHER) -> Iterator[R_co | Exception]:
    """The named reply of each call, or its error. A few calls are sent at a time."""
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


#: Calls without an answer, by their place among all: a primary of a cluster is away, and others answer.
Silent = dict[int, RedisUnavailable]


def ask_some(
    client: Client, calls: Sequence[Call[R_co]], together: int, silent: Silent | None
) -> Iterator[R_co | None]:
    """As `ask`. On a cluster, a call whose primary does not answer is entered in ``silent`` and yields None; without
    ``silent`` it is an error.

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
    """The figures of these shards.

    Raises:
        RedisUnavailable, RedisRefused, ScriptError
    """
    return list(ask(client, [ShardOperations(prefix).stats(now) for prefix in prefixes], STATS_TOGETHER))


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def gather(items: Iterable[tuple[K, V]], size: int, most: int) -> Iterator[list[tuple[K, list[V]]]]:
    """The values by their keys: a group once it has ``size`` values, and all groups when they have ``most`` together:
    with many shards, a call for a few ids of each would be slow.
    """
    groups: defaultdict[K, list[V]] = defaultdict(list)
    count = 0
    for key, value in items:
        group = groups[key]
        group.append(value)
        count += 1
        if len(group) == size:
            yield [(key, groups.pop(key))]
            count -= size
        elif count >= most:
            yield list(groups.items())
            groups.clear()
            count = 0
    yield list(groups.items())


# --- scans ---


S = TypeVar("S", bound=Hashable)
C = TypeVar("C", ScanReply, ExamineReply)


def scan_shards(
    client: Client, shards: Mapping[S, float], call: Callable[[S, bytes], Call[C]]
) -> Iterator[tuple[S, C]]:
    """Goes through a set of each of these shards, from the first shard to the last, a few at a time. ``shards``: with
    the part of a whole call that each takes, up to 1. ``call``: the call for the ids behind a cursor; b"0" begins.
    """
    cursors = dict.fromkeys(shards, b"0")
    while cursors:
        some: list[S] = []
        room = float(SCANS_TOGETHER)
        for shard in cursors:
            room -= shards[shard]
            if some and (room < 0 or len(some) == MANY_TOGETHER):
                break
            some.append(shard)
        calls = [call(shard, cursors[shard]) for shard in some]
        for shard, reply in zip(some, list(ask(client, calls, len(calls))), strict=True):
            if reply.cursor is None:
                del cursors[shard]
            else:
                cursors[shard] = reply.cursor
            yield shard, reply


class Scan(NamedTuple):
    """A scan of a set: its filter, and the value wanted of each id."""

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

    def shards(self, client: Client, prefixes: Iterable[str], now: str) -> Iterator[tuple[str, ScanReply]]:
        """Goes through the set of these shards, but for those in which it is empty."""
        some = list(dict.fromkeys(prefixes))
        size = "HLEN" if self.base == "taken" else "ZCARD"
        sizes = ask(client, [Command(prefix, size, prefix + self.base) for prefix in some], COMMANDS_TOGETHER)
        most = ids_per_call(self.pattern)
        parts = {prefix: min(number / most, 1.0) for prefix, number in zip(some, sizes, strict=True) if number}
        return scan_shards(client, parts, lambda prefix, cursor: self.call(prefix, cursor, now))

    def call(self, prefix: str, cursor: bytes, now: str) -> Call[ScanReply]:
        """The call for the next ids of a shard. It looks at about 1,000, fewer for an expensive pattern."""
        wanted = [encode_pattern(self.pattern), self.order.encode(), self.when.encode(), self.past.encode()]
        return ShardOperations(prefix).scan(self.base, cursor, wanted, ids_per_call(self.pattern), now)


# --- walks ---


class Walk:
    """The walk of one shard's set between two bounds, in the form that Redis takes them."""

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
        #: None: the walk of a whole set, or of one that is not known yet to have priorities.
        self._level = level
        self.finished = False
        #: Positions that came and are not used yet, the next one last.
        self.ready: list[Position] = []
        self._position: tuple[str | bytes, bytes] = ("", b"") if after is None else (bound(after[0]), after[1])
        self._head = [base, low, high, "1" if reverse else ""]
        self._tail: list[str | bytes] = [when, past, clock]

    def call(self, limit: int, now: str) -> Call[RangeReply]:
        value, job_id = self._position
        level = "" if self._level is None else self._level
        return ShardOperations(self.prefix).range_page([*self._head, limit, value, job_id, *self._tail, level], now)

    def note_page(self, page: RangeReply) -> bool:
        """Notes the reply to `call`. Returns whether it is the first one by which the set has further levels."""
        if self._level and not page.has_levels:  # nothing there has a priority, so all of it is of level 0
            self.finished, self.ready = True, []
            return False
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


# --- searches ---

#: Above this many shards a search asks each for a few ids only. Then more calls go out together, unless each may have
#: to look at 1,000 ids to find those few.
MANY_SHARDS = 100
#: Ids that calls of a walk which go out together answer with.
IDS_TOGETHER = 2000

#: The place of a job in the order of all: value, such as a time, then queue, then id, compared as bytes.
JobPlace = tuple[float, str, bytes]


def position_in(queue: str, place: JobPlace) -> Position:
    """The position within a queue of a place in the order of all. With the same value, queues come in the order of
    their names.
    """
    value, name, job_id = place
    if queue == name:
        return value, job_id
    # Before all ids with this value, or behind them.
    return (value if queue > name else math.nextafter(value, math.inf)), b""


#: Places that are certain, and the best that are known besides: others may come before these.
Progress = tuple[list[JobPlace], list[JobPlace]]


@dataclass
class Search:
    """The first places after one, over all shards."""

    client: Client
    #: Prefix of a shard -> its queue.
    queues: dict[str, str]
    wanted: JobFilter
    count: int
    after: JobPlace | None = None
    now: float | None = None
    #: A queue with a key of the wrong type is left out, and the log says so.
    is_lenient: bool = False

    def find(self) -> Iterator[list[JobPlace]]:
        """The places found so far, after each call or so, valid until the next; the last ones are the result."""
        found: list[JobPlace] = []
        count = self.count
        for certain, likely in self.steps():
            found += certain
            yield [*found, *likely][:count]
        yield found

    def steps(self) -> Iterator[Progress]:
        """The places in order, those found since the last step. No shard is asked again that has no more."""
        while True:
            try:
                for certain, likely in self._steps():
                    if certain:
                        self.after = certain[-1]
                        self.count -= len(certain)
                    yield certain, likely
                return
            except ScriptError as error:
                faulty = self.queues.get(error.key or "") if self.is_lenient else None
                if faulty is None:
                    raise
                untrusted.log_skipped("queue", faulty, str(error))
                self.queues = {prefix: queue for prefix, queue in self.queues.items() if queue != faulty}

    def _steps(self) -> Iterator[Progress]:
        wanted = self.wanted
        base = {"morgue": "morgue", "retrying": "retries", "taken": "taken"}.get(wanted.state or "", "due")
        if wanted.scanned:
            yield from self._scan(base, wanted.past)
        elif wanted.order == "retry_count":
            yield from self._by_retry_count()
        elif base == "retries" and self._few_fail():
            yield from self._scan(base, wanted.past)
        else:
            yield from self._walk("due" if base == "retries" else base)

    def _few_fail(self) -> bool:
        """Whether a scan of all failed jobs is shorter than a walk through all scheduled ones."""
        stats = read_stats(self.client, list(self.queues), self.now)
        return sum(item.retries for item in stats) * 4 < sum(item.length - item.due for item in stats)

    def _by_retry_count(self) -> Iterator[Progress]:
        """Failed jobs are sorted by it already; fresh ones all have -1, and are ordered by their ids."""
        wanted, after = self.wanted, self.after
        fresh = wanted.past != "failed" and wanted.low <= -1 <= wanted.high
        failed = wanted.past != "fresh"
        if after is not None:  # beyond the first of the two parts already?
            if wanted.reverse:
                failed = failed and after[0] > -1
            else:
                fresh = fresh and after[0] <= -1
        for is_fresh in (False, True) if wanted.reverse else (True, False):
            if self.count > 0 and (fresh if is_fresh else failed):
                yield from self._scan("due", "fresh") if is_fresh else self._walk("retries")

    # --- scans ---

    def _scan(self, base: str, past: str) -> Iterator[Progress]:
        """The best places among the ids that were looked at so far, and at last among all. No more are kept than are
        wanted.
        """
        wanted = self.wanted
        best: list[JobPlace] = []
        scan = Scan(base, wanted.pattern, wanted.order, wanted.when, past)
        for prefix, scanned in scan.shards(self.client, self.queues, time_argument(self.now)):
            self._keep_best(best, self.queues[prefix], scanned.found)
            yield [], best[::-1] if wanted.reverse else best
        yield best[::-1] if wanted.reverse else best, []

    def _keep_best(self, best: list[JobPlace], queue: str, found: Sequence[Position]) -> None:
        wanted, after = self.wanted, self.after
        # Most of a million are worse than the worst of the best: these are dropped first, and cheaply.
        if len(best) == self.count:
            worst = position_in(queue, best[0 if wanted.reverse else -1])
            found = [item for item in found if (item > worst if wanted.reverse else item < worst)]
        if after is not None:
            begin = position_in(queue, after)
            found = [item for item in found if (item < begin if wanted.reverse else item > begin)]
        for value, job_id in found:
            if not wanted.holds(value, job_id):
                continue
            place = value, queue, job_id
            index = bisect_left(best, place)
            if best[index : index + 1] == [place]:  # a scan may come across an id twice
                continue
            best.insert(index, place)
            if len(best) > self.count:
                best.pop(0 if wanted.reverse else -1)

    # --- walks ---

    def _walk(self, base: str) -> Iterator[Progress]:
        """Merges the walks of all shards; a shard is asked for more when its positions are used up."""
        wanted, left = self.wanted, self.count
        # With many shards a page needs little of each, and the replies of all together must stay small.
        many = len(self.queues) > MANY_SHARDS
        # Each call may have to look at 1,000 ids to find a few.
        skips = base == "retries" or bool(wanted.past)
        together = MANY_TOGETHER if many and not skips else TOGETHER
        batch = max(min(left, 2 * left // max(len(self.queues), 1)), 4 if many else 16)
        batch = min(batch, IDS_TOGETHER // together)
        walks = [self._walk_of(prefix, base, wanted.priority) for prefix in self.queues]
        heads: list[_Head] = []
        used_up = walks[:]
        while used_up and left:
            for _ in self._refill(walks, used_up, heads, batch, together):
                if skips:
                    yield [], self._known(walks, left)
            used_up = []
            certain: list[JobPlace] = []
            while heads and not used_up and len(certain) < left:
                head = heapq.heappop(heads)
                certain.append(head.place)
                walk = head.walk
                walk.ready.pop()
                if walk.ready:
                    heapq.heappush(heads, self._head(walk))
                elif not walk.finished:
                    used_up.append(walk)
            left -= len(certain)
            yield certain, []

    def _walk_of(self, prefix: str, base: str, level: int | None) -> Walk:
        wanted = self.wanted
        after = None if self.after is None else position_in(self.queues[prefix], self.after)
        return Walk(
            prefix, base, bound(wanted.low), bound(wanted.high), reverse=wanted.reverse, when=wanted.when,
            past=wanted.past, after=after, level=level,
        )  # fmt: skip

    def _head(self, walk: Walk) -> "_Head":
        value, job_id = walk.ready[-1]
        return _Head((value, self.queues[walk.prefix], job_id), walk, self.wanted.reverse)

    def _refill(
        self, walks: list[Walk], used_up: list[Walk], heads: "list[_Head]", batch: int, together: int
    ) -> Iterator[None]:
        """Asks the shards of these walks until each has a position ready, which goes into ``heads``, or has ended.
        Yields after each round trip.
        """
        while used_up:
            asked, used_up = used_up, []
            for start in range(0, len(asked), together):
                some = asked[start : start + together]
                calls = [walk.call(batch, time_argument(self.now)) for walk in some]
                for walk, reply in zip(some, ask(self.client, calls, together), strict=True):
                    if walk.note_page(reply):
                        # Each further priority is a walk of its own, with the same positions.
                        others = [self._walk_of(walk.prefix, walk.base, level) for level in FURTHER_LEVELS]
                        used_up += others
                        walks += others
                    if walk.ready:
                        heapq.heappush(heads, self._head(walk))
                    elif not walk.finished:
                        used_up.append(walk)
                yield

    def _known(self, walks: list[Walk], count: int) -> list[JobPlace]:
        """The best places that are known."""
        known = ((value, self.queues[walk.prefix], job_id) for walk in walks for value, job_id in walk.ready)
        return sorted(known, reverse=self.wanted.reverse)[:count]


class _Head:
    """The next place of a walk. The best is the least, forwards or backwards."""

    __slots__ = ("place", "reverse", "walk")

    def __init__(self, place: JobPlace, walk: Walk, reverse: bool) -> None:
        self.place = place
        self.walk = walk
        self.reverse = reverse

    def __lt__(self, other: "_Head") -> bool:
        return other.place < self.place if self.reverse else self.place < other.place
