"""A cluster as one server describes it, which the tests make say anything: names, moves, silence, gaps."""

import socketserver
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from lowq.errors import RedisUnavailable
from lowq.store import Client, Command
from lowq.store.urls import topology_of
from tests.waiting import PATIENCE, until


def resp(value: Any) -> bytes:
    """A reply as it goes over the wire; a str is sent as it is."""
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, list):
        return b"*%d\r\n" % len(value) + b"".join(map(resp, value))
    if isinstance(value, bytes):
        return b"$%d\r\n%b\r\n" % (len(value), value)
    return (f":{value}" if isinstance(value, int) else value).encode() + b"\r\n"


class Node(socketserver.ThreadingTCPServer):
    """The only primary; it names no host of its own."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Conversation)
        self.port: int = self.server_address[1]
        self.ranges: list[list[Any]] = [[0, 16383, self.named]]
        self.is_silent = False
        self.moved_to = ""
        #: How often it was asked for the slots.
        self.asked = 0

    @property
    def named(self) -> list[Any]:
        return [None, self.port, b"id"]

    def answers(self, name: bytes, arguments: list[bytes]) -> list[Any]:
        if name == b"CLUSTER":
            self.asked += 1
            return [self.ranges]
        if name == b"INFO":
            return [b"redis_version:7.0.0\r\nredis_mode:cluster\r\n"]
        if name == b"GET":
            return [f"-MOVED {self.moved_to}" if self.moved_to else b"%d" % self.port]
        if name == b"SUNSUBSCRIBE":  # another channel's slot moves just now
            return [[b"sunsubscribe", channel, 0] for channel in (b"kept", *arguments)]
        return [[b"ssubscribe", *arguments, 1] if name == b"SSUBSCRIBE" else "+OK"]


class Conversation(socketserver.StreamRequestHandler):
    server: Node

    def handle(self) -> None:
        while (line := self.rfile.readline()) and not self.server.is_silent:
            words = [self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2] for _ in range(int(line[1:]))]
            self.wfile.write(b"".join(map(resp, self.server.answers(words[0], words[1:]))))


def serving() -> Iterator[Node]:
    with Node() as node:
        threading.Thread(target=node.serve_forever, daemon=True).start()
        yield node
        node.shutdown()


node = pytest.fixture(serving, name="node")
other = pytest.fixture(serving, name="other")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is not silent has all the time that it needs."""
    for limit in ("topology.ASK_TIMEOUT", "urls.CLUSTER_SOCKET_TIMEOUT"):
        monkeypatch.setattr(f"lowq.store.{limit}", PATIENCE)


def connect(*nodes: Node) -> Client:
    addresses = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
    return Client(f"redis+cluster://{addresses}", size=30, timeout=PATIENCE, socket_timeout=PATIENCE)


@pytest.fixture
def client(node: Node) -> Iterator[Client]:
    with closing(connect(node)) as client:
        yield client


def get(client: Client) -> int:
    return int(client.command("GET", "key", key="key"))


def notice(client: Client) -> bool:
    """Whether the primary does not answer."""
    try:
        get(client)
    except RedisUnavailable:
        return True
    return False


def test_a_node_of_ipv6_has_the_user_of_the_url() -> None:
    # The newline is that of the file with the secret.
    topology = topology_of("redis+cluster://user:secret@[::1]:7001\n", 1, 1.0, 1.0, None)
    connection = topology.pool_at(("fe80::2", 7002)).connect()
    assert (connection.host, connection.port) == ("fe80::2", 7002)
    assert (connection.username, connection.password) == ("user", "secret")


def test_a_node_that_names_a_port_only_means_its_own_host(client: Client, node: Node, other: Node) -> None:
    assert get(client) == node.port
    assert client.address_of("key") == ("127.0.0.1", node.port)
    node.moved_to, node.ranges = f"12539 :{other.port}", []  # what else it knows is not to be had
    assert client.run_many([Command("key", "GET", "key")]) == [b"%d" % other.port]
    assert client.address_of("key") == ("127.0.0.1", other.port)


def test_that_a_slot_has_moved_and_no_node_answers_is_an_error_of_ours(client: Client, node: Node) -> None:
    assert get(client) == node.port
    node.moved_to, node.ranges = "12539 127.0.0.1:1", []
    with pytest.raises(RedisUnavailable, match="does not answer"):
        get(client)


def test_two_threads_watch_a_silent_primary_however_many_notice_it(client: Client, node: Node) -> None:
    def watching() -> int:
        return [thread.name for thread in set(threading.enumerate()) - before].count("lowq-cluster")

    get(client)
    before = set(threading.enumerate())
    node.is_silent = True
    noticing = [threading.Thread(target=notice, args=[client]) for _ in range(30)]
    for thread in noticing:
        thread.start()
    for thread in noticing:
        thread.join()
    assert watching() == 2
    client.close()
    until(lambda: not watching(), "the end of the watchers")
    assert notice(client), "it is used again"
    node.is_silent = False
    until(lambda: not notice(client), "an answer")


def test_the_next_primary_of_what_a_silent_one_had_is_found(node: Node, other: Node) -> None:
    with closing(connect(node, other)) as client:
        other.ranges = node.ranges
        assert get(client) == node.port
        node.is_silent, other.ranges = True, [[0, 16383, other.named]]
        until(lambda: not notice(client), "an answer")
        assert get(client) == other.port


def test_a_slot_without_a_primary_is_looked_for_in_pauses(
    client: Client, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("lowq.store.topology.time.monotonic", lambda: now[0])
    node.ranges = [[0, 12538, node.named], [12540, 16383, node.named]]
    for _ in range(1000):
        with pytest.raises(RedisUnavailable, match="no primary of the cluster serves key"):
            get(client)
        now[0] += 0.01
    assert 15 <= node.asked <= 50, "in ten seconds, with pauses of half a second at most"
    node.ranges = [[0, 16383, node.named]]
    now[0] += 1.0
    assert get(client) == node.port


def test_a_channel_whose_slot_moves_while_another_is_dropped_is_looked_for(client: Client) -> None:
    def wait_for(event: tuple[str, str, bytes]) -> None:
        until(lambda: subscription.get(0.1) == event, f"the event {event}")

    subscription = client.subscribe()
    try:
        for channel in ("kept", "dropped"):
            subscription.add([channel])
            wait_for(("subscribe", channel, b""))
        subscription.remove(["dropped"])
        wait_for(("subscribe", "kept", b""))
    finally:
        subscription.close()
