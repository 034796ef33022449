"""The handler: the instance of a worker, ``perform`` or ``perform_one`` with the middlewares around it, and `current`.

::

    payloads_by_id -> middlewares -> merge function -> perform, or perform_one for each id

In ``perform_one`` each id has its own outcome::

    waits again, uncharged --begin--> (nothing said) --> done | raised
              ^                             |
              |                             +-- ttr, or the process ends: charged, as a whole batch is elsewhere
              +-- the node stops, the batch is cancelled or written off before it began; or it has expired

When the batch ends early, what is done is acknowledged, and what has not begun waits again.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import CoroutineType, SimpleNamespace
from typing import Any, Self

from lowq import codec, options
from lowq.codec import delay_seconds
from lowq.codec.payloads import cut_error
from lowq.coroutines import OwnContext, as_raised, at_once
from lowq.errors import JobCancelled, LowqError, TimeLimitExceeded
from lowq.job import Job
from lowq.logs import describe
from lowq.middleware import check_done, check_plain, wrap
from lowq.observe.events import ObservedBatch, QueueEvents
from lowq.settings import Config
from lowq.shards.delivery import TakenJob
from lowq.shards.shard import Shard
from lowq.verdicts import STOPS, merged
from lowq.work.lifecycle import LoopState, end_child
from lowq.work.time_limits import TimeLimits
from lowq.workers import Worker, handler_of, is_async, time_limits_of

#: The outcome of an id that raised while nothing else was performed: the failure is its own.
RAISED = "raised"
#: The outcome of an id that has not begun. It is known by its identity: a handler may say the same of an id.
_NOT_BEGUN: tuple[str, Any] = ("release", None)
_DONE: tuple[str, Any] = ("done", None)
#: Errors that the error of a batch shows.
_SHOWN = 10
_SECONDS = options.seconds(optional=False)

#: A handler, with or without what is around it.
Handler = Callable[..., Coroutine[Any, Any, None]]


# --- the batch that it performs ---


class Execution:
    """A batch that is being performed, as `current` returns it. Only for the thread, or task, that performs it."""

    # And whatever a middleware or a handler keeps here.
    __slots__ = (
        "__dict__", "__weakref__", "_jobs", "_load_payload", "_outcomes", "_source", "fence", "shard", "worker",
    )  # fmt: skip

    # What most batches do without: set on those that need it, as each batch makes one of these.
    _limits: TimeLimits | None = None
    #: The id that ``perform_one`` performs, in a batch of several.
    _running_id: str | None = None
    #: What async workers share.
    _state: LoopState | None = None
    #: The observers of the batch.
    _observed: ObservedBatch | None = None
    #: Whether another id may begin: not when the node stops, the shard is given up, or its lease is not surely held.
    _may_go_on: Callable[[], bool] = staticmethod(lambda: True)
    #: Called when an id begins after others of the batch; None: nobody asks for it.
    _next_began: Callable[[], object] | None = None
    #: Whether it was not begun, as a job of it is to end.
    _is_refused = False
    #: Whether an interrupt may strike by now: from here on the loop takes it for what the handler raises.
    _has_entered = False
    #: Whether the handler has ended: set before `_limits` is read for the last time.
    _has_left = False
    #: Whether the task was cancelled, and not something that it awaits.
    _is_cancelled: Callable[[], bool] = staticmethod(
        lambda: (task := asyncio.current_task()) is not None and task.cancelling() > 0
    )

    def __init__(
        self,
        worker: type,
        shard: int,
        fence: int,
        jobs: Sequence[TakenJob] | Sequence[Job],
        load_payload: Callable[[bytes], Any] = codec.load_payload,
        source: Shard | None = None,
    ) -> None:
        #: The worker's class.
        self.worker = worker
        #: The number of the shard.
        self.shard = shard
        #: The fencing token: grows with every change of the shard's owner. A database that remembers the highest one
        #: can refuse an owner that was replaced without noticing.
        self.fence = fence
        self._jobs = jobs
        self._load_payload = load_payload
        self._source = source
        #: Outcomes of single ids, as the handler has set them: id -> verb and detail.
        self._outcomes: dict[str, tuple[str, Any]] = {}

    @property
    def delivery(self) -> int:
        """The number of the batch's delivery, counted by the shard; once it was written off, that of a later one."""
        return 0 if self._source is None else self._source.in_flight.delivery

    @property
    def deadline(self) -> float | None:
        """``time.monotonic()`` at which ``time_limit`` or ``ttr`` passes, whichever is first; None: it has neither, or
        has ended.
        """
        return None if self._limits is None else self._limits.deadline

    @property
    def state(self) -> SimpleNamespace:
        """What the functions below ``@app.on_loop_start`` have opened, for all async workers of the process.

        Raises:
            LowqError: the application has none, or the worker is not async; or this is a fork of that process.
        """
        if self._state is None:
            raise LowqError(
                f"lowq.current().state is what async workers share: {self.worker.__name__} is a plain def, which has "
                "its setup instead, or no async def below @app.on_loop_start fills it; in a test of a handler give "
                "it to lowq.testing.execution(..., state=...)"
            )
        return self._state.values

    def touch(self, seconds: float | timedelta) -> None:
        """Gives the batch so many seconds from now: ``time_limit`` passes then, and ``ttr`` as much later as it is
        longer. For a worker with neither it does nothing.

        Raises:
            LeaseLost: ``ttr`` has passed already, the jobs are performed by somebody else.
        """
        more: float = _SECONDS.check("touch: ", "seconds", seconds)
        if self._limits is not None:
            self._limits.touch(more)

    @property
    def jobs(self) -> list[Job]:
        """The jobs of the batch, with scores, retry_count and perform_at, as they were taken."""
        return [item if isinstance(item, Job) else item.job(self._load_payload) for item in self._jobs]

    def done(self, job_id: object) -> None:
        """The id is finished, also if ``perform`` raises later."""
        self._set_outcome(job_id, "done", None)

    def fail(self, job_id: object, error: BaseException | str) -> None:
        """The id failed: it is charged a retry, whatever becomes of the others. What ``bury_on`` and ``release_on`` say
        of the error holds, as if the id had raised it alone.
        """
        if not isinstance(error, BaseException | str):
            raise LowqError(f"fail({job_id!r}): say the exception or a text, not {error!r:.100}")
        self._set_outcome(job_id, "fail", error if isinstance(error, BaseException) else cut_error(error))

    def release(self, job_id: object, delay: float | timedelta | None = None) -> None:
        """The id waits again, uncharged: ``delay`` seconds, or behind nothing when it is None."""
        # Checked here, where the handler learns of it: once the batch is over, nobody can learn of it.
        self._set_outcome(job_id, "release", None if delay is None else float(delay_seconds(delay)))

    def bury(self, job_id: object, reason: str = "") -> None:
        """The id goes to the morgue with all its payloads."""
        if not isinstance(reason, str):
            raise LowqError(f"bury({job_id!r}): reason is a text, not {reason!r:.100}")
        self._set_outcome(job_id, "bury", cut_error(reason))

    def _done_ids(self) -> list[str]:
        """The ids that are done whatever becomes of the rest. The handler may set outcomes meanwhile."""
        return [job_id for job_id, (verb, _) in dict(self._outcomes).items() if verb == "done"]

    @property
    def _was_told(self) -> bool:
        """Whether the batch, or the id that it performs, was told to end, as a job is cancelled."""
        return self._is_refused or (self._limits is not None and self._limits.raised is JobCancelled)

    def _is_stopping(self) -> bool:
        """Whether a job that is being performed is to end."""
        running = self._running_id
        return any(map(self._stops, [job.id for job in self._jobs] if running is None else [running]))

    def _stops(self, job_id: str) -> bool:
        """Whether the id is to end: it was cancelled, or a newer payload has cancelled its run."""
        source = self._source
        mark = None if source is None else source.stopping.get(job_id)
        is_meant = mark is not None and source is not None and mark[0] == source.in_flight.delivery
        return is_meant and self._outcomes.get(job_id, ("",))[0] != "done"

    def _begin(self, job_id: str | None) -> None:
        """In ``perform_one`` the id begins; None: all have ended."""
        self._running_id = job_id
        if job_id is not None and self._observed is not None:
            self._observed.id_began(job_id)

    def _set_outcome(self, job_id: object, verb: str, detail: Any) -> None:
        # Plain texts are kept: what raises, raises here, where the handler learns of it.
        name = "".join((str(job_id),))
        if self._limits is not None:
            # Should ttr pass right now, the outcome may get lost, as in a crash.
            self._limits.check_held()
        if not any(item.id == name for item in self._jobs):
            raise LowqError(f"{verb}({job_id!r}): the batch being performed has no such id")
        self._outcomes[name] = (verb, detail)


