"""The registries in Redis, read only: which queues there are, and which nodes live."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, NamedTuple, TypedDict

from lowq.backend import Backend
from lowq.errors import RedisRefused, UnknownQueueError
from lowq.schedules import is_internal
from lowq.sharding import Layout, Layouts
from lowq.store import Call, Client, Command, untrusted
from lowq.store.keys import MAX_SHARDS, is_queue_name, nodes_key, queues_key
from lowq.store.scripts import time_of


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """A queue's entry in the registry."""

    name: str
    shards_count: int
    #: The options of its worker, as far as anybody has registered them.
    options: Mapping[str, Any]
    #: Counts the reshards that have ended.
    epoch: int = 0
    #: While a reshard is under way: its layouts, and what the registry says of it.
    reshard: Layouts | None = None

    @property
    def layouts(self) -> Layouts:
        """The layout of the queue, and the one that its jobs are being moved to, if they are."""
        return self.reshard or Layouts(Layout(self.shards_count, self.epoch))


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
    """A node, as its last heartbeat described it. What an older or newer version doesn't say is left empty."""

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
    #: Redis is a replica by now: nobody can write to it, and the node waits. This is what it said before.
    waiting: bool = False
    #: Resident memory of its process, bytes; 0: unknown.
    memory: int = 0
    #: Seconds by which its maintenance loop ran late at most, in the last ten minutes.
    late: float = 0.0
    #: Threads beyond its own whose handlers have exceeded their ttr and still run.
    written_off: int = 0
    #: ``node``, or ``consumer``: then jobs are taken by hand.
    kind: str = "node"
    #: Of a consumer: how many jobs it has in hand.
    taken: int = 0
    #: Why it can't be reloaded, and what to do instead; empty: it can.
    reload_refusal: str = ""
    #: It ends when a queue has another number of shards than its code says (``strict_shards_count``).
    strict: bool = False
    #: queue -> name -> the time table of a schedule that it knows.
    schedules: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)


def queues(backend: Backend) -> list[QueueInfo]:
    """All queues that were ever used and not dropped, by name. Entries that can't be read are left out, and so are the
    internal queues in which schedules wait.

    Raises:
        RedisUnavailable, RedisRefused
    """
    return [info for info in all_queues(backend) if not is_internal(info.name)]


def all_queues(backend: Backend) -> list[QueueInfo]:
    """As `queues`, with the internal ones."""
    key = queues_key(backend.config.namespace)
    raw = backend.client.command("HGETALL", key, key=key)
    infos = [_known_queue(name, data) for name, data in zip(raw[::2], raw[1::2], strict=True)]
    return sorted((info for info in infos if info is not None), key=lambda info: info.name)


def find_queue(backend: Backend, name: str) -> QueueInfo:
    """A queue's entry.

    Raises:
        UnknownQueueError: there is none; the message names similar ones.
    """
    namespace = backend.config.namespace
    info = find_entry(backend.client, namespace, name, backend.config.push_timeout)
    if info is None:
        key = queues_key(namespace)
        names = [item.decode("utf-8", "replace") for item in backend.client.command("HKEYS", key, key=key)]
        if name in names:
            raise UnknownQueueError(
                f"queue {name!r} has an entry in the registry (namespace {namespace!r}) that can't be read: its node "
                "enters it anew once it is removed"
            )
        names = [each for each in names if not is_internal(each)]
        near = get_close_matches(name, names, 3)
        known = ", ".join(map(repr, near or sorted(names)[:10]))
        hint = f"did you mean {known}?" if near else f"known are {known}" if known else "no queue is known"
        raise UnknownQueueError(
            f"queue {name!r} does not exist in Redis (namespace {namespace!r}): no node or producer has used it yet; "
            + hint
        )
    return info


def find_entry(client: Client, namespace: str, name: str, timeout: float | None = None) -> QueueInfo | None:
    """A queue's entry, or None when nobody has used it yet. ``timeout`` is as for `Client.run_many`."""
    key = queues_key(namespace)
    return entry_of(name, client.command("HGET", key, name, key=key, timeout=timeout))


def entry_call(namespace: str, name: str) -> Command:
    """Asks for a queue's entry; see `entry_of`."""
    return Command(queues_key(namespace), "HGET", queues_key(namespace), name)


def entry_of(name: str, data: bytes | None) -> QueueInfo | None:
    """A queue's entry from the reply to `entry_call`; None: there is none, or none that can be read."""
    return None if data is None else _known_queue(name.encode(), data)


def queue_info(name: bytes, data: bytes) -> QueueInfo | None:
    """What an entry of the registry says; None when it can't be read, or no queue can be called so."""
    text, entry = name.decode("utf-8", "replace"), untrusted.json_object(data) or {}
    layouts = Layouts.read(entry)
    if not is_queue_name(text) or text.encode() != name or layouts is None:
        return None
    options = entry.get("options")
    return QueueInfo(
        text,
        layouts.current.shards_count,
        untrusted.plain(options) if isinstance(options, dict) else {},
        layouts.current.epoch,
        None if layouts.next is None else layouts,
    )


def _known_queue(name: bytes, data: bytes) -> QueueInfo | None:
    info = queue_info(name, data)
    if info is None:
        untrusted.log_skipped("queue", name, "its entry in the registry is none of ours")
    return info


