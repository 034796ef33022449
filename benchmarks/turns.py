"""Whose turn it is. Turns follow each other; nothing else is measured meanwhile."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

#: Seconds after which the others get their turn before the next one of ours.
SLICE = 60.0


class Quiet:
    """A machine that others use too: whoever respects the lock file waits while something is measured. Without a file
    nobody is asked. A file that many want to share is hard to come by, so it is kept over several turns.
    """

    def __init__(self, lock: Path | None) -> None:
        self._lock = lock
        self._held: IO[str] | None = None
        self._since = 0.0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """One measurement, of half a minute at most."""
        if self._lock is not None and self._held is None:
            self._held = self._lock.open("a")
            fcntl.flock(self._held, fcntl.LOCK_EX)
            self._since = time.monotonic()
        try:
            yield
        finally:
            if time.monotonic() - self._since > SLICE:
                self.release()

    def release(self) -> None:
        """Lets the others have it."""
        if self._held is not None:
            self._held.close()
            self._held = None
