"""Membership: heartbeats say that this node lives, and their replies say which others share the work with it.

Every node has an entry in one registry in Redis, renewed by heartbeats. An entry has two halves: the *part* that the
node has in sharing the work (which queues it serves, in how many shards), and details for people. A change of parts is
published, so all nodes hear of it at once, send a heartbeat, and compute the same shares from the same parts.

The views of two nodes may differ for a moment. Only a lease decides which node may work a shard.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import accumulate
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

from lowq.clock import Clock
from lowq.clock import now as clock_now
from lowq.errors import ShardsCountError
from lowq.sharding import queue_of_layout
from lowq.shards.shard import Activity, Performing, Shard
from lowq.shards.splitter import Members
from lowq.store import Call, Client, Refusal
from lowq.store.keys import nodes_key
from lowq.store.registry import HeartbeatReply, Registration, heartbeat

#: Tasks of an event loop that a heartbeat names: those that have been running longest.
SHOWN_TASKS = 10

#: Ids of a batch that a heartbeat names, and from how many seconds on it names so many, of so many characters at most.
SHOWN_IDS, LONG_SECONDS, LONG_IDS, LONG_CHARACTERS = 3, 30.0, 1000, 20_000
#: Seconds by which two clocks may drift apart in a second.
_DRIFT = 0.0002


@dataclass(frozen=True, slots=True)
class Identity:
    """The fields of a node's entry that don't change."""

    nonce: str
    #: queue -> shards_count, of the queues that it serves at first: of each layout, by its name.
    queues: Mapping[str, int]
    threads: int
    version: str
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    started_at: float = field(default_factory=time.time)
    #: Of a consumer. One that comes back with it is the same member, so it has the same share of the shards.
    session: str = ""

    @property
    def name(self) -> str:
        return f"session:{self.session}" if self.session else f"{self.host}:{self.pid}:{self.nonce[:6]}"


class HeartbeatExtra(Protocol):
    """More calls of each heartbeat. One that fails is not sent again."""

    def __call__(self) -> Iterable[Call[Any]]:
        """The calls of the next heartbeat."""

    def answered(self, call: Call[Any], reply: Any) -> None:
        """One of them was executed."""


class Membership:
    """The nodes that share the work, as the last heartbeat found them. Belongs to the maintenance loop.

    ``shares``: whether this node takes part; a node with a static splitter doesn't. ``silence``: seconds after which
    a silent node is dead: its leases have run out by then. ``registrations``: enter the node's queues again with every
    heartbeat, should Redis have lost its data.
    """

    def __init__(
        self, identity: Identity, namespace: str, *, silence: float, shares: bool,
        registrations: Callable[[], Sequence[Registration]] = list, extras: Sequence[HeartbeatExtra] = (),
        clock: Clock = clock_now,
    ) -> None:  # fmt: skip
        self._clock = clock
        self._registrations, self._extras = registrations, extras
        self.server_clock = ServerClock()
        #: The error of a call of the last heartbeat, while the heartbeat itself was answered.
        self.trouble: Exception | None = None
        self.me = identity.name
        self.channel = nodes_key(namespace)
        #: Node -> what it serves; this node too, while it takes part.
        self.members: Members = {}
        #: Monotonic time at which the first of the others will have been silent for too long, if it stays so.
        self.first_silent = inf
        self._identity = identity
        self._silence = silence
        self._part = ""
        self._shares = self._may_share = shares
        self.serve(identity.queues)

    def leave(self) -> None:
        """Ends this node's part in the work, with the next heartbeat."""
        self._part = ""
        self._shares = False

    def join(self, queues: Mapping[str, int]) -> None:
        """Ends `leave`, with the next heartbeat. ``queues``: as of `serve`."""
        self._shares = self._may_share
        self.serve(queues)

    def serve(self, queues: Mapping[str, int]) -> None:
        """Sets what this node serves, with the next heartbeat: name of a layout -> shards_count."""
        if self._shares:
            self._part = json.dumps({"queues": dict(queues)})

    def beat(self, client: Client, details: Mapping[str, Any]) -> tuple[bool, list[tuple[Registration, Any]]]:
        """Sends a heartbeat, with the registrations and the extras. Returns whether the members have changed, and the
        replies to the registrations.

        Raises:
            RedisUnavailable. ShardsCountError: the registry has another number of shards.
        """
        extras = [(extra, call) for extra in self._extras for call in extra()]
        registrations = self._registrations()
        calls: list[Call[Any]] = [self.heartbeat_call(details), *registrations, *(call for _, call in extras)]
        sent = self._clock()
        alive, *replies = client.run_many(calls, repeats=0)
        if isinstance(alive, Exception):
            raise alive
        self.server_clock.note(alive.now, sent, self._clock())
        entered = list(zip(registrations, replies, strict=False))
        for call, reply in entered:
            if isinstance(reply, Refusal):
                raise ShardsCountError(call.queue, reply.shards_count, call.shards_count)
        self.trouble = next((reply for reply in replies if isinstance(reply, Exception)), None)
        _pass_on(extras, replies[len(registrations) :])
        return self.received(alive), [item for item in entered if not isinstance(item[1], Exception)]

    def send_extras(self, client: Client, *calls: Call[Any]) -> None:
        """Sends the extras once more, behind these calls.

        Raises:
            The first error among the replies.
        """
        extras = [(extra, call) for extra in self._extras for call in extra()]
        replies = client.run_many([*calls, *(call for _, call in extras)], repeats=0)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        _pass_on(extras, replies[len(calls) :])

    def heartbeat_call(self, details: Mapping[str, Any]) -> Call[HeartbeatReply]:
        """Says that the node lives, and asks for the other nodes."""
        me = self._identity
        says = {
            "host": me.host,
            "pid": me.pid,
            "version": me.version,
            "started_at": me.started_at,
            "queues": list(dict.fromkeys(map(queue_of_layout, me.queues))),
            "threads": me.threads,
            **details,
        }
        return heartbeat(self.channel, self.me, self._part, json.dumps(says), self._silence)

    def goodbye_call(self) -> Call[HeartbeatReply]:
        """Takes the node out of the registry."""
        return heartbeat(self.channel, self.me, "", "", self._silence)

    def received(self, alive: HeartbeatReply) -> bool:
        """Takes note of the reply to `heartbeat_call`. Returns whether the members have changed."""
        self.first_silent = inf if alive.silent_in is None else self._clock() + alive.silent_in
        members = {name.decode("utf-8", "replace"): _queues(part) for name, part in alive.parts.items()}
        changed = members != self.members
        self.members = members
        return changed


