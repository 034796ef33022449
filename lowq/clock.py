"""Time: the clock by which leases run out and jobs become due, waits, locks, and lengths of time in words.

The clock never steps, and counts on while the machine is suspended. A lease runs out in Redis also while its holder's
machine is suspended. By a clock that stands still meanwhile, the holder would go on with its prefetched jobs after a
night with the lid closed. All times that are compared with a lease's deadline come from here.
"""

import math
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial

#: A function that returns seconds since some moment. It is injected, so that tests can move it.
Clock = Callable[[], float]


def _find() -> Clock:
    # Linux counts the time of a suspension in CLOCK_BOOTTIME only, macOS in CLOCK_MONOTONIC, which is not what Python's
    # time.monotonic() reads there. Elsewhere that is the best there is; on Windows it counts.
    name = {"linux": "CLOCK_BOOTTIME", "darwin": "CLOCK_MONOTONIC"}.get(sys.platform, "")
    number: int | None = getattr(time, name, None)
    if number is None:
        return time.monotonic
    try:
        time.clock_gettime(number)
    except OSError:
        return time.monotonic
    return partial(time.clock_gettime, number)


#: Seconds since some moment, the same for the whole life of the process.
now: Clock = _find()


# --- waits and locks ---

#: The longest wait of a thread or a process, in seconds; for more, wait again. Beyond some weeks or years, depending on
#: the call, Python raises an OverflowError.
LONGEST_WAIT = 86400.0


if sys.version_info >= (3, 14):

    class Lock(type(threading.RLock())):
        """A reentrant lock whose ``with`` keeps its promise where an exception may be raised at any instruction: by a
        signal handler, or by the interrupt of a handler.

        From Python 3.14 on the interpreter may raise one between the call of ``__enter__`` and the block, and a lock of
        C would stay locked. Here nothing is raised between the two: neither the step of a loop, nor the return of a
        function of Python, looks for exceptions that are to be raised.
        """

        def __enter__(self):
            for _ in iter(self.acquire, None):
                break
            return True

else:
    Lock = threading.RLock


class Waker:
    """Wakes the one thread that waits. A lock of C, and no event: an interrupt of a handler could leave that locked.
    And no SimpleQueue: before Python 3.13 its `get` waits for ever if the thread stands still for the whole timeout.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        #: Whether a wait would last.
        self.is_clear = self._lock.locked

    def set(self) -> None:
        """Ends the wait, the one under way or else the next."""
        with suppress(RuntimeError):  # it was set already
            self._lock.release()

    def wait(self, seconds: float | None) -> None:
        """Waits until it is set, or so many seconds; None: for as long as it takes."""
        self._lock.acquire(timeout=-1 if seconds is None else min(max(seconds, 0.0), LONGEST_WAIT))


# --- lengths of time ---

_UNITS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}


def duration(seconds: float, *, fine: bool = False) -> str:
    """``4 min 10 s``: the two largest units; ``forever`` for infinity and NaN. ``fine``: less than a second in
    milliseconds, ``2.5 ms``.
    """
    if not -math.inf < seconds < math.inf:
        return "forever"
    if fine and 0 < seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 10:
        return f"{max(seconds, 0):.1f} s" if seconds >= 0.05 else "0 s"
    left = round(seconds)
    parts: list[str] = []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count:,} {unit}")
        elif parts:
            parts.append("")
        if len(parts) == 2:
            break
    return " ".join(part for part in parts if part)


def ago(at: float | None, now: float) -> str:
    """``3 min ago``, ``in 4 min 10 s``, ``now``; "" for None, infinity and NaN. Both are Unix time in seconds."""
    if at is None or not math.isfinite(at):
        return ""
    away = at - now
    if abs(away) < 0.5:
        return "now"
    return f"in {duration(away)}" if away > 0 else f"{duration(-away)} ago"


def relative_seconds(text: str) -> float | None:
    """``-2h``, ``+30 min`` in seconds; None: the text has another form.

    Raises:
        ValueError: it is infinite.
    """
    found = re.fullmatch(r"([+-])\s*(\d+(?:\.\d+)?)\s*(s|min|m|h|d)", text.strip())
    if found is None:
        return None
    sign, number, unit = found.groups()
    seconds = float(number) * _UNITS[unit]
    if not math.isfinite(seconds):
        raise ValueError(text)
    return -seconds if sign == "-" else seconds


def seconds_of(value: float | timedelta | None) -> float | None:
    """A length of time in seconds."""
    return value.total_seconds() if isinstance(value, timedelta) else value if value is None else float(value)
