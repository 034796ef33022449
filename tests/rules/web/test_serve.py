"""The dashboard's own server, over real sockets: connections that cost it nothing for long, and none that wait."""

import http.client
import ipaddress
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn

import lowq
from lowq_web import connections, live, serve, stats_cache
from lowq_web.serve import Server
from tests.rows import case
from tests.rules.web.served import Stream, get
from tests.waiting import NEVER, PATIENCE, until

#: Seconds instead of those that slow clients get.
SHORT = 0.3
#: A form of which only the beginning is there.
UPLOAD = (
    b"POST /queues/Orders/act HTTP/1.1\r\nHost: 127.0.0.1\r\nSec-Fetch-Site: same-origin\r\n"
    b"Content-Length: 1000\r\n\r\ndo=delete"
)


class Serving:
    """A server, with that of uvicorn within it."""

    def __init__(self, app: lowq.Lowq, host: str = "127.0.0.1", **options: Any) -> None:
        made: list[uvicorn.Server] = []
        begin = uvicorn.Server.__init__

        def noted(server: uvicorn.Server, *args: Any, **more: Any) -> None:
            made.append(server)
            begin(server, *args, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(uvicorn.Server, "__init__", noted)
            self.server = Server(app, host, 0, **options)
        (self.uvicorn,) = made
        self.url = self.server.url

    @property
    def connections(self) -> set[Any]:
        return self.uvicorn.server_state.connections

    def connect(self) -> "closing[socket.socket]":
        parts = urlsplit(self.url)
        return closing(socket.create_connection((parts.hostname or "", parts.port or 0), timeout=PATIENCE))


@contextmanager
def serving(app: lowq.Lowq, **options: Any) -> Iterator[Serving]:
    """It serves in a thread."""
    found = Serving(app, **options)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(found.server.run)
        try:
            yield found
        finally:
            until(lambda: found.uvicorn.started, "server")
            found.uvicorn.should_exit = True
            running.result(PATIENCE)


def ends(connection: socket.socket) -> bytes:
    """What comes until the other side closes. Raises TimeoutError."""
    came = b""
    try:
        while chunk := connection.recv(65536):
            came += chunk
    except ConnectionResetError:
        pass
    return came


class TestSlowClients:
    @pytest.fixture(autouse=True)
    def _short(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("HEADERS", "BODY", "STALLED"):
            monkeypatch.setattr(connections, name, SHORT)

    def test_what_is_never_sent_is_not_waited_for(self, app: lowq.Lowq, caplog: pytest.LogCaptureFixture) -> None:
        requests: list[bytes] = [
            b"",
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

    def test_a_reader_who_takes_nothing_is_not_waited_for(
        self, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(connections, "HEADERS", NEVER)  # or a client that stands still is gone before it has asked
        app.queue("Big", 1).push({"id": n, "payload": "x" * 50_000, "delay": 60} for n in range(100))
        with serving(app) as server, server.connect() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            ask = b"GET /api/v1/queues/Big/jobs?limit=1000 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
            connection.sendall(ask * 20)
            # Not that the connection is open, which it is for a moment only.
            until(lambda: server.uvicorn.server_state.total_requests, "a request")
            until(lambda: not server.connections, "end of the connection")

    def test_who_is_served_is_let_be(self, app: lowq.Lowq) -> None:
        """A page that is live sends nothing for long; and what is sent is not held back until the last is confirmed."""

        def opened() -> Stream | None:
            try:
                return Stream(server.url)
            except (http.client.HTTPException, ConnectionError):  # a client that stood still before it asked
                return None

        with serving(app) as server:
            stream = until(opened, "a stream")
            assert stream is not None
            with stream:
                named = [stream.event()[0] for _ in range(2)]  # the second one is seconds later
                assert named == ["figures", "figures"]
                (accepted,) = server.connections
                sending = accepted.transport.get_extra_info("socket")
                assert sending.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    def test_who_sends_nothing_makes_room_for_others(
        self, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(connections, "HEADERS", NEVER)  # or the first ones go before the last one comes
        monkeypatch.setattr(connections, "BODY", NEVER)
        for files, said in ((1024, []), (serve.OTHER_FILES + 5, [(5, 256, serve.OTHER_FILES + 5)])):
            monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, 4096))
            caplog.clear()
            with ExitStack() as stack, serving(app, max_connections=256 if said else 5) as server:
                first = [stack.enter_context(server.connect()) for _ in range(5)]
                for connection, sent in zip(first, (b"", b"GET / HT", UPLOAD, b"", b""), strict=True):
                    connection.sendall(sent)
                until(lambda server=server: len(server.connections) == 5, "connections")  # type: ignore[misc]
                for oldest in first:
                    stack.enter_context(server.connect())
                    assert ends(oldest) == b""
                assert get(server.url, "/static/icon.svg")[0] == 200
            assert [record.args for record in caplog.records if record.name == "lowq_web.serve"] == said

    def test_a_client_with_all_connections_open_keeps_no_probe_from_its_answer(
        self, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(connections, "HEADERS", NEVER)
        with ExitStack() as stack, serving(app) as server:
            for _ in range(connections.CONNECTIONS):
                stack.enter_context(server.connect())
            until(lambda: len(server.connections) == connections.CONNECTIONS, "connections")
            probes: list[int] = []
            for _ in range(48):
                probes.append(get(server.url, "/healthz")[0])
                stack.enter_context(server.connect())  # it opens another for each that it loses
            assert probes == [200] * 48

    def test_beyond_the_bound_only_health_is_answered(self, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch) -> None:
        """All connections have requests that are being answered."""
        monkeypatch.setattr(live, "LIFETIME", 3600)
        monkeypatch.setattr(connections, "SPARE", 2)
        monkeypatch.setattr(connections, "HEADERS", NEVER)
        with ExitStack() as stack, serving(app, max_connections=3) as server:
            streams = [stack.enter_context(Stream(server.url)) for _ in range(3)]
            assert [stream.event()[0] for stream in streams] == ["figures"] * 3
            for _ in range(3):
                assert [get(server.url, path)[0] for path in ("/healthz", "/", "/nodes")] == [200, 503, 503]
            # Those beyond the bound make room, too.
            for _ in range(5):
                stack.enter_context(server.connect())
            assert get(server.url, "/healthz")[0] == 200
            assert [stream.event()[0] for stream in streams] == ["figures"] * 3


def test_a_proxy_that_names_this_machine_makes_nobody_its_local_user(app: lowq.Lowq) -> None:
    """nginx with its defaults: HTTP/1.0, and the address that it connects to in Host. The address is that of --bind."""
    app.registrations.enter("Orders", 1)
    proxied = "X-Forwarded-For: 203.0.113.7"
    with serving(app) as server:
        for host in ("127.0.0.1", "127.0.0.1:8080", "localhost", "[::1]"):
            for version, marks, status in (
                ("1.0", [proxied], 403), ("1.0", [], 403), ("1.1", [proxied], 403), ("1.1", ["Via: 1.1 front"], 403),
                ("1.1", [], 303),
            ):  # fmt: skip
                with case(host, version, marks), server.connect() as connection:
                    lines = [f"POST /queues/Orders/pause HTTP/{version}", f"Host: {host}", *marks, "Connection: close",
                             "Sec-Fetch-Site: same-origin", "Content-Length: 0", "", ""]  # fmt: skip
                    connection.sendall("\r\n".join(lines).encode())
                    assert ends(connection).split(b" ")[1] == str(status).encode()
                    assert app.queue("Orders").stats().paused is (status == 303)
                    app.queue("Orders").resume()


def test_it_listens_on_the_address_of_one_link(app: lowq.Lowq) -> None:
    """fe80::1%eth0: an address, and the interface that it counts on."""
    with pytest.raises(lowq.ConfigError, match=r"can't listen on fe80::1%no-such-one port 0"):
        Server(app, "fe80::1%no-such-one", 0, no_auth=True)
    found = Path("/proc/net/if_inet6")
    for line in found.read_text().splitlines() if found.exists() else ():
        raw, _, _, scope, _, interface = line.split()
        if scope == "20":  # of one link
            address = str(ipaddress.IPv6Address(bytes.fromhex(raw)))
            zoned = f"{address}%{interface}"
            with (
                case(zoned),
                serving(app, host=zoned, no_auth=True) as server,
                socket.create_connection((zoned, urlsplit(server.url).port or 0), PATIENCE) as connection,
            ):
                connection.sendall(f"GET / HTTP/1.0\r\nHost: [{address}]\r\n\r\n".encode())
                assert b" 200 OK" in ends(connection)


def test_streams_end_with_the_server(app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not cut off, and it does not wait for the end of their lifetime, nor for the next snapshot."""
    for module, name in ((serve, "GRACE"), (live, "LIFETIME"), (stats_cache, "INTERVAL")):
        monkeypatch.setattr(module, name, 3600)
    with ExitStack() as stack:
        with serving(app) as server:
            streams = [stack.enter_context(Stream(server.url)) for _ in range(3)]
            assert [stream.event()[0] for stream in streams] == ["figures"] * 3
        assert [stream.event()[0] for stream in streams] == ["end"] * 3


#: Serves; gets a signal while its event loop is being made, or once it serves; and counts the calls of its own handler.
SIGNALLED = """
import asyncio, os, signal
import lowq, uvicorn
from lowq_web.serve import Server

calls, main_loop = [], uvicorn.Server.main_loop

class Loop(asyncio.SelectorEventLoop):
    def __init__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        super().__init__()

async def signalled(server):
    os.kill(os.getpid(), signal.SIGTERM)
    await main_loop(server)

signal.signal(signal.SIGTERM, lambda *_: calls.append(1))
{patch}
Server(lowq.Lowq(redis_url="memory://signalled"), "127.0.0.1", 0).run()
print(len(calls))
"""


#: The default application in an environment that has half of a login; the other half comes later.
HALF = """
import os
import lowq
import lowq_web
from starlette.testclient import TestClient

for enter in (lambda client: client.get("/"), TestClient.__enter__):  # a request, and a server that starts
    try:
        enter(TestClient(lowq_web.app))
    except lowq.ConfigError as error:
        print(error)
os.environ["LOWQ_WEB_PASSWORD"] = "s3cret of ann"
with TestClient(lowq_web.app) as client:
    print(client.get("/").status_code, client.get("/healthz").status_code)
"""


def test_the_default_application_reads_its_settings_when_it_is_used() -> None:
    """Who imports the package for `create_app` may have others."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("LOWQ_")}
    ran = subprocess.run(
        [sys.executable, "-c", HALF], capture_output=True, text=True, timeout=PATIENCE, check=False,
        env={**clean, "LOWQ_REDIS_URL": "memory://half", "LOWQ_WEB_USER": "ann"},
    )  # fmt: skip
    refused = "LOWQ_WEB_USER and LOWQ_WEB_PASSWORD go together: one of them is not set\n"
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, refused * 2 + "401 200\n", "")


def test_whoever_runs_it_gets_a_signal_once_and_no_traceback() -> None:
    for patch in ("uvicorn.Config.get_loop_factory = lambda self: Loop", "uvicorn.Server.main_loop = signalled"):
        with case(patch):
            program = [sys.executable, "-c", SIGNALLED.format(patch=patch)]
            ran = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE, check=False)
            assert (ran.returncode, ran.stdout, ran.stderr) == (0, "1\n", "")
