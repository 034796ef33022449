"""A node: one process that runs workers with a fixed number of threads.

1. start: check the queues' shards, make one instance of each worker per thread, start broker and threads;
2. each thread: wait for a shard -> take -> perform batch by batch -> report; the next take acknowledges;
3. whenever nodes come or go: share the shards out anew, give up some, get others;
4. stop: take nothing more, finish what runs, give back what was taken but not started, surrender the leases;
5. reload: the same, but keep the leases, for the new code that this process is to run (`lowq.node.reload`).
"""

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import inf
from typing import Any

from lowq.application import Lowq
from lowq.errors import EXIT_CUT_SHORT, EXIT_FAILED, EXIT_OK, EXIT_REPLACE, LowqError
from lowq.logs import describe, flush, get_log
from lowq.node import checks
from lowq.node.performers import Performers
from lowq.node.reload import NewCode, Reload
from lowq.node.schedules import QueueSchedules, former_schedules
from lowq.node.signals import HeldSignals, Request, Signals
from lowq.node.watchdog import LEEWAY, end_process_by
from lowq.observe.graphite_statsd import Source
from lowq.observe.health import Vitals
from lowq.observe.tallies import node_source
from lowq.operate.queues import all_queues
from lowq.registrations import QueueInfo
from lowq.shards.broker import Broker
from lowq.shards.outage import Outage
from lowq.workers import Worker, schedules_of

log = get_log("lowq.node")

#: Seconds that the leases of a node that was cut short run on.
LEAVE_SECONDS = 1.0