current_execution: ContextVar[Execution | None] = ContextVar("lowq_execution", default=None)


def current() -> Execution:
    """The batch that is being performed.

    Raises:
        LowqError: called outside of ``perform``.
    """
    execution = current_execution.get()
    if execution is None:
        raise LowqError(
            "lowq.current() was called outside of perform; in a test of a handler use lowq.testing.execution"
        )
    return execution


# --- the handler, and what is around it ---


@dataclass(frozen=True, slots=True)
class WorkerRuntime:
    """The instance of a worker that belongs to one thread, or to the event loop, with the middlewares around it."""

    instance: Worker[Any]
    #: Emits the events of its batches.
    events: QueueEvents
    #: Performs payloads_by_id, with ``context=`` in that. In a thread everything that it awaits is done at once.
    call: Handler
    #: Read once: an application's attributes are not asked for between a take and its outcome.
    batch_size: int
    #: Seconds.
    time_limit: float | None = None
    ttr: float | None = None
    #: Whether it has ``perform_one``.
    is_per_id: bool = False

    @classmethod
    def of(
        cls,
        worker: type[Worker[Any]],
        config: Config,
        on_perform: Callable[[dict[str, list[Any]]], object] | None = None,
        events: QueueEvents | None = None,
        in_thread: Callable[..., Awaitable[None]] | None = None,
    ) -> Self:
        """Makes an instance of the worker. ``on_perform``: of tests; called with the handler's payloads.
        ``in_thread``: awaited to call a plain worker in a thread; it gets a function and its argument.

        Raises:
            ConfigError: a middleware that can't be around such a worker. What the worker's ``__init__`` raises.
        """
        instance: Any = worker()
        middlewares = () if worker._is_internal else config.server_middlewares
        is_awaited, is_per_id = is_async(worker), handler_of(worker) == "perform_one"
        if not is_awaited:
            check_plain(middlewares, worker)
        time_limit, ttr = time_limits_of(worker)
        call: Callable[..., Any] = instance.perform_one if is_per_id else instance.perform
        merge = worker.merge if callable(worker.merge) else None
        is_chain = bool(is_per_id or on_perform or middlewares or merge or in_thread)
        if is_chain:
            chain = _bounded(call, worker, "the handler", is_async=is_awaited, is_awaited=is_awaited)
            if is_per_id:
                chain = _one_by_one(chain, ttr if time_limit is None else time_limit)
            if on_perform is not None:
                chain = _watched(on_perform, chain)
            chain = wrap(middlewares, worker, chain, is_async=is_awaited) if middlewares else chain
            call = chain if merge is None else _merging(merge, chain)
            if in_thread is not None and not is_awaited:
                # As a coroutine: no future takes a StopIteration that a plain function has raised.
                chain = call
                call, is_awaited = partial(in_thread, lambda payloads_by_id: at_once(chain(payloads_by_id))), True
        name = "a middleware" if middlewares else "the handler"
        call = _bounded(call, worker, name, is_async=is_awaited, is_awaited=is_awaited or is_chain)
        events = events or QueueEvents(worker.queue_name)
        return cls(instance, events, call, worker.batch_size, time_limit, ttr, is_per_id)


