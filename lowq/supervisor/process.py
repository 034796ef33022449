"""A node as a process of a supervisor, seen from both ends; and a generation: the N processes that a supervisor has
started for the same code.

::

    supervisor                                       node
    Child.start    --- command line --supervised -->  Supervised
    Child.hear     <-- report pipe: one line -------  ready, failed
    Child.trouble  <-- then a line each second -----  how it is
    (lives)        --- life pipe: nothing, ever --->  its end: the supervisor has died, and the node stops too

The first line is JSON: ``{"ready": true, "shutdown_timeout": 25.0}`` or ``{"failed": "...", "passing": false}``. The
others are ``{"trouble": null}``, or why the node is not well; with ``--health`` its `Vitals`, too.

`lowq.supervisor.dashboard` has the same of a node and its dashboard, with two differences: the first line has the
``url``, too, and is the only one; and on the life pipe the node reports how it is.
"""

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Self

from lowq.logs import get_log
from lowq.observe.health import Reading, Vitals
from lowq.version import VERSION

log = get_log("lowq.supervisor")

#: The option that makes a node a supervisor's, with what it needs to know: label, report pipe, life pipe; and since
#: when the supervisor runs (Unix time, seconds), and its version.
OPTION = "--supervised"
STARTED_AT = time.time()

#: Seconds; the default of the setting, for a process that hasn't said what it has.
SHUTDOWN_TIMEOUT = 25.0
#: Seconds beyond its shutdown_timeout that a process has to end, before it is killed.
MARGIN = 5.0
#: Seconds that a process has to become ready: it imports the application. One that replaces nobody is waited for.
READY_SECONDS = 60.0
#: Seconds between two reports of a node's health.
BEAT = 1.0
#: Seconds without a report after which a node is not well.
SILENCE = 10.0
#: Seconds without a report after which a node counts as hanging for good.
DEAD_SILENCE = 60.0
#: Characters of a reason that are reported: the whole line has to fit into the pipe at once.
_LONGEST_REASON = 1000

#: Processes in a row that may end before they were ready.
TRIES = 5
#: Seconds before a process is replaced that has died the second time in a row; doubled with each further time.
FIRST_DELAY = 0.25
LONGEST_DELAY = 15.0
#: The longest where only Redis is waited for.
PASSING_DELAY = 2.0
#: Seconds that a process has to live until its earlier deaths are forgotten.
FORGIVEN_AFTER = 30.0


