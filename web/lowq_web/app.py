"""The ASGI application: its routes and settings."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import cache
from urllib.parse import quote, unquote

from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route, Router
from starlette.types import Receive, Scope, Send

import lowq
from lowq_web import api, live, pages, prometheus
from lowq_web.auth import Authenticate, checked_networks, chosen_auth
from lowq_web.background import MAX_RUNNING, BackgroundActions
from lowq_web.confirmations import Snapshots
from lowq_web.context import AppContext, context_of
from lowq_web.errors import error_handlers
from lowq_web.hosts import checked_hosts
from lowq_web.notices import Notices
from lowq_web.open_streams import OpenStreams
from lowq_web.redaction import Redact, redactor
from lowq_web.security import Guard, checked_origins
from lowq_web.static_files import static
from lowq_web.stats_cache import StatsCache
from lowq_web.threads import ConcurrencyLimit, Threads

#: Listings and counts that scan all ids, at a time: each keeps Redis busy until it ends.
MAX_SCANS = 4
#: Connections to Redis that the dashboard opens at most, none of them the host application's: as many as there may be
#: scans and tasks, and a few for other requests. More callers wait for one.
CONNECTIONS = MAX_SCANS + MAX_RUNNING + 4
#: Bytes of an answer below which it is not compressed; and how: half the time of the highest level, for 2 % more bytes.
#: It is done on the event loop: 5 MiB take 70 ms. Pages of other sites can't derive the form's token from the size of
#: answers (BREACH): it comes with a cookie that browsers don't send for them.
SHORT, LEVEL = 1000, 5
#: Seconds after which a request that takes long checks whether Redis still answers.
LONG = 1.0

log = logging.getLogger(__name__)


class _NameConvertor(Convertor[str]):
    """A queue's name as a part of a path. Slashes and dots are escaped twice: servers undo it once before routing."""

    regex = "[^/]+"

    def convert(self, value: str) -> str:
        return unquote(value)

    def to_string(self, value: str) -> str:
        once = quote(value, safe="")
        return quote(once.replace(".", "%2E") if value in (".", "..") else once, safe="")


register_url_convertor("name", _NameConvertor())


def create_app(
    app: lowq.Lowq | None = None,
    *,
    auth: Authenticate | None = None,
    redact: Redact | Iterable[str] | None = None,
    origins: Iterable[str] = (),
    hosts: Iterable[str] = (),
    no_auth: bool = False,
    auth_header: str | None = None,
    groups_header: str | None = None,
    admins: Iterable[str] = (),
    trusted_proxies: Iterable[str] = (),
) -> Starlette:
    """The dashboard of ``app``, by default lowq's default application. It needs no user code, only Redis.

    ``auth``: a callable that takes the request and returns a `User`, or None for somebody who may see nothing, or a
    response that is sent instead; it may raise HTTPException. It may be async; otherwise it runs in a
    thread. By default LOWQ_WEB_USER and LOWQ_WEB_PASSWORD (and for looking only LOWQ_WEB_READ_USER and
    LOWQ_WEB_READ_PASSWORD) in the environment. Without any, only requests from this machine to a name of this
    machine are answered, and those to the names in ``hosts``: ``ops.example.com``, ``*.example.com``. Those in
    LOWQ_WEB_HOSTS, separated by commas, count too. ``no_auth``: something else protects it, so requests from everywhere
    are answered, to addresses and these names.

    ``redact``: names of payload fields that are masked, or a function from a payload to what is shown of it. The
    comma-separated names in LOWQ_WEB_REDACT are masked in any case. Error texts are shown as they are.

    ``origins``: the addresses that browsers use, such as ``https://ops.example.com``. Needed when a proxy changes the
    header Host, so that requests don't show them. Those in LOWQ_WEB_ORIGINS, separated by commas, count too.

    ``trusted_proxies``: addresses and networks of proxies whose X-Forwarded-For and X-Forwarded-Proto are believed.
    ``auth_header``: such a proxy logs people in, and names the user in this header; from any other address nothing is
    answered. ``admins`` may act, everybody else may only look: names, and groups as ``@ops`` out of ``groups_header``
    (by default X-Forwarded-Groups).

    Its connections to Redis are its own, up to `CONNECTIONS`, made at the first request; they are closed
    when its server shuts down, and by ``app.close()``.

    Raises:
        ConfigError: settings that make no sense.
    """
    proxies = checked_networks(trusted_proxies)
    auth = chosen_auth(
        auth, proxies, auth_header=auth_header, groups_header=groups_header, admins=list(admins), no_auth=no_auth
    )
    app = (app or lowq.app).with_own_pool(CONNECTIONS)
    open_streams = OpenStreams()
    stats_cache = StatsCache(app, open_streams.wake)
    threads = Threads()
    routes: list[BaseRoute] = [
        Route("/healthz", _health, name="health"),
        *_in_threads([Route("/metrics", prometheus.metrics, name="metrics")]),
        Route("/live", live.live, name="live"),
        Route("/static/{name}", static, name="static"),
        Route("/api/v1", api.index),
        # Slashes at the end are never redirected: the redirect would lead to whatever host a request names.
        Mount("/api/v1", Router(_in_threads(api.routes()), redirect_slashes=False)),
        *_in_threads(pages.routes()),
    ]
    application = Starlette(
        routes=routes,
        middleware=[
            Middleware(
                Guard,
                auth=auth,
                threads=threads,
                open_to_all=no_auth,
                hosts=checked_hosts([*hosts, *_listed("LOWQ_WEB_HOSTS")]),
                origins=checked_origins([*origins, *_listed("LOWQ_WEB_ORIGINS")]),
                proxies=proxies,
            ),
            Middleware(GZipMiddleware, minimum_size=SHORT, compresslevel=LEVEL),
        ],
        exception_handlers=error_handlers(),
        lifespan=_lifespan,
    )
    application.router.redirect_slashes = False
    #: By name, for the hundreds of addresses on a page: Starlette tries one route after the other.
    application.state.routes = {route.name: route for route in routes if isinstance(route, Route)}
    application.state.context = AppContext(
        app,
        stats_cache,
        BackgroundActions(app, stats_cache),
        redactor(redact, _listed("LOWQ_WEB_REDACT")),
        threads,
        scans=ConcurrencyLimit(
            MAX_SCANS, 429, f"{MAX_SCANS} scans of all ids run already; try again when one has ended"
        ),
        streams=ConcurrencyLimit(live.MAX_STREAMS, 503, f"{live.MAX_STREAMS} pages are live already; this one is not"),
        open_streams=open_streams,
        notices=Notices(app),
        snapshots=Snapshots(app),
    )
    return application


