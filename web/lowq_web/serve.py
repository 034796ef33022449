"""The dashboard on an address of its own: for ``lowq web``, and for ``lowq run --web`` inside a node.

lowq finds `Server` through an entry point and never imports this package.
"""

import re
import socket
import threading
from collections.abc import Callable, Iterable

import uvicorn

import lowq
from lowq_web.app import create_app
from lowq_web.security import auth_from_environment, is_loopback, refuse_bind

#: Seconds that open pages get when it ends: their streams end by themselves only after some more.
GRACE = 1


class Server:
    """Listens when it is made: so it is known at once whether that works.

    ``root_path``: the path below which others see it, through a proxy that strips it: ``/ops/lowq``. ``health``: why
    the process that it is part of is not well, or None; for /healthz.

    Raises:
        ConfigError: the address can't be listened on, or others could reach it and there is no authentication.
    """

    def __init__(
        self,
        app: lowq.Lowq,
        host: str,
        port: int,
        *,
        no_auth: bool = False,
        redact: Iterable[str] = (),
        root_path: str = "",
        health: Callable[[], str | None] | None = None,
    ) -> None:
        if not (no_auth or is_loopback(host) or auth_from_environment()):
            raise lowq.ConfigError(refuse_bind(host))
        if root_path and not re.fullmatch(r"(/[\w.~-]+)+/?", root_path, re.ASCII):
            raise lowq.ConfigError(f"root_path={root_path!r} is no path such as /ops/lowq")
        application = create_app(app, no_auth=no_auth, redact=list(redact) or None)
        application.state.health = health
        self._application = application
        self._socket = _listen(host, port)
        config = uvicorn.Config(
            application,
            log_level="warning",
            timeout_graceful_shutdown=GRACE,
            lifespan="off",
            root_path=root_path.rstrip("/"),
            server_header=False,
            # What a proxy says of the client is for the guard to judge, not to be believed.
            proxy_headers=False,
        )
        self._server = uvicorn.Server(config)
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where it is."""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self) -> None:
        """Serves until TERM or INT."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._application.state.site.app.close()

    def start(self) -> None:
        """Serves in a thread of its own, until `stop`."""
        self._thread = threading.Thread(target=self.run, name="lowq-web", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends what `start` began."""
        self._application.state.closing = True
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(GRACE + 2)


def _listen(host: str, port: int) -> socket.socket:
    try:
        # create_server lets a restarted process have the port again at once.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, OverflowError) as error:
        raise lowq.ConfigError(f"the dashboard can't listen on {host} port {port}: {error}") from None
