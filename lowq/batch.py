"""One batch: performed, and what becomes of each of its jobs.

::

    jobs -> payloads_by_id -> middlewares -> perform -> Outcome -> report
                                                |
                                 lowq.current(): words for single ids, which win over an exception

A batch that fails as a whole says nothing about any one id: each is tried again alone, uncharged. Only an id that
fails alone, or that the handler named, is charged a retry.
"""

import logging
import math
import random
import traceback
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

from lowq.config import Config
from lowq.duration import duration
from lowq.errors import LowqError
from lowq.job import MAX_TIME, Job, delay_seconds
from lowq.shard import Failure, Shard, Spoiled, TakenJob
from lowq.worker import default_retry_in

log = logging.getLogger(__name__)


class Performer(Protocol):
    """What is needed of a worker's instance."""

    @property
    def max_retry_count(self) -> int: ...

    def perform(self, payloads_by_id: dict[str, list[Any]]) -> None: ...

    def retry_in(self, retry_count: int) -> float: ...

    def retries_exhausted(self, jobs: list[Job]) -> None: ...


class Execution:
    """What `current` returns: the batch that this thread performs. Only for that thread, only while it performs."""

    def __init__(self, worker: type, shard: int, fence: int, jobs: Sequence[TakenJob] | Sequence[Job]) -> None:
        #: The worker's class.
        self.worker = worker
        #: The number of the shard.
        self.shard = shard
        #: The fencing token: grows with every change of the shard's owner. A database that remembers the highest
        #: one it saw can refuse an owner that was replaced without noticing.
        self.fence = fence
        self._jobs = jobs
        self._words: dict[str, tuple[str, Any]] = {}

    @property
    def jobs(self) -> list[Job]:
        """The jobs of the batch, with scores, retry_count and perform_at."""
        return [item if isinstance(item, Job) else item.job() for item in self._jobs]

    def done(self, job_id: object) -> None:
        """The id is finished, also if ``perform`` raises later."""
        self._say(job_id, "done", None)

    def fail(self, job_id: object, error: BaseException | str) -> None:
        """The id failed: it is charged a retry, whatever becomes of the others."""
        if not isinstance(error, BaseException | str):
            raise LowqError(f"fail({job_id!r}): say the exception or a text, not {error!r:.100}")
        self._say(job_id, "fail", error)

    def release(self, job_id: object, delay: float | timedelta | None = None) -> None:
        """The id waits again, uncharged: ``delay`` seconds, or behind nothing when it is None."""
        # Checked here, where the handler learns of it: once the batch is over, nobody can be told.
        self._say(job_id, "release", None if delay is None else delay_seconds(delay))

    def bury(self, job_id: object, reason: str = "") -> None:
        """The id goes to the morgue with all its payloads."""
        if not isinstance(reason, str):
            raise LowqError(f"bury({job_id!r}): reason is a text, not {reason!r:.100}")
        self._say(job_id, "bury", reason)

    def _say(self, job_id: object, verb: str, detail: Any) -> None:
        name = str(job_id)
        if not any(item.id == name for item in self._jobs):
            raise LowqError(f"{verb}({job_id!r}): the batch being performed has no such id")
        self._words[name] = (verb, detail)


_current: ContextVar[Execution | None] = ContextVar("lowq_execution", default=None)


def current() -> Execution:
    """The batch that is being performed.

    Raises:
        LowqError: called outside of ``perform``.
    """
    execution = _current.get()
    if execution is None:
        raise LowqError(
            "lowq.current() was called outside of perform; in a test of a handler use lowq.testing.execution"
        )
    return execution


@dataclass(slots=True)
class Outcome:
    """What becomes of the jobs of a batch."""

    finished: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    releases: list[tuple[str, float | None]] = field(default_factory=list)
    buries: list[tuple[str, str]] = field(default_factory=list)
    #: Made the process stop: counted as crashes.
    crashed: list[str] = field(default_factory=list)
    #: Jobs whose oldest payload is given up.
    exhausted: list[Job] = field(default_factory=list)
    #: What the handler raised.
    error: BaseException | None = None

    @property
    def whole(self) -> bool:
        """Whether all jobs finished: nothing but an acknowledgement is left to write."""
        return self.error is None and not (self.failures or self.releases or self.buries)


def perform(
    worker: Performer,
    call: Callable[[dict[str, list[Any]]], None],
    shard: int,
    fence: int,
    jobs: list[TakenJob],
    config: Config,
) -> Outcome:
    """Performs a batch through ``call`` (the worker with its middlewares) and decides what becomes of its jobs."""
    execution = Execution(type(worker), shard, fence, jobs)
    payloads_by_id = {job.id: job.payloads for job in jobs}
    token = _current.set(execution)
    error: BaseException | None = None
    try:
        call(payloads_by_id)
    except BaseException as raised:
        error = raised
    finally:
        _current.reset(token)
    if error is None and not execution._words:
        return Outcome([job.id for job in jobs])
    return decide(worker, jobs, execution._words, error, config)


