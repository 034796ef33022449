"""A background thread that exists only while it has something to do."""

import _thread
import threading
from collections.abc import Callable

#: Seconds without work after which the thread ends.
IDLE = 5.0


class OnDemandThread:
    """Calls ``work`` whenever it is woken. ``work`` returns the seconds after which it is to be called again in any
    case: 0 at once, None when there is nothing to do. ``idle``: seconds without work after which the thread ends.

    Nobody ever waits for this thread's locks: a signal handler may wake it, while the thread that the signal has
    interrupted may be anywhere in here.
    """

    def __init__(self, work: Callable[[], float | None], idle: float = IDLE) -> None:
        self._work = work
        self._idle = idle
        #: Released when there is something to do.
        self._woken = threading.Lock()
        self._woken.acquire()
        #: Held by the thread that runs.
        self._running = threading.Lock()

    @property
    def is_running(self) -> bool:
        """Whether the thread exists."""
        return self._running.locked()

    def start(self) -> bool:
        """Starts the thread unless it runs. False: none runs, and none can be started."""
        if not self._running.locked():
            # Not by `threading`, which waits until the thread runs: who is interrupted there would not know whether one
            # was started. Of several that are started at the same moment one stays.
            try:
                _thread.start_new_thread(self._run, ())
            except RuntimeError:  # the process has too many threads
                return self._running.locked()
        return True

    def wake(self) -> bool:
        """Has ``work`` called soon, for what the caller has added before. False: there is no thread for it."""
        release(self._woken)
        return self.start()  # the one that there was may have ended just before

    def _run(self) -> None:
        # Whoever adds work after the place was given up finds no thread, and starts one. What was added just before is
        # found here: then this thread goes on, unless another one has the place by now.
        while self._running.acquire(blocking=False):
            try:
                while True:
                    seconds = self._work()
                    if seconds == 0:
                        continue
                    was_woken = self._woken.acquire(timeout=self._idle if seconds is None else seconds)
                    if seconds is None and not was_woken:
                        break
            except BaseException:
                self._running.release()
                if not self._woken.locked():  # what was added while this thread ends is for a successor
                    self.start()
                raise
            self._running.release()
            if not self._woken.acquire(blocking=False):
                break


def release(lock: threading.Lock) -> None:
    """Releases a lock that may have been released already."""
    try:
        lock.release()
    except RuntimeError:
        pass
