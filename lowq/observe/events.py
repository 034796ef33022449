"""The events: what happens to pushes, jobs and batches, who observes it, and how a queue's are emitted.

::

    event            when                                                       observers
    ---------------  ---------------------------------------------------------  -------------------------------
    push_began       in the thread or task of the caller                        OpenTelemetry
      .ended         the push has ended, there                                  the same
    jobs_changed     Redis has them pushed, taken, acked, failed, released,     callbacks (`JobEvent`)
                     buried, kicked, deleted, cancelled, expired or restored;
                     or errors of a new group
    jobs_failed      Redis has failures, or burials with a reason               error groups
    jobs_taken       a delivery is about to be performed                        tallies
    batch_began      in the thread or task of the handler                       OpenTelemetry, Sentry, job log
      .id_began      in ``perform_one``, in a batch of several ids              the same
      .left          the handler has ended, in its thread or task               the same
      .ended         the outcome is written, or can't be                        the same
    batch_performed  the same                                                   tallies

    push  --> observed_push ------------------------------------> ended
                 | trace: beside the payloads, in Redis
                 v
    batch --> ObservedBatch ----> id_began... ----> left -------> ended

`Observer` has the fields of each. Tallies are read for histories, Prometheus, Graphite and StatsD. Nothing is made for
an event without observers. An exception of an observer is logged, and changes nothing else.
"""

import time
from asyncio import CancelledError
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from logging import DEBUG, getLogger
from operator import methodcaller
from typing import Any, Literal

from lowq import clock
from lowq.logs import get_log
from lowq.store.shard import CANCELLED, EXPIRED, POISONED

log = get_log("lowq.observe")
job_log = get_log("lowq.jobs")
#: Enabled for DEBUG if the lines of the job log are wanted.
job_logger = getLogger("lowq.jobs")

#: Bytes of a trace context that is kept beside payloads.
MAX_TRACE_BYTES = 256
#: Seconds that no job has waited.
_ABSURD = 1e10

#: Changes of a job.
JobEventKind = Literal[
    "pushed",
    "taken",
    "acked",
    "failed",
    "released",
    "buried",
    "kicked",
    "deleted",
    "cancelled",
    "expired",
    "restored",
    "new_error",
]
#: How many payloads of each id, or of every id; None: that is not known.
Counts = Sequence[int | None] | int | None

#: Outcomes of an id that did not finish. retry: charged, and tried again; exhausted: charged, and its oldest payload is
#: buried; buried: in the morgue; crashed: charged a crash; solo: not charged, tried again alone, as its batch failed;
#: released: not charged, waits again; cancelled: removed.
Verdict = Literal["retry", "exhausted", "buried", "crashed", "solo", "released", "cancelled"]


@dataclass(frozen=True, slots=True)
class ObservedJob:
    """A job of a batch."""

    id: str
    payloads_count: int
    #: As `Job.retry_count`: -1 if it has not failed yet.
    retry_count: int
    #: Seconds from when it was due until its batch began; None: not known.
    waited: float | None
    #: Trace contexts of the pushes that its payloads came with, oldest first.
    traces: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch that begins."""

    worker: type
    queue: str
    shard: int
    delivery: int
    jobs: tuple[ObservedJob, ...]
    #: The shard, for people.
    place: str = ""
    #: Its ids begin one after the other.
    is_per_id: bool = False


@dataclass(frozen=True, slots=True)
class JobFailure:
    """An id that did not finish."""

    id: str
    verdict: Verdict
    #: The exception, or the handler's text. None: nothing failed.
    error: BaseException | str | None
    #: How many times it had been retried.
    retries: int


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The outcome of a batch."""

    #: Ids that finished.
    finished: tuple[str, ...] = ()
    failures: tuple[JobFailure, ...] = ()
    #: The exception of the handler.
    error: BaseException | None = None
    #: False: the lease was lost before; the jobs are performed again elsewhere.
    is_written: bool = True


# --- observers ---