def nodes(backend: Backend) -> list[NodeInfo]:
    """The nodes that live, by name: those that have not been silent for longer than their lease_ttl. On a replica,
    which no node can write to, those that lived when it became one, and wait.

    Raises:
        RedisUnavailable, RedisRefused
    """
    key = nodes_key(backend.config.namespace)
    raw, time = backend.client.commands([("HGETALL", key), ("TIME",)], key=key)
    found = _live_nodes(raw, time_of(time))
    if 2 * len(found) < len(raw) and _is_replica(backend.client):
        return _live_nodes(raw, time_of(time), on_replica=True)
    return found


def _is_replica(client: Client) -> bool:
    try:
        return client.server_info().get("role") == "slave"
    except RedisRefused:  # it may not be asked
        return False


def _live_nodes(raw: Sequence[bytes], now: float, *, on_replica: bool = False) -> list[NodeInfo]:
    infos = [_node_info(name, data, now, on_replica) for name, data in zip(raw[::2], raw[1::2], strict=True)]
    return sorted((info for info in infos if info is not None), key=lambda info: info.name)


class Registries(NamedTuple):
    """What the registries say that concerns a queue."""

    #: None: the queue has no entry, or none that can be read.
    queue: QueueInfo | None
    #: Those that live, by name.
    nodes: list[NodeInfo]
    #: The names of all, also of those that are silent.
    node_names: list[bytes]

    @classmethod
    def of(cls, queue: str, replies: Sequence[Any]) -> "Registries":
        """From the replies to `registry_calls`."""
        entry, raw, time = replies
        return cls(entry_of(queue, entry), _live_nodes(raw, time_of(time)), raw[::2])

    def holder(self, lease: bytes | None) -> NodeInfo | None:
        """The node that lives and holds the lease with this token."""
        nonce, _, _ = (lease or b"").decode("utf-8", "replace").rpartition(":")
        # A node's name ends with the beginning of the nonce that it acquires with.
        return next((node for node in self.nodes if node.name.endswith(":" + nonce[:6])), None) if nonce else None


def registry_calls(namespace: str, queue: str) -> list[Call[Any]]:
    """Asks what the registries say that concerns a queue; see `Registries`. In a cluster they are in two slots."""
    nodes = nodes_key(namespace)
    return [entry_call(namespace, queue), Command(nodes, "HGETALL", nodes), Command(nodes, "TIME")]


def _node_info(name: bytes, data: bytes, now: float, on_replica: bool) -> NodeInfo | None:
    """What an entry of the registry says (heartbeat.lua describes it); None when the node was silent for too long, but
    not where it can't write.
    """
    try:
        head, silence, size, rest = data.split(b" ", 3)
        details = untrusted.json_object(rest[int(size) :]) or {}
    except ValueError:
        head, silence, details = b"", b"", {}
    heartbeat_at, patience = untrusted.finite(head), untrusted.finite(silence)
    if heartbeat_at is None or patience is None:
        untrusted.log_skipped("node", name, "its entry in the registry is none of ours")
        return None
    is_silent = now - heartbeat_at > patience
    if is_silent and not on_replica:
        return None
    return NodeInfo(
        name=name.decode("utf-8", "replace"),
        heartbeat_at=heartbeat_at,
        seconds_ago=max(now - heartbeat_at, 0.0),
        host=untrusted.text(details.get("host")) or "",
        pid=untrusted.whole(details.get("pid"), 0) or 0,
        threads=untrusted.whole(details.get("threads"), 0) or 0,
        version=untrusted.text(details.get("version")) or "",
        started_at=untrusted.number(details.get("started_at"), 0),
        queues=tuple(filter(is_queue_name, _list(details.get("queues")))),
        shards=_shards(details.get("shards")),
        performing=tuple(map(_performing, _list(details.get("performing")))),
        tasks=untrusted.whole(details.get("tasks"), 0) or 0,
        concurrency=untrusted.whole(details.get("concurrency"), 0) or 0,
        longest_tasks=tuple(filter(None, map(_performing, _list(details.get("longest_tasks"))))),
        quiet=bool(details.get("quiet")),
        waiting=is_silent,
        memory=untrusted.whole(details.get("memory"), 0) or 0,
        late=untrusted.number(details.get("late"), 0) or 0.0,
        written_off=untrusted.whole(details.get("written_off"), 0) or 0,
        kind="consumer" if details.get("kind") == "consumer" else "node",
        taken=untrusted.whole(details.get("taken"), 0) or 0,
        reload_refusal=_reload_refusal(details),
        strict=details.get("strict") is True,
        schedules=_schedules(details.get("schedules")),
    )


def _schedules(said: Any) -> dict[str, dict[str, dict[str, Any]]]:
    if not isinstance(said, dict):
        return {}
    return {
        queue: {name: untrusted.plain(table) for name, table in tables.items() if isinstance(table, dict)}
        for queue, tables in said.items()
        if is_queue_name(queue) and isinstance(tables, dict)
    }


def _reload_refusal(details: Mapping[str, Any]) -> str:
    if details.get("kind") == "consumer":
        return "it is a consumer: restart its program"
    return untrusted.text(details.get("reload_refusal")) or ""


def _list(said: Any) -> list[Any]:
    return said if isinstance(said, list) else []


def _shards(said: Any) -> dict[str, list[int]]:
    if not isinstance(said, dict):
        return {}
    return {
        queue: [shard for shard in _list(held) if untrusted.whole(shard, 0, MAX_SHARDS - 1) is not None]
        for queue, held in said.items()
        if is_queue_name(queue)
    }


def _performing(said: Any) -> RunningBatch | None:
    """What a thread performs; None also when that can't be read."""
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
