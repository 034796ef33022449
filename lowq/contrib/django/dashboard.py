"""The dashboard behind a Django view, under WSGI and ASGI alike.

::

    request --> Django: session, user, permissions --> the event loop of this process: lowq_web --> the answer, whole

lowq_web is an ASGI application, with tasks that outlive a request. So each process of the web server has one event loop
for it, in a thread that its first request starts. A view waits for the whole answer. Nothing is streamed, as a stream
would keep a worker of gunicorn, or a connection to the database, busy: live pages ask again every two seconds.

If the process ends, its event loop ends with it at any line: what the dashboard does is in Redis, done or not.
"""

import asyncio
import os
import threading
from collections.abc import MutableMapping
from functools import cache
from typing import Any, Literal

from django.core.handlers.wsgi import WSGIRequest
from django.http import HttpRequest, HttpResponse

import lowq
from lowq.clock import Lock
from lowq.errors import ConfigError

Role = Literal["read", "admin"]

#: Bytes of a body, at most, that are read: one more than the dashboard takes, which refuses it.
MAX_BODY = 4 * 2**20 + 1


class _Server:
    """lowq_web on an event loop in a thread.

    Raises:
        ConfigError: threads of this process are greenlets (gevent, eventlet). An event loop that runs in one runs for
        all of them, and Django refuses each query to a database beside a loop that runs.
    """

    def __init__(self) -> None:
        import lowq_web

        async def user_of(request: Any) -> lowq_web.User:
            return lowq_web.User(*request.scope["lowq_user"])

        self._app = lowq_web.create_app(lowq.app, auth=user_of)
        self._loop = asyncio.new_event_loop()
        here = threading.get_native_id()

        def run() -> None:
            if threading.get_native_id() != here:
                self._loop.run_forever()

        thread = threading.Thread(target=run, name="lowq-dashboard", daemon=True)
        thread.start()
        if thread.native_id == here:
            self._loop.close()
            raise ConfigError(
                "the dashboard needs threads, which gevent and eventlet replace: start `manage.py lowq web` beside the "
                "web server, or that with threads (gunicorn --threads 4)"
            )

    def answer(self, scope: dict[str, Any], body: bytes) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """The status, headers and body of the answer. Waits for it in the calling thread."""
        return asyncio.run_coroutine_threadsafe(self._answer(scope, body), self._loop).result()

    async def _answer(self, scope: dict[str, Any], body: bytes) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        requests = [{"type": "http.request", "body": body, "more_body": False}]
        started: MutableMapping[str, Any] = {}
        parts: list[bytes] = []

        async def receive() -> MutableMapping[str, Any]:
            if not requests:
                await asyncio.Event().wait()  # nobody tells when the client goes: the answer is short
            return requests.pop()

        async def send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                started.update(message)
            else:
                parts.append(message.get("body", b""))

        await self._app(scope, receive, send)
        return started["status"], list(started["headers"]), b"".join(parts)


@cache
def _server(pid: int) -> _Server:  # noqa: ARG001  # a forked child has no thread of its parent's
    return _Server()


#: Held while a server is looked up: the first requests may come together.
_looking_up = Lock()


def answer(request: HttpRequest, path: str, user: str, role: Role) -> HttpResponse:
    """The dashboard's answer to a request of this user. ``path``: the part of its path below the dashboard."""
    length = str(request.META.get("CONTENT_LENGTH") or "0")
    # What is longer is refused by its length.
    body = request.read(MAX_BODY) if length.isdecimal() and int(length) <= MAX_BODY else b""
    try:
        with _looking_up:
            server = _server(os.getpid())
    except ConfigError as error:
        return HttpResponse(f"{error}\n", status=501, content_type="text/plain")
    status, headers, content = server.answer(_scope_of(request, path, user, role), body)
    response = HttpResponse(content, status=status)
    del response["Content-Type"]
    for raw_name, raw_value in headers:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        if name == "set-cookie":
            response.cookies.load(value)
        elif name != "content-length":
            response[name] = value
    return response


def _scope_of(request: HttpRequest, path: str, user: str, role: Role) -> dict[str, Any]:
    """The request as ASGI has it. Host and scheme are what Django takes them for, behind proxies too."""
    host = request.get_host()
    headers = {name.lower(): value for name, value in request.headers.items()} | {"host": host}
    encoding = "latin-1" if isinstance(request, WSGIRequest) else "utf-8"  # which Django had decoded it with
    address = request.META.get("REMOTE_ADDR")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.scheme,
        "path": request.path,
        "root_path": request.path.removesuffix(path).rstrip("/"),
        "query_string": request.META.get("QUERY_STRING", "").encode(encoding),
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()],
        "client": (address, 0) if address else None,
        "server": (host, None),
        "lowq_user": (user, role),
        "lowq_polled": True,
    }
