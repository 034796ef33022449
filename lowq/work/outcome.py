"""What becomes of each job of a batch: decided, written, and then told to the worker.

Whatever an application's objects do, an outcome is written, or its jobs would be performed for ever. So it is made of
what was taken, not of what the handler was given; what belongs to the application is called by `Outcome.ask` alone,
which catches everything; and neither worker nor log learns of it before it is written.
"""

import asyncio
import random
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from lowq.codec import MAX_TIME, original_payload
from lowq.codec.error_text import cut_error, dump_text
from lowq.errors import LowqError, PushInterrupted, RedisNotReady, RedisUnavailable, TimeLimitExceeded
from lowq.job import Job
from lowq.logs import describe, get_log, printable
from lowq.middleware import check_done
from lowq.observe.emit import ObservedBatch
from lowq.observe.events import BatchResult, JobFailure, Verdict
from lowq.retry import (
    MAX_RETRY_COUNT,
    RetryIn,
    checked_retry_in,
    default_retry_in,
    find_policy,
    is_exhausted,
    policies_of,
    retry_delay,
)
from lowq.settings import Config
from lowq.shards.delivery import Failure, TakenJob, Undecodable
from lowq.shards.in_flight import Report
from lowq.shards.shard import Shard
from lowq.work import per_id
from lowq.work.time_limits import TimeLimits, WrittenOff
from lowq.workers import Worker, is_async, payload_type_of

log = get_log("lowq.node")

T = TypeVar("T")

#: What ends a thread, a generator or a process where nobody expects it: out of a handler, and of what of the
#: application's is called for it, it is a failure of the job.
STOPS = (asyncio.CancelledError, GeneratorExit, SystemExit)

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
    #: What stops the process once the outcome is written: KeyboardInterrupt and the like, of the handler or of a hook.
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
    #: In which the handler ran, for what is called and logged because of the outcome.
    context: Context = field(default_factory=copy_context)

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
        if self.stop is None and not _is_failure(raised) and not issubclass(type(raised), STOPS):
            self.stop = raised

    def result(self, jobs: Sequence[TakenJob]) -> BatchResult:
        """What observers hear of it, once it is written or can't be any more. ``jobs``: those of the batch."""
        retries = {job.id: job.retry_count + 1 for job in jobs}
        verdicts: dict[str, Verdict] = {failure.id: failure.verdict for failure in self.failures}
        verdicts |= dict.fromkeys([job_id for job_id, _ in self.releases], "released")
        verdicts |= dict.fromkeys([job_id for job_id, _ in self.buries], "buried")
        verdicts |= dict.fromkeys(self.crashed, "crashed")
        raised = self.raised or {}
        failures = tuple(
            JobFailure(job_id, verdict, raised.get(job_id), retries.get(job_id, 0))
            for job_id, verdict in verdicts.items()
        )
        error = None if type(self.error) is WrittenOff else self.error
        return BatchResult(tuple(self.finished), failures, error, self.is_written)

    def forget(self) -> None:
        """Lets go of what was raised, once it is written and logged: it holds the frames of handlers, and with them all
        that these have held, as a lock that a retry needs.
        """
        self.error = self.raised = self.stop = None
        self.remarks.clear()


def _is_failure(error: BaseException) -> bool:
    """Whether it says that something failed; otherwise it says that the process is to stop."""
    # By its type: isinstance also asks what an object says of its class.
    if issubclass(type(error), BaseExceptionGroup):
        group: Any = error
        return all(_is_failure(one) or issubclass(type(one), STOPS) for one in group.exceptions)
    return issubclass(type(error), Exception | TimeLimitExceeded)


def done_ids(outcomes: dict[str, tuple[str, Any]]) -> list[str]:
    """What is done whatever becomes of the rest of its batch. ``outcomes`` may change meanwhile."""
    return [job_id for job_id, (verb, _) in dict(outcomes).items() if verb == "done"]


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
        elif not verb and pause < len(NO_REDIS_PAUSES) and found_no_redis_in(raised):
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


