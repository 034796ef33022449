"""Emits events to those who observe them; see `events`. What an observer raises is logged, and harms nothing.

::

    push  --> observed_push ------------------------------------> ended
                 | trace: beside the payloads, in Redis
                 v
    batch --> ObservedBatch ----> id_began... ----> left -------> ended
              (in the handler's thread or task)            (its outcome is written)
"""

import time
from asyncio import CancelledError
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from lowq import clock
from lowq.logs import get_log
from lowq.observe import job_log
from lowq.observe.events import (
    MAX_TRACE_BYTES,
    Batch,
    BatchResult,
    Counts,
    JobEventKind,
    ObservedJob,
    Observer,
    PushObservation,
)

log = get_log("lowq.observe")


class TakenJob(Protocol):
    """What is needed of a job that was taken."""

    @property
    def id(self) -> str: ...
    @property
    def payloads(self) -> Sequence[Any]: ...
    @property
    def retry_count(self) -> int: ...
    @property
    def raw(self) -> Sequence[bytes]:
        """id, perform_at, ..."""
        ...


class TakenShard(Protocol):
    """What is needed of the shard that it was taken of."""

    @property
    def queue(self) -> str: ...
    @property
    def index(self) -> int: ...
    @property
    def in_flight(self) -> Any: ...


class Outcome(Protocol):
    """What is needed of the outcome of a batch."""

    observed: "ObservedBatch | None"

    def result(self, jobs: Sequence[Any]) -> BatchResult:
        """For observers."""
        ...


