"""``lowq web``: the dashboard, also beside a node (``lowq run --web``)."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

import click

from lowq import logs
from lowq.application import Lowq
from lowq.cli.group import log_options, open_app, options_of, with_connection
from lowq.cli.output import Failure, WrongUsage, message_of
from lowq.cli.process import program, reporting, supervised_option
from lowq.errors import EXIT_USAGE, RedisRefused, RedisUnavailable
from lowq.logs import LogFormat
from lowq.supervisor.dashboard import DashboardFailed, DashboardProcess, NodeWatcher

#: The default address of the dashboard.
DEFAULT_ADDRESS = "127.0.0.1:8080"
#: Seconds that it needs to end, at most.
SHUTDOWN_TIMEOUT = 3.0

log = logging.getLogger("lowq.cli")


def address(text: str) -> tuple[str, int]:
    """HOST:PORT, or a port alone."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise click.BadParameter(f"{text!r} is no address; write HOST:PORT, for example {DEFAULT_ADDRESS}")
    return host or "127.0.0.1", int(port)


#: Adds the options of the dashboard, except for its address: `lowq run` has them as `lowq web`.
with_dashboard_options = options_of(
    click.option(
        "--redact", multiple=True, metavar="FIELD",
        help="Mask this field of payloads on the dashboard, besides those in LOWQ_WEB_REDACT: card_*. Repeatable.",
    ),
    click.option("--root-path", default="", metavar="PATH", help="Where a proxy that strips it has put us: /ops/lowq."),
    click.option(
        "--no-auth", is_flag=True,
        help="Serve the dashboard to everybody who can reach it, by its address or a name in LOWQ_WEB_HOSTS: something "
        "else protects it.",
    ),
    click.option(
        "--auth-header", metavar="HEADER",
        help="A trusted proxy logs people in, and names the user in this header: X-Forwarded-User.",
    ),
    click.option(
        "--admins", multiple=True, metavar="NAMES",
        help="With --auth-header: who may act, as ann,bob,@ops (a group); others may only look. Repeatable.",
    ),
    click.option(
        "--groups-header", metavar="HEADER",
        help="With --auth-header: has the user's groups, separated by commas. Default: X-Forwarded-Groups.",
    ),
    click.option(
        "--trusted-proxy", "trusted_proxies", multiple=True, metavar="CIDR",
        help="An address or network of a proxy whose X-Forwarded-* and --auth-header are believed. Repeatable.",
    ),
    click.option(
        "--max-connections", type=click.IntRange(1), metavar="N", default=256, show_default=True,
        help="Connections to the dashboard at a time, besides those for /healthz.",
    ),
)  # fmt: skip


@click.command
@with_connection
@click.option(
    "--bind", type=address, metavar="HOST:PORT", default=DEFAULT_ADDRESS, show_default=True, help="Where to listen."
)
@with_dashboard_options
@log_options
@supervised_option
def web(
    require: str | None, redis_url: str | None, namespace: str | None, bind: tuple[str, int],
    log_format: LogFormat | None, log_level: str | None, supervised: str | None, **options: Any,
) -> None:  # fmt: skip
    """The dashboard and the API.

    LOWQ_WEB_USER and LOWQ_WEB_PASSWORD ask for a password; LOWQ_WEB_READ_USER and LOWQ_WEB_READ_PASSWORD may only look.
    """
    with reporting(supervised, log_format, log_level, NodeWatcher) as node:
        app = open_app(require, redis_url, namespace)
        logs.configure(log_format, log_level)  # also what people do on it
        app.client  # noqa: B018 - raises now what is wrong with the URL
        server = _server(app, bind, health=None if node is None else node.trouble, **options)
        if node is None:
            click.echo(f"the dashboard is at {server.url} (Ctrl-C ends it)")
            threading.Thread(target=_warn_without_redis, args=(app,), name="lowq-first-look", daemon=True).start()
        else:
            node.ready(SHUTDOWN_TIMEOUT, url=server.url)
        server.run()


def _warn_without_redis(app: Lowq) -> None:
    """Logs it when Redis does not answer. The pages of the dashboard say so, too, once somebody opens one."""
    try:
        app.client.command("PING")
    except (RedisUnavailable, RedisRefused) as error:
        log.warning("%s. The dashboard goes on", message_of(error).rstrip("."), extra={"event": "no_redis"})


def announce(text: str, event: str, **fields: str) -> None:
    """Tells people something about `lowq run`, or the log when that is JSON."""
    if click.get_current_context().params.get("log_format") == "json":
        log.info("%s", text, extra={"event": event, **fields})
    else:
        click.echo(text)


#: Options that `lowq run` passes on to the dashboard beside it, as they were typed.
DASHBOARD_OPTIONS = {param.name or "" for param in web.params} - {"bind", "supervised"}


@contextmanager
def dashboard(
    options: Sequence[str], bind: tuple[str, int], folder: str, *, health: Callable[[], str | None],
    was_at: str | None = None, patient: bool = False,
) -> Iterator[DashboardProcess]:  # fmt: skip
    """Runs the dashboard beside a node or a supervisor, for the time of the block. ``options``: of `lowq web`.
    ``health``: returns why the node is not well, or None. ``was_at``: its address before the node got new code; it is
    started there again, and the node does not wait for it. ``patient``: it is started again and again while the
    application can't be loaded.
    """
    host, port = bind
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def make() -> DashboardProcess:
        return DashboardProcess([*program(), "web", *options], was_at or address, folder, health)

    process = make()
    try:
        if was_at is not None:
            process.start_later()
        else:
            url = process.start()
            announce(f"the dashboard is at {url}", "dashboard", url=url)
    except DashboardFailed as error:
        if not patient or error.code == EXIT_USAGE:
            raise (WrongUsage if error.code == EXIT_USAGE else Failure)(str(error)) from None
        log.warning("%s; it is tried again until it starts", error, extra={"event": "dashboard_died"})
        process = make()
        process.start_later()
    try:
        yield process
    finally:
        process.stop()


def _server(app: Lowq, bind: tuple[str, int], **options: Any) -> Any:
    # Through the entry point: lowq does not import the dashboard, which may not be installed.
    for entry in entry_points(group="lowq.web", name="serve"):
        try:
            make = entry.load()
        except ModuleNotFoundError as error:
            raise WrongUsage(f"the dashboard needs {error.name}: pip install 'lowq[web]'") from None
        return make(app, *bind, **options)
    raise WrongUsage("the dashboard is not installed: pip install 'lowq[web]'")
