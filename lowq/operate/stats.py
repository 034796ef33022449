"""Queues and shards in figures: states of jobs, counters, the forecast of the backlog, and all queues at once."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from lowq.backend import Backend
from lowq.codec import decode_id
from lowq.errors import RedisUnavailable, ScriptError
from lowq.observe.histories import Flow, read_flows
from lowq.operate.queues import QueueShards, entry_call, entry_of, queues
from lowq.operate.walk import STATS_TOGETHER, Silent, answers, ask, ask_some
from lowq.sharding import Layouts
from lowq.store import Call, Command, untrusted
from lowq.store.keys import nodes_key
from lowq.store.shard_operations import ShardOperations, StatsReply

#: ``latency_goal`` of a queue that has none.
LATE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Stats:
    """A queue in figures, over all its shards."""

    name: str
    shards_count: int
    #: Jobs that wait: due + scheduled, and also fresh + retries.
    length: int
    #: Their time has come.
    due: int
    #: Their time has not come, be it the first or that of a retry.
    scheduled: int
    #: They never failed, or not since they were kicked.
    fresh: int
    #: Failed at least once; due or not.
    retries: int
    #: In flight.
    taken: int
    morgue_length: int
    #: Seconds since the oldest due job became due; 0.0 when none is.
    lag: float
    #: Since the queue was created: jobs performed, failures charged, and burials.
    processed: int
    failed: int
    buried: int
    #: At least one shard is paused.
    paused: bool
    #: The waiting job that is or was due first, and its perform_at (Unix time, seconds).
    oldest_id: str | None = None
    oldest_at: float | None = None
    #: Since the queue was created: payloads whose ttl had passed before they were taken.
    expired: int = 0
    #: Since the queue was created: jobs that were cancelled, waiting or in flight.
    cancelled: int = 0
    #: Since the queue was created: payloads that came in, also those that were merged.
    pushed: int = 0
    #: Ids that may wait or be in flight, at most; None: any number.
    capacity: int | None = None
    #: Seconds of ``lag`` from which on it is late.
    latency_goal: float = LATE_SECONDS
    #: Counts the reshards that have ended.
    epoch: int = 0
    #: While a reshard is under way: the number of shards that the queue is given.
    reshard_to: int | None = None

    @property
    def is_late(self) -> bool:
        """Whether a job waits for longer than the goal. One that is paused is late on purpose."""
        return self.lag > self.latency_goal and not self.paused

    @property
    def fill(self) -> float | None:
        """The share of its capacity that is used, from 0 to 1; a shard may be full before. None: no capacity."""
        return None if self.capacity is None else (self.length + self.taken) / self.capacity


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """A shard and its holder."""

    index: int
    length: int
    taken: int
    morgue_length: int
    #: Seconds since its oldest due job became due.
    lag: float
    #: The holder of the lease: the node's name if that is known, otherwise its nonce; None: nobody.
    owner: str | None
    #: The fencing token of the lease.
    fence: int | None
    #: Seconds that the lease still runs.
    lease_seconds: float | None
    paused: bool
    #: The waiting job that is or was due first.
    oldest_id: str | None
    #: Of its layout: counts the reshards of the queue.
    epoch: int = 0
    #: While a reshard is under way. sealed: its jobs are being moved to another layout; moved: all of them were; fed:
    #: jobs are being moved to it, and none is taken until all have come.
    sealed: bool = False
    moved: bool = False
    fed: bool = False


def node_names(backend: Backend) -> dict[bytes, bytes]:
    """The name of each node, by the beginning of its leases' tokens: the name ends with that."""
    key = nodes_key(backend.config.namespace)
    return by_nonce(backend.client.command("HKEYS", key, key=key))


def by_nonce(names: Iterable[bytes]) -> dict[bytes, bytes]:
    """As `node_names`, of the names in the registry."""
    return {name.rpartition(b":")[2]: name for name in names}


#: Figures of shards of which a queue has the sum.
_SUMMED = (
    "length", "due", "retries", "taken", "morgue_length", "processed", "failed", "buried", "expired", "cancelled",
    "pushed",
)  # fmt: skip
#: Figures of shards that a `ShardInfo` has, too.
_SHOWN = ("length", "taken", "morgue_length", "lag", "paused", "sealed", "moved", "fed")


