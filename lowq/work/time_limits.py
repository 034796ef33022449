"""Time limits of a batch: the ``time_limit`` and the ``ttr`` of its worker, and what holds when they have passed; and
the interrupt when one of its jobs is cancelled.

::

    running ----------- the handler ends ------------------> ended
       |                                                       ^
       +-- time_limit passes: interrupted ---------------------+   a failure, as any other exception
       |                                                       |
       +-- cancelled: interrupted -----------------------------+   its jobs are released, see `outcome`
       |
       +-- ttr passes ---------------------------------------> written off: the batch is somebody else's

The performer of the batch, the watchdog, which watches the time, and the maintenance loop, which hears of cancelled
jobs, decide under the lock of the batch which of the arrows it is. So neither an interrupt nor the end by ``ttr`` ever
meets a batch that has ended, nor the one after it. A batch without limits has no lock before it is cancelled: see
`lowq.work.loop.BatchActivity.cancel`.

A handler is interrupted once: one that catches it may clean up. An interrupt that strikes in a finalizer (``__del__``,
a callback of the garbage collector), where Python drops every exception, has not reached the handler: it comes again.
"""

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from contextvars import Context
from functools import cache
from typing import Any

from lowq.clock import Clock, Lock, duration
from lowq.errors import JobCancelled, LeaseLost, TimeLimitExceeded
from lowq.store import caller_limit

#: How soon it is noticed that an interrupt was dropped, in seconds.
DROPPED_AFTER = 1.0

#: Raises the exception where the batch is performed, as soon as may be; with None, takes back what was not raised yet.
Interrupt = Callable[[type[BaseException] | None], object]


class WrittenOff(BaseException):
    """The batch was written off before its handler ended: nothing of it belongs to the caller any more."""


