"""``lowq VERB``: finds the verb. What commands have in common: options, the application that they work on, the
question whether to do it, the entry in the log of what people did.
"""

import errno
import functools
import getpass
import io
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

import click

from lowq.application import Lowq
from lowq.cli.loading import load_given
from lowq.cli.output import Failure, WrongUsage, failure_of
from lowq.cli.process import drop_broken_streams, open_closed_streams, serve_as_process_1
from lowq.errors import EXIT_FAILED, EXIT_INTERRUPTED, ConfigError, LowqError
from lowq.guesses import VERBS
from lowq.logs import printable
from lowq.operate.audit import CLI, ActionRecord
from lowq.queue import Queue
from lowq.settings import SETTINGS

Command = Callable[..., None]

#: Errors of a write to a stream that can take nothing. EPIPE is handled by click.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


class Group(click.Group):
    """A group whose options may stand before the verb as well as behind it, and whose verb may be left out: run."""

    def __init__(self, *args: Any, sections: Mapping[str, Sequence[click.Command]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sections = sections
        for command in (command for commands in sections.values() for command in commands):
            self.add_command(command)

    def main(self, args: Sequence[str] | None = None, *more: Any, **kwargs: Any) -> Any:
        if args is None:  # the process is ours, and no test's or application's
            open_closed_streams()
            if os.getpid() == 1:
                serve_as_process_1()
        try:
            return super().main(args, *more, **kwargs)
        except OSError as error:
            if error.errno not in _UNWRITABLE or error.filename is not None:
                raise
            with suppress(OSError):
                click.echo(f"lowq: the output can't be written: {error}", err=True)
            drop_broken_streams()
            sys.exit(EXIT_FAILED)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._verb_first(args))

    def _verb_first(self, args: list[str]) -> list[str]:
        if args[:1] == ["help"]:
            return [*args[1:2], "--help"]
        own = {name for param in self.get_params(click.Context(self, **self.context_settings)) for name in param.opts}
        takes_value = {
            name
            for command in self.commands.values()
            for param in command.params
            if isinstance(param, click.Option) and not param.is_flag and param.name != "watch"
            for name in param.opts
        }
        position = 0
        while position < len(args) and args[position].startswith("-") and args[position] not in own:
            position += 2 if args[position] in takes_value else 1
        if not args or args[0] in own:
            return args
        if position >= len(args) or args[position] in own:
            return ["run", *args]
        return [args[position], *args[:position], *args[position + 1 :]]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        verb = args[0]
        if verb not in self.commands:
            near = get_close_matches(verb.replace("_", "-"), self.commands, 2, 0.5)
            if "." in verb or ":" in verb:  # no verb has one, but app.py and shop.workers do
                hint = f"did you mean: lowq run {verb}"
            elif verb in VERBS:
                hint = VERBS[verb]
            elif near:
                hint = f"did you mean {' or '.join(near)}?"
            else:
                hint = f"verbs are {', '.join(self.commands)}"
            raise WrongUsage(f"there is no verb {verb!r}; {hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        heed_signals()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # a terminal that isn't UTF-8 still gets everything
        try:
            return super().invoke(ctx)
        except LowqError as error:
            raise failure_of(error) from None
        except KeyboardInterrupt:
            ctx.exit(EXIT_INTERRUPTED)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's
        width = max(map(len, self.commands))
        for title, commands in self._sections.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(f"{command.name:<{width}}", command.get_short_help_str(60)) for command in commands]
                )


def heed_signals() -> None:
    """Lets INT and TERM end the process even if it was started with them ignored, as a job in the background of a
    script is with INT. Commands with handlers of their own put these in their place.
    """
    if threading.current_thread() is threading.main_thread():
        for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, handler)


