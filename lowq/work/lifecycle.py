"""The life of instances of workers, and of what all async workers of a process share: the state of the event loop. The
application's functions below ``@app.on_loop_start`` fill it, and those below ``@app.on_loop_stop`` clean it up. And
how that loop is made, and how often Python looks for garbage in its process.

An instance belongs to one thread, or to the event loop. ``setup`` and ``teardown`` are called there, once each. An
instance that could not be set up is not torn down.

::

    the loop begins -> on_loop_start, in order -> setup of each worker -> the node takes shards
                                                                          ...
    the loop ends   <- on_loop_stop, in reverse <- teardown of each worker <- the node has given them up

A process that dies, or whose stop is cut short, calls none of these: nothing may depend on it.
"""

import asyncio
import gc
import os
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NoReturn

from lowq.application import LoopFunction, Lowq
from lowq.errors import LowqError
from lowq.logs import describe, flush, get_log
from lowq.middleware import check_done
from lowq.options import takes
from lowq.workers import Worker, is_async

log = get_log("lowq.node")

#: Objects of a task in flight that the garbage collector tracks: some 40, and the handler's own.
TASK_OBJECTS = 50


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's, when that is installed."""
    try:
        uvloop = import_module("uvloop")
    except ImportError:
        return asyncio.new_event_loop()
    made: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return made


def raise_gc_threshold(tasks: int) -> None:
    """Lets a wave of so many tasks begin without a garbage collection. With Python's 700 objects each wave sets off
    dozens, which look at all tasks in flight and find nothing: a third of the processor time of 1,000 tasks that wait.
    A higher threshold, and none at all, stay.
    """
    first, *others = gc.get_threshold()
    if 0 < first < tasks * TASK_OBJECTS:
        gc.set_threshold(tasks * TASK_OBJECTS, *others)


class LoopState:
    """The state of one event loop. Only for the thread of the loop."""

    def __init__(self, app: Lowq) -> None:
        self._start, self._stop = tuple(app.loop_start), tuple(app.loop_stop)
        self._values = SimpleNamespace()
        self._pid = os.getpid()
        #: All has been started, and is to be stopped.
        self.is_started = False

    @classmethod
    def of(cls, app: Lowq) -> "LoopState | None":
        """The state of a new event loop; None: the application has no function for it."""
        return cls(app) if app.loop_start or app.loop_stop else None

    @property
    def values(self) -> SimpleNamespace:
        """What the functions have put there.

        Raises:
            LowqError: this process is a fork of the one that they belong to.
        """
        if os.getpid() != self._pid:
            raise LowqError(
                f"lowq.current().state belongs to the process {self._pid}, and this one is a fork of it: what is open "
                "there can't be shared, so open it anew"
            )
        return self._values

    async def start(self, on_each: Callable[[str], object] = lambda _name: None) -> None:
        """Calls the functions of the start, in the order in which they were declared. ``on_each``: called with the name
        of each before.

        Raises:
            What one of them raises, with a note that names it. Then none of the stop is called.
        """
        for function in self._start:
            on_each(_name_of(function))
            try:
                await self._call(function)
            except BaseException as error:
                with suppress(Exception):  # what an exception says of itself is its own affair
                    error.add_note(f"raised by {_name_of(function)}, before anything was performed")
                raise
        self.is_started = True

    async def stop(self) -> None:
        """Calls the functions of the stop, the last one first, if all was started. What they raise is logged."""
        functions = self._stop[::-1] if self.is_started else ()
        self.is_started = False
        for function in functions:
            try:
                await self._call(function)
            except BaseException:
                log.exception("%s failed", _name_of(function))

    async def _call(self, function: LoopFunction) -> None:
        await function(*[self._values] * takes(function, 1))


def _name_of(function: LoopFunction) -> str:
    return f"{function.__module__}.{function.__qualname__}"


# --- the life of an instance ---


def has_life(worker: object) -> bool:
    """Whether the worker, a class or an instance, has a ``setup`` or a ``teardown`` of its own."""
    kind: Any = worker if isinstance(worker, type) else type(worker)
    return any(getattr(kind, name) is not getattr(Worker, name) for name in ("setup", "teardown"))


async def set_up(instance: object) -> None:
    """Calls its ``setup``, which may be an async def if the worker is async.

    Raises:
        What it raises, with a note that names the worker. ConfigError: it returned a coroutine.
    """
    try:
        await _call(instance, "setup")
    except BaseException as error:
        name = type(instance).__name__
        with suppress(Exception):  # what an exception says of itself is its own affair
            error.add_note(f"raised by {name}.setup, before anything was performed by that instance")
        raise


async def tear_down(instance: object) -> None:
    """Calls its ``teardown``. What that raises is logged."""
    try:
        await _call(instance, "teardown")
    except BaseException:
        log.exception("%s.teardown failed", type(instance).__name__)


async def _call(instance: Any, method: str) -> None:
    returned = getattr(instance, method)()
    if returned is not None and is_async(type(instance)):
        returned = await returned
    check_done(returned, type(instance), method)


# --- forks ---


def end_child(raised: BaseException | None) -> NoReturn:
    """Ends a process that a handler forked and that has left the handler: what follows is the parent's."""
    code: Any = 1
    try:  # issubclass, as isinstance also asks what an object says of its class
        said: Any = getattr(raised, "code", None) if issubclass(type(raised), SystemExit) else raised
        code = said if issubclass(type(said), int) else int(said is not None)
        text = "a process that a handler has forked has left the handler and ends with code %d%s"
        log.warning(text, code, "" if raised is None else f": {describe(raised)}", extra={"event": "forked"})
        flush()
    finally:
        os._exit(code & 0xFF)  # Python refuses a larger one, of which the system takes as much
