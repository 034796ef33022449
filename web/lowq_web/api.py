"""The JSON API."""

from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse

import lowq


async def stats(request: Request) -> JSONResponse:
    """``{"total": {"length", "morgue_length", "lag"}, "by_worker": {queue: {the same}}}``; lag in seconds."""
    return JSONResponse(await run_in_threadpool(_stats, request.app.state.lowq))


def _stats(app: lowq.Lowq) -> dict[str, Any]:
    by_worker = {}
    for info in app.queues():
        figures = app.queue(info.name).stats()
        by_worker[info.name] = {
            "length": figures.length,
            "morgue_length": figures.morgue_length,
            "lag": figures.lag,
        }
    total = {
        "length": sum(item["length"] for item in by_worker.values()),
        "morgue_length": sum(item["morgue_length"] for item in by_worker.values()),
        "lag": max((item["lag"] for item in by_worker.values()), default=0.0),
    }
    return {"total": total, "by_worker": by_worker}


async def health(request: Request) -> JSONResponse:
    """200 when Redis answers, 503 otherwise."""
    await run_in_threadpool(request.app.state.lowq.queues)
    return JSONResponse({"status": "ok"})