class TimeLimits:
    """The deadlines of one batch, and whether it still belongs to its performer.

    Seconds of ``time.monotonic``, as handlers compare with that: time in which the machine was suspended does not
    count. ``interrupt``: made by the performer; None: nobody watches, so nothing is enforced. ``on_earlier``: called
    when the deadline was moved nearer. ``running``: whether the handler runs already.
    """

    def __init__(
        self,
        time_limit: float | None,
        ttr: float | None,
        *,
        interrupt: Interrupt | None = None,
        on_earlier: Callable[[], object] = lambda: None,
        running: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        self._time_limit = time_limit
        self._ttr = ttr
        self._interrupt = interrupt
        self._on_earlier = on_earlier
        self._clock = clock
        #: Guards all below. Whoever holds it calls nothing that waits.
        self._lock = Lock()
        self._running, self._ended = running, False
        self._written_off = False
        self._interrupted = False
        #: The exception of the last interrupt; None: there was none.
        self.raised: type[BaseException] | None = None
        #: Whether the interrupt has cancelled the task.
        self.cancelled = False
        #: See `lowq.store.calls.Limited`.
        self.thread, self.at_end = 0, dict[object, Callable[[], object]]()
        now = clock()
        self._time_limit_at = None if time_limit is None else now + time_limit
        self._ttr_at = None if ttr is None else now + ttr

    # --- for the performer ---

    async def run(self, performing: Coroutine[Any, Any, None], context: Context) -> None:
        """Performs the batch. Once this returns or raises, no interrupt is pending, nor will one come. ``context``: of
        the handler; what waits for Redis there goes by these limits.

        Raises:
            TimeLimitExceeded: the time limit has passed. JobCancelled. WrittenOff. What the coroutine raises.
        """
        if self._interrupt is None:
            await performing
            return
        # The interrupt of a thread comes at most once, at any instruction from `_begin` on until `end` has been
        # carried out. When it strikes within `end`, the second `end` does the rest undisturbed. Then the batch has
        # exceeded its limit, although the handler may have returned just before: nobody can tell the two apart.
        #
        # That of a task cancels the task, in the thread of its event loop and only while the batch runs: so it strikes
        # where the handler waits, or not at all.
        context.run(caller_limit.set, self)
        self.thread = threading.get_ident()
        watch_thread(self.thread, self)
        try:
            try:
                self._begin()
                await performing
            finally:
                self.end()
        except BaseException as raised:
            self.end()
            performing.close()  # it may not have begun
            shown = self.shown(raised)
            if shown is not raised:
                raise shown from None
            raise

    def shown(self, error: BaseException) -> BaseException:
        """What the handler has raised; for the cancellation of its task by an interrupt, the exception of that."""
        kind = type(error)
        if self.cancelled and self.raised is not None and issubclass(kind, asyncio.CancelledError):
            # With the handler's lines in its trace.
            error, kind = self.raised().with_traceback(error.__traceback__), self.raised
        if self._time_limit is not None and self.raised is TimeLimitExceeded and kind is TimeLimitExceeded:
            error.args = (self.exceeded(),)
        return error

    @property
    def running(self) -> bool:
        """Whether the handler runs."""
        return self._running

    @property
    def interrupted(self) -> bool:
        """Whether the handler, or the id that it performs, was interrupted."""
        return self._interrupted

    def exceeded(self) -> str:
        """The message of `TimeLimitExceeded`."""
        assert self._time_limit is not None
        return f"the batch has run for longer than its time_limit of {duration(self._time_limit)}"

    def overdue(self) -> str:
        """The reason why a batch is written off."""
        return "the batch has run for longer than its ttr" + ("" if self._ttr is None else f" of {duration(self._ttr)}")

    def _begin(self) -> None:
        with self._lock:
            self._running = True

    def end(self) -> None:
        """The handler has ended. May be repeated.

        Raises:
            WrittenOff
        """
        with self._lock:
            is_first, self._running, self._ended = not self._ended, False, True
        if self.cancelled and is_first and (task := asyncio.current_task()) is not None:
            task.uncancel()  # a handler may have swallowed it: what is awaited after this is not to be cancelled for it
        # From here on no interrupt is sent. One may be on its way.
        if self._interrupted and self._interrupt is not None:
            self._interrupt(None)
        while self.at_end:
            self.at_end.popitem()[1]()
        if self._written_off:
            raise WrittenOff

    @property
    def written_off(self) -> bool:
        """Whether ttr passed while the handler ran. It stays so."""
        return self._written_off

    @property
    def deadline(self) -> float | None:
        """The earlier of time limit and ttr, ``time.monotonic``; None: there is neither, or the batch has ended. Tasks
        that a handler started, and that outlive it, have its context, and with that its limits.
        """
        if self._ended:
            return None
        return min((at for at in (self._time_limit_at, self._ttr_at) if at is not None), default=None)

    def touch(self, seconds: float) -> None:
        """From now on the batch has so many seconds more, and ttr keeps its distance to the time limit. A time limit
        that has passed is not set anew: it interrupts once.

        Raises:
            LeaseLost: it was written off.
        """
        with self._lock:
            self.check_held()
            before, end = self.deadline, self._clock() + seconds
            if self._ttr_at is not None:
                between = 0.0 if self._time_limit_at is None else self._ttr_at - self._time_limit_at
                self._ttr_at = end + between
            if self._time_limit_at is not None:
                self._time_limit_at = end
        if before is not None and end < before:
            self._on_earlier()

    def renew(self, seconds: float | None) -> None:
        """The next id of a batch begins, and has so many seconds; None: any number. An interrupt that the last one has
        swallowed is over.

        Raises:
            LeaseLost: as of `touch`.
        """
        with self._lock:
            was_interrupted, self._interrupted, self.raised = self._interrupted, False, None
        if was_interrupted and self._interrupt is not None:
            self._interrupt(None)
            if self.cancelled:
                self.cancelled = False
                if (task := asyncio.current_task()) is not None:
                    task.uncancel()
        if seconds is not None:
            self.touch(seconds)
        if was_interrupted:
            self._on_earlier()  # the watchdog looks for a dropped one at its own pace

    def check_held(self) -> None:
        """Raises `LeaseLost` if the batch was written off."""
        if self._written_off:
            raise LeaseLost("the batch has run for longer than its ttr: its jobs are performed by somebody else")

    def interrupt_dropped(self) -> bool:
        """Python has dropped an exception of the interrupt's type: whether it was the interrupt. If the batch still
        runs, the watchdog sends it again, or the maintenance loop with the next renewal of the lease.

        Called by the performer, in the midst of anything, also where it holds the lock: so without that. No interrupt
        is sent meanwhile, as long as this one counts.
        """
        if not self._interrupted:
            return False
        if not self._ended:
            self._interrupted = False
        return True

    # --- for the maintenance loop ---

    def cancel(self, is_meant: Callable[[], bool]) -> None:
        """Interrupts the handler, unless that was done before. ``is_meant``: whether what runs now is to end."""
        with self._lock:
            if self._running and not (self._interrupted or self._written_off) and is_meant():
                self._send(JobCancelled)

    def _send(self, exception: type[BaseException]) -> None:
        # Noted first: should this thread end between the two, `end` takes back one that was not sent.
        self._interrupted, self.raised = True, exception
        if self._interrupt is not None:
            self._interrupt(exception)

    # --- for the watchdog ---

    def enforce(self, write_off: Callable[[], object]) -> float | None:
        """Does what is due. Returns the seconds until something is due again; None: nothing will be.

        ``write_off``: called when ttr has passed while the handler runs. Until it returns, the performer can't get
        beyond the end of the batch.
        """
        with self._lock:
            if not self._running or self._written_off or self._interrupt is None:
                return None
            now = self._clock()
            if self._ttr_at is not None and now >= self._ttr_at:
                self._written_off = True
                write_off()
                return None
            waits = [] if self._ttr_at is None else [self._ttr_at - now]
            if self._time_limit_at is not None:
                if self._interrupted:
                    waits.append(DROPPED_AFTER)
                elif now >= self._time_limit_at:
                    self._send(TimeLimitExceeded)
                    waits.append(DROPPED_AFTER)
                else:
                    waits.append(self._time_limit_at - now)
            return min(waits, default=None)


# --- tasks ---


def interrupt_task(
    task: "asyncio.Task[Any]", limits: Callable[[], "TimeLimits | None"], exception: type[BaseException] | None
) -> None:
    """Cancels the task, where it waits; with the first two arguments given it is an `Interrupt`. A handler that blocks
    its event loop is not reached. ``limits``: those of the batch that the task performs just then.
    """

    def cancel(meant: "TimeLimits | None") -> None:
        # In the thread of the loop, where no batch ends meanwhile: one that has ended is not hit.
        if meant is not None and meant.running and meant.interrupted:
            meant.cancelled = True
            task.cancel()

    if exception is not None:
        task.get_loop().call_soon_threadsafe(cancel, limits())


# --- threads ---


@cache
def _set_async_exc() -> Callable[[Any, Any], int]:
    import ctypes  # here: it takes some milliseconds, which producers and commands need not spend

    name = ("PyThreadState_SetAsyncExc", ctypes.pythonapi)
    send = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.py_object)(name)
    clear = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)(name)  # None: NULL
    return lambda ident, exception: clear(ident, None) if exception is None else send(ident, exception)


