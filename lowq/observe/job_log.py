"""A line for each job that begins, and for each that ends, at DEBUG. The logger ``lowq.jobs`` is for nothing else."""

import logging
from typing import Any

from lowq import clock
from lowq.logs import get_log
from lowq.observe.events import Batch, BatchObservation, BatchResult, Observer

log = get_log("lowq.jobs")
#: Enabled for DEBUG if anybody wants the lines.
logger = logging.getLogger("lowq.jobs")


class _JobLog(Observer):
    def batch_began(self, batch: Batch) -> BatchObservation:
        return _LoggedBatch(batch)


JOB_LOG = _JobLog()


class _LoggedBatch(BatchObservation):
    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._began = clock.now()
        self._seconds: float | None = None
        if not batch.is_per_id or len(batch.jobs) == 1:  # else each when it is called
            for job in batch.jobs:
                self.id_began(job.id)

    def id_began(self, job_id: str) -> None:
        log.debug("%s: id %s begins", self._batch.place, job_id, extra=self._extra("job_start", job_id))

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
            log.debug("%s: id %s ends: %s, %.3f s", self._batch.place, job.id, word, seconds, extra=extra)

    def _extra(self, event: str, job_id: str) -> dict[str, Any]:
        batch = self._batch
        return {"event": event, "queue": batch.queue, "shard": batch.shard, "ids": [job_id], "delivery": batch.delivery}
