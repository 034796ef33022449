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

import json
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from lowq.clock import duration
from lowq.errors import LowqError
from lowq.supervisor.process import (
    BEAT,
    MARGIN,
    READY_SECONDS,
    Child,
    Health,
    ProcessPlace,
    Supervised,
    health_line,
    how_it_ended,
)

log = logging.getLogger("lowq.supervisor")


class DashboardFailed(LowqError):
    """The dashboard could not start. ``code``: the exit code of its process."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.code = code


class DashboardProcess:
    """Seen from the node. ``command``: a `lowq web`, without ``--bind``. ``health``: why the node is not well, or None;
    it is asked in a thread of this object.
    """

    def __init__(self, command: Sequence[str], bind: str, folder: str, health: Callable[[], str | None]) -> None:
        self._command = command
        #: The address at which it serves, or is to.
        self.bind = bind
        self._folder = folder
        self._health = health
        self._place = ProcessPlace(1)
        self._stopping = threading.Event()
        # While it runs, everything above is its own.
        self._thread = threading.Thread(target=self._run, name="lowq-dashboard", daemon=True)

    def start(self) -> str:
        """Starts it, waits until it serves, and returns where.

        Raises:
            DashboardFailed: it can't; it says why.
        """
        try:
            child = self._start()
            how = child.await_ready(READY_SECONDS)
            if how is not None:
                code = child.process.wait() if child.report_pipe() is None else 1
                raise DashboardFailed(child.reason or f"the dashboard {how}", code)
            assert child.url is not None
            url = child.url
        except BaseException:
            self.stop()
            raise
        # Where port 0 was asked for, it keeps the one that it was given.
        self.bind = url.removeprefix("http://")
        self._thread.start()
        return url

    def start_later(self) -> None:
        """Starts it in the thread of this object, as after a death: the node waits for nothing."""
        self._thread.start()

    def stop(self, *, at_once: bool = False) -> None:
        """Ends it. ``at_once``: whoever has a page open sees that break off."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        child, self._place.child = self._place.child, None
        if child is None:
            return
        if at_once:
            child.hang_up()
            child.kill()
        else:
            child.stop(time.monotonic())
        try:
            child.process.wait(child.shutdown_timeout + MARGIN)
        except subprocess.TimeoutExpired:
            child.kill()
            child.process.wait()
        child.ended()

    def _start(self) -> Child:
        command = [*self._command, f"--bind={self.bind}"]
        try:
            child = self._place.child = Child.start(command, self._folder, "web", time.monotonic())
        except OSError as error:
            raise DashboardFailed(f"the dashboard could not be started: {error}", 1) from error
        return child

    # --- while the node runs ---

    def _run(self) -> None:
        while not self._stopping.wait(BEAT):  # with each report it looks whether the dashboard lives
            self._look(time.monotonic())

    def _look(self, now: float) -> None:
        child = self._place.child
        if child is None:
            if now >= self._place.start_at:
                try:
                    self._start()
                except DashboardFailed as error:
                    self._lost(str(error), None, now)
            return
        if child.hear():
            log.info("the dashboard is back at %s", child.url, extra={"event": "dashboard_ready"})
        code = child.ended()
        if code is None:
            child.say(health_line({"trouble": self._health()}))
            return
        how = f"the dashboard (pid {child.process.pid}) {how_it_ended(code)}"
        if child.reason:
            how += f": {child.reason}"
        self._place.child = None
        self._lost(how, child, now)

    def _lost(self, how: str, child: Child | None, now: float) -> None:
        delay = self._place.restart_later(child, now)
        again = f"in {duration(delay)}" if delay else "at once"
        log.warning("%s; started again %s, the node goes on", how, again, extra={"event": "dashboard_died"})


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
        self._health.note(json.loads(line))

    def orphaned(self) -> None:
        # At once: whoever is started next wants the same port. Here is nothing that an end in good order would save.
        os._exit(0)