def _totals(shards: Sequence[StatsReply]) -> dict[str, int]:
    return {name: sum(getattr(shard, name) for shard in shards) for name in _SUMMED}


def shard_info(index: int, stats: StatsReply, names: Mapping[bytes, bytes], epoch: int = 0) -> ShardInfo:
    """A shard, from its figures and `node_names`."""
    nonce, _, fence = (stats.lease or b"").rpartition(b":")
    return ShardInfo(
        index=index,
        owner=None if stats.lease is None else _text(names.get(nonce[:6], nonce)),
        fence=untrusted.count(fence) if fence.isdigit() else None,
        lease_seconds=None if stats.lease is None else stats.lease_seconds,
        oldest_id=_text(stats.oldest_id),
        epoch=epoch,
        **{name: getattr(stats, name) for name in _SHOWN},
    )


def _text(raw: bytes | None) -> str | None:
    return None if raw is None else decode_id(raw)


# --- queues ---


@dataclass(frozen=True, slots=True)
class QueueOverview:
    """A queue and its shards, read together."""

    stats: Stats
    shards: list[ShardInfo]


def _overview(
    name: str,
    layouts: Layouts,
    options: Mapping[str, Any],
    replies: Sequence[StatsReply | None],
    names: Mapping[bytes, bytes],
) -> QueueOverview:
    """A queue from the figures of all its shards (None: not known, and left out), its options in the registry, and
    `node_names`.
    """
    places = [(layout.epoch, index) for layout in layouts.all for index in range(layout.shards_count)]
    known = [(*place, reply) for place, reply in zip(places, replies, strict=True) if reply is not None]
    shards = [reply for _, _, reply in known]
    totals = _totals(shards)
    firsts = [(shard.oldest_at, shard.oldest_id) for shard in shards if shard.oldest_at is not None]
    oldest_at, oldest_id = min(firsts, default=(None, None))
    stats = Stats(
        name=name,
        shards_count=layouts.current.shards_count,
        scheduled=totals["length"] - totals["due"],
        fresh=totals["length"] - totals["retries"],
        lag=max((shard.lag for shard in shards), default=0.0),
        paused=any(shard.paused for shard in shards),
        oldest_id=_text(oldest_id),
        oldest_at=untrusted.finite(oldest_at),
        capacity=untrusted.whole(options.get("capacity"), 1),
        latency_goal=untrusted.number(options.get("latency_goal"), 0) or LATE_SECONDS,
        epoch=layouts.current.epoch,
        reshard_to=None if layouts.next is None else layouts.next.shards_count,
        **totals,
    )
    return QueueOverview(stats, [shard_info(index, reply, names, epoch) for epoch, index, reply in known])


def overview(backend: Backend) -> list[QueueOverview]:
    """Every queue in the registry, by name; one with a key of the wrong type is left out. Costs Redis some 20
    microseconds a shard.

    Raises:
        RedisUnavailable, RedisRefused
    """
    infos = queues(backend)
    names = node_names(backend)
    of_each = [QueueShards(backend, info.name).prefixes_in(info.layouts) for info in infos]
    calls = [ShardOperations(prefix).stats(None) for prefix in chain(*of_each)]
    answered = answers(backend.client, calls, STATS_TOGETHER)
    found: list[QueueOverview] = []
    for info, prefixes in zip(infos, of_each, strict=True):
        replies: list[StatsReply | None] = []
        for answer in islice(answered, len(prefixes)):
            if isinstance(answer, ScriptError):
                untrusted.log_skipped("queue", info.name, str(answer))
            elif isinstance(answer, Exception):
                raise answer
            else:
                replies.append(answer)
        if len(replies) == len(prefixes):
            found.append(_overview(info.name, info.layouts, info.options, replies, names))
    return found