class PushObservation:
    """One push, observed in the thread or task of its caller."""

    #: Kept beside its payloads until they are performed: printable ASCII without spaces, `MAX_TRACE_BYTES` at most.
    #: Empty: nothing is kept.
    trace: str = ""

    def ended(self, accepted: int, error: BaseException | None) -> None:
        """``accepted``: payloads that are in. ``error``: the exception of the push."""


class BatchObservation:
    """One batch, observed."""

    def id_began(self, job_id: str) -> None:
        """In ``perform_one``, in a batch of several. In the handler's thread or task."""

    def left(self) -> None:
        """The handler has ended. In its thread or task."""

    def ended(self, result: BatchResult | None) -> None:
        """The outcome is written; None: the batch was cancelled, and is performed again elsewhere.

        Called after `left`. For a batch that was written off it is called before, in another thread.
        """


class Observer:
    """Observes events: those whose methods it overrides. Those of an application (`Lowq.observers`), which may come at
    any time, observe pushes and batches; others of jobs, and a tally, are given to `QueueEvents`.
    """

    __slots__ = ()

    def push_began(self, queue: str, jobs: object) -> PushObservation | None:
        """None: the push is not observed."""

    def jobs_changed(self, kind: JobEventKind, ids: Sequence[str | bytes], counts: Counts, error: str | None) -> None:
        """``counts``: payloads of the ids; ``error``: of "new_error". The lists don't change."""

    def jobs_failed(self, failures: Iterable[tuple[bytes, bytes]]) -> None:
        """Ids and errors, as Redis keeps them."""

    def jobs_taken(self, jobs: Sequence[Any], taken_at: float) -> None:
        """``taken_at``: Unix time in Redis, seconds."""

    def batch_began(self, batch: Batch) -> BatchObservation | None:
        """None: the batch is not observed."""

    def batch_performed(self, shard: Any, jobs: Sequence[Any], outcome: Any, seconds: float, ended: float) -> None:
        """Its handler ran for so many seconds, until ``ended``, by `lowq.clock`."""


# --- emitting ---

#: The fate of a released job that does not wait again.
_RELEASED: dict[int, JobEventKind] = {EXPIRED: "expired", POISONED: "buried", CANCELLED: "cancelled"}
_NOBODY = Observer()


