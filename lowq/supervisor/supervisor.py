"""The supervisor: the main process of ``lowq run --processes N``. It starts nodes as processes of their own, and does
none of their work; it doesn't even load the application.

1. start: one process; once it is ready, the others. So a broken application fails once, not N times;
2. replace a process that dies; give up when none gets ready, again and again;
3. deploy (HUP, USR2, a changed file): a new generation of processes, which load what is on the disk now. When all of
   them are ready, the old ones drain: they finish what they perform and end. When one fails, nothing changes;
4. stop (TERM, INT): all processes of all generations.

::

    starting --ready--> working --USR2--> draining --has finished-> ended
        |                  |                 |
        +------------------+------TERM-------+----> stopping -----> ended, by KILL when it needs too long
"""

import os
import selectors
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from types import FrameType

from lowq.clock import LONGEST_WAIT, duration
from lowq.errors import EXIT_CUT_SHORT, EXIT_FAILED, EXIT_OK, EXIT_REPLACE, EXIT_USAGE
from lowq.logs import get_log
from lowq.observe.health import Vitals, worst
from lowq.supervisor.dashboard import DashboardProcess
from lowq.supervisor.process import READY_SECONDS, Child, Generation, ProcessPlace, how_it_ended

log = get_log("lowq.supervisor")

#: Seconds between two log lines about draining processes that still perform.
REMINDER = 60.0
#: Seconds that processes have to end by themselves after a second INT.
HURRY = 5.0


