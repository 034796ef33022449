"""One batch: performed, and what becomes of each of its jobs.

::

    jobs -> payloads_by_id -> middlewares -> perform -> Outcome -> report -> notify
                                                |
                                 lowq.current(): outcomes of single ids, which win over an exception

A batch that fails as a whole says nothing about any one id: each is tried again alone, uncharged. Only an id that
fails alone, or that the handler named, is charged a retry.

Whatever an application's objects do, an outcome is written, or its jobs would be performed for ever. So it is made of
what was taken, not of what the handler was given; what belongs to the application is called by `Outcome.ask` alone,
which catches everything; and neither worker nor log learns of it before it is written.
"""

import asyncio
import random
import traceback
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, Self, TypeVar

from lowq import codec
from lowq.broker.delivery import Delivery, Failure, TakenJob, Undecodable
from lowq.broker.in_flight import Report
from lowq.broker.shard import Shard
from lowq.codec import MAX_TIME, delay_seconds, original_payload
from lowq.duration import duration
from lowq.error_policies import RetryIn, checked_retry_in, find_policy, policies_of
from lowq.errors import LowqError, PushInterrupted, RedisNotReady, RedisUnavailable, TimeLimitExceeded
from lowq.job import Job
from lowq.logs import describe, get_log
from lowq.middleware import check_done, check_plain, wrap, wrap_async
from lowq.node import job_log, observing, per_id
from lowq.node.per_id import Batch
from lowq.node.time_limits import TimeLimits, WrittenOff, checked_seconds
from lowq.observers import ObservedBatch, Observer, call_observer
from lowq.queue_options import MergeFunction, merged
from lowq.retry import MAX_RETRY_COUNT, default_retry_in, is_exhausted, retry_delay
from lowq.settings import Config, cut_error, dump_text
from lowq.workers import Worker, handler_of, is_async, payload_type_of, time_limits_of

log = get_log("lowq.node")

T = TypeVar("T")

#: Seconds until a job is tried again whose handler found no Redis, the first time in a row, the second ...; None: at
#: once. After them it is charged a retry: Redis answers the node all the while, so it is something else.
NO_REDIS_PAUSES: tuple[float | None, ...] = (None, 1.0, 5.0, 15.0, 30.0)


class Performer(Protocol):
    """What is needed of a worker's instance."""

    @property
    def max_retry_count(self) -> int: ...

    def perform(self, payloads_by_id: dict[str, list[Any]]) -> object: ...

    @property
    def retry_in(self) -> RetryIn: ...

    def retries_exhausted(self, jobs: list[Job]) -> object: ...


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

    return Batch(
        execution._outcomes, execution._limits, is_leaving=is_leaving,
        is_cancelled=lambda: _is_cancelled(cancelled), on_begin=execution._begin,
    )  # fmt: skip


@dataclass(slots=True)
class Outcome:
    """What becomes of the jobs of a batch."""

    finished: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    releases: list[tuple[str, float | None]] = field(default_factory=list)
    buries: list[tuple[str, bytes]] = field(default_factory=list)
    #: Made the process stop: counted as crashes.
    crashed: list[str] = field(default_factory=list)
    #: Jobs whose oldest payload is given up.
    exhausted: list[tuple[TakenJob, Failure]] = field(default_factory=list)
    #: What the handler raised.
    error: BaseException | None = None
    #: What stops the process once the outcome is written: SystemExit and the like, of the handler or of a hook.
    stop: BaseException | None = None
    #: Whether all that went wrong is what ``release_on`` expects.
    is_expected: bool = False
    #: What is to be logged then: a text, and what was raised.
    remarks: list[tuple[str, BaseException | None]] = field(default_factory=list)
    #: What the ids failed with, for observers: what was raised, or the handler's text. None: nothing did.
    raised: dict[str, BaseException | str] | None = None
    #: Those who follow the batch; None: nobody does.
    observed: ObservedBatch | None = None
    #: Whether what did not simply finish is written.
    is_written: bool = True

    @property
    def whole(self) -> bool:
        """Whether all jobs finished: nothing but an acknowledgement is left to write."""
        return self.error is None and not (self.failures or self.releases or self.buries)

    def ask(self, remark: str, function: Callable[[], T], otherwise: T) -> T:
        """Calls what belongs to the application. Whatever it raises is kept for later, with the remark."""
        try:
            return function()
        except BaseException as raised:
            self.remark(remark, raised)
            return otherwise

    def remark(self, remark: str, raised: BaseException) -> None:
        """Keeps what something of the application's raised."""
        self.remarks.append((remark, raised))
        if self.stop is None and not _is_failure(raised):
            self.stop = raised


