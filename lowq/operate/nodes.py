"""The nodes in the registry, read only: which of them live, what they perform, and which batches are stuck."""

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any, Literal, NamedTuple, TypedDict, get_args

from lowq.backend import Backend
from lowq.clock import Clock, now
from lowq.errors import ConfigError, RedisRefused, RedisUnavailable, UnknownNodeError
from lowq.limits import registered_limits
from lowq.observe.histories import BOUNDS, TotalTimes, total_times
from lowq.operate.queues import all_queues
from lowq.operate.walk import read_stats
from lowq.store import Client, untrusted
from lowq.store.calls import time_of
from lowq.store.keys import MAX_SHARDS, is_queue_name, nodes_key

#: What a node may be told.
NodeCommand = Literal["quiet", "unquiet", "stop", "reload"]
NODE_COMMANDS: tuple[NodeCommand, ...] = get_args(NodeCommand)
#: Seconds for which a command waits for a node that does not listen yet.
LISTENS_SECONDS = 5.0


class RunningBatch(TypedDict):
    """A batch that was being performed when its node sent its last heartbeat."""

    queue: str
    shard: int
    #: Up to three; of a batch that takes longer than 30 s up to 1,000.
    ids: list[str]
    #: How many ids it has.
    count: int
    #: For how long it had been running then.
    seconds: float


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node, as its last heartbeat described it. Fields that its version doesn't have are empty."""

    name: str
    #: Unix time, seconds, by the server's clock, and how long ago that was.
    heartbeat_at: float
    seconds_ago: float
    host: str = ""
    pid: int = 0
    threads: int = 0
    version: str = ""
    #: Unix time, seconds.
    started_at: float | None = None
    queues: tuple[str, ...] = ()
    #: queue -> the shards that it holds.
    shards: Mapping[str, Sequence[int]] = field(default_factory=dict)
    #: Per thread what it performs; None when it is idle.
    performing: tuple[RunningBatch | None, ...] = ()
    #: How many tasks its event loop runs, each of which works a shard.
    tasks: int = 0
    #: How many of these it may run at once; 0: it has no event loop.
    concurrency: int = 0
    #: What those of them perform that have been running longest.
    longest_tasks: tuple[RunningBatch, ...] = ()
    #: It takes nothing more.
    quiet: bool = False
    #: It has subscribed to the channel of commands since it started; before that it would miss them.
    listens: bool = True
    #: It was silent for longer than it said, so it counts as dead.
    lost: bool = False
    #: Redis is a replica by now: nobody can write to it, and the node waits.
    waiting: bool = False
    #: Resident memory of its process, bytes; 0: unknown.
    memory: int = 0
    #: Seconds by which its maintenance loop ran late at most, in the last ten minutes.
    late: float = 0.0
    #: Seconds that a stop waits for what it performs; None: not known, or a consumer.
    shutdown_timeout: float | None = None
    #: Threads beyond its own whose handlers have exceeded their ttr and still run.
    written_off: int = 0
    #: ``node``, or ``consumer``: then jobs are taken by hand.
    kind: str = "node"
    #: Of a consumer: how many jobs it has in hand.
    taken: int = 0
    #: Why it can't be reloaded, and what to do instead; empty: it can.
    reload_refusal: str = ""
    #: The process that has started it, and starts another one when it ends, on the same host: ``pid``, ``started_at``
    #: (Unix time, seconds), ``version``. Empty: there is none.
    supervisor: Mapping[str, Any] = field(default_factory=dict)
    #: It ends when a queue has another number of shards than its code says (``strict_shards_count``).
    strict: bool = False
    #: queue -> name -> the time table of a schedule that it knows.
    schedules: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    #: Limits around calls that its handlers have used lately, as the registry shows limits.
    limits: tuple[Mapping[str, Any], ...] = ()

    def batches(self) -> Iterator[tuple[int | None, RunningBatch]]:
        """Its running batches, each with the number of its thread, from 0; None: a task of its event loop."""
        for thread, batch in [*enumerate(self.performing), *((None, task) for task in self.longest_tasks)]:
            if batch is not None:
                yield thread, batch


