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
import uvicorn

import lowq
from lowq_web import connections, live, serve, stats_cache
from lowq_web.serve import Server
from tests.rows import case
from tests.rules.web.served import Stream, connected, get
from tests.tiers import often
from tests.waiting import NEVER, PATIENCE, until

#: Seconds instead of those that slow clients get.
SHORT = 0.3
#: A form of which only the beginning is there.
UPLOAD = (
    b"POST /queues/Orders/act HTTP/1.1\r\nHost: 127.0.0.1\r\nSec-Fetch-Site: same-origin\r\n"
    b"Content-Length: 1000\r\n\r\ndo=delete"
)


@contextmanager
def serving(app: lowq.Lowq, **options: Any) -> Iterator["Serving"]:
    """It serves in a thread."""
    found = Serving(app, **options)
    thread = threading.Thread(target=found.server.run)
    thread.start()
    try:
        yield found
    finally:
        until(lambda: found.uvicorn.started, "server")
        found.uvicorn.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()


class Serving:
    """A server, with that of uvicorn within it."""

    def __init__(self, app: lowq.Lowq, **options: Any) -> None:
        made: list[uvicorn.Server] = []
        begin = uvicorn.Server.__init__

        def noted(server: uvicorn.Server, *args: Any, **more: Any) -> None:
            made.append(server)
            begin(server, *args, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(uvicorn.Server, "__init__", noted)
            self.server = Server(app, "127.0.0.1", 0, **options)
        (self.uvicorn,) = made
        self.url = self.server.url

    @property
    def connections(self) -> set[Any]:
        return self.uvicorn.server_state.connections

    def connect(self) -> "closing[socket.socket]":
        parts = urlsplit(self.url)
        return closing(socket.create_connection((parts.hostname or "", parts.port or 0), timeout=PATIENCE))


def ends(connection: socket.socket) -> bytes:
    """What comes until the other side closes. Raises TimeoutError."""
    came = b""
    try:
        while chunk := connection.recv(65536):
            came += chunk
    except ConnectionResetError:
        pass
    return came


def test_answers_are_not_held_back(app: lowq.Lowq) -> None:
    """Nagle's algorithm would keep the body until the headers are acknowledged: 40 ms on a connection that is kept."""
    with serving(app) as server, connected(server.url) as connection:
        connection.request("GET", "/healthz")
        assert connection.getresponse().read()
        (accepted,) = server.connections
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
                with serving(app) as server, server.connect() as connection:
                    connection.sendall(sent)
                    ends(connection)
                    until(lambda: not server.connections, "end of the connection")
                assert "Traceback" not in caplog.text

    def test_an_upload_that_is_broken_off_is_no_error(
        self, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        for name in ("HEADERS", "BODY"):
            monkeypatch.setattr(connections, name, NEVER)  # it is the client who ends it
        with serving(app) as server:
            with server.connect() as connection:
                connection.sendall(UPLOAD)
                until(lambda: server.connections, "connection")
            until(lambda: not server.connections, "end of the connection")
        assert "Traceback" not in caplog.text

    def test_what_comes_drop_by_drop_gets_no_more_time(self, app: lowq.Lowq) -> None:
        with serving(app) as server, server.connect() as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nX-Slow: ")

            def is_closed() -> bool:
                try:
                    connection.sendall(b"x")
                except OSError:
                    return True
                return False

            until(is_closed, "end of the connection")

    def test_a_reader_who_takes_nothing_is_not_waited_for(self, app: lowq.Lowq) -> None:
        app.queue("Big", 1).push({"id": n, "payload": "x" * 50_000, "delay": 60} for n in range(100))
        with serving(app) as server, server.connect() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            ask = b"GET /api/v1/queues/Big/jobs?limit=1000 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
            connection.sendall(ask * 20)
            # Not that the connection is open, which it is for a moment only.
            until(lambda: server.uvicorn.server_state.total_requests, "a request")
            until(lambda: not server.connections, "end of the connection")

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
            first = [stack.enter_context(server.connect()) for _ in range(5)]
            until(lambda: len(server.connections) == 5, "connections")
            late = stack.enter_context(server.connect())
            assert ends(late).startswith(b"HTTP/1.1 503 ")
            for connection in first:
                connection.close()
            until(lambda: not server.connections, "end of the connections")
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


def test_there_are_no_more_connections_than_files(
    app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for files, said in ((1024, None), (200, (200 - serve.OTHER_FILES, 256, 200))):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, 4096))
        caplog.clear()
        with serving(app, max_connections=256):
            pass
        (args,) = [record.args for record in caplog.records] or [None]
        assert args == said


#: Serves; gets a signal while its event loop is being made, or once it serves; and counts the calls of its own handler.
SIGNALLED = """
import asyncio, os, signal, sys
import lowq, uvicorn
from lowq_web.serve import Server

number, calls, main_loop = signal.{name}, [], uvicorn.Server.main_loop

class Loop(asyncio.SelectorEventLoop):
    def __init__(self):
        os.kill(os.getpid(), number)
        super().__init__()

async def signalled(server):
    os.kill(os.getpid(), number)
    await main_loop(server)

signal.signal(number, {handler})  # whoever runs the tests may ignore it
{patch}
try:
    Server(lowq.Lowq(redis_url="memory://signalled"), "127.0.0.1", 0).run()
except KeyboardInterrupt:
    calls.append(1)
print(len(calls))
"""
STARTING = {"handler": "signal.default_int_handler", "patch": "uvicorn.Config.get_loop_factory = lambda self: Loop"}
SERVING = {"handler": "lambda *_: calls.append(1)", "patch": "uvicorn.Server.main_loop = signalled"}


@pytest.mark.parametrize("when", [STARTING, SERVING], ids=["starting", "serving"])
@pytest.mark.parametrize("name", often(["SIGINT", "SIGTERM"], ["SIGTERM"]))
def test_whoever_runs_it_gets_a_signal_once_and_no_traceback(name: str, when: dict[str, str]) -> None:
    program = [sys.executable, "-c", SIGNALLED.format(name=name, **when)]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "1\n", "")