class Health:
    """A node's health, as it reports it once a second. A node that has not reported for long, such as a stopped one, is
    not well either. Its methods may be called from any thread.
    """

    def __init__(self, trouble: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: tuple[float, Mapping[str, Any]] = clock(), {"trouble": trouble}

    def note(self, report: Mapping[str, Any]) -> None:
        """Notes a report."""
        self._last = self._clock(), report

    def trouble(self) -> str | None:
        """Why it is not well, or None."""
        at, report = self._last
        silent = self._clock() - at
        return report["trouble"] if silent < SILENCE else f"the node has said nothing for {silent:.0f} s"

    def vitals(self) -> Vitals:
        """How it is, by its last report."""
        at, report = self._last
        silent = self._clock() - at
        dead = report.get("dead") if silent < DEAD_SILENCE else f"the node has said nothing for {silent:.0f} s"
        readings = {queue: Reading(*figures) for queue, figures in report.get("readings", {}).items()}
        return Vitals(dead, report.get("unready") or self.trouble(), {"": readings})


def health_line(report: Mapping[str, Any]) -> bytes:
    """The line that reports a node's health."""
    short = {name: value[:_LONGEST_REASON] if isinstance(value, str) else value for name, value in report.items()}
    return json.dumps(short).encode() + b"\n"


class Child:
    """A process of the supervisor, as the supervisor sees it. It belongs to one thread at a time."""

    def __init__(
        self, label: str, process: "subprocess.Popen[bytes]", report: int, now: float, life: int | None = None
    ) -> None:
        #: Generation and number, "2.1".
        self.label = label
        self.process = process
        #: Monotonic time.
        self.started_at = now
        self.ready = False
        #: Whether it was said that it needs long to become ready.
        self.late = False
        #: The signal that is to end it, once it was sent: TERM, or USR2 for one that is to drain.
        self.sent: signal.Signals | None = None
        #: Monotonic time after which it is killed.
        self.kill_at: float | None = None
        self.killed = False
        self.shutdown_timeout = SHUTDOWN_TIMEOUT
        #: The URL of a dashboard that is ready.
        self.url: str | None = None
        #: The reason that it gave for not starting.
        self.reason: str | None = None
        #: Whether what kept it from starting may pass by itself, as when Redis is away.
        self.passing = False
        self._health = Health(None)
        self._report: int | None = report
        self._heard = b""
        #: Our end of a life pipe of its own.
        self._life = life

    @classmethod
    def start(
        cls, command: Sequence[str], folder: str, label: str, now: float, *, life: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Self:  # fmt: skip
        """Starts the command in a session of its own: Ctrl-C in a terminal reaches the supervisor alone. ``life``: the
        end of the life pipe that it inherits; None: it has one of its own. ``environment``: None is that of this
        process.

        Raises:
            OSError: there is no such program or folder any more, or no room for a process.
        """
        theirs, ours = (life, None) if life is not None else os.pipe()
        report, reported = os.pipe()
        try:
            process = subprocess.Popen(
                [*command, f"{OPTION}={label}:{reported}:{theirs}:{STARTED_AT:.0f}:{VERSION}"],
                cwd=folder, env=environment, stdin=subprocess.DEVNULL, pass_fds=(reported, theirs),
                start_new_session=True,
            )  # fmt: skip
        except BaseException:
            os.close(report)
            if ours is not None:
                os.close(ours)
            raise
        finally:
            os.close(reported)
            if ours is not None:
                os.close(theirs)
        for pipe in (report, ours):
            if pipe is not None:
                os.set_blocking(pipe, False)
        return cls(label, process, report, now, ours)

    def __str__(self) -> str:
        return f"process {self.label} (pid {self.process.pid})"

    def report_pipe(self) -> int | None:
        """The pipe that becomes readable when there is something to `hear`; None: it is closed."""
        return self._report

    def hear(self) -> bool:
        """Reads its reports. Returns whether it has become ready with them."""
        while self._report is not None:
            try:
                data = os.read(self._report, 65536)
            except BlockingIOError:
                break
            if not data:
                self._close()
            self._heard += data
        *lines, self._heard = self._heard.split(b"\n")
        became_ready = False
        for says in map(json.loads, lines):
            if "failed" in says:
                self.reason, self.passing = says["failed"], says["passing"]
                self._close()  # there is nothing more to come
            elif "ready" in says:
                self.shutdown_timeout, self.url = says["shutdown_timeout"], says.get("url")
                self._health.note({"trouble": None})
                self.ready = became_ready = True
            else:
                self._health.note(says)
        return became_ready

    def await_ready(self, seconds: float) -> str | None:
        """Waits until it is ready, up to so many seconds after its start. Returns None, or what it did instead, such as
        ``exited with code 1 before it was ready``. It may have said why, in `reason`.
        """
        while not self.hear():
            if self._report is None:
                ended = "failed" if self.reason else how_it_ended(self.process.wait())
                return f"{ended} before it was ready"
            if time.monotonic() > self.started_at + seconds:
                return f"is not ready after {seconds:g} s"
            poll = select.poll()
            poll.register(self._report, select.POLLIN)
            poll.poll(500)
        return None

    def say(self, line: bytes) -> None:
        """Writes a line to its own life pipe. It may be stopped, and the pipe full; or it has just died."""
        with contextlib.suppress(OSError):
            os.write(-1 if self._life is None else self._life, line)

    def hang_up(self) -> None:
        """Closes its own life pipe: it ends."""
        if self._life is not None:
            os.close(self._life)
            self._life = None

    def trouble(self) -> str | None:
        """Why it is not well, or None. Only for a node that is ready. May be called from any thread."""
        return self._health.trouble()

    def vitals(self) -> Vitals:
        """How it is. Only for a node that is ready. May be called from any thread."""
        return self._health.vitals()

    def send(self, number: signal.Signals) -> None:
        """Sends it a signal, if it still lives."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def stop(self, now: float) -> None:
        """TERM, and KILL when it needs too long."""
        if self.sent is not signal.SIGTERM:
            self.sent = signal.SIGTERM
            self.kill_at = now + self.shutdown_timeout + MARGIN
            self.send(signal.SIGTERM)

    def drain(self) -> None:
        """USR2: to finish what it performs, however long that takes, and to end."""
        self.sent = signal.SIGUSR2
        self.send(signal.SIGUSR2)

    def kill(self) -> None:
        """KILL, once."""
        if not self.killed:
            self.killed = True
            self.send(signal.SIGKILL)

    def ended(self) -> int | None:
        """Its exit code once it has ended (minus the number of the signal that killed it), its last report heard."""
        code = self.process.poll()
        if code is not None:
            self.hear()
            self._close()
            self.hang_up()
        return code

    def _close(self) -> None:
        if self._report is not None:
            os.close(self._report)
            self._report = None


@dataclass(slots=True, eq=False)
class ProcessPlace:
    """One of the N places for a process."""

    number: int
    child: Child | None = None
    #: Monotonic time at which a process is to be started in it; inf: none.
    start_at: float = 0.0
    #: Deaths in a row, each before FORGIVEN_AFTER.
    deaths: int = 0

    def restart_later(self, child: Child | None, now: float, longest: float = LONGEST_DELAY) -> float:
        """Counts a death, of ``child`` if there was any. Returns the seconds until a process is started again: none
        after the first death, then doubled up to ``longest``.
        """
        if child is not None and now - child.started_at >= FORGIVEN_AFTER:
            self.deaths = 0
        self.deaths += 1
        # Days of deaths would make it a number that no float holds.
        doubled: int = 2 ** min(self.deaths - 2, 20) if self.deaths > 1 else 0
        delay = min(FIRST_DELAY * doubled, longest) * random.uniform(0.75, 1.25)
        self.start_at = now + delay
        return delay


class Generation:
    """The processes of the same code, and when to replace one that died. Belongs to the supervisor's main thread."""

    def __init__(self, number: int, processes: int) -> None:
        self.number = number
        self.places = [ProcessPlace(place + 1) for place in range(processes)]
        #: Whether any process of it was ever ready. Until then only one is tried: broken code fails once, not N times.
        self._proven = False
        #: Processes in a row that ended before they were ready.
        self.failures = 0

    def children(self) -> list[Child]:
        """The processes that live, or whose end was not noticed yet."""
        return [place.child for place in self.places if place.child is not None]

    def ready(self) -> list[Child]:
        """The processes that have become ready, and not ended."""
        return [child for child in self.children() if child.ready]

    def is_complete(self) -> bool:
        """Whether all of its processes are ready."""
        return len(self.ready()) == len(self.places)

    def startable(self) -> list[ProcessPlace]:
        """The places that a process is to be started in, now or later."""
        places = self.places if self._proven else self.places[:1]
        return [place for place in places if place.child is None and place.start_at < inf]

    def rest(self) -> None:
        """Lets no process be started any more."""
        for place in self.places:
            place.start_at = inf

    def became_ready(self) -> None:
        """One of its processes is ready."""
        self._proven, self.failures = True, 0

    def lost(self, place: ProcessPlace, child: Child | None, now: float, *, asked_for: bool = False) -> float | None:
        """The process in that place has died, or could not even be started: when to replace it. ``asked_for``: it has
        worked, and ended to be replaced. That is no death: its successor is started at once, however often.

        Returns:
            Seconds, noted in the place too; None when there is no use in trying again.
        """
        if asked_for and child is not None and child.ready:
            place.start_at = now
            return 0.0
        if child is None or not child.ready:
            self.failures += 1
            if self._is_hopeless(child):
                return None
        return place.restart_later(child, now, PASSING_DELAY if child is not None and child.passing else LONGEST_DELAY)

    def _is_hopeless(self, child: Child | None) -> bool:
        if self.ready():
            return False  # the code is good, then; it may be memory that is short
        passing = child is not None and child.passing
        if self._proven:
            # All of them were ready once. When Redis is away now, trying goes on until it is back.
            return not passing and self.failures >= TRIES * len(self.places)
        known = child is not None and child.reason is not None and not passing
        return known or self.failures >= TRIES


class Supervised:
    """The other end: what the process itself does for its supervisor.

    Raises:
        ValueError: that is not what a supervisor passes.
    """

    #: Milliseconds between two looks whether the supervisor is still the parent; None: the end of the pipe shows it.
    look_ms: int | None = None

    def __init__(self, given: str) -> None:
        import multiprocessing

        label, report, life, started_at, version = given.split(":")
        #: For people.
        self.supervisor = {"pid": os.getppid(), "started_at": float(started_at), "version": version}
        self._report, self._life, self._parent = int(report), int(life), os.getppid()
        try:
            for descriptor in (self._report, self._life):
                os.set_inheritable(descriptor, False)  # what handlers start must not keep the pipes open
        except OSError as error:
            raise ValueError(str(error)) from error
        # Formats of log lines know it as processName, ours and those of applications.
        multiprocessing.current_process().name = label
        threading.Thread(target=self._watch, name="lowq-supervised", daemon=True).start()

    def ready(
        self, shutdown_timeout: float, health: Callable[[], Mapping[str, Any]] | None = None, **more: str
    ) -> None:  # fmt: skip
        """Reports that it works. May be called from any thread. ``health``: returns its health; it is called once a
        second from then on, in a thread of its own. Without it nothing more is reported.
        """
        self._say({"ready": True, "shutdown_timeout": shutdown_timeout, **more}, is_last=health is None)
        if health is not None:
            threading.Thread(target=self._report_health, args=(health,), name="lowq-health", daemon=True).start()

    def failed(self, reason: str, *, passing: bool) -> bool:
        """Reports why it could not start. Returns False when nobody hears it any more."""
        reason = " ".join(reason.split())[:_LONGEST_REASON]
        return self._say({"failed": reason, "passing": passing}, is_last=True)

    def _say(self, what: dict[str, Any], *, is_last: bool) -> bool:
        return self._write(json.dumps(what).encode() + b"\n", is_last=is_last)

    def _write(self, line: bytes, *, is_last: bool) -> bool:
        try:
            os.write(self._report, line)
            if is_last:
                os.close(self._report)
        except OSError:
            return False  # nobody is there any more; `_watch` knows what to do
        return True

    def _report_health(self, health: Callable[[], Mapping[str, Any]]) -> None:
        while self._write(health_line(health()), is_last=False):
            time.sleep(BEAT)

    def heard(self, line: bytes) -> None:
        """A line on the life pipe: there is none from a supervisor."""

    def orphaned(self) -> None:
        """The supervisor has ended."""
        log.warning("the supervisor has ended; this process stops as well", extra={"event": "orphaned"})
        os.kill(os.getpid(), signal.SIGTERM)

    def _watch(self) -> None:
        poll, begun = select.poll(), b""
        poll.register(self._life, select.POLLIN)
        while os.getppid() == self._parent:
            if poll.poll(self.look_ms):
                data = os.read(self._life, 65536)
                if not data:
                    break
                *lines, begun = (begun + data).split(b"\n")
                for line in lines:
                    self.heard(line)
        self.orphaned()


def how_it_ended(code: int) -> str:
    """How a process ended: ``exited with code 1``, ``was killed by SIGKILL``."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-code}"
