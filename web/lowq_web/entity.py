"""Everything that is known of one id."""

import time
from dataclasses import dataclass

import lowq

#: Coming retries that are told.
RETRIES_TOLD = 5


@dataclass(frozen=True, slots=True)
class Retry:
    """A retry to come, if everything fails until then."""

    #: As people count: 1 is the first.
    number: int
    #: Unix time, seconds: at the earliest and at the latest.
    earliest: float
    latest: float


@dataclass(frozen=True, slots=True)
class Entity:
    """An id of a queue: where its payloads are, and what keeps it."""

    id: str
    queue: str
    #: In flight, waiting, in the morgue: at most one each. Empty: the id is nowhere.
    jobs: list[lowq.Job]
    why: lowq.Why
    shard: lowq.ShardInfo
    max_retry_count: int
    #: Of a job that failed before.
    retries: list[Retry]


def entity(queue: lowq.Queue, job_id: str, now: float | None = None) -> Entity:
    """Looks it up, in a handful of short calls. ``now``: Unix time, seconds, by the server's clock.

    Raises:
        JobError: the id is none. UnknownQueueError, RedisUnavailable, RedisRefused
    """
    jobs = queue.places(job_id)
    why = queue.why(job_id)
    most = queue.max_retry_count
    waiting = next((job for job in jobs if job.state not in ("taken", "morgue")), None)
    retries = []
    if waiting is not None and waiting.retry_count >= 0:
        retries = _retries(waiting, most, time.time() if now is None else now)
    return Entity(job_id, queue.name, jobs, why, queue.shard(queue.shard_of(job_id)), most, retries)


def _retries(job: lowq.Job, most: int, now: float) -> list[Retry]:
    """The next one is known. Later ones follow from the default formula, n**4 + 15 + random(0..30) * (n + 1), and
    from when the next one comes: now at the earliest, if it is overdue.
    """
    at = job.perform_at or 0.0
    found = [Retry(job.retry_count + 1, at, at)]
    earliest = latest = max(at, now)
    for count in range(job.retry_count + 1, min(most, job.retry_count + RETRIES_TOLD)):
        least = count**4 + 15
        earliest, latest = earliest + least, latest + least + 30 * (count + 1)
        found.append(Retry(count + 1, earliest, latest))
    return found
