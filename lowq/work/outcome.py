"""The outcome of a batch: decided for each of its jobs, written, and then told to the worker and the log.

Whatever an application's objects do, an outcome is written, or its jobs would be performed for ever. So it is made of
the jobs as they were taken, not as the handler was given them. `Remarks.ask` alone calls the application's code, and
catches everything. Neither worker nor log learns of an outcome before it is written.
"""

import random
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any, cast

from lowq.clock import duration
from lowq.codec import MAX_TIME, original_payload
from lowq.errors import JobCancelled, LimitTimeout, LowqError, PushInterrupted, RedisNotReady, RedisUnavailable
from lowq.job import Job
from lowq.logs import describe, get_log, printable, where
from lowq.middleware import check_done
from lowq.observe.events import BatchResult, JobFailure, ObservedBatch, Verdict
from lowq.retry import (
    MAX_RETRY_COUNT,
    attempt_text,
    checked_retry_in,
    default_retry_in,
    find_policy,
    policies_of,
    retry_delay,
)
from lowq.settings import Config
from lowq.shards.delivery import Failure, Report, TakenJob
from lowq.shards.shard import Shard
from lowq.verdicts import Remarks, charge, error_bytes, is_failure
from lowq.work.handler import RAISED, Execution
from lowq.work.time_limits import WrittenOff
from lowq.workers import Worker, is_async, payload_type_of

log = get_log("lowq.node")

#: Seconds until a job is tried again whose handler found no Redis, the first time in a row, the second ...; None: at
#: once. After them it is charged a retry: Redis answers the node all the while, so it is something else.
NO_REDIS_PAUSES: tuple[float | None, ...] = (None, 1.0, 5.0, 15.0, 30.0)


class Outcome(Remarks):
    """The verdict on each job of a batch. ``observed``: its observers; None: there are none."""

    #: id, seconds until it waits again.
    releases: Sequence[tuple[str, float | None]] = ()
    #: id, reason.
    buries: Sequence[tuple[str, bytes]] = ()
    #: Those that were cancelled: nothing of them is left.
    cancelled: Sequence[str] = ()
    #: Made the process stop: counted as crashes.
    crashed: Sequence[str] = ()
    #: Jobs whose oldest payload is given up.
    exhausted: Sequence[tuple[TakenJob, Failure]] = ()
    #: What the handler raised.
    error: BaseException | None = None
    #: For observers, the error of each id that failed: an exception, or the handler's text. None: none failed.
    raised: dict[str, BaseException | str] | None = None
    #: Whether all that went wrong is what ``release_on`` expects.
    is_expected = False
    #: Whether what did not simply finish is written.
    is_written = True

    def __init__(
        self, finished: Sequence[str] = (), failures: Sequence[Failure] = (), observed: ObservedBatch | None = None
    ) -> None:
        self.finished = finished
        self.failures = failures
        self.observed = observed

    def result(self, jobs: Sequence[TakenJob]) -> BatchResult:
        """The result for observers, once it is written or can't be any more. ``jobs``: those of the batch."""
        retries = {job.id: job.retry_count + 1 for job in jobs}
        verdicts: dict[str, Verdict] = {failure.id: failure.verdict for failure in self.failures}
        verdicts |= dict.fromkeys([job_id for job_id, _ in self.releases], "released")
        verdicts |= dict.fromkeys(self.cancelled, "cancelled")
        verdicts |= dict.fromkeys([job_id for job_id, _ in self.buries], "buried")
        verdicts |= dict.fromkeys(self.crashed, "crashed")
        raised = self.raised or {}
        failures = tuple(
            JobFailure(job_id, verdict, raised.get(job_id), retries.get(job_id, 0))
            for job_id, verdict in verdicts.items()
        )
        error = None if type(self.error) is WrittenOff else self.error
        return BatchResult(tuple(self.finished), failures, error, self.is_written)

    def note_written(self, cancelled: Collection[str]) -> None:
        """What did not simply finish is written. ``cancelled``: ids that failed, and were cancelled before that: these
        are neither charged nor given up.
        """
        self.is_written = True
        if cancelled:
            self.cancelled = [*self.cancelled, *cancelled]
            self.failures = [failure for failure in self.failures if failure.id not in cancelled]
            self.exhausted = [(job, failure) for job, failure in self.exhausted if job.id not in cancelled]

    def forget(self) -> None:
        """Drops the errors, once they are written and logged: they hold the frames of handlers, and so whatever these
        have held, as a lock that a retry needs.
        """
        self.error = self.raised = self.stop = None
        self.remarks = ()


