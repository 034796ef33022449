"""Redis servers of a simulation: lowq's real scripts on the embedded store, behind a simulated network; and sentinels.

A server does one command after the other, each takes virtual time, and it sees its own clock. It keeps the commands
that write: what a failover or a crash leaves of a server is what the first of them do, so the last writes are lost.
"""

import errno
import hashlib
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import redis.utils

from lowq.store.calls import Script
from lowq.store.embedded import encode, take_command
from lowq.store.keys import SLOTS, slot_of
from tests.simulation.machine import NETWORK, Socket
from tests.simulation.store import Session, new_store, restore, snapshot
from tests.simulation.world import Process, World

#: Seconds that a command takes, and a script.
COMMAND, SCRIPT = 5e-6, 5e-5
#: Seconds on the way, at least and at most.
LATENCY = (5e-5, 4e-4)
#: Seconds after which a primary of a cluster that reaches no others refuses what it is asked.
NODE_TIMEOUT = 1.0
#: What a server says that refuses scripts.
REPLICA = b"READONLY You can't write against a read only replica."
REFUSALS = (
    b"OOM command not allowed when used memory > 'maxmemory'.",
    b"NOPERM this user has no permissions to run the 'evalsha' command",
    REPLICA,
    b"BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
)
#: Commands that change nothing, and are not kept.
READING = {
    b"INFO", b"PING", b"TIME", b"CLIENT", b"SELECT", b"SCRIPT", b"CLUSTER", b"ROLE", b"READONLY", b"WAIT", b"WAITAOF",
    b"SSUBSCRIBE", b"SUNSUBSCRIBE", b"SUBSCRIBE", b"UNSUBSCRIBE", b"COMMAND", b"CONFIG", b"HELLO", b"ACL",
}  # fmt: skip

Address = tuple[str, int]


@dataclass(eq=False)
class Connection:
    """A connection to a server, as the server has it."""

    socket: Socket
    session: Session
    buffer: bytearray = field(default_factory=bytearray)
    is_open: bool = True
    is_subscribed: bool = False
    is_waiting: bool = False
    #: When the last bytes arrive that are on their way, in each direction: they don't overtake each other.
    last_in: float = 0.0
    last_out: float = 0.0


@dataclass
class Link:
    """What may happen to what is sent, in shares of all messages."""

    lost_requests: float = 0.0
    lost_replies: float = 0.0
    late: float = 0.0
    #: The client sees its connection break, and the request arrives later all the same: perhaps behind its repeat.
    belated: float = 0.0
    #: Seconds that a late message takes, at the most.
    lateness: float = 3.0

    def calm(self) -> None:
        """Nothing happens any more."""
        self.lost_requests = self.lost_replies = self.late = self.belated = 0.0


