"""What worker threads and the event loop do alike around a batch: whether it may begin, counts, logs, giving it up."""

import random
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from lowq.application import Lowq
from lowq.broker.activity import Performing
from lowq.broker.broker import Broker
from lowq.broker.delivery import Delivery, TakenJob
from lowq.broker.dispatcher import Dispatcher
from lowq.broker.shard import Shard
from lowq.errors import LeaseLost, RedisUnavailable
from lowq.logs import describe, get_log
from lowq.metrics.counters import BOUNDS, Tally, bucket_of
from lowq.node import execution
from lowq.node.limits import TimeLimits
from lowq.store import Client

if TYPE_CHECKING:
    from lowq.node.worker_thread import WorkerThread

log = get_log("lowq.node")

#: Seconds for which a shard is left alone when its script fails.
TROUBLE_SECONDS = 1.0


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
    try:
        outcome = execution.write_off(runtime, shard, limits, node.app.config)
        shard.in_flight.finish(outcome.finished)
        until_written(node, lambda: execution.report(shard, outcome))
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


def backoff(failures: int) -> float:
    """Seconds to wait after so many failures in a row, with jitter."""
    return min(0.05 * 2.0 ** min(failures, 10), 2.0) * random.uniform(0.5, 1.0)


def count_batch(tally: Tally, outcome: execution.Outcome, seconds: float) -> None:
    """Counts a batch that took so long."""
    tally.processed += len(outcome.finished)
    if outcome.failures:
        tally.failed += sum(failure.verdict != "solo" for failure in outcome.failures)
        tally.buried += len(outcome.exhausted)
    if outcome.buries:
        tally.buried += len(outcome.buries)
    tally.seconds += seconds
    tally.lengths[0 if seconds <= BOUNDS[0] else bucket_of(seconds)] += 1


def report_failure(
    node: NodeContext,
    shard: Shard,
    jobs: list[TakenJob],
    outcome: execution.Outcome,
    runtime: execution.WorkerRuntime,
) -> None:
    """Logs what went wrong, and stops the node if it has to, once the outcome is written or can't be any more."""
    try:
        _log_failure(shard, jobs, outcome, runtime)
        execution.log_remarks(outcome)
    finally:
        if outcome.stop is not None:
            node.fail(outcome.stop)


def _log_failure(
    shard: Shard, jobs: list[TakenJob], outcome: execution.Outcome, runtime: execution.WorkerRuntime
) -> None:
    """What was raised, and what becomes of each id."""
    if outcome.error is None and not outcome.failures:
        return
    what = "named by the handler" if outcome.error is None else describe(outcome.error)
    named = [failure.id for failure in outcome.failures] or [job.id for job in jobs]
    most = outcome.ask("max_retry_count is not to be had", lambda: int(runtime.instance.max_retry_count), 0)
    outcomes = [execution.describe_failure(failure, most) for failure in outcome.failures[:3]]
    if outcome.releases:
        outcomes.append(f"not charged and waiting again: {len(outcome.releases)}")
    more = len(outcome.failures) - 3
    log.error(
        "%r failed, ids %s: %s%s%s", shard, ", ".join(named[:3]), what,
        "".join(f"; {item}" for item in outcomes), f"; and {more} more" if more > 0 else "", exc_info=outcome.error,
        extra={
            "event": "failed", "queue": shard.queue, "shard": shard.index, "ids": named[:100],
            "outcome": [failure[:4] for failure in outcome.failures[:100]],
        },
    )  # fmt: skip


def log_lost(shard: Shard) -> None:
    """The lease was found to be lost by a call about what was taken."""
    log.warning(
        "%r: the lease was lost; whoever has the shard next performs what was in flight", shard,
        extra={"event": "lease_lost", "queue": shard.queue, "shard": shard.index},
    )  # fmt: skip
