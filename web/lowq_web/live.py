"""Numbers that change, as server-sent events: every few seconds the latest figures, for as long as somebody watches.

Watchers cost Redis nothing by themselves: all of them are sent what `stats_cache` has read for everybody. Nor do
they hold a thread: they wait on the event loop.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import lowq
from lowq_web.context import context_of
from lowq_web.stats_cache import Snapshot
from lowq_web.threads import LimitedStream

log = logging.getLogger(__name__)

#: Streams that are served at once: each holds a connection.
MAX_STREAMS = 200
#: Seconds after which a stream ends. The browser reconnects by itself, after so many milliseconds. A server that is
#: to end waits for its open streams, so they must end.
LIFETIME, RECONNECT_AFTER = 10.0, 500
#: Seconds to the next attempt when Redis does not answer.
RETRY = 3.0
#: Seconds between two checks whether the server ends.
CHECK = 0.25

#: What of a queue is sent.
FIELDS = ("lag", "due", "length", "fresh", "retries", "taken", "morgue_length", "processed", "failed")


async def live(request: Request) -> Response:
    """Events ``figures`` and, when Redis is away, ``trouble``."""
    return LimitedStream(context_of(request).streams, _events(request), "text/event-stream")


async def _events(request: Request) -> AsyncIterator[str]:
    state, stats_cache = request.app.state, context_of(request).stats_cache
    ends = time.monotonic() + LIFETIME
    sent: Snapshot | None = None
    while time.monotonic() < ends:
        pause = RETRY
        try:
            figures = await stats_cache.watch()
        except lowq.LowqError as error:
            yield _event("trouble", {"error": str(error)})
        except Exception as error:
            log.exception("the figures of all queues could not be read")
            yield _event("trouble", {"error": f"The dashboard could not read the figures: {error!r:.200}"})
        else:
            pause = figures.interval
            if figures is not sent:
                sent = figures
                yield _event("figures", document(figures))
        if await _closing(state, min(pause, ends - time.monotonic())):
            return
    yield f"retry: {RECONNECT_AFTER}\n\n"


async def _closing(state: Any, seconds: float) -> bool:
    """Waits, unless the server ends meanwhile: an open stream would keep it from that."""
    while seconds > 0 and not getattr(state, "closing", False):
        await asyncio.sleep(min(seconds, CHECK))
        seconds -= CHECK
    return bool(getattr(state, "closing", False))


def _event(name: str, data: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


def document(figures: Snapshot) -> dict[str, Any]:
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
