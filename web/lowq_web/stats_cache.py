"""The latest figures of all queues, read once for all viewers.

Reading them costs Redis some 20 microseconds a shard. So they are read at most every two seconds, and less often with
many shards: whatever the number of shards and viewers, watching takes less than half a percent of Redis's time.

A `Snapshot` here is figures of all queues. It is not `inspection.Snapshot`, the jobs that a bulk action is bound to: no
file imports this one and uses the other.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import lowq
from lowq import inspection
from lowq.observe.histories import RINGS, Flow, read_flows, total_history
from lowq.operate.explain import read_limits
from lowq.operate.nodes import NodeInfo, StuckBatch, stuck_batches
from lowq.operate.stats import forecast_of
from lowq.store.calls import time_of
from lowq_web.single_flight import SingleFlight

#: Seconds between two reads, at least, and for each shard.
INTERVAL, PER_SHARD = 2.0, 0.005
#: Seconds that a history is kept, as its finest intervals are 10 s long; and the history of all queues, per queue.
HISTORY_AGE, PER_HISTORY = 8.0, 0.04
#: Seconds that what came into all queues in the last 5 minutes is kept, at least, and for each queue.
FLOWS_AGE, PER_FLOW = 8.0, 0.01
#: Seconds over which deaths are counted, at most and at least.
DEATHS_WINDOW, DEATHS_STEP = 300.0, 30.0
#: Seconds for which Redis counts as available after it has answered TIME.
CLOCK_AGE = 1.0
#: Seconds that TIME may take, and everything else, before `RedisUnavailable` is raised.
CLOCK_PATIENCE, PATIENCE = 2.0, 10.0
#: Latest stretches of a history that may change: count.lua spreads what a node did in an outage over up to 60.
CHANGING = 62
#: Seconds after which the history of all queues is read as a whole again: a queue of the same name may be another one.
WHOLE_AGE = 3600.0
#: Histories that are kept.
MAX_HISTORIES = 200
#: Shards of a queue up to which its figures are read for every page.
MANY_SHARDS = 200


@dataclass(frozen=True, slots=True)
class Total:
    """Figures that are sums over all queues, and the fields that are sent of each queue."""

    #: Without the queues that are paused, which are late on purpose.
    lag: float
    due: int
    length: int
    fresh: int
    retries: int
    taken: int
    morgue_length: int
    processed: int
    failed: int
    buried: int
    expired: int
    cancelled: int
    pushed: int


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The figures of all queues at one moment. Hashed by identity: pages keep what they made of the latest ones."""

    #: Unix time, seconds, by the server's clock; and monotonic, of this machine.
    at: float
    moment: float
    #: Seconds for which it is the latest.
    interval: float
    queues: tuple[inspection.QueueOverview, ...]
    total: Total
    #: queue -> (performed, failed) per second since the snapshot before; "" is all of them. Empty in the first.
    rates: dict[str, tuple[float, float]] = field(default_factory=dict)
    #: queue -> when its backlog is gone, and what became of it in the last 5 minutes.
    forecasts: dict[str, inspection.Forecast] = field(default_factory=dict)
    flows: dict[str, Flow] = field(default_factory=dict)
    #: queue -> jobs that were buried per minute, as far as somebody has looked in the last 5 minutes.
    deaths: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Surroundings:
    """What works the queues, at one moment. Hashed by identity, too."""

    nodes: list[NodeInfo]
    stuck: list[StuckBatch]
    redis: inspection.RedisInfo


@dataclass(frozen=True, slots=True)
class Watched:
    """What only alerts ask for, at one moment."""

    schedules: list[inspection.ScheduleInfo]
    #: queue -> its limits over all nodes.
    limits: dict[str, list[inspection.LimitState]]


