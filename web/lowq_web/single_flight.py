"""Something that is read once for everybody who asks."""

import asyncio
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

import lowq

T = TypeVar("T")

#: Seconds for which a failure is told to whoever asks, before the next attempt.
FAILURE_AGE = 1.0

#: What was read, or why it could not be. Never an exception of the future itself: nobody may be there to take it.
_Outcome = tuple[T | None, Exception | None]


class SingleFlight(Generic[T]):
    """Safe for threads and for event loops. It is read in a thread of its own, never twice at a time, and not again
    before it is ``age`` seconds old. Who asks meanwhile waits for what is being read, be it an error, but no longer
    than until that has taken ``patience`` seconds: when Redis hangs, nobody hangs with it.
    """

    def __init__(self, read: Callable[[], T], age: Callable[[T], float], patience: float) -> None:
        self._read = read
        self._age = age
        self._patience = patience
        self._lock = threading.Lock()
        self._future: Future[_Outcome[T]] | None = None
        #: Monotonic: when the reading began, and until when it is the latest; infinite while it goes on.
        self._began = self._until = -math.inf

    def get(self) -> T:
        """The latest.

        Raises:
            RedisUnavailable: reading takes too long. And whatever it raises.
        """
        future, left = self._ask()
        try:
            return _told(future.result(left))
        except TimeoutError:
            raise self._too_long() from None

    async def wait(self) -> T:
        """The latest, for an event loop. Takes no thread of anybody.

        Raises:
            RedisUnavailable: reading takes too long. And whatever it raises.
        """
        future, left = self._ask()
        if not future.done():
            waiting = asyncio.wrap_future(future)
            try:
                await asyncio.wait({waiting}, timeout=left)
            finally:
                waiting.cancel()  # whoever else waits goes on waiting: the reading itself can't be cancelled
            if not future.done():
                raise self._too_long()
        return _told(future.result())

    def forget(self) -> None:
        """Whoever asks from now on gets what is read from now on."""
        with self._lock:
            self._future = None

    def _ask(self) -> tuple[Future[_Outcome[T]], float]:
        """What is read or was, and the seconds that it may still take."""
        with self._lock:
            now = time.monotonic()
            if self._future is not None and now < self._until:
                return self._future, max(self._began + self._patience - now, 0.0)
            future: Future[_Outcome[T]] = Future()
            future.set_running_or_notify_cancel()
            # A daemon: a Redis that hangs does not keep the process from ending.
            threading.Thread(target=self._run, args=(future,), name="lowq-web-look", daemon=True).start()
            self._future, self._began, self._until = future, now, math.inf
            return future, self._patience

    def _run(self, future: Future[_Outcome[T]]) -> None:
        outcome: _Outcome[T]
        try:
            value = self._read()
            outcome, age = (value, None), self._age(value)
        except Exception as error:
            outcome, age = (None, error), FAILURE_AGE
        with self._lock:
            if self._future is future:
                self._until = time.monotonic() + age
        future.set_result(outcome)

    def _too_long(self) -> lowq.RedisUnavailable:
        return lowq.RedisUnavailable(f"Redis has not answered for {self._patience:g} s")


def _told(outcome: _Outcome[T]) -> T:
    value, error = outcome
    if error is not None:
        raise error.with_traceback(None)  # it is raised many times: traces would pile up
    return value  # type: ignore[return-value]  # without an error there is a value, be it None
