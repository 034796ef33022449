"""``lowq run``: a node, or a supervisor of several."""

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

import lowq
from lowq import logs
from lowq.application import Lowq, all_applications
from lowq.cli.group import log_options, metrics_options, set_up, setting_option, with_connection
from lowq.cli.health import health_option, serving_health
from lowq.cli.loading import app_of_project, in_short, load_given, source_folder, users_traceback
from lowq.cli.output import Failure, WrongUsage, message_of
from lowq.cli.process import Launch, drop_broken_streams, program, reporting, supervised_option, typed_options
from lowq.cli.web import DASHBOARD_OPTIONS, address, announce, dashboard, with_dashboard_options
from lowq.errors import EXIT_CUT_SHORT, ConfigError, LowqError, RedisUnavailable, ShardsCountError
from lowq.logs import LogFormat, get_log
from lowq.node.node import Node
from lowq.node.signals import HeldSignals
from lowq.node.watchdog import end_process_by
from lowq.store import new_store
from lowq.store.embedded import serving
from lowq.supervisor.process import Supervised
from lowq.supervisor.supervisor import Supervisor
from lowq.work.loop import add_log_context

log = get_log("lowq.cli")
supervisor_log = get_log("lowq.supervisor")

#: Folders with code that nobody edits; hidden ones are left out too.
_IGNORED = {"__pycache__", "node_modules", "site-packages"}
#: Seconds that a node which ends waits for its relay of an outbox: that may end at any moment.
RELAY_SECONDS = 1.0
#: Options that a process of a supervisor is given as they were typed.
_PASSED_ON = {
    "require", "redis_url", "namespace", "threads", "concurrency", "queues", "no_prefetch", "log_format", "log_level",
    "graphite", "statsd", "health", "outbox",
}  # fmt: skip


