"""A command as a process: its standard streams, process 1 of a container, how it was started, what it reports to a
supervisor, and how a node gets new code, which the same process executes.
"""

import atexit
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from lowq import logs
from lowq.cli.output import Failure, WrongUsage, failure_of
from lowq.errors import LowqError
from lowq.logs import LogFormat
from lowq.node.reload import NewCode
from lowq.supervisor.dashboard import DashboardProcess
from lowq.supervisor.process import OPTION, READY_SECONDS, Child, Supervised
from lowq.supervisor.supervisor import current_folder, has_terminal

log = logging.getLogger("lowq.cli")


#: Carries the nonce of the leases to new code. It counts in this process alone: whatever inherits it has another pid.
_VARIABLE = "LOWQ_RELOADED"

Kind = TypeVar("Kind", bound=Supervised)

supervised_option = click.option(OPTION, hidden=True, help="What a supervisor passes to its processes.")

#: `si_code` of a signal that the kernel itself has sent, as for Ctrl-C: all processes of the terminal have it.
_FROM_KERNEL = 128
#: Signals that are for the process itself, and not passed on.
_OWN = frozenset(
    {"SIGKILL", "SIGSTOP", "SIGCHLD", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP"}
)


# --- streams, signals, process 1 ---


def open_closed_streams() -> None:
    """Puts the null device where standard input, output or error was closed (``2>&-``). Otherwise the next file or
    connection that is opened gets its number, and what is written to the stream.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", errors="backslashreplace", closefd=False))  # noqa: SIM115 - for as long as the process


def drop_broken_streams() -> None:
    """Flushes standard output and error; one that can't be written to any more becomes the null device. Otherwise
    Python would end with a code of its own when it flushes them at its end.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def serve_as_process_1() -> None:
    """Returns in a child, which goes on as the command. Process 1 of a container stays behind: it passes signals on,
    reaps the orphans that it is given, and ends as the child ends. To be called before there is any thread.
    """
    numbers = [number for number in signal.valid_signals() if _name(number) not in _OWN]
    signal.pthread_sigmask(signal.SIG_BLOCK, [*numbers, signal.SIGCHLD])
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [*numbers, signal.SIGCHLD])
        return
    while True:
        got = signal.sigwaitinfo([*numbers, signal.SIGCHLD])
        if got.si_signo == signal.SIGCHLD:
            _reap(child)
        elif got.si_code != _FROM_KERNEL or got.si_signo == signal.SIGHUP:
            # That a terminal was closed only its leader learns.
            os.kill(child, got.si_signo)


def _name(number: int) -> str:
    return number.name if isinstance(number, signal.Signals) else ""


