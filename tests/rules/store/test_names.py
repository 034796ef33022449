"""Host names whose server is slow, or dead: known addresses go on being used."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from lowq.store import Client
from lowq.store import connection as names
from lowq.store.connection import find_addresses
from tests.waiting import NEVER, PATIENCE, until

NAME = "redis.test"


class NameServer:
    """Says where the name is, an error, or nothing before `answers` is set."""

    def __init__(self) -> None:
        self.says: str | OSError = "127.0.0.1"
        self.answers = threading.Event()
        self.answers.set()
        self.asked = 0

    def getaddrinfo(self, host: str, port: int, family: int, kind: int, flags: int = 0) -> Any:
        if host == NAME and flags == socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "no address")
        if host == NAME:
            self.asked += 1
            if not self.answers.wait(PATIENCE):
                raise socket.gaierror(socket.EAI_AGAIN, "try again")
            if isinstance(self.says, OSError):
                raise self.says
            host = self.says
        return getaddrinfo(host, port, family, kind, flags=flags)


getaddrinfo: Any = socket.getaddrinfo


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    server = NameServer()
    monkeypatch.setattr(socket, "getaddrinfo", server.getaddrinfo)
    monkeypatch.setattr(names, "_known", {})
    monkeypatch.setattr(names, "PATIENCE", NEVER)
    yield server
    server.answers.set()
    for thread in threading.enumerate():
        if thread.name == "lowq-name":
            thread.join(PATIENCE)


def look_up(seconds: float = PATIENCE) -> str:
    address: str = find_addresses(NAME, 1, 0, seconds)[0][4][0]
    return address


def test_the_last_known_address_is_used_in_an_outage(server: NameServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look_up() == "127.0.0.1"
    server.says = "127.0.0.2"
    assert look_up() == "127.0.0.2", "it may change"
    for trouble in (socket.gaierror(socket.EAI_AGAIN, "try again"), socket.gaierror(socket.EAI_FAIL, "failed")):
        server.says = trouble
        assert look_up() == "127.0.0.2"
    monkeypatch.setattr(names, "PATIENCE", 0.01)
    server.answers.clear()
    server.says = "127.0.0.3"
    before = server.asked
    assert [look_up() for _ in range(5)] == ["127.0.0.2"] * 5
    until(lambda: server.asked > before, "that it is asked")  # the thread may begin later
    assert server.asked == before + 1  # one thread, however many ask
    monkeypatch.setattr(names, "PATIENCE", NEVER)
    server.answers.set()
    until(lambda: look_up() == "127.0.0.3", "what it says when it answers again")


def test_a_client_connects_anew_without_an_answer(
    server: NameServer, monkeypatch: pytest.MonkeyPatch, redis_url: str
) -> None:
    client = Client(
        redis_url.replace("127.0.0.1", NAME).replace("localhost", NAME),
        size=1,
        timeout=PATIENCE,
        socket_timeout=PATIENCE,
    )
    client.command("CLIENT", "SETNAME", "ours")
    ours = client.command("CLIENT", "ID")
    server.answers.clear()
    monkeypatch.setattr(names, "PATIENCE", 0.01)
    with redis.Redis.from_url(redis_url) as other:
        other.client_kill_filter(_id=ours)
    assert client.command("PING")
    client.close()


def test_nothing_is_known(server: NameServer) -> None:
    server.answers.clear()
    with pytest.raises(TimeoutError):
        look_up(0.01)
    for _ in range(20_000):  # now and then the thread stands still for longer
        with pytest.raises(TimeoutError):
            look_up(1e-6)
    server.says = socket.gaierror(socket.EAI_AGAIN, "try again")
    server.answers.set()
    with pytest.raises(socket.gaierror, match="try again"):
        look_up()


def test_a_name_that_is_no_more_is_not_used(server: NameServer) -> None:
    look_up()
    server.says = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    with pytest.raises(socket.gaierror, match="not known"):
        look_up()
