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
from functools import partial
from logging import DEBUG
from typing import Any

from lowq import clock
from lowq.logs import get_log
from lowq.observe import job_log
from lowq.observe.events import (
    MAX_TRACE_BYTES,
    Batch,
    BatchObservation,
    BatchResult,
    Counts,
    JobEventKind,
    ObservedJob,
    Observer,
    PushObservation,
)

log = get_log("lowq.observe")

_NOBODY = Observer()


class QueueEvents:
    """Emits the events of one queue. ``observers``: of pushes and batches; others may come. ``own``: of what becomes of
    jobs. ``tally``: counts the deliveries and batches of one thread.
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
        #: Whether anybody observes what becomes of each job: otherwise it need not be known.
        self.follows_jobs = bool(self._jobs_changed)
        #: Whether anybody observes batches, as of the last delivery.
        self.follows_batches = False

    def joined_by(self, *own: Observer) -> "QueueEvents":
        """The same, also for these observers of what becomes of jobs."""
        return QueueEvents(self.queue, self.observers, (*self._own, *own))

    def counted_by(self, tally: Observer, server_offset: Callable[[], float | None] = lambda: None) -> "QueueEvents":
        """The same, counted by a tally. ``server_offset``: as of `ServerClock`."""
        return QueueEvents(self.queue, self.observers, self._own, tally=tally, server_offset=server_offset)

    def unobserved(self) -> "QueueEvents":
        """The same without observers of pushes and batches: of a push that is observed already."""
        return QueueEvents(self.queue, (), self._own)

    def jobs_changed(
        self, kind: JobEventKind, ids: Sequence[str | bytes], counts: Counts = None, error: str | None = None
    ) -> None:
        """Emits that this was done to the ids, and is written. Safe for threads; waits for nobody. The lists must not
        be changed afterwards.
        """
        if ids:
            for observe in self._jobs_changed:
                observe(kind, ids, counts, error)

    def jobs_failed(self, failures: Iterable[tuple[bytes, bytes]]) -> None:
        """Emits that ids have failed, or are buried for a reason, and it is written. ``failures``: ids and errors."""
        for observer in self._own:
            observer.jobs_failed(failures)

    def jobs_taken(self, jobs: Sequence[Any], now: float) -> None:
        """Emits that a delivery is about to be performed; ``now`` is about when it was taken."""
        self.follows_batches = bool(self.observers) or job_log.logger.isEnabledFor(DEBUG)
        offset = self._server_offset()
        if offset is not None:
            self.tally.jobs_taken(jobs, now + offset)

    def batch_began(
        self, worker: type, shard: Any, jobs: Sequence[Any], *, is_per_id: bool = False
    ) -> "ObservedBatch | None":
        """Emits that a batch begins, in this thread or task; called if anybody `follows_batches`. None: the observers
        could not be told.
        """

        def begin() -> ObservedBatch:
            observers = [*self.observers, job_log.JOB_LOG] if job_log.logger.isEnabledFor(DEBUG) else self.observers
            offset, in_flight = self._server_offset(), shard.in_flight
            now = time.time() if offset is None else clock.now() + offset
            observed = tuple(
                ObservedJob(job.id, len(job.payloads), job.retry_count, _waited(job, now), in_flight.traces_of(job.id))
                for job in jobs
            )
            batch = Batch(worker, shard.queue, shard.index, in_flight.delivery, observed, repr(shard), is_per_id)
            return ObservedBatch(observers, batch)

        begun: ObservedBatch | None = call_observer(begin)
        return begun


def end_observed(outcome: Any, jobs: Sequence[Any]) -> None:
    """Tells the observers of a batch its outcome, once that is written, or can't be."""
    observed, outcome.observed = outcome.observed, None
    if observed is not None:
        call_observer(lambda: observed.ended(outcome.result(jobs)))


def _waited(job: Any, now: float) -> float | None:
    try:
        return max(now - float(job.raw[1]), 0.0)
    except ValueError:  # somebody has written it by hand
        return None


def call_observer(function: Callable[[], Any]) -> Any:
    """Calls it. What it raises is logged, and None returned."""
    try:
        return function()
    except (Exception, CancelledError):  # which is of something in it: nothing is awaited here
        log.exception("an observer has failed", extra={"event": "observer_failed"})
        return None


def _tell_all(listeners: Iterable[Any], event: str, *args: Any) -> list[Any]:
    """Calls the method of that name of each. Returns what they return, without None."""
    found = [call_observer(lambda: getattr(listener, event)(*args)) for listener in listeners]  # noqa: B023 - called at once
    return [item for item in found if item is not None]


@dataclass(slots=True)
class ObservedPush:
    """A push that is under way."""

    trace: str
    #: Set by who pushes, when it is done.
    accepted: int = 0


@contextmanager
def observed_push(observers: Sequence[Observer], queue: str, jobs: object) -> Iterator[ObservedPush]:
    """Emits the beginning and the end of a push, in this thread or task."""
    observations = _tell_all(observers, "push_began", queue, jobs)
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
        _tell_all(reversed(observations), "ended", push.accepted, error)


def _trace_of(observation: PushObservation) -> str:
    """The trace context, if it can be kept."""
    trace = observation.trace
    is_fit = len(trace) <= MAX_TRACE_BYTES and trace.isascii() and trace.isprintable() and " " not in trace
    return trace if is_fit else ""


class ObservedBatch:
    """A batch, as all who observe it follow it."""

    __slots__ = ("_observations",)

    def __init__(self, observers: Iterable[Observer], batch: Batch) -> None:
        self._observations: list[BatchObservation] = _tell_all(observers, "batch_began", batch)

    def id_began(self, job_id: str) -> None:
        """In ``perform_one``, in a batch of several."""
        _tell_all(self._observations, "id_began", job_id)

    def left(self) -> None:
        """The handler has ended."""
        _tell_all(reversed(self._observations), "left")

    def ended(self, result: BatchResult | None) -> None:
        """As of `BatchObservation`."""
        _tell_all(self._observations, "ended", result)
