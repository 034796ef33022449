"""A command as a process of another: how it is started, and how it reports why it can't do its work."""

import logging
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import click
from click.core import ParameterSource

from lowq import logs
from lowq.cli.failure import USAGE, Failure, failure_of
from lowq.errors import LowqError
from lowq.logs import LogFormat
from lowq.supervisor.process import OPTION, Supervised

log = logging.getLogger("lowq.cli")

Kind = TypeVar("Kind", bound=Supervised)

supervised_option = click.option(OPTION, hidden=True, help="What a supervisor passes to its processes.")


def program() -> list[str]:
    """How this program was started, up to the arguments: `python -W error -m lowq`, or `python /usr/bin/lowq`."""
    given = len(sys.orig_argv) - len(sys.argv) + 1
    script = Path(sys.argv[0])
    is_lowq = script.name == "lowq" or script.parent == Path(__file__).parents[1]
    if is_lowq and given > 1 and sys.orig_argv[given:] == sys.argv[1:]:
        return [sys.executable, *sys.orig_argv[1:given]]
    return [sys.executable, "-m", "lowq"]


def typed_options(context: click.Context, names: Collection[str]) -> list[str]:
    """Those of these options that were typed, as they can be typed again."""
    options = []
    for param in context.command.params:
        name = param.name or ""
        if name not in names or context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        option = next(opt for opt in param.opts if opt.startswith("--"))
        value = context.params[name]
        if isinstance(param, click.Option) and param.is_flag:
            options.append(option)
        else:
            options += [f"{option}={item}" for item in (value if param.multiple else [value])]
    return options


@contextmanager
def reporting(
    supervised: str | None, log_format: LogFormat | None, kind: Callable[[str], Kind]
) -> Iterator[Kind | None]:
    """For a process of a supervisor: why it fails is reported to the supervisor, which logs it, and not to people."""
    if supervised is None:
        yield None
        return
    try:
        child = kind(supervised)
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
            log.error("%s", failure.message, extra={"event": "failed_to_start", **trace_of(failure)})
        else:
            click.echo(failure.trace, err=True, nl=False)
    if not child.failed(failure.message, passing=failure.passing):
        failure.trace = ""
        raise failure
    click.get_current_context().exit(failure.exit_code)


def trace_of(failure: Failure) -> dict[str, str]:
    """Where in the user's code it went wrong, for the log."""
    return {"exception": failure.trace.rstrip()} if failure.trace else {}
