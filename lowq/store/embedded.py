"""The embedded store; and the same on a local port, so that a second terminal can push into it and look.

fakeredis has a server of its own, but not one that a client of a real Redis gets along with: it knows no INFO, takes
no scripts that begin with ``#!lua``, and hangs up after every error. This one speaks just enough of RESP2.
"""

import hashlib
import selectors
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lowq.errors import ConfigError
from lowq.store.connection import pack
from lowq.store.pool import Pool

#: Seconds after which messages of a subscription are looked for.
_PUSH_INTERVAL = 0.01
#: The reply to INFO, which clients of a real server ask for first.
_INFO = b"# Server\r\nredis_version:7.0.0\r\nredis_mode:standalone\r\n"


_stores: dict[str, Any] = {}


def new_store() -> Any:
    """An empty embedded store.

    Raises:
        ConfigError: fakeredis is not installed.
    """
    try:
        import lupa  # noqa: F401 - without it fakeredis knows no scripts
        from fakeredis import FakeRedisConnection, FakeServer  # noqa: F401 - the connection is missing before 2.35
    except ImportError as error:
        raise ConfigError(
            f"the embedded store needs fakeredis with lua ({error}); install it: pip install 'lowq[embedded]'"
        ) from None
    return FakeServer(version=(7, 0))


def memory_store(url: str) -> Any:
    """The store of a ``memory://name`` URL, one per name and process; ``memory://`` is a new one each time."""
    name = url.removeprefix("memory://")
    if not name:
        return new_store()
    return _stores.get(name) or _stores.setdefault(name, new_store())  # several threads may be the first


def memory_pool(store: Any, size: int, timeout: float) -> Pool:
    """Connections to an embedded store."""
    from fakeredis import FakeRedisConnection

    return Pool(lambda: FakeRedisConnection(server=store, protocol=2), size, timeout, shebang=False)


# --- on a local port ---


@contextmanager
def serving(store: Any) -> Iterator[str]:
    """The store listens on a free local port for the time of the block; the value is its URL."""
    with _Server(store) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, name="lowq-store")
        thread.start()
        try:
            yield f"redis://127.0.0.1:{server.server_address[1]}/0"
        finally:
            server.shutdown()
            thread.join()
            server.hang_up()


class _Server(socketserver.ThreadingTCPServer):
    # No private names here: a later version of the base class may have the same.
    daemon_threads = False  # so that closing the server waits for them

    def __init__(self, store: Any) -> None:
        self.pool = memory_pool(store, 1, 1.0)
        self.connected: set[Any] = set()
        #: SHA1 of a script as its client knows it -> as the store knows it.
        self.scripts: dict[bytes, bytes] = {}
        super().__init__(("127.0.0.1", 0), _serve_connection)  # type: ignore[arg-type]  # it is only called

    # Called by the thread that accepts, so no connection is missed by `hang_up`.
    def process_request(self, request: Any, client_address: Any) -> None:
        self.connected.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self.connected.discard(request)

    def hang_up(self) -> None:
        """Ends all connections; their threads notice."""
        for request in list(self.connected):
            try:
                request.shutdown(2)
            except OSError:
                pass  # it ended by itself

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores a client that went away in the middle."""


def _serve_connection(request: socket.socket, _address: Any, server: _Server) -> None:
    # A connection of its own: the selected database and the subscriptions belong to the client.
    fake = server.pool.connect()
    fake.connect()
    try:
        with selectors.PollSelector() as selector:
            selector.register(request, selectors.EVENT_READ)
            _Connection(request, selector, server, fake).serve()
    finally:
        fake.disconnect()


class _Connection:
    """One client, for as long as it stays."""

    def __init__(self, request: socket.socket, selector: selectors.BaseSelector, server: _Server, fake: Any) -> None:
        self._request = request
        self._selector = selector
        self._server = server
        self._fake = fake

    def serve(self) -> None:
        """Answers until the client hangs up."""
        buffer = bytearray()
        subscribed = False
        while True:
            if subscribed and not self._selector.select(_PUSH_INTERVAL):
                self._send(self._pending())
                continue
            data = self._request.recv(2**18)
            if not data:
                return
            buffer += data
            answers = []
            while (command := take_command(buffer)) is not None:
                if not command:
                    continue
                subscribed = subscribed or command[0].upper().endswith(b"SUBSCRIBE")
                answers += self._answer(command)
            self._send(answers)

    def _send(self, answers: list[bytes]) -> None:
        if answers:
            self._request.sendall(b"".join(answers))

    def _answer(self, command: list[bytes]) -> list[bytes]:
        name = command[0].upper()
        if name == b"INFO":
            return [encode(_INFO)]
        if name == b"SCRIPT" and len(command) == 3 and command[2].startswith(b"#!"):
            theirs = hashlib.sha1(command[2], usedforsecurity=False).hexdigest().encode()
            command[2] = command[2].partition(b"\n")[2]
            self._server.scripts[theirs] = hashlib.sha1(command[2], usedforsecurity=False).hexdigest().encode()
            self._ask(command)
            return [encode(theirs)]
        if name == b"EVALSHA" and len(command) > 1:
            command[1] = self._server.scripts.get(command[1], command[1])
        return [self._ask(command), *self._pending()]

    def _ask(self, command: list[bytes]) -> bytes:
        self._fake.send_packed_command([pack(tuple(command))], check_health=False)
        return self._read()

    def _pending(self) -> list[bytes]:
        answers = []
        while self._fake.can_read(0):
            answers.append(self._read())
        return answers

    def _read(self) -> bytes:
        try:
            return encode(self._fake.read_response(disconnect_on_error=False))
        except Exception as error:
            return _encode_error(error)


def take_command(buffer: bytearray) -> list[bytes] | None:
    """Takes the first command of a client off the buffer; None: it is not complete.

    Raises:
        ValueError: that is no array of bulk strings.
    """
    at = buffer.find(b"\r\n")
    if at < 0:
        return None
    if not buffer.startswith(b"*"):
        raise ValueError("not a command in the form of RESP")
    count, at = int(buffer[1:at]), at + 2
    parts = []
    for _ in range(count):
        end = buffer.find(b"\r\n", at)
        if end < 0:
            return None
        start = end + 2
        after = start + int(buffer[at + 1 : end])
        if len(buffer) < after + 2:
            return None
        parts.append(bytes(buffer[start:after]))
        at = after + 2
    del buffer[:at]
    return parts


def encode(reply: Any) -> bytes:
    """A reply of fakeredis in RESP2."""
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, bool | int):
        return b":%d\r\n" % reply
    if isinstance(reply, Exception):
        return _encode_error(reply)
    if isinstance(reply, list | tuple | set):
        return b"*%d\r\n" % len(reply) + b"".join(map(encode, reply))
    if isinstance(reply, dict):
        return encode([item for pair in reply.items() for item in pair])
    data = reply if isinstance(reply, bytes) else str(reply).encode()
    return b"$%d\r\n%s\r\n" % (len(data), data)


def _encode_error(error: Exception) -> bytes:
    text = " ".join(str(error).split())
    code = text.partition(" ")[0]
    if type(error).__name__ == "NoScriptError":
        text = f"NOSCRIPT {text}"  # redis-py took that word off
    elif not code.isupper():
        text = f"ERR {text}"
    return f"-{text}\r\n".encode()