def outcome_of(worker: Worker[Any], batch: Execution, error: BaseException | None, config: Config) -> Outcome:
    """Decides what becomes of each job, by the outcomes that the handler has set and the error that it raised. Should
    the application's code break that, it is decided without it.
    """
    outcomes = dict(batch._outcomes)
    try:
        return _decide(worker, batch, outcomes, error, config)
    except BaseException as trouble:  # MemoryError, for example: the handler may have left none
        plain = error
        if error is not None and is_failure(error):
            plain = LowqError("the job failed, and so did the attempt to say how")
        for job_id, (verb, _) in outcomes.items():
            if verb in ("fail", RAISED):
                outcomes[job_id] = "fail", "the handler said that it failed, and its reason can't be shown"
        outcome = _decide(_PLAIN_WORKER, batch, outcomes, plain, _PLAIN_CONFIG)
        outcome.error = error
        outcome.remark("what becomes of a batch could not be decided; its jobs are charged", trouble)
        return outcome


#: For a decision without the application's code.
_PLAIN_WORKER: Worker[Any] = Worker()
_PLAIN_CONFIG = Config()


def _decide(
    worker: Worker[Any],
    batch: Execution,
    outcomes: dict[str, tuple[str, Any]],
    error: BaseException | None,
    config: Config,
) -> Outcome:
    finished: list[str] = []
    failures: list[Failure] = []
    outcome = Outcome(finished, failures, batch._observed)
    releases = outcome.releases = list[tuple[str, float | None]]()
    buries = outcome.buries = list[tuple[str, bytes]]()
    crashed = outcome.crashed = list[str]()
    # Whatever an interrupted handler raises while it cleans up, nobody's job has failed.
    was_told = error is not None and batch._was_told
    outcome.error = None if was_told and type(error) is JobCancelled else error
    raised_by = outcome.raised = {}
    if error is not None and not is_failure(error):
        outcome.stop = error
    data = b""  # of the error, once it is needed
    policies = policies_of(getattr(type(worker), "_by_error", (None, None)), (config.bury_on, config.release_on))
    found_no_redis: dict[str, int] = {} if batch._source is None else batch._source.in_flight.found_no_redis
    jobs: Sequence[Any] = batch._jobs
    expected = 0
    for job in jobs:
        verb, detail = outcomes.get(job.id, ("release" if was_told else "", None))
        pause = found_no_redis.pop(job.id, 0)
        raised: Any = error
        is_alone = len(jobs) == 1
        if verb in ("fail", RAISED):
            raised, is_alone = detail, True
            verb = verb if verb == "fail" else ""
        if verb == "done" or (not verb and raised is None):
            finished.append(job.id)
            continue
        if verb != "release":
            raised_by[job.id] = detail if verb == "bury" else raised
        if verb == "release":
            releases.append((job.id, detail))
        elif verb == "bury":
            buries.append((job.id, error_bytes(outcome, detail, config)))
        elif type(raised) is str:
            failures.append(_charge(outcome, worker, job, raised, config))
        elif not verb and not is_failure(raised):
            crashed.append(job.id)
        elif not verb and pause < len(NO_REDIS_PAUSES) and found_no_redis_in(raised):
            releases.append((job.id, NO_REDIS_PAUSES[pause]))
            found_no_redis[job.id] = pause + 1
        elif type(raised) is LimitTimeout and raised.node_stops:
            releases.append((job.id, None))
        elif (policy := find_policy(policies, raised)) is not None and (delay := policies[policy]) is not None:
            releases.append((job.id, delay))
            expected += 1
        elif is_alone and policy is not None:
            buries.append((job.id, error_bytes(outcome, raised, config)))
        elif is_alone:
            failures.append(_charge(outcome, worker, job, raised, config))
        else:
            data = data or error_bytes(outcome, raised, config)
            failures.append(Failure(job.id, "solo", job.retry_count, 0.0, data))
    stopping = {} if batch._source is None else batch._source.stopping
    if stopping:
        outcome.cancelled = [job_id for job_id, _ in releases if stopping.get(job_id) == (batch.delivery, True)]
    others = failures or buries or crashed
    outcome.is_expected = expected > 0 and not others and expected == len(releases)
    return outcome


