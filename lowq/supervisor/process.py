"""A node as a process of a supervisor, seen from both ends.

::

    supervisor                                       node
    Child.start    --- command line --supervised -->  Supervised
    Child.hear     <-- report pipe: one line -------  ready, failed
    (lives)        --- life pipe: nothing, ever --->  its end: the supervisor has died, and the node stops too

The line is JSON: ``{"ready": true, "shutdown_timeout": 25.0}`` or ``{"failed": "...", "passing": false}``.

`lowq.supervisor.dashboard` has the same of a node and its dashboard, with two differences: the line has the ``url``,
too, and on the life pipe the node reports how it is.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Self

from lowq.logs import get_log

log = get_log("lowq.supervisor")

#: The option that makes a node a supervisor's, with what it needs to know: label, report pipe, life pipe.
OPTION = "--supervised"

#: Seconds; the default of the setting, for a process that hasn't said what it has.
SHUTDOWN_TIMEOUT = 25.0
#: Seconds beyond its shutdown_timeout that a process has to end, before it is killed.
MARGIN = 5.0
#: Characters of a reason that are reported: the whole line has to fit into the pipe at once.
_LONGEST_REASON = 1000


class Child:
    """A process of the supervisor, as the supervisor sees it. It belongs to one thread at a time."""

    def __init__(self, label: str, process: "subprocess.Popen[bytes]", report: int, now: float) -> None:
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
        #: Where it serves, of a dashboard that is ready.
        self.url: str | None = None
        #: Why it could not start, in its own words.
        self.reason: str | None = None
        #: Whether what kept it from starting may pass by itself, as when Redis is away.
        self.passing = False
        self._report: int | None = report
        self._heard = b""

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        folder: str,
        label: str,
        life: int,
        now: float,
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """Starts the command in a session of its own: Ctrl-C in a terminal reaches the supervisor alone.
        ``environment``: None is that of this process.

        Raises:
            OSError: there is no such program or folder any more, or no room for a process.
        """
        report, theirs = os.pipe()
        try:
            process = subprocess.Popen(
                [*command, f"{OPTION}={label}:{theirs}:{life}"],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs, life),
                start_new_session=True,
            )
        except BaseException:
            os.close(report)
            raise
        finally:
            os.close(theirs)
        os.set_blocking(report, False)
        return cls(label, process, report, now)

    def __str__(self) -> str:
        return f"process {self.label} (pid {self.process.pid})"

    def report_pipe(self) -> int | None:
        """What becomes readable when there is something to `hear`."""
        return self._report

    def hear(self) -> bool:
        """Reads what it has reported. True when it has become ready with that."""
        while self._report is not None:
            try:
                data = os.read(self._report, 65536)
            except BlockingIOError:
                break
            if not data:
                self._close()
            self._heard += data
        line, end, self._heard = self._heard.partition(b"\n")
        if not end:
            self._heard = line
            return False
        self._close()  # there is only one
        says = json.loads(line)
        if "failed" in says:
            self.reason, self.passing = says["failed"], says["passing"]
            return False
        self.ready, self.shutdown_timeout, self.url = True, says["shutdown_timeout"], says.get("url")
        return True

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
        """Its exit code once it has ended (minus the number of the signal that killed it); its last words are heard."""
        code = self.process.poll()
        if code is not None:
            self.hear()
            self._close()
        return code

    def _close(self) -> None:
        if self._report is not None:
            os.close(self._report)
            self._report = None


class Supervised:
    """The other end: what the process itself does for its supervisor.

    Raises:
        ValueError: that is not what a supervisor passes.
    """

    #: Milliseconds between two looks whether the supervisor is still the parent; None: the end of the pipe shows it.
    look_ms: int | None = None

    def __init__(self, given: str) -> None:
        import multiprocessing

        label, report, life = given.split(":")
        self._report, self._life, self._parent = int(report), int(life), os.getppid()
        try:
            for descriptor in (self._report, self._life):
                os.set_inheritable(descriptor, False)  # what handlers start must not keep the pipes open
        except OSError as error:
            raise ValueError(str(error)) from error
        # Formats of log lines know it as processName, ours and those of applications.
        multiprocessing.current_process().name = label
        threading.Thread(target=self._watch, name="lowq-supervised", daemon=True).start()

    def ready(self, shutdown_timeout: float, **more: str) -> None:
        """It works. May be called from any thread."""
        self._say({"ready": True, "shutdown_timeout": shutdown_timeout, **more})

    def failed(self, reason: str, *, passing: bool) -> bool:
        """It could not start, for this reason. False when nobody hears it any more."""
        reason = " ".join(reason.split())[:_LONGEST_REASON]
        return self._say({"failed": reason, "passing": passing})

    def _say(self, what: dict[str, Any]) -> bool:
        try:
            os.write(self._report, json.dumps(what).encode() + b"\n")
            os.close(self._report)
        except OSError:
            return False  # nobody is there any more; `_watch` knows what to do
        return True

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
