"""Redis with replicas, as a stage has it: a cluster, or a primary behind a Sentinel; and the harm done to these.

What a primary had said to be in, and its replica had not received, is lost with it: by the moment of each harm the
checker knows what that may be, and of which shards. All else that is lost is a problem.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import redis
import redis.cluster
import redis.sentinel
from redis.crc import key_slot

from tests.redis_cluster import RedisCluster, cut_replication, heal_replication
from tests.redis_server import RedisServer
from tests.sentinel import Sentinel
from tests.waiting import until

if TYPE_CHECKING:
    from tests.chaos.stage import Stage

#: Milliseconds after which the servers of a cluster take one of them for dead.
NODE_TIMEOUT = 1000
#: Seconds before a primary's end, at most, of which its replica may lack what was pushed then: they are connected all
#: the time, and a busy machine may keep both waiting.
BEHIND = 1.0
#: Keys of the registries of nodes and of queues.
REGISTRY, QUEUES = "lowq:v1:nodes", "lowq:v1:queues"


class Replicated(Protocol):
    """Servers with replicas."""

    @property
    def url(self) -> str: ...
    def start(self) -> None: ...
    def close(self) -> None: ...
    def connect(self) -> Any:
        """A client of redis-py that finds the primaries by itself."""

    def victim(self, number: int) -> RedisServer:
        """The primary to be harmed."""

    def is_replaced(self, server: RedisServer) -> bool:
        """Whether another one has taken its place."""

    def is_well(self) -> bool:
        """Whether all that run are connected, and have the same."""

    def isolate(self, server: RedisServer) -> None:
        """Only clients reach it from now on."""

    def heal(self, server: RedisServer) -> None: ...
    def shards_of(self, server: RedisServer, prefixes: Sequence[str]) -> list[int] | None:
        """The shards that it serves; None: all."""


class OfCluster:
    """Three primaries with a replica each."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.cluster = RedisCluster(folder, **{"cluster_node_timeout": NODE_TIMEOUT, **options})

    @property
    def url(self) -> str:
        return self.cluster.url

    def start(self) -> None:
        self.cluster.start()

    def close(self) -> None:
        self.cluster.close()

    def connect(self) -> Any:
        nodes = [redis.cluster.ClusterNode("127.0.0.1", server.port) for server in self.cluster.servers]
        return redis.cluster.RedisCluster(startup_nodes=nodes, decode_responses=True, socket_timeout=10)

    def victim(self, number: int) -> RedisServer:
        primaries = self.cluster.primaries()
        return primaries[number % len(primaries)]

    def is_replaced(self, server: RedisServer) -> bool:
        return self.cluster.leads(server)()

    def is_well(self) -> bool:
        return self.cluster.is_replicated()

    def isolate(self, server: RedisServer) -> None:
        self.cluster.cut_off(server)

    def heal(self, server: RedisServer) -> None:
        self.cluster.heal(server)

    def shards_of(self, server: RedisServer, prefixes: Sequence[str]) -> list[int] | None:
        of = {prefix: self.cluster.primary_of(key_slot(prefix.encode())) for prefix in prefixes}
        return [number for number, prefix in enumerate(prefixes) if of[prefix] is server]


class OfSentinel:
    """A primary and its replica, behind a Sentinel."""

    def __init__(self, folder: Path, **options: str) -> None:
        self._folder = folder
        self._options = options
        self.servers: list[RedisServer] = []
        self.sentinel: Sentinel | None = None

    @property
    def url(self) -> str:
        assert self.sentinel is not None
        return self.sentinel.url

    def start(self) -> None:
        primary = RedisServer(self._folder / "server-0", repl_diskless_sync_delay=0, **self._options).start()
        replica = RedisServer(
            self._folder / "server-1", replicaof=f"127.0.0.1 {primary.port}", repl_diskless_sync_delay=0,
            **self._options,
        )  # fmt: skip
        self.servers += [primary, replica.start()]
        self.sentinel = Sentinel(self._folder / "sentinel", primary).__enter__()
        until(lambda: self.sentinel.replicas() == 1, "sentinel that knows the replica")  # type: ignore[union-attr]
        until(self.is_well, "a replica with all data")

    def close(self) -> None:
        if self.sentinel is not None:
            self.sentinel.__exit__(None, None, None)
        for server in self.servers:
            server.close()

    def connect(self) -> Any:
        assert self.sentinel is not None
        return redis.sentinel.Sentinel([("127.0.0.1", self.sentinel.port)]).master_for(
            "main", decode_responses=True, socket_timeout=10
        )

    def victim(self, number: int) -> RedisServer:
        assert self.sentinel is not None
        port = self.sentinel.primary_port()
        return next(server for server in self.servers if server.port == port)

    def is_replaced(self, server: RedisServer) -> bool:
        return self.victim(0) is not server and RedisCluster.ask(self.victim(0), "ROLE")[0] == b"master"

    def is_well(self) -> bool:
        infos = [RedisCluster.ask(server, "INFO", "replication") for server in self.servers if server.runs]
        return sorted(info["role"] for info in infos) == ["master", "slave"] and all(
            info.get("master_link_status", "up") == "up" for info in infos
        )

    def isolate(self, server: RedisServer) -> None:
        """Neither the Sentinel nor the replica gets an answer from it: clients do, who send no PING."""
        RedisCluster.ask(server, "ACL", "SETUSER", "default", "-ping")
        cut_replication(server)

    def heal(self, server: RedisServer) -> None:
        heal_replication(server)

    def shards_of(self, server: RedisServer, prefixes: Sequence[str]) -> list[int] | None:
        return None


