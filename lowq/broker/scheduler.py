"""Schedulers: which of its shards a thread works next.

A scheduler is any callable `(shards, now) -> shard or None`. It is given the shards of ONE thread, in a
stable order, and the monotonic time in seconds; it returns the shard to work next, or None when nothing is
ready. It never waits and reads no clock: the thread sleeps, and knows until when. Every thread has an
instance of its own, so a scheduler may keep state without a lock.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, TypeVar


class Schedulable(Protocol):
    """What a scheduler sees of a shard. Other threads may change it between two looks."""

    @property
    def next_due(self) -> float | None:
        """Monotonic time, seconds, at which the oldest waiting job is (or was) due; None: nothing waits."""
        ...

    def ready(self, now: float) -> bool:
        """May be worked at `now`: has due work, is leased, not paused, not claimed by another thread."""
        ...


T = TypeVar("T")
S = TypeVar("S", bound=Schedulable)

#: What a user's own scheduler has to be: (shards of one thread, monotonic seconds) -> shard to work, or None.
#: Over T, not S: with the bound in the alias, pyright refuses Scheduler[Shard] for every shard.
Scheduler: TypeAlias = Callable[[Sequence[T], float], T | None]


class LagScheduler:
    """The ready shard whose oldest due job has waited longest; of equals, the first. Keeps the lag low."""

    def __call__(self, shards: Sequence[S], now: float) -> S | None:
        longest: S | None = None
        earliest = float("inf")
        for shard in shards:
            due = shard.next_due  # read once: a wake-up may change it meanwhile
            # The comparison first: it costs less than ready(), and most of thousands of shards fail it.
            if due is not None and due < earliest and shard.ready(now):
                longest, earliest = shard, due
        return longest


class SeqScheduler:
    """Round robin: the first ready shard after the one returned last; None only after a full round."""

    def __init__(self) -> None:
        self._last: object | None = None
        self._position = 0

    def __call__(self, shards: Sequence[S], now: float) -> S | None:
        count = len(shards)
        start = self._start(shards)
        for step in range(count):
            position = (start + step) % count
            if shards[position].ready(now):
                self._last, self._position = shards[position], position
                return shards[position]
        return None

    def _start(self, shards: Sequence[S]) -> int:
        """The place after the shard returned last, also when the list has changed since."""
        if self._last is None:
            return 0
        try:
            return shards.index(self._last) + 1
        except ValueError:  # it is held no more: what followed it has moved up into its place
            return self._position