def outcome_of(
    worker: Performer,
    jobs: list[TakenJob],
    outcomes: dict[str, tuple[str, Any]],
    error: BaseException | None,
    config: Config,
    found_no_redis: dict[str, int],
) -> Outcome:
    """As `decide`, which something of the application's may break: then it decides without that."""
    try:
        return decide(worker, jobs, outcomes, error, config, found_no_redis)
    except BaseException as raised:  # MemoryError, for example: the handler may have left none
        return _decide_plainly(jobs, outcomes, error, raised, found_no_redis)


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
    if outcome.stop is None and not _is_failure(trouble) and not issubclass(type(trouble), STOPS):
        outcome.stop = trouble
    return outcome


#: What `_decide_plainly` goes by.
_PLAIN_WORKER: Worker[Any] = Worker()


_PLAIN_CONFIG = Config()


def write_off(worker: Performer, shard: Shard, limits: TimeLimits, config: Config) -> Outcome:
    """What becomes of a delivery whose handler did not come back within ``ttr``. What it has said of single ids holds,
    the others of its batch are charged a crash, and the batches after it wait again.

    The handler may come to life meanwhile, and set outcomes and change payloads: from here on nobody asks for them.
    """
    outcomes, jobs = dict(limits.outcomes), list(limits.jobs)
    outcome = outcome_of(worker, jobs, outcomes, WrittenOff(), config, shard.in_flight.found_no_redis)
    batch = {job.id for job in jobs}
    outcome.stop, outcome.is_written = None, False
    outcome.observed = limits.observed
    outcome.raised = (outcome.raised or {}) | dict.fromkeys(outcome.crashed, limits.overdue())
    outcome.releases += [(job_id, None) for job_id in shard.in_flight.in_hand if job_id not in batch]
    return outcome


def found_no_redis_in(error: BaseException | None) -> bool:
    """Whether it says that Redis did not answer, or could not serve, as the handler heard it from lowq: then no id has
    failed. Neither a subclass of the application's own says so, nor `RedisFull`, as a Redis that is full answers.
    """
    if issubclass(type(error), BaseExceptionGroup):
        group: Any = error
        return all(map(found_no_redis_in, group.exceptions))
    if type(error) is PushInterrupted:
        error = error.__cause__
    return type(error) in (RedisUnavailable, RedisNotReady)


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
        return dump_text(config.dump_error, config.format_error(error) if said is None else said)  # type: ignore[arg-type]

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


async def notify_worker(outcome: Outcome, worker: Performer, config: Config) -> None:
    """Tells the worker what was given up, once that is written. ``retries_exhausted`` of an async worker may be an
    async def.
    """
    if not outcome.exhausted:
        return
    kind: type[Worker[Any]] = type(worker)  # type: ignore[assignment]  # whatever performs
    typed = payload_type_of(kind)
    load_payload = config.load_payload if typed is None else typed.load
    buried = [_buried(outcome, job, failure, config, load_payload) for job, failure in outcome.exhausted]
    try:
        returned: Any = worker.retries_exhausted(buried)
        if returned is not None and is_async(kind):
            returned = await returned
        check_done(returned, kind, "retries_exhausted")
    except BaseException as raised:
        outcome.remark(f"{kind.__name__}.retries_exhausted failed", raised)


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
    """Logs what went wrong beside the handler, once the outcome is written."""
    for remark, raised in outcome.remarks:
        log.error("%s", printable(remark), exc_info=raised)


async def bury_undecodable(
    shard: Shard,
    undecodable: list[Undecodable],
    config: Config,
    write: Callable[[Shard, Sequence[Report]], Awaitable[object]],
    now: float | None = None,
) -> None:
    """Payloads that can't be decoded go to the morgue as they are, and don't stop the shard.

    Raises:
        LeaseLost, RedisUnavailable: as of ``write``. What is no Exception of ``dump_error``, once they are buried.
    """
    hooks = Outcome()
    for item in undecodable:
        # One call each: they are rare, and may be large.
        burial = item.id, _error_bytes(hooks, item.reason, config), (item.payload,)
        await write(shard, [shard.in_flight.bury_report([burial], now)])
    for item in undecodable:
        log.error("queue %r, id %r: %s; it is in the morgue now", shard.queue, item.id, printable(item.reason))
    log_remarks(hooks)
    if hooks.stop is not None:
        raise hooks.stop
