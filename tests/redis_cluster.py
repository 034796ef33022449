"""A Redis Cluster of the tests' own: primaries with a replica each, on free ports, gone with who started it.

    with RedisCluster() as cluster:
        client = lowq.Lowq(redis_url=cluster.url)
        cluster.cut_off(cluster.primaries()[0])     # its peers don't reach it any more; clients do

The servers talk to each other through `BusNetwork`, which can cut one of them off.
"""

import asyncio
import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from shutil import rmtree
from types import TracebackType
from typing import Any, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.redis_server import RedisServer, free_port
from tests.waiting import NEVER, until

SLOTS = 16384
#: Milliseconds after which the servers take one of them for dead: longer than any test waits.
NODE_TIMEOUT = int(1000 * NEVER)
#: The same once one of them is healed: as long as this Valkey 9 leaves connections that have ended as they are.
HEALED_TIMEOUT = 10_000
#: Where the header of a message of the bus names its sender.
SENDER = slice(40, 80)


class BusNetwork:
    """What the servers say to each other. Each has a port here that is forwarded to its own port of the bus. What comes
    from or goes to one that is cut off disappears. Its methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cluster-bus", daemon=True)
        self._thread.start()
        self._servers: list[asyncio.Server] = []
        #: Of each connection its ends, the port of the bus that it goes to, and the id of the server that it is from.
        self._links: dict[int, tuple[list[asyncio.StreamWriter], int, list[bytes]]] = {}
        self._cut_off: dict[int, bytes] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_ended = False

    def open(self, bus_port: int) -> int:
        """The port by which others reach the server with that port of the bus."""
        return int(self._do(self._open(bus_port)))

    def cut_off(self, bus_port: int, server_id: bytes) -> None:
        self._cut_off[bus_port] = server_id

    def is_cut_off(self, server: RedisServer) -> bool:
        return server.options["cluster_port"] in self._cut_off

    def heal(self, bus_port: int) -> None:
        """Connections that have missed something are closed; the servers make new ones."""
        server_id = self._cut_off.pop(bus_port)
        self._do(self._reset(bus_port, server_id))

    def close(self) -> None:
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def _do(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _open(self, bus_port: int) -> int:
        server = await asyncio.start_server(lambda *ends: self._take_on(bus_port, *ends), "127.0.0.1", 0)
        self._servers.append(server)
        port: int = server.sockets[0].getsockname()[1]
        return port

    async def _reset(self, bus_port: int, server_id: bytes) -> None:
        for writers, target, sender in list(self._links.values()):
            if target == bus_port or sender == [server_id]:
                for writer in writers:
                    writer.transport.abort()

    async def _end(self) -> None:
        self._has_ended = True
        await asyncio.sleep(0)  # a task that is cancelled before it has begun closes nothing
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for server in self._servers:  # not before: of what is just being accepted the socket would stay open
            server.close()
        await asyncio.sleep(0)  # connections that were closed end now

    def _take_on(self, bus_port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._has_ended:
            writer.transport.abort()
            return
        # As a task of our own: of one that is cancelled at its first step asyncio would complain.
        task = self._loop.create_task(self._serve(bus_port, reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, bus_port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to_server = await asyncio.open_connection("127.0.0.1", bus_port)
        except (OSError, asyncio.CancelledError):  # it is down, or the network ends
            writer.transport.abort()
            return
        sender: list[bytes] = []
        self._links[id(writer)] = [writer, to_server[1]], bus_port, sender
        pumps = [
            asyncio.ensure_future(self._pump(reader, to_server[1], bus_port, sender, is_first=True)),
            asyncio.ensure_future(self._pump(to_server[0], writer, bus_port, sender, is_first=False)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            pass  # the network ends
        finally:
            for pump in pumps:
                pump.cancel()
            writer.transport.abort()
            to_server[1].transport.abort()
            del self._links[id(writer)]

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bus_port: int, sender: list[bytes], *,
        is_first: bool,
    ) -> None:  # fmt: skip
        with contextlib.suppress(OSError):
            if is_first:
                header = await reader.readexactly(SENDER.stop)
                sender.append(header[SENDER])
                writer.write(header)
            while data := await reader.read(2**16):
                if bus_port in self._cut_off or any(one in sender for one in self._cut_off.values()):
                    continue
                writer.write(data)
                await writer.drain()


class RedisCluster:
    """Primaries with a replica each; all of them write to logs of commands when ``options`` say so. Options are those
    of `RedisServer`.
    """

    def __init__(self, directory: Path | None = None, *, primaries: int = 3, replicas: int = 1, **options: Any) -> None:
        self._keeps_directory = directory is not None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="lowq-cluster-"))
        self._count = primaries
        self._replicas = replicas
        self._options = options
        self.bus = BusNetwork()
        self.servers: list[RedisServer] = []

    @property
    def url(self) -> str:
        """Names all servers that there were at first."""
        return self.url_of(self.servers[: self._count * (1 + self._replicas)])

    @staticmethod
    def url_of(servers: Iterable[RedisServer]) -> str:
        return f"redis+cluster://{','.join(f'127.0.0.1:{server.port}' for server in servers)}"

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Returns when all slots are served, and all replicas have what their primaries have."""
        servers = [self._add() for _ in range(self._count * (1 + self._replicas))]
        first = servers[0]
        for number, server in enumerate(servers):
            self.ask(server, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            if number < self._count:
                begin, end = (SLOTS * part // self._count for part in (number, number + 1))
                self.ask(server, "CLUSTER", "ADDSLOTSRANGE", begin, end - 1)
            self._meet(server, first)
        until(lambda: all(self._is_well(server, len(servers)) for server in servers), "cluster in order")
        for number, server in enumerate(servers[self._count :]):
            self.ask(server, "CLUSTER", "REPLICATE", self.id_of(servers[number % self._count]))
        self.replicated()

    def close(self) -> None:
        for server in self.servers:
            server.close()
        self.bus.close()
        if not self._keeps_directory:
            rmtree(self.directory, ignore_errors=True)

    def restore(self) -> None:
        """All servers run again and hold nothing, and each primary has a replica: not always those of the beginning."""
        for server in self.servers:
            if server.runs:
                server.cont()
            else:
                server.start()
        until(lambda: self.is_replicated() and len(self.primaries()) == self._count, "cluster in order")
        for primary in self.primaries():
            self.ask(primary, "FLUSHALL", "SYNC")

    def _add(self) -> RedisServer:
        bus_port = free_port()
        options: dict[str, Any] = {
            "cluster_enabled": "yes", "cluster_node_timeout": NODE_TIMEOUT, "cluster_replica_validity_factor": 0,
            "cluster_port": bus_port, "cluster_announce_ip": "127.0.0.1",
            "cluster_announce_bus_port": self.bus.open(bus_port), "repl_diskless_sync_delay": 0,
            "cluster_require_full_coverage": "no",  # else all of them refuse while one is being replaced
            "cluster_allow_replica_migration": "no",  # else one without slots becomes a replica by itself
            **self._options,
        }  # fmt: skip
        server = RedisServer(self.directory / f"server-{len(self.servers)}", **options)
        self.servers.append(server)
        return server.start()

    def _meet(self, server: RedisServer, other: RedisServer) -> None:
        bus_port = other.options["cluster_announce_bus_port"]
        self.ask(server, "CLUSTER", "MEET", "127.0.0.1", other.port, bus_port)

    def _is_well(self, server: RedisServer, count: int) -> bool:
        info = self.ask(server, "CLUSTER", "INFO")
        known = info["cluster_state"], int(info["cluster_known_nodes"]), int(info["cluster_slots_assigned"])
        return known == ("ok", count, SLOTS)

    # --- looking ---

    @staticmethod
    def ask(server: RedisServer, *command: object) -> Any:
        """The reply of that server to a command."""
        with redis.Redis(port=server.port, socket_timeout=10, retry=Retry(NoBackoff(), 0)) as client:
            words = (f"{command[0]} {command[1]}", *command[2:]) if command[0] == "CLUSTER" else command
            return client.execute_command(*words)

    def id_of(self, server: RedisServer) -> str:
        found = self.ask(server, "CLUSTER", "MYID")
        return found.decode() if isinstance(found, bytes) else str(found)

    def role(self, server: RedisServer) -> str:
        """``master`` or ``slave``; empty: it does not answer."""
        try:
            return str(self.ask(server, "INFO", "replication")["role"])
        except (redis.ConnectionError, redis.TimeoutError, RuntimeError):
            return ""

    def slots(self) -> list[tuple[int, int, RedisServer]]:
        """First slot, last slot and primary, as one of the servers sees it that answers and is not cut off."""
        by_port = {server.port: server for server in self.servers}
        for server in self._reachable():
            try:
                ranges = self.raw(server, "CLUSTER SLOTS", timeout=1.0)
            except (redis.ConnectionError, redis.TimeoutError):
                continue
            return [(first, last, by_port[primary[1]]) for first, last, primary, *_ in sorted(ranges)]
        return []

    def primaries(self) -> list[RedisServer]:
        """Those that serve slots, in the order of the slots."""
        return list(dict.fromkeys(server for _, _, server in self.slots()))

    def _reachable(self) -> list[RedisServer]:
        return [server for server in self.servers if server.answers and not self.bus.is_cut_off(server)]

    @staticmethod
    def raw(server: RedisServer, *command: object, timeout: float = 10.0) -> Any:
        with redis.Redis(port=server.port, socket_timeout=timeout, retry=Retry(NoBackoff(), 0)) as client:
            connection = client.connection_pool.get_connection()
            try:
                connection.send_command(*str(command[0]).split(), *command[1:])
                return connection.read_response()
            finally:
                connection.disconnect()

    def primary_of(self, slot: int) -> RedisServer:
        """Who serves the slot, as the servers that are reached see it."""
        found = [server for first, last, server in self.slots() if first <= slot <= last]
        assert found, f"nobody serves slot {slot}"
        return found[0]

    def leads(self, server: RedisServer) -> Callable[[], bool]:
        """Whether that one has been replaced by another, once called."""
        return lambda: (found := self.primaries()) != [] and server not in found and self._covers()

    def _covers(self) -> bool:
        answers = [self.role(server) for server in self.primaries()]
        return len(answers) >= self._count and all(role == "master" for role in answers)

    def is_replicated(self) -> bool:
        """Whether every server that runs is a primary or has all of one, and each primary has a replica."""
        links = []
        for server in self.servers:
            if not server.runs:
                continue
            try:
                info, cluster = self.ask(server, "INFO", "replication"), self.ask(server, "CLUSTER", "INFO")
            except (redis.ConnectionError, redis.TimeoutError):
                return False
            links.append(info["role"] == "master" and (info["connected_slaves"] or not self._replicas))
            links[-1] = (links[-1] or info.get("master_link_status") == "up") and cluster["cluster_state"] == "ok"
        return all(links)

    def replicated(self) -> None:
        """Waits until all replicas have what their primaries had."""
        until(self.is_replicated, "replicas with all that their primaries have")
        for primary in self.primaries():
            # Not WAIT: that is about what its own connection has written.
            offset = self.ask(primary, "INFO", "replication")["master_repl_offset"]
            for replica in self.servers:
                if replica.runs and self._follows(replica, primary):
                    until(lambda replica=replica, offset=offset: self._has(replica, offset), "replica")  # type: ignore[misc]

    def _has(self, replica: RedisServer, offset: int) -> bool:
        return bool(self.ask(replica, "INFO", "replication")["slave_repl_offset"] >= offset)

    # --- harm ---

    def configure(self, **options: object) -> None:
        """`CONFIG SET` on all that answer."""
        for server in self.servers:
            for name, value in options.items():
                with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
                    self.raw(server, "CONFIG SET", name.replace("_", "-"), value)

    def replaced(self, server: RedisServer) -> None:
        """Has the replica of one that is gone take its place, without asking anybody for a vote."""
        (replica,) = (other for other in self.servers if other is not server and self._follows(other, server))
        self.ask(replica, "CLUSTER", "FAILOVER", "TAKEOVER")
        until(self.leads(server), "next primary")

    def _follows(self, replica: RedisServer, primary: RedisServer) -> bool:
        try:
            return bool(self.ask(replica, "INFO", "replication").get("master_port") == primary.port)
        except (redis.ConnectionError, redis.TimeoutError):
            return False

    def cut_off(self, server: RedisServer) -> None:
        """Neither its peers nor its replica reach it any more, nor it them. Clients do."""
        self.bus.cut_off(int(server.options["cluster_port"]), self.id_of(server).encode())
        cut_replication(server)

    def heal(self, server: RedisServer) -> None:
        if "cluster_node_timeout" not in self._options:
            self.configure(cluster_node_timeout=HEALED_TIMEOUT)
        self.bus.heal(int(server.options["cluster_port"]))
        heal_replication(server)

    # --- slots ---

    def add_primary(self) -> RedisServer:
        """One more primary, without slots and without a replica."""
        server = self._add()
        known = [other for other in self.servers if other.runs]
        self._meet(server, self.primaries()[0])
        until(lambda: all(self._is_well(other, len(known)) for other in known), "cluster with one primary more")
        return server

    def remove(self, server: RedisServer) -> None:
        """One that serves no slots any more leaves, and ends."""
        server_id = self.id_of(server)
        for other in self.servers:
            if other is not server and other.runs:
                self.ask(other, "CLUSTER", "FORGET", server_id)
        server.stop()

    def move_slot(self, slot: int, target: RedisServer, pause: float = 0.0) -> None:
        """Moves a slot with its keys, as `redis-cli --cluster reshard` does it, key by key. ``pause``: seconds for
        which the slot rests half way.
        """
        source = self.primary_of(slot)
        if source is target:
            return
        target_id, source_id = self.id_of(target), self.id_of(source)
        self.ask(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
        self.ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
        is_first = True
        while keys := self.raw(source, "CLUSTER GETKEYSINSLOT", slot, 10):
            for key in keys:
                until(lambda key=key: self._migrate(source, key, target), "a key that has moved")  # type: ignore[misc]
            if is_first and pause:
                time.sleep(pause)
            is_first = False
        for server in (target, source):
            self.ask(server, "CLUSTER", "SETSLOT", slot, "NODE", target_id)

    def _migrate(self, source: RedisServer, key: bytes, target: RedisServer) -> bool:
        try:
            self.raw(source, "MIGRATE", "127.0.0.1", target.port, key, 0, 5000)
        except redis.exceptions.ClusterDownError:  # on a busy machine for a moment
            return False
        return True

    def move_empty_slots(self, source: RedisServer, target: RedisServer) -> None:
        """Moves all that has no keys from one primary to another, at once."""
        target_id = self.id_of(target)
        own = [(row[0], row[1]) for row in self.raw(source, "CLUSTER SLOTS") if row[2][1] == source.port]
        slots = [slot for first, last in own for slot in range(first, last + 1)]
        with redis.Redis(port=source.port) as client, client.pipeline(transaction=False) as together:
            for slot in slots:
                together.execute_command("CLUSTER COUNTKEYSINSLOT", slot)
            empty = [slot for slot, count in zip(slots, together.execute(), strict=True) if not count]
        self.raw(target, "CLUSTER BUMPEPOCH")
        for server in (target, source):
            with redis.Redis(port=server.port) as client, client.pipeline(transaction=False) as together:
                for slot in empty:
                    together.execute_command("CLUSTER SETSLOT", slot, "NODE", target_id)
                together.execute(raise_on_error=server is target)  # it may have got keys since


def share_slots(first: RedisServer, second: RedisServer, *ports: object) -> None:
    """Makes a cluster of two servers, without replicas. ``ports``: where the second one is met, for clients and for
    others of the cluster, if these are not the usual ones.
    """
    RedisCluster.ask(first, "CLUSTER", "ADDSLOTSRANGE", 0, SLOTS // 2 - 1)
    RedisCluster.ask(second, "CLUSTER", "ADDSLOTSRANGE", SLOTS // 2, SLOTS - 1)
    RedisCluster.ask(first, "CLUSTER", "MEET", "127.0.0.1", *(ports or [second.port]))

    def is_well(server: RedisServer) -> bool:
        return bool(RedisCluster.ask(server, "CLUSTER", "INFO")["cluster_state"] == "ok")

    until(lambda: is_well(first) and is_well(second), "cluster in order")


def cut_replication(server: RedisServer) -> None:
    """The replicas of that server get nothing from it any more."""
    RedisCluster.ask(server, "ACL", "SETUSER", "default", "-psync", "-sync")
    RedisCluster.ask(server, "CLIENT", "KILL", "TYPE", "replica")


def heal_replication(server: RedisServer) -> None:
    RedisCluster.ask(server, "ACL", "SETUSER", "default", "+@all")