def interrupt_of_this_thread() -> Interrupt:
    """Interrupts what the calling thread performs: between two instructions of Python. A call that waits, or computes,
    in C is not reached before it returns.
    """
    ident = threading.get_ident()

    def interrupt(exception: type[BaseException] | None) -> None:
        _notice_dropped_interrupts()
        set_async_exc = _set_async_exc()
        set_async_exc(ident, exception)
        # Until an exception sent like this is raised in any thread, Python up to 3.12 stops at every call to look for
        # it: for ever, when it was taken back. It costs some 40 ns a call, and where calls are traced, as by a debugger
        # or by coverage, 3.11 never gets beyond the first one. A thread for which one is pending looks anyway when its
        # turn comes.
        try:
            set_async_exc(threading.get_ident(), _Raised)
            while True:
                pass
        except _Raised:
            pass

    return interrupt


#: Thread -> the limits of the batch that it performs, or has performed last. Not by the context: a handler may have
#: another one, or none, where the interrupt strikes.
_watched: dict[int, TimeLimits] = {}


def watch_thread(ident: int, limits: TimeLimits) -> None:
    """From now on an interrupt that is dropped in that thread is one of these limits'."""
    _watched[ident] = limits


@cache
def _notice_dropped_interrupts() -> None:
    """From now on the batch in whose thread Python drops an interrupt learns of it. Anything else that is dropped is
    reported as before.
    """
    report = sys.unraisablehook

    def notice(dropped: "sys.UnraisableHookArgs") -> None:
        limits = _watched.get(threading.get_ident())
        kinds = TimeLimitExceeded, JobCancelled
        if dropped.exc_type in kinds and limits is not None and limits.interrupt_dropped():
            return
        report(dropped)

    sys.unraisablehook = notice


class _Raised(BaseException):
    """Says that an exception sent to this thread is raised."""
