"""Live figures as server-sent events: every few seconds the latest ones, for as long as somebody watches.

Viewers cost Redis nothing by themselves: all of them are sent what `stats_cache` has read for everybody. Nor do they
hold a thread. A stream waits on the event loop until one of these, and does nothing meanwhile::

    a new snapshot was read      at once: `OpenStreams.wake`
    the latest one is too old    after its interval, and reads the next one
    the server closes            at once, where the server says so: `OpenStreams.close`. Of ours it does (`serve`)
    the end of its lifetime      other servers say nothing, and wait for open streams
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Collection
from dataclasses import fields
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import lowq
from lowq_web.context import context_of
from lowq_web.security import shown_error
from lowq_web.stats_cache import Snapshot, Total
from lowq_web.threads import LimitedStream

log = logging.getLogger(__name__)

#: Streams that may be open at once; each holds a connection.
MAX_STREAMS = 200
#: Seconds after which a stream ends. The browser reconnects by itself, after so many milliseconds. A server that is
#: to end waits for its open streams, so they must end.
LIFETIME, RECONNECT_AFTER = 10.0, 500
#: Milliseconds after which a page asks again where a server sends whole answers only, as Django's admin does.
POLL_AFTER = 2000
#: Seconds to the next attempt when Redis does not answer.
RETRY = 3.0
#: The fields of a queue that are sent.
FIELDS = tuple(field.name for field in fields(Total))


async def live(request: Request) -> Response:
    """Events ``figures`` and, when Redis is away, ``trouble``. ``queue``, as often as need be: only of these queues,
    besides the total; an empty one for none.
    """
    names = {value for name, value in request.query_params.multi_items() if name == "queue"} or None
    return LimitedStream(context_of(request).streams, _events(request, names), "text/event-stream")


async def _events(request: Request, names: Collection[str] | None = None) -> AsyncIterator[str]:
    context = context_of(request)
    ends = time.monotonic() + LIFETIME
    sent: Snapshot | None = None
    with context.open_streams.enter() as woken:
        while time.monotonic() < ends:
            if context.open_streams.are_closing():
                return
            # Before the figures are asked for: a snapshot that comes while they are awaited sets it again. If it is the
            # one that we get, that costs one more turn of the loop, and Redis nothing.
            woken.clear()
            pause = RETRY
            event = None
            try:
                figures = await context.stats_cache.watch()
            except lowq.LowqError as error:
                event = _event("trouble", {"error": shown_error(request, error)})
            except Exception as error:
                log.exception("the figures of all queues could not be read")
                event = _event("trouble", {"error": f"The dashboard could not read the figures: {error!r:.200}"})
            else:
                pause = figures.interval
                if figures is not sent:
                    sent = figures
                    event = _event("figures", document(figures, names))
            if event is not None:
                yield event
            if request.scope.get("lowq_polled"):
                yield f"retry: {POLL_AFTER}\n\n"
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(pause, ends - time.monotonic())):
                    await woken.wait()
    yield f"retry: {RECONNECT_AFTER}\n\n"


def _event(name: str, data: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


def document(figures: Snapshot, names: Collection[str] | None = None) -> dict[str, Any]:
    """The figures as JSON: ``{"at", "total": {...}, "queues": {name: {...}}}``, of all queues or of these."""

    def of(source: Any, name: str) -> dict[str, Any]:
        processed, failed = figures.rates.get(name, (None, None))
        values = {field: getattr(source, field) for field in FIELDS}
        return values | {"processed_rate": processed, "failed_rate": failed}

    return {
        "at": figures.at,
        "total": of(figures.total, ""),
        "queues": {
            item.stats.name: of(item.stats, item.stats.name)
            | {
                "paused": item.stats.paused,
                "reshard_to": item.stats.reshard_to,
                "forecast": figures.forecasts[item.stats.name].text,
            }
            for item in figures.queues
            if names is None or item.stats.name in names
        },
    }