async def _awaited(awaitable: Awaitable[object]) -> object:
    return await awaitable


def _bounded(
    call: Callable[..., Any], worker: type[Worker[Any]], name: str, *, is_async: bool, is_awaited: bool
) -> Handler:
    """The call, in a context if one is given. What leaves a handler, or a middleware, concerns its job, in the process
    that has called it, and nothing else: neither the thread, nor a child that the handler has forked. ``is_awaited``:
    the call returns something to await.
    """

    async def bounded(*args: Any, context: Context | None = None) -> None:
        pid = os.getpid()
        try:
            returned = call(*args) if context is None else context.run(call, *args)
            if returned is not None and is_awaited:
                if context is not None:
                    returned = OwnContext(returned if type(returned) is CoroutineType else _awaited(returned), context)
                returned = await returned
        except BaseException as raised:
            if os.getpid() != pid:
                end_child(raised)
            kind = type(raised)  # what an object says of its class is its own affair
            if issubclass(kind, STOPS) and not (is_async and issubclass(kind, asyncio.CancelledError)):
                raise LowqError(f"{name} raised {describe(raised)}") from raised
            raise  # also a cancellation of the task, or of something that it awaited: see `Loop`
        if os.getpid() != pid:
            end_child(None)
        if returned is not None:
            check_done(returned, worker, handler_of(worker))

    return bounded


