"""The clock by which leases run out and jobs become due: it never steps, and counts on while the machine is suspended.

A lease runs out in Redis whatever happens to its holder, so the holder must not count by a clock that stands still when
its machine does: after a night in which the lid was closed it would go on with the jobs it had prefetched. All times
that are compared with a lease's deadline come from here.
"""

import sys
import time
from collections.abc import Callable
from functools import partial

#: What says the time, in seconds since some moment. Who counts by it is given it, so that tests can move it.
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