def nodes(backend: Backend, *, lost: bool = False) -> list[NodeInfo]:
    """The nodes that live, by name: those that have not been silent for longer than their lease_ttl. On a replica,
    which no node can write to, those that lived when it became one, and wait. ``lost``: those instead that fell silent
    within the last hour, the latest first; of very many the latest 50.

    Raises:
        RedisUnavailable, RedisRefused
    """
    entries = read_node_entries(backend)
    return entries.lost if lost else entries.live


def _is_replica(client: Client) -> bool:
    try:
        return client.server_info().get("role") == "slave"
    except RedisRefused:  # it may not be asked
        return False


def live_nodes(raw: Sequence[bytes], now: float) -> list[NodeInfo]:
    """The nodes that live, by name, from the fields of the registry."""
    return [info for info in _node_infos(raw, now) if not info.lost]


def _node_infos(raw: Sequence[bytes], now: float, *, on_replica: bool = False) -> list[NodeInfo]:
    """The nodes whose entries can be read, by name."""
    infos = [_node_info(name, data, now, on_replica) for name, data in zip(raw[::2], raw[1::2], strict=True)]
    return sorted((info for info in infos if info is not None), key=lambda info: info.name)


class _Entry(NamedTuple):
    """An entry of the registry, as heartbeat.lua describes it."""

    heartbeat_at: float
    #: Seconds without a word after which the node is to be taken for dead.
    silence: float
    #: Others that see that it is dead take its part from it. Consumers never have one.
    has_part: bool
    #: None: they can't be read.
    details: dict[str, Any] | None

    @classmethod
    def read(cls, data: bytes) -> "_Entry | None":
        """None: it is none of ours."""
        try:
            head, silence, size, rest = data.split(b" ", 3)
            details = rest[int(size) :]
        except ValueError:
            return None
        heartbeat_at, patience = untrusted.finite(head), untrusted.finite(silence)
        if heartbeat_at is None or patience is None:
            return None
        return cls(heartbeat_at, patience, size != b"0", untrusted.json_object(details))


@dataclass(frozen=True, slots=True)
class NodeEntries:
    """The registry of nodes, also of those that do not live."""

    names: frozenset[str]
    #: As `nodes` has them.
    live: list[NodeInfo]
    lost: list[NodeInfo]
    #: Node -> seconds since its last heartbeat, of those that were silent for longer than they said, which no other
    #: node has noticed.
    silent: Mapping[str, float]
    unreadable: frozenset[str]


def read_node_entries(backend: Backend) -> NodeEntries:
    """The registry of nodes.

    Raises:
        RedisUnavailable, RedisRefused
    """
    key = nodes_key(backend.config.namespace)
    raw, moment = backend.client.commands([("HGETALL", key), ("TIME",)], key=key)
    now = time_of(moment)
    infos = _node_infos(raw, now)
    if any(info.lost for info in infos) and _is_replica(backend.client):
        infos = _node_infos(raw, now, on_replica=True)
    silent, unreadable = {}, set()
    names = [name.decode("utf-8", "replace") for name in raw[::2]]
    for name, entry in zip(names, map(_Entry.read, raw[1::2]), strict=True):
        is_silent = entry is not None and now - entry.heartbeat_at > entry.silence
        if entry is None or (entry.details is None and not (is_silent and not entry.has_part)):
            unreadable.add(name)
        elif is_silent and entry.has_part:
            silent[name] = now - entry.heartbeat_at
    lost = sorted((info for info in infos if info.lost), key=lambda info: info.seconds_ago)
    return NodeEntries(frozenset(names), [info for info in infos if not info.lost], lost, silent, frozenset(unreadable))


#: The details that are whole numbers; 0: not known.
_NUMBERS = ("pid", "threads", "tasks", "concurrency", "memory", "written_off", "taken")