def setting_option(setting: str, *flags: str, metavar: str) -> Callable[[Command], Command]:
    """An option for a setting, with its help, and checked before anything starts, also where a supervisor only passes
    it on.
    """
    declared = SETTINGS[setting]
    meaning = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", declared.help).partition(";")[0].replace("`", "")

    def check(context: click.Context, param: click.Parameter, value: str | None) -> Any:
        try:
            return None if value is None else declared.checked(value, name=param.opts[-1])
        except ConfigError as error:
            raise click.UsageError(str(error), context) from None

    return click.option(
        *flags, callback=check, metavar=metavar,
        help=f"{meaning[0].upper()}{meaning[1:]}. [env: {declared.variable}]",
    )  # fmt: skip


def options_of(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A decorator that adds all of these, in this order."""

    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return add


#: Adds -r, --redis-url and --namespace.
with_connection = options_of(
    click.option(
        "-r", "--require", metavar="APP", help="File, pkg.module or pkg.module:app with the workers or the settings."
    ),
    setting_option("redis_url", "--redis-url", metavar="URL"),
    setting_option("namespace", "--namespace", metavar="TEXT"),
)
#: Adds --graphite and --statsd.
metrics_options = options_of(
    setting_option("graphite", "--graphite", metavar="HOST:PORT"),
    setting_option("statsd", "--statsd", metavar="HOST:PORT"),
)

#: Adds --log-format and --log-level.
log_options = options_of(
    click.option(
        "--log-format", type=click.Choice(["text", "json"]), help="Default: text, or what the app has set up."
    ),
    click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error", "critical"], case_sensitive=False),
        help="Default: info.",
    ),
)


def with_app(command: Command) -> Command:
    """Adds the options that say which Redis is meant, and gives the command the application for it, ``app``."""

    @functools.wraps(command)
    def call(require: str | None, redis_url: str | None, namespace: str | None, **arguments: Any) -> None:
        command(app=open_app(require, redis_url, namespace), **arguments)

    return with_connection(call)  # type: ignore[no-any-return]


def open_app(require: str | None, redis_url: str | None, namespace: str | None) -> Lowq:
    """The application that -r, --redis-url and --namespace say; it is closed with the command."""
    app = load_given(require, workers=False) or Lowq()
    set_up(app, redis_url=redis_url, namespace=namespace)
    click.get_current_context().call_on_close(app.close)
    return app


def set_up(app: Lowq, **settings: Any) -> None:
    """The command line wins over code and environment."""
    for name, value in settings.items():
        if value is not None and value != getattr(app.config, name):
            setattr(app.config, name, value)


def used_queue(app: Lowq, name: str) -> Queue:
    """The handle of a queue that there is.

    Raises:
        UnknownQueueError: nobody has used it.
    """
    handle = app.queue(name)
    handle.shards_count  # noqa: B018 - raises
    return handle


def confirm(what: str, yes: bool) -> None:
    """Asks whether to do it.

    Raises:
        Failure: nobody can be asked, or the answer is no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise WrongUsage(f"this would {what}; add --yes to do it")
    if not click.confirm(printable(f"{what}?"), err=True):
        raise Failure("nothing was done")


yes_option = click.option("-y", "--yes", is_flag=True, help="Don't ask.")
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document, for machines.")
queue_argument = click.argument("queue")
optional_queue = click.argument("queue", required=False)
queues_argument = click.argument("queues", nargs=-1, metavar="[QUEUE...]")


# --- the log of what people did ---


def me() -> str:
    """The name of the one who types, as the operating system has it: user@host."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):
        return socket.gethostname()


def audited(app: Lowq, action: str, target: str, detail: Mapping[str, Any] | None = None) -> ActionRecord:
    """Writes the action of the block into the audit log: before it begins, and how it ended. The library writes none,
    so a verb that changes anything does it here.

    Raises:
        RedisUnavailable, RedisRefused: it can't be written; nothing was done.
    """
    given = {name: value for name, value in (detail or {}).items() if value not in (None, "", [])}
    return ActionRecord(app, me(), action, target, given, address=CLI)