@click.command
@click.argument("app_named", metavar="[APP]", required=False)
@with_connection
@setting_option("threads_per_node", "-t", "--threads", metavar="N")
@setting_option("concurrency", "-c", "--concurrency", metavar="N")
@click.option("-q", "--queue", "queues", multiple=True, help="Only this queue. Repeatable.")
@click.option(
    "--processes", type=click.IntRange(1), metavar="N",
    help="N nodes, as processes of a supervisor, which replaces those that die and deploys new code on HUP.",
)  # fmt: skip
@click.option("--reload", is_flag=True, help="Deploy when a Python file changes: for development.")
@click.option("--embedded", is_flag=True, help="The store inside of this process: no Redis, gone at the end.")
@click.option("--no-prefetch", is_flag=True, help="One batch per round trip to Redis.")
@metrics_options
@setting_option("outbox", "--outbox", metavar="URL")
@click.option(
    "--web",
    type=address,
    metavar="HOST:PORT",
    help="The dashboard, too, in a process of its own; also with --processes.",
)
@with_dashboard_options
@health_option("Serve /livez, /readyz and /metrics of the node here; also with --processes.")
@log_options
@supervised_option
@click.option("--check", is_flag=True, hidden=True, help="Load the code, see whether it can be run, and end.")
@click.pass_context
def run(
    context: click.Context, /, app_named: str | None, require: str | None, redis_url: str | None, namespace: str | None,
    threads: int | None, concurrency: int | None, queues: tuple[str, ...], processes: int | None, reload: bool,
    embedded: bool, no_prefetch: bool, graphite: str | None, statsd: str | None, outbox: str | None,
    web: tuple[str, int] | None, health: str | None, log_format: LogFormat | None, log_level: str | None,
    supervised: str | None, check: bool, **_dashboard: Any,
) -> None:  # fmt: skip
    """Run a node: performs the jobs of the workers in APP: a file, pkg.module or pkg.module:app.

    Without APP, or -r, the one of [tool.lowq] in pyproject.toml: app = "shop.workers".

    TERM and Ctrl-C stop it, a second Ctrl-C at once; TSTP makes it quiet; TTIN logs the stacks of all threads. HUP
    makes it finish what runs and go on with the code that is on the disk then, in the same process.

    With --processes (also 1) or --reload, HUP or USR2 deploy: processes with the code that is on the disk now are
    started, and when all are ready the old ones finish what they perform and end.
    """
    if app_named is not None:
        if require not in (None, app_named):
            raise WrongUsage(f"{app_named} and -r {require} say two things: leave one of them out")
        require = context.params["require"] = app_named
        context.set_parameter_source("require", ParameterSource.COMMANDLINE)  # as processes are given it
    if require is None and app_of_project() is None:
        raise WrongUsage(
            "a node needs your workers, and no pyproject.toml here or above names them: write lowq run app.py, "
            'lowq run shop.workers, or in pyproject.toml [tool.lowq] app = "shop.workers"'
        )
    if embedded and redis_url is not None:
        raise WrongUsage("--embedded brings its own store; leave out --redis-url")
    launch = Launch()
    with reporting(supervised, log_format, log_level, Supervised) as child, ExitStack() as stack:
        if processes is not None or reload:
            logs.configure(log_format, log_level)
            command = [*program(), "run", *typed_options(context, _PASSED_ON)]
            store = [f"--redis-url={_open_store(stack, new_store(), namespace)}"] if embedded else []
            supervisor = Supervisor([*command, *store], processes or 1, waits_for_change=reload)
            if web is not None:
                options = [*typed_options(context, DASHBOARD_OPTIONS), *store]
                supervisor.dashboard = stack.enter_context(
                    dashboard(options, web, launch.folder, health=supervisor.trouble, patient=reload)
                )
            if health is not None:
                stack.enter_context(serving_health(address(health), supervisor.vitals))
            if reload:
                stack.enter_context(deploying_changes([Path.cwd(), source_folder(require)], supervisor.deploy))
            signal.signal(signal.SIGTERM, lambda *_: None)  # once its processes have ended it stops already
            code = supervisor.run()
        else:
            held = HeldSignals(stops=launch.nonce is not None)
            app = load_given(require, workers=True)
            assert app is not None  # one of them says which
            logs.configure(log_format, log_level)
            add_log_context()
            set_up(
                app, redis_url=redis_url, namespace=namespace, threads_per_node=threads, concurrency=concurrency,
                graphite=graphite, statsd=statsd, outbox=outbox,
            )  # fmt: skip
            _warn_of_other_workers(app)
            started_by = child.supervisor if child else {}
            new_code = launch.new_code(_reload_refusal(app, child, embedded=embedded), started_by)
            node = _make_node(
                app, queues, child, prefetch=not no_prefetch, new_code=new_code, resumes_as=launch.nonce,
                held_signals=held, reports_vitals=health is not None,
            )  # fmt: skip
            if check:
                _report_check(app, node, child)
                context.exit()
            store = []
            if embedded:
                embedded_store = new_store()
                stack.enter_context(app.embedded(embedded_store))
                store = [f"--redis-url={_open_store(stack, embedded_store, app.config.namespace)}"]
            if web is not None:
                options = [*typed_options(context, DASHBOARD_OPTIONS), *store]
                launch.dashboard = stack.enter_context(
                    dashboard(options, web, launch.folder, health=node.trouble, was_at=launch.web)
                )
            if health is not None and child is None:
                stack.enter_context(serving_health(address(health), node.vitals))
            if app.config.outbox is not None:
                stack.enter_context(_relaying(app, app.config.outbox))
            held.hold_stops()
            code = _run(node)
            if node.end_by is not None:
                end_process_by(node.end_by, code or EXIT_CUT_SHORT, at_once=lambda: signal.SIGINT in held.numbers)
            launch.succeeds_as = node.succeeds_as
    drop_broken_streams()
    launch.go_on()
    context.exit(code)


def _open_store(stack: ExitStack, store: object, namespace: str | None) -> str:
    """Has the embedded store listen; returns its URL."""
    url = stack.enter_context(serving(store))
    settings = f"LOWQ_REDIS_URL={url}"
    if namespace not in (None, "lowq"):
        settings += f" LOWQ_NAMESPACE={namespace}"
    announce(f"the store listens at {url} for other terminals: {settings} lowq stats", "store", url=url)
    return url


# --- --reload ---


