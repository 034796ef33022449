"""A lookup that blocks, once for all coroutines of an event loop that want it at the same time."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from lowq.push.group_commit import copy_of, run_in_own_thread

T = TypeVar("T")
#: Turns of the loop in which those who came earlier go on when the result is there; three would do. Who has not by then
#: was interrupted by a signal handler before it could leave the line.
TURNS = 10


class _Line:
    """Coroutines of one loop that have come and not gone on yet."""

    def __init__(self) -> None:
        #: One for each of them, in the order in which they came.
        self.places: deque[object] = deque()
        #: Done when the lookup that is under way has ended, with its error. None: none is.
        self.lookup: asyncio.Future[BaseException | None] | None = None
        #: After that it is not waited for any more, by the loop's time: its end was lost, as by a signal handler that
        #: raised.
        self.lost_at = 0.0


class SharedLookup:
    """Coroutines go on in the order in which they came: also those that come when the result is known and others that
    waited for it have not gone on yet. Safe for several loops.
    """

    def __init__(self) -> None:
        self._lines: dict[asyncio.AbstractEventLoop, _Line] = {}

    def is_under_way(self) -> bool:
        """Whether the running loop has a lookup under way, or coroutines that waited for one and have not gone on."""
        return bool(self._lines) and asyncio.get_running_loop() in self._lines

    async def get(
        self, find: Callable[[], T | None], look_up: Callable[[], object], timeout: float, longest: float
    ) -> T:
        """What ``find`` returns as soon as that is not None. ``look_up`` sees to it; it runs in a thread, in an empty
        context, for ``longest`` seconds at most.

        Raises:
            TimeoutError: it was not there within so many seconds; others may go on waiting. What the lookup raises.
        """
        loop = asyncio.get_running_loop()
        line = self._line_of(loop)
        ends = loop.time() + timeout
        place = object()
        try:
            line.places.append(place)
            found, lookup = find(), line.lookup
            # Also who finds it waits for a lookup that others wait for.
            while found is None or lookup is not None:
                if lookup is None or loop.time() >= line.lost_at:
                    lookup = self._start(loop, line, look_up, longest)
                in_time = await _has_ended(lookup, ends - loop.time())
                found = find()
                lookup = line.lookup if found is None else None
                if found is None and not in_time:
                    raise TimeoutError
            await _wait_in(line, place)
            return found
        finally:
            if place in line.places:
                line.places.remove(place)
            self._drop_unused(loop, line)

    def _line_of(self, loop: asyncio.AbstractEventLoop) -> _Line:
        line = self._lines.get(loop)
        if line is None:
            for other in [other for other in list(self._lines) if other.is_closed()]:
                self._lines.pop(other, None)  # it was closed in the middle of a lookup
            line = self._lines[loop] = _Line()
        return line

    def _start(
        self, loop: asyncio.AbstractEventLoop, line: _Line, look_up: Callable[[], object], longest: float
    ) -> "asyncio.Future[BaseException | None]":
        lookup: asyncio.Future[BaseException | None] = loop.create_future()

        def end(_: object, error: BaseException | None) -> None:
            if line.lookup is lookup:
                line.lookup = None
            lookup.set_result(error)
            self._drop_unused(loop, line)  # all who waited may have been cancelled

        run_in_own_thread(look_up, end)
        # Not before: a signal handler may raise while the thread is started.
        line.lookup, line.lost_at = lookup, loop.time() + longest
        return lookup

    def _drop_unused(self, loop: asyncio.AbstractEventLoop, line: _Line) -> None:
        if not line.places and line.lookup is None and self._lines.get(loop) is line:
            del self._lines[loop]


async def _wait_in(line: _Line, place: object) -> None:
    """Waits for those before this place to go on."""
    for _ in range(TURNS):
        if next(iter(line.places), place) is place:
            return
        await asyncio.sleep(0)
    while place in line.places and line.places[0] is not place:
        line.places.popleft()


async def _has_ended(lookup: "asyncio.Future[BaseException | None]", seconds: float) -> bool:
    """Whether it has, within so many seconds. Raises what it has raised."""
    await asyncio.wait([lookup], timeout=seconds)
    if not lookup.done():
        return False
    error = lookup.result()
    if error is not None:
        raise copy_of(error) from error.__cause__
    return True
