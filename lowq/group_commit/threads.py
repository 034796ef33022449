"""Pushes of threads: one goes directly, those that come meanwhile go together."""

import _thread
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from lowq.group_commit.parts import Part
from lowq.group_commit.requests import Outcome, Request
from lowq.group_commit.writer import GRACE, Writer

#: Seconds without work after which the flusher ends.
IDLE = 5.0
#: With so many pushes in a write, many threads push at once: then none of them goes directly, and before the next
#: write the flusher waits for ``REST`` seconds, in which those whose push has just ended may push again. Without that
#: it would send about half of them at a time, at the same cost (20 threads: 1.6 instead of 2.5 times the rate of one).
CROWD = 8
REST = 0.00005


class DirectPush:
    """The right to push directly. It is held as long as this is referred to."""

    __slots__ = ("__weakref__",)


class ThreadRequest(Request):
    """A small push of a thread."""

    __slots__ = ("waiter",)

    def __init__(
        self, parts: list[Part], jobs_count: int, size: int, timeout: float, is_limited_by_batch: bool
    ) -> None:
        super().__init__(parts, jobs_count, size, timeout, is_limited_by_batch)
        #: Held until the outcomes are known.
        self.waiter = threading.Lock()
        self.waiter.acquire()

    def wake_caller(self) -> None:
        _release(self.waiter)


class ThreadPushes:
    """Pushes of threads to one server: one goes directly, the others by the flusher."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._waiting: deque[Request] = deque()
        self._direct: Callable[[], DirectPush | None] = lambda: None
        #: Released when there is something to do.
        self._work = threading.Lock()
        self._work.acquire()
        self._is_crowded = False
        #: Held by the flusher that runs. Nobody ever waits for it: a signal handler that pushes waits for the flusher,
        #: while the thread that it has interrupted may be anywhere.
        self._flusher = threading.Lock()

    @property
    def is_busy(self) -> bool:
        """Whether somebody pushes directly, or waits, or many have done so just now."""
        return self._is_crowded or bool(self._waiting) or self._direct() is not None

    def direct(self) -> DirectPush | None:
        """The right to push directly, or None: somebody has it. Two threads that ask at the same moment may both get
        it, which does no harm.
        """
        if self.is_busy:
            return None
        mine = DirectPush()
        self._direct = weakref.ref(mine)
        return mine

    def begin(self, request: ThreadRequest) -> None:
        """Has the flusher send it with others."""
        if sys.is_finalizing() or not self._has_flusher():
            # No thread runs any more but this one, or none can be started: then each sends for itself.
            self._writer.send([request])
            request.wake_caller()
            return
        self._waiting.append(request)
        _release(self._work)
        self._has_flusher()  # the one that there was may have ended just before

    def wait(self, request: ThreadRequest) -> list[Outcome]:
        """What became of each part."""
        if not request.waiter.acquire(timeout=max(request.give_up_at + GRACE - time.monotonic(), 0.0)):
            self._writer.give_up(request)
        return request.outcomes

    def _has_flusher(self) -> bool:
        """Whether there is one, which is started if need be: the process may have too many threads for it."""
        if not self._flusher.locked():
            # Not by `threading`, which waits until the thread runs: who is interrupted there would not know whether one
            # was started. Of several that are started at the same moment one stays.
            try:
                _thread.start_new_thread(self._flush, ())
            except RuntimeError:
                return self._flusher.locked()
        return True

    def _flush(self) -> None:
        # Whoever adds a request after the place was given up finds no flusher, and starts one. A request that was added
        # just before is found here: then this thread goes on, unless another flusher has the place by now.
        while self._flusher.acquire(blocking=False):
            try:
                self._send_while_busy()
            finally:
                self._is_crowded = False
                self._flusher.release()
            if not self._waiting:
                break

    def _send_while_busy(self) -> None:
        """Sends one write after the other, until there has been nothing to do for a while."""
        while True:
            write: list[Request] = []
            self._writer.take_next(self._waiting, write)
            if write:
                try:
                    self._writer.send(write)
                finally:
                    self._is_crowded = len(write) >= CROWD
                    for request in write:
                        request.wake_caller()
                if self._is_crowded:
                    time.sleep(REST)
                    # Nobody came: the next one is alone.
                    self._is_crowded = bool(self._waiting)
            elif not self._work.acquire(timeout=IDLE):
                break


def _release(lock: threading.Lock) -> None:
    try:
        lock.release()
    except RuntimeError:
        pass  # it was released already
