"""The figures for Prometheus."""

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

import lowq
from lowq.observe.histories import total_times
from lowq_web.context import context_of
from lowq_web.stats_cache import Snapshot, Surroundings, Watched

_GAUGES = {
    "lag_seconds": ("Seconds since the oldest due job became due", "lag"),
    "length": ("Jobs that wait", "length"),
    "due": ("Jobs whose time has come", "due"),
    "retries": ("Waiting jobs that failed at least once", "retries"),
    "busy": ("Jobs in flight", "taken"),
    "morgue_length": ("Jobs in the morgue", "morgue_length"),
}
_COUNTERS = {
    "pushed": ("Payloads that came in, also those that were merged", "pushed"),
    "processed": ("Jobs performed", "processed"),
    "failed": ("Failures that were charged", "failed"),
    "buried": ("Times that something was buried", "buried"),
    "expired": ("Payloads whose ttl had passed before they were taken", "expired"),
    "cancelled": ("Jobs that were cancelled, waiting or in flight", "cancelled"),
}


def metrics(request: Request) -> Response:
    """In the text format of Prometheus."""
    context = context_of(request)
    registry = CollectorRegistry(auto_describe=False)
    cache = context.stats_cache
    registry.register(AllFigures(context.app, cache.figures(), cache.surroundings(), cache.watched()))
    return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})


