"""Observers: what is told of pushes and batches to those who trace, measure and report errors (`lowq.contrib`).

::

    push  --> PushObservation ----------------------------------> ended
                 | trace: beside the payloads, in Redis
                 v
    batch --> BatchObservation --> begin_id... --> leave ------> ended
              (in the handler's thread or task)            (its outcome is written)

An application without observers asks once a push and once a batch whether there are any. What an observer raises is
logged, and harms nothing.
"""

from asyncio import CancelledError
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from lowq.logs import get_log

log = get_log("lowq.observe.observers")

#: Bytes of a trace context that is kept beside payloads.
MAX_TRACE_BYTES = 256

#: What becomes of an id that did not finish. retry: charged, and tried again; exhausted: charged, and its oldest
#: payload is buried; buried: in the morgue; crashed: charged a crash; solo: not charged, tried again alone, as its
#: batch failed; released: not charged, waits again.
Verdict = Literal["retry", "exhausted", "buried", "crashed", "solo", "released"]


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


@dataclass(frozen=True, slots=True)
class JobFailure:
    """An id that did not finish."""

    id: str
    verdict: Verdict
    #: What it failed with: what was raised, or the handler's text. None: nothing failed.
    error: BaseException | str | None
    #: How many times it had been retried.
    retries: int


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What became of a batch."""

    #: Ids that finished.
    finished: tuple[str, ...] = ()
    failures: tuple[JobFailure, ...] = ()
    #: What the handler raised.
    error: BaseException | None = None
    #: False: the lease was lost before it could be written, and the jobs are performed again by somebody else.
    is_written: bool = True


class PushObservation:
    """One push, observed in the thread or task of its caller."""

    #: What is kept beside its payloads until they are performed: printable ASCII without spaces, at most
    #: `MAX_TRACE_BYTES`. Empty: nothing.
    trace: str = ""

    def ended(self, accepted: int, error: BaseException | None) -> None:
        """So many payloads are in. ``error``: what the push raised."""


class BatchObservation:
    """One batch, observed."""

    def begin_id(self, job_id: str) -> None:
        """In ``perform_one``, in a batch of several: this id begins. In the handler's thread or task."""

    def leave(self) -> None:
        """The handler has ended. In its thread or task."""

    def ended(self, result: BatchResult | None) -> None:
        """What became of it is written; None: it was cancelled, and is performed again by somebody else.

        After `leave`; but of a batch that was written off before it, in another thread.
        """


class Observer:
    """Follows pushes and batches of an application. A subclass overrides what it wants to hear of."""

    def push(self, queue: str, jobs: object) -> PushObservation | None:
        """A push begins, in the thread or task that calls this. None: it is not observed."""

    def batch(self, batch: Batch) -> BatchObservation | None:
        """A batch begins, in the handler's thread or task. None: it is not observed."""


def call_observer(function: Callable[..., Any], *args: Any) -> Any:
    """Calls it with the arguments. What it raises is logged, and None returned."""
    try:
        return function(*args)
    except (Exception, CancelledError):  # which is of something in it: nothing is awaited here
        log.exception("an observer has failed", extra={"event": "observer_failed"})
        return None


@dataclass(slots=True)
class ObservedPush:
    """A push that is under way."""

    trace: str
    #: Set by who pushes, when it is done.
    accepted: int = 0


@contextmanager
def observed_push(observers: Sequence[Observer], queue: str, jobs: object) -> Iterator[ObservedPush]:
    """Has the observers follow a push, in this thread or task."""
    found = [_tell(observer, "push", queue, jobs) for observer in observers]
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


def _tell(listener: Any, event: str, *args: Any) -> Any:
    """Calls its method of that name, as `call_observer` does: also a listener that has none harms nothing."""
    return call_observer(lambda: getattr(listener, event)(*args))


def _trace_of(observation: PushObservation) -> str:
    """The trace context, if it can be kept."""
    trace = observation.trace
    is_fit = len(trace) <= MAX_TRACE_BYTES and trace.isascii() and trace.isprintable() and " " not in trace
    return trace if is_fit else ""


@dataclass(slots=True)
class ObservedBatch:
    """A batch, as all observers follow it."""

    observations: list[BatchObservation] = field(default_factory=list)

    @classmethod
    def begin(cls, observers: Sequence[Observer], batch: Batch) -> "ObservedBatch":
        """It begins, in the handler's thread or task."""
        found = [_tell(observer, "batch", batch) for observer in observers]
        return cls([observation for observation in found if observation is not None])

    def begin_id(self, job_id: str) -> None:
        for observation in self.observations:
            _tell(observation, "begin_id", job_id)

    def leave(self) -> None:
        for observation in reversed(self.observations):
            _tell(observation, "leave")

    def ended(self, result: BatchResult | None) -> None:
        for observation in self.observations:
            _tell(observation, "ended", result)
