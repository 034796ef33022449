"""What a node says in figures, once a second, for Graphite and StatsD."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from lowq.backend import Reading, Source
from lowq.observe.counters import Tally, count
from lowq.shards.activity import Activity
from lowq.shards.shard import Shard, lag_of


def node_source(
    tallies: Mapping[str, Sequence[Tally]],
    shards: Callable[[], Iterable[Shard]],
    activities: Callable[[], Iterable[Activity]],
    threads: int,
) -> Source:
    """``tallies``: queue -> those of all threads; ``shards``: asked for those that the node knows;
    ``activities``: what threads, and tasks of the event loop, show.
    """

    def read() -> dict[str, Reading]:
        shards_of: dict[str, list[Shard]] = {queue: [] for queue in tallies}
        for shard in list(shards()):
            shards_of.get(shard.queue, []).append(shard)
        readings = {queue: _read_queue(queue, some, shards_of[queue]) for queue, some in tallies.items()}
        busy = [activity for activity in activities() if activity.performing is not None]
        tasks = sum(activity.number is None for activity in busy)
        readings[""] = Reading({}, {"threads": threads, "threads_busy": len(busy) - tasks, "tasks_busy": tasks})
        return readings

    return read


def _read_queue(queue: str, tallies: Iterable[Tally], shards: Sequence[Shard]) -> Reading:
    counted = count(tallies)
    counters = {
        "processed": counted.processed,
        "failed": counted.failed,
        "buried": counted.buried,
        "performs": sum(counted.lengths),
        "perform_seconds": counted.seconds,
    }
    held = sum(shard.lease.current is not None for shard in shards)
    lag = lag_of(shards, queue)
    return Reading(counters, {"shards": held} | ({} if lag is None else {"lag": lag}))
