"""What a node says in figures, once a second, for Graphite and StatsD."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from lowq.broker.activity import Activity
from lowq.broker.shard import Shard, lag_of
from lowq.metrics.counters import Tally, count
from lowq.reading import Reading


def read_node(
    tallies: Mapping[str, Sequence[Tally]],
    shards: Sequence[Shard],
    activities: Callable[[], Iterable[Activity]],
    threads: int,
) -> dict[str, Reading]:
    """``tallies``: queue -> those of all threads; ``activities``: what threads, and tasks of the event loop, show."""
    readings: dict[str, Reading] = {}
    for queue, some in tallies.items():
        counted = count(some)
        counters = {
            "processed": counted.processed,
            "failed": counted.failed,
            "buried": counted.buried,
            "performs": sum(counted.lengths),
            "perform_seconds": counted.seconds,
        }
        held = sum(shard.queue == queue and shard.lease.current is not None for shard in shards)
        lag = lag_of(shards, queue)
        readings[queue] = Reading(counters, {"shards": held} | ({} if lag is None else {"lag": lag}))
    busy = [activity for activity in activities() if activity.performing is not None]
    tasks = sum(activity.number is None for activity in busy)
    readings[""] = Reading({}, {"threads": threads, "threads_busy": len(busy) - tasks, "tasks_busy": tasks})
    return readings
