"""Batches that run for much longer than those of their queue do, and what waits behind them."""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from math import inf, isfinite

from lowq.backend import Backend
from lowq.clock import Clock, now
from lowq.errors import RedisRefused, RedisUnavailable
from lowq.inspection.calls import read_stats
from lowq.inspection.registry import NodeInfo, all_queues, nodes
from lowq.observe.counters import BOUNDS
from lowq.observe.times import TotalTimes, perform_times

#: A batch is stuck when it has been running for longer than this, seconds, and for longer than so many times what 95 %
#: of the batches of its queue take.
STUCK_SECONDS, STUCK_TIMES = 60.0, 10.0
#: Most of them that are named.
MOST = 100


@dataclass(frozen=True, slots=True)
class StuckBatch:
    """A batch that is stuck, as of the last heartbeat of its node."""

    queue: str
    shard: int
    #: Its ids, as far as the node names them: up to 1,000.
    ids: tuple[str, ...]
    #: How many ids it has.
    count: int
    node: str
    #: Of that node, from 0; None: a task of its event loop.
    thread: int | None
    #: For how long it has been running, and from when on that is too long, seconds.
    seconds: float
    limit: float
    #: Jobs of its shard that wait until it ends.
    waiting: int


def stuck_limit(times: TotalTimes) -> float:
    """Seconds from which on a batch is stuck in a queue whose batches took so long."""
    p95 = times.percentile(0.95)
    if not isfinite(p95):  # how long those took that are beyond all buckets: on average, at most
        longest, beyond = BOUNDS[-1], times.buckets[-1][1]
        p95 = max(times.seconds / beyond, longest)
    return max(STUCK_SECONDS, STUCK_TIMES * p95)


def stuck_batches(backend: Backend, living: Sequence[NodeInfo] | None = None) -> list[StuckBatch]:
    """The batches that are stuck, longest first. ``living``: the nodes, where they are known already. While none of
    them runs a batch for long nothing else is read.

    Raises:
        RedisUnavailable, RedisRefused
    """
    found = [
        (node.name, thread, performed)
        for node in (nodes(backend) if living is None else living)
        for thread, performed in [*enumerate(node.performing), *((None, task) for task in node.longest_tasks)]
        if performed is not None and performed["seconds"] > STUCK_SECONDS
    ]
    limits = {
        queue: stuck_limit(perform_times(backend, queue)) for queue in {performed["queue"] for _, _, performed in found}
    }
    found = [item for item in found if item[2]["seconds"] > limits[item[2]["queue"]]]
    found = sorted(found, key=lambda item: item[2]["seconds"], reverse=True)[:MOST]
    waiting = _waiting(backend, {(performed["queue"], performed["shard"]) for _, _, performed in found})
    return [
        StuckBatch(
            performed["queue"], performed["shard"], tuple(performed["ids"]), performed["count"], node, thread,
            performed["seconds"], limits[performed["queue"]], waiting[performed["queue"], performed["shard"]],
        )
        for node, thread, performed in found
    ]  # fmt: skip


def _waiting(backend: Backend, places: Set[tuple[str, int]]) -> dict[tuple[str, int], int]:
    """How many due jobs wait in these shards. A node names a shard by its number: while a reshard is under way that may
    be one of each layout, and both count.
    """
    found = dict.fromkeys(places, 0)
    if not places:
        return found
    layouts = {info.name: info.layouts.all for info in all_queues(backend)}
    listed = [
        (place, layout.prefix(backend.config.namespace, *place))
        for place in places
        for layout in layouts.get(place[0], ())
        if place[1] < layout.shards_count
    ]
    figures = read_stats(backend.client, [prefix for _, prefix in listed], None)
    for (place, _), stats in zip(listed, figures, strict=True):
        found[place] += stats.due
    return found


def seconds_all_busy(node: NodeInfo) -> float:
    """For how long all threads of a node have been busy with the batches that they are busy with; 0.0: one is not."""
    return min((performed["seconds"] if performed else 0.0 for performed in node.performing), default=0.0)


class StuckLimits:
    """When batches of queues are stuck, for a node that asks about its own. Read anew every 30 s."""

    #: Performs of a queue from which on it is known how long they take.
    KNOWN = 20
    #: Seconds.
    AGE = 30.0

    def __init__(self, backend: Backend, clock: Clock = now) -> None:
        self._backend = backend
        self._clock = clock
        self._read: dict[str, tuple[float, float]] = {}

    def seconds_stuck(self, running: Sequence[tuple[str, float] | None]) -> float:
        """For how long, in seconds, all of these have been stuck; 0.0: they have not, or it is not known. Each is the
        queue and the seconds of a batch; None: nothing runs there.
        """
        batches = [item for item in running if item is not None and item[1] > STUCK_SECONDS]
        if len(batches) < len(running) or not batches:
            return 0.0
        try:
            is_stuck = all(seconds > self._limit(queue) for queue, seconds in batches)
        except (RedisUnavailable, RedisRefused):
            return 0.0
        return min(seconds for _, seconds in batches) if is_stuck else 0.0

    def _limit(self, queue: str) -> float:
        read_at, limit = self._read.get(queue, (-inf, inf))
        if self._clock() - read_at > self.AGE:
            times = perform_times(self._backend, queue)
            limit = stuck_limit(times) if times.count >= self.KNOWN else inf
            self._read[queue] = self._clock(), limit
        return limit
