"""A line for each job that begins, and for each that ends, at DEBUG. The logger ``lowq.jobs`` is for nothing else."""

import logging
from collections.abc import Iterable

from lowq.logs import get_log
from lowq.shards.delivery import TakenJob
from lowq.shards.shard import Shard
from lowq.work.outcome import Outcome

log = get_log("lowq.jobs")
_logger = logging.getLogger("lowq.jobs")


def is_on() -> bool:
    """Whether anybody wants the lines. To be called once for a delivery, as each call costs
    as much as a batch of one job may."""
    return _logger.isEnabledFor(logging.DEBUG)


def begins(shard: Shard, ids: Iterable[str], delivery: int) -> None:
    """These are handed over."""
    for job_id in ids:
        log.debug("%r: id %s begins", shard, job_id, extra=_extra("job_start", shard, job_id, delivery))


def ends(shard: Shard, jobs: Iterable[TakenJob], delivery: int, outcome: Outcome, seconds: float) -> None:
    """What became of them. ``seconds``: of their batch."""
    words = dict.fromkeys(outcome.finished, "finished")
    words |= {failure.id: "failed" if failure.verdict == "retry" else failure.verdict for failure in outcome.failures}
    words |= dict.fromkeys([job_id for job_id, _ in outcome.releases], "released")
    words |= dict.fromkeys([job_id for job_id, _ in outcome.buries], "buried")
    words |= dict.fromkeys(outcome.crashed, "crashed")
    for job in jobs:
        word = words.get(job.id, "unknown")
        extra = _extra("job_end", shard, job.id, delivery)
        log.debug(
            "%r: id %s ends: %s, %.3f s", shard, job.id, word, seconds,
            extra={**extra, "outcome": word, "seconds": seconds},
        )  # fmt: skip


def _extra(event: str, shard: Shard, job_id: str, delivery: int) -> dict[str, object]:
    return {"event": event, "queue": shard.queue, "shard": shard.index, "ids": [job_id], "delivery": delivery}
