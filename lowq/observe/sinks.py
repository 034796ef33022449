"""Where figures are sent: Graphite and StatsD.

Whoever has a line puts it into a bounded buffer and goes on. A daemon thread of the sink's own connects, sends, and
connects anew when the other side is gone. While it is away lines gather; when the buffer is full the oldest are dropped
and counted. When no line has come for a while the thread ends, and the next one starts another.
"""

import re
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Literal, NamedTuple

from lowq.logs import describe, get_log

log = get_log("lowq.observe")

#: Lines that are kept while the other side is away.
MAX_LINES = 20_000
#: Bytes that are sent at once over TCP, and in one datagram: what goes through an Ethernet in one piece.
CHUNK_BYTES = 64 * 1024
DATAGRAM_BYTES = 1400
#: Seconds that connecting, or sending a chunk, may take.
TIMEOUT = 5.0
#: Seconds until the next attempt, at first and at most.
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 5.0
#: Seconds after which the address of a UDP service is looked up anew: nobody says that it has moved.
LOOKUP_SECONDS = 30.0
#: Seconds without a line after which the connection is closed and the thread ends.
IDLE_SECONDS = 10.0


Transport = Literal["tcp", "udp"]


class Address(NamedTuple):
    """Where something listens, and how it is spoken to."""

    transport: Transport
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.transport}://{host}:{self.port}"


def parse_address(text: str, transports: tuple[Transport, ...]) -> Address:
    """The address that a text is. Without a scheme the first of the transports is meant.

    Raises:
        ValueError: it is none; the message says what to write.
    """
    schemes = "".join(f" or {transport}://HOST:PORT" for transport in transports[1:])
    found = re.fullmatch(r"(?:(\w+)://)?(?:\[([0-9A-Fa-f:.]+(?:%\w+)?)\]|([^\s:/\[\]@]+)):([0-9]{1,5})", text, re.ASCII)
    if found is None:
        raise ValueError(f"it is no address; write HOST:PORT{schemes}")
    scheme, in_brackets, plain, port = found.groups()
    transport = next((one for one in transports if one == (scheme or transports[0])), None)
    if transport is None:
        raise ValueError(f"it can't be reached by {scheme}; write HOST:PORT{schemes}")
    if not 1 <= int(port) <= 65535:
        raise ValueError("a port is a number from 1 to 65535")
    return Address(transport, in_brackets or plain, int(port))