class Server:
    """A Redis server. ``link``: how its network behaves; of all servers the same object."""

    def __init__(self, world: World, address: Address, link: Link, cluster: "Cluster | None" = None) -> None:
        self.world = world
        self.address = address
        self.link = link
        self.cluster = cluster
        self.process = Process(world, f"redis:{address[1]}", 100_000 + address[1])
        self.store = new_store()
        self.started_at = world.now
        self.connections: list[Connection] = []
        #: Processes that can't reach it, nor it them.
        self.cut_off: set[Process] = set()
        #: (when, command) of those that may have written, in their order.
        self.log: list[tuple[float, list[bytes]]] = []
        #: What it knew after so many of them.
        self._snapshots: list[tuple[int, bytes]] = []
        #: Seconds that its replica is behind; 0.0: it has none.
        self.lag = 0.0
        #: It doesn't reach its replica, nor the other primaries, since then. It does not know.
        self.isolated_at: float | None = None
        #: Sentinels have made it a replica of another one.
        self.is_replaced = False
        #: What it answers to a share of the scripts, which it refuses.
        self.refusal = b""
        #: Scripts that go on while memory is full.
        self._unlimited: set[bytes] = set()
        #: SHA1 of a script as its client knows it -> as the store knows it.
        self._scripts: dict[bytes, bytes] = {}
        self._sources: dict[bytes, bytes] = {}
        #: How often it was stopped and not started again.
        self._stopped = 0
        self._busy_until = 0.0
        self.executed = 0

    # --- connections ---

    def accept(self, socket: Socket, timeout: float | None) -> None:
        """A client connects: its thread waits.

        Raises:
            OSError
        """
        world, process = self.world, self.world.process
        seconds = world.chance.uniform(*LATENCY)
        if process in self.cut_off:
            world.sleep(timeout if timeout is not None else 120.0)
            raise TimeoutError("timed out")
        world.sleep(seconds)
        if not self.process.is_alive:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        connection = Connection(socket, Session(self.store))
        self.connections.append(connection)
        socket.deliver = lambda data: self._sent(connection, data, process)
        socket.on_close = lambda: world.after(seconds, lambda: self._hung_up(connection))
        if process is not None:
            process.at_death.append(socket.hang_up)

    def _hung_up(self, connection: Connection) -> None:
        """Its client has closed it: the server notices that when it has carried out what was sent before."""
        world = self.world
        at = max(connection.last_in, self._busy_until, self.process.frozen_until)
        if connection.is_open and at >= world.now:
            world.at(at + COMMAND, lambda: self._hung_up(connection))
        else:
            self._closed(connection)

    def _closed(self, connection: Connection) -> None:
        connection.is_open = False
        if connection in self.connections:
            self.connections.remove(connection)
            connection.session.close()

    def break_connections(self, share: float = 1.0) -> None:
        """Resets connections."""
        for connection in list(self.connections):
            if self.world.chance.random() < share:
                self._reset(connection)

    def _reset(self, connection: Connection) -> None:
        self._closed(connection)
        connection.socket.ended(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))

    # --- messages ---

    def _sent(self, connection: Connection, data: bytes, sender: Process | None) -> None:
        """A client has sent that."""
        world, link, chance = self.world, self.link, self.world.chance
        delay = chance.uniform(*LATENCY)
        if chance.random() < link.lost_requests:
            world.after(delay, lambda: self._reset(connection))
            return
        if chance.random() < link.belated:
            connection.socket.ended(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))
            delay += chance.uniform(0.0, link.lateness)
        elif chance.random() < link.late:
            delay += chance.uniform(0.0, link.lateness)
        connection.last_in = max(connection.last_in, world.now + delay)

        def arrive() -> None:
            if sender in self.cut_off:
                connection.last_in = world.now + 0.5
                world.at(connection.last_in, arrive)  # TCP sends it again
            elif connection.is_open and self.process.is_alive:
                connection.buffer += data
                self._work(connection)

        world.at(connection.last_in, arrive)

    def _work(self, connection: Connection) -> None:
        world = self.world
        begin = max(world.now, self._busy_until, self.process.frozen_until)
        if begin > world.now:
            world.at(begin, lambda: self._work(connection))
            return
        if not (connection.is_open and self.process.is_alive):
            return
        answers: list[bytes] = []
        with world.acting_as(self.process):
            while not connection.is_waiting and (command := take_command(connection.buffer)) is not None:
                if command:
                    answers += self._answer(connection, command)
                    self._busy_until = max(self._busy_until, world.now) + (
                        SCRIPT if command[0].upper() == b"EVALSHA" else COMMAND
                    )
            self._reply(connection, answers)
            for other in [each for each in self.connections if each.is_subscribed]:
                self._reply(other, other.session.take_pending())

    def _reply(self, connection: Connection, answers: list[bytes]) -> None:
        if not answers:
            return
        world, link, chance = self.world, self.link, self.world.chance
        data = b"".join(answers)
        if chance.random() < link.lost_replies:
            world.after(LATENCY[1], lambda: self._reset(connection))
            return
        delay = chance.uniform(*LATENCY)
        if chance.random() < link.late:
            delay += chance.uniform(0.0, link.lateness)
        connection.last_out = max(connection.last_out, self._busy_until, world.now + delay)

        def arrive() -> None:
            if connection.is_open:
                connection.socket.arrived(data)

        world.at(connection.last_out, arrive)

    # --- commands ---

    def _answer(self, connection: Connection, command: list[bytes]) -> list[bytes]:
        self.executed += 1
        name = command[0].upper()
        own = self._own_answer(name, command)
        if own is not None:
            return [own]
        if name == b"WAIT":
            self._wait(connection, int(command[1]), int(command[2]) / 1000)
            return []
        if name.endswith(b"SUBSCRIBE"):
            connection.is_subscribed = True
        if name == b"EVALSHA":
            command[1] = self._scripts.get(command[1], command[1])
        if name not in READING:
            _RANDOM.seed(len(self.log))
            self.log.append((self.world.now, command))
        return connection.session.answer(command)

    def _wait(self, connection: Connection, replicas: int, seconds: float) -> None:
        """Answers when its replica has confirmed what was written so far, or that time is over. Until then the
        connection waits.
        """
        since = self.world.now

        def answer() -> None:
            confirms = self.lag > 0 and self.isolated_at is None and self.world.now >= since + self.lag
            connection.is_waiting = False
            self._reply(connection, [b":%d\r\n" % confirms])
            self._work(connection)

        connection.is_waiting = True
        self.world.after(min(self.lag, seconds) if replicas == 1 and self.lag else seconds if replicas else 0.0, answer)

    def _own_answer(self, name: bytes, command: list[bytes]) -> bytes | None:
        """What the store does not know, or knows otherwise."""
        if name == b"INFO":
            mode = "standalone" if self.cluster is None else "cluster"
            uptime = int(self.world.now - self.started_at)
            role = "slave" if self.is_replica else "master"
            text = f"redis_version:7.0.0\r\nredis_mode:{mode}\r\nuptime_in_seconds:{uptime}\r\nrole:{role}\r\n"
            return encode(f"{text}connected_slaves:{int(self.lag > 0)}\r\n".encode())
        if name == b"CLIENT":
            return b"+OK\r\n"
        if name == b"SCRIPT" and command[1].upper() == b"LOAD":
            theirs = hashlib.sha1(command[2], usedforsecurity=False).hexdigest().encode()
            source = command[2].partition(b"\n")[2] if command[2].startswith(b"#!") else command[2]
            ours = hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()
            if b"allow-oom" in command[2].partition(b"\n")[0]:
                self._unlimited.add(theirs)
            if theirs not in self._scripts:
                self._scripts[theirs] = ours
                self._sources[ours] = source
                self.ask(b"SCRIPT", b"LOAD", source)
            return encode(theirs)
        if name == b"SCRIPT" and command[1].upper() == b"EXISTS":
            return encode([int(sha in self._scripts) for sha in command[2:]])
        if name == b"CLUSTER":
            return encode(self.cluster.slots() if self.cluster is not None else [])
        if self.cluster is not None:
            key = _key_of(name, command)
            if key is not None and (owner := self.cluster.owner(key)) is not self:
                return f"-MOVED {slot_of(key)} {owner.address[0]}:{owner.address[1]}\r\n".encode()
            if self.isolated_at is not None and self.world.now > self.isolated_at + NODE_TIMEOUT:
                return b"-CLUSTERDOWN The cluster is down\r\n"
        if self.is_replaced and name not in READING:
            return b"-%s\r\n" % REPLICA
        if self.refusal and name == b"EVALSHA" and self.world.chance.random() < 0.3:
            is_unlimited = self.refusal.startswith(b"OOM") and command[1] in self._unlimited
            return None if is_unlimited else b"-%s\r\n" % self.refusal
        return None

    def ask(self, *command: bytes) -> Any:
        """What a command answers beside all that is simulated."""
        with self.world.acting_as(self.process):
            return Session(self.store).ask(*command)

    # --- faults ---

    def flush_scripts(self) -> None:
        """SCRIPT FLUSH, by an operator."""
        self._scripts.clear()
        self.ask(b"SCRIPT", b"FLUSH")

    def stop(self) -> None:
        """It is killed: all connections break."""
        self._stopped += 1
        self.process.is_alive = False
        self.break_connections()

    def start(self, lost: float = 0.0) -> float | None:
        """It is started again, without what it wrote in the last so many seconds. Returns when the earliest of the
        writes that are lost was made, or None.
        """
        self._stopped -= 1
        if self._stopped:
            return None  # somebody else has stopped it meanwhile
        since = None
        if lost:
            kept = [entry for entry in self.log if entry[0] <= self.world.now - lost]
            if len(kept) < len(self.log):
                since = self.log[len(kept)][0]
                self._replay(kept)
        self.process.is_alive = True
        self.started_at = self.world.now
        return since

    def promote(self, behind: float, address: Address) -> "Server":
        """Its replica, which is so many seconds behind, as a primary with that address."""
        heir = Server(self.world, address, self.link, self.cluster)
        heir.lag, heir._sources, heir._snapshots = self.lag, dict(self._sources), self._snapshots
        since = (self.world.now if self.isolated_at is None else self.isolated_at) - behind
        heir._replay([entry for entry in self.log if entry[0] <= since])
        if self.cluster is not None:  # it goes on with what it knew
            primaries, self.cluster = self.cluster.primaries, Cluster()
            self.cluster.primaries = [*primaries]
            primaries[primaries.index(self)] = heir
        return heir

    @property
    def is_replica(self) -> bool:
        """Whether it was replaced, and knows it."""
        return self.is_replaced or (self.cluster is not None and self not in self.cluster.primaries)

    def take_snapshot(self) -> None:
        """It may soon lose what it writes from now on: what it knows need not be replayed."""
        self._snapshots.append((len(self.log), snapshot(self.store)))

    def _replay(self, log: list[tuple[float, list[bytes]]]) -> None:
        """What it knows becomes what these commands do, each at its time."""
        world, present = self.world, self.world.now
        self._snapshots = [(count, held) for count, held in self._snapshots if count <= len(log)]
        known, held = max(self._snapshots, default=(0, None))
        self.store = new_store() if held is None else restore(held)
        self._scripts.clear()
        for source in self._sources.values():
            self.ask(b"SCRIPT", b"LOAD", source)
        session = Session(self.store)
        with world.acting_as(self.process):
            for number, (at, command) in enumerate(log[known:], known):
                world.now = at
                _RANDOM.seed(number)
                session.answer(list(command))
        world.now = present
        self.log = log


