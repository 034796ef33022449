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
from lowq_web.stats_cache import Snapshot, Surroundings

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
}


def metrics(request: Request) -> Response:
    """In the text format of Prometheus."""
    context = context_of(request)
    registry = CollectorRegistry(auto_describe=False)
    cache = context.stats_cache
    registry.register(AllFigures(context.app, cache.figures(), cache.surroundings()))
    return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})


class AllFigures(Collector):
    """All figures, as of the latest readings."""

    def __init__(self, app: lowq.Lowq, figures: Snapshot, around: Surroundings) -> None:
        self._app = app
        self._figures = figures
        self._around = around

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
