"""Blocking work for an event loop, in a thread of its own.

Not in the loop's executor: that belongs to the application, and all of its threads may be waiting for this. Only when
no thread can be started.
"""

import _thread
import asyncio
from collections.abc import Callable
from contextvars import Context, copy_context
from functools import partial
from typing import TypeVar

from lowq.errors import RedisUnavailable

T = TypeVar("T")


async def in_own_thread(work: Callable[[], T]) -> T:
    """Runs ``work`` in a new thread, in a copy of the caller's context. Should the caller be cancelled, it goes on."""
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def done(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # without an error there is a result

    run_in_own_thread(partial(copy_context().run, work), done)
    return await future


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
