"""Pushes of threads: one goes directly, those that come meanwhile go together."""

import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from lowq.push.on_demand import OnDemandThread, release
from lowq.push.parts import Part
from lowq.push.requests import Outcome, Request
from lowq.push.writer import GRACE, Writer

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
        self, parts: list[Part], jobs_count: int, size: int, timeout: float, is_limited_by_batch: bool,
        room_until: float,
    ) -> None:  # fmt: skip
        super().__init__(parts, jobs_count, size, timeout, is_limited_by_batch, room_until)
        #: Held until the outcomes are known.
        self.waiter = threading.Lock()
        self.waiter.acquire()

    def wake_caller(self) -> None:
        release(self.waiter)


class ThreadPushes:
    """Pushes of threads to one server: one goes directly, the others by the flusher."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._waiting: deque[Request] = deque()
        self._direct: Callable[[], DirectPush | None] = lambda: None
        self._is_crowded = False
        self.flusher = OnDemandThread(self._flush)

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
        if sys.is_finalizing() or not self.flusher.start():
            # No thread runs any more but this one, or none can be started: then each sends for itself.
            self._writer.send([request])
            if request.is_settled:
                request.wake_caller()
            return
        self._waiting.append(request)
        self.flusher.wake()

    def wait(self, request: ThreadRequest) -> list[Outcome]:
        """What became of each part."""
        while not request.waiter.acquire(timeout=max(request.give_up_at + GRACE - time.monotonic(), 0.0)):
            if request.give_up_at + GRACE <= time.monotonic():  # it has no more time since, as it waits for room
                self._writer.give_up(request)
                break
        return request.outcomes

    def _flush(self) -> float | None:
        """Sends the next write. Returns as `OnDemandThread` wants it."""
        write: list[Request] = []
        is_crowded = False
        try:
            self._writer.take_next(self._waiting, write)
            if not write:
                return None
            try:
                self._writer.send(write)
            finally:
                for request in write:
                    if request.is_settled:
                        request.wake_caller()
            self._is_crowded = len(write) >= CROWD
            if self._is_crowded:
                time.sleep(REST)
                is_crowded = bool(self._waiting)  # nobody came: the next one is alone
            return 0.0
        finally:
            self._is_crowded = is_crowded