def read_queue(
    queue: QueueShards, now: float | None, silent: Silent | None = None, names: Mapping[bytes, bytes] | None = None
) -> QueueOverview:
    """A queue and its shards. ``silent``: shards whose primary does not answer are left out, and entered there.
    ``names``: `node_names`, without which the owners of shards are nonces.

    Raises:
        UnknownQueueError, RedisUnavailable, RedisRefused, ScriptError
    """
    layouts = queue.presumed_layouts
    calls: list[Call[Any]] = [ShardOperations(prefix).stats(now) for prefix in queue.prefixes_in(layouts)]
    calls.append(entry_call(queue.namespace, queue.name))
    missing: Silent = {}
    *replies, raw = ask_some(queue.client, calls, STATS_TOGETHER, None if silent is None else missing)
    if len(replies) in missing:
        raise missing[len(replies)]
    entry = entry_of(queue.name, raw)
    if not queue.are_confirmed(layouts, entry):
        return read_queue(queue, now, silent, names)
    if silent is not None:
        silent.update(missing)
    return _overview(queue.name, layouts, {} if entry is None else entry.options, replies, names or {})


def read_shards(queue: QueueShards, silent: Silent | None = None) -> list[ShardInfo]:
    """The shards of a queue, by index. While a reshard is under way those of the new layout follow. ``silent``: as of
    `read_queue`.

    Raises:
        UnknownQueueError, RedisUnavailable, RedisRefused
    """
    return read_queue(queue, None, silent, node_names(queue.backend)).shards


# --- counters ---

#: The counters in a shard's `meta`, in the order of `read_statistics`.
_COUNTERS = ("delivery", "released", "kicked", "deleted")


@dataclass(frozen=True, slots=True)
class TaskCounts:
    """Numbers of jobs by state. An id in flight with newer payloads, or older ones in the morgue, counts in each."""

    #: Due.
    ready: int
    #: In flight.
    taken: int
    #: They wait, and are not due.
    delayed: int
    #: In the morgue.
    buried: int
    #: All of these.
    total: int
    #: Acknowledged, deleted, cancelled or expired, since the queue was created.
    done: int


@dataclass(frozen=True, slots=True)
class CallCounts:
    """Numbers of jobs by verb, since the queue was created; of take the number of calls."""

    #: Payloads that came in, also those that were merged with others.
    put: int
    #: Takes that brought jobs: of a shard, and any number at once.
    take: int
    ack: int
    #: By a handler or a consumer, or because that was told to stop; not after a `ttr` or a crash.
    release: int
    #: Charged a retry.
    fail: int
    #: Also because no retries were left, and as poison.
    bury: int
    kick: int
    delete: int
    #: Not known: it never reaches Redis.
    touch: None = None


@dataclass(frozen=True, slots=True)
class Statistics:
    """The counters of a queue, in the words of Tarantool's queue module."""

    name: str
    tasks: TaskCounts
    calls: CallCounts


def read_statistics(queue: QueueShards, now: float | None) -> Statistics:
    """The statistics of a queue.

    Raises:
        RedisUnavailable, RedisRefused, ScriptError
    """
    reads: list[Call[Any]] = []
    for prefix in queue.prefixes:
        reads += [ShardOperations(prefix).stats(now), Command(prefix, "HMGET", f"{prefix}meta", *_COUNTERS)]
    replies = list(ask(queue.client, reads, STATS_TOGETHER))
    take, release, kick, delete = map(sum, zip(*(map(untrusted.count, row) for row in replies[1::2]), strict=True))
    found = _totals(replies[::2])
    tasks = {"ready": found["due"], "taken": found["taken"], "delayed": found["length"] - found["due"],
             "buried": found["morgue_length"]}  # fmt: skip
    return Statistics(
        queue.name,
        TaskCounts(
            **tasks, total=sum(tasks.values()),
            done=found["processed"] + delete + found["cancelled"] + found["expired"],
        ),
        CallCounts(
            put=found["pushed"], take=take, ack=found["processed"], release=release, fail=found["failed"],
            bury=found["buried"], kick=kick, delete=delete,
        ),
    )  # fmt: skip


#: A queue keeps up whose backlog its nodes perform in so many seconds: some jobs have always just come.
KEPT_UP_SECONDS = 10.0
#: Seconds after which no end is foreseen: over so long a time the last 5 minutes say nothing.
FORESEEN_SECONDS = 30 * 86400.0
#: Jobs per second below which a backlog does not count as growing.
_GROWING = 0.05