def _reap(child: int) -> None:
    """Takes all processes that have ended off the list; ends as the child does."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
        if pid == 0:
            return


@contextmanager
def stopped_by_signals(stop: Callable[[], object]) -> Iterator[None]:
    """Calls ``stop`` at each INT and TERM, for the time of the block."""
    before = {number: signal.signal(number, lambda *_: stop()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- how the process was started, and what it reports ---


def program() -> list[str]:
    """The command line of this program without its arguments: `python -W error -m lowq`, or `python /usr/bin/lowq`."""
    given = len(sys.orig_argv) - len(sys.argv) + 1
    script = Path(sys.argv[0])
    is_lowq = script.name == "lowq" or script.parent == Path(__file__).parents[1]
    if is_lowq and given > 1 and sys.orig_argv[given:] == sys.argv[1:]:
        return [sys.executable, *sys.orig_argv[1:given]]
    return [sys.executable, "-m", "lowq"]


def typed_options(context: click.Context, names: Collection[str]) -> list[str]:
    """The options of these names that were typed, as arguments of another process."""
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
    supervised: str | None, log_format: LogFormat | None, log_level: str | None, kind: Callable[[str], Kind]
) -> Iterator[Kind | None]:
    """Reports why the command fails: of a process of a supervisor, to the supervisor, which logs it; with JSON logs, in
    the log, as their readers get nothing else; otherwise to people. ``kind``: makes the child of ``supervised``.
    """
    is_json = log_format == "json"
    if is_json:  # and anew once the application, which may set up logging, is loaded
        logs.configure(log_format, log_level)
    child = None
    try:
        if supervised is not None:
            try:
                child = kind(supervised)
            except ValueError:
                raise WrongUsage(f"{OPTION} is for the processes of a supervisor: lowq run --processes N") from None
        yield child
    except (Failure, LowqError) as error:
        failure = error if isinstance(error, Failure) else failure_of(error)
        if is_json:
            logs.configure(log_format, log_level)
        trace = {"exception": failure.trace.rstrip()} if failure.trace else {}
        record = {"event": "failed_to_start", **trace}
        if child is not None:
            if is_json and trace:  # it is too long for the pipe
                log.error("%s", failure.message, extra=record)
            elif trace:
                click.echo(failure.trace, err=True, nl=False)
            if child.failed(failure.message, passing=failure.passing):
                click.get_current_context().exit(failure.exit_code)
            failure.trace, record = "", {"event": "failed_to_start"}
        if not is_json:
            raise failure from None
        log.critical("%s", failure.message, extra=record)
        drop_broken_streams()
        click.get_current_context().exit(failure.exit_code)


@dataclass(slots=True)
class Launch:
    """The command line, folder and environment of this process, and the leases that its code hands over to new code.
    Make it before the application is loaded, which may change all of them.
    """

    folder: str = field(default_factory=current_folder)
    command: list[str] = field(default_factory=lambda: [*program(), *sys.argv[1:]])
    has_terminal: bool = field(default_factory=has_terminal)
    environment: dict[str, str] = field(default_factory=dict)
    #: The nonce of the leases that the code before this one has kept; None: there was none.
    nonce: str | None = None
    #: The address of the dashboard of the code before this one, if there was one.
    web: str | None = None
    #: The dashboard of this code.
    dashboard: DashboardProcess | None = None
    #: The nonce of the leases that this code has kept for the next one.
    succeeds_as: str | None = None

    def __post_init__(self) -> None:
        carried = os.environ.pop(_VARIABLE, None)
        self.environment = dict(os.environ)
        if carried is not None and (values := json.loads(carried))["pid"] == os.getpid():
            self.nonce, self.web = values["nonce"], values["web"]

    def new_code(self, refusal: str, supervisor: Mapping[str, Any]) -> NewCode:
        """The way for the node of this process to get new code; the arguments are fields of it."""
        return NewCode(
            check=self._check_code, terminal_closed=lambda: self.has_terminal and not has_terminal(),
            on_kept=self._end_dashboard, refusal=refusal, supervisor=supervisor,
        )  # fmt: skip

    def _check_code(self) -> str | None:
        """Returns why the code that is on the disk now can't be run, or None. Another process loads it, and
        reports that it could (`Supervised.ready`). If this process dies meanwhile, so does that one.
        """
        command = [*self.command, "--check"]
        try:
            child = Child.start(command, self.folder, "check", time.monotonic(), environment=self.environment)
        except OSError as error:
            return f"it could not be started: {error}"
        try:
            how = child.await_ready(READY_SECONDS)
            return None if how is None else child.reason or f"its process {how}"
        finally:
            # It has nothing more to do, and nothing to finish.
            child.kill()
            child.process.wait()
            child.ended()

    def _end_dashboard(self) -> None:
        if self.dashboard is not None:
            self.dashboard.stop(at_once=True)

    def go_on(self) -> None:
        """Executes the new code in this process, if the node has kept its leases for it; then it does not return. Exit
        handlers are called first.

        Raises:
            Failure: the system can't execute it.
        """
        if self.succeeds_as is None:
            return
        atexit._run_exitfuncs()
        bind = None if self.dashboard is None else self.dashboard.bind
        carried = json.dumps({"pid": os.getpid(), "nonce": self.succeeds_as, "web": bind})
        try:
            os.chdir(self.folder)
            os.execve(self.command[0], self.command, {**self.environment, _VARIABLE: carried})
        except OSError as error:
            raise Failure(f"the new code could not be started: {error}; the leases of the node run out") from None
