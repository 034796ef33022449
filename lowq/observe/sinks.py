"""Receivers of figures: the address of Graphite or StatsD, and a sink that sends lines there.

Lines go through a `Buffer`, whose thread connects, sends, and connects anew when the receiver is gone. While it is away
lines gather; when the buffer is full the oldest are dropped and counted.
"""

import re
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal, NamedTuple

from lowq.logs import describe, get_log
from lowq.observe.buffer import Buffer

log = get_log("lowq.observe")

#: Lines that are kept while the other side is away.
MAX_LINES = 20_000
#: Bytes of a datagram: what goes through an Ethernet in one piece.
DATAGRAM_BYTES = 1400
#: Seconds that connecting, or sending, may take.
TIMEOUT = 5.0
#: Seconds until the next attempt, at first and at most.
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 5.0
#: Seconds after which the address of a UDP service is looked up anew: nobody says that it has moved.
LOOKUP_SECONDS = 30.0
Transport = Literal["tcp", "udp"]


class Address(NamedTuple):
    """The address and the transport of a receiver."""

    transport: Transport
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.transport}://{host}:{self.port}"


def parse_address(text: str, transports: tuple[Transport, ...]) -> Address:
    """Reads an address. Without a scheme its transport is the first one.

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
    """Sends lines to one address. Safe for threads. ``name``: of the receiver, for people."""

    def __init__(self, name: str, address: Address, *, max_lines: int = MAX_LINES, timeout: float = TIMEOUT) -> None:
        self._name = f"{name} at {address}"
        self._address = address
        self._max_lines = max_lines
        self._timeout = timeout
        self._buffer: Buffer[list[bytes]] = Buffer("lowq-metrics-send", max_lines, self._handle, self._disconnect)
        # What follows belongs to the thread.
        #: Since when the receiver can't be reached, monotonic, and `dropped` then; None: it can.
        self._away: tuple[float, int] | None = None
        self._pause = FIRST_PAUSE
        self._socket: socket.socket | None = None
        self._target: tuple[object, ...] | None = None
        self._looked_up_at = 0.0
        #: The lines that were sent last over this connection: lost, if the receiver had closed it by then.
        self._sent: list[bytes] = []

    @property
    def dropped(self) -> int:
        """Lines that the buffer had no room for."""
        return self._buffer.dropped

    def put(self, lines: Sequence[bytes]) -> None:
        """Lines without a line break, to be sent in this order."""
        self._buffer.put(list(lines))

    def flush(self, timeout: float) -> bool:
        """Waits until all lines are sent, for so many seconds at most; not for a receiver that is known to be away.
        Returns whether they are.
        """
        return self._buffer.flush(timeout, lambda: self._away is not None)

    def close(self) -> None:
        """Sends nothing more."""
        self._buffer.close()

    # --- the thread ---

    def _handle(self, lines: list[bytes]) -> None:
        """Sends lines; what could not be sent is put back, and tried again after a pause."""
        try:
            if self._address.transport == "udp":
                self._send_datagrams(lines)
            else:
                self._send(lines)
        except Exception as error:  # OSError; UnicodeError, of a host name that is none
            before = self._sent  # to Graphite a line may be sent twice: it says the same
            self._disconnect()
            self._buffer.put(before + lines, is_first=True)
            self._note_away(error)
            with self._buffer.changed:
                self._buffer.changed.wait_for(lambda: self._buffer.is_closed, self._pause)
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        else:
            self._pause = FIRST_PAUSE
            self._note_back()

    def _send(self, lines: list[bytes]) -> None:
        if self._socket is not None and self._is_closed_by_peer(self._socket):
            lines[:0] = self._sent
            self._disconnect()
        if self._socket is None:
            self._socket = socket.create_connection(self._address[1:], self._timeout)
        self._socket.sendall(b"".join(line + b"\n" for line in lines))
        self._sent = lines

    def _send_datagrams(self, lines: list[bytes]) -> None:
        """Sends whole lines in each datagram, and removes them from those that are left."""
        while lines:
            count, size = 1, len(lines[0])
            while count < len(lines) and size + len(lines[count]) < DATAGRAM_BYTES - 1:
                size += len(lines[count]) + 1
                count += 1
            self._send_datagram(b"\n".join(lines[:count]) + b"\n")
            del lines[:count]

    def _send_datagram(self, data: bytes) -> None:
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
        self._socket.sendto(data, self._target)

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
        connection, self._socket, self._sent = self._socket, None, []
        if connection is not None:
            with suppress(OSError):
                connection.close()

    def _note_away(self, error: Exception) -> None:
        if self._away is None:
            with self._buffer.changed:
                self._away = time.monotonic(), self.dropped
                self._buffer.changed.notify_all()
            log.warning(
                "%s can't be reached: %s; figures are kept meanwhile, %d lines of them at most", self._name,
                describe(error, str), self._max_lines, extra={"event": "metrics_away"},
            )  # fmt: skip

    def _note_back(self) -> None:
        # Only when it has got everything: one that hangs takes as much as the buffers of its system hold.
        if self._away is not None and not self._buffer.has_waiting() and not self._buffer.is_closed:
            (since, dropped), self._away = self._away, None
            seconds = time.monotonic() - since
            log.warning(
                "%s is back after %.1f s; %d lines were dropped", self._name, seconds, self.dropped - dropped,
                extra={"event": "metrics_back", "seconds": seconds},
            )  # fmt: skip
