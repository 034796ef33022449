"""The figures for Prometheus."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    "capacity": ("Ids that may wait or be in flight, at most", "capacity"),
    "latency_goal_seconds": ("Latency from which on the queue counts as late", "latency_goal"),
    "paused": ("1: the queue is paused", "paused"),
}
_COUNTERS = {
    "pushed": ("Payloads that came in, also those that were merged", "pushed"),
    "processed": ("Jobs performed", "processed"),
    "failed": ("Failures that were charged", "failed"),
    "buried": ("Times that something was buried", "buried"),
    "expired": ("Payloads whose ttl had passed before they were taken", "expired"),
    "cancelled": ("Jobs that were cancelled, waiting or in flight", "cancelled"),
}

#: The values of its labels, a tuple -> the figure; None: it is not known, and left out.
_Figures = Mapping[Any, float | None]


def _gauge(name: str, text: str, figures: _Figures, labels: Sequence[str] = ("queue",)) -> Metric:
    return _with_figures(GaugeMetricFamily(f"lowq_{name}", text, labels=labels), figures)


def _counter(name: str, text: str, figures: _Figures, labels: Sequence[str] = ("queue",)) -> Metric:
    return _with_figures(CounterMetricFamily(f"lowq_{name}", text, labels=labels), figures)


def _figure(name: str, text: str, value: float | None) -> Metric:
    return _gauge(name, text, {(): value}, ())


def _with_figures(family: GaugeMetricFamily | CounterMetricFamily, figures: _Figures) -> Metric:
    for labels, value in figures.items():
        if value is not None:
            family.add_metric(labels, value)
    return family


def metrics(request: Request) -> Response:
    """In the text format of Prometheus."""
    context = context_of(request)
    registry = CollectorRegistry(auto_describe=False)
    cache = context.stats_cache
    registry.register(AllFigures(context.app, cache.figures(), cache.surroundings(), cache.watched()))
    return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})


@dataclass(frozen=True, slots=True, eq=False)
class AllFigures(Collector):
    """All figures, as of the latest readings."""

    app: lowq.Lowq
    figures: Snapshot
    around: Surroundings
    watched: Watched

    def collect(self) -> Iterator[Metric]:
        queues, at = self.figures.queues, self.figures.at
        stats = [item.stats for item in queues]
        for name, (text, field) in _GAUGES.items():
            yield _gauge(name, text, {(item.name,): getattr(item, field) for item in stats})
        for name, (text, field) in _COUNTERS.items():
            yield _counter(name, text, {(item.name,): getattr(item, field) for item in stats})
        ages = {(item.name,): max(at - item.oldest_at, 0.0) for item in stats if item.oldest_at is not None}
        yield _gauge("oldest_age_seconds", "Age of the waiting job that was due first; 0: it is to come", ages)
        left = {(name,): forecast.drain_seconds for name, forecast in self.figures.forecasts.items()}
        yield _gauge("drain_seconds", "Until nothing is due or in flight, if it goes on as in the last 5 minutes", left)
        # Nobody is to hold a shard whose jobs are being moved, or are still to come.
        unheld = {
            (item.stats.name,): sum(shard.owner is None and not (shard.sealed or shard.fed) for shard in item.shards)
            for item in queues
        }
        yield _gauge("shards_without_owner", "Shards that no node holds", unheld)
        moving = {(item.name,): item.reshard_to is not None for item in stats}
        yield _gauge("resharding", "1: the queue is being resharded", moving)
        yield from self._times()
        yield from self._of_nodes()
        yield from self._of_schedules()
        yield from self._of_limits()
        yield from self._of_redis()

    def _of_nodes(self) -> Iterator[Metric]:
        living, names = self.around.nodes, [item.stats.name for item in self.figures.queues]
        performing = sum(performed is not None for node in living for performed in node.performing)
        yield _figure("nodes", "Nodes that live", len(living))
        yield _figure("threads_busy", "Threads of all nodes that perform something", performing)
        yield _figure("threads", "Threads of all nodes", sum(node.threads for node in living))
        yield _figure("tasks_busy", "Shards that the event loops of all nodes work", sum(node.tasks for node in living))
        most = sum(node.concurrency for node in living)
        yield _figure("tasks", "Shards that the event loops of all nodes may work at once", most)
        longest = {(name,): 0.0 for name in names}
        for node in living:
            for _, batch in node.batches():
                longest[batch["queue"],] = max(longest.get((batch["queue"],), 0.0), batch["seconds"])
        yield _gauge("running_seconds_max", "How long the batch runs that has been running longest", longest)
        counts = Counter(batch.queue for batch in self.around.stuck)
        stuck = {(name,): counts[name] for name in names}
        yield _gauge("stuck_batches", "Batches that run for much longer than those of their queue do", stuck)

    def _of_schedules(self) -> Iterator[Metric]:
        found, labels = {(item.queue, item.name): item for item in self.watched.schedules}, ("queue", "schedule")
        last = {names: item.last_at for names, item in found.items()}
        yield _gauge("schedule_last_seconds", "The tick that was pushed last, Unix time", last, labels)
        coming = {names: item.next_at for names, item in found.items()}
        text = "The tick that comes next, Unix time, unless it is paused or unknown"
        yield _gauge("schedule_next_seconds", text, coming, labels)
        missed = {names: item.missed_count for names, item in found.items()}
        text = "Ticks that came when no node could push them in time, or it was paused"
        yield _counter("schedule_missed", text, missed, labels)
        unknown = {names: not item.is_known for names, item in found.items()}
        yield _gauge("schedule_unknown", "1: no node that lives knows it", unknown, labels)

    def _of_limits(self) -> Iterator[Metric]:
        states = self.watched.limits.items()
        found = {(queue, state.limit.name(queue)): state for queue, some in states for state in some}
        most = {names: state.limit.limit for names, state in found.items()}
        yield _gauge("limit_permits", "Permits of a limit over all nodes", most, ("queue", "limit"))
        for name, field, text in (
            ("limit_permits_used", "used", "Those that are in use"),
            ("limit_waiting", "waiting", "Queues of nodes that wait for one"),
        ):
            yield _gauge(name, text, {names: getattr(of, field) for names, of in found.items()}, ("queue", "limit"))

    def _of_redis(self) -> Iterator[Metric]:
        info = self.around.redis
        is_known = info.used_memory > 0
        writes = None if info.persistence in ("", "unknown", "no AOF") else info.persistence != "none"
        yield _figure("redis_memory_bytes", "Memory that the data take, of one primary", info.used_memory or None)
        yield _figure("redis_memory_max_bytes", "maxmemory; 0: no limit", info.max_memory if is_known else None)
        yield _figure("redis_clients", "Connections", info.clients or None)
        text = "1: it writes its data to a disk, in an append-only file or snapshots"
        yield _figure("redis_persistence", text, writes)
        failing = not info.disk_ok if is_known else None
        yield _figure("redis_persistence_failing", "1: the last write to the disk has failed", failing)
        yield _figure("redis_last_save_seconds", "The last snapshot, Unix time", info.last_save_at)

    def _times(self) -> Iterator[Metric]:
        waits = HistogramMetricFamily(
            "lowq_wait_seconds", "How long jobs had waited since they were due, when they were taken", labels=["queue"]
        )
        performs = HistogramMetricFamily("lowq_perform_seconds", "How long performs took", labels=["queue"])
        for queue, both in total_times(self.app, [item.stats.name for item in self.figures.queues]).items():
            for histogram, times in zip((waits, performs), both, strict=True):
                buckets, so_far = [], 0
                for bound, count in times.buckets:
                    so_far += count
                    buckets.append(("+Inf" if bound == float("inf") else repr(bound), so_far))
                histogram.add_metric([queue], buckets, times.seconds)
        yield waits
        yield performs
