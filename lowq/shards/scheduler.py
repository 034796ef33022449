"""Schedulers: which shard of a queue a thread works next. The queue is chosen before: `fairness`.

A scheduler is any callable `(shards, now, ready) -> shard or None`. It is given shards of ONE queue, ordered by index,
the monotonic time in seconds, and a function that says of one of them whether this thread may work it now: it has due
work, is leased, not paused, and nobody else works it. It returns one of them that is ready, or None: what is not ready
counts as None. It never waits and reads no clock: the thread sleeps, and knows until when. Every thread has an instance
of its own for each queue, so a scheduler may keep state without a lock.

It is asked about all shards of the queue that the node holds. If it declines them though one is ready, the next queue
has its turn, and it is asked again within 0.1 s.

There may be thousands of shards, and all threads wait for the choice: ask `ready` last.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heapify, heappop
from math import inf, nextafter
from typing import Protocol, TypeAlias, TypeVar


class Due(Protocol):
    """When the oldest waiting job of a shard is due."""

    @property
    def levels(self) -> Mapping[int, float] | None:
        """Of a shard with priorities: priority -> when the oldest waiting job of it is due, as `next_due`."""
        ...

    @property
    def next_due(self) -> float | None:
        """As of `Schedulable`."""
        ...


class Schedulable(Protocol):
    """What a scheduler may ask of a shard."""

    @property
    def queue(self) -> str:
        """The name of its queue."""
        ...

    @property
    def index(self) -> int:
        """Its number in the queue, from 0."""
        ...

    @property
    def dispatch(self) -> "Due":
        """What the dispatcher knows of it."""
        ...

    @property
    def next_due(self) -> float | None:
        """Monotonic time, seconds, at which its oldest waiting job is (or was) due; None: nothing waits."""
        ...

    def priority_at(self, now: float) -> int:
        """The most urgent priority of its jobs that are due at that monotonic time: 0, the most urgent, to 9."""
        ...


T = TypeVar("T")
S = TypeVar("S", bound=Schedulable)

#: What a user's own scheduler has to be: (shards of one queue, monotonic seconds, which of them are ready) -> one of
#: them, or None. Over T, not S: with the bound in the alias, pyright refuses Scheduler[Shard] for every shard.
Scheduler: TypeAlias = Callable[[Sequence[T], float, Callable[[T], bool]], T | None]


class _Turns:
    """Which priority has the next turn, as within a shard: the most urgent, but for two of ten turns. One is the least
    urgent one's, and one that of each in turn, so none of them starves.
    """

    def __init__(self) -> None:
        self._count = 0

    def choose(self, levels: Mapping[int, object]) -> int:
        """One of the levels, of which there is one at least."""
        if len(levels) == 1:
            return next(iter(levels))
        self._count += 1
        if self._count % 10 == 0:
            return max(levels)
        if self._count % 10 == 5:
            return sorted(levels)[self._count // 10 % len(levels)]
        return min(levels)


class LagScheduler:
    """The ready shard whose oldest due job has waited longest; of equals, the first. Keeps the lag low. Of shards with
    priorities one of those with the most urgent jobs; every tenth turn is that of the least urgent ones.
    """

    def __init__(self) -> None:
        self._turns = _Turns()

    def __call__(self, shards: Sequence[S], now: float, ready: Callable[[S], bool]) -> S | None:
        longest: S | None = None
        earliest = nextafter(now, inf)  # what is due at this very moment is due
        for shard in shards:
            due = shard.dispatch.next_due  # not the property: of thousands of shards it would take twice as long
            if due is not None and due < earliest and ready(shard):
                longest, earliest = shard, due
        if longest is None or longest.dispatch.levels is None:
            return longest
        return next(self.in_turn([shard for shard in shards if ready(shard)], now), None)

    def in_turn(self, shards: Sequence[S], now: float) -> Iterator[S]:
        """Shards that are ready, one after the other as they have their turns by their priorities."""
        waiting: dict[int, list[tuple[float, int, S]]] = {}
        for position, shard in enumerate(shards):
            levels = shard.dispatch.levels
            level = urgent_level(levels, now)
            due = shard.dispatch.next_due if levels is None else levels.get(level, now)
            waiting.setdefault(level, []).append((now if due is None else due, position, shard))
        for some in waiting.values():
            heapify(some)
        while waiting:
            level = self._turns.choose(waiting)
            yield heappop(waiting[level])[2]
            if not waiting[level]:
                del waiting[level]


class SeqScheduler:
    """Round robin: the first ready shard after the one returned last, by queue and index; of shards with priorities as
    `LagScheduler` has it.
    """

    def __init__(self) -> None:
        self._last = ("", 0, -1)
        self._turns = _Turns()

    def __call__(self, shards: Sequence[S], now: float, ready: Callable[[S], bool]) -> S | None:
        shard = self._after_last(shards, ready)
        if shard is not None and shard.dispatch.levels is not None:
            levels = {one: urgent_level(one.dispatch.levels, now) for one in shards if ready(one)}
            level = self._turns.choose(dict.fromkeys(levels.values()))
            shard = self._after_last(shards, lambda one: levels.get(one) == level)
        if shard is not None:
            self._last = place(shard)
        return shard

    def _after_last(self, shards: Sequence[S], ready: Callable[[S], bool]) -> S | None:
        count = len(shards)
        start = bisect_right(shards, self._last, key=place)
        for step in range(count):
            shard = shards[(start + step) % count]
            if ready(shard):
                return shard
        return None


def one_by_one(schedule: Scheduler[S], shards: Sequence[S], now: float, ready: Callable[[S], bool]) -> Iterator[S]:
    """The shards of a queue that are ready, as a scheduler chooses them one after the other."""
    chosen: list[S] = []
    while True:
        shard = schedule(shards, now, lambda one: one not in chosen and ready(one))
        # One of the application's own may be wrong: what is not ready, or of another queue, is no choice.
        if shard is None or shard in chosen or shard.queue != shards[0].queue or not ready(shard):
            return
        chosen.append(shard)
        yield shard


def urgent_level(levels: Mapping[int, float] | None, now: float) -> int:
    """The most urgent of the levels that are due; 0 where nothing says so: whatever has come may be urgent."""
    return 0 if levels is None else min((level for level, due in levels.items() if due <= now), default=0)


def place(shard: Schedulable) -> tuple[str, int, int]:
    """By what shards are ordered. While a queue is resharded it has shards of two epochs."""
    return shard.queue, getattr(shard, "epoch", 0), shard.index