class Cluster:
    """Primaries, each with its part of the slots."""

    def __init__(self) -> None:
        self.primaries: list[Server] = []

    def owner(self, key: str) -> Server:
        return self.primaries[slot_of(key) * len(self.primaries) // SLOTS]

    def slots(self) -> list[Any]:
        count = len(self.primaries)
        edges = [-(-number * SLOTS // count) for number in range(count + 1)]
        return [
            [edges[number], edges[number + 1] - 1, [server.address[0].encode(), server.address[1]]]
            for number, server in enumerate(self.primaries)
        ]


class Sentinel(Server):
    """Says which primary the service has, as far as it has heard of the others. ``primary``: at the beginning."""

    def __init__(self, world: World, address: Address, primary: Address) -> None:
        super().__init__(world, address, Link())
        self.primary = primary
        #: Grows with each failover.
        self.epoch = 0
        self.sees_down = False
        #: Until when it hears nothing of the others.
        self.deaf_until = 0.0

    def hear(self, primary: Address, epoch: int, then: Callable[[], object] = lambda: None) -> None:
        """The others have made that server the primary. ``then``: is called when it knows."""
        world = self.world
        begin = max(self.deaf_until, self.process.frozen_until) if self.process.is_alive else world.now + 0.1
        if begin > world.now:
            world.at(begin, lambda: self.hear(primary, epoch, then))
            return
        if epoch > self.epoch:
            self.primary, self.epoch, self.sees_down = primary, epoch, False
        then()

    def see_down(self, primary: Address) -> None:
        """The primary does not answer it."""
        self.sees_down = self.primary == primary and self.deaf_until <= self.world.now

    def _own_answer(self, name: bytes, command: list[bytes]) -> bytes | None:
        if name != b"SENTINEL":
            return super()._own_answer(name, command)
        flags = "s_down,o_down,master" if self.sees_down else "master"
        state = "ip", self.primary[0], "port", self.primary[1], "flags", flags, "config-epoch", self.epoch
        return encode([str(each).encode() for each in state])


def listen(by_address: Mapping[Address, Server]) -> None:
    """These servers are the network."""

    def connect(socket: Socket, address: Address, timeout: float | None) -> None:
        server = by_address.get(address)
        if server is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        server.accept(socket, timeout)

    NETWORK.connect = connect


def _key_of(name: bytes, command: list[bytes]) -> str | None:
    if name in (b"EVALSHA", b"EVAL"):
        return command[3].decode() if int(command[2]) else None
    if name in (b"SSUBSCRIBE", b"SPUBLISH") or (name not in READING and len(command) > 1):
        return command[1].decode("utf-8", "replace")
    return None


#: Chance within scripts: the same whenever the same commands are replayed.
_RANDOM = random.Random(0)

# Each client asks for these anew: a story has many.
redis.utils.get_lib_version = cache(redis.utils.get_lib_version)
Script.for_server = cache(Script.for_server)  # type: ignore[method-assign]

for _name, _module in list(sys.modules.items()):
    if _name.startswith("fakeredis") and getattr(_module, "random", None) is random:
        setattr(_module, "random", _RANDOM)  # noqa: B010 - mypy and a module; its functions are methods of this