class Supervisor:
    """Runs ``command`` in ``processes`` processes. All but `deploy` belongs to the main thread.

    ``waits_for_change``: where it would give up, it waits for the next deploy instead.
    """

    def __init__(
        self, command: Sequence[str], processes: int, *, waits_for_change: bool = False,
        ready_seconds: float = READY_SECONDS,
    ) -> None:  # fmt: skip
        self._command = command
        self._processes = processes
        self._waits_for_change = waits_for_change
        self._ready_seconds = ready_seconds
        self._folder = current_folder()
        self._generations = 0
        self._current = self._generation()
        #: The generation of a deploy that isn't finished.
        self._next: Generation | None = None
        #: Drained, or stopped while others go on.
        self._leaving: list[Child] = []
        self._signals: deque[int] = deque()
        #: The reason of the deploy that is wanted, if one is.
        self._wanted: str | None = None
        self._quiet = False
        self._stopping = False
        #: Runs beside the processes, whatever becomes of them: a deploy leaves it as it is.
        self.dashboard: DashboardProcess | None = None
        #: The worst exit code so far of processes that were to stop: cut short is worse than failed.
        self._exit_code = EXIT_OK
        self._gave_up: int | None = None
        self._remind_at = inf
        self._wakeup_read, self._wakeup_write = os.pipe()
        os.set_blocking(self._wakeup_read, False)
        os.set_blocking(self._wakeup_write, False)
        # The processes inherit the end for reading, and see it end with this process, however that dies.
        self._life_read, self._life_write = os.pipe()
        weakref.finalize(self, _close, self._wakeup_read, self._wakeup_write, self._life_read, self._life_write)

    # --- life ---

    def run(self) -> int:
        """Runs until it has to stop, or until it gives up; returns the exit code. For the main thread."""
        had_terminal = has_terminal()
        restore = self._install_signals()
        try:
            count = self._processes
            log.info("supervisor (pid %d) of %d %s", os.getpid(), count, _processes(count), extra={"event": "start"})
            while not (self._stopping and not any(self._children())):
                self._wait()
                now = time.monotonic()
                while self._signals:
                    self._obey(self._signals.popleft(), now, had_terminal)
                self._hear()
                self._reap(now)
                self._kill_overdue(now)
                if not self._stopping:
                    self._go_on(now)
            code = self._exit_code if self._gave_up is None else self._gave_up
            log.info("supervisor has stopped, exit code %d", code, extra={"event": "stopped", "exit_code": code})
            return code
        finally:
            restore()

    def trouble(self) -> str | None:
        """Why no job can be performed, or None. May be called from any thread; it is as of a moment ago."""
        processes = f"{self._processes} {_processes(self._processes)} of the supervisor"
        ready = self._current.ready()
        if not ready:
            return f"none of the {processes} is ready"
        troubles = [(child, child.trouble()) for child in ready]
        if any(trouble is None for _, trouble in troubles):
            return None
        child, trouble = troubles[0]
        return f"none of the {processes} is well; {child}: {trouble}"

    def vitals(self) -> Vitals:
        """How its processes are together: it is dead when all of them hang. May be called from any thread."""
        found = {child.label: child.vitals() for child in self._current.ready()}
        readings = {label: figures for label, each in found.items() for figures in each.readings.values()}
        unready = "the supervisor stops" if self._stopping else self.trouble()
        return Vitals(
            worst(each.dead for each in found.values()), unready or worst(each.unready for each in found.values()),
            readings,
        )  # fmt: skip

    def deploy(self, why: str) -> None:
        """Starts a new generation, after the one that is being started, if any. May be called from any thread."""
        self._wanted = why
        with suppress(BlockingIOError):  # full of bytes that were not read yet: the reader wakes anyway
            os.write(self._wakeup_write, b"w")

    def _working(self) -> list[Generation]:
        """The generations whose processes work, or are to work."""
        return [self._current] if self._next is None else [self._current, self._next]

    def _children(self) -> Iterator[Child]:
        for generation in self._working():
            yield from generation.children()
        yield from self._leaving

    def _wait(self) -> None:
        """Waits until there is a signal or a report, or something is due."""
        now = time.monotonic()
        due = [child.kill_at for child in self._children() if child.kill_at is not None and not child.killed]
        if not self._stopping:
            due.append(self._remind_at)
            due += [place.start_at for generation in self._growing() for place in generation.startable()]
            due += [at for generation in self._working() for _, at in self._awaited(generation)]
            if self._wanted is not None and self._next is None:
                due.append(now)
        timeout = max(min(min(due, default=inf) - now, LONGEST_WAIT), 0.0)
        pipes = [self._wakeup_read, *(pipe for child in self._children() if (pipe := child.report_pipe()) is not None)]
        # `select` refuses descriptors above 1,023, and `epoll` would need one of its own.
        with selectors.PollSelector() as selector:
            for pipe in pipes:
                selector.register(pipe, selectors.EVENT_READ)
            selector.select(timeout)
        with suppress(BlockingIOError):
            os.read(self._wakeup_read, 65536)

    # --- processes ---

    def _generation(self) -> Generation:
        self._generations += 1
        return Generation(self._generations, self._processes)

    def _growing(self) -> list[Generation]:
        """The generations whose places are to be filled."""
        return self._working()[self._quiet :]

    def _awaited(self, generation: Generation) -> list[tuple[Child, float]]:
        """The processes that should become ready, and the monotonic time at which each has had long enough."""
        waiting = [child for child in generation.children() if not child.ready]
        return [(child, child.started_at + self._ready_seconds) for child in waiting if not child.late]

    def _go_on(self, now: float) -> None:
        if self._wanted is not None and self._next is None:
            why, self._wanted = self._wanted, None
            self._next = self._generation()
            log.info(
                "deploy (%s): generation %d starts", why, self._next.number,
                extra={"event": "deploy", "generation": self._next.number},
            )  # fmt: skip
        if self._next is not None:
            if self._next.is_complete():
                self._promote(self._next)
            elif late := [child for child, due in self._awaited(self._next) if due <= now]:
                self._abandon(f"{late[0]} is not ready after {self._ready_seconds:g} s", now)
        for child, due in self._awaited(self._current):
            if due <= now:
                child.late = True
                log.warning(
                    "%s is not ready after %g s; waiting on", child, self._ready_seconds, extra={"event": "late"}
                )
        for generation in self._growing():
            for place in generation.startable():
                # One that can't be started may end the deploy, or everything.
                if place.start_at <= now and not self._stopping and generation in self._working():
                    self._start(generation, place, now)
        if now >= self._remind_at:
            self._remind(now)

    def _start(self, generation: Generation, place: ProcessPlace, now: float) -> None:
        label = f"{generation.number}.{place.number}"
        try:
            place.child = Child.start(self._command, self._folder, label, now, life=self._life_read)
        except OSError as error:
            self._lost(generation, place, f"process {label} could not be started: {error}", now)
            return
        log.info("%s starts", place.child, extra={"event": "process_start", "child": place.child.process.pid})

    def _hear(self) -> None:
        for generation in self._working():
            for child in generation.children():
                if child.hear():
                    generation.became_ready()
                    log.info("%s is ready", child, extra={"event": "process_ready", "child": child.process.pid})
        for child in self._leaving:
            child.hear()  # or its pipe would stay readable

    def _reap(self, now: float) -> None:
        for generation in self._working():
            for place in generation.places:
                if generation not in self._working():
                    break  # a deploy that has just failed: its other processes are leaving
                if place.child is not None and (code := place.child.ended()) is not None:
                    child, place.child = place.child, None
                    self._ended(generation, place, child, code, now)
        for child in self._leaving[:]:
            code = child.ended()
            if code is not None:
                self._leaving.remove(child)
                self._left(child, code)

    def _ended(self, generation: Generation, place: ProcessPlace, child: Child, code: int, now: float) -> None:
        """A process of a generation that works, or is to work, has ended."""
        if child.sent is not None:
            self._left(child, code)
            return
        lived = now - child.started_at
        how = f"{child} {how_it_ended(code)}"
        if child.ready:
            how += f", {duration(lived)} after its start"
        else:
            how += " before it was ready" + (f": {child.reason}" if child.reason else "")
        self._lost(generation, place, how, now, child, code)

    def _lost(
        self, generation: Generation, place: ProcessPlace, how: str, now: float, child: Child | None = None,
        code: int = 1,
    ) -> None:  # fmt: skip
        """A place has lost its process, or could not get one, and nobody has asked for that."""
        if generation is self._next:
            self._abandon(how, now)
            return
        if self._quiet:
            log.warning("%s; not replaced, as it is quiet", how, extra={"event": "process_died"})
            return
        delay = generation.lost(place, child, now, asked_for=code == EXIT_REPLACE)
        if delay is None:
            usage = code == EXIT_USAGE and child is not None and child.reason is not None
            self._give_up(how, EXIT_USAGE if usage else EXIT_FAILED, now)
            return
        when = f"in {duration(delay)}" if delay else "at once"
        log.warning("%s; replaced %s", how, when, extra={"event": "process_died"})

    def _left(self, child: Child, code: int) -> None:
        """A process that was to end has done so, or died of something else."""
        if code in (EXIT_OK, -signal.SIGTERM):
            log.info("%s has ended", child, extra={"event": "process_end", "child": child.process.pid})
        else:
            log.warning("%s %s", child, how_it_ended(code), extra={"event": "process_died", "child": child.process.pid})
            if self._stopping and child.ready:
                is_cut_short = code == EXIT_CUT_SHORT or child.killed
                failed = EXIT_CUT_SHORT if is_cut_short else EXIT_OK if code == EXIT_REPLACE else EXIT_FAILED
                self._exit_code = max(self._exit_code, failed)
        if not any(other.sent is signal.SIGUSR2 for other in self._leaving):
            self._remind_at = inf

    def _give_up(self, how: str, code: int, now: float) -> None:
        if self._waits_for_change:
            self._current.rest()
            log.error("%s; waiting for a change", how, extra={"event": "waiting"})
            return
        times = f", {self._current.failures} times in a row" if self._current.failures > 1 else ""
        log.critical("giving up, as no process becomes ready: %s%s", how, times, extra={"event": "give_up"})
        self._gave_up = code
        self._stop(now)

    # --- deploys ---

    def _promote(self, generation: Generation) -> None:
        """All new processes are ready: the old ones are not needed any more."""
        now = time.monotonic()
        old, self._current, self._next = self._current, generation, None
        self._quiet = False
        for child in old.children():
            if child.ready:
                child.drain()
            else:
                child.stop(now)
            self._leaving.append(child)
        self._remind_at = now + REMINDER
        log.info(
            "deployed: generation %d works, %d old %s to finish and end", generation.number, len(old.children()),
            _processes(len(old.children())), extra={"event": "deployed", "generation": generation.number},
        )  # fmt: skip

    def _abandon(self, why: str, now: float) -> None:
        """The deploy is over, and changes nothing."""
        generation, self._next = self._next, None
        assert generation is not None
        for child in generation.children():
            child.stop(now)
            self._leaving.append(child)
        stay = len(self._current.ready())
        log.error(
            "the deploy has failed: %s; %s", why,
            f"{stay} {_processes(stay)} of generation {self._current.number} stay" if stay else "nothing runs",
            extra={"event": "deploy_failed", "generation": generation.number},
        )  # fmt: skip

    def _remind(self, now: float) -> None:
        draining = [child for child in self._leaving if child.sent is signal.SIGUSR2]
        self._remind_at = now + REMINDER if draining else inf
        if draining:
            log.info(
                "%d old %s still to finish: %s",
                len(draining), _processes(len(draining)), ", ".join(map(str, draining)),
                extra={"event": "draining", "processes": len(draining)},
            )  # fmt: skip

    # --- signals ---

    def _install_signals(self) -> Callable[[], None]:
        assert threading.current_thread() is threading.main_thread()
        self._hup_was_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

        # Runs in the main thread between any two of its instructions, so it only writes down which signal that was.
        # CHLD has one so that `poll` wakes: the byte that does so is written for signals with a handler.
        def note(number: int, _frame: FrameType | None) -> None:
            self._signals.append(number)

        names = ("TERM", "INT", "HUP", "USR2", "CHLD", "TSTP", "TTIN")
        numbers = [signal.Signals[f"SIG{name}"] for name in names]
        before = {number: signal.signal(number, note) for number in numbers}
        wakeup_before = signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)

        def restore() -> None:
            signal.set_wakeup_fd(wakeup_before)
            for number, handler in before.items():
                signal.signal(number, handler)

        return restore

    def _obey(self, number: int, now: float, had_terminal: bool) -> None:
        if number == signal.SIGHUP and had_terminal and not has_terminal():
            # Nobody has sent it: the terminal was closed. `nohup` is for going on then.
            if self._hup_was_ignored:
                return
            number = signal.SIGTERM
        if number == signal.SIGINT and self._stopping:
            self._hurry(now)
        elif number in (signal.SIGTERM, signal.SIGINT):
            self._stop(now)
        elif number == signal.SIGTTIN:
            self._dump(now)
        elif self._stopping:
            return
        elif number in (signal.SIGHUP, signal.SIGUSR2):
            self._wanted = signal.Signals(number).name.removeprefix("SIG")
        elif number == signal.SIGTSTP:
            self._go_quiet(now)

    def _stop(self, now: float) -> None:
        if self._stopping:
            return
        self._stopping = True
        children = list(self._children())
        if children:
            log.info("supervisor stops %d %s", len(children), _processes(len(children)), extra={"event": "stop"})
        for child in children:
            child.stop(now)

    def _hurry(self, now: float) -> None:
        for child in self._children():
            if child.ready:
                child.send(signal.SIGINT)  # it has had TERM: a second signal ends it at once
                child.kill_at = min(child.kill_at or inf, now + HURRY)
            else:
                child.kill()

    def _go_quiet(self, now: float) -> None:
        self._quiet, self._wanted = True, None
        log.warning("supervisor and its processes go quiet: they take nothing more", extra={"event": "quiet"})
        if self._next is not None:
            self._abandon("the supervisor goes quiet", now)
        self._current.rest()
        for child in self._current.children():
            if child.ready:
                child.send(signal.SIGTSTP)
            else:
                child.stop(now)  # it has no handler for TSTP yet, and would begin to take jobs

    def _dump(self, now: float) -> None:
        states = []
        for child in self._children():
            state = {None: "working", signal.SIGUSR2: "draining", signal.SIGTERM: "stopping"}[child.sent]
            states.append(f"{child}: {state if child.ready else 'starting'}, for {duration(now - child.started_at)}")
            if child.ready:  # before, it has no handler for that
                child.send(signal.SIGTTIN)
        log.warning("processes:\n%s", "\n".join(states) or "none", extra={"event": "dump"})

    def _kill_overdue(self, now: float) -> None:
        for child in self._children():
            if child.kill_at is not None and now >= child.kill_at and not child.killed:
                log.error("%s does not end: killed", child, extra={"event": "kill", "child": child.process.pid})
                child.kill()


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _processes(count: int) -> str:
    return "process" if count == 1 else "processes"


def current_folder() -> str:
    """The current folder, by the name that the shell has for it: a deploy may turn a symbolic link in that."""
    here, named = Path.cwd(), os.environ.get("PWD", "")
    with suppress(OSError):
        if Path(named).is_absolute() and Path(named).samefile(here):
            return named
    return str(here)


def has_terminal() -> bool:
    """Whether this process belongs to a terminal, and that is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