def decide(
    worker: Performer,
    jobs: list[TakenJob],
    words: dict[str, tuple[str, Any]],
    error: BaseException | None,
    config: Config,
) -> Outcome:
    """What becomes of each job, given the handler's words and what it raised."""
    outcome = Outcome(error=error)
    for job in jobs:
        verb, detail = words.get(job.id, ("", None))
        if verb == "done" or (not verb and error is None):
            outcome.finished.append(job.id)
        elif verb == "release":
            outcome.releases.append((job.id, detail))
        elif verb == "bury":
            outcome.buries.append((job.id, detail))
        elif verb == "fail":
            _charge(outcome, worker, job, detail, config)
        elif not isinstance(error, Exception):
            outcome.crashed.append(job.id)
        elif len(jobs) == 1:
            _charge(outcome, worker, job, error, config)
        else:
            outcome.failures.append(Failure(job.id, "solo", job.retry_count, 0.0, _error_bytes(error, config)))
    return outcome


def _charge(outcome: Outcome, worker: Performer, job: TakenJob, error: BaseException | str, config: Config) -> None:
    retry_count = job.retry_count + 1
    data = _error_bytes(error, config)
    if retry_count >= worker.max_retry_count:
        outcome.failures.append(Failure(job.id, "exhausted", retry_count, 0.0, data))
        whole = job.job()
        text = _error_text(data, config)
        outcome.exhausted.append(Job(job.id, "morgue", whole.payloads[:1], None, retry_count, text, payloads_count=1))
    else:
        outcome.failures.append(Failure(job.id, "retry", retry_count, _retry_delay(worker, job.id, retry_count), data))


def fate(failure: Failure, max_retry_count: int) -> str:
    """What becomes of an id that failed, for people."""
    if failure.verdict == "retry":
        return f"id {failure.id}: retry {failure.retry_count + 1} of {max_retry_count} in {duration(failure.delay)}"
    if failure.verdict == "solo":
        return f"id {failure.id}: tried again alone"
    return f"id {failure.id}: no retries left, its oldest payload is in the morgue now"


def _retry_delay(worker: Performer, job_id: str, retry_count: int) -> float:
    try:
        delay = float(worker.retry_in(retry_count))
        if math.isfinite(delay):
            return min(max(delay, 0.0), MAX_TIME)
        log.error("%s.retry_in(%d) gave %r; the default is used", type(worker).__name__, retry_count, delay)
    except Exception:
        log.exception(
            "%s.retry_in(%d) failed for id %r; the default is used",
            type(worker).__name__,
            retry_count,
            job_id,
        )
    return min(default_retry_in(retry_count), MAX_TIME)


def _error_bytes(error: BaseException | str, config: Config) -> bytes:
    # Whatever the application's functions do: an outcome that can't be written would be performed for ever.
    try:
        data: object = config.dump_error(error if isinstance(error, str) else config.format_error(error))
        if isinstance(data, bytes):
            return data
        log.error("dump_error gave a %s instead of bytes; the bare error is kept", type(data).__name__)
    except Exception:
        log.exception("format_error or dump_error failed; the bare error is kept")
    text = error if isinstance(error, str) else "".join(traceback.format_exception_only(error)).rstrip()
    return text.encode("utf-8", "backslashreplace")


def _error_text(data: bytes, config: Config) -> str:
    try:
        return config.load_error(data)
    except Exception:
        log.exception("load_error failed")
        return data.decode("utf-8", "backslashreplace")


def report(shard: Shard, outcome: Outcome, worker: Performer, config: Config, now: float | None = None) -> None:
    """Writes what did not simply finish, each kind with one script. May be repeated as a whole.

    If the process dies between two of them, what was not reported is restored and performed again.

    Raises:
        LeaseLost, RedisUnavailable
    """
    if outcome.failures:
        shard.fail(outcome.failures, now)
    if outcome.releases:
        shard.release(outcome.releases, now)
    if outcome.buries:
        shard.bury([(job_id, _error_bytes(reason, config), ()) for job_id, reason in outcome.buries], now)
    if outcome.crashed:
        shard.release([(job_id, random.uniform(0.05, 0.5)) for job_id in outcome.crashed], now, crashed=True)
    if outcome.exhausted:
        try:
            worker.retries_exhausted(outcome.exhausted)
        except Exception:
            log.exception("%s.retries_exhausted failed", type(worker).__name__)


def bury_spoiled(shard: Shard, spoiled: list[Spoiled], config: Config, now: float | None = None) -> None:
    """Payloads that can't be decoded go to the morgue as they are, and don't stop the shard.

    Raises:
        LeaseLost, RedisUnavailable
    """
    for item in spoiled:
        # One call each: they are rare, and may be large.
        log.error("queue %r, id %r: %s; it is in the morgue now", shard.queue, item.id, item.reason)
        shard.bury([(item.id, _error_bytes(item.reason, config), (item.payload,))], now)
