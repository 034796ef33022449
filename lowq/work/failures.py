"""What is logged of what went wrong, and how long to wait then."""

import random

from lowq.duration import duration
from lowq.logs import describe, get_log, printable
from lowq.shards.delivery import Failure, TakenJob
from lowq.shards.shard import Shard
from lowq.work.outcome import Outcome, Performer

log = get_log("lowq.node")


def backoff(failures: int) -> float:
    """Seconds to wait after so many failures in a row, with jitter."""
    return min(0.05 * 2.0 ** min(failures, 10), 2.0) * random.uniform(0.5, 1.0)


def log_lost(shard: Shard) -> None:
    """The lease was found to be lost by a call about what was taken."""
    log.warning(
        "%r: the lease was lost; whoever has the shard next performs what was in flight", shard,
        extra={"event": "lease_lost", "queue": shard.queue, "shard": shard.index},
    )  # fmt: skip


def log_failure(shard: Shard, jobs: list[TakenJob], outcome: Outcome, worker: Performer) -> None:
    """What was raised, and what becomes of each id. What will be tried again is one line, however often it fails; what
    goes to the morgue is an error with its traceback.
    """
    if outcome.error is None and not outcome.failures:
        return
    if outcome.is_expected:
        delay = outcome.releases[0][1]
        what = "named by the handler" if outcome.error is None else printable(describe(outcome.error))
        log.info(
            "%r: %s; not charged and waiting again, as release_on says: %d, the first in %g s", shard, what,
            len(outcome.releases), delay,
            extra={"event": "released", "queue": shard.queue, "shard": shard.index,
                   "ids": [job_id for job_id, _ in outcome.releases[:100]]},
        )  # fmt: skip
        return
    what = "named by the handler" if outcome.error is None else describe(outcome.error)
    named = [failure.id for failure in outcome.failures] or [job.id for job in jobs]
    most = outcome.ask("max_retry_count is not to be had", lambda: int(worker.max_retry_count), 0)
    outcomes = [_describe(failure, most) for failure in outcome.failures[:3]]
    if outcome.releases:
        outcomes.append(f"not charged and waiting again: {len(outcome.releases)}")
    if outcome.buries:
        outcomes.append(f"in the morgue: {len(outcome.buries)}")
    more = len(outcome.failures) - 3
    text = "".join(
        (f"{shard!r} failed, ids {', '.join(named[:3])}: {what}", *(f"; {item}" for item in outcomes),
         f"; and {more} more" if more > 0 else "")
    )  # fmt: skip
    extra = {
        "event": "failed", "queue": shard.queue, "shard": shard.index, "ids": named[:100],
        "outcome": [failure[:4] for failure in outcome.failures[:100]],
    }  # fmt: skip
    raised = (outcome.error, *(outcome.raised or {}).values())
    error = next((one for one in raised if isinstance(one, BaseException)), None)
    gives_up = outcome.buries or outcome.exhausted or outcome.crashed
    if gives_up or not (outcome.failures or outcome.releases):
        log.error("%s", printable(text), exc_info=error, extra=extra)
        return
    log.warning("%s", printable(text), extra=extra)
    log.debug("%r: where it failed", shard, exc_info=error, extra=extra)


def _describe(failure: Failure, max_retry_count: int) -> str:
    """What becomes of an id that failed, for people."""
    if failure.verdict == "retry":
        return f"id {failure.id}: retry {failure.retry_count + 1} of {max_retry_count} in {duration(failure.delay)}"
    if failure.verdict == "solo":
        return f"id {failure.id}: tried again alone"
    return f"id {failure.id}: no retries left, its oldest payload is in the morgue now"