class QueueEvents:
    """Emits the events of one queue. ``observers``: of pushes and batches; more may be added. ``own``: of the changes
    of its jobs. ``tally``: counts the deliveries and batches of one thread.
    """

    def __init__(
        self,
        queue: str,
        observers: Sequence[Observer] = (),
        own: Sequence[Observer] = (),
        *,
        tally: Observer = _NOBODY,
        server_offset: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.queue = queue
        self.observers = observers
        self.tally = tally
        self._own = tuple(own)
        self._server_offset = server_offset
        self._jobs_changed = [each.jobs_changed for each in own if type(each).jobs_changed is not Observer.jobs_changed]
        #: Whether anybody observes the changes of each job; otherwise the lists of ids are not made.
        self.follows_jobs = bool(self._jobs_changed)
        #: Whether anybody observes batches, as of the last delivery.
        self.follows_batches = False

    def joined_by(self, *own: Observer) -> "QueueEvents":
        """The same, with further observers of the changes of jobs."""
        return QueueEvents(self.queue, self.observers, (*self._own, *own))

    def counted_by(self, tally: Observer, server_offset: Callable[[], float | None] = lambda: None) -> "QueueEvents":
        """The same, counted by a tally. ``server_offset``: as of `ServerClock`."""
        return QueueEvents(self.queue, self.observers, self._own, tally=tally, server_offset=server_offset)

    def unobserved(self) -> "QueueEvents":
        """The same without observers of pushes and batches, for a push that is observed already."""
        return QueueEvents(self.queue, (), self._own)

    def jobs_changed(
        self, kind: JobEventKind, ids: Sequence[str | bytes], counts: Counts = None, error: str | None = None
    ) -> None:
        """Emits a change of the ids that is written. Safe for threads; does not wait. The lists must not be changed
        afterwards.
        """
        if ids:
            for observe in self._jobs_changed:
                observe(kind, ids, counts, error)

    def jobs_failed(self, failures: Iterable[tuple[bytes, bytes]]) -> None:
        """Emits failures, or burials with a reason, that are written. ``failures``: ids and errors."""
        for observer in self._own:
            observer.jobs_failed(failures)

    def jobs_taken(self, jobs: Sequence[Any], now: float) -> None:
        """Emits that a delivery is about to be performed. ``now``: about when it was taken, by `lowq.clock`."""
        self.follows_batches = bool(self.observers) or job_logger.isEnabledFor(DEBUG)
        offset = self._server_offset()
        if offset is not None:
            self.tally.jobs_taken(jobs, now + offset)

    def batch_began(
        self, worker: type, shard: Any, jobs: Sequence[Any], *, is_per_id: bool = False
    ) -> "ObservedBatch | None":
        """Emits that a batch begins, in this thread or task. Called only if anybody `follows_batches`. None: its
        description could not be made.
        """

        def begin() -> ObservedBatch:
            observers = [*self.observers, _JOB_LOG] if job_logger.isEnabledFor(DEBUG) else self.observers
            offset, in_flight = self._server_offset(), shard.in_flight
            now = time.time() if offset is None else clock.now() + offset
            observed = tuple(
                ObservedJob(job.id, len(job.payloads), job.retry_count, waited(job, now), in_flight.traces_of(job.id))
                for job in jobs
            )
            batch = Batch(worker, shard.queue, shard.index, in_flight.delivery, observed, repr(shard), is_per_id)
            return ObservedBatch(observers, batch)

        begun: ObservedBatch | None = call_observer(begin)
        return begun


class InFlightEvents:
    """Emits what becomes of the jobs in flight of a shard, while somebody follows jobs."""

    def __init__(self, events: QueueEvents) -> None:
        self._events = events
        #: id -> number of its payloads in hand.
        self._counts: dict[str, int] = {}

    def taken(self, jobs: Sequence[Any], undecodable: Sequence[Any]) -> None:
        """Of a delivery. What can't be decoded is buried by itself, and then no longer in hand."""
        counts = {job.id: (len(job.raw) - 3) // 2 for job in jobs}
        self._counts.update((job_id, count) for job_id, count in counts.items() if count)
        for item in undecodable:
            counts[item.id] += 1
        self._events.jobs_changed("taken", [*counts], [*counts.values()])

    def emit(self, kind: JobEventKind, ids: Sequence[str]) -> None:
        """They are in hand no more."""
        self._events.jobs_changed(kind, ids, [self._counts.pop(job_id, None) for job_id in ids])

    def reported(self, report: Any, reply: Any) -> None:
        """A report is written. ``reply``: that of its script."""
        if report.kind == "failed":
            self.emit("failed", [item.id for item in report.failures if item.verdict != "solo"])
            exhausted = [item.id for item in report.failures if item.verdict == "exhausted"]
            self._events.jobs_changed("buried", exhausted, 1)
            self.emit("released", [item.id for item in report.failures if item.verdict == "solo"])
        elif report.kind == "released":
            states: dict[JobEventKind, list[str]] = {}
            for job_id, state in zip(report.ids, reply, strict=True):
                states.setdefault(_RELEASED.get(state, "released"), []).append(job_id)
            for kind, ids in states.items():
                self.emit(kind, ids)
        else:
            self.emit(report.kind, report.ids)
            for job_id, _, payloads in report.burials:
                if payloads:
                    self._events.jobs_changed("buried", [job_id], len(payloads))

    def forget(self) -> None:
        """Nothing of what was in hand is reported any more."""
        self._counts.clear()


def end_observed(outcome: Any, jobs: Sequence[Any]) -> None:
    """Emits the outcome of a batch, once it is written, or can't be."""
    observed, outcome.observed = outcome.observed, None
    if observed is not None:
        call_observer(lambda: observed.ended(outcome.result(jobs)))


def waited(job: Any, now: float) -> float | None:
    """Seconds from when a job was due until ``now``; None: its time was written by hand, and is absurd."""
    try:
        seconds = now - float(job.raw[1])
    except ValueError:
        return None
    return max(seconds, 0.0) if seconds <= _ABSURD else None  # nor NaN


def call_observer(function: Callable[[], Any]) -> Any:
    """Calls a function of an observer. An exception is logged, and None returned."""
    try:
        return function()
    except (Exception, CancelledError):  # raised by the function itself: nothing is awaited here
        log.exception("an observer has failed", extra={"event": "observer_failed"})
        return None


def _call_each(observers: Iterable[Any], method: str, *args: Any) -> list[Any]:
    """Calls a method of each observer. Returns the results that are not None."""
    call = methodcaller(method, *args)
    found = [call_observer(partial(call, observer)) for observer in observers]
    return [item for item in found if item is not None]


@dataclass(slots=True)
class ObservedPush:
    """A push that is under way."""

    trace: str
    #: Payloads that are in. Set by the push at its end.
    accepted: int = 0


@contextmanager
def observed_push(observers: Sequence[Observer], queue: str, jobs: object) -> Iterator[ObservedPush]:
    """Emits the beginning and the end of a push, in this thread or task."""
    observations = _call_each(observers, "push_began", queue, jobs)
    traces = [call_observer(partial(_trace_of, observation)) for observation in observations]
    push = ObservedPush(next((trace for trace in traces if trace), ""))
    error: BaseException | None = None
    try:
        yield push
    except BaseException as raised:
        error = raised
        push.accepted = getattr(raised, "accepted", 0)
        raise
    finally:
        _call_each(reversed(observations), "ended", push.accepted, error)


def _trace_of(observation: PushObservation) -> str:
    """The trace context of a push; empty, if it can't be kept."""
    trace = observation.trace
    is_fit = len(trace) <= MAX_TRACE_BYTES and trace.isascii() and trace.isprintable() and " " not in trace
    return trace if is_fit else ""


class ObservedBatch:
    """A batch that is observed: passes its events to all of its observers."""

    __slots__ = ("_observations",)

    def __init__(self, observers: Iterable[Observer], batch: Batch) -> None:
        self._observations: list[BatchObservation] = _call_each(observers, "batch_began", batch)

    def id_began(self, job_id: str) -> None:
        """In ``perform_one``, in a batch of several."""
        _call_each(self._observations, "id_began", job_id)

    def left(self) -> None:
        """The handler has ended."""
        _call_each(reversed(self._observations), "left")

    def ended(self, result: BatchResult | None) -> None:
        """As of `BatchObservation`."""
        _call_each(self._observations, "ended", result)


# --- the job log ---


class _JobLog(Observer):
    """Logs a line for each job that begins, and for each that ends, at DEBUG, by the logger ``lowq.jobs``."""

    def batch_began(self, batch: Batch) -> BatchObservation:
        return _LoggedBatch(batch)


_JOB_LOG = _JobLog()


class _LoggedBatch(BatchObservation):
    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._began = clock.now()
        self._seconds: float | None = None
        if not batch.is_per_id or len(batch.jobs) == 1:  # else each when it is called
            for job in batch.jobs:
                self.id_began(job.id)

    def id_began(self, job_id: str) -> None:
        job_log.debug("%s: id %s begins", self._batch.place, job_id, extra=self._extra("job_start", job_id))

    def left(self) -> None:
        self._seconds = clock.now() - self._began

    def ended(self, result: BatchResult | None) -> None:
        seconds = clock.now() - self._began if self._seconds is None else self._seconds
        words: dict[str, str] = {}
        if result is not None and result.is_written:
            words = dict.fromkeys(result.finished, "finished")
            words |= {item.id: "failed" if item.verdict == "retry" else item.verdict for item in result.failures}
        for job in self._batch.jobs:
            word = words.get(job.id, "unknown")
            extra = {**self._extra("job_end", job.id), "outcome": word, "seconds": seconds}
            job_log.debug("%s: id %s ends: %s, %.3f s", self._batch.place, job.id, word, seconds, extra=extra)

    def _extra(self, event: str, job_id: str) -> dict[str, Any]:
        batch = self._batch
        return {"event": event, "queue": batch.queue, "shard": batch.shard, "ids": [job_id], "delivery": batch.delivery}
