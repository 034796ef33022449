"""The events: what happens to pushes, jobs and batches, for whoever observes it.

::

    event          when                                                          who observes it
    -------------  ------------------------------------------------------------  --------------------------------
    push_began     in the thread or task of its caller                           OpenTelemetry
      .ended       its end, there                                                the same
    jobs_changed   Redis has them pushed, taken, acked, failed, released,        callbacks (`JobEvent`)
                   buried, kicked, deleted, expired or restored; or errors of a
                   new group
    jobs_failed    Redis has failures, or burials with a reason                  error groups
    jobs_taken     a delivery is about to be performed                           tallies
    batch_began    in the thread or task of its handler                          OpenTelemetry, Sentry, job log
      .id_began    in ``perform_one``, in a batch of several: this id begins     the same
      .left        the handler has ended, in its thread or task                  the same
      .ended       its outcome is written, or can't be                           the same
    batch_performed    the same                                                      tallies

`Observer` says what each of them brings. Tallies are read for histories, Prometheus, Graphite and StatsD.

`QueueEvents` (`lowq.observe.emit`) emits those of a queue. Nothing is made for an event that nobody observes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

#: Bytes of a trace context that is kept beside payloads.
MAX_TRACE_BYTES = 256

#: What may have become of a job.
JobEventKind = Literal[
    "pushed",
    "taken",
    "acked",
    "failed",
    "released",
    "buried",
    "kicked",
    "deleted",
    "expired",
    "restored",
    "new_error",
]
#: How many payloads of each id, or of every id; None: that is not known.
Counts = Sequence[int | None] | int | None

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
    #: The shard, for people.
    place: str = ""
    #: Its ids begin one after the other.
    is_per_id: bool = False


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


# --- observers ---


class PushObservation:
    """One push, observed in the thread or task of its caller."""

    #: What is kept beside its payloads until they are performed: printable ASCII without spaces, at most
    #: `MAX_TRACE_BYTES`. Empty: nothing.
    trace: str = ""

    def ended(self, accepted: int, error: BaseException | None) -> None:
        """So many payloads are in. ``error``: what the push raised."""


class BatchObservation:
    """One batch, observed."""

    def id_began(self, job_id: str) -> None:
        """In ``perform_one``, in a batch of several. In the handler's thread or task."""

    def left(self) -> None:
        """The handler has ended. In its thread or task."""

    def ended(self, result: BatchResult | None) -> None:
        """What became of it is written; None: it was cancelled, and is performed again by somebody else.

        After `left`; but of a batch that was written off before it, in another thread.
        """


class Observer:
    """Observes events: those whose methods it overrides. Those of an application (`Lowq.observers`), which may come at
    any time, observe pushes and batches; others of jobs, and a tally, are given to `QueueEvents`.
    """

    __slots__ = ()

    def push_began(self, queue: str, jobs: object) -> PushObservation | None:
        """None: the push is not observed."""

    def jobs_changed(self, kind: JobEventKind, ids: Sequence[str | bytes], counts: Counts, error: str | None) -> None:
        """That was done to these ids. ``counts``: payloads; ``error``: of "new_error". The lists don't change."""

    def jobs_failed(self, failures: Iterable[tuple[bytes, bytes]]) -> None:
        """Ids and errors, as Redis keeps them."""

    def jobs_taken(self, jobs: Sequence[Any], taken_at: float) -> None:
        """``taken_at``: Unix time in Redis, seconds."""

    def batch_began(self, batch: Batch) -> BatchObservation | None:
        """None: the batch is not observed."""

    def batch_performed(self, shard: Any, jobs: Sequence[Any], outcome: Any, seconds: float, ended: float) -> None:
        """Its handler ran for so many seconds, until ``ended``, by `lowq.clock`."""
