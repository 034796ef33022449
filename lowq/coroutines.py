"""Coroutines without an event loop, coroutines in a context of their own, and blocking work of an event loop.

Code that threads and event loops share is written once, as coroutines. In a thread, everything they await is done at
once.
"""

import _thread
import asyncio
import traceback
from asyncio import CancelledError
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, copy_context
from functools import partial
from typing import Any, TypeVar

from lowq.errors import ConfigError, RedisUnavailable

T = TypeVar("T")


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine that never suspends, and returns its result."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("it was suspended")


def run_first(run: Callable[[Coroutine[Any, Any, T]], T], coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine as the first task of an event loop, by ``asyncio.run`` or the like. Its exception is raised
    here, and not in the task: the loop would ask the exception for its class, and wait for ever if that raises.
    """
    raised: list[BaseException] = []

    async def carry_out() -> Any:
        try:
            return await coroutine
        except CancelledError:
            raise
        except BaseException as error:
            raised.append(error)

    result = run(carry_out())
    if raised:
        raise raised.pop()
    return result


def plain(function: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., T]:
    """Makes a plain function of a coroutine function whose coroutines never suspend."""

    def call(*args: Any) -> T:
        coroutine = function(*args)
        try:
            return at_once(coroutine)
        except RuntimeError as error:
            raised = as_raised(error)
            if raised is error:
                raise
        finally:
            coroutine.close()  # a time limit may have interrupted it before it began
        try:
            raise raised
        finally:
            del raised  # its traceback refers to this frame

    return call


def as_raised(error: BaseException) -> BaseException:
    """The error that plain code in a coroutine has raised. Python makes a RuntimeError of a `StopIteration` that leaves
    a coroutine.
    """
    if type(error) is RuntimeError and error.args == ("coroutine raised StopIteration",):
        cause = error.__cause__
        if cause is not None and issubclass(type(cause), StopIteration):
            return cause
    return error


class OwnContext(Coroutine[Any, Any, T], Generator[Any, Any, T]):
    """Runs a coroutine, to be awaited once, in a context of its own: by default a copy of the current one.

    A task has one context for all its batches, so the context variables that a handler sets would remain for the next
    batch. A task for each batch would cost more, and be another task for `asyncio.current_task`, timeouts and
    cancelling.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T], context: Context | None = None) -> None:
        #: As of a coroutine that awaits it: `stack_of`, and tools that show where a task waits, follow this attribute.
        self.cr_await = coroutine
        self._run = (context or copy_context()).run

    def __await__(self) -> Generator[Any, Any, T]:
        return self

    def send(self, value: Any) -> Any:
        return self._run(self.cr_await.send, value)

    def throw(self, *error: Any) -> Any:
        return self._run(self.cr_await.throw, *error)

    def close(self) -> None:
        self._run(self.cr_await.close)


def stack_of(task: "asyncio.Task[None]") -> list[str]:
    """The stack of a task, outermost first. `asyncio.Task.get_stack` knows only its outermost function."""
    lines = []
    awaited: Any = task.get_coro()
    while isinstance(awaited, Coroutine):
        frame = getattr(awaited, "cr_frame", None)
        if frame is not None:
            lines += traceback.format_stack(frame, 1)
        awaited = getattr(awaited, "cr_await", None)
    return lines


# --- blocking work of an event loop ---
#
# Not in the loop's executor: that belongs to the application, and all of its threads may be waiting for this. Only when
# no thread can be started.


def running_loop() -> asyncio.AbstractEventLoop:
    """The event loop that runs in this thread.

    Raises:
        ConfigError: none of asyncio does.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigError(
            "lowq's coroutines need a running event loop of asyncio, and none runs in this thread. With trio call the "
            "plain methods in a thread: await trio.to_thread.run_sync(OrderSync.push, 42, payload)"
        ) from None


async def in_own_thread(work: Callable[[], T]) -> T:
    """Runs ``work`` in a new thread, in a copy of the caller's context. Should the caller be cancelled, it goes on."""
    future: asyncio.Future[T] = running_loop().create_future()
    run_in_own_thread(partial(copy_context().run, work), partial(resolve, future))
    return await future


def resolve(future: "asyncio.Future[T]", result: T | None, error: BaseException | None) -> None:
    """Gives a future its result or error, unless it was cancelled."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)  # type: ignore[arg-type]  # without an error there is a result


def run_in_own_thread(work: Callable[[], T], done: Callable[[T | None, BaseException | None], object]) -> None:
    """Runs ``work`` in a new thread, then ``done`` in the running loop with what it returned or raised. Both run in an
    empty context: the caller's is neither seen nor kept. When the loop is closed meanwhile, ``done`` is not called.
    """
    loop = asyncio.get_running_loop()

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        try:
            loop.call_soon_threadsafe(done, result, error, context=Context())
        except RuntimeError:
            pass  # the loop was closed: nobody waits any more

    try:
        # Not by `threading`, which waits until the thread runs: a signal handler may raise there.
        _thread.start_new_thread(Context().run, (run,))
    except (
        RuntimeError
    ):  # the process has too many threads; those of the loop's executor are there already, if it has any
        try:
            loop.run_in_executor(None, Context().run, run)
        except RuntimeError as error:
            refusal = RedisUnavailable(f"no thread could be started to wait for Redis: {error}")
            loop.call_soon(done, None, refusal, context=Context())
