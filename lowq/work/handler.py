"""One batch: handed over through middlewares and `perform`, and `current`, by which its handler speaks of it.

::

    jobs -> payloads_by_id -> middlewares -> perform -> Outcome -> report -> notify
                                                |
                                 lowq.current(): outcomes of single ids, which win over an exception

A batch that fails as a whole says nothing about any one id: each is tried again alone, uncharged. Only an id that
fails alone, or that the handler named, is charged a retry. `lowq.work.outcome` does all from `Outcome` on.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, Self, TypeVar

from lowq import codec
from lowq.codec import delay_seconds
from lowq.errors import LowqError
from lowq.job import Job
from lowq.logs import describe, flush, get_log
from lowq.middleware import check_done, check_plain, wrap, wrap_async
from lowq.observe import job_log, observing
from lowq.observe.observers import ObservedBatch, Observer, call_observer
from lowq.options import MergeFunction, merged
from lowq.settings import Config, cut_error
from lowq.shards.delivery import TakenJob
from lowq.shards.shard import Shard
from lowq.work import per_id
from lowq.work.outcome import STOPS, Outcome, Performer, done_ids, outcome_of
from lowq.work.per_id import Batch
from lowq.work.time_limits import TimeLimits, WrittenOff, checked_seconds
from lowq.workers import Worker, handler_of, is_async, time_limits_of

log = get_log("lowq.node")

T = TypeVar("T")


class Execution:
    """What `current` returns: the batch that this thread performs. Only for that thread, only while it performs."""

    # And whatever a middleware or a handler keeps here.
    __slots__ = (
        "__dict__", "__weakref__", "_jobs", "_limits", "_load_payload", "_outcomes", "_source", "fence", "shard",
        "worker",
    )  # fmt: skip

    # What most batches do without: set on those that need it, as each batch makes one of these.
    #: In ``perform_one``, in a batch of several: the id that is being performed.
    _running_id: str | None = None
    _cancelled: Callable[[], bool] | None = None
    _observed: ObservedBatch | None = None

    def __init__(
        self,
        worker: type,
        shard: int,
        fence: int,
        jobs: Sequence[TakenJob] | Sequence[Job],
        load_payload: Callable[[bytes], Any] = codec.load_payload,
        limits: TimeLimits | None = None,
        source: Shard | None = None,
    ) -> None:
        #: The worker's class.
        self.worker = worker
        #: The number of the shard.
        self.shard = shard
        #: The fencing token: grows with every change of the shard's owner. A database that remembers the highest
        #: one it saw can refuse an owner that was replaced without noticing.
        self.fence = fence
        self._jobs = jobs
        self._load_payload = load_payload
        self._limits = limits
        self._source = source
        self._outcomes: dict[str, tuple[str, Any]] = {} if limits is None else limits.outcomes

    @property
    def delivery(self) -> int:
        """The number of the delivery that the batch belongs to, counted by the shard; once the batch was written off,
        that of a later one.
        """
        return 0 if self._source is None else self._source.in_flight.delivery

    @property
    def deadline(self) -> float | None:
        """``time.monotonic()`` at which the worker's ``time_limit`` or its ``ttr`` passes, whichever is first; None: it
        has neither, or the batch has ended.
        """
        return None if self._limits is None else self._limits.deadline

    def touch(self, seconds: float | timedelta) -> None:
        """From now on the batch has so many seconds: ``time_limit`` passes then, and ``ttr`` as much later as it is
        longer. For a worker with neither it does nothing.

        Raises:
            LeaseLost: ``ttr`` has passed already, the jobs are performed by somebody else.
        """
        more = checked_seconds("touch", seconds.total_seconds() if isinstance(seconds, timedelta) else seconds)
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

    def _begin(self, job_id: str | None) -> None:
        """In ``perform_one`` the id begins; None: all have ended."""
        self._running_id = job_id
        if job_id is not None and self._observed is not None:
            self._observed.begin_id(job_id)
        if job_id is not None and self._source is not None and job_log.is_on():
            job_log.begins(self._source, [job_id], self.delivery)

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


def _unknown() -> None:
    return None


@dataclass(frozen=True, slots=True)
class WorkerRuntime:
    """What one thread, or the event loop, needs for one queue: its instance of the worker, and that with the
    middlewares around it.
    """

    instance: Performer
    #: Of an async worker it returns what is to be awaited.
    call: Callable[[dict[str, list[Any]]], Any]
    #: Read once: an application's attributes are not asked for between a take and its outcome.
    batch_size: int
    #: Seconds.
    time_limit: float | None = None
    ttr: float | None = None
    #: Whether it has ``perform_one``.
    is_per_id: bool = False
    #: Those of the application; others may come.
    observers: Sequence[Observer] = ()
    #: As of `ServerClock`.
    server_offset: Callable[[], float | None] = _unknown

    @classmethod
    def of(
        cls,
        worker: type[Worker[Any]],
        config: Config,
        is_stopping: Callable[[], bool] | None = None,
        on_perform: Callable[[dict[str, list[Any]]], object] | None = None,
        observers: Sequence[Observer] = (),
        server_offset: Callable[[], float | None] = _unknown,
    ) -> Self:
        """With a new instance of the worker, and the application's middlewares around it. ``is_stopping``: of
        the node; then, and when the lease is not surely held, no other id of a batch begins in ``perform_one``.
        ``on_perform``: of tests; called with what the handler is about to get.

        Raises:
            ConfigError: a middleware that can't be around such a worker. What the worker's ``__init__`` raises.
        """
        instance: Any = worker()
        around: Callable[..., Any] = wrap_async
        middlewares = () if worker._is_internal else config.server_middlewares
        if not is_async(worker):
            check_plain(middlewares, worker)
            around = wrap
        time_limit, ttr = time_limits_of(worker)
        is_per_id = handler_of(worker) == "perform_one"
        handler = instance.perform_one if is_per_id else instance.perform
        bounded = _abounded if is_async(worker) else _bounded
        inner = bounded(handler)
        if is_per_id:
            one_by_one = per_id.aone_by_one if is_async(worker) else per_id.one_by_one
            seconds = ttr if time_limit is None else time_limit
            inner = one_by_one(worker, inner, partial(_batch_of, is_stopping), seconds)
        if on_perform is not None:
            inner = _observed(on_perform, inner)
        call = around(middlewares, worker, inner)
        if middlewares:
            call = bounded(call, "a middleware")
        if callable(worker.merge):
            call = _merging(worker.merge, call)
        return cls(instance, call, worker.batch_size, time_limit, ttr, is_per_id, observers, server_offset)


# What leaves a handler, or a middleware, concerns its job, in the process that has called it, and nothing else: neither
# the thread, nor a child that the handler has forked.


def _bounded(handler: Callable[..., Any], name: str = "the handler") -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        pid = os.getpid()
        try:
            returned = handler(*args)
        except BaseException as raised:
            if os.getpid() != pid:
                _end_child(raised)
            if issubclass(type(raised), STOPS):  # what an object says of its class is its own affair
                raise _failure_of(name, raised) from raised
            raise
        if os.getpid() != pid:
            _end_child(None)
        return returned

    return call


def _abounded(handler: Callable[..., Any], name: str = "the handler") -> Callable[..., Any]:
    async def call(*args: Any) -> Any:
        pid = os.getpid()
        try:
            pending = handler(*args)
            returned = None if pending is None else await pending
        except asyncio.CancelledError as cancelled:
            if os.getpid() != pid:
                _end_child(cancelled)
            raise  # of the task, or of something that it awaited: see `aperform`
        except BaseException as raised:
            if os.getpid() != pid:
                _end_child(raised)
            if issubclass(type(raised), STOPS):  # what an object says of its class is its own affair
                raise _failure_of(name, raised) from raised
            raise
        if os.getpid() != pid:
            _end_child(None)
        return returned

    return call


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


def _observed(on_perform: Callable[[dict[str, list[Any]]], object], inner: Callable[..., Any]) -> Callable[..., Any]:
    def call(payloads_by_id: dict[str, list[Any]]) -> Any:
        on_perform(payloads_by_id)
        return inner(payloads_by_id)

    return call


def _merging(merge: MergeFunction, call: Callable[[dict[str, list[Any]]], Any]) -> Callable[..., Any]:
    """The call, with what the worker's merge function makes of the payloads. An id whose payloads it can't merge fails,
    and the others are performed; of one that it leaves none of nothing is to be done.
    """

    def merge_and_call(payloads_by_id: dict[str, list[Any]]) -> Any:
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
        return call(left) if left else None

    return merge_and_call


def perform(
    runtime: WorkerRuntime,
    shard: Shard,
    fence: int,
    jobs: list[TakenJob],
    config: Config,
    limits: TimeLimits | None = None,
) -> Outcome:
    """Performs a batch (the worker with its middlewares) and decides what becomes of its jobs.

    Raises:
        WrittenOff: the batch, the shard and what is in flight of it are somebody else's, who reports it all.
    """
    worker = runtime.instance
    execution = Execution(type(worker), shard.index, fence, jobs, shard.in_flight.load_payload, limits, shard)
    payloads_by_id = {job.id: job.payloads for job in jobs}
    ids = [*payloads_by_id]
    observed = _observe(runtime, shard, jobs, execution, limits) if runtime.observers else None
    token = current_execution.set(execution)
    error: BaseException | None = None
    try:
        if limits is None:
            check_done(runtime.call(payloads_by_id), type(worker), "perform")
        else:
            limits.run(lambda: check_done(runtime.call(payloads_by_id), type(worker), "perform"))
    except WrittenOff:
        raise
    except BaseException as raised:
        error = raised
    finally:
        current_execution.reset(token)
        if observed is not None:
            observed.leave()
    if error is None and not execution._outcomes and not shard.in_flight.found_no_redis:
        outcome = Outcome(ids)
    else:
        found_no_redis = shard.in_flight.found_no_redis
        outcome = outcome_of(worker, jobs, execution._outcomes, error, config, found_no_redis)
    outcome.observed = observed
    _forget_errors(execution)
    try:
        return outcome
    finally:
        del error, outcome  # this frame is a part of the traceback


async def aperform(
    runtime: WorkerRuntime,
    shard: Shard,
    fence: int,
    jobs: list[TakenJob],
    config: Config,
    limits: TimeLimits | None = None,
    *,
    cancelled: Callable[[], bool] | None = None,
) -> Outcome:
    """As `perform`, for an async worker, in a task of its own.

    Raises:
        WrittenOff. asyncio.CancelledError: the task was cancelled. Nothing is decided then, and what the handler has
        said to be done is finished.
    """
    worker = runtime.instance
    execution = Execution(type(worker), shard.index, fence, jobs, shard.in_flight.load_payload, limits, shard)
    execution._cancelled = cancelled
    payloads_by_id = {job.id: job.payloads for job in jobs}
    ids = [*payloads_by_id]
    observed = _observe(runtime, shard, jobs, execution, limits) if runtime.observers else None
    token = current_execution.set(execution)
    error: BaseException | None = None
    is_over = False
    try:
        if limits is None:
            await _awaited(runtime, payloads_by_id)
        else:
            await limits.arun(lambda: _awaited(runtime, payloads_by_id))
    except WrittenOff:
        raise
    except asyncio.CancelledError as raised:
        if _is_cancelled(cancelled):
            shard.in_flight.finish(done_ids(execution._outcomes))
            is_over = True
            raise
        # Not this task was cancelled, but something that the handler awaits: for the batch that is an error.
        error = LowqError("what the handler awaited was cancelled")
        error.__cause__ = raised
    except BaseException as raised:
        error = raised
    finally:
        current_execution.reset(token)
        if observed is not None:
            observed.leave()
            if is_over:
                observed.ended(None)
    if error is None and not execution._outcomes and not shard.in_flight.found_no_redis:
        outcome = Outcome(ids)
    else:
        found_no_redis = shard.in_flight.found_no_redis
        outcome = outcome_of(worker, jobs, execution._outcomes, error, config, found_no_redis)
    outcome.observed = observed
    _forget_errors(execution)
    try:
        return outcome
    finally:
        del error, outcome  # this frame is a part of the traceback


def _forget_errors(execution: Execution) -> None:
    """Nothing but the outcome refers to what was raised any more."""
    for job_id, (verb, _) in execution._outcomes.items():
        if verb in ("fail", per_id.RAISED):
            execution._outcomes[job_id] = (verb, None)


async def _awaited(runtime: WorkerRuntime, payloads_by_id: dict[str, list[Any]]) -> None:
    pending = runtime.call(payloads_by_id)
    if pending is not None:  # a wrapper that is no async def may have performed it already
        check_done(await pending, type(runtime.instance), "perform")


def _observe(
    runtime: WorkerRuntime,
    shard: Shard,
    jobs: list[TakenJob],
    execution: Execution,
    limits: TimeLimits | None,
) -> ObservedBatch | None:
    """Has the observers follow the batch, in this thread or task. None: they could not be told."""
    batch = runtime.observers, execution.worker, shard, jobs, runtime.server_offset
    observed: ObservedBatch | None = call_observer(observing.begin, *batch)
    execution._observed = observed
    if limits is not None:
        limits.observed = observed  # for whoever reports the batch, should it be written off
    return observed


def end_observed(outcome: Outcome, jobs: Sequence[TakenJob]) -> None:
    """Tells those who follow the batch, if anybody does, what became of it: once that is written, or can't be."""
    observed, outcome.observed = outcome.observed, None
    if observed is not None:
        call_observer(lambda: observed.ended(observing.result_of(outcome, jobs)))


def log_begin(runtime: WorkerRuntime, shard: Shard, jobs: list[TakenJob], delivery: int) -> None:
    """Logs that a batch begins. Of `perform_one` with several ids, each is logged when it begins."""
    if not runtime.is_per_id or len(jobs) == 1:
        job_log.begins(shard, [job.id for job in jobs], delivery)
