"""``lowq run``: a node."""

from contextlib import ExitStack

import click

from lowq import logs
from lowq.app import Lowq
from lowq.cli.failure import FAILED, USAGE, Failure, message_of
from lowq.cli.group import set_up, with_connection
from lowq.cli.loading import load_app, users_traceback
from lowq.connection import new_store
from lowq.connection.store_server import serving
from lowq.errors import ConfigError, LowqError
from lowq.logs import LogFormat
from lowq.node import Node

_LEVELS = ["debug", "info", "warning", "error", "critical"]


@click.command
@with_connection
@click.option("-t", "--threads", type=click.IntRange(1), help="Threads that perform jobs.")
@click.option("-q", "--queue", "queues", multiple=True, help="Only this queue. Repeatable.")
@click.option("--embedded", is_flag=True, help="The store inside of this process: no Redis, gone at the end.")
@click.option("--no-prefetch", is_flag=True, help="One batch per trip to Redis.")
@click.option("--log-format", type=click.Choice(["text", "json"]), help="Default: text, or what the app has set up.")
@click.option("--log-level", type=click.Choice(_LEVELS, case_sensitive=False), help="Default: info.")
def run(
    require: str | None,
    redis_url: str | None,
    namespace: str | None,
    threads: int | None,
    queues: tuple[str, ...],
    embedded: bool,
    no_prefetch: bool,
    log_format: LogFormat | None,
    log_level: str | None,
) -> None:
    """Run a node: performs the jobs of the workers in APP.

    TERM and Ctrl-C stop it, a second Ctrl-C at once; TSTP makes it quiet; TTIN logs the stacks of all threads.
    """
    if require is None:
        raise Failure("a node needs your workers: lowq run -r app.py", USAGE)
    if embedded and redis_url is not None:
        raise Failure("--embedded brings its own store; leave out --redis-url", USAGE)
    app = load_app(require, workers=True)
    logs.configure(log_format, log_level)
    set_up(app, redis_url=redis_url, namespace=namespace, threads_per_node=threads)
    node = _make_node(app, queues, prefetch=not no_prefetch)
    with ExitStack() as stack:
        if embedded:
            store = new_store()
            stack.enter_context(app.embedded(store))
            url = stack.enter_context(serving(store))
            settings = f"LOWQ_REDIS_URL={url}"
            if app.config.namespace != "lowq":
                settings += f" LOWQ_NAMESPACE={app.config.namespace}"
            click.echo(f"the store listens at {url}; in another terminal: {settings} lowq stats")
        code = _run(node)
    click.get_current_context().exit(code)


def _make_node(app: Lowq, queues: tuple[str, ...], *, prefetch: bool) -> Node:
    try:
        return Node(app, queues=queues or None, prefetch=prefetch)
    except ConfigError as error:
        raise Failure(str(error), USAGE if queues else FAILED) from None


def _run(node: Node) -> int:
    try:
        return node.run()
    except LowqError as error:
        raise Failure(message_of(error, ", or try it without Redis: --embedded"), FAILED) from None
    except Exception as error:  # of on_server_init, or of a worker's __init__
        click.echo(users_traceback(error), err=True, nl=False)
        raise Failure("the node could not start, see above", FAILED) from None
