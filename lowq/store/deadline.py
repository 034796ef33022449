"""How long a caller waits for Redis."""

import time
from collections.abc import Iterator


class Deadline:
    """So many seconds from now, or from the last progress on: an answer, or a moment from which on somebody waits."""

    __slots__ = ("_end", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def restart(self) -> None:
        self._end = time.monotonic() + self.seconds

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end

    def left(self) -> float:
        """Seconds, and a moment at least: no timeout at all is something else."""
        return max(self._end - time.monotonic(), 0.001)


def deadlines(seconds: float | None, attempts: int) -> Iterator[Deadline | None]:
    """For each attempt half of the time that is left, so that a connection that was cut without a word is not the only
    one that is tried; the last one has the rest. None: as long as the connection's own timeout is, each time.
    """
    for left in range(attempts - 1, -1, -1):
        if seconds is None:
            yield None
            continue
        if left:
            seconds /= 2
        yield Deadline(seconds)
