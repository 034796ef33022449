"""Where handlers run, and how many at a time: in threads of our own, never in those of the host application."""

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

#: Handlers that run at once; more wait.
THREADS = 20

_END = object()


class Threads:
    """The threads of one application. ``most``: how many functions run at once; more wait."""

    def __init__(self, most: int = THREADS) -> None:
        self._most = most
        self._limiter: anyio.CapacityLimiter | None = None

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """What the function returns or raises. It runs to its end, even when nobody waits for it any more."""
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(self._most)  # only an event loop can make one
        return await anyio.to_thread.run_sync(function, *args, limiter=self._limiter)

    async def iterate(self, items: Iterator[T]) -> AsyncIterator[T]:
        """The items, each fetched in a thread. The iterator is closed when the caller stops iterating."""
        try:
            while True:
                item: Any = await self.run(next, items, _END)
                if item is _END:
                    return
                yield item
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                close()


class ConcurrencyLimit:
    """How many of something may run at once. As a context manager it holds one slot for the block.

    ``status`` and ``reason``: the answer when no slot is free.
    """

    def __init__(self, most: int, status: int, reason: str) -> None:
        self._free = threading.BoundedSemaphore(most)
        self._status = status
        self._reason = reason

    def take(self) -> None:
        """Takes a slot.

        Raises:
            HTTPException: no slot is free.
        """
        if not self._free.acquire(blocking=False):
            raise HTTPException(self._status, self._reason)

    def give(self) -> None:
        """The counterpart of `take`."""
        self._free.release()

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *_: object) -> None:
        self.give()


class LimitedStream(StreamingResponse):
    """A stream that holds a slot while it is sent: until it ends or its viewer has gone. HEAD gets the headers only.

    The slot is taken when sending begins, not when the response is made: a response that nobody waits for any more is
    never sent, and would never give its slot back. When no slot is free, an HTTPException is raised.
    """

    def __init__(self, slots: ConcurrencyLimit, content: AsyncIterator[Any], media_type: str) -> None:
        # Some proxies gather an answer before they pass it on, unless this header forbids it.
        super().__init__(content, media_type=media_type, headers={"x-accel-buffering": "no"})
        self._slots = slots

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._slots:
            if scope["method"] == "HEAD":
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": b""})
            else:
                await super().__call__(scope, receive, send)


class FinalResult(LimitedStream):
    """The result of a scan as one answer; the scan stops when its client disconnects. Each item is the result so far,
    or None if it has not changed.
    """

    def __init__(
        self, slots: ConcurrencyLimit, content: AsyncIterator[T | None], answer: Callable[[T], Response]
    ) -> None:
        super().__init__(slots, content, "application/json")
        self._answer = answer

    async def stream_response(self, send: Send) -> None:
        last: Any = None
        item: Any
        async for item in self.body_iterator:
            last = last if item is None else item
        response = self._answer(last)
        await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body})
