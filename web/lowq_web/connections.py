"""Connections to the dashboard's own server: how many there may be, and how long each may keep it waiting.

::

    accepted --too many?--> 503, closed
        |
        +--> a request's first byte .. its headers are whole     HEADERS seconds      (the first one: from the start)
        |    its headers .. its body is whole                    BODY seconds
        |    an answer that its reader does not take             STALLED seconds      (without taking a byte of it)
        |    between two requests                                uvicorn's keep-alive, 5 seconds
        +--> closed

What an application is served by otherwise, a proxy or another server, has bounds of its own.
"""

import asyncio
import logging
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

#: Connections at a time, by default.
CONNECTIONS = 256
#: Seconds that the headers of a request may take, and its body.
HEADERS, BODY = 10.0, 30.0
#: Seconds that an answer may wait for a reader who takes none of it.
STALLED = 30.0

_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
    b"retry-after: 5\r\ncontent-length: 44\r\n\r\nToo many connections; try again in a moment\n"
)


def bounded(most: int) -> type[asyncio.Protocol]:
    """The protocol of a server that has up to so many connections."""
    return type("Bounded", (_Bounded,), {"most": most})


class _Bounded(H11Protocol):
    """uvicorn's protocol with a timer for what is awaited of the other side. It belongs to the event loop."""

    most = CONNECTIONS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        #: What is awaited: of which request, and what of it. None: nothing, or what uvicorn itself bounds.
        self._awaited: tuple[object, str] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]  # uvicorn wants the narrower type
        if len(self.connections) > self.most:
            self.transport.write(_REFUSAL)
            self.transport.close()
            return
        self._await()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._await()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _await(self) -> None:
        """Starts the timer when something else is awaited than before: what comes drop by drop gets no more time."""
        awaited = self._now_awaited()
        if awaited == self._awaited:
            return
        self._stop()
        if awaited is not None:
            self._awaited = awaited
            self._start()

    def _start(self) -> None:
        assert self._awaited is not None
        seconds = {"headers": HEADERS, "body": BODY, "reader": STALLED}[self._awaited[1]]
        self._timer = self.loop.call_later(seconds, self._overdue, self.transport.get_write_buffer_size())

    def _stop(self) -> None:
        self._awaited = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _now_awaited(self) -> tuple[object, str] | None:
        """Of the latest request: what of it, or of its answer, is awaited of the other side."""
        if self.transport.get_write_buffer_size():
            return self.cycle, "reader"
        if self.conn.their_state is h11.SEND_BODY:
            return self.cycle, "body"
        if self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None:
            return self.cycle, "headers"
        return None

    def _overdue(self, unsent: int) -> None:
        if self._awaited is not None and self._awaited[1] == "reader":
            left = self.transport.get_write_buffer_size()
            if left == 0:  # nothing tells when the last of it went
                self._stop()
                self._await()
                return
            if left < unsent:
                self._start()
                return
        # Whatever is there still is of no use to anybody; a `close` would wait until it is taken.
        self.transport.abort()