@dataclass(frozen=True, slots=True)
class Forecast:
    """The forecast of a queue's backlog, if it goes on as in the last 5 minutes."""

    #: Jobs that are due or in flight.
    backlog: int
    #: Payloads that came in per second, also those that were merged; None: not known.
    pushed_rate: float | None
    #: Jobs performed per second; None: not known.
    performed_rate: float | None
    #: Seconds until the backlog is gone: 0.0 when there is none; None: not known, or the backlog does not shrink.
    drain_seconds: float | None
    #: Jobs per second by which the backlog grows; 0.0: it does not grow; None: not known.
    growing_rate: float | None
    #: Whether somebody holds a shard of the queue.
    is_worked: bool = True
    is_paused: bool = False
    #: Whether a job waits for longer than the latency goal of the queue.
    is_late: bool = False

    @property
    def keeps_up(self) -> bool:
        """Whether there is a backlog, no larger than what is performed in 10 seconds, and the queue is not late."""
        return self._is_small and not self.is_late

    @property
    def _is_small(self) -> bool:
        return 0 < self.backlog <= (self.performed_rate or 0.0) * KEPT_UP_SECONDS

    @property
    def text(self) -> str:
        """In words: ``empty in about 58 min``, ``growing by 12/s``, ``keeps up``, ``steady``, ``empty``,
        ``late``, ``no node works it``, ``paused``, ``nothing is performed``, ``not known yet``.
        """
        if not self.backlog:
            return "empty"
        if self.is_paused:
            return "paused"
        if not self.is_worked:
            return "no node works it"
        if self.growing_rate is None:
            return "not known yet"
        if self._is_small:
            return "keeps up" if self.keeps_up else "late"
        if self.growing_rate:
            return f"growing by {_rate(self.growing_rate)}"
        if self.drain_seconds is not None:
            return f"empty in about {_about(self.drain_seconds)}"
        return "steady" if self.performed_rate else "nothing is performed"


def forecast_of(found: QueueOverview, flow: Flow | None) -> Forecast:
    """The forecast of a queue from its figures and the flow that its nodes have recorded, if there is one."""
    backlog = found.stats.due + found.stats.taken
    is_worked = any(shard.owner is not None for shard in found.shards)
    if flow is None or not is_worked:
        return Forecast(backlog, None, None, None if backlog else 0.0, None, is_worked, found.stats.paused)
    pushed, performed, change = (number / flow.seconds for number in (flow.pushed, flow.processed, flow.change))
    if backlog and (flow.growth is None or found.stats.paused):
        return Forecast(backlog, pushed, performed, None, None, is_worked, found.stats.paused)
    if flow.growth is not None and abs(flow.growth - change) > abs(change) / 2:
        change = flow.growth  # many came or went at once, minutes ago, and that does not go on
    drain_seconds, growing_rate = None, 0.0
    if not backlog:
        drain_seconds = 0.0
    elif backlog <= performed * KEPT_UP_SECONDS:
        drain_seconds = None if found.stats.is_late else backlog / performed
    elif change >= _GROWING:
        growing_rate = change
    elif change < 0 and backlog / -change <= FORESEEN_SECONDS:
        drain_seconds = backlog / -change
    return Forecast(backlog, pushed, performed, drain_seconds, growing_rate, is_late=found.stats.is_late)


def _about(seconds: float) -> str:
    """In one unit: ``58 min``."""
    for unit, size, upto in (("s", 1, 90), ("min", 60, 7200), ("h", 3600, 2 * 86400)):
        if seconds < upto:
            return f"{max(round(seconds / size), 1)} {unit}"
    return f"{round(seconds / 86400)} d"


def _rate(rate: float) -> str:
    return f"{rate:,.0f}/s" if rate >= 9.95 else f"{rate:.1f}/s"


def read_forecast(queue: QueueShards, found: QueueOverview, now: float | None, *, is_partial: bool) -> Forecast:
    """The forecast of a queue. ``is_partial``: some primaries are silent; if that of the history is, too, it is not
    known.
    """
    try:
        return forecast_of(found, read_flows(queue.backend, [queue.name], now).get(queue.name))
    except RedisUnavailable:
        if not is_partial:
            raise
        return forecast_of(found, None)