class AllFigures(Collector):
    """All figures, as of the latest readings."""

    def __init__(self, app: lowq.Lowq, figures: Snapshot, around: Surroundings, watched: Watched) -> None:
        self._app = app
        self._figures = figures
        self._around = around
        self._watched = watched

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        stats = [item.stats for item in self._figures.queues]
        for name, (text, field) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"lowq_{name}", text, labels=["queue"])
            for item in stats:
                gauge.add_metric([item.name], getattr(item, field))
            yield gauge
        for name, (text, field) in _COUNTERS.items():
            counter = CounterMetricFamily(f"lowq_{name}", text, labels=["queue"])
            for item in stats:
                counter.add_metric([item.name], getattr(item, field))
            yield counter
        oldest = GaugeMetricFamily(
            "lowq_oldest_age_seconds", "Age of the waiting job that was due first; 0: it is to come", labels=["queue"]
        )
        for item in stats:
            if item.oldest_at is not None:
                oldest.add_metric([item.name], max(self._figures.at - item.oldest_at, 0.0))
        yield oldest
        capacity = GaugeMetricFamily("lowq_capacity", "Ids that may wait or be in flight, at most", labels=["queue"])
        for item in stats:
            if item.capacity is not None:
                capacity.add_metric([item.name], item.capacity)
        yield capacity
        goal = GaugeMetricFamily(
            "lowq_latency_goal_seconds", "Latency from which on the queue counts as late", labels=["queue"]
        )
        for item in stats:
            goal.add_metric([item.name], item.latency_goal)
        yield goal
        drain = GaugeMetricFamily(
            "lowq_drain_seconds", "Until nothing is due or in flight, if it goes on as in the last 5 minutes",
            labels=["queue"],
        )  # fmt: skip
        for name, forecast in self._figures.forecasts.items():
            if forecast.drain_seconds is not None:
                drain.add_metric([name], forecast.drain_seconds)
        yield drain
        ownerless = GaugeMetricFamily("lowq_shards_without_owner", "Shards that no node holds", labels=["queue"])
        paused = GaugeMetricFamily("lowq_paused", "1: the queue is paused", labels=["queue"])
        moving = GaugeMetricFamily("lowq_resharding", "1: the queue is being resharded", labels=["queue"])
        for queue in self._figures.queues:
            # Nobody is to hold a shard whose jobs are being moved, or are still to come.
            unheld = sum(shard.owner is None and not (shard.sealed or shard.fed) for shard in queue.shards)
            ownerless.add_metric([queue.stats.name], unheld)
            paused.add_metric([queue.stats.name], int(queue.stats.paused))
            moving.add_metric([queue.stats.name], int(queue.stats.reshard_to is not None))
        yield ownerless
        yield paused
        yield moving
        yield from self._times()
        yield from self._of_nodes()
        yield from self._of_schedules()
        yield from self._of_limits()
        yield from self._of_redis()

    def _of_nodes(self) -> Iterator[Metric]:
        living = self._around.nodes
        nodes = GaugeMetricFamily("lowq_nodes", "Nodes that live")
        nodes.add_metric([], len(living))
        yield nodes
        busy = GaugeMetricFamily("lowq_threads_busy", "Threads of all nodes that perform something")
        busy.add_metric([], sum(performed is not None for node in living for performed in node.performing))
        yield busy
        threads = GaugeMetricFamily("lowq_threads", "Threads of all nodes")
        threads.add_metric([], sum(node.threads for node in living))
        yield threads
        tasks_busy = GaugeMetricFamily("lowq_tasks_busy", "Shards that the event loops of all nodes work")
        tasks_busy.add_metric([], sum(node.tasks for node in living))
        yield tasks_busy
        tasks = GaugeMetricFamily("lowq_tasks", "Shards that the event loops of all nodes may work at once")
        tasks.add_metric([], sum(node.concurrency for node in living))
        yield tasks
        longest: dict[str, float] = {item.stats.name: 0.0 for item in self._figures.queues}
        for node in living:
            for performed in filter(None, (*node.performing, *node.longest_tasks)):
                queue = performed["queue"]
                longest[queue] = max(longest.get(queue, 0.0), performed["seconds"])
        running = GaugeMetricFamily(
            "lowq_running_seconds_max", "How long the batch runs that has been running longest", labels=["queue"]
        )
        for queue, seconds in longest.items():
            running.add_metric([queue], seconds)
        yield running
        stuck = GaugeMetricFamily(
            "lowq_stuck_batches", "Batches that run for much longer than those of their queue do", labels=["queue"]
        )
        counts = Counter(batch.queue for batch in self._around.stuck)
        for item in self._figures.queues:
            stuck.add_metric([item.stats.name], counts[item.stats.name])
        yield stuck

    def _of_schedules(self) -> Iterator[Metric]:
        labels = ["queue", "schedule"]
        last = GaugeMetricFamily(
            "lowq_schedule_last_seconds", "The tick that was pushed last, Unix time", labels=labels
        )
        coming = GaugeMetricFamily(
            "lowq_schedule_next_seconds", "The tick that comes next, Unix time, unless it is paused or unknown",
            labels=labels,
        )  # fmt: skip
        missed = CounterMetricFamily(
            "lowq_schedule_missed", "Ticks that came when no node could push them in time, or it was paused",
            labels=labels,
        )  # fmt: skip
        unknown = GaugeMetricFamily("lowq_schedule_unknown", "1: no node that lives knows it", labels=labels)
        for item in self._watched.schedules:
            names = [item.queue, item.name]
            if item.last_at is not None:
                last.add_metric(names, item.last_at)
            if item.next_at is not None:
                coming.add_metric(names, item.next_at)
            missed.add_metric(names, item.missed_count)
            unknown.add_metric(names, int(not item.is_known))
        yield from (last, coming, missed, unknown)

    def _of_limits(self) -> Iterator[Metric]:
        labels = ["queue", "limit"]
        most = GaugeMetricFamily("lowq_limit_permits", "Permits of a limit over all nodes", labels=labels)
        used = GaugeMetricFamily("lowq_limit_permits_used", "Those that are in use", labels=labels)
        waiting = GaugeMetricFamily("lowq_limit_waiting", "Queues of nodes that wait for one", labels=labels)
        for queue, states in self._watched.limits.items():
            for state in states:
                names = [queue, state.limit.name(queue)]
                most.add_metric(names, state.limit.limit)
                used.add_metric(names, state.used)
                waiting.add_metric(names, state.waiting)
        yield from (most, used, waiting)

    def _of_redis(self) -> Iterator[Metric]:
        info = self._around.redis
        figures = [
            ("memory_bytes", "Memory that the data take, of one primary", info.used_memory or None),
            ("memory_max_bytes", "maxmemory; 0: no limit", info.max_memory if info.used_memory else None),
            ("clients", "Connections", info.clients or None),
            ("persistence", "1: it writes its data to a disk, in an append-only file or snapshots",
             None if info.persistence in ("", "unknown", "no AOF") else int(info.persistence != "none")),
            ("persistence_failing", "1: the last write to the disk has failed",
             int(not info.disk_ok) if info.used_memory else None),
            ("last_save_seconds", "The last snapshot, Unix time", info.last_save_at),
        ]  # fmt: skip
        for name, text, value in figures:
            gauge = GaugeMetricFamily(f"lowq_redis_{name}", text)
            if value is not None:  # it says so
                gauge.add_metric([], value)
            yield gauge

    def _times(self) -> Iterator[Metric]:
        waits = HistogramMetricFamily(
            "lowq_wait_seconds", "How long jobs had waited since they were due, when they were taken", labels=["queue"]
        )
        performs = HistogramMetricFamily("lowq_perform_seconds", "How long performs took", labels=["queue"])
        for queue, both in total_times(self._app, [item.stats.name for item in self._figures.queues]).items():
            for histogram, times in zip((waits, performs), both, strict=True):
                buckets, so_far = [], 0
                for bound, count in times.buckets:
                    so_far += count
                    buckets.append(("+Inf" if bound == float("inf") else repr(bound), so_far))
                histogram.add_metric([queue], buckets, times.seconds)
        yield waits
        yield performs
