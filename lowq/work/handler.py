"""One batch: handed over through middlewares and `perform`.

::

    jobs -> payloads_by_id -> middlewares -> perform -> Outcome -> report -> notify
                                                |
                                 lowq.current(): outcomes of single ids, which win over an exception

A batch that fails as a whole says nothing about any one id: each is tried again alone, uncharged. Only an id that
fails alone, or that the handler named, is charged a retry. `lowq.work.outcome` does all from `Outcome` on.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import partial
from types import CoroutineType
from typing import Any, NoReturn, Self, TypeVar

from lowq.coroutines import OwnContext, as_raised, at_once, plain
from lowq.errors import LowqError
from lowq.logs import describe, flush, get_log
from lowq.middleware import check_done, check_plain, wrap
from lowq.observe.emit import ObservedBatch, QueueEvents
from lowq.options import MergeFunction, merged
from lowq.settings import Config
from lowq.shards.delivery import TakenJob
from lowq.shards.shard import Shard
from lowq.work import per_id
from lowq.work.execution import Execution, current, current_execution
from lowq.work.outcome import STOPS, Outcome, Performer, done_ids, outcome_of
from lowq.work.per_id import Batch
from lowq.work.time_limits import TimeLimits, WrittenOff
from lowq.workers import Worker, handler_of, is_async, time_limits_of

log = get_log("lowq.node")

T = TypeVar("T")

Performing = Callable[[dict[str, list[Any]]], Coroutine[Any, Any, None]]


def _is_cancelled(cancelled: Callable[[], bool] | None) -> bool:
    """Whether the task was cancelled, and not something that it awaits."""
    if cancelled is not None:
        return cancelled()
    task = asyncio.current_task()
    return task is not None and bool(task.cancelling())


def _batch_of(is_stopping: Callable[[], bool] | None) -> Batch:
    """What `per_id` needs of the batch that is being performed."""
    execution = current()
    shard, cancelled = execution._source, execution._cancelled

    def is_leaving() -> bool:
        if shard is None:
            return False
        if is_stopping is not None and (is_stopping() or not shard.lease.is_held(execution.fence)):
            return True
        return shard.dispatch.leaving

    def has_expired(job_id: str) -> bool:
        return shard is not None and shard.in_flight.has_expired(job_id)

    return Batch(
        execution._outcomes, execution._limits, is_leaving=is_leaving, has_expired=has_expired,
        is_cancelled=lambda: _is_cancelled(cancelled), on_begin=execution._begin,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class WorkerRuntime:
    """What one thread, or the event loop, needs for one queue: its instance of the worker, and that with the
    middlewares around it.
    """

    instance: Performer
    #: Emits what becomes of its batches.
    events: QueueEvents
    #: Performs payloads_by_id in a context. Of a plain worker it awaits only what is done at once.
    call: Callable[[dict[str, list[Any]], Context], Coroutine[Any, Any, None]]
    is_async: bool
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
        is_stopping: Callable[[], bool] | None = None,
        on_perform: Callable[[dict[str, list[Any]]], object] | None = None,
        events: QueueEvents | None = None,
        in_thread: Callable[..., Awaitable[None]] | None = None,
    ) -> Self:
        """With a new instance of the worker, and the application's middlewares around it. ``is_stopping``: of
        the node; then, and when the lease is not surely held, no other id of a batch begins in ``perform_one``.
        ``on_perform``: of tests; called with what the handler is about to get. ``in_thread``: calls a plain worker,
        given as a function and its argument, in a thread, and is awaited.

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
        if is_per_id or on_perform or middlewares or merge or in_thread:
            chain = _bounded(call, worker, is_async=is_awaited)
            if is_per_id:
                seconds = ttr if time_limit is None else time_limit
                chain = per_id.one_by_one(chain, partial(_batch_of, is_stopping), seconds, is_async=is_awaited)
            if on_perform is not None:
                chain = _observed(on_perform, chain)
            chain = wrap(middlewares, worker, chain, is_async=is_awaited) if middlewares else chain
            chain = chain if merge is None else _merging(merge, chain)
            if in_thread is not None and not is_awaited:
                # As a coroutine: no future takes a StopIteration that a plain function has raised.
                call, is_awaited = partial(in_thread, _run, chain), True
            else:
                call = chain if is_awaited else plain(chain)
        name = "a middleware" if middlewares else "the handler"
        call = _bounded(_in_context(call, is_async=is_awaited), worker, name, is_async=is_awaited)
        events = events or QueueEvents(worker.queue_name)
        return cls(instance, events, call, is_awaited, worker.batch_size, time_limit, ttr, is_per_id)