@contextmanager
def deploying_changes(folders: Iterable[Path], deploy: Callable[[str], object]) -> Iterator[None]:
    """For the time of the block, calls ``deploy`` with the names whenever Python files in the folders, or below them,
    change: in a thread of its own.

    Raises:
        ConfigError: the extra `reload` is not installed.
    """
    try:
        import watchfiles
    except ModuleNotFoundError:
        raise ConfigError("--reload needs watchfiles: pip install 'lowq[reload]'") from None
    logging.getLogger("watchfiles").setLevel(logging.WARNING)  # it would log each change, as we do
    watched = outermost(folders)
    closed = threading.Event()

    def watch() -> None:
        shown = ", ".join(map(str, watched))
        is_first = True
        try:
            for changes in watchfiles.watch(
                *watched, watch_filter=lambda _, path: any(is_source(Path(path), folder) for folder in watched),
                stop_event=closed, yield_on_timeout=True, rust_timeout=500, ignore_permission_denied=True,
            ):  # fmt: skip
                if is_first:  # perhaps without any change: now the watch stands
                    is_first = False
                    supervisor_log.info("watching Python files in %s", shown, extra={"event": "watching"})
                if changes:
                    names = sorted({Path(path).name for _, path in changes})
                    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                    deploy(f"{', '.join(names[:3])}{more} changed")
        except Exception as error:
            supervisor_log.exception("%s can't be watched any more: %s", shown, error, extra={"event": "watch_failed"})

    thread = threading.Thread(target=watch, name="lowq-reload", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join()


def is_source(path: Path, folder: Path) -> bool:
    """Whether that is a Python file below the folder that somebody may edit."""
    if path.suffix != ".py" or not path.is_relative_to(folder):
        return False
    parts = path.relative_to(folder).parts
    return not any(part.startswith(".") or part in _IGNORED for part in parts)


def outermost(folders: Iterable[Path]) -> list[Path]:
    """The folders, resolved, without those that lie in others of them."""
    resolved = dict.fromkeys(folder.resolve() for folder in folders)
    return [folder for folder in resolved if not any(other in folder.parents for other in resolved)]


# --- a node ---


def _warn_of_other_workers(app: Lowq) -> None:
    """Names the workers of other applications that were loaded, too: nobody performs their jobs here."""
    for other in all_applications():
        if other is not app and other.workers:
            whose = "the default application" if other is lowq.app else "another application"
            log.warning(
                "workers of %s are not run by this node: %s; decorate them with the worker() of the application that "
                "it runs, or run that one by a node of its own", whose, ", ".join(other.workers),
                extra={"event": "other_workers", "queues": list(other.workers)},
            )  # fmt: skip


def _make_node(
    app: Lowq, queues: tuple[str, ...], child: Supervised | None, *, reports_vitals: bool, **options: Any
) -> Node:  # fmt: skip
    def report() -> dict[str, Any]:
        vitals = node.vitals() if reports_vitals else None
        return {"trouble": node.trouble(), **({} if vitals is None else vitals.shown())}

    def report_ready() -> None:
        if child is not None:
            child.ready(app.config.shutdown_timeout, report)

    node = Node(app, queues=queues or None, on_ready=report_ready, **options)
    return node


@contextmanager
def _relaying(app: Lowq, database: str) -> Iterator[None]:
    """Relays the outbox of a database for the time of the block, beside the node: see `lowq.contrib.outbox`.

    Raises:
        ConfigError: it is no database that the outbox works with.
    """
    from lowq.contrib.outbox import Relay  # nodes without one do without it

    relay = Relay(app, database)
    relay.start()
    try:
        yield
    finally:
        relay.stop(RELAY_SECONDS)


def _reload_refusal(app: Lowq, child: Supervised | None, *, embedded: bool) -> str:
    """Says why the node can't take new code in its process, and what to do instead; empty: it can."""
    if child is not None:
        return f"it is a process of a supervisor: send HUP to that one, pid {os.getppid()} on {socket.gethostname()}"
    if embedded or app.config.redis_url.startswith("memory://"):
        return "its store is inside of its process, and would be lost: stop it and start it again"
    return ""


def _report_check(app: Lowq, node: Node, child: Supervised | None) -> None:
    """Reports that the code can be run: with strict_shards_count the queues have the shards that it declares, and the
    hooks of the application's start return. lowq writes nothing.

    Raises:
        ShardsCountError, RedisUnavailable, RedisRefused; Failure: the application's own code raised.
    """
    existing = {queue.name: queue.shards_count for queue in app.queues()}
    for queue, shards_count in node.queues.items() if app.config.strict_shards_count else ():
        if existing.get(queue, shards_count) != shards_count:
            raise ShardsCountError(queue, existing[queue], shards_count)
    try:
        node.rehearse()
    except LowqError:
        raise
    except Exception as error:
        raise _start_failure(error) from None
    if child is not None:
        child.ready(app.config.shutdown_timeout)


def _run(node: Node) -> int:
    try:
        return node.run()
    except ConfigError:
        raise  # exit code 2, as it has when it is found before
    except LowqError as error:
        passing = isinstance(error, RedisUnavailable)
        raise Failure(message_of(error, ", or try it without Redis: --embedded"), passing=passing) from None
    except Exception as error:
        raise _start_failure(error) from None


def _start_failure(error: Exception) -> Failure:
    """The failure for an error of on_server_init, or of a worker's __init__."""
    return Failure(f"the node could not start ({in_short(error)}), see above", trace=users_traceback(error))
