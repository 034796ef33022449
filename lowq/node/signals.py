"""Signals, and requests of other threads, which wake the thread in `Node.run`.

A signal's handler runs in the main thread, between any two of its instructions. It sets flags, writes a byte into a
pipe and leaves the rest to `Node.run`: a lock that it waited for could be held by the code that it interrupted.
"""

import os
import selectors
import signal
import threading
import weakref
from collections.abc import Callable
from enum import IntEnum
from types import FrameType
from typing import Any


class Request(IntEnum):
    """A request to `Node.run`: a byte in the pipe."""

    STOP = ord("s")
    QUIET = ord("q")
    DRAIN = ord("r")
    DUMP = ord("d")
    RELOAD = ord("h")
    #: The new code was checked.
    CHECKED = ord("c")


_REQUESTS = frozenset(Request)


class HeldSignals:
    """Signals that come while a process imports its application, for a node that begins then: without a handler HUP and
    USR2 would end it, TTIN and TSTP would stop it. INT and TERM end the import, except in new code (``stops``), which
    has leases to give up; a second INT ends that as well. Not in another thread than the main one.
    """

    def __init__(self, *, stops: bool = False) -> None:
        #: Those that came, in order.
        self.numbers: list[int] = []
        #: The handlers that were there before.
        self.before: dict[int, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            return
        for name in ("SIGHUP", "SIGUSR2", "SIGTTIN", "SIGTSTP", *(("SIGINT", "SIGTERM") if stops else ())):
            if hasattr(signal, name):
                self._hold(getattr(signal, name))
        if hasattr(signal, "pthread_sigmask"):  # they were blocked for an exec; whatever this process starts has them
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self.before)

    def hold_stops(self) -> None:
        """Holds INT and TERM, too, once the import has ended. Later, INT would strike in Python's own shutdown."""
        if self.before and signal.SIGTERM not in self.before:
            self._hold(signal.SIGINT)
            self._hold(signal.SIGTERM)

    def _hold(self, number: int) -> None:
        self.before[number] = signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in self.numbers:
            raise KeyboardInterrupt
        self.numbers.append(number)


class Signals:
    """The signals of a node, and the pipe by which they and other threads wake `Node.run`.

    ``is_stopping``: whether the node stops already. ``terminal_closed``: whether the terminal of the process was
    closed, which HUP says then; otherwise it asks for new code. None: HUP is left as it is. ``held``: what came before.
    """

    def __init__(
        self,
        is_stopping: Callable[[], bool],
        terminal_closed: Callable[[], bool] | None,
        held: HeldSignals | None = None,
    ) -> None:
        self._is_stopping = is_stopping
        self._held = held
        self._terminal_closed = terminal_closed
        #: A signal has asked for a stop.
        self.stop_requested = False
        #: INT has come a second time: what still runs is not waited for.
        self.cut_short = False
        self._pid = os.getpid()
        #: The handlers that were there before, while these are installed.
        self._before: dict[int, Any] = {}
        #: Those that were there before signals were held.
        self._originals: dict[int, Any] = {}
        self._wakeup_before = -1
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        weakref.finalize(self, _close, self._read, self._write)
        # `poll` and nothing else: `select` refuses descriptors above 1,023, and `epoll` needs one of its own, which an
        # application with too many open files doesn't get.
        self._selector = selectors.PollSelector()
        self._selector.register(self._read, selectors.EVENT_READ)

    def wake(self, request: Request) -> None:
        """Has `wait` return the request. May be called from any thread, and by a signal's handler."""
        try:
            os.write(self._write, bytes([request]))
        except BlockingIOError:
            pass  # Full of bytes that were not read yet: the reader wakes anyway.

    def wait(self, timeout: float | None) -> list[Request]:
        """Waits until something comes, up to ``timeout`` seconds, and returns it, in the order in which it came."""
        if not self._selector.select(timeout):
            return []
        return [Request(byte) for byte in os.read(self._read, 64) if byte in _REQUESTS]

    def install(self) -> None:
        """Handles TERM, INT, TSTP, TTIN, USR2, and HUP if there is new code to be had; does nothing in another thread
        than the main one. Those that were held come now.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        handlers: dict[int, Callable[[int, FrameType | None], None]] = {
            signal.SIGTERM: self._on_stop,
            signal.SIGINT: self._on_stop,
        }
        if hasattr(signal, "SIGTSTP"):
            handlers |= {
                signal.SIGTSTP: self._waking(Request.QUIET),
                signal.SIGTTIN: self._waking(Request.DUMP),
                signal.SIGUSR2: self._waking(Request.DRAIN),
            }
            if self._terminal_closed is not None:
                handlers[signal.SIGHUP] = self._on_hup
        self._pid = os.getpid()
        self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        self._originals = dict(self._before)
        # The kernel may give a signal to any thread, and the main thread, where Python runs the handler, would sleep
        # on in `poll`: so what runs at once in any thread writes a byte too (the number, which is no request).
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if self._held is not None:
            self._originals |= self._held.before
            came, self._held.numbers = self._held.numbers, []
            for number in came:
                if number in handlers:
                    handlers[number](number, None)

    def restore(self, *, block: bool) -> None:
        """Puts back the handlers that were there before. ``block``: the process is about to execute new code, and the
        signals would end it now; the new code gets them when it has handlers.
        """
        if not self._before:
            return
        before, self._before = self._before, {}
        if block:
            signal.pthread_sigmask(signal.SIG_BLOCK, before)
            before = self._originals  # also those of held signals: what is ignored stays so in an exec
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        if block and (self.stop_requested or self._is_stopping()):
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # came too late for this code

    # --- handlers ---

    def _waking(self, request: Request) -> Callable[[int, FrameType | None], None]:
        def handler(number: int, _frame: FrameType | None) -> None:
            if not self._is_for_a_child(number):
                self.wake(request)

        return handler

    def _on_stop(self, number: int, _frame: FrameType | None) -> None:
        if self._is_for_a_child(number):
            return
        if (self.stop_requested or self._is_stopping()) and number == signal.SIGINT:
            self.cut_short = True
        self.stop_requested = True
        self.wake(Request.STOP)

    def _on_hup(self, number: int, _frame: FrameType | None) -> None:
        if self._is_for_a_child(number):
            return
        assert self._terminal_closed is not None
        if not self._terminal_closed():
            self.wake(Request.RELOAD)
        elif self._originals[number] is not signal.SIG_IGN:  # `nohup` is for going on then
            self.stop_requested = True
            self.wake(Request.STOP)

    def _is_for_a_child(self, number: int) -> bool:
        """Whether this is a child, which a handler of a job has forked: it has inherited these handlers and the pipe. A
        signal that is to end the child must not stop the node that is its parent.
        """
        if os.getpid() == self._pid:
            return False
        before = self._originals[number]
        signal.signal(number, signal.SIG_DFL if before is None else before)
        os.kill(os.getpid(), number)
        return True


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
