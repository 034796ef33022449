"""What a node tells observers of its batches."""

import time
from collections.abc import Callable, Sequence

from lowq import clock
from lowq.observe.observers import Batch, BatchResult, JobFailure, ObservedBatch, ObservedJob, Observer
from lowq.shards.delivery import TakenJob
from lowq.shards.shard import Shard
from lowq.work.outcome import Outcome
from lowq.work.time_limits import WrittenOff


def begin(
    observers: Sequence[Observer],
    worker: type,
    shard: Shard,
    jobs: Sequence[TakenJob],
    server_offset: Callable[[], float | None],
) -> ObservedBatch:
    """A batch begins, in this thread or task. ``server_offset``: as of `ServerClock`; where it is not known yet, this
    machine's clock counts.
    """
    offset = server_offset()
    now = time.time() if offset is None else clock.now() + offset
    in_flight = shard.in_flight
    observed = tuple(
        ObservedJob(
            job.id, len(job.payloads), job.retry_count, _waited(job, now), in_flight.traces_of(job.id)
        )
        for job in jobs
    )  # fmt: skip
    return ObservedBatch.begin(observers, Batch(worker, shard.queue, shard.index, in_flight.delivery, observed))


def _waited(job: TakenJob, now: float) -> float | None:
    try:
        return max(now - float(job.raw[1]), 0.0)
    except ValueError:  # somebody has written it by hand
        return None


def result_of(outcome: Outcome, jobs: Sequence[TakenJob]) -> BatchResult:
    """What observers hear of an outcome, once it is written or can't be any more."""
    retries = {job.id: job.retry_count + 1 for job in jobs}
    found = [(failure.id, failure.verdict) for failure in outcome.failures]
    verdicts: dict[str, str] = dict(found)
    verdicts |= dict.fromkeys([job_id for job_id, _ in outcome.releases], "released")
    verdicts |= dict.fromkeys([job_id for job_id, _ in outcome.buries], "buried")
    verdicts |= dict.fromkeys(outcome.crashed, "crashed")
    raised = outcome.raised or {}
    failures = tuple(
        JobFailure(job_id, verdict, raised.get(job_id), retries.get(job_id, 0))  # type: ignore[arg-type]  # as above
        for job_id, verdict in verdicts.items()
    )
    error = None if type(outcome.error) is WrittenOff else outcome.error  # no isinstance: it asks the error's class
    return BatchResult(tuple(outcome.finished), failures, error, outcome.is_written)
