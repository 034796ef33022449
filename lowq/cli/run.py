"""``lowq run``: a node, or a supervisor of several."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
from click.core import ParameterSource

from lowq import logs
from lowq.app import Lowq
from lowq.child import OPTION, Supervised
from lowq.cli.failure import FAILED, USAGE, Failure, failure_of, message_of
from lowq.cli.group import set_up, with_connection
from lowq.cli.loading import in_short, load_app, source_folder, users_traceback
from lowq.cli.web import Address, dashboard, no_auth_option, redact_option
from lowq.connection import new_store
from lowq.connection.store_server import serving
from lowq.errors import ConfigError, LowqError, RedisUnavailable
from lowq.logs import LogFormat, get_log
from lowq.node import Node
from lowq.reload import SourceWatcher
from lowq.supervisor import Supervisor

log = get_log(__name__)

_LEVELS = ["debug", "info", "warning", "error", "critical"]


@click.command
@with_connection
@click.option("-t", "--threads", type=click.IntRange(1), help="Threads that perform jobs.")
@click.option("-q", "--queue", "queues", multiple=True, help="Only this queue. Repeatable.")
@click.option(
    "--processes", type=click.IntRange(1), metavar="N",
    help="N nodes, as processes of a supervisor, which replaces those that die and deploys new code on HUP.",
)  # fmt: skip
@click.option("--reload", is_flag=True, help="Deploy when a Python file changes: for development.")
@click.option("--embedded", is_flag=True, help="The store inside of this process: no Redis, gone at the end.")
@click.option("--no-prefetch", is_flag=True, help="One batch per trip to Redis.")
@click.option("--web", type=Address(), help="The dashboard, too, inside of this process.")
@redact_option
@no_auth_option
@click.option("--log-format", type=click.Choice(["text", "json"]), help="Default: text, or what the app has set up.")
@click.option("--log-level", type=click.Choice(_LEVELS, case_sensitive=False), help="Default: info.")
@click.option(OPTION, hidden=True, help="What a supervisor tells its processes.")
@click.pass_context
def run(
    context: click.Context,
    require: str | None,
    redis_url: str | None,
    namespace: str | None,
    threads: int | None,
    queues: tuple[str, ...],
    processes: int | None,
    reload: bool,
    embedded: bool,
    no_prefetch: bool,
    web: tuple[str, int] | None,
    redact: tuple[str, ...],
    no_auth: bool,
    log_format: LogFormat | None,
    log_level: str | None,
    supervised: str | None,
) -> None:
    """Run a node: performs the jobs of the workers in APP.

    TERM and Ctrl-C stop it, a second Ctrl-C at once; TSTP makes it quiet; TTIN logs the stacks of all threads.

    With --processes (also 1) or --reload, HUP or USR2 deploy: processes with the code that is on the disk now are
    started, and when all are ready the old ones finish what they perform and end.
    """
    if require is None:
        raise Failure("a node needs your workers: lowq run -r app.py", USAGE)
    if embedded and redis_url is not None:
        raise Failure("--embedded brings its own store; leave out --redis-url", USAGE)
    if web is not None and (processes is not None or reload):
        raise Failure("--web is for a single node; beside several processes run the dashboard alone: lowq web", USAGE)
    with _in_format(log_format, log_level), _reporting(supervised, log_format) as child, ExitStack() as stack:
        if processes is not None or reload:
            logs.configure(log_format, log_level)
            command = _command(context)
            if embedded:
                command.append(f"--redis-url={_open_store(stack, new_store(), namespace)}")
            supervisor = Supervisor(command, processes or 1, waits_for_change=reload)
            if reload:
                watcher = SourceWatcher([Path.cwd(), source_folder(require)], supervisor.deploy)
                watcher.start()
                stack.callback(watcher.close)
            code = supervisor.run()
        else:
            app = load_app(require, workers=True)
            logs.configure(log_format, log_level)
            set_up(app, redis_url=redis_url, namespace=namespace, threads_per_node=threads)
            node = _make_node(app, queues, child, prefetch=not no_prefetch)
            if embedded:
                store = new_store()
                stack.enter_context(app.embedded(store))
                _open_store(stack, store, app.config.namespace)
            if web is not None:
                stack.enter_context(dashboard(app, web, health=node.trouble, no_auth=no_auth, redact=redact))
            code = _run(node)
    _let_go_of_streams()
    context.exit(code)


def _open_store(stack: ExitStack, store: object, namespace: str | None) -> str:
    """The embedded store listens; its URL."""
    url = stack.enter_context(serving(store))
    settings = f"LOWQ_REDIS_URL={url}"
    if namespace not in (None, "lowq"):
        settings += f" LOWQ_NAMESPACE={namespace}"
    click.echo(f"the store listens at {url}; in another terminal: {settings} lowq stats")
    return url


# --- a node ---


def _make_node(app: Lowq, queues: tuple[str, ...], child: Supervised | None, *, prefetch: bool) -> Node:
    def tell() -> None:
        if child is not None:
            child.ready(app.config.shutdown_timeout)

    try:
        return Node(app, queues=queues or None, prefetch=prefetch, on_ready=tell)
    except ConfigError as error:
        raise Failure(str(error), USAGE if queues else FAILED) from None


def _run(node: Node) -> int:
    try:
        return node.run()
    except LowqError as error:
        passing = isinstance(error, RedisUnavailable)
        raise Failure(message_of(error, ", or try it without Redis: --embedded"), FAILED, passing=passing) from None
    except Exception as error:  # of on_server_init, or of a worker's __init__
        message = f"the node could not start ({in_short(error)}), see above"
        raise Failure(message, trace=users_traceback(error)) from None


def _let_go_of_streams() -> None:
    """Whoever read them may have gone; then Python would end with a code of its own when it flushes them."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def _in_format(log_format: LogFormat | None, log_level: str | None) -> Iterator[None]:
    """What ends the command goes to the log when that is for machines: who reads JSON gets nothing else."""
    try:
        yield
    except (Failure, LowqError) as error:
        if log_format != "json":
            raise
        failure = error if isinstance(error, Failure) else failure_of(error)
        logs.configure(log_format, log_level)
        log.critical("%s", failure.message, extra={"event": "failed_to_start", **_trace(failure)})
        _let_go_of_streams()
        click.get_current_context().exit(failure.exit_code)


