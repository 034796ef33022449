"""How long a caller waits for Redis."""

import time
from collections.abc import Iterator
from contextvars import ContextVar
from math import inf
from typing import Protocol, overload


class Limited(Protocol):
    """What a caller does that has to end in time."""

    @property
    def deadline(self) -> float | None:
        """``time.monotonic``; None: it may take as long as it likes."""
        ...


#: What the caller is about to do, if that has to end in time: whatever has a timeout waits no longer than for that.
caller_limit: ContextVar[Limited | None] = ContextVar("lowq_caller_limit", default=None)


def caller_deadline() -> float:
    """Until when the caller can wait, ``time.monotonic``; infinite: for ever."""
    limit = caller_limit.get()
    deadline = None if limit is None else limit.deadline
    return inf if deadline is None else deadline


class Deadline:
    """So many seconds from now, or from the last progress on: an answer, or a moment from which on somebody waits. In
    any case not longer than ``until``.
    """

    __slots__ = ("_end", "_until", "seconds")

    def __init__(self, seconds: float, until: float = inf) -> None:
        self.seconds = seconds
        self._until = until
        self.restart()

    def restart(self, extra: float = 0.0) -> None:
        """``extra``: seconds more, until the next progress."""
        self._end = min(time.monotonic() + self.seconds + extra, self._until)

    def bounded(self, seconds: float, margin: float) -> float:
        """So many seconds, or those until ``until`` without the margin, if that is less."""
        return min(seconds, self._until - margin - time.monotonic())

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end

    def left(self) -> float:
        """Seconds, and a moment at least: no timeout at all is something else."""
        return max(self._end - time.monotonic(), 0.001)


@overload
def deadlines(seconds: float, attempts: int, until: float | None = None) -> Iterator[Deadline]: ...
@overload
def deadlines(seconds: float | None, attempts: int, until: float | None = None) -> Iterator[Deadline | None]: ...
def deadlines(seconds: float | None, attempts: int, until: float | None = None) -> Iterator[Deadline | None]:
    """For each attempt half of the time that is left, so that a connection that was cut without a word is not the only
    one that is tried; the last one has the rest. None: as long as the connection's own timeout is, each time.

    With a timeout it lasts until the monotonic time ``until`` at most; None: as long as the caller can wait, see
    `caller_limit`.
    """
    if until is None:
        until = caller_deadline()
    if seconds is not None and until < inf:
        seconds = min(seconds, max(until - time.monotonic(), 0.0))
    for left in range(attempts - 1, -1, -1):
        if seconds is None:
            yield None
            continue
        if left:
            seconds /= 2
        yield Deadline(seconds, until)