_default = cache(create_app)


async def default_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Serves the dashboard of lowq's default application, made at the first use: not everybody who imports the package
    has the settings for it.
    """
    try:
        application = _default()
    except lowq.ConfigError as error:
        if scope["type"] == "lifespan":
            # Ends the server, which would otherwise take lifespan for unsupported and start.
            await send({"type": "lifespan.startup.failed", "message": str(error)})
        raise
    await application(scope, receive, send)


def _listed(variable: str) -> list[str]:
    """The comma-separated values of an environment variable."""
    return [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]


@asynccontextmanager
async def _lifespan(application: Starlette) -> AsyncIterator[None]:
    yield
    application.state.context.app.close()


def _in_threads(routes: Iterable[Route]) -> list[Route]:
    """The same routes, run in our own threads; while Redis does not answer, their requests end at once."""

    def of(handler: Callable[[Request], Response]) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            context = context_of(request)
            await context.stats_cache.alive()
            running = asyncio.ensure_future(context.threads.run(handler, request))
            running.add_done_callback(_retrieved)
            # Redis may hang just now. A GET is answered with that at once; its thread goes on to its timeout. A POST
            # waits for its outcome.
            while not running.done():
                await asyncio.wait({running}, timeout=None if request.method == "POST" else LONG)
                if not running.done():
                    await context.stats_cache.alive()
            return await running

        return handle

    return [Route(route.path, of(route.endpoint), methods=route.methods, name=route.name) for route in routes]


def _retrieved(running: "asyncio.Future[Response]") -> None:
    """Retrieves an error that nobody waits for any more: asyncio would log it as a bug."""
    if not running.cancelled():
        running.exception()


async def _health(request: Request) -> Response:
    """200 when Redis answers, 503 otherwise. In a node: when its maintenance loop does its work."""
    check = getattr(request.app.state, "health", None)
    trouble = None if check is None else check()
    if trouble:
        return JSONResponse({"error": trouble}, 503)
    try:
        await context_of(request).stats_cache.alive()
    except lowq.LowqError as error:
        # The client is not authenticated: the address of Redis and its error are only for the log.
        log.warning("/healthz: %s", error)
        return JSONResponse({"error": "Redis does not answer"}, 503)
    return JSONResponse({"status": "ok"})