def _trace(failure: Failure) -> dict[str, str]:
    return {"exception": failure.trace.rstrip()} if failure.trace else {}


# --- a process of a supervisor ---


@contextmanager
def _reporting(supervised: str | None, log_format: LogFormat | None) -> Iterator[Supervised | None]:
    """For a process of a supervisor: why it fails is told to that, which logs it, and not to people."""
    if supervised is None:
        yield None
        return
    try:
        child = Supervised(supervised)
    except ValueError:
        raise Failure(f"{OPTION} is for the processes of a supervisor: lowq run --processes N", USAGE) from None
    try:
        yield child
    except LowqError as error:
        _report(child, failure_of(error), log_format)
    except Failure as failure:
        _report(child, failure, log_format)


def _report(child: Supervised, failure: Failure, log_format: LogFormat | None) -> None:
    if failure.trace:  # it is too long for the pipe
        if log_format == "json":
            logs.configure(log_format, None)
            log.error("%s", failure.message, extra={"event": "failed_to_start", **_trace(failure)})
        else:
            click.echo(failure.trace, err=True, nl=False)
    if not child.failed(failure.message, passing=failure.passing):
        failure.trace = ""
        raise failure
    click.get_current_context().exit(failure.exit_code)


def _command(context: click.Context) -> list[str]:
    """The command of a supervisor's processes: this one, as it was typed, but for the options that are its own."""
    own = {"processes", "reload", "embedded", "supervised"}
    command = [*_program(), "run"]
    for param in context.command.params:
        name = param.name or ""
        if name in own or context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        option = next(opt for opt in param.opts if opt.startswith("--"))
        value = context.params[name]
        if isinstance(param, click.Option) and param.is_flag:
            command.append(option)
        else:
            command += [f"{option}={item}" for item in (value if param.multiple else [value])]
    return command


def _program() -> list[str]:
    """How this program was started, up to the arguments: `python -W error -m lowq`, or `python /usr/bin/lowq`."""
    given = len(sys.orig_argv) - len(sys.argv) + 1
    script = Path(sys.argv[0])
    is_lowq = script.name == "lowq" or script.parent == Path(__file__).parents[1]
    if is_lowq and given > 1 and sys.orig_argv[given:] == sys.argv[1:]:
        return [sys.executable, *sys.orig_argv[1:given]]
    return [sys.executable, "-m", "lowq"]