def _node_info(name: bytes, data: bytes, now: float, on_replica: bool) -> NodeInfo | None:
    """Reads an entry of the registry; None: it is none of ours."""
    entry = _Entry.read(data)
    if entry is None:
        untrusted.log_skipped("node", name, "its entry in the registry is none of ours")
        return None
    heartbeat_at, details = entry.heartbeat_at, entry.details or {}
    is_silent = now - heartbeat_at > entry.silence
    is_consumer = details.get("kind") == "consumer"
    waits = is_silent and on_replica and (entry.has_part or is_consumer)
    refusal = "it is a consumer: restart its program" if is_consumer else details.get("reload_refusal")
    said = details.get("schedules")
    return NodeInfo(
        name=name.decode("utf-8", "replace"),
        heartbeat_at=heartbeat_at,
        seconds_ago=max(now - heartbeat_at, 0.0),
        host=untrusted.text(details.get("host")) or "",
        version=untrusted.text(details.get("version")) or "",
        started_at=untrusted.number(details.get("started_at"), 0),
        queues=tuple(filter(is_queue_name, _list(details.get("queues")))),
        shards=_shards(details.get("shards")),
        performing=tuple(map(_performing, _list(details.get("performing")))),
        longest_tasks=tuple(filter(None, map(_performing, _list(details.get("longest_tasks"))))),
        quiet=bool(details.get("quiet")),
        listens=details.get("listens") is not False,
        lost=is_silent and not waits,
        waiting=waits,
        shutdown_timeout=untrusted.number(details.get("shutdown_timeout"), 0),
        late=untrusted.number(details.get("late"), 0) or 0.0,
        kind="consumer" if is_consumer else "node",
        limits=tuple(rule.shown() for rule in registered_limits(_list(details.get("limits"))) if rule.key),
        reload_refusal=untrusted.text(refusal) or "",
        supervisor=untrusted.plain(own) if isinstance(own := details.get("supervisor"), dict) else {},
        strict=details.get("strict") is True,
        schedules={
            queue: {name: untrusted.plain(table) for name, table in tables.items() if isinstance(table, dict)}
            for queue, tables in (said if isinstance(said, dict) else {}).items()
            if is_queue_name(queue) and isinstance(tables, dict)
        },
        **{name: untrusted.whole(details.get(name), 0) or 0 for name in _NUMBERS},
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _shards(said: Any) -> dict[str, list[int]]:
    if not isinstance(said, dict):
        return {}
    return {
        queue: [shard for shard in _list(held) if untrusted.whole(shard, 0, MAX_SHARDS - 1) is not None]
        for queue, held in said.items()
        if is_queue_name(queue)
    }


def _performing(said: Any) -> RunningBatch | None:
    """The batch of a thread; None also when it can't be read."""
    if not isinstance(said, dict):
        return None
    queue, shard = said.get("queue"), untrusted.whole(said.get("shard"), 0, MAX_SHARDS - 1)
    if not is_queue_name(queue) or shard is None:
        return None
    ids = [job_id for job_id in map(untrusted.text, _list(said.get("ids"))) if job_id]
    return {
        "queue": queue,
        "shard": shard,
        "ids": ids,
        "count": untrusted.whole(said.get("count"), len(ids)) or len(ids),
        "seconds": untrusted.number(said.get("seconds"), 0) or 0.0,
    }


#: A batch is stuck when it has been running for longer than this, seconds, and for longer than so many times the 95th
#: percentile of its queue.
STUCK_SECONDS, STUCK_TIMES = 60.0, 10.0
#: Stuck batches that are named at most.
MOST_STUCK = 100


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
    """Seconds from which on a batch is stuck in a queue with these times."""
    p95 = times.percentile(0.95)
    if not isfinite(p95):  # beyond all buckets: the average of those there, at most
        longest, beyond = BOUNDS[-1], times.buckets[-1][1]
        p95 = max(times.seconds / beyond, longest)
    return max(STUCK_SECONDS, STUCK_TIMES * p95)


def stuck_batches(backend: Backend, living: Sequence[NodeInfo] | None = None) -> list[StuckBatch]:
    """The batches that are stuck, longest first. ``living``: the nodes, if they are known already. Nothing else is read
    while none of them has been running a batch for long.

    Raises:
        RedisUnavailable, RedisRefused
    """
    found = [
        (batch, node.name, thread)
        for node in (nodes(backend) if living is None else living)
        for thread, batch in node.batches()
        if batch["seconds"] > STUCK_SECONDS
    ]
    times = total_times(backend, [*{batch["queue"] for batch, *_ in found}])
    limits = {queue: stuck_limit(runs) for queue, (_, runs) in times.items()}
    found = [item for item in found if item[0]["seconds"] > limits[item[0]["queue"]]]
    found = sorted(found, key=lambda item: item[0]["seconds"], reverse=True)[:MOST_STUCK]
    waiting = _count_due(backend, {(batch["queue"], batch["shard"]) for batch, *_ in found})
    return [
        StuckBatch(
            batch["queue"], batch["shard"], tuple(batch["ids"]), batch["count"], node, thread, batch["seconds"],
            limits[batch["queue"]], waiting[batch["queue"], batch["shard"]],
        )
        for batch, node, thread in found
    ]  # fmt: skip


def _count_due(backend: Backend, places: Set[tuple[str, int]]) -> Counter[tuple[str, int]]:
    """How many due jobs these shards have. A node names a shard by its number: while a reshard is under way that may be
    one of each layout, and both count.
    """
    found = Counter[tuple[str, int]]()
    layouts = {info.name: info.layouts.all for info in all_queues(backend)} if places else {}
    prefixes = {
        layout.prefix(backend.config.namespace, *place): place
        for place in places
        for layout in layouts.get(place[0], ())
        if place[1] < layout.shards_count
    }
    for place, stats in zip(prefixes.values(), read_stats(backend.client, list(prefixes), None), strict=True):
        found[place] += stats.due
    return found


def seconds_all_busy(node: NodeInfo) -> float:
    """For how many seconds all threads of a node have been performing their batches; 0.0: one is idle."""
    return min((performed["seconds"] if performed else 0.0 for performed in node.performing), default=0.0)


class StuckLimits:
    """From how many seconds on batches are stuck, for a node that asks about its own. Read anew every 30 s."""

    #: Performs of a queue from which on their usual time is known.
    KNOWN = 20
    #: Seconds.
    AGE = 30.0

    def __init__(self, backend: Backend, clock: Clock = now) -> None:
        self._backend = backend
        self._clock = clock
        self._read: dict[str, tuple[float, float]] = {}

    def seconds_stuck(self, running: Sequence[tuple[str, float] | None]) -> float:
        """For how many seconds all of these have been stuck; 0.0: one is not, or that is not known. Each is the queue
        and the seconds of a batch; None: an idle thread.
        """
        batches = [item for item in running if item is not None]
        shortest = min((seconds for _, seconds in batches), default=0.0)
        if len(batches) < len(running) or shortest <= STUCK_SECONDS:
            return 0.0
        try:
            return shortest if all(seconds > self._limit(queue) for queue, seconds in batches) else 0.0
        except (RedisUnavailable, RedisRefused):
            return 0.0

    def _limit(self, queue: str) -> float:
        read_at, limit = self._read.get(queue, (-inf, inf))
        if self._clock() - read_at > self.AGE:
            times = total_times(self._backend, [queue])[queue][1]
            limit = stuck_limit(times) if times.count >= self.KNOWN else inf
            self._read[queue] = self._clock(), limit
        return limit


def send_command(app: Backend, node: str, command: NodeCommand) -> None:
    """Tells a node to go quiet (take nothing more, finish its batches, give up its shards), to take jobs again
    (unquiet), to stop, or to reload (go on with the code that is on its disk now). The command is sent once,
    as soon as the node listens: one that is connecting to Redis again may miss it. `nodes` shows whether it was carried
    out.

    Raises:
        UnknownNodeError: no node of that name lives.
        ConfigError: an unknown command, or a node that can't be reloaded, or does not listen.
    """
    if command not in NODE_COMMANDS:
        raise ConfigError(f"a node's commands are {', '.join(map(repr, NODE_COMMANDS))}, not {command!r}")
    give_up_at = now() + LISTENS_SECONDS
    while True:
        living = {info.name: info for info in nodes(app)}
        if node not in living:
            known = ", ".join(map(repr, list(living)[:5])) or "none"
            raise UnknownNodeError(f"no node {node!r} lives; those that do: {known}")
        refusal = living[node].reload_refusal
        if command == "reload" and refusal:
            raise ConfigError(f"{node} can't be reloaded: {refusal}")
        if command == "unquiet" and living[node].kind == "consumer":
            raise ConfigError(f"{node} is a consumer, which stays quiet: start its process again")
        if living[node].listens:
            break
        if now() >= give_up_at:
            raise ConfigError(f"{node} does not listen for commands yet: try again, or see if its user may subscribe")
        time.sleep(0.05)
    send_message(app, {"to": node, "do": command})


def send_message(app: Backend, message: Mapping[str, str]) -> None:
    """Sends a node what it is to ``do``."""
    channel = nodes_key(app.config.namespace)
    app.client.command("SPUBLISH", channel, json.dumps(message), key=channel)