def _run(function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
    return at_once(function(*args))


def _in_context(call: Callable[..., Any], *, is_async: bool) -> Callable[..., Any]:
    def call_in_context(payloads_by_id: dict[str, list[Any]], context: Context) -> Any:
        returned = context.run(call, payloads_by_id)
        if returned is None or not is_async:
            return returned
        return OwnContext(returned if isinstance(returned, CoroutineType) else _awaited(returned), context)

    return call_in_context


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable


def _bounded(
    call: Callable[..., Any], worker: type[Worker[Any]], name: str = "the handler", *, is_async: bool
) -> Callable[..., Coroutine[Any, Any, None]]:
    """What leaves a handler, or a middleware, concerns its job, in the process that has called it, and nothing else:
    neither the thread, nor a child that the handler has forked.
    """

    async def bounded(*args: Any) -> None:
        pid = os.getpid()
        try:
            returned = call(*args)
            if returned is not None and is_async:
                returned = await returned
        except BaseException as raised:
            if os.getpid() != pid:
                _end_child(raised)
            kind = type(raised)  # what an object says of its class is its own affair
            if issubclass(kind, STOPS) and not (is_async and issubclass(kind, asyncio.CancelledError)):
                raise _failure_of(name, raised) from raised
            raise  # also a cancellation of the task, or of something that it awaited: see `perform_batch`
        if os.getpid() != pid:
            _end_child(None)
        if returned is not None:
            check_done(returned, worker, handler_of(worker))

    return bounded


def _failure_of(name: str, raised: BaseException) -> LowqError:
    return LowqError(f"{name} raised {describe(raised)}")


def _end_child(raised: BaseException | None) -> NoReturn:
    """Ends a process that a handler forked and that has left the handler: what follows is the parent's."""
    code = 0 if raised is None else 1
    if isinstance(raised, SystemExit):
        code = raised.code if isinstance(raised.code, int) else int(raised.code is not None)
    log.warning(
        "a process that a handler has forked has left the handler and ends with code %d%s", code,
        "" if raised is None else f": {describe(raised)}", extra={"event": "forked"},
    )  # fmt: skip
    flush()
    os._exit(code)


def _observed(on_perform: Callable[[dict[str, list[Any]]], object], inner: Performing) -> Performing:
    async def call(payloads_by_id: dict[str, list[Any]]) -> None:
        on_perform(payloads_by_id)
        await inner(payloads_by_id)

    return call


def _merging(merge: MergeFunction, call: Performing) -> Performing:
    """The call, with what the worker's merge function makes of the payloads. An id whose payloads it can't merge fails,
    and the others are performed; of one that it leaves none of nothing is to be done.
    """

    async def merge_and_call(payloads_by_id: dict[str, list[Any]]) -> None:
        execution = current()
        left: dict[str, list[Any]] = {}
        for job_id, payloads in payloads_by_id.items():
            try:
                left[job_id] = merged(merge, payloads)
            except Exception as error:
                execution.fail(job_id, error)
                continue
            except STOPS as error:
                execution.fail(job_id, _failure_of("the merge function", error))
                continue
            if not left[job_id]:
                del left[job_id]
                execution.done(job_id)
        if left:
            await call(left)

    return merge_and_call


async def perform_batch(
    runtime: WorkerRuntime,
    shard: Shard,
    fence: int,
    jobs: list[TakenJob],
    config: Config,
    limits: TimeLimits | None = None,
    *,
    cancelled: Callable[[], bool] | None = None,
) -> Outcome:
    """Performs a batch (the worker with its middlewares) and decides what becomes of its jobs. ``cancelled``: whether
    the task was cancelled, and not something that it awaits.

    Raises:
        WrittenOff: the batch, the shard and what is in flight of it are somebody else's, who reports it all.
        asyncio.CancelledError: the task was cancelled. Nothing is decided then, and what the handler has said to be
        done is finished.
    """
    worker, in_flight = runtime.instance, shard.in_flight
    execution = Execution(type(worker), shard.index, fence, jobs, in_flight.load_payload, limits, shard)
    if cancelled is not None:
        execution._cancelled = cancelled
    payloads_by_id = {job.id: job.payloads for job in jobs}
    ids = [*payloads_by_id]
    # What a batch sets of context variables is not there for the next one. What is called and logged because of its
    # outcome has them.
    context = copy_context()
    observed = None
    if runtime.events.follows_batches:
        observed = context.run(_observe, runtime, shard, jobs, execution, limits)
    token = context.run(current_execution.set, execution)
    error: BaseException | None = None
    try:
        performing = runtime.call(payloads_by_id, context)
        await (performing if limits is None else limits.run(performing, context))
    except WrittenOff:
        raise
    except BaseException as raised:
        error = raised
    finally:
        if observed is not None:
            context.run(observed.left)
    if cancelled is not None:
        try:
            await _take_back_cancels(cancelled)
        except asyncio.CancelledError as raised:
            error = raised
    outcome = Outcome(ids, observed=observed, context=context)
    try:
        if error is None and not (execution._outcomes or in_flight.found_no_redis or observed):
            return outcome
        context.run(current_execution.reset, token)
        if error is not None:
            error = as_raised(_not_cancelled(execution, error) if runtime.is_async else error)
        if error is not None or execution._outcomes or in_flight.found_no_redis:
            outcomes, found_no_redis = execution._outcomes, in_flight.found_no_redis
            outcome = context.run(outcome_of, worker, jobs, outcomes, error, config, found_no_redis)
            outcome.observed, outcome.context = observed, context
            _forget_errors(execution)
        return outcome
    finally:
        del error, outcome  # this frame is a part of the traceback


async def _take_back_cancels(cancelled: Callable[[], bool]) -> None:
    """A handler may have cancelled its own task: what is awaited from here on is not to be cancelled for that."""
    task = asyncio.current_task()
    if task is None or cancelled() or not task.cancelling():
        return
    try:
        await asyncio.sleep(0)  # one that has not struck yet strikes here
    except asyncio.CancelledError:
        if cancelled():
            raise
    while task.uncancel():
        pass


def _not_cancelled(execution: Execution, error: BaseException) -> BaseException:
    """What a batch of a task has failed with, whose task was not cancelled.

    Raises:
        asyncio.CancelledError: it was.
    """
    if not issubclass(type(error), asyncio.CancelledError):
        return error
    if _is_cancelled(execution._cancelled):
        assert execution._source is not None
        execution._source.in_flight.finish(done_ids(execution._outcomes))
        if execution._observed is not None:
            execution._observed.ended(None)
        try:
            raise error
        finally:
            del error  # as in `perform_batch`
    # Something that the handler awaits: for the batch that is an error.
    failure = LowqError("what the handler awaited was cancelled")
    failure.__cause__ = error
    return failure


def _forget_errors(execution: Execution) -> None:
    """Nothing but the outcome refers to what was raised any more."""
    for job_id, (verb, _) in execution._outcomes.items():
        if verb in ("fail", per_id.RAISED):
            execution._outcomes[job_id] = (verb, None)


def _observe(
    runtime: WorkerRuntime,
    shard: Shard,
    jobs: list[TakenJob],
    execution: Execution,
    limits: TimeLimits | None,
) -> ObservedBatch | None:
    """Has the observers follow the batch, in this thread or task. None: they could not be told."""
    observed = runtime.events.batch_began(execution.worker, shard, jobs, is_per_id=runtime.is_per_id)
    execution._observed = observed
    if limits is not None:
        limits.observed = observed  # for whoever reports the batch, should it be written off
    return observed