KINDS: dict[str, Callable[..., OfCluster | OfSentinel]] = {"cluster": OfCluster, "sentinel": OfSentinel}


# --- harm ---


def _fail_over(
    stage: "Stage", victim: RedisServer, harm: Callable[[RedisServer], object], heal: Callable[[RedisServer], object]
) -> None:
    servers = stage.replicated
    assert servers is not None
    # While a queue is resharded the shards of two layouts have the same numbers: then it may be any.
    shards = None if stage.fault.reshards else servers.shards_of(victim, stage.prefixes())
    stage.history.trouble()
    began = time.monotonic()
    harm(victim)
    stage.wait_for(lambda: servers.is_replaced(victim), "next primary")
    replaced = time.monotonic()
    stage.failovers.append((began, replaced, shards))
    # Owners still take a lease of the old primary for theirs, and who is connected to one that is isolated goes on.
    stage.wait_until(replaced + stage.ttl)
    heal(victim)
    stage.wait_for(lambda: _answers(servers.is_well), "replicas in order")
    stage.history.lapse(stage.ttl, since=began - BEHIND, shards=shards)
    stage.history.calm()


def _victim(stage: "Stage", number: int) -> RedisServer:
    assert stage.replicated is not None
    return stage.replicated.victim(number)


def _answers(look: Callable[[], bool]) -> bool:
    try:
        return look()
    except (redis.RedisError, StopIteration, AssertionError):
        return False


def primary_killed(stage: "Stage", number: int) -> None:
    """SIGKILL to a primary; it comes back as a replica."""
    _fail_over(stage, _victim(stage, number), RedisServer.kill, RedisServer.start)


def primary_frozen(stage: "Stage", number: int) -> None:
    """SIGSTOP to a primary, and SIGCONT when another one has its place."""
    _fail_over(stage, _victim(stage, number), RedisServer.pause, RedisServer.cont)


def primary_isolated(stage: "Stage", number: int) -> None:
    """Nobody but clients reaches a primary, for a lease longer than it takes another one to get its place."""
    assert stage.replicated is not None
    _fail_over(stage, _victim(stage, number), stage.replicated.isolate, stage.replicated.heal)


def registry_isolated(stage: "Stage", number: int) -> None:
    """The same for the primary that has the registry of queues."""
    cluster = _cluster_of(stage)
    _fail_over(stage, cluster.primary_of(key_slot(QUEUES.encode())), cluster.cut_off, cluster.heal)


def sentinel_frozen(stage: "Stage", number: int) -> None:
    """SIGSTOP to the Sentinel for three leases, while all connect to the primary anew."""
    servers = stage.replicated
    assert isinstance(servers, OfSentinel)
    assert servers.sentinel is not None
    primary = servers.victim(0)
    servers.sentinel.pause()
    stage.history.trouble()
    RedisCluster.ask(primary, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    stage.history.calm()
    stage.wait_until(time.monotonic() + 3 * stage.ttl)
    servers.sentinel.cont()


def primaries_restarted(stage: "Stage", number: int) -> None:
    """All servers that are primaries, one after the other, each when all is well again: SIGTERM and a start, at once or
    after another one has its place.
    """
    servers = stage.replicated
    assert isinstance(servers, OfCluster)
    for place, server in enumerate(servers.cluster.primaries()):
        stage.history.trouble()
        server.stop()
        if (number + place) % 2:
            stage.wait_for(lambda server=server: servers.is_replaced(server), "next primary")  # type: ignore[misc]
        server.start()
        stage.wait_for(lambda: _answers(servers.is_well), "replicas in order")
        stage.history.calm()


def _cluster_of(stage: "Stage") -> RedisCluster:
    assert isinstance(stage.replicated, OfCluster)
    return stage.replicated.cluster


def _slots(stage: "Stage") -> list[int]:
    return [key_slot(key.encode()) for key in (REGISTRY, *stage.prefixes())]


def slots_move(stage: "Stage", number: int) -> None:
    """The slots of the registry and of some shards go to other primaries, each resting half way for a while."""
    cluster = _cluster_of(stage)
    primaries = cluster.primaries()
    slots = _slots(stage)
    for place, slot in enumerate([slots[0], *slots[1 + number % 5 :: 5]]):
        target = primaries[(primaries.index(cluster.primary_of(slot)) + 1 + number % 2) % len(primaries)]
        cluster.move_slot(slot, target, pause=0.05 * ((number + place) % 5))
        stage.tend()


def primary_joins(stage: "Stage", number: int) -> None:
    """One primary more, which gets the slots of the registry and of each third shard."""
    cluster = _cluster_of(stage)
    added = cluster.add_primary()
    stage.joined.append(added)
    slots = _slots(stage)
    for slot in [slots[0], *slots[1 + number % 3 :: 3]]:
        cluster.move_slot(slot, added)
        stage.tend()


def primary_leaves(stage: "Stage", number: int) -> None:
    """The primary that joined gives all its slots to the others, and ends."""
    cluster = _cluster_of(stage)
    if not stage.joined:
        return
    leaving = stage.joined.pop()
    others = [server for server in cluster.primaries() if server is not leaving]
    for place, slot in enumerate(dict.fromkeys(_slots(stage))):
        if cluster.primary_of(slot) is leaving:
            cluster.move_slot(slot, others[place % len(others)])
            stage.tend()
    cluster.remove(leaving)


HARM: tuple[Callable[["Stage", int], None], ...] = (
    primary_killed, primary_frozen, primary_isolated, registry_isolated, sentinel_frozen, primaries_restarted,
    slots_move, primary_joins, primary_leaves,
)  # fmt: skip