def _is_failure(error: BaseException) -> bool:
    """Whether it says that something failed; otherwise it says that the process is to stop."""
    # By its type: isinstance also asks what an object says of its class.
    return issubclass(type(error), Exception | TimeLimitExceeded)


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
        inner, is_per_id = instance.perform, handler_of(worker) == "perform_one"
        if is_per_id:
            one_by_one = per_id.aone_by_one if is_async(worker) else per_id.one_by_one
            seconds = ttr if time_limit is None else time_limit
            inner = one_by_one(worker, instance.perform_one, partial(_batch_of, is_stopping), seconds)
        if on_perform is not None:
            inner = _observed(on_perform, inner)
        call = around(middlewares, worker, inner)
        if callable(worker.merge):
            call = _merging(worker.merge, call)
        return cls(instance, call, worker.batch_size, time_limit, ttr, is_per_id, observers, server_offset)


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
            if not left[job_id]:
                del left[job_id]
                execution.done(job_id)
        return call(left) if left else None

    return merge_and_call


def decodable_jobs(shard: Shard, delivery: Delivery, config: Config, now: float | None = None) -> list[TakenJob]:
    """The jobs of a delivery that can be handed over. Payloads that can't be decoded go to the morgue as they are.

    Raises:
        LeaseLost, RedisUnavailable. What is no Exception of ``dump_error``, once they are buried.
    """
    if not delivery.undecodable:
        return delivery.jobs  # also one whose payloads somebody has removed by hand: performed, it is done with
    bury_undecodable(shard, delivery.undecodable, config, now)
    return [job for job in delivery.jobs if job.payloads]


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
        outcome = _outcome_of(worker, shard, jobs, execution, error, config)
    outcome.observed = observed
    return outcome


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
        outcome = _outcome_of(worker, shard, jobs, execution, error, config)
    outcome.observed = observed
    return outcome


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


def _outcome_of(
    worker: Performer,
    shard: Shard,
    jobs: list[TakenJob],
    execution: Execution,
    error: BaseException | None,
    config: Config,
) -> Outcome:
    counts = shard.in_flight.found_no_redis
    try:
        return decide(worker, jobs, execution._outcomes, error, config, counts)
    except BaseException as raised:  # MemoryError, for example: the handler may have left none
        return _decide_plainly(jobs, execution._outcomes, error, raised, counts)


def done_ids(outcomes: dict[str, tuple[str, Any]]) -> list[str]:
    """What is done whatever becomes of the rest of its batch. ``outcomes`` may change meanwhile."""
    return [job_id for job_id, (verb, _) in dict(outcomes).items() if verb == "done"]


def write_off(runtime: WorkerRuntime, shard: Shard, limits: TimeLimits, config: Config) -> Outcome:
    """What becomes of a delivery whose handler did not come back within ``ttr``. What it has said of single ids holds,
    the others of its batch are charged a crash, and the batches after it wait again.

    The handler may come to life meanwhile, and set outcomes and change payloads: from here on nobody asks for them.
    """
    outcomes, worker = dict(limits.outcomes), runtime.instance
    jobs, counts, gone = list(limits.jobs), shard.in_flight.found_no_redis, WrittenOff()
    try:
        outcome = decide(worker, jobs, outcomes, gone, config, counts)
    except BaseException as raised:
        outcome = _decide_plainly(jobs, outcomes, gone, raised, counts)
    batch = {job.id for job in jobs}
    outcome.stop, outcome.is_written = None, False
    outcome.observed = limits.observed
    outcome.raised = (outcome.raised or {}) | dict.fromkeys(outcome.crashed, limits.overdue())
    outcome.releases += [(job_id, None) for job_id in shard.in_flight.in_hand if job_id not in batch]
    return outcome