class QueueEvents:
    """Emits the events of one queue. ``observers``: of pushes and batches, others may come. ``own``: of the rest."""

    def __init__(
        self,
        queue: str,
        observers: Sequence[Observer] = (),
        own: Sequence[Observer] = (),
        *,
        server_offset: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.queue = queue
        self.observers = observers
        self._own = tuple(own)
        self._server_offset = server_offset
        self._jobs_changed = tuple(each.jobs_changed for each in own if observes(each, "jobs_changed"))
        self._jobs_failed = tuple(each.jobs_failed for each in own if observes(each, "jobs_failed"))
        self._jobs_taken = tuple(each.jobs_taken for each in own if observes(each, "jobs_taken"))
        self._batch_performed = tuple(each.batch_performed for each in own if observes(each, "batch_performed"))
        #: Whether anybody observes what becomes of each job: otherwise it need not be known.
        self.follows_jobs = bool(self._jobs_changed)
        #: Whether anybody observes batches, as of the last delivery.
        self.follows_batches = False

    def joined_by(self, *own: Observer, server_offset: Callable[[], float | None] = lambda: None) -> "QueueEvents":
        """Those events, also for these observers. ``server_offset``: as of `ServerClock`."""
        return QueueEvents(self.queue, self.observers, (*self._own, *own), server_offset=server_offset)

    def unobserved(self) -> "QueueEvents":
        """Those events of a push that is observed already."""
        return QueueEvents(self.queue, (), self._own)

    def jobs_changed(
        self, kind: JobEventKind, ids: Sequence[str | bytes], counts: Counts = None, error: str | None = None
    ) -> None:
        """That is done now to these ids, and written. Safe for threads; it waits for nobody. The lists are not to be
        changed afterwards.
        """
        if ids:
            for observe in self._jobs_changed:
                observe(kind, ids, counts, error)

    def jobs_failed(self, failures: Iterable[tuple[bytes, bytes]]) -> None:
        """These ids have failed, or are buried for a reason, and it is written. ``failures``: ids and errors."""
        for observe in self._jobs_failed:
            observe(failures)

    def jobs_taken(self, jobs: Sequence[TakenJob], now: float) -> None:
        """A delivery is about to be performed; ``now`` is about when it was taken."""
        self.follows_batches = bool(self.observers) or job_log.is_on()
        if self._jobs_taken:
            offset = self._server_offset()
            for observe in self._jobs_taken:
                observe(jobs, None if offset is None else now + offset)

    def batch_began(
        self, worker: type, shard: TakenShard, jobs: Sequence[TakenJob], *, is_per_id: bool = False
    ) -> "ObservedBatch | None":
        """A batch begins, in this thread or task; to be called if anybody `follows_batches`. None: they could not be
        told.
        """
        observed: ObservedBatch | None = call_observer(self._observed_batch, worker, shard, jobs, is_per_id)
        return observed

    def _observed_batch(
        self, worker: type, shard: TakenShard, jobs: Sequence[TakenJob], is_per_id: bool
    ) -> "ObservedBatch":
        observers = [*self.observers, job_log.JOB_LOG] if job_log.is_on() else self.observers
        offset, in_flight = self._server_offset(), shard.in_flight
        now = time.time() if offset is None else clock.now() + offset
        observed = tuple(
            ObservedJob(job.id, len(job.payloads), job.retry_count, _waited(job, now), in_flight.traces_of(job.id))
            for job in jobs
        )
        batch = Batch(worker, shard.queue, shard.index, in_flight.delivery, observed, repr(shard), is_per_id)
        return ObservedBatch(observers, batch)

    def batch_performed(
        self, shard: TakenShard, jobs: Sequence[TakenJob], outcome: Outcome, seconds: float, ended: float
    ) -> None:
        """The handler of a batch has ended, after so many seconds, and it is known what becomes of its jobs."""
        for observe in self._batch_performed:
            observe(shard, jobs, outcome, seconds, ended)


def end_observed(outcome: Outcome, jobs: Sequence[TakenJob]) -> None:
    """Tells those who observe the batch what became of it: once that is written, or can't be."""
    observed, outcome.observed = outcome.observed, None
    if observed is not None:
        call_observer(lambda: observed.ended(outcome.result(jobs)))


def observes(observer: Observer, event: str) -> bool:
    """Whether it has a method of its own for the event."""
    return getattr(type(observer), event) is not getattr(Observer, event)


def _waited(job: TakenJob, now: float) -> float | None:
    try:
        return max(now - float(job.raw[1]), 0.0)
    except ValueError:  # somebody has written it by hand
        return None


def call_observer(function: Callable[..., Any], *args: Any) -> Any:
    """Calls it with the arguments. What it raises is logged, and None returned."""
    try:
        return function(*args)
    except (Exception, CancelledError):  # which is of something in it: nothing is awaited here
        log.exception("an observer has failed", extra={"event": "observer_failed"})
        return None


def _tell(listener: Any, event: str, *args: Any) -> Any:
    """Calls its method of that name, as `call_observer` does: also a listener that has none harms nothing."""
    return call_observer(lambda: getattr(listener, event)(*args))


@dataclass(slots=True)
class ObservedPush:
    """A push that is under way."""

    trace: str
    #: Set by who pushes, when it is done.
    accepted: int = 0


@contextmanager
def observed_push(observers: Sequence[Observer], queue: str, jobs: object) -> Iterator[ObservedPush]:
    """Has the observers follow a push, in this thread or task."""
    found = [_tell(observer, "push_began", queue, jobs) for observer in observers]
    observations = [observation for observation in found if observation is not None]
    traces = [call_observer(_trace_of, observation) for observation in observations]
    push = ObservedPush(next((trace for trace in traces if trace), ""))
    error: BaseException | None = None
    try:
        yield push
    except BaseException as raised:
        error = raised
        push.accepted = getattr(raised, "accepted", 0)
        raise
    finally:
        for observation in reversed(observations):
            _tell(observation, "ended", push.accepted, error)


def _trace_of(observation: PushObservation) -> str:
    """The trace context, if it can be kept."""
    trace = observation.trace
    is_fit = len(trace) <= MAX_TRACE_BYTES and trace.isascii() and trace.isprintable() and " " not in trace
    return trace if is_fit else ""


class ObservedBatch:
    """A batch, as all who observe it follow it."""

    __slots__ = ("_observations",)

    def __init__(self, observers: Iterable[Observer], batch: Batch) -> None:
        found = [_tell(observer, "batch_began", batch) for observer in observers]
        self._observations = [observation for observation in found if observation is not None]

    def id_began(self, job_id: str) -> None:
        """In ``perform_one``, in a batch of several."""
        for observation in self._observations:
            _tell(observation, "id_began", job_id)

    def left(self) -> None:
        """The handler has ended."""
        for observation in reversed(self._observations):
            _tell(observation, "left")

    def ended(self, result: BatchResult | None) -> None:
        """As of `BatchObservation`."""
        for observation in self._observations:
            _tell(observation, "ended", result)