class Node:
    """Runs the workers of an application.

    ``queues``: only these; ``threads`` overrides the setting ``threads_per_node``. With ``prefetch`` off, a round trip
    to Redis takes one batch. ``on_ready`` is called once, from a thread of the node, when it is a member and has asked
    for its shards. ``new_code``: how it gets new code; None: not at all. ``resumes_as``: the nonce that this process
    had before an exec (`succeeds_as`). ``held_signals``: those that came since the process began.

    Raises:
        ConfigError: no worker, or an unknown queue.
    """

    def __init__(
        self, app: Lowq, *, queues: Iterable[str] | None = None, threads: int | None = None, prefetch: bool = True,
        on_ready: Callable[[], object] = lambda: None, new_code: NewCode | None = None, resumes_as: str | None = None,
        held_signals: HeldSignals | None = None,
    ) -> None:  # fmt: skip
        self.app = app
        self.exit_code = EXIT_OK
        self._on_ready = on_ready
        self._workers = {worker.queue_name: worker for worker in app.selected_workers(queues)}
        self._schedules = [QueueSchedules(app, worker) for worker in self._workers.values() if schedules_of(worker)]
        #: Set when the node is to stop.
        self.stopping = threading.Event()
        self._signals = Signals(
            self.stopping.is_set, None if new_code is None else new_code.terminal_closed, held_signals
        )
        #: What has come while the node waited at its start, and is for later.
        self._too_early: list[Request] = []
        self._performers = Performers(
            app, self._workers, threads or app.config.threads_per_node, prefetch=prefetch, stopping=self.stopping,
            fail=self.fail, on_lost=self._on_lost,
        )  # fmt: skip
        #: Of the workers.
        self.threads = self._performers.count
        #: on_server_init was called, and on_server_stop was not since.
        self._has_init = False
        #: The figures of its queues and of the process.
        self._read_figures: Source = dict
        #: Ends the lines to Graphite and StatsD.
        self._stop_export: Callable[[], None] = lambda: None
        #: Of Redis, while the node starts; later that of its broker.
        self._start_outage = Outage()
        self._reload = Reload(new_code, partial(self._signals.wake, Request.CHECKED))
        self._resumes = resumes_as is not None
        self._nonce = resumes_as or secrets.token_hex(8)
        #: Set when `run` has returned for new code: the nonce that the process is to go on with after an exec.
        self.succeeds_as: str | None = None
        #: Monotonic time by which the process is to have ended, once `run` stops the node; also for whoever started it.
        self.end_by: float | None = None
        #: Within `run`, which may end the process.
        self._in_run = False
        #: From its start on.
        self.broker: Broker

    @property
    def queues(self) -> dict[str, int]:
        """Queue -> shards_count, as its code says it, of those that it works."""
        return {name: worker.shards_count for name, worker in self._all_workers.items()}

    @property
    def _all_workers(self) -> dict[str, type[Worker[Any]]]:
        """The workers, with those that perform schedules."""
        return {**self._workers, **{item.worker.queue_name: item.worker for item in self._schedules}}

    # --- life ---

    def run(self) -> int:
        """Runs until it has to stop; returns the exit code. In the main thread it handles TERM, INT, TSTP, TTIN, USR2,
        and HUP if it knows how it gets new code. After that `succeeds_as` is set, these signals are blocked, and the
        process is to be executed anew.

        Ends the process at once, with that code, when what still runs, on_server_stop included, doesn't end within
        shutdown_timeout, and when handlers that were written off still run.
        """
        self._signals.install()
        self._in_run = True
        try:
            try:
                self.start()
            except BaseException as error:
                if self._start_outage.seconds and self.stopping.is_set():
                    return EXIT_OK
                self.app.config.last_words(error)
                raise
            while not (self.stopping.is_set() or self._has_drained() or self._has_finished()):
                self._wait_for_requests(
                    0.1 if self._performers.draining else 0.02 if self._reload.is_finishing else None
                )
            if self._has_finished() and not self.stopping.is_set():
                self._keep()
                return self.exit_code
            if not self.stop() or not self._performers.can_exit():
                flush()
                os._exit(self.exit_code)
            return self.exit_code
        finally:
            self._in_run = False
            self._signals.restore(block=self.succeeds_as is not None)

    def start(self) -> None:
        """Starts the threads and returns. Waits for a Redis that answers and can't serve yet, and for a primary
        of a cluster that is away; new code also for one that does not answer.

        Raises:
            ShardsCountError, RedisRefused; what on_server_init or a worker's __init__ raises. RedisUnavailable: also if
            it was stopped while it waited.
        """
        app, config = self.app, self.app.config
        for worker in self._all_workers.values():
            self._when_ready(partial(app.registrations.enter, worker.queue_name, worker.shards_count, worker))
        registered: list[QueueInfo] = []

        def look() -> None:
            registered[:] = all_queues(app)
            self._schedules += former_schedules(app, registered, self._workers.values())

        self._when_ready(look)
        config.on_server_init()
        self._has_init = True
        self.client = app.connect((self.threads or config.threads_per_node) + 3 + bool(self._schedules))
        self._performers.make(
            self._nonce, self.client, self._schedules, more_details=self._details, on_ready=self._on_ready,
            on_command=self._on_command, on_fatal=self.fail, resumes=self._resumes,
        )  # fmt: skip
        self.broker = self._performers.broker
        self.name = self.broker.name
        self._when_ready(partial(checks.warn, app, self.client, registered))
        log.info(
            "node %s starts%s: %s, %d shards of %s, namespace %r on %s",
            self.name, " with new code" if self._resumes else "", self._performers.described(),
            sum(shard.queue in self._workers for shard in self.broker.shards),
            ", ".join(self._workers), config.namespace, app.store_name,
            extra={"event": "start", "node": self.name},
        )  # fmt: skip
        self._performers.start(self.broker.start, lambda: self._signals.stop_requested or self.stopping.is_set())
        self._read_figures = node_source(
            self._performers.recorder.tallies, lambda: self.broker.shards, self._performers.activities, self.threads
        )
        self._stop_export = app.export_metrics(self._read_figures)
        for request in self._too_early:
            self._signals.wake(request)
        self._too_early = []

    def rehearse(self) -> None:
        """See `lowq.node.checks.rehearse`."""
        checks.rehearse(self.app, self._workers.values(), self.threads)

    def _when_ready(self, do: Callable[[], object]) -> None:
        """Calls ``do``, a step of the start, as soon as Redis can serve.

        Raises:
            RedisUnavailable: there is no Redis, or the node is to stop. What else ``do`` raises.
        """

        def wait(seconds: float) -> bool:
            self._wait(seconds)
            return self.stopping.is_set()

        self._start_outage.start(do, wait, has_answered=lambda: self._resumes or self.app.client.is_known)

    def _wait(self, seconds: float) -> None:
        if threading.current_thread() is threading.main_thread():
            self._wait_for_requests(seconds)
        else:
            (time.sleep if self.stopping.is_set() else self.stopping.wait)(seconds)

    def trouble(self) -> str | None:
        """Why the node is not well, for people; None: it is. May be called from any thread."""
        if self._start_outage.trouble is not None:
            return self._start_outage.trouble
        return self._performers.trouble() if hasattr(self, "broker") else "the node has not started yet"

    def vitals(self) -> Vitals:
        """How the node is, for probes. May be called from any thread."""
        if not hasattr(self, "broker"):
            return Vitals(None, self.trouble(), {})
        return self._performers.vitals(self.trouble(), self._read_figures())

    def _details(self) -> dict[str, Any]:
        says = {
            **self._performers.details(),
            "strict": self.app.config.strict_shards_count,
            **self._reload.details(),
            "limits": self.app.shown_call_limits(),
            # A node that ends does not vouch for them any more.
            "schedules": {
                item.queue_name: item.shown()
                for item in self._schedules
                if item.own and not (self._performers.draining or self.stopping.is_set())
            },
        }
        return {name: value for name, value in says.items() if value}

    def _on_command(self, sent: Mapping[str, str]) -> None:
        command = sent["do"]
        log.warning(
            "node %s has received a command: %s", self.name, command, extra={"event": "command", "command": command}
        )
        commands: dict[str, Callable[[], object]] = {
            "quiet": self.quiet, "unquiet": self.unquiet, "stop": self.request_stop,
            "reload": partial(self._signals.wake, Request.RELOAD), "stack": partial(self._performers.send_stack, sent),
        }  # fmt: skip
        commands.get(command, lambda: None)()

    # --- requests ---

    def _wait_for_requests(self, timeout: float | None) -> None:
        """Waits for requests to the node, up to ``timeout`` seconds, and does them."""
        received = self._signals.wait(timeout)
        if received:
            received, self._too_early = [*self._too_early, *received], []
        for request in received:
            if request is Request.STOP:
                self.stopping.set()
            elif request is Request.DUMP:
                self.dump()
            elif request is Request.CHECKED:
                if self._reload.checked(self.name, self.app.config.shutdown_timeout, self._performers.busy):
                    self.broker.finish()
            elif not hasattr(self, "broker"):
                self._too_early.append(request)
            elif request is Request.QUIET:
                self.quiet()
            elif request is Request.DRAIN:
                self.drain()
            else:
                self.reload()

    # --- commands ---

    def quiet(self) -> None:
        """Takes nothing more and finishes what runs; shards that rest are given up, so that other nodes work them."""
        self.broker.quiet_for_now()  # before it says so
        self._reload.call_off(self.name)
        log.warning("node %s goes quiet: it takes nothing more", self.name, extra={"event": "quiet"})

    def unquiet(self) -> None:
        """Takes jobs again, after `quiet`. A node that drains or stops goes on ending."""
        if self._performers.draining or self.stopping.is_set():
            return
        if self.broker.unquiet():
            log.warning("node %s is quiet no more: it takes jobs again", self.name, extra={"event": "unquiet"})
        else:
            log.error(
                "node %s can't take jobs again with the code that it has, as it has finished for new code: reload it",
                self.name, extra={"event": "unquiet_refused"},
            )  # fmt: skip

    def drain(self) -> None:
        """Goes quiet, and `run` ends as soon as what runs is finished, however long that takes. For a node that is
        being replaced.
        """
        if not self._performers.draining:
            self._performers.draining = True
            self.broker.quiet()  # before it says so
            self._reload.call_off(self.name)
            log.info(
                "node %s drains: it ends when it has finished what it performs", self.name, extra={"event": "drain"}
            )

    def _on_lost(self, drains: bool) -> str:
        """Ends, for another process to take its place. ``drains``: it finishes what runs."""
        self.exit_code = self.exit_code or EXIT_REPLACE
        if drains:
            self.drain()
            self._signals.wake(Request.DRAIN)  # `run` sleeps until it is woken, and looks then
        else:
            self.request_stop()
        return self.name

    def _has_drained(self) -> bool:
        return self._performers.draining and not self._performers.living()

    # --- new code ---

    def reload(self) -> None:
        """Has the new code checked. If it can be run, `run` returns as soon as what runs is finished, with the leases
        kept for it. Only for the thread that is in `run`.
        """
        if self._reload.refusal:
            log.error(
                "node %s can't be reloaded: %s", self.name, self._reload.refusal, extra={"event": "reload_refused"}
            )  # fmt: skip
        elif self._performers.draining or self.stopping.is_set():
            log.warning("node %s is not reloaded: it is ending", self.name, extra={"event": "reload_refused"})
        else:
            self._reload.request(self.name)

    def _has_finished(self) -> bool:
        """Whether all is finished for new code, or its time is over."""
        reload = self._reload
        return reload.is_finishing and (time.monotonic() > reload.finish_by or not self._performers.living())

    def _keep(self) -> None:
        """Ends, but for membership and leases, which the new code resumes.

        What still runs is cut short by the exec. Its leases run on until it is surely gone, and the new code asks for
        all of them as another process: so what it had in flight is treated as after any stop that was cut short. If
        Redis is away, that can't be said to it, and the new code resumes the leases with what was in flight.
        """
        busy = self._performers.busy()
        running = self._performers.cut_short()
        self.end_by = self._reload.finish_by + LEEWAY
        if not running:
            self._call_on_server_stop()  # while leases are renewed
        self.app.close_call_limits()
        self.broker.stop()
        nonce = self._nonce
        if running:
            log.error(
                "node %s changes to the new code while it still performs: %s; these jobs are performed again, and not "
                "charged", self.name, "; ".join(busy) or "nothing", extra={"event": "cut_short"},
            )  # fmt: skip
        try:
            if running:
                self.broker.maintenance.leave(LEAVE_SECONDS, stays=True)
                nonce = nonce[:8] + secrets.token_hex(4)
            else:
                self.broker.maintenance.keep(nonce)
        except LowqError as error:
            log.warning("the leases could not be renewed, they may run out: %s", error)
        self.broker.close()
        self._reload.kept()
        self.succeeds_as = nonce
        flush()

    def dump(self) -> None:
        """Writes the stacks of all threads to the log, with what each performs."""
        trouble = self.trouble()
        log.warning(
            "%sstacks of all threads:\n%s", f"{trouble}; " if trouble else "", self._performers.stacks(),
            extra={"event": "dump"},
        )  # fmt: skip

    def request_stop(self) -> None:
        """Makes `run` stop the node. May be called from any thread."""
        self.stopping.set()
        self._signals.wake(Request.STOP)

    def fail(self, error: BaseException) -> None:
        """Stops the node because of an error. May be called from any thread."""
        self.exit_code = EXIT_FAILED
        log.critical("node %s stops: %s", self.name, describe(error), extra={"event": "fatal"})
        try:
            self.app.config.last_words(error)
        except BaseException:  # the node stops as it is
            log.exception("last_words failed")
        self.request_stop()

    def _call_on_server_stop(self) -> None:
        """Calls the hook, once for each start. Its errors are logged. If it hangs, the process ends."""
        if not self._has_init:
            return
        self._has_init = False
        call_off: Callable[[], None] = lambda: None  # noqa: E731
        if self._in_run and self.end_by is not None:
            code = self.exit_code or EXIT_CUT_SHORT
            call_off = end_process_by(self.end_by, code, at_once=lambda: self._signals.cut_short)
        try:
            self.app.config.on_server_stop()
        except BaseException:
            log.exception("on_server_stop failed")
        finally:
            call_off()

    def stop(self, timeout: float | None = None) -> bool:
        """Stops: takes nothing more, waits for what runs, surrenders the leases. False when something still runs
        after ``timeout`` seconds (shutdown_timeout): then the process should end at once, as its leases do soon.
        """
        self.stopping.set()
        seconds = self.app.config.shutdown_timeout if timeout is None else timeout
        self.broker.quiet()  # what rests is given up at once, so that nobody waits for what still runs
        busy = self._performers.busy()
        log.info(
            "node %s stops%s", self.name,
            f", waiting up to {seconds:g} s for {'; '.join(busy)}; a second INT ends it at once" if busy else "",
            extra={"event": "stop"},
        )  # fmt: skip
        deadline = time.monotonic() + seconds
        self.end_by = deadline + LEEWAY
        self.app.end_waits_by(deadline)
        while self._performers.living() and not self._signals.cut_short and (left := deadline - time.monotonic()) > 0:
            self._wait(min(left, 0.02))
        busy = self._performers.busy() or ["nothing"]
        running = self._performers.cut_short()
        self.app.end_waits_by(inf)
        self.broker.stop()
        if running:
            self.exit_code = EXIT_REPLACE if self.exit_code == EXIT_REPLACE else EXIT_CUT_SHORT
            log.error(
                "node %s ends while it still performs: %s; these jobs are performed again, and not charged",
                self.name, "; ".join(busy), extra={"event": "cut_short"},
            )  # fmt: skip
            flush()  # now: from here on the leases run out
        try:
            self.broker.maintenance.leave(LEAVE_SECONDS if running else 0.0)
        except LowqError as error:
            log.warning("the leases could not be surrendered, they run out by themselves: %s", error)
        self.broker.close()
        if not running:
            self._call_on_server_stop()
        self._stop_export()
        self.app.flush_events()
        if not running:
            self.client.close()
            log.info("node %s has stopped", self.name, extra={"event": "stopped"})
        return not running