def conclude(
    runtime: WorkerRuntime, shard: Shard, outcome: Outcome, config: Config, write: Callable[[Shard, Outcome], object]
) -> None:
    """Has what became of a batch written, then notifies the worker. What simply finished the next take acknowledges.
    What is to be logged is left to the caller, which knows what else there is to say of it.

    Should the process die before ``write`` (which is `report`, or calls it) has written it, the jobs are restored and
    performed again.

    Raises:
        LeaseLost, RedisUnavailable
    """
    shard.in_flight.finish(outcome.finished)
    if not outcome.whole:
        outcome.is_written = False
        write(shard, outcome)
        outcome.is_written = True
        notify_worker(outcome, runtime.instance, config)


def decide(
    worker: Performer,
    jobs: list[TakenJob],
    outcomes: dict[str, tuple[str, Any]],
    error: BaseException | None,
    config: Config,
    found_no_redis: dict[str, int],
) -> Outcome:
    """What becomes of each job, given the outcomes that the handler has set and what it raised."""
    outcome = Outcome(error=error)
    raised_by = outcome.raised = {}
    if error is not None and not _is_failure(error):
        outcome.stop = error
    data = b""  # of the error, once it is needed
    policies = policies_of(getattr(type(worker), "_by_error", (None, None)), (config.bury_on, config.release_on))
    expected = 0
    for job in jobs:
        verb, detail = outcomes.get(job.id, ("", None))
        pause = found_no_redis.pop(job.id, 0)
        raised: Any = error
        is_alone = len(jobs) == 1
        if verb in ("fail", per_id.RAISED):
            raised, is_alone = detail, True
            verb = verb if verb == "fail" else ""
        if verb == "done" or (not verb and raised is None):
            outcome.finished.append(job.id)
            continue
        if verb != "release":
            raised_by[job.id] = detail if verb == "bury" else raised
        if verb == "release":
            outcome.releases.append((job.id, detail))
        elif verb == "bury":
            outcome.buries.append((job.id, _error_bytes(outcome, detail, config)))
        elif type(raised) is str:
            _charge(outcome, worker, job, raised, config)
        elif not verb and not _is_failure(raised):
            outcome.crashed.append(job.id)
        elif not verb and pause < len(NO_REDIS_PAUSES) and _found_no_redis(raised):
            outcome.releases.append((job.id, NO_REDIS_PAUSES[pause]))
            found_no_redis[job.id] = pause + 1
        elif (policy := find_policy(policies, raised)) is not None and (delay := policies[policy]) is not None:
            outcome.releases.append((job.id, delay))
            expected += 1
        elif is_alone and policy is not None:
            outcome.buries.append((job.id, _error_bytes(outcome, raised, config)))
        elif is_alone:
            _charge(outcome, worker, job, raised, config)
        else:
            data = data or _error_bytes(outcome, raised, config)
            outcome.failures.append(Failure(job.id, "solo", job.retry_count, 0.0, data))
    others = outcome.failures or outcome.buries or outcome.crashed
    outcome.is_expected = expected > 0 and not others and expected == len(outcome.releases)
    return outcome


def _found_no_redis(error: BaseException | None) -> bool:
    """Whether it says that Redis did not answer, or could not serve, as the handler heard it from lowq: then no id has
    failed. Neither a subclass of the application's own says so, nor `RedisFull`, as a Redis that is full answers.
    """
    if type(error) is PushInterrupted:
        error = error.__cause__
    return type(error) in (RedisUnavailable, RedisNotReady)


