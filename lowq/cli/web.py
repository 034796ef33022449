"""``lowq web``: the dashboard. And for ``lowq run --web``: the same inside a node."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

import click

from lowq import logs
from lowq.app import Lowq
from lowq.cli.failure import USAGE, Failure
from lowq.cli.group import with_app
from lowq.errors import ConfigError

#: Where the dashboard listens.
DEFAULT_ADDRESS = "127.0.0.1:8080"


class Address(click.ParamType):  # type: ignore[type-arg, unused-ignore]  # generic in newer versions of click
    """HOST:PORT, or a port alone."""

    name = "HOST:PORT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        if isinstance(value, tuple):
            return value  # converted already
        host, _, port = str(value).rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not port.isascii() or not port.isdecimal() or int(port) > 65535:
            self.fail(f"{value!r} is no address; write HOST:PORT, for example {DEFAULT_ADDRESS}", param, ctx)
        return host or "127.0.0.1", int(port)


redact_option = click.option(
    "--redact", multiple=True, metavar="FIELD", help="Mask this field of payloads on the dashboard: card_*. Repeatable."
)
no_auth_option = click.option(
    "--no-auth", is_flag=True, help="Serve the dashboard to everybody who can reach it: something else protects it."
)


@click.command
@with_app
@click.option("--bind", type=Address(), default=DEFAULT_ADDRESS, show_default=True, help="Where to listen.")
@redact_option
@click.option("--root-path", default="", metavar="PATH", help="Where a proxy that strips it has put us: /ops/lowq.")
@no_auth_option
def web(app: Lowq, bind: tuple[str, int], redact: tuple[str, ...], root_path: str, no_auth: bool) -> None:
    """The dashboard and the API.

    LOWQ_WEB_USER and LOWQ_WEB_PASSWORD ask for a password; LOWQ_WEB_READ_USER and LOWQ_WEB_READ_PASSWORD may only look.
    """
    logs.configure(None, None)  # also what people do on it
    server = _server(app, bind, no_auth=no_auth, redact=redact, root_path=root_path)
    click.echo(f"the dashboard is at {server.url}; Ctrl-C ends it")
    server.run()


@contextmanager
def dashboard(
    app: Lowq,
    bind: tuple[str, int],
    *,
    health: Callable[[], str | None],
    no_auth: bool = False,
    redact: Sequence[str] = (),
) -> Iterator[None]:
    """The dashboard in a thread of this process, for the time of the block."""
    server = _server(app, bind, no_auth=no_auth, redact=redact, health=health)
    click.echo(f"the dashboard is at {server.url}")
    server.start()
    try:
        yield
    finally:
        server.stop()


def _server(app: Lowq, bind: tuple[str, int], **options: Any) -> Any:
    # Through the entry point: lowq does not import the dashboard, which may not be installed.
    for entry in entry_points(group="lowq.web", name="serve"):
        try:
            make = entry.load()
        except ModuleNotFoundError as error:
            raise Failure(f"the dashboard needs {error.name}: pip install 'lowq[web]'", USAGE) from None
        try:
            return make(app, *bind, **options)
        except ConfigError as error:
            raise Failure(str(error), USAGE) from None
    raise Failure("the dashboard is not installed: pip install 'lowq[web]'", USAGE)