def write_off(worker: Worker[Any], shard: Shard, batch: Execution, config: Config) -> Outcome:
    """The outcome of a delivery whose handler did not come back within ``ttr``. Outcomes that it has set hold, the
    other ids of its batch are charged a crash, and the batches after it wait again.

    The handler may come to life meanwhile, and set outcomes and change payloads: from here on they are not read.
    """
    assert batch._limits is not None
    outcome = outcome_of(worker, batch, WrittenOff(), config)
    ids = {job.id for job in batch._jobs}
    outcome.stop, outcome.is_written = None, False
    outcome.raised = (outcome.raised or {}) | dict.fromkeys(outcome.crashed, batch._limits.overdue())
    later = [(job_id, None) for job_id in shard.in_flight.in_hand if job_id not in ids]
    outcome.releases = [*outcome.releases, *later]
    return outcome


def found_no_redis_in(error: BaseException | None) -> bool:
    """Whether it is lowq's error that Redis did not answer, or could not serve: then no id has failed. A subclass of
    the application's own does not count, nor `RedisFull`, as a Redis that is full answers.
    """
    if issubclass(type(error), BaseExceptionGroup):
        group: Any = error
        return all(map(found_no_redis_in, group.exceptions))
    if type(error) is PushInterrupted:
        error = error.__cause__
    return type(error) in (RedisUnavailable, RedisNotReady)


def _charge(
    outcome: Outcome, worker: Worker[Any], job: TakenJob, error: BaseException | str, config: Config
) -> Failure:
    most = outcome.ask(
        "max_retry_count is not to be had; the default is used", lambda: int(worker.max_retry_count), MAX_RETRY_COUNT
    )
    failure = charge(
        job.id, job.retry_count, most, lambda count: _retry_delay(outcome, worker, config, job.id, count, error),
        error_bytes(outcome, error, config),
    )  # fmt: skip
    if failure.verdict == "exhausted":
        outcome.exhausted = [*outcome.exhausted, (job, failure)]
    return failure


def _retry_delay(
    outcome: Outcome, worker: Worker[Any], config: Config, job_id: str, retry_count: int, error: BaseException | str
) -> float:
    kind, default = type(worker), cast("Callable[..., Any] | None", config.retry_in)
    call = f"{kind.__name__}.retry_in({retry_count})"

    def ask() -> float:
        if default is not None and getattr(kind, "retry_in", None) is Worker.retry_in:
            function, takes_error = default, checked_retry_in("", default)
        else:
            function, takes_error = worker.retry_in, getattr(kind, "_retry_in_takes_error", False)
        result: Any = function(retry_count, error) if takes_error else function(retry_count)
        return result.total_seconds() if isinstance(result, timedelta) else float(result)

    delay = outcome.ask(f"{call} failed for id {job_id!r}; the default is used", ask, None)
    if delay is not None:
        bounded = retry_delay(delay)
        if bounded is not None:
            return bounded
        outcome.remark(f"{call} gave {delay!r}; the default is used", None)
    return min(default_retry_in(retry_count), MAX_TIME)


