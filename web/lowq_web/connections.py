"""Limits for connections to the dashboard's own server: their number, and how long each may keep it waiting.

::

    accepted --too many?--> the oldest without a whole request is closed; if there is none, this one gets /healthz only,
        |                   and 503 for all else
        +--> a request's first byte .. its headers are whole     HEADERS seconds      (the first one: from the start)
        |    its headers .. its body is whole                    BODY seconds
        |    an answer that its reader does not take             STALLED seconds      (without taking a byte of it)
        |    between two requests                                uvicorn's keep-alive, 5 seconds
        +--> closed

So a client that opens connections and sends nothing keeps nobody else out, and what asks whether the process lives is
answered in any case. A proxy or another server has limits of its own.
"""

import asyncio
import logging
import time
from typing import Any

import h11
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from lowq_web.security import path_of

log = logging.getLogger(__name__)

#: Connections at a time, by default; and those for /healthz when all of these have requests that are being answered.
CONNECTIONS, SPARE = 256, 32
#: Seconds that the headers of a request may take, and its body.
HEADERS, BODY = 10.0, 30.0
#: Seconds that an answer may wait for a reader who takes none of it.
STALLED = 30.0

_TOO_MANY = "Too many connections; try again in a moment\n"
_REFUSAL = (
    "HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
    f"retry-after: 5\r\ncontent-length: {len(_TOO_MANY)}\r\n\r\n{_TOO_MANY}"
).encode()


def bounded(most: int) -> type[asyncio.Protocol]:
    """The protocol of a server that has up to so many connections."""
    return type("Bounded", (_Bounded,), {"most": most})


class _Bounded(H11Protocol):
    """uvicorn's protocol, with time limits for the client. It belongs to the event loop."""

    most = CONNECTIONS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.accepted_at = time.monotonic()
        self.awaited = _Awaited(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]  # uvicorn wants the narrower type
        if len(self.connections) > self.most and not self.make_room():
            if len(self.connections) > self.most + SPARE:
                self.transport.write(_REFUSAL)
                self.transport.close()
                return
            self.app = _health_only(self.app)
        self.awaited.update()

    def make_room(self) -> bool:
        """Closes the oldest other connection without a whole request; whether there was one."""
        others: set[Any] = self.connections
        idle = [other for other in others if other is not self and not other.is_answered()]
        if not idle:
            return False
        min(idle, key=lambda other: other.accepted_at).transport.abort()
        return True

    def is_answered(self) -> bool:
        """Whether a whole request was sent whose answer is not complete, or not taken yet."""
        if self.transport.is_closing() or self.transport.get_write_buffer_size():
            return True
        cycle: Any = self.cycle  # None before the first request
        return bool(cycle and not cycle.response_complete) and self.conn.their_state is not h11.SEND_BODY

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.awaited.update()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.awaited.update()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.awaited.update()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.awaited.update()

    def connection_lost(self, exc: Exception | None) -> None:
        self.awaited.stop()
        super().connection_lost(exc)


def _health_only(app: Any) -> ASGIApp:
    """The application of a connection beyond the bound."""
    too_many = PlainTextResponse(_TOO_MANY, 503, {"connection": "close", "retry-after": "5"})

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await (app if path_of(scope) == "/healthz" else too_many)(scope, receive, send)

    return answer


class _Awaited:
    """What the client of a connection has to do next, and the timer that ends the wait for it.

    An object of its own, as uvicorn's protocol may come to use any private name.
    """

    def __init__(self, protocol: _Bounded) -> None:
        self._protocol = protocol
        self._timer: asyncio.TimerHandle | None = None
        #: A request, and the part of it that is awaited. None: nothing is, or uvicorn itself limits the wait.
        self._what: tuple[object, str] | None = None

    def update(self) -> None:
        """Restarts the timer when something else is awaited than before. A client that sends byte by byte gets no more
        time."""
        what = self._now()
        if what == self._what:
            return
        self.stop()
        if what is not None:
            self._what = what
            self._start(what)

    def stop(self) -> None:
        """Stops the timer."""
        self._what = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self, what: tuple[object, str]) -> None:
        seconds = {"headers": HEADERS, "body": BODY, "reader": STALLED}[what[1]]
        unsent = self._protocol.transport.get_write_buffer_size()
        self._timer = self._protocol.loop.call_later(seconds, self._overdue, unsent)

    def _now(self) -> tuple[object, str] | None:
        """The latest request, and the part of it, or of its answer, that is awaited of the client."""
        protocol = self._protocol
        if protocol.transport.get_write_buffer_size():
            return protocol.cycle, "reader"
        if protocol.conn.their_state is h11.SEND_BODY:
            return protocol.cycle, "body"
        if protocol.conn.their_state is h11.IDLE and protocol.timeout_keep_alive_task is None:
            return protocol.cycle, "headers"
        return None

    def _overdue(self, unsent: int) -> None:
        if self._what is not None and self._what[1] == "reader":
            left = self._protocol.transport.get_write_buffer_size()
            if left == 0:  # there is no event for the last byte
                self.stop()
                self.update()
                return
            if left < unsent:
                self._start(self._what)
                return
        # What is unsent is of no use to anybody, and `close` would wait until it is sent.
        self._protocol.transport.abort()
