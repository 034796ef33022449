"""The registries in Redis, read only: which queues there are, and which nodes live."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Protocol

from lowq.config import Config
from lowq.connection import Client
from lowq.errors import UnknownQueueError
from lowq.keys import nodes_key, queues_key


class Backend(Protocol):
    """What a queue's handle needs of the application."""

    config: Config

    @property
    def client(self) -> Client:
        """The connections to use; after a fork or a close they may be others than before."""
        ...

    def register(self, name: str, shards_count: int, worker: Any = None) -> None:
        """Enters a queue in the registry before anything of it is written."""
        ...

    def forget_registered(self) -> None:
        """Enters queues anew when they are used next."""
        ...


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """A queue's entry in the registry."""

    name: str
    shards_count: int
    #: The options of its worker, as far as anybody has registered them.
    options: Mapping[str, Any]


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
    #: Per thread what it performs: queue, shard, up to three ids and the count of all, seconds; None when it is idle.
    performing: tuple[Mapping[str, Any] | None, ...] = ()
    #: It takes nothing more.
    quiet: bool = False
    #: Resident memory of its process, bytes; 0: unknown.
    memory: int = 0
    #: Seconds by which its keeper ran late at most, in the last ten minutes.
    late: float = 0.0


def queues(backend: Backend) -> list[QueueInfo]:
    """All queues that were ever used and not dropped, by name.

    Raises:
        RedisUnavailable, RedisRefused
    """
    key = queues_key(backend.config.namespace)
    raw = backend.client.command("HGETALL", key, key=key)
    return sorted(
        (_queue_info(name, data) for name, data in zip(raw[::2], raw[1::2], strict=True)),
        key=lambda info: info.name,
    )


def find_queue(backend: Backend, name: str) -> QueueInfo:
    """A queue's entry.

    Raises:
        UnknownQueueError: there is none; the message names similar ones.
    """
    namespace = backend.config.namespace
    info = find_entry(backend.client, namespace, name)
    if info is None:
        key = queues_key(namespace)
        names = [item.decode() for item in backend.client.command("HKEYS", key, key=key)]
        near = get_close_matches(name, names, 3)
        known = ", ".join(map(repr, near or sorted(names)[:10]))
        hint = f"did you mean {known}?" if near else f"known are {known}" if known else "no queue is known"
        raise UnknownQueueError(
            f"queue {name!r} does not exist in Redis (namespace {namespace!r}): no node or producer has used it yet; "
            + hint
        )
    return info


def find_entry(client: Client, namespace: str, name: str) -> QueueInfo | None:
    """A queue's entry, or None when nobody has used it yet."""
    key = queues_key(namespace)
    data = client.command("HGET", key, name, key=key)
    return None if data is None else _queue_info(name.encode(), data)


def _queue_info(name: bytes, data: bytes) -> QueueInfo:
    entry = json.loads(data)
    return QueueInfo(name.decode(), entry["shards_count"], entry.get("options") or {})


def nodes(backend: Backend) -> list[NodeInfo]:
    """The nodes that live, by name: those that have not been silent for longer than their lease_ttl.

    Raises:
        RedisUnavailable, RedisRefused
    """
    key = nodes_key(backend.config.namespace)
    raw, (seconds, microseconds) = backend.client.commands([("HGETALL", key), ("TIME",)], key=key)
    now = int(seconds) + int(microseconds) / 1e6
    infos = [_node_info(name, data, now) for name, data in zip(raw[::2], raw[1::2], strict=True)]
    return sorted((info for info in infos if info is not None), key=lambda info: info.name)


def _node_info(name: bytes, data: bytes, now: float) -> NodeInfo | None:
    """What an entry of the registry says (heartbeat.lua describes it); None when the node was silent for too long."""
    try:
        head, silence, size, rest = data.split(b" ", 3)
        heartbeat_at, details = float(head), rest[int(size) :]
        if now - heartbeat_at > float(silence):
            return None
    except ValueError:
        return None
    try:
        says = json.loads(details)
    except (ValueError, RecursionError):
        says = {}
    if not isinstance(says, dict):
        says = {}

    def said(key: str, kind: type, default: Any) -> Any:
        value = says.get(key)
        return value if isinstance(value, kind) else default

    return NodeInfo(
        name=name.decode("utf-8", "replace"),
        heartbeat_at=heartbeat_at,
        seconds_ago=max(now - heartbeat_at, 0.0),
        host=said("host", str, ""),
        pid=said("pid", int, 0),
        threads=said("threads", int, 0),
        version=said("version", str, ""),
        started_at=said("started_at", float, said("started_at", int, None)),
        queues=tuple(said("queues", list, ())),
        shards=said("shards", dict, {}),
        performing=tuple(map(_seat, said("performing", list, ()))),
        quiet=bool(says.get("quiet")),
        memory=said("memory", int, 0),
        late=said("late", float, said("late", int, 0)),
    )


def _seat(says: Any) -> Mapping[str, Any] | None:
    """What a thread performs; an older version doesn't say how many ids."""
    if not isinstance(says, dict):
        return None
    ids = says.get("ids")
    return {"count": len(ids) if isinstance(ids, list) else 0, **says}
