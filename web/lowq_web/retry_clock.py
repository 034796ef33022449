"""When a job that failed is tried again, if everything fails until then."""

from dataclasses import dataclass

from lowq import inspection
from lowq.retry import default_retry_bounds

#: Coming retries that are shown.
MAX_RETRIES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Retry:
    """A retry to come, if everything fails until then."""

    #: As people count: 1 is the first.
    number: int
    #: Unix time, seconds: at the earliest and at the latest.
    earliest: float
    latest: float


def coming_retries(described: inspection.Description) -> list[Retry]:
    """Those of the job of an id that waits and has failed before; otherwise none."""
    job, most = described.waiting, described.max_retry_count
    if job is None or job.retry_count < 0:
        return []
    # The next one is known. Later ones follow from the default formula, and from when the next one comes: now at the
    # earliest, if it is overdue.
    at = job.perform_at or 0.0
    found = [Retry(job.retry_count + 1, at, at)]
    earliest = latest = max(at, described.at)
    for count in range(job.retry_count + 1, min(most, job.retry_count + MAX_RETRIES_SHOWN)):
        least, most_seconds = default_retry_bounds(count)
        earliest, latest = earliest + least, latest + most_seconds
        found.append(Retry(count + 1, earliest, latest))
    return found
