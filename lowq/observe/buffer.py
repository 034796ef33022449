"""A bounded buffer in front of a daemon thread: for callbacks, and for figures on their way to Graphite and StatsD."""

import threading
from collections import deque
from collections.abc import Callable, Sized
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T", bound=Sized)

#: Seconds without a batch after which the thread ends; the next batch starts another.
IDLE_SECONDS = 10.0


class Buffer(Generic[T]):
    """Batches that a thread handles one after the other. Putting one does not wait. When there are more than ``most``
    items in them, the oldest batches are dropped. Safe for threads.

    ``on_idle``: called by the thread before it ends.
    """

    def __init__(
        self, thread: str, most: int, handle: Callable[[T], object], on_idle: Callable[[], object] = lambda: None
    ) -> None:
        self._thread_name = thread
        self._most = most
        self._handle = handle
        self._on_idle = on_idle
        #: Guards what follows. Notified of each change.
        self.changed = threading.Condition()
        #: Items that were dropped.
        self.dropped = 0
        self.is_closed = False
        self._batches: deque[T] = deque()
        self._count = 0
        self._is_handling = False
        self._thread: threading.Thread | None = None

    def put(self, batch: T, *, is_first: bool = False) -> None:
        """``is_first``: it is the oldest, which could not be handled yet."""
        with self.changed:
            if self.is_closed:
                return
            (self._batches.appendleft if is_first else self._batches.append)(batch)
            self._count += len(batch)
            while self._count > self._most and len(self._batches) > 1:
                excess = len(self._batches.popleft())
                self._count -= excess
                self.dropped += excess
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._thread_name, daemon=True)
                with suppress(RuntimeError):  # no more threads: the next batch tries again
                    thread.start()
                    self._thread = thread
            self.changed.notify_all()

    def has_waiting(self) -> bool:
        """Whether there are batches that the thread has not begun."""
        return bool(self._batches)

    def flush(self, timeout: float, is_hopeless: Callable[[], bool] = lambda: False) -> bool:
        """Waits until all batches are handled; not while it ``is_hopeless``. False: they are not within so many
        seconds, or the thread calls this.
        """
        if threading.current_thread() is self._thread:
            return False
        with self.changed:
            self.changed.wait_for(lambda: self._is_idle() or is_hopeless(), timeout)
            return self._is_idle()

    def _is_idle(self) -> bool:
        return not self._batches and not self._is_handling

    def close(self) -> None:
        """Handles nothing more."""
        with self.changed:
            self.is_closed = True
            self._batches.clear()
            self.changed.notify_all()

    def _run(self) -> None:
        while True:
            with self.changed:
                self._is_handling = False
                self.changed.notify_all()
                self.changed.wait_for(lambda: bool(self._batches) or self.is_closed, IDLE_SECONDS)
                if not self._batches:
                    self._on_idle()
                    self._thread = None
                    return
                batch = self._batches.popleft()
                self._count -= len(batch)
                self._is_handling = True
            self._handle(batch)