def _pass_on(extras: Iterable[tuple[HeartbeatExtra, Call[Any]]], replies: Iterable[Any]) -> None:
    for (extra, call), reply in zip(extras, replies, strict=True):
        if not isinstance(reply, Exception):
            extra.answered(call, reply)


def _queues(part: bytes) -> dict[str, int]:
    """queue -> shards_count; empty for a part in the form of another version."""
    try:
        queues = json.loads(part)["queues"]
        return {str(name): count for name, count in queues.items() if type(count) is int and count > 0}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


class ServerClock:
    """How far Redis's clock is ahead of this process's own. Written by the maintenance loop; others read `offset`.

    Each heartbeat's reply says what time it was in Redis, at some moment between sending and receiving. So each narrows
    down how far apart the clocks are, until the server's clock is set: then what was known before doesn't fit any more.
    """

    __slots__ = ("_bounds", "_noted_at", "offset")

    def __init__(self) -> None:
        #: Seconds to be added to `lowq.clock` for the Unix time by Redis's clock; None: it is not known yet.
        self.offset: float | None = None
        self._bounds = (-float("inf"), float("inf"))
        self._noted_at = 0.0

    def note(self, server_time: float, sent: float, received: float) -> None:
        """A call was sent and its reply received at these times of `lowq.clock`; in between it was ``server_time``."""
        low, high = server_time - received, server_time - sent
        slack = _DRIFT * (received - self._noted_at)
        narrowed = max(low, self._bounds[0] - slack), min(high, self._bounds[1] + slack)
        if narrowed[0] <= narrowed[1]:
            low, high = narrowed
        self._bounds, self._noted_at = (low, high), received
        self.offset = (low + high) / 2


def details_of(held: Iterable[Shard], activities: Iterable[Activity], now: float) -> dict[str, Any]:
    """The fields of a node's entry about its shards, its running batches, and its memory."""
    shards: dict[str, list[int]] = {}
    for shard in held:
        shards.setdefault(shard.queue, []).append(shard.index)
    activities = list(activities)
    threads = [activity.performing for activity in activities if activity.number is not None]
    tasks = [activity.performing for activity in activities if activity.number is None]
    longest = nsmallest(SHOWN_TASKS, filter(None, tasks), key=attrgetter("since"))
    return {
        "shards": shards,
        "performing": [performing and _shown(performing, now) for performing in threads],
        "tasks": len(tasks),
        "longest_tasks": [_shown(performing, now) for performing in longest],
        "memory": resident_memory(),
    }


def _shown(performing: Performing, now: float) -> dict[str, Any]:
    seconds = now - performing.since
    ids = performing.ids[:SHOWN_IDS]
    if seconds >= LONG_SECONDS:
        characters = accumulate(map(len, performing.ids[:LONG_IDS]))
        ids = performing.ids[: max(SHOWN_IDS, sum(total <= LONG_CHARACTERS for total in characters))]
    return {
        "queue": performing.shard.queue,
        "shard": performing.shard.index,
        "ids": ids,
        "count": len(performing.ids),
        "seconds": round(seconds, 3),
    }


def resident_memory() -> int:
    """Bytes of memory that this process has; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
