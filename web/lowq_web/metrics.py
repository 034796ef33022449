"""The figures for Prometheus."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

import lowq
from lowq_web.context import context_of
from lowq_web.stats_cache import Snapshot

_GAUGES = {
    "lag_seconds": ("Seconds since the oldest due job became due", "lag"),
    "length": ("Jobs that wait", "length"),
    "due": ("Jobs whose time has come", "due"),
    "retries": ("Waiting jobs that failed at least once", "retries"),
    "busy": ("Jobs in flight", "taken"),
    "morgue_length": ("Jobs in the morgue", "morgue_length"),
}
_COUNTERS = {
    "processed": ("Jobs performed", "processed"),
    "failed": ("Failures that were charged", "failed"),
    "buried": ("Times that something was buried", "buried"),
    "expired": ("Payloads whose ttl had passed before they were taken", "expired"),
}


def metrics(request: Request) -> Response:
    """In the text format of Prometheus."""
    context = context_of(request)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(context.app, context.stats_cache.figures()))
    return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})


class _Figures(Collector):
    def __init__(self, app: lowq.Lowq, figures: Snapshot) -> None:
        self._app = app
        self._figures = figures

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
            "lowq_oldest_age_seconds", "Age of the waiting job that was due first; negative: to come", labels=["queue"]
        )
        for item in stats:
            if item.oldest_at is not None:
                oldest.add_metric([item.name], self._figures.at - item.oldest_at)
        yield oldest
        ownerless = GaugeMetricFamily("lowq_shards_without_owner", "Shards that no node holds", labels=["queue"])
        paused = GaugeMetricFamily("lowq_paused", "1: the queue is paused", labels=["queue"])
        for queue in self._figures.queues:
            ownerless.add_metric([queue.stats.name], sum(shard.owner is None for shard in queue.shards))
            paused.add_metric([queue.stats.name], int(queue.stats.paused))
        yield ownerless
        yield paused
        yield self._perform_seconds()
        nodes = GaugeMetricFamily("lowq_nodes", "Nodes that live")
        nodes.add_metric([], len(self._app.nodes()))
        yield nodes

    def _perform_seconds(self) -> Metric:
        histogram = HistogramMetricFamily("lowq_perform_seconds", "How long performs took", labels=["queue"])
        for item in self._figures.queues:
            times = self._app.queue(item.stats.name, item.stats.shards_count).perform_times()
            buckets, so_far = [], 0
            for bound, count in times.buckets:
                so_far += count
                buckets.append(("+Inf" if bound == float("inf") else repr(bound), so_far))
            histogram.add_metric([item.stats.name], buckets, times.seconds)
        return histogram
