"""A blocking lookup for coroutines: one at a time for each event loop. Coroutines that wait share its result or
error."""

import asyncio
from collections.abc import Callable
from contextvars import Context
from functools import partial
from typing import TypeVar, cast

from lowq.push.background import in_own_thread
from lowq.push.calls import copy_of

T = TypeVar("T")


class _Line:
    """The waiting coroutines of one loop."""

    def __init__(self) -> None:
        self.count = 0
        #: Admits them one by one, in their order.
        self.turn = asyncio.Lock()
        #: The number of failed lookups, and the last error.
        self.failures = 0
        self.error: Exception | None = None


class SharedLookup:
    """Coroutines go on in the order of their calls, also those that call when the result is known while earlier ones
    have not gone on yet. Safe for several loops.
    """

    def __init__(self) -> None:
        self._lines: dict[asyncio.AbstractEventLoop, _Line] = {}

    def is_under_way(self) -> bool:
        """Whether the running loop has coroutines that wait for a lookup, or that have not gone on after one."""
        return bool(self._lines) and asyncio.get_running_loop() in self._lines

    async def get(self, find: Callable[[], T | None], look_up: Callable[[], T], timeout: float) -> T:
        """The result of ``find``, or else of ``look_up``, which runs in a thread, in an empty context. A coroutine that
        calls while others wait has its turn after them, and mostly finds their result.

        Raises:
            TimeoutError: there was no result within so many seconds. The error of the lookup, or of one that failed
            while the caller waited.
        """

        def attempt() -> tuple[T | None, Exception | None]:
            try:
                return look_up(), None
            except Exception as error:
                return None, error

        loop = asyncio.get_running_loop()
        if loop not in self._lines:
            for other in [other for other in list(self._lines) if other.is_closed()]:
                self._lines.pop(other, None)  # it was closed during a lookup
        line = self._lines.setdefault(loop, _Line())
        line.count += 1
        failures = line.failures
        try:
            async with asyncio.timeout(timeout), line.turn:
                found = find()
                if found is not None:
                    return found
                if line.error is not None and line.failures > failures:
                    raise copy_of(line.error)
                found, error = await in_own_thread(partial(Context().run, attempt))
                if error is not None:
                    # A copy, without the traceback, which would keep this frame and so the line.
                    line.failures, line.error = line.failures + 1, copy_of(error)
                    raise error
                return cast(T, found)
        except TimeoutError:
            found = find()  # another coroutine may have found it
            if found is None:
                raise
            return found
        finally:
            line.count -= 1
            if not line.count:
                self._lines.pop(loop, None)
