"""The process of a command: its standard streams, and what process 1 of a container has to do."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: `si_code` of a signal that the kernel itself has sent, as for Ctrl-C: all processes of the terminal have it.
_FROM_KERNEL = 128
#: Those that are for the process itself.
_OWN = frozenset(
    {"SIGKILL", "SIGSTOP", "SIGCHLD", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP"}
)


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
    """Has INT and TERM call ``stop``, each time, for the time of the block."""
    before = {number: signal.signal(number, lambda *_: stop()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
