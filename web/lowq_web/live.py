"""Numbers that change, as server-sent events: every few seconds the latest figures, for as long as somebody watches.

Watchers cost Redis nothing by themselves: all of them are sent what `lookout` has read for everybody.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import StreamingResponse

import lowq
from lowq_web.app import site_of
from lowq_web.lookout import Figures

#: Streams that are served at once: each holds a connection.
MAX_STREAMS = 200
#: Seconds to the next attempt when Redis does not answer.
RETRY = 3.0
#: Seconds between two looks whether the server ends.
LOOK = 0.25

#: What of a queue is sent.
FIELDS = ("lag", "due", "length", "fresh", "retries", "taken", "morgue_length", "processed", "failed")


async def live(request: Request) -> StreamingResponse:
    """Events ``figures`` and, when Redis is away, ``trouble``."""
    state = request.app.state
    streams = getattr(state, "streams", 0)
    if streams >= MAX_STREAMS:
        raise HTTPException(503, "too many pages are watching already")
    return StreamingResponse(_events(request), media_type="text/event-stream", headers={"x-accel-buffering": "no"})


async def _events(request: Request) -> AsyncIterator[str]:
    state, lookout = request.app.state, site_of(request).lookout
    state.streams = getattr(state, "streams", 0) + 1
    try:
        sent: Figures | None = None
        while True:
            try:
                figures = await run_in_threadpool(lookout.figures)
            except lowq.LowqError as error:
                yield _event("trouble", {"error": str(error)})
                if await _closing(state, RETRY):
                    return
                continue
            if figures is not sent:
                sent = figures
                yield _event("figures", document(figures))
            if await _closing(state, figures.interval):
                return
    finally:
        state.streams -= 1


async def _closing(state: Any, seconds: float) -> bool:
    """Waits, unless the server ends meanwhile: an open stream would keep it from that."""
    while seconds > 0 and not getattr(state, "closing", False):
        await asyncio.sleep(min(seconds, LOOK))
        seconds -= LOOK
    return bool(getattr(state, "closing", False))


def _event(name: str, data: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


def document(figures: Figures) -> dict[str, Any]:
    """The figures as JSON: ``{"at", "total": {...}, "queues": {name: {...}}}``."""

    def of(source: Any, name: str) -> dict[str, Any]:
        processed, failed = figures.rates.get(name, (None, None))
        values = {field: getattr(source, field) for field in FIELDS}
        return values | {"processed_rate": processed, "failed_rate": failed}

    return {
        "at": figures.at,
        "total": of(figures.total, ""),
        "queues": {
            item.stats.name: of(item.stats, item.stats.name) | {"paused": item.stats.paused} for item in figures.queues
        },
    }