def _decide_plainly(
    jobs: list[TakenJob],
    outcomes: dict[str, tuple[str, Any]],
    error: BaseException | None,
    trouble: BaseException,
    found_no_redis: dict[str, int],
) -> Outcome:
    """As `decide`, with nothing that belongs to the application."""
    plain: BaseException | None = error
    if error is not None and _is_failure(error):
        plain = LowqError("the job failed, and so did the attempt to say how")
    unknown = ("fail", "the handler said that it failed, and its reason can't be shown")
    plain_outcomes = {
        job_id: unknown if verb in ("fail", per_id.RAISED) else (verb, detail)
        for job_id, (verb, detail) in outcomes.items()
    }
    outcome = decide(_PLAIN_WORKER, jobs, plain_outcomes, plain, _PLAIN_CONFIG, found_no_redis)
    outcome.error = error
    outcome.remarks.append(("what becomes of a batch could not be decided; its jobs are charged", trouble))
    if outcome.stop is None and not _is_failure(trouble):
        outcome.stop = trouble
    return outcome


#: What `_decide_plainly` goes by.
_PLAIN_WORKER: Worker[Any] = Worker()
_PLAIN_CONFIG = Config()


def _charge(outcome: Outcome, worker: Performer, job: TakenJob, error: BaseException | str, config: Config) -> None:
    data = _error_bytes(outcome, error, config)
    retry_count = job.retry_count + 1
    most = outcome.ask(
        "max_retry_count is not to be had; the default is used", lambda: int(worker.max_retry_count), MAX_RETRY_COUNT
    )
    if is_exhausted(retry_count, most):
        failure = Failure(job.id, "exhausted", retry_count, 0.0, data)
        outcome.exhausted.append((job, failure))
    else:
        failure = Failure(
            job.id, "retry", retry_count, _retry_delay(outcome, worker, config, job.id, retry_count, error), data
        )
    outcome.failures.append(failure)


def describe_failure(failure: Failure, max_retry_count: int) -> str:
    """What becomes of an id that failed, for people."""
    if failure.verdict == "retry":
        return f"id {failure.id}: retry {failure.retry_count + 1} of {max_retry_count} in {duration(failure.delay)}"
    if failure.verdict == "solo":
        return f"id {failure.id}: tried again alone"
    return f"id {failure.id}: no retries left, its oldest payload is in the morgue now"


def _retry_delay(
    outcome: Outcome, worker: Performer, config: Config, job_id: str, retry_count: int, error: BaseException | str
) -> float:
    kind, default = type(worker), config.retry_in
    call = f"{kind.__name__}.retry_in({retry_count})"

    def ask() -> float:
        if default is not None and getattr(kind, "retry_in", None) is Worker.retry_in:
            return float(default(retry_count, error) if checked_retry_in("", default) else default(retry_count))
        if getattr(kind, "_retry_in_takes_error", False):
            return float(worker.retry_in(retry_count, error))
        return float(worker.retry_in(retry_count))

    delay = outcome.ask(f"{call} failed for id {job_id!r}; the default is used", ask, None)
    if delay is not None:
        bounded = retry_delay(delay)
        if bounded is not None:
            return bounded
        outcome.remarks.append((f"{call} gave {delay!r}; the default is used", None))
    return min(default_retry_in(retry_count), MAX_TIME)


def _error_bytes(outcome: Outcome, error: BaseException | str, config: Config) -> bytes:
    said = error if type(error) is str else None  # not isinstance: see `_is_failure`

    def dump() -> bytes:
        return dump_text(config, config.format_error(error) if said is None else said)  # type: ignore[arg-type]

    data = outcome.ask("format_error or dump_error failed; the bare error is kept", dump, None)
    if data is None:
        text = describe(error, _bare) if said is None else said
        data = cut_error(text).encode("utf-8", "backslashreplace")
    return data


def _bare(error: Any) -> str:
    return "".join(traceback.format_exception_only(error)).rstrip()