def reports_of(shard: Shard, outcome: Outcome, now: float | None = None) -> list[Report]:
    """The reports of all jobs that did not simply finish, one script for each kind. May be repeated as a whole. If
    Redis executes only some of them, the other jobs are restored and performed again.
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


async def notify_worker(outcome: Outcome, worker: Worker[Any], config: Config) -> None:
    """Calls ``retries_exhausted``, once the outcome is written. That of an async worker may be an async def."""
    if not outcome.exhausted:
        return
    kind = type(worker)
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


def log_failure(shard: Shard, jobs: list[TakenJob], outcome: Outcome, worker: Worker[Any]) -> None:
    """Logs the error, and what becomes of each id: one line, with the place, if all are tried again, however
    often they fail; an error with its traceback if one goes to the morgue.
    """
    if outcome.cancelled:
        log.info(
            "%r: cancelled: ids %s", shard, printable(", ".join(outcome.cancelled[:3])),
            extra={"event": "job_cancelled", "queue": shard.queue, "shard": shard.index,
                   "ids": outcome.cancelled[:100]},
        )  # fmt: skip
    if outcome.error is None and not outcome.failures:
        return
    if outcome.is_expected:
        delay = outcome.releases[0][1]
        what = "named by the handler" if outcome.error is None else printable(describe(outcome.error))
        log.info(
            "%r: %s; not charged and waiting again, as release_on says: %d, the first in %g s", shard, what,
            len(outcome.releases), delay,
            extra={"event": "released", "queue": shard.queue, "shard": shard.index,
                   "ids": [job_id for job_id, _ in outcome.releases[:100]]},
        )  # fmt: skip
        return
    what = "named by the handler" if outcome.error is None else describe(outcome.error) + where(outcome.error)
    named = [failure.id for failure in outcome.failures] or [job.id for job in jobs]
    most = outcome.ask("max_retry_count is not to be had", lambda: int(worker.max_retry_count), 0)
    outcomes = [_describe(failure, most) for failure in outcome.failures[:3]]
    if outcome.releases:
        outcomes.append(f"not charged and waiting again: {len(outcome.releases)}")
    if outcome.buries:
        outcomes.append(f"in the morgue: {len(outcome.buries)}")
    more = len(outcome.failures) - 3
    text = "".join(
        (f"{shard!r} failed, ids {', '.join(named[:3])}: {what}", *(f"; {item}" for item in outcomes),
         f"; and {more} more" if more > 0 else "")
    )  # fmt: skip
    extra = {
        "event": "failed", "queue": shard.queue, "shard": shard.index, "ids": named[:100],
        "outcome": [failure[:4] for failure in outcome.failures[:100]],
    }  # fmt: skip
    raised = (outcome.error, *(outcome.raised or {}).values())
    error = next((one for one in raised if isinstance(one, BaseException)), None)
    gives_up = outcome.buries or outcome.exhausted or outcome.crashed
    if gives_up or not (outcome.failures or outcome.releases or outcome.cancelled):
        log.error("%s", printable(text), exc_info=error, extra=extra)
        return
    log.warning("%s", printable(text), extra=extra)
    log.debug("%r: where it failed", shard, exc_info=error, extra=extra)


def _describe(failure: Failure, max_retry_count: int) -> str:
    """The verdict on an id that failed, for people."""
    if failure.verdict == "retry":
        return f"id {failure.id}: {attempt_text(failure.retry_count, max_retry_count)} in {duration(failure.delay)}"
    if failure.verdict == "solo":
        return f"id {failure.id}: tried again alone"
    last = attempt_text(failure.retry_count - 1, max_retry_count)
    return f"id {failure.id}: {last} failed, its oldest payload is in the morgue now"
