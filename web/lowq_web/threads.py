"""Where handlers run, and how many at a time: in threads, but never in those of the application that we are part of."""

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
    """The threads of one application."""

    def __init__(self) -> None:
        self._limiter: anyio.CapacityLimiter | None = None

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """What the function returns or raises. It runs to its end, whoever stops waiting for it."""
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(THREADS)  # only an event loop can make one
        return await anyio.to_thread.run_sync(function, *args, limiter=self._limiter)

    async def iterate(self, items: Iterator[T]) -> AsyncIterator[T]:
        """The items, each fetched in a thread. Whoever stops iterating ends them after the current one."""
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
    """How often something may go on at once: as a context manager, for as long as the block takes.

    ``status`` and ``reason``: the answer to whoever comes when all are taken.
    """

    def __init__(self, most: int, status: int, reason: str) -> None:
        self._free = threading.BoundedSemaphore(most)
        self._status = status
        self._reason = reason

    def take(self) -> None:
        """One of them.

        Raises:
            HTTPException: all are taken.
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
    """A stream that holds a slot while it is sent: until it ends or its viewer has gone. HEAD gets none of it.

    The slot is taken when sending begins, not when the response is made: one that nobody waits for any more is never
    sent, and would never give it back. To be sent it needs a slot; without one HTTPException is its answer.
    """

    def __init__(self, slots: ConcurrencyLimit, content: AsyncIterator[Any], media_type: str) -> None:
        # Some proxies gather an answer before they pass it on, unless they are told not to.
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
    """What is known at the end of a search, as one answer; the search ends with whoever asked for it. The items are
    what is known so far, None: no more than before.
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