def reports_of(shard: Shard, outcome: Outcome, now: float | None = None) -> list[Report]:
    """What is to be written of an outcome: what did not simply finish, each kind with one script. May be repeated as
    a whole. If Redis executes only some of them, what was not reported is restored and performed again.
    """
    in_flight = shard.in_flight
    reports: list[Report] = []
    if outcome.failures:
        reports.append(in_flight.fail_report(outcome.failures, now))
    if outcome.releases:
        reports.append(in_flight.release_report(outcome.releases, now))
    if outcome.buries:
        reports.append(in_flight.bury_report([(job_id, reason, ()) for job_id, reason in outcome.buries], now))
    if outcome.crashed:
        delays = [(job_id, random.uniform(0.05, 0.5)) for job_id in outcome.crashed]
        reports.append(in_flight.release_report(delays, now, crashed=True))
    return reports


def report(shard: Shard, outcome: Outcome, now: float | None = None) -> None:
    """Writes what `reports_of` says.

    Raises:
        LeaseLost, RedisUnavailable
    """
    reports = reports_of(shard, outcome, now)
    if reports:
        shard.in_flight.write(reports)


def notify_worker(outcome: Outcome, worker: Performer, config: Config) -> None:
    """Tells the worker what was given up, once `report` has written it."""
    if not outcome.exhausted:
        return
    typed = payload_type_of(type(worker))
    load_payload = config.load_payload if typed is None else typed.load
    buried = [_buried(outcome, job, failure, config, load_payload) for job, failure in outcome.exhausted]
    outcome.ask(
        f"{type(worker).__name__}.retries_exhausted failed",
        lambda: check_done(worker.retries_exhausted(buried), type(worker), "retries_exhausted"),
        None,
    )


async def anotify_worker(outcome: Outcome, worker: Performer, config: Config) -> None:
    """As `notify_worker`, for an async worker, whose ``retries_exhausted`` may be an async def."""
    if not outcome.exhausted:
        return
    typed = payload_type_of(type(worker))
    load_payload = config.load_payload if typed is None else typed.load
    buried = [_buried(outcome, job, failure, config, load_payload) for job, failure in outcome.exhausted]
    try:
        pending: Any = worker.retries_exhausted(buried)
        if pending is not None:
            await pending
    except BaseException as raised:
        outcome.remark(f"{type(worker).__name__}.retries_exhausted failed", raised)


def _buried(
    outcome: Outcome, job: TakenJob, failure: Failure, config: Config, load_payload: Callable[[bytes], Any]
) -> Job:
    oldest, score = original_payload(job.raw[3]), job.raw[4]
    payload = outcome.ask(
        f"id {job.id!r}: load_payload failed", lambda: load_payload(oldest), oldest.decode("utf-8", "replace")
    )
    text = outcome.ask(
        "load_error failed", lambda: config.load_error(failure.error), failure.error.decode("utf-8", "backslashreplace")
    )
    return Job(job.id, "morgue", [(payload, float(score))], None, failure.retry_count, text, payloads_count=1)


def log_remarks(outcome: Outcome) -> None:
    """Logs what went wrong beside the handler, once `report` has written the outcome."""
    for remark, raised in outcome.remarks:
        log.error("%s", remark, exc_info=raised)


def bury_undecodable(shard: Shard, undecodable: list[Undecodable], config: Config, now: float | None = None) -> None:
    """Payloads that can't be decoded go to the morgue as they are, and don't stop the shard.

    Raises:
        LeaseLost, RedisUnavailable. What is no Exception of ``dump_error``, once they are buried.
    """
    hooks = Outcome()
    for item in undecodable:
        # One call each: they are rare, and may be large.
        shard.in_flight.bury([(item.id, _error_bytes(hooks, item.reason, config), (item.payload,))], now)
    for item in undecodable:
        log.error("queue %r, id %r: %s; it is in the morgue now", shard.queue, item.id, item.reason)
    log_remarks(hooks)
    if hooks.stop is not None:
        raise hooks.stop
