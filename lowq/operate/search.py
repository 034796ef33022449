"""A search: the first places in the order of all jobs of some queues, merged from walks and scans of their shards.

The order is by value, such as a time, then by queue, then by id, compared as bytes.
"""

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

from lowq.errors import ScriptError
from lowq.operate.job_filter import JobFilter
from lowq.operate.walk import FURTHER_LEVELS, STATS_TOGETHER, TOGETHER, Scan, Walk, answers, bound, scan_shards
from lowq.store import Call, Client, untrusted
from lowq.store.calls import R_co
from lowq.store.scripts import time_argument
from lowq.store.shard import ShardScripts
from lowq.store.shard_replies import Position

#: Above this many shards a walk asks each for a few ids only. Then more calls go out together, unless each of them may
#: have to look at 1,000 ids to find those few.
MANY_SHARDS, MANY_TOGETHER = 100, 64

#: Where a job is in the order of all: value, queue, id.
Place = tuple[float, str, bytes]


def position_in(queue: str, place: Place) -> Position:
    """The position within a queue that a place of any queue is at: with the same value, queues come in the order of
    their names.
    """
    value, name, job_id = place
    if queue == name:
        return value, job_id
    # Before all ids with this value, or behind them.
    return (value if queue > name else math.nextafter(value, math.inf)), b""


class _FaultyQueue(Exception):
    """A key of the queue has a type that it must not have."""


