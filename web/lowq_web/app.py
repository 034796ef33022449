"""The ASGI application: routes, and lowq's errors as answers."""

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import lowq
from lowq_web import api


def create_app(app: lowq.Lowq | None = None) -> Starlette:
    """The application for ``app``, by default lowq's default application.

    It only reads, from the registry in Redis; it needs no user code.
    """
    application = Starlette(
        routes=[Route("/api/v1/stats", api.stats), Route("/healthz", api.health)],
        exception_handlers={lowq.RedisUnavailable: _unavailable, lowq.RedisRefused: _unavailable},
    )
    application.state.lowq = app or lowq.app
    return application


async def _unavailable(_request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"error": str(error)}, status_code=503)