class StatsCache:
    """Safe for threads. Each value is read once for all callers; see `SingleFlight`. ``on_snapshot`` is called in the
    reading thread after each new snapshot, just before it is handed out.
    """

    def __init__(self, app: lowq.Lowq, on_snapshot: Callable[[], object] = lambda: None) -> None:
        self._app = app
        self._on_snapshot = on_snapshot
        self._lock = threading.Lock()
        self._latest: Snapshot | None = None
        self._figures = SingleFlight(self._read, lambda figures: figures.interval, PATIENCE)
        self._surroundings = SingleFlight(self._read_surroundings, lambda _: INTERVAL, PATIENCE)
        self._watched = SingleFlight(self._read_watched, lambda _: INTERVAL, PATIENCE)
        #: Seconds that the server's clock is ahead of ours.
        self._ahead = 0.0
        self._clock = SingleFlight(self._measure, lambda _: CLOCK_AGE, CLOCK_PATIENCE)
        #: What came into the queues in the last 5 minutes, and when that was read: by Redis's clock. They belong to
        #: whoever reads figures, one at a time.
        self._flows: dict[str, Flow] = {}
        self._flows_at = -math.inf
        #: Monotonic time -> queue -> jobs buried until then; theirs, too.
        self._buried: dict[float, dict[str, int]] = {}
        self._histories: dict[tuple[str, inspection.Span], SingleFlight[inspection.History]] = {}
        #: The history of all queues: these, read as a whole and read last at these Unix times by the server's clock.
        #: Only what may have changed since is read again.
        self._totals: dict[inspection.Span, tuple[list[str], float, float, list[inspection.HistoryPoint]]] = {}

    async def alive(self) -> None:
        """Raises unless Redis answers, or did a moment ago. Checked before everything else, so that requests end at
        once when Redis hangs, not each after a timeout of its own in a thread that others wait for.

        Raises:
            RedisUnavailable, RedisRefused
        """
        await self._clock.wait()

    def figures(self) -> Snapshot:
        """The latest figures.

        Raises:
            RedisUnavailable, RedisRefused
        """
        return self._figures.get()

    async def watch(self) -> Snapshot:
        """The latest figures, for an event loop.

        Raises:
            RedisUnavailable, RedisRefused
        """
        await self.alive()
        return await self._figures.wait()

    def stats(self, queue: lowq.Queue) -> inspection.Stats:
        """The figures of a queue: as they are now, but with very many shards those of the latest snapshot.

        Raises:
            UnknownQueueError, RedisUnavailable, RedisRefused
        """
        latest = self._latest_of(queue)
        return queue.stats() if latest is None else latest.stats

    def shards(self, queue: lowq.Queue) -> list[inspection.ShardInfo]:
        """Its shards; very many as of the latest snapshot.

        Raises:
            UnknownQueueError, RedisUnavailable, RedisRefused
        """
        latest = self._latest_of(queue)
        return self._app.shards(queue) if latest is None else latest.shards

    def _latest_of(self, queue: lowq.Queue) -> inspection.QueueOverview | None:
        """Its figures in the latest snapshot, if it has so many shards that they are not read for every page."""
        if queue.shards_count <= MANY_SHARDS:
            return None
        return next((item for item in self.figures().queues if item.stats.name == queue.name), None)

    def now(self) -> float:
        """Unix time, seconds, by the server's clock: due times are judged by that, not by ours.

        Raises:
            RedisUnavailable, RedisRefused
        """
        self._clock.get()
        return time.time() + self._ahead

    def redis_time(self) -> float:
        """Unix time, seconds, read from the server now: what bounds an action must be exact.

        Raises:
            RedisUnavailable, RedisRefused
        """
        return time_of(self._app.client.command("TIME"))

    def forget(self) -> None:
        """Drops the latest figures, as something was changed: the next caller sees it."""
        self._figures.forget()
        self._surroundings.forget()

    def surroundings(self) -> Surroundings:
        """Nodes, stuck batches and the server, read at most every two seconds for all viewers.

        Raises:
            RedisUnavailable, RedisRefused
        """
        return self._surroundings.get()

    def watched(self) -> Watched:
        """Schedules and limits, in the same way.

        Raises:
            RedisUnavailable, RedisRefused
        """
        return self._watched.get()

    def history(self, queue: str, span: inspection.Span) -> inspection.History:
        """Rates and lag of one queue, or with ``""`` of all together.

        Raises:
            UnknownQueueError, RedisUnavailable, RedisRefused
        """
        with self._lock:
            known = self._histories.get((queue, span))
            if known is None:
                if len(self._histories) >= MAX_HISTORIES:
                    self._histories.clear()
                read = partial(self._read_history, queue, span)
                known = self._histories[queue, span] = SingleFlight(read, partial(self._history_age, queue), PATIENCE)
        return known.get()

    def _measure(self) -> None:
        before = time.time()
        said = time_of(self._app.client.command("TIME"))
        # The server read its clock somewhere between. A slow answer is less exact than what is known already.
        after = time.time()
        if after - before < 1 or not self._ahead:
            self._ahead = said - (before + after) / 2

    def _read_surroundings(self) -> Surroundings:
        nodes = self._app.nodes()
        return Surroundings(nodes, stuck_batches(self._app, nodes), self._app.redis_info())

    def _read_watched(self) -> Watched:
        limited = [info for info in self._app.queues() if info.options.get("limit")]
        client, namespace = self._app.client, self._app.config.namespace
        limits = {info.name: read_limits(client, namespace, info.name, info.options) for info in limited}
        around_calls: list[Mapping[str, Any]] = []
        for rule in (rule for node in self.surroundings().nodes for rule in node.limits):
            if rule not in around_calls:
                around_calls.append(rule)
        if around_calls:
            limits[""] = read_limits(client, namespace, "", {"limit": around_calls})
        return Watched(self._app.schedules(), limits)

    def _read(self) -> Snapshot:
        figures = _read_snapshot(self._app, self._latest, self.now())
        flows = self._read_flows(figures.queues, figures.at)
        forecasts = {each.stats.name: forecast_of(each, flows.get(each.stats.name)) for each in figures.queues}
        figures = replace(figures, forecasts=forecasts, flows=flows, deaths=self._count_deaths(figures))
        self._latest = figures
        self._on_snapshot()
        return figures

    def _read_flows(self, queues: Sequence[inspection.QueueOverview], at: float) -> dict[str, Flow]:
        age = max(FLOWS_AGE, PER_FLOW * len(queues))
        if at - self._flows_at > age or at < self._flows_at:
            self._flows, self._flows_at = read_flows(self._app, [item.stats.name for item in queues], at), at
        return self._flows

    def _count_deaths(self, figures: Snapshot) -> dict[str, float]:
        kept = {at: found for at, found in self._buried.items() if figures.moment - at <= DEATHS_WINDOW}
        if figures.moment - max(kept, default=-math.inf) >= DEATHS_STEP:
            kept[figures.moment] = {item.stats.name: item.stats.buried for item in figures.queues}
        self._buried = kept
        first = min(kept)
        minutes = (figures.moment - first) / 60
        if not minutes or minutes < DEATHS_STEP / 60:
            return {}
        counts = {item.stats.name: item.stats.buried - kept[first].get(item.stats.name, 0) for item in figures.queues}
        return {name: count / minutes for name, count in counts.items() if count > 0}

    def _history_age(self, queue: str, _: inspection.History) -> float:
        if queue or self._latest is None:
            return HISTORY_AGE
        return max(HISTORY_AGE, PER_HISTORY * len(self._latest.queues))

    def _read_history(self, queue: str, span: inspection.Span) -> inspection.History:
        if queue:
            handle = self._app.queue(queue)
            handle.shards_count  # noqa: B018 - raises for a queue that nobody has used
            return handle.rates(span)
        # One moment for all of them, so that the end of the sum has every queue.
        now, names = self.now(), [info.name for info in self._app.queues()]
        width, slots = RINGS[span]
        of, whole_at, read_at, known = self._totals.get(span, ([], 0.0, 0.0, []))
        is_fresh = of == names and read_at <= now < whole_at + WHOLE_AGE
        since = read_at - CHANGING * width if is_fresh else 0.0
        found = total_history(self._app, names, span, now, since)
        rates = [rate for rate in known if now - slots * width < rate.at < since] + found.rates
        self._totals[span] = names, whole_at if is_fresh else now, now, rates
        return replace(found, rates=rates)


def _read_snapshot(app: lowq.Lowq, before: Snapshot | None, at: float) -> Snapshot:
    queues = tuple(app.overview())
    now = time.monotonic()
    shards = sum(len(item.shards) for item in queues)
    figures = [item.stats for item in queues]
    total = Total(
        **{
            item.name: sum(getattr(stats, item.name) for stats in figures)
            for item in fields(Total)
            if item.name != "lag"
        },
        lag=max((stats.lag for stats in figures if not stats.paused), default=0.0),
    )
    rates: dict[str, tuple[float, float]] = {}
    if before is not None and now - before.moment >= 0.5:
        seconds = now - before.moment
        earlier = {item.stats.name: item.stats for item in before.queues}
        for stats in figures:
            if stats.name in earlier:
                was = earlier[stats.name]
                rates[stats.name] = (
                    max(stats.processed - was.processed, 0) / seconds,
                    max(stats.failed - was.failed, 0) / seconds,
                )
        rates[""] = sum(rate[0] for rate in rates.values()), sum(rate[1] for rate in rates.values())
    elif before is not None:
        rates = before.rates
    return Snapshot(at, now, max(INTERVAL, shards * PER_SHARD), queues, total, rates)