def _watched(on_perform: Callable[[dict[str, list[Any]]], object], call: Handler) -> Handler:
    async def watch_and_call(payloads_by_id: dict[str, list[Any]]) -> None:
        on_perform(payloads_by_id)
        await call(payloads_by_id)

    return watch_and_call


def _merging(merge: options.MergeFunction, call: Handler) -> Handler:
    """The call, with the payloads that the worker's merge function leaves. An id whose payloads it can't merge fails,
    and the others are performed; an id without any left is done.
    """

    async def merge_and_call(payloads_by_id: dict[str, list[Any]]) -> None:
        execution = current()
        left: dict[str, list[Any]] = {}
        for job_id, payloads in payloads_by_id.items():
            try:
                left[job_id] = merged(merge, payloads)
                if not left[job_id]:
                    del left[job_id]
                    execution.done(job_id)
            except Exception as error:
                execution.fail(job_id, error)
            except STOPS as error:
                execution.fail(job_id, LowqError(f"the merge function raised {describe(error)}"))
        if left:
            await call(left)

    return merge_and_call


def _one_by_one(perform_one: Handler, seconds: float | None) -> Handler:
    """``perform`` of a worker with ``perform_one``; an id that is alone is performed as a batch is. ``seconds``: what
    each id has, of the time limit or the ttr.
    """

    async def perform(payloads_by_id: dict[str, list[Any]]) -> None:
        if len(payloads_by_id) == 1:
            ((job_id, payloads),) = payloads_by_id.items()
            await perform_one(job_id, payloads)
            return
        batch, errors, has_begun = current(), list[Any](), False
        for job_id in payloads_by_id:
            batch._outcomes.setdefault(job_id, _NOT_BEGUN)
        for job_id, payloads in payloads_by_id.items():
            if has_begun:
                if batch._source is not None and batch._source.in_flight.has_expired(job_id):
                    continue  # meanwhile, perhaps: it waits again
                if batch._stops(job_id):
                    continue
                if not batch._may_go_on():
                    break
                batch._running_id = job_id  # first: from here on no interrupt is meant for the last one
                if batch._limits is not None:
                    batch._limits.renew(seconds)
                if batch._next_began is not None:
                    batch._next_began()
            has_begun = True
            errors += await _perform_id(perform_one, batch, job_id, payloads)
        batch._begin(None)
        try:  # for middlewares and the log: the outcomes are set, and hold
            if len(errors) == 1:
                raise errors[0]
            if errors:
                raise ExceptionGroup(f"{len(errors)} of {len(payloads_by_id)} ids failed", errors[:_SHOWN])
        finally:
            del errors  # this frame is a part of their tracebacks

    return perform


async def _perform_id(perform_one: Handler, batch: Execution, job_id: str, payloads: list[Any]) -> list[Any]:
    """Performs one id of several, and sets its outcome, unless the handler itself has. Returns what it raised, or
    raises that if it ends the batch.
    """
    outcomes = batch._outcomes
    if outcomes.get(job_id) is _NOT_BEGUN:
        del outcomes[job_id]
    batch._begin(job_id)
    try:
        await perform_one(job_id, payloads, context=copy_context())
        outcomes.setdefault(job_id, _DONE)
        return []
    except Exception as raised:
        error: Any = as_raised(raised)
    except (TimeLimitExceeded, JobCancelled) as raised:
        outcomes.setdefault(job_id, ("release", None) if batch._was_told else (RAISED, raised))
        raise
    except asyncio.CancelledError as cancelled:
        limits = batch._limits
        if limits is not None and limits.cancelled:
            outcomes.setdefault(job_id, ("release", None) if batch._was_told else (RAISED, limits.shown(cancelled)))
            raise
        if batch._is_cancelled():
            raise
        error = cancelled_inside(cancelled)
    try:
        outcomes.setdefault(job_id, ("release", None) if batch._was_told else (RAISED, error))
        return [error]
    finally:
        del error  # this frame is a part of its traceback


def cancelled_inside(cancelled: BaseException) -> LowqError:
    """The failure of a handler in which something that it awaits was cancelled, and not its task."""
    error = LowqError("what the handler awaited was cancelled")
    error.__cause__ = cancelled
    return error
