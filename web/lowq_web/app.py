"""The ASGI application: its routes, and lowq's errors as answers."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

import lowq
from lowq_web.actions import Actions
from lowq_web.lookout import Lookout
from lowq_web.notices import Notices
from lowq_web.redaction import Redact, redactor
from lowq_web.security import Authenticate, Guard, auth_from_environment, is_for_programs
from lowq_web.tasks import Tasks, TooManyTasks


class _NameConvertor(Convertor[str]):
    """A queue's name as a part of a path. Slashes and dots are escaped twice: servers undo it once before routing."""

    regex = "[^/]+"

    def convert(self, value: str) -> str:
        return unquote(value)

    def to_string(self, value: str) -> str:
        once = quote(value, safe="")
        return quote(once.replace(".", "%2E") if value in (".", "..") else once, safe="")


register_url_convertor("name", _NameConvertor())


@dataclass(frozen=True, slots=True)
class Site:
    """What the handlers of one application share: `site_of` finds it."""

    app: lowq.Lowq
    lookout: Lookout
    tasks: Tasks
    actions: Actions
    redact: Redact
    notices: Notices = field(default_factory=Notices)


def queue_of(request: Request) -> lowq.Queue:
    """The queue that the path names.

    Raises:
        UnknownQueueError: nobody has used it yet, or could.
    """
    try:
        found = site_of(request).app.queue(request.path_params["queue"])
    except lowq.ConfigError as error:
        raise lowq.UnknownQueueError(f"there is no such queue: {error}") from None
    found.shards_count  # noqa: B018 - asks for it
    return found


def site_of(request: Request) -> Site:
    """What the handlers of this application share."""
    site: Site = request.app.state.site
    return site


def create_app(
    app: lowq.Lowq | None = None,
    *,
    auth: Authenticate | None = None,
    redact: Redact | Iterable[str] | None = None,
    no_auth: bool = False,
) -> Starlette:
    """The dashboard of ``app``, by default lowq's default application. It needs no user code, only Redis.

    ``auth``: tells who asks: a callable that takes the request and returns a `User`, or None for nobody who may see
    anything; it may be async. By default LOWQ_WEB_USER and LOWQ_WEB_PASSWORD (and for looking only
    LOWQ_WEB_READ_USER and LOWQ_WEB_READ_PASSWORD) in the environment. Without any, only requests from this machine to
    this machine are answered, unless ``no_auth`` says that something else protects it.

    ``redact``: names of payload fields that are masked, or a function from a payload to what is shown of it; by
    default the comma-separated names in LOWQ_WEB_REDACT. Error texts are shown as they are.

    Raises:
        ConfigError: settings that make no sense.
    """
    from lowq_web import api, live, metrics, views  # they know `site_of`

    app = app or lowq.app
    if redact is None:
        redact = [name.strip() for name in os.environ.get("LOWQ_WEB_REDACT", "").split(",") if name.strip()] or None
    lookout = Lookout(app)
    tasks = Tasks(app, lookout)
    routes: list[BaseRoute] = [
        Route("/healthz", _health, name="health"),
        Route("/metrics", metrics.metrics, name="metrics"),
        Route("/live", live.live, name="live"),
        Mount("/static", StaticFiles(directory=Path(str(resources.files("lowq_web") / "static"))), name="static"),
        Mount("/api/v1", routes=api.routes()),
        *views.routes(),
    ]
    application = Starlette(
        routes=routes,
        middleware=[Middleware(Guard, auth=auth or auth_from_environment(), open_to_all=no_auth)],
        exception_handlers=_handlers(views.trouble),
    )
    application.router.redirect_slashes = False
    application.state.site = Site(app, lookout, tasks, Actions(app, lookout, tasks), redactor(redact))
    return application


# --- errors as answers ---------------------------------------------------------------------------------------

_STATUS: list[tuple[type[Exception], int]] = [
    (lowq.UnknownQueueError, 404),
    (lowq.UnknownNodeError, 404),
    (lowq.ConfigError, 400),
    (lowq.JobError, 400),
    (TooManyTasks, 429),
    (lowq.QueueInUse, 409),
    (lowq.RedisUnavailable, 503),
    (lowq.RedisRefused, 503),
    (lowq.LowqError, 500),
]


def _handlers(page: Callable[[Request, int, str], Response]) -> dict[Any, Any]:
    def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            status, reason = error.status_code, error.detail
        else:
            status = next(code for kind, code in _STATUS if isinstance(error, kind))
            reason = str(error)
        if is_for_programs(request):
            response: Response = JSONResponse({"error": reason}, status)
        else:
            response = page(request, status, reason)
        if isinstance(error, HTTPException) and error.headers:
            response.headers.update(error.headers)
        return response

    return dict.fromkeys((HTTPException, *(kind for kind, _ in _STATUS)), answer)


async def _health(request: Request) -> Response:
    """200 when Redis answers, 503 otherwise. In a node: when its keeper does its work."""
    check = getattr(request.app.state, "health", None)
    trouble = None if check is None else check()
    if trouble:
        return JSONResponse({"error": trouble}, 503)
    await run_in_threadpool(site_of(request).app.client.command, "PING")
    return JSONResponse({"status": "ok"})