class Sink:
    """Sends lines to one address. Safe for threads. ``name``: what is there, for people."""

    def __init__(self, name: str, address: Address, *, max_lines: int = MAX_LINES, timeout: float = TIMEOUT) -> None:
        self._name = f"{name} at {address}"
        self._address = address
        self._max_lines = max_lines
        self._timeout = timeout
        #: Lines that the buffer had no room for.
        self.dropped = 0
        #: Guards the four below, and `dropped`.
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._thread: threading.Thread | None = None
        self._is_sending = False
        self._closed = False
        #: Since when nothing gets through, monotonic, and what had been dropped by then; None: it does. Written by the
        #: thread.
        self._away: tuple[float, int] | None = None
        # What follows belongs to the thread.
        self._socket: socket.socket | None = None
        self._target: tuple[object, ...] | None = None
        self._looked_up_at = 0.0
        #: What was sent last over this connection. If the other side had closed it by then, nobody has got that.
        self._sent: list[bytes] = []

    def put(self, lines: Iterable[bytes]) -> None:
        """Lines without a line break, to be sent in this order."""
        with self._changed:
            self._lines.extend(lines)
            self._drop_oldest()
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._run, name="lowq-metrics-send", daemon=True)
                with suppress(RuntimeError):  # no more threads: the next line tries again
                    thread.start()
                    self._thread = thread
            self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Waits until all lines are sent, for so many seconds at most; not at all for one that is known to be away.
        Returns whether they are.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_idle() or self._away is not None, timeout)
            return self._is_idle()

    def _is_idle(self) -> bool:
        return not self._lines and not self._is_sending

    def close(self) -> None:
        """Sends nothing more."""
        with self._changed:
            self._closed = True
            self._lines.clear()
            self._changed.notify_all()

    def _drop_oldest(self) -> None:
        excess = len(self._lines) - self._max_lines
        for _ in range(excess):
            self._lines.popleft()
        self.dropped += max(excess, 0)

    # --- the thread ---

    def _run(self) -> None:
        pause = FIRST_PAUSE
        while chunk := self._next_chunk():
            try:
                self._send(chunk)
            except Exception as error:  # OSError; UnicodeError, of a host name that is none
                self._disconnect()
                self._put_back(chunk)
                self._note_away(error)
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                pause = FIRST_PAUSE
                self._note_back()

    def _next_chunk(self) -> list[bytes]:
        """The next lines to be sent, once there are any; none: the thread is to end."""
        most = CHUNK_BYTES if self._address.transport == "tcp" else DATAGRAM_BYTES
        chunk: list[bytes] = []
        with self._changed:
            self._is_sending = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._lines or self._closed, IDLE_SECONDS)
            size = 0
            while self._lines and (not chunk or size + len(self._lines[0]) < most):
                size += len(self._lines[0]) + 1
                chunk.append(self._lines.popleft())
            self._is_sending = bool(chunk)
            if not chunk:
                self._disconnect()
                self._sent = []
                self._thread = None
        return chunk

    def _put_back(self, chunk: list[bytes]) -> None:
        """They are sent first, once that is possible. To Graphite a line may be sent twice: it says the same."""
        before, self._sent = self._sent, []
        with self._changed:
            if not self._closed:
                self._lines.extendleft(reversed(before + chunk))
                self._drop_oldest()

    def _send(self, chunk: list[bytes]) -> None:
        if self._address.transport == "udp":
            self._send_datagram(chunk)
            return
        fresh = list(chunk)
        if self._socket is not None and self._is_closed_by_peer(self._socket):
            self._disconnect()
            chunk[:0], self._sent = self._sent, []
        if self._socket is None:
            self._socket = socket.create_connection(self._address[1:], self._timeout)
        self._socket.sendall(b"".join(line + b"\n" for line in chunk))
        self._sent = fresh

    def _send_datagram(self, chunk: list[bytes]) -> None:
        now = time.monotonic()
        if self._socket is None or now - self._looked_up_at > LOOKUP_SECONDS:
            self._disconnect()
            family, kind, protocol, _, self._target = socket.getaddrinfo(
                self._address.host, self._address.port, type=socket.SOCK_DGRAM
            )[0]
            # It is not connected: else the answer to one datagram, that nobody listens, would refuse the next.
            self._socket = socket.socket(family, kind, protocol)
            self._socket.settimeout(self._timeout)
            self._looked_up_at = now
        assert self._target is not None
        self._socket.sendto(b"\n".join(chunk) + b"\n", self._target)

    def _is_closed_by_peer(self, connection: socket.socket) -> bool:
        connection.settimeout(0.0)
        try:
            return connection.recv(4096) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            connection.settimeout(self._timeout)

    def _disconnect(self) -> None:
        connection, self._socket = self._socket, None
        if connection is not None:
            with suppress(OSError):
                connection.close()

    def _note_away(self, error: Exception) -> None:
        if self._away is None:
            with self._changed:
                self._away = time.monotonic(), self.dropped
                self._changed.notify_all()
            log.warning(
                "%s can't be reached: %s; figures are kept meanwhile, %d lines of them at most", self._name,
                describe(error, str), self._max_lines, extra={"event": "metrics_away"},
            )  # fmt: skip

    def _note_back(self) -> None:
        # Only when it has got everything: one that hangs takes as much as the buffers of its system hold.
        if self._away is not None and not self._lines and not self._closed:
            (since, dropped), self._away = self._away, None
            seconds = time.monotonic() - since
            log.warning(
                "%s is back after %.1f s; %d lines were dropped", self._name, seconds, self.dropped - dropped,
                extra={"event": "metrics_back", "seconds": seconds},
            )  # fmt: skip
