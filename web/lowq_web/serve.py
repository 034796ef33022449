"""The dashboard on an address of its own: for ``lowq web``, which ``lowq run --web`` starts, too.

lowq finds `Server` through an entry point and never imports this package.
"""

import logging
import re
import resource
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette

import lowq
from lowq_web.app import create_app
from lowq_web.auth import auth_from_environment
from lowq_web.connections import CONNECTIONS, SPARE, bounded
from lowq_web.hosts import is_loopback

log = logging.getLogger(__name__)

#: Seconds that open connections get when the server closes.
GRACE = 1
#: Connections that the kernel queues until they are accepted, and that are accepted at once.
BACKLOG = 32
#: Open files that are not for connections: Redis's and the loop's, and those being refused. That takes the loop some
#: four turns, in each of which it may accept others.
OTHER_FILES = 4 * BACKLOG + SPARE + 64


class Server:
    """Listens from its construction on, so that an address that does not work is known at once.

    ``root_path``: the path below which others see it, through a proxy that strips it: ``/ops/lowq``.
    ``max_connections``: at a time, besides those that ask for /healthz. It is lowered when the process may not open
    that many files.
    ``admins``: names and groups, several of them separated by commas.
    ``health``: for /healthz, why the process that this is part of is not well, or None.
    The other options are those of `create_app`.

    Raises:
        ConfigError: the address can't be listened on, or others could reach it and there is no authentication.
    """

    def __init__(
        self,
        app: lowq.Lowq,
        host: str,
        port: int,
        *,
        root_path: str = "",
        max_connections: int = CONNECTIONS,
        health: Callable[[], str | None] | None = None,
        no_auth: bool = False,
        auth_header: str | None = None,
        admins: Iterable[str] = (),
        **options: Any,
    ) -> None:
        if not (no_auth or is_loopback(host) or auth_header or auth_from_environment()):
            raise lowq.ConfigError(
                f"the dashboard would be open to everybody who can reach {host}: set LOWQ_WEB_USER and "
                "LOWQ_WEB_PASSWORD, or say --no-auth if something else protects it; a proxy that logs people in: "
                "--auth-header"
            )
        if root_path and not re.fullmatch(r"(/[\w.~-]+)+/?", root_path, re.ASCII):
            raise lowq.ConfigError(f"root_path={root_path!r} is no path such as /ops/lowq")
        # Names of this machine are not listed: listed ones are answered through proxies, and nginx puts these in Host.
        hosts = [] if is_loopback(host) else [host.partition("%")[0]]
        application = create_app(
            app, hosts=hosts, no_auth=no_auth, auth_header=auth_header,
            admins=[name for given in admins for name in given.split(",")], **options,
        )  # fmt: skip
        application.state.health = health
        self._application = application
        self._socket = _listen(host, port)
        config = uvicorn.Config(
            application,
            http=bounded(_affordable(max_connections)),
            ws="none",  # there are none; an upgrade would leave the bounds of connections behind
            backlog=BACKLOG,
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=GRACE,
            lifespan="off",
            root_path=root_path.rstrip("/"),
            server_header=False,
            # The headers of a proxy are for the guard to check; uvicorn must not trust them.
            proxy_headers=False,
        )
        self._server = _Uvicorn(config, application)

    @property
    def url(self) -> str:
        """Where it is."""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self) -> None:
        """Serves until TERM or INT."""
        try:
            # Before the event loop is made: interrupted half way, it would end with a traceback that nobody can catch.
            with self._server.capture_signals():
                self._server.run(sockets=[self._socket])
        finally:
            self._application.state.context.app.close()


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, application: Starlette) -> None:
        super().__init__(config)
        self._application = application
        self._is_capturing = False

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # `Server.run` has entered it already when uvicorn does. At its end each raises the signals that came, which
        # whoever runs us would get twice.
        if self._is_capturing:
            yield
            return
        self._is_capturing = True
        try:
            with super().capture_signals():
                yield
        finally:
            self._is_capturing = False

    async def shutdown(self, sockets: Any = None) -> None:
        # Otherwise they would be cancelled, with a traceback each.
        self._application.state.context.open_streams.close()
        await super().shutdown(sockets)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With its protocol, which `socket.create_server` leaves out: asyncio switches Nagle's algorithm off only
    # for sockets that it knows to be TCP. Otherwise headers and body, which are written one after the other, are 40 ms
    # apart.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # A restarted process may have the port again at once.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        # The interface of fe80::1%eth0 counts only as a number.
        zone = host.partition("%")[2]
        listening.bind((host, port, 0, socket.if_nametoindex(zone)) if zone else (host, port))
        listening.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listening.close()
        reason = getattr(error, "strerror", None) or error
        raise lowq.ConfigError(
            f"the dashboard can't listen on {host} port {port}: {reason}; choose another address, or port 0"
        ) from None
    return listening


def _affordable(connections: int) -> int:
    """The number asked for, or less when this process may not have that many files open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = connections if files == resource.RLIM_INFINITY else min(connections, max(files - OTHER_FILES, 1))
    if most < connections:
        log.warning(
            "%d connections instead of %d, as this process may have only %d files open (ulimit -n)",
            most, connections, files, extra={"event": "few_files"},
        )  # fmt: skip
    return most
