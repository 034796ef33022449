"""A server that keeps the lines that it gets, as Graphite would, and can be as bad as any."""

import socket
import threading
from contextlib import suppress
from typing import Self


class Receiver:
    """Listens on a port of 127.0.0.1, once it is entered. Until then the port is taken, by nobody else, and refuses.
    ``reads``: otherwise it accepts, and that is all.
    """

    def __init__(self, *, reads: bool = True) -> None:
        self._server = socket.socket()
        if not reads:
            self._server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._server.bind(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.data = b""
        self.connections: list[socket.socket] = []
        self._reads = reads

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            self.connections.append(connection)
            if self._reads:
                threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        try:
            while data := connection.recv(65536):
                self.data += data
        except OSError:
            pass

    @property
    def lines(self) -> list[bytes]:
        return self.data.split(b"\n")[:-1]

    def drop_connections(self) -> None:
        for connection in self.connections:
            connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self.connections.clear()

    def close(self) -> None:
        with suppress(OSError):  # it never listened
            self._server.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._server.close()
        self.drop_connections()

    def __enter__(self) -> Self:
        self._server.listen()
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
