"""When a job that failed runs again, and when it does no more."""

import math
import random

from lowq.codec import MAX_TIME

#: Retries of an id after which its oldest payload is buried, where its worker says nothing else.
MAX_RETRY_COUNT = 25


def default_retry_in(retry_count: int) -> float:
    """Seconds until retry ``retry_count``: a random time within `default_retry_bounds`."""
    return random.uniform(*default_retry_bounds(retry_count))


def default_retry_bounds(retry_count: int) -> tuple[float, float]:
    """Seconds until retry ``retry_count`` at the least and at the most: Lowkiq's formula, from seconds to days."""
    least = retry_count**4 + 15
    return least, least + 30 * (retry_count + 1)


def is_exhausted(retry_count: int, max_retry_count: int) -> bool:
    """Whether a job that failed for the time ``retry_count``, counted from 0, is given up."""
    return retry_count >= max_retry_count


def retry_delay(seconds: float) -> float | None:
    """Seconds until a retry, within bounds, from what a worker's ``retry_in`` gave; None: it is no time."""
    return min(max(seconds, 0.0), MAX_TIME) if math.isfinite(seconds) else None
