"""Compresses answers: a page by a factor of ten.

A stream is compressed piece by piece, and each piece is flushed. Events are left alone. Pages of other sites can't
derive our token from the size of answers: the token comes with a cookie that browsers don't send for them.
"""

import re
import zlib

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lowq_web.threads import Threads

#: Bytes below which it is not worth it; and from which on it is done in a thread, not on the event loop.
LEAST, LARGE = 1000, 100_000
#: Of zlib. Half the time of the highest, for 2 % more bytes.
LEVEL = 5

_TYPES = ("text/html", "text/plain", "application/json")
_GZIP = re.compile(r"(?:^|,)\s*gzip\s*(?:;\s*q=(?!0(?:\.0*)?\s*(?:,|$))[^,]*)?(?:,|$)", re.IGNORECASE)


def accepts_gzip(headers: Headers) -> bool:
    """Whether the client accepts gzip."""
    return _GZIP.search(headers.get("accept-encoding", "")) is not None


class Compress:
    """The middleware."""

    def __init__(self, app: ASGIApp, threads: Threads) -> None:
        self._app = app
        self._threads = threads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "HEAD" and accepts_gzip(Headers(scope=scope)):
            send = _Compressed(send, self._threads)
        await self._app(scope, receive, send)


class _Compressed:
    """Sends one answer. Its head is held back until the first part of its body is there."""

    def __init__(self, send: Send, threads: Threads) -> None:
        self._send = send
        self._threads = threads
        self._head: Message | None = None
        self._compressor: zlib._Compress | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and _is_compressible(message):
            self._head = message
            return
        if message["type"] == "http.response.body":
            message = await self._body(message)
        await self._send(message)

    async def _body(self, message: Message) -> Message:
        body, more = message.get("body", b""), message.get("more_body", False)
        head, self._head = self._head, None
        if head is not None and (more or len(body) >= LEAST):
            self._compressor = zlib.compressobj(LEVEL, wbits=16 + zlib.MAX_WBITS)
        if self._compressor is not None:
            if len(body) < LARGE:
                body = self._pack(body, more)
            else:
                body = await self._threads.run(self._pack, body, more)
        if head is not None:
            if self._compressor is not None:
                headers = MutableHeaders(scope=head)
                headers["content-encoding"] = "gzip"
                headers.add_vary_header("accept-encoding")
                if more:
                    del headers["content-length"]
                else:
                    headers["content-length"] = str(len(body))
            await self._send(head)
        return {**message, "body": body}

    def _pack(self, body: bytes, more: bool) -> bytes:
        assert self._compressor is not None
        return self._compressor.compress(body) + self._compressor.flush(zlib.Z_SYNC_FLUSH if more else zlib.Z_FINISH)


def _is_compressible(head: Message) -> bool:
    headers = Headers(raw=head["headers"])
    return headers.get("content-type", "").partition(";")[0] in _TYPES and "content-encoding" not in headers
