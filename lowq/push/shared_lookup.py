"""A lookup that blocks, for coroutines: one at a time for each event loop, in the order in which they came. Those who
wait share what it finds, and its error.
"""

import asyncio
from collections.abc import Callable
from contextvars import Context
from functools import partial
from typing import TypeVar, cast

from lowq.push.background import in_own_thread
from lowq.push.calls import copy_of

T = TypeVar("T")


class _Line:
    """Coroutines of one loop that have come and not gone on yet."""

    def __init__(self) -> None:
        self.count = 0
        #: Lets them in one by one, in their order.
        self.turn = asyncio.Lock()
        #: How many lookups have failed, and the last error.
        self.failures = 0
        self.error: Exception | None = None


class SharedLookup:
    """Coroutines go on in the order in which they came: also those that come when the result is known and others that
    waited for it have not gone on yet. Safe for several loops.
    """

    def __init__(self) -> None:
        self._lines: dict[asyncio.AbstractEventLoop, _Line] = {}

    def is_under_way(self) -> bool:
        """Whether the running loop has a lookup under way, or coroutines that waited for one and have not gone on."""
        return bool(self._lines) and asyncio.get_running_loop() in self._lines

    async def get(self, find: Callable[[], T | None], look_up: Callable[[], T], timeout: float) -> T:
        """What ``find`` returns, or else ``look_up``, which runs in a thread, in an empty context. Whoever comes while
        others wait has its turn after them, and mostly finds what they have looked up.

        Raises:
            TimeoutError: it was not there within so many seconds. What the lookup raises, or the one that failed while
            the caller waited.
        """

        def attempt() -> tuple[T | None, Exception | None]:
            try:
                return look_up(), None
            except Exception as error:
                return None, error

        loop = asyncio.get_running_loop()
        if loop not in self._lines:
            for other in [other for other in list(self._lines) if other.is_closed()]:
                self._lines.pop(other, None)  # it was closed in the middle of a lookup
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
            found = find()  # somebody else may have found it
            if found is None:
                raise
            return found
        finally:
            line.count -= 1
            if not line.count:
                self._lines.pop(loop, None)
