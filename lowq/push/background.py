"""Threads that exist only while they have something to do, and blocking work for an event loop."""

import _thread
import asyncio
import threading
from collections.abc import Callable
from contextvars import Context, copy_context
from functools import partial
from typing import TypeVar

from lowq.errors import RedisUnavailable

T = TypeVar("T")

#: Seconds without work after which the thread ends.
IDLE = 5.0


class OnDemandThread:
    """Calls ``work`` whenever it is woken. ``work`` returns the seconds after which it is to be called again in any
    case: 0 at once, None when there is nothing to do. ``idle``: seconds without work after which the thread ends.

    Nobody ever waits for this thread's locks: a signal handler may wake it, while the thread that the signal has
    interrupted may be anywhere in here.
    """

    def __init__(self, work: Callable[[], float | None], idle: float = IDLE) -> None:
        self._work = work
        self._idle = idle
        #: Released when there is something to do.
        self._woken = threading.Lock()
        self._woken.acquire()
        #: Held by the thread that runs.
        self._running = threading.Lock()

    @property
    def is_running(self) -> bool:
        """Whether the thread exists."""
        return self._running.locked()

    def start(self) -> bool:
        """Starts the thread unless it runs. False: none runs, and none can be started."""
        if not self._running.locked():
            # Not by `threading`, which waits until the thread runs: who is interrupted there would not know whether one
            # was started. Of several that are started at the same moment one stays.
            try:
                _thread.start_new_thread(self._run, ())
            except RuntimeError:  # the process has too many threads
                return self._running.locked()
        return True

    def wake(self) -> bool:
        """Has ``work`` called soon, for what the caller has added before. False: there is no thread for it."""
        release(self._woken)
        return self.start()  # the one that there was may have ended just before

    def _run(self) -> None:
        # Whoever adds work after the place was given up finds no thread, and starts one. What was added just before is
        # found here: then this thread goes on, unless another one has the place by now.
        while self._running.acquire(blocking=False):
            try:
                while True:
                    seconds = self._work()
                    if seconds == 0:
                        continue
                    was_woken = self._woken.acquire(timeout=self._idle if seconds is None else seconds)
                    if seconds is None and not was_woken:
                        break
            except BaseException:
                self._running.release()
                if not self._woken.locked():  # what was added while this thread ends is for a successor
                    self.start()
                raise
            self._running.release()
            if not self._woken.acquire(blocking=False):
                break


def release(lock: threading.Lock) -> None:
    """Releases a lock that may have been released already."""
    try:
        lock.release()
    except RuntimeError:
        pass


# --- blocking work of an event loop ---
#
# Not in the loop's executor: that belongs to the application, and all of its threads may be waiting for this. Only when
# no thread can be started.


async def in_own_thread(work: Callable[[], T]) -> T:
    """Runs ``work`` in a new thread, in a copy of the caller's context. Should the caller be cancelled, it goes on."""
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
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
