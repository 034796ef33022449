"""The dashboard's own server, over real sockets: connections that cost it nothing for long, and none that wait."""

import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

import lowq
from lowq_web import connections, live, serve, stats_cache
from lowq_web.serve import Server
from tests.integration.support import NEVER, PATIENCE, until
from tests.rows import case
from tests.web.served import Stream, connected, get

#: Seconds instead of those that slow clients get.
SHORT = 0.3
#: A form of which only the beginning is there.
UPLOAD = (
    b"POST /queues/Orders/act HTTP/1.1\r\nHost: 127.0.0.1\r\nSec-Fetch-Site: same-origin\r\n"
    b"Content-Length: 1000\r\n\r\ndo=delete"
)


@contextmanager
def serving(app: lowq.Lowq, **options: Any) -> Iterator[Server]:
    """It serves in a thread."""
    server = Server(app, "127.0.0.1", 0, **options)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server._server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()


def connect(server: Server) -> socket.socket:
    parts = urlsplit(server.url)
    return socket.create_connection((parts.hostname or "", parts.port or 0), timeout=PATIENCE)


def ends(connection: socket.socket) -> bytes:
    """What comes until the other side closes. Raises TimeoutError."""
    came = b""
    try:
        while chunk := connection.recv(65536):
            came += chunk
    except ConnectionResetError:
        pass
    return came


def open_connections(server: Server) -> set[Any]:
    return server._server.server_state.connections


def test_answers_are_not_held_back(app: lowq.Lowq) -> None:
    """Nagle's algorithm would keep the body until the headers are acknowledged: 40 ms on a connection that is kept."""
    with serving(app) as server, connected(server.url) as connection:
        connection.request("GET", "/healthz")
        assert connection.getresponse().read()
        (accepted,) = open_connections(server)
        transport = accepted.transport.get_extra_info("socket")
        assert transport.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


class TestSlowClients:
    @pytest.fixture(autouse=True)
    def _short(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("HEADERS", "BODY", "STALLED"):
            monkeypatch.setattr(connections, name, SHORT)

    def test_what_is_never_sent_is_not_waited_for(self, app: lowq.Lowq, caplog: pytest.LogCaptureFixture) -> None:
        requests: list[bytes] = [
            b"",
            b"GET / HT",
            b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ",
            b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /healthz HTTP/1.1\r\nHo",  # the second of two
            UPLOAD,
            # Answered before its body is there: no route takes a form there.
            b"POST /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\nx",
        ]
        for sent in requests:
            with case(sent):
                caplog.clear()
                with serving(app) as server, closing(connect(server)) as connection:
                    connection.sendall(sent)
                    ends(connection)
                    until(lambda: not open_connections(server), "end of the connection")
                assert "Traceback" not in caplog.text

    def test_an_upload_that_is_broken_off_is_no_error(
        self, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        for name in ("HEADERS", "BODY"):
            monkeypatch.setattr(connections, name, NEVER)  # it is the client who ends it
        with serving(app) as server:
            with closing(connect(server)) as connection:
                connection.sendall(UPLOAD)
                until(lambda: open_connections(server), "connection")
            until(lambda: not open_connections(server), "end of the connection")
        assert "Traceback" not in caplog.text

    def test_what_comes_drop_by_drop_gets_no_more_time(self, app: lowq.Lowq) -> None:
        with serving(app) as server, closing(connect(server)) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nX-Slow: ")

            def drop() -> bool:
                try:
                    connection.sendall(b"x")
                except OSError:
                    return True
                return False

            until(drop, "end of the connection")

    def test_a_reader_who_takes_nothing_is_not_waited_for(self, app: lowq.Lowq) -> None:
        app.queue("Big", 1).push({"id": n, "payload": "x" * 50_000, "delay": 60} for n in range(100))
        with serving(app) as server, closing(connect(server)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            ask = b"GET /api/v1/queues/Big/jobs?limit=1000 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
            connection.sendall(ask * 20)
            # Not that the connection is open, which it is for a moment only.
            until(lambda: server._server.server_state.total_requests, "a request")
            until(lambda: not open_connections(server), "end of the connection")

    def test_who_is_served_is_let_be(self, app: lowq.Lowq) -> None:
        """A page that is live sends nothing for long."""
        with serving(app) as server, Stream(server.url) as stream:
            named = [stream.event()[0] for _ in range(2)]  # the second one is seconds later
            assert named == ["figures", "figures"]

    def test_more_than_may_be_are_refused_until_others_have_gone(
        self, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(connections, "HEADERS", NEVER)  # or the first ones go before the last one comes
        with ExitStack() as stack, serving(app, max_connections=5) as server:
            first = [stack.enter_context(closing(connect(server))) for _ in range(5)]
            until(lambda: len(open_connections(server)) == 5, "connections")
            late = stack.enter_context(closing(connect(server)))
            assert ends(late).startswith(b"HTTP/1.1 503 ")
            for connection in first:
                connection.close()
            until(lambda: not open_connections(server), "end of the connections")
            assert get(server.url, "/healthz")[0] == 200


def test_streams_end_with_the_server(app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not cut off, and it does not wait for the end of their lifetime, nor for the next snapshot."""
    for module, name in ((serve, "GRACE"), (live, "LIFETIME"), (stats_cache, "INTERVAL")):
        monkeypatch.setattr(module, name, 3600)
    with ExitStack() as stack:
        with serving(app) as server:
            streams = [stack.enter_context(Stream(server.url)) for _ in range(3)]
            assert [stream.event()[0] for stream in streams] == ["figures"] * 3
        assert [stream.event()[0] for stream in streams] == ["end"] * 3


def test_there_are_no_more_connections_than_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (200, 4096))
    assert serve._affordable(256) == 200 - serve.OTHER_FILES
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert serve._affordable(256) == 256


#: Serves, and is interrupted while its event loop is being made.
INTERRUPTED = """
import asyncio, os, signal, sys
import lowq
from lowq_web.serve import Server

class Loop(asyncio.SelectorEventLoop):
    def __init__(self):
        os.kill(os.getpid(), signal.{name})
        super().__init__()

signal.signal(signal.{name}, signal.default_int_handler)  # whoever runs the tests may ignore it
server = Server(lowq.Lowq(redis_url="memory://interrupted"), "127.0.0.1", 0)
server._server.config.get_loop_factory = lambda: Loop
try:
    server.run()
except KeyboardInterrupt:
    print("ended")
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_while_it_starts_ends_it_without_a_traceback(name: str) -> None:
    program = [sys.executable, "-c", INTERRUPTED.format(name=name)]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "ended\n", "")


#: Serves, gets a signal once it does, and counts how often its own handler is called.
COUNTING = """
import os, signal
import lowq
from lowq_web.serve import Server

calls = []
signal.signal(signal.{name}, lambda *_: calls.append(1))
server = Server(lowq.Lowq(redis_url="memory://counting"), "127.0.0.1", 0)
main_loop = server._server.main_loop

async def signalled():
    os.kill(os.getpid(), signal.{name})
    await main_loop()

server._server.main_loop = signalled
server.run()
print(len(calls))
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_whoever_runs_it_gets_a_signal_once(name: str) -> None:
    program = [sys.executable, "-c", COUNTING.format(name=name)]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "1\n", "")
