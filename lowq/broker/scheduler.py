"""Schedulers: which shard a thread works next.

A scheduler is any callable `(shards, now) -> shard or None`. It is given those shards of ONE thread that this thread
may work now (they have due work, are leased, not paused, and nobody else works them), ordered by queue and index, and
the monotonic time in seconds. It returns one of them. It never waits and reads no clock: the thread sleeps, and knows
until when. Every thread has an instance of its own, so a scheduler may keep state without a lock.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, TypeVar


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
    def next_due(self) -> float | None:
        """Monotonic time, seconds, since which its oldest waiting job is due. None is for shards without a job, which
        no scheduler is given.
        """
        ...


T = TypeVar("T")
S = TypeVar("S", bound=Schedulable)

#: What a user's own scheduler has to be: (shards that one thread may work, monotonic seconds) -> one of them, or None.
#: Over T, not S: with the bound in the alias, pyright refuses Scheduler[Shard] for every shard.
Scheduler: TypeAlias = Callable[[Sequence[T], float], T | None]


class LagScheduler:
    """The shard whose oldest due job has waited longest; of equals, the first. Keeps the lag low."""

    def __call__(self, shards: Sequence[S], _now: float) -> S | None:
        return min(shards, key=_due, default=None)


def _due(shard: Schedulable) -> float:
    return shard.next_due or 0.0


class SeqScheduler:
    """Round robin: the first shard after the one returned last, by queue and index."""

    def __init__(self) -> None:
        self._last = ("", -1)

    def __call__(self, shards: Sequence[S], _now: float) -> S | None:
        if not shards:
            return None
        shard = shards[bisect_right(shards, self._last, key=_place) % len(shards)]
        self._last = _place(shard)
        return shard


def _place(shard: Schedulable) -> tuple[str, int]:
    return shard.queue, shard.index
