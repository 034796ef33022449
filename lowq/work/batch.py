"""What worker threads and the event loop do alike around a batch: whether it may begin, counts, logs, giving it up."""

import random
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from lowq.application import Lowq
from lowq.errors import LeaseLost, RedisUnavailable
from lowq.logs import describe, get_log, printable
from lowq.observe.counters import BOUNDS, WAIT_BOUNDS, Tally, bucket_of
from lowq.observe.slowest import EndedBatch
from lowq.shards.activity import Performing
from lowq.shards.broker import Broker
from lowq.shards.delivery import Delivery, TakenJob
from lowq.shards.dispatcher import Dispatcher
from lowq.shards.shard import Shard
from lowq.store import Client
from lowq.work import handler as execution
from lowq.work.outcome import Outcome, describe_failure, log_remarks, report, write_off
from lowq.work.time_limits import TimeLimits

if TYPE_CHECKING:
    from lowq.work.threads import WorkerThread

log = get_log("lowq.node")

#: Seconds for which a shard is left alone when its script fails.
TROUBLE_SECONDS = 1.0

#: Jobs of a delivery that are looked at for how long they had waited, at most.
WAITS_READ = 4
#: Seconds that no job has waited: somebody has written that time by hand.
_ABSURD = 1e10


class NodeContext(Protocol):
    """What threads and the event loop need of their node."""

    app: Lowq
    client: Client
    broker: Broker
    #: Set when the node is to stop.
    stopping: threading.Event
    prefetch: bool
    #: It takes nothing more.
    draining: bool

    def limit_moved(self) -> None:
        """The deadline of a batch that is being performed is nearer than it was."""
        ...

    def new_runtime(self, queue: str) -> execution.WorkerRuntime:
        """With a new instance of the queue's worker. It raises what that raises."""
        ...

    def on_task_written_off(self, performing: Performing | None, stack: str, *, hanging: int, is_lost: bool) -> None:
        """What a task had in hand, which was written off, is reported. ``hanging``: how many of them hang by now.
        ``is_lost``: too many, or its handler blocks the loop.
        """
        ...

    def on_thread_written_off(self, thread: "WorkerThread") -> None:
        """All that it had in hand is reported."""
        ...

    def fail(self, error: BaseException) -> None:
        """Stops the node because of an error."""
        ...


def is_held(shard: Shard, delivery: Delivery, now: float) -> bool:
    """Whether the lease that the delivery was taken under is surely held at that monotonic time."""
    lease = shard.lease.current
    return lease is not None and lease.token == delivery.lease.token and now < shard.lease.deadline


def until_written(node: NodeContext, write: Callable[[], object]) -> None:
    """Repeats it while Redis is away."""
    failures = 0
    while True:
        try:
            write()
            return
        except RedisUnavailable as error:
            node.broker.outage.begin(error)
            failures += 1
            time.sleep(backoff(failures))


def give_up(
    node: NodeContext,
    dispatcher: Dispatcher,
    runtime: execution.WorkerRuntime,
    shard: Shard,
    limits: TimeLimits,
) -> None:
    """Reports what was in hand of a batch that was written off, and has the lease surrendered and got anew. Until then
    the shard is withheld, and nothing of it is taken.
    """
    token = shard.in_flight.token
    outcome = Outcome(is_written=False)
    try:
        outcome = write_off(runtime.instance, shard, limits, node.app.config)
        shard.in_flight.finish(outcome.finished)
        until_written(node, lambda: report(shard, outcome))
        outcome.is_written = True
        dispatcher.look_again(shard)
        # Last: should the lease have been lost and got again, it begins a new delivery.
        until_written(node, lambda: shard.in_flight.take(0))
    except LeaseLost:
        log_lost(shard)
    except Exception:
        log.exception("%r: what was in hand of a batch that was written off can't be reported", shard)
    finally:
        shard.in_flight.drop_delivery()
        dispatcher.withhold(shard)
        node.broker.maintenance.replace_lease(shard, token)
        execution.end_observed(outcome, limits.jobs)


def backoff(failures: int) -> float:
    """Seconds to wait after so many failures in a row, with jitter."""
    return min(0.05 * 2.0 ** min(failures, 10), 2.0) * random.uniform(0.5, 1.0)


def count_waits(tally: Tally, jobs: Sequence[TakenJob], now: float, server_offset: float | None) -> None:
    """Counts how long the jobs of a delivery had waited since they were due; ``now`` is about when they were taken, and
    with ``server_offset`` added the Unix time in Redis. None: that is not known, and nothing counts.

    Of a long delivery some are read, evenly spread, and each stands for its neighbours: all were taken at once, most of
    them in the order in which they became due.
    """
    if server_offset is None:
        return
    left, step = len(jobs), -(-len(jobs) // WAITS_READ)
    taken_at, waits = now + server_offset, tally.waits
    for job in jobs[::step]:
        number = min(step, left)
        left -= number
        try:
            waited = taken_at - float(job.raw[1])
        except ValueError:
            continue
        if waited <= _ABSURD:  # nor NaN
            waited = max(waited, 0.0)
            waits[bisect_left(WAIT_BOUNDS, waited)] += number
            tally.waited += waited * number


def count_batch(tally: Tally, outcome: Outcome, performing: Performing, ended: float) -> None:
    """Counts a batch that has ended."""
    seconds = ended - performing.since
    tally.processed += len(outcome.finished)
    if outcome.failures:
        tally.failed += sum(failure.verdict != "solo" for failure in outcome.failures)
        tally.buried += len(outcome.exhausted)
    if outcome.buries:
        tally.buried += len(outcome.buries)
    tally.seconds += seconds
    tally.lengths[0 if seconds <= BOUNDS[0] else bucket_of(seconds)] += 1
    if seconds > tally.slowest.floor:
        ids = performing.ids
        tally.slowest.add(EndedBatch(ids[0], len(ids), performing.shard.index, seconds, ended))


def report_failure(
    node: NodeContext,
    shard: Shard,
    jobs: list[TakenJob],
    outcome: Outcome,
    runtime: execution.WorkerRuntime,
) -> None:
    """Tells observers and the log what went wrong, and stops the node if it has to, once the outcome is written or
    can't be any more.
    """
    try:
        execution.end_observed(outcome, jobs)  # first: Sentry takes the second of two events for a duplicate
        _log_failure(shard, jobs, outcome, runtime)
        log_remarks(outcome)
    finally:
        if outcome.stop is not None:
            node.fail(outcome.stop)
        outcome.forget()


def _log_failure(shard: Shard, jobs: list[TakenJob], outcome: Outcome, runtime: execution.WorkerRuntime) -> None:
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
    most = outcome.ask("max_retry_count is not to be had", lambda: int(runtime.instance.max_retry_count), 0)
    outcomes = [describe_failure(failure, most) for failure in outcome.failures[:3]]
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


def log_lost(shard: Shard) -> None:
    """The lease was found to be lost by a call about what was taken."""
    log.warning(
        "%r: the lease was lost; whoever has the shard next performs what was in flight", shard,
        extra={"event": "lease_lost", "queue": shard.queue, "shard": shard.index},
    )  # fmt: skip
