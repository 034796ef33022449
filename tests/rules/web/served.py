"""The dashboard over real connections: what only shows when somebody is at the other end of one."""

import http.client
import json
import socket
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self
from urllib.parse import urlsplit

import uvicorn
from starlette.types import ASGIApp

from tests.waiting import PATIENCE, until


@contextmanager
def served(application: ASGIApp) -> Iterator[str]:
    """The application on a free port, in a thread; its address."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(application, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    until(lambda: server.started, "server")
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()


def get(
    address: str, path: str, timeout: float = PATIENCE, method: str = "GET", auth: tuple[str, str] | None = None
) -> tuple[int, bytes]:
    """Status and body. Raises TimeoutError."""
    login = {} if auth is None else {"authorization": f"Basic {b64encode(':'.join(auth).encode()).decode()}"}
    with connected(address, timeout) as connection:
        connection.request(method, path, headers=login)
        answer = connection.getresponse()
        return answer.status, answer.read()


@contextmanager
def connected(address: str, timeout: float = PATIENCE) -> Iterator[http.client.HTTPConnection]:
    """A connection that is closed at the end."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=timeout)
    try:
        yield connection
    finally:
        connection.close()


class Stream:
    """An open /live."""

    def __init__(self, address: str, timeout: float = PATIENCE) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=timeout)
        try:
            self._connection.request("GET", "/live")
            self._answer = self._connection.getresponse()
        except BaseException:
            self._connection.close()
            raise
        self.status = self._answer.status

    def event(self) -> tuple[str, Any]:
        """The next one: its name and its data. At the end of the stream its name is "end"."""
        name = ""
        for raw in iter(self._answer.readline, b""):
            field, _, value = raw.decode().rstrip("\n").partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                return name, json.loads(value)
        return "end", None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # The answer holds the socket, too.
        self._answer.close()
        self._connection.close()
