"""A value that is read once for all concurrent callers."""

import asyncio
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

import lowq

T = TypeVar("T")

#: Seconds for which a failure is answered to every caller, before the next attempt.
FAILURE_AGE = 1.0

#: The value, or the error. Never an exception of the future itself: nobody may be there to retrieve it.
_Outcome = tuple[T | None, Exception | None]


class SingleFlight(Generic[T]):
    """Safe for threads and for event loops. The value is read in a thread of its own, never twice at a time, and not
    again before it is ``age`` seconds old. Callers meanwhile wait for the read that is under way, be its result an
    error, until the read has taken ``patience`` seconds: when Redis hangs, no caller hangs with it.
    """

    def __init__(self, read: Callable[[], T], age: Callable[[T], float], patience: float) -> None:
        self._read = read
        self._age = age
        self._patience = patience
        self._lock = threading.Lock()
        self._future: Future[_Outcome[T]] | None = None
        #: Monotonic: when the read began, and until when its value is kept; infinite while it goes on.
        self._began = self._until = -math.inf

    def get(self) -> T:
        """The latest.

        Raises:
            RedisUnavailable: the read takes too long. And whatever ``read`` raises.
        """
        future, left = self._ask()
        try:
            return _unwrap(future.result(left))
        except TimeoutError:
            raise self._too_long() from None

    async def wait(self) -> T:
        """The latest, for an event loop. Occupies no thread while it waits.

        Raises:
            RedisUnavailable: the read takes too long. And whatever ``read`` raises.
        """
        future, left = self._ask()
        if not future.done():
            waiting = asyncio.wrap_future(future)
            try:
                await asyncio.wait({waiting}, timeout=left)
            finally:
                waiting.cancel()  # other callers go on waiting: the read itself can't be cancelled
            if not future.done():
                raise self._too_long()
        return _unwrap(future.result())

    def forget(self) -> None:
        """Drops the value: calls from now on get what is read from now on."""
        with self._lock:
            self._future = None

    def _ask(self) -> tuple[Future[_Outcome[T]], float]:
        """The read that is under way or done, and the seconds that it may still take."""
        with self._lock:
            now = time.monotonic()
            if self._future is not None and now < self._until:
                return self._future, max(self._began + self._patience - now, 0.0)
            future: Future[_Outcome[T]] = Future()
            future.set_running_or_notify_cancel()
            # A daemon thread: a Redis that hangs does not keep the process from ending.
            threading.Thread(target=self._run, args=(future,), name="lowq-web-read", daemon=True).start()
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


def _unwrap(outcome: _Outcome[T]) -> T:
    value, error = outcome
    if error is not None:
        raise error.with_traceback(None)  # it is raised many times: traces would pile up
    return value  # type: ignore[return-value]  # without an error there is a value, be it None
