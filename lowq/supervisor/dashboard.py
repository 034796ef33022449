"""The dashboard of a node, or of a supervisor, in a process of its own: what it is sent, how much of it, and how it
fails can't harm jobs.

::

    node                                               dashboard
    DashboardProcess   --- command line --supervised -->  NodeWatcher
                       <-- report pipe: one line -------  ready, with its URL; or why it is not
                       --- life pipe, once a second --->  how the node is, for /healthz
                       --- its end ------------------->  the node has ended, however; so does the dashboard, at once

A line on the life pipe is JSON: ``{"trouble": null}``, or why the node is not well. A dashboard that dies is started
again; the node goes on meanwhile. A supervisor is one more kind of node here: its deploys leave the dashboard as it is.
"""

import contextlib
import json
import logging
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from lowq.duration import duration
from lowq.errors import LowqError
from lowq.supervisor.generation import FORGIVEN_AFTER, restart_delay
from lowq.supervisor.process import BEAT, MARGIN, Child, Health, Supervised, health_line, how_it_ended

log = logging.getLogger("lowq.supervisor")

#: Seconds that it has to become ready: it imports the application.
READY_SECONDS = 60.0


class DashboardFailed(LowqError):
    """The dashboard could not start. ``code``: the exit code of its process."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.code = code


class DashboardProcess:
    """Seen from the node. ``command``: a `lowq web`, without ``--bind``. ``health``: why the node is not well, or None;
    it is asked in a thread of this object.
    """

    def __init__(
        self, command: Sequence[str], bind: str, folder: str, health: Callable[[], str | None]
    ) -> None:  # fmt: skip
        self._command = command
        self._bind = bind
        self._folder = folder
        self._health = health
        self._child: Child | None = None
        #: Our end of the life pipe of that child.
        self._life: int | None = None
        #: Deaths in a row, and the monotonic time at which it is to be started again.
        self._deaths = 0
        self._start_at = 0.0
        self._stopping = threading.Event()
        # While it runs, everything above is its own.
        self._thread = threading.Thread(target=self._run, name="lowq-dashboard", daemon=True)

    def start(self) -> str:
        """Starts it, waits until it serves, and returns where.

        Raises:
            DashboardFailed: it can't; it says why.
        """
        try:
            url = self._await_ready(self._start())
        except BaseException:
            self.stop()
            raise
        # Where port 0 was asked for, it keeps the one that it was given.
        self._bind = url.removeprefix("http://")
        self._thread.start()
        return url

    def start_later(self) -> None:
        """Starts it in the thread of this object, as after a death: the node waits for nothing."""
        self._thread.start()

    @property
    def bind(self) -> str:
        """Where it serves, or is to."""
        return self._bind

    def stop(self, *, at_once: bool = False) -> None:
        """Ends it. ``at_once``: whoever has a page open sees that break off."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        if at_once:
            self._hang_up()
        if self._child is not None:
            if at_once:
                self._child.kill()
            else:
                self._child.stop(time.monotonic())
            try:
                self._child.process.wait(self._child.shutdown_timeout + MARGIN)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.process.wait()
            self._child.ended()
            self._child = None
        self._hang_up()

    def _start(self) -> Child:
        theirs, self._life = os.pipe()
        os.set_blocking(self._life, False)
        try:
            command = [*self._command, f"--bind={self._bind}"]
            self._child = Child.start(command, self._folder, "web", theirs, time.monotonic())
        except OSError as error:
            self._hang_up()
            raise DashboardFailed(f"the dashboard could not be started: {error}", 1) from error
        finally:
            os.close(theirs)
        return self._child

    def _await_ready(self, child: Child) -> str:
        until = child.started_at + READY_SECONDS
        while not child.hear():
            pipe = child.report_pipe()
            if pipe is None:  # it has said why, or died
                code = child.process.wait()
                raise DashboardFailed(child.reason or f"the dashboard {how_it_ended(code)} before it was ready", code)
            if time.monotonic() > until:
                raise DashboardFailed(f"the dashboard is not ready after {READY_SECONDS:g} s", 1)
            poll = select.poll()
            poll.register(pipe, select.POLLIN)
            poll.poll(500)
        assert child.url is not None
        return child.url

    # --- while the node runs ---

    def _run(self) -> None:
        while not self._stopping.wait(BEAT):  # with each word it is looked whether the dashboard lives
            self._look(time.monotonic())

    def _look(self, now: float) -> None:
        child = self._child
        if child is None:
            if now >= self._start_at:
                try:
                    self._start()
                except DashboardFailed as error:
                    self._lost(str(error), now)
            return
        if child.hear():
            log.info("the dashboard is back at %s", child.url, extra={"event": "dashboard_ready"})
        code = child.ended()
        if code is None:
            self._report_health()
            return
        how = f"the dashboard (pid {child.process.pid}) {how_it_ended(code)}"
        if child.reason:
            how += f": {child.reason}"
        if now - child.started_at >= FORGIVEN_AFTER:
            self._deaths = 0
        self._child = None
        self._hang_up()
        self._lost(how, now)

    def _lost(self, how: str, now: float) -> None:
        self._deaths += 1
        delay = restart_delay(self._deaths)
        self._start_at = now + delay
        again = f"in {duration(delay)}" if delay else "at once"
        log.warning("%s; started again %s, the node goes on", how, again, extra={"event": "dashboard_died"})

    def _report_health(self) -> None:
        line = health_line(self._health())
        # It may be stopped, and the pipe full; or it has just died, which the next look finds out.
        with contextlib.suppress(OSError):
            os.write(self._life or -1, line)

    def _hang_up(self) -> None:
        if self._life is not None:
            os.close(self._life)
            self._life = None


class NodeWatcher(Supervised):
    """Seen from the dashboard.

    Raises:
        ValueError: that is not what a node passes.
    """

    # The pipe ends when the last process that could write to it has, which may be one that a handler has forked.
    look_ms = 1000

    def __init__(self, given: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._health = Health("the node has not started yet", clock)
        super().__init__(given)

    def trouble(self) -> str | None:
        """Why the node is not well, or None. May be called from any thread."""
        return self._health.trouble()

    def heard(self, line: bytes) -> None:
        self._health.note(json.loads(line)["trouble"])

    def orphaned(self) -> None:
        # At once: whoever is started next wants the same port. Here is nothing that an end in good order would save.
        os._exit(0)