class Search:
    """The first places after one, over all shards. ``prefixes``: queue -> its shards. ``is_lenient``: a queue with a
    key of the wrong type is left out, and the log says so. ``is_watched``: intermediate results are wanted.
    """

    def __init__(
        self,
        client: Client,
        prefixes: Mapping[str, Sequence[str]],
        wanted: JobFilter,
        count: int,
        after: Place | None,
        now: float | None,
        *,
        is_lenient: bool = False,
        is_watched: bool = False,
    ) -> None:
        self._client = client
        #: Prefix -> queue.
        self._queues = {prefix: queue for queue, some in prefixes.items() for prefix in some}
        self._wanted = wanted
        self._count = count
        self._after = after
        self._now = now
        self._is_lenient = is_lenient
        self._is_watched = is_watched

    def find(self) -> Iterator[list[Place]]:
        """What is found so far, after each call or so: valid until the next. The last one is the result."""
        while True:
            try:
                yield from self._find()
                return
            except _FaultyQueue as fault:
                (name,) = fault.args
                untrusted.log_skipped("queue", name, str(fault.__cause__))
                self._queues = {prefix: queue for prefix, queue in self._queues.items() if queue != name}

    def _find(self) -> Iterator[list[Place]]:
        wanted = self._wanted
        base = {"morgue": "morgue", "retrying": "retries", "taken": "taken"}.get(wanted.state or "", "due")
        if wanted.scanned:
            yield from self._scan(base, wanted.past)
        elif wanted.order == "retry_count":
            yield from self._by_retry_count()
        elif base == "retries" and self._few_fail():
            yield from self._scan(base, wanted.past)
        else:
            yield from self._walk("due" if base == "retries" else base)

    def _ask(self, prefixes: Sequence[str], calls: Sequence[Call[R_co]], together: int = TOGETHER) -> Iterator[R_co]:
        """The replies of these shards."""
        for prefix, answer in zip(prefixes, answers(self._client, calls, together), strict=True):
            if isinstance(answer, ScriptError) and self._is_lenient:
                raise _FaultyQueue(self._queues[prefix]) from answer
            if isinstance(answer, Exception):
                raise answer
            yield answer

    def _few_fail(self) -> bool:
        """Whether all failed jobs are looked through sooner than those among all scheduled ones are found."""
        calls = [ShardScripts(prefix).stats(self._now) for prefix in self._queues]
        stats = list(self._ask(list(self._queues), calls, STATS_TOGETHER))
        return sum(item.retries for item in stats) * 4 < sum(item.length - item.due for item in stats)

    def _by_retry_count(self) -> Iterator[list[Place]]:
        """Jobs that failed are sorted by it already; fresh ones all have -1, and only their ids order them."""
        wanted, after = self._wanted, self._after
        fresh = wanted.past != "failed" and wanted.low <= -1 <= wanted.high
        failed = wanted.past != "fresh"
        if after is not None:  # beyond the first of the two parts already?
            if wanted.reverse:
                failed = failed and after[0] > -1
            else:
                fresh = fresh and after[0] <= -1
        parts: list[Iterator[list[Place]]] = []
        if fresh:
            parts.append(self._scan("due", "fresh"))
        if failed:
            parts.append(self._walk("retries"))
        if wanted.reverse:
            parts.reverse()
        found: list[Place] = []
        for part in parts:
            if len(found) < self._count:
                some: list[Place] = []
                for some in part:
                    yield [*found, *some][: self._count]
                found += some
        yield found[: self._count]

    # --- scans ---

    def _scan(self, base: str, past: str) -> Iterator[list[Place]]:
        """The best places among the ids that were looked at so far, and at last among all. Never more of them are kept
        than are wanted.
        """
        wanted, now = self._wanted, time_argument(self._now)
        best: list[Place] = []
        scan = Scan(base, wanted.pattern, wanted.order, wanted.when, past)
        for prefix, scanned in scan_shards(self._ask, self._queues, lambda prefix, at: scan.call(prefix, at, now)):
            self._keep_best(best, self._queues[prefix], scanned.found)
            yield best[::-1] if wanted.reverse else best[:]
        yield best[::-1] if wanted.reverse else best

    def _keep_best(self, best: list[Place], queue: str, found: Sequence[Position]) -> None:
        wanted, after = self._wanted, self._after
        # Most of a million are worse than the worst of the best: they are sorted out first, and cheaply.
        if len(best) == self._count:
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
            if len(best) > self._count:
                best.pop(0 if wanted.reverse else -1)

    # --- walks ---

    def _walk(self, base: str) -> Iterator[list[Place]]:
        """Merges the walks of all shards; a shard is asked for more when what it gave is used up."""
        wanted, count = self._wanted, self._count
        # With many shards a page needs little of each: what is read of all of them together must stay small.
        many = len(self._queues) > MANY_SHARDS
        batch = max(min(count, 2 * count // max(len(self._queues), 1)), 4 if many else 16)
        # Each of its calls may have to look at 1,000 ids to find those few.
        skips = base == "retries" or bool(wanted.past)
        together = MANY_TOGETHER if many and not skips else TOGETHER
        walks = [self._walk_of(prefix, base, None) for prefix in self._queues]
        heads: list[_Head] = []
        found: list[Place] = []
        hungry = walks[:]
        while True:
            for _ in self._feed(walks, hungry, heads, batch, together):
                if self._is_watched and skips:
                    yield self._so_far(found, walks)
            if not heads or len(found) == count:
                yield found
                return
            head = heapq.heappop(heads)
            found.append(head.place)
            walk = head.walk
            walk.ready.pop()
            hungry = [walk] if not walk.ready and not walk.finished else []
            if walk.ready:
                heapq.heappush(heads, self._head(walk))

    def _walk_of(self, prefix: str, base: str, level: int | None) -> Walk:
        wanted = self._wanted
        after = None if self._after is None else position_in(self._queues[prefix], self._after)
        return Walk(
            prefix, base, bound(wanted.low), bound(wanted.high), reverse=wanted.reverse, when=wanted.when,
            past=wanted.past, after=after, level=level,
        )  # fmt: skip

    def _head(self, walk: Walk) -> "_Head":
        value, job_id = walk.ready[-1]
        return _Head((value, self._queues[walk.prefix], job_id), walk, self._wanted.reverse)

    def _feed(
        self, walks: list[Walk], hungry: list[Walk], heads: "list[_Head]", batch: int, together: int
    ) -> Iterator[None]:
        """Asks the shards of these walks until each has something ready, which goes into ``heads``, or is at its end.
        Yields after each round trip.
        """
        while hungry:
            asked, hungry = hungry, []
            for start in range(0, len(asked), together):
                some = asked[start : start + together]
                calls = [walk.call(batch, time_argument(self._now)) for walk in some]
                for walk, reply in zip(some, self._ask([walk.prefix for walk in some], calls, together), strict=True):
                    if walk.took(reply):
                        # Each further priority is a walk of its own, with the same positions.
                        others = [self._walk_of(walk.prefix, walk.base, level) for level in FURTHER_LEVELS]
                        hungry += others
                        walks += others
                    if walk.ready:
                        heapq.heappush(heads, self._head(walk))
                    elif not walk.finished:
                        hungry.append(walk)
                yield

    def _so_far(self, found: list[Place], walks: list[Walk]) -> list[Place]:
        """Those that are certain, and the best of those that are known: others may come before these."""
        known = sorted(
            ((value, self._queues[walk.prefix], job_id) for walk in walks for value, job_id in walk.ready),
            reverse=self._wanted.reverse,
        )
        return [*found, *known[: self._count - len(found)]]


class _Head:
    """The next place of a walk; forwards or backwards, the best is the least."""

    __slots__ = ("place", "reverse", "walk")

    def __init__(self, place: Place, walk: Walk, reverse: bool) -> None:
        self.place = place
        self.walk = walk
        self.reverse = reverse

    def __lt__(self, other: "_Head") -> bool:
        return other.place < self.place if self.reverse else self.place < other.place
