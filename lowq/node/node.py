"""A node: one process that runs workers with a fixed number of threads.

1. start: check the queues' shards, make one instance of each worker per thread, start broker and threads;
2. each thread: wait for a shard -> take -> perform batch by batch -> report; the next take acknowledges;
3. whenever nodes come or go: share the shards out anew, give up some, get others;
4. stop: take nothing more, finish what runs, give back what was taken but not started, surrender the leases;
5. reload: the same, but keep the leases, for the new code that this process is to run (`lowq.node.reload`).
"""

import asyncio
import errno
import os
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from lowq import drivers
from lowq.application import Lowq
from lowq.clock import now
from lowq.coroutines import at_once, run_first
from lowq.duration import duration
from lowq.errors import ConfigError, LowqError, QueueInUse, RedisRefused
from lowq.logs import describe, flush, get_log
from lowq.node.process_end import LEEWAY, end_process_by
from lowq.node.reload import NewCode, Reload
from lowq.node.schedules import QueueSchedules
from lowq.node.signals import HeldSignals, Request, Signals
from lowq.node.watchdog import Watchdog
from lowq.observe.emit import QueueEvents
from lowq.observe.error_groups import ErrorCounts, ErrorRecorder
from lowq.observe.tallies import Recorder, node_source
from lowq.operate.nodes import StuckLimits
from lowq.operate.queues import all_queues
from lowq.registrations import QueueInfo
from lowq.schedules import is_internal, schedules_queue
from lowq.sharding import Layout, Layouts
from lowq.shards.activity import Activity, Performing
from lowq.shards.broker import Broker, WorkerGroup
from lowq.shards.fairness import Share
from lowq.shards.membership import Identity
from lowq.shards.outage import Outage
from lowq.shards.scheduler import LagScheduler, Scheduler
from lowq.shards.shard import Shard, lag_of, shards_of, take_inflow
from lowq.shards.splitter import Splitter
from lowq.store import Client
from lowq.store.keys import nodes_key
from lowq.store.registry import rights
from lowq.version import VERSION
from lowq.work.event_loop import EventLoop
from lowq.work.handler import Instances, WorkerRuntime, has_life
from lowq.work.loop import BatchActivity
from lowq.work.threads import WorkerThread
from lowq.workers import (
    Worker,
    is_async,
    limits_of,
    payload_type_of,
    queue_options_of,
    schedules_of,
    time_limits_of,
)

log = get_log("lowq.node")

#: Exit codes of a node.
EXIT_OK = 0
#: It could not start, or a handler or an error stopped it.
EXIT_FAILED = 1
#: Something still ran when shutdown_timeout was over, or it had to stop a second time.
EXIT_CUT_SHORT = 3
#: Half of its threads were written off, as their handlers hang: a fresh process is to take its place (EX_TEMPFAIL).
EXIT_REPLACE = 75

#: What an OSError says of a port or a lock that another process has.
_HELD_BY_OTHERS = (errno.EADDRINUSE, errno.EAGAIN, errno.EWOULDBLOCK)

#: Seconds that the leases of a node that was cut short run on.
LEAVE_SECONDS = 1.0


_Made = TypeVar("_Made")


def _checked_made(kind: str, made: _Made) -> _Made:
    if not callable(made):  # every batch would fail with it
        raise ConfigError(
            f"what makes the {kind} (build_{kind}, or the driver) gave {made!r:.100}; it must be callable"
        )
    return made


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
        self,
        app: Lowq,
        *,
        queues: Iterable[str] | None = None,
        threads: int | None = None,
        prefetch: bool = True,
        on_ready: Callable[[], object] = lambda: None,
        new_code: NewCode | None = None,
        resumes_as: str | None = None,
        held_signals: HeldSignals | None = None,
    ) -> None:
        self.app = app
        self.threads = threads or app.config.threads_per_node
        self.prefetch = prefetch
        self.exit_code = EXIT_OK
        self._on_ready = on_ready
        self._workers = {worker.queue_name: worker for worker in app.selected_workers()}
        if queues is not None:
            wanted = list(queues)
            for name in wanted:
                if name not in self._workers:
                    known = ", ".join(self._workers) or "none"
                    raise ConfigError(f"no worker has the queue {name!r}; the queues of this app are: {known}")
            self._workers = {name: self._workers[name] for name in wanted}
        if not self._workers:
            raise ConfigError("no worker is registered; decorate one with @lowq.worker in the module that is loaded")
        self._schedules = [QueueSchedules(app, worker) for worker in self._workers.values() if schedules_of(worker)]
        #: Performs them, so that no thread of the workers' is ever taken for it, and none of theirs delays a tick.
        self._schedule_thread: WorkerThread | None = None
        #: Set when the node is to stop.
        self.stopping = threading.Event()
        self._signals = Signals(
            self.stopping.is_set, None if new_code is None else new_code.terminal_closed, held_signals
        )
        #: What has come while the node waited at its start, and is for later.
        self._too_early: list[Request] = []
        self._threads: list[WorkerThread] = []
        self._loop: EventLoop | None = None
        self._activities: list[BatchActivity] = []
        #: Where they were then, until that is logged.
        self._stacks: dict[WorkerThread, str] = {}
        #: Threads whose handlers exceeded their ttr; some of them may have come back since.
        self._written_off: list[WorkerThread] = []
        self.draining = False
        #: on_server_init was called, and on_server_stop was not since.
        self._has_init = False
        self._stuck_limits = StuckLimits(app)
        #: Ends the lines to Graphite and StatsD.
        self._stop_export: Callable[[], None] = lambda: None
        #: Of Redis, while the node starts; later that of its broker.
        self._start_outage = Outage()
        self._reload = Reload(new_code, partial(self._signals.wake, Request.CHECKED))
        self._resumes = resumes_as is not None
        self._nonce = resumes_as or secrets.token_hex(8)
        #: Set when `run` has returned for new code: the nonce that the process is to go on with after an exec.
        self.succeeds_as: str | None = None
        #: Monotonic time at which what still runs is cut short, when it finishes for new code.
        self._finish_by = float("inf")
        #: Monotonic time by which the process is to have ended, once `run` stops the node; also for whoever started it.
        self.end_by: float | None = None
        #: Within `run`, which may end the process.
        self._in_run = False
        self.broker: Broker

    @property
    def queues(self) -> dict[str, int]:
        """Queue -> shards_count, as its code says it, of those that it works."""
        return {name: worker.shards_count for name, worker in self._all_workers.items()}

    def _layouts_of(self, queue: str) -> Layouts:
        """As the registry said at the start."""
        routes = self.app.registrations.routes_of(queue)
        return Layouts.plain(self.queues[queue]) if routes is None else routes.layouts

    @property
    def _all_workers(self) -> dict[str, type[Worker[Any]]]:
        """With those that perform schedules."""
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
                self._wait_for_requests(0.1 if self.draining else 0.02 if self._reload.is_finishing else None)
            if self._has_finished() and not self.stopping.is_set():
                self._keep()
                return self.exit_code
            if not self.stop() or self.hanging() or not (self._loop is None or self._loop.wait_for_end(1.0)):
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
        app, config, nonce = self.app, self.app.config, self._nonce
        for worker in self._all_workers.values():
            self._when_ready(partial(app.registrations.enter, worker.queue_name, worker.shards_count, worker))
        registered: list[QueueInfo] = []
        self._when_ready(lambda: registered.extend(all_queues(app)))
        self._when_ready(partial(self._find_former_schedules, registered))
        config.on_server_init()
        self._has_init = True
        self.client = app.connect(self.threads + 3 + bool(self._schedules))
        maintenance_client = app.connect(2, socket_timeout=max(config.lease_ttl / 4, 0.1))
        #: What goes into the histories of its queues.
        self._recorder = Recorder(
            config.namespace, self._workers, lambda queue: lag_of(self.broker.shards, queue),
            take_inflow=lambda queue: take_inflow(shard for shard in self.broker.shards if shard.queue == queue),
        )  # fmt: skip
        failed = {name: ErrorCounts(config.load_error) for name in self._workers}

        def make_shards(queue: str, layout: Layout) -> list[Shard]:
            worker, events = self._all_workers[queue], app.events_of(queue)
            return shards_of(
                self.client, config, worker, nonce, layout=layout,
                events=events.joined_by(failed[queue]) if queue in failed else events,
                payload_type=payload_type_of(worker),
            )  # fmt: skip

        layouts = {name: self._layouts_of(name) for name in self._all_workers}
        shards = [shard for name, each in layouts.items() for layout in each.all for shard in make_shards(name, layout)]
        shards_count = sum(shard.queue in self._workers for shard in shards)
        loop_queues = [name for name, worker in self._workers.items() if is_async(worker)]
        thread_queues = [name for name in self._workers if name not in loop_queues]
        self.threads = self.threads if thread_queues else 0
        activities = self._activities = [BatchActivity(number) for number in range(self.threads)]
        groups = {
            "threads": WorkerGroup(
                thread_queues, [{name: self._new_scheduler() for name in thread_queues} for _ in activities]
            ),
            "loop": WorkerGroup(loop_queues, [{name: self._new_scheduler() for name in loop_queues}]),
        }
        schedule_queues = [item.worker.queue_name for item in self._schedules]
        groups["schedules"] = WorkerGroup(schedule_queues, [{name: LagScheduler() for name in schedule_queues}])
        groups = {name: group for name, group in groups.items() if group.queues}
        served = {layout.name(name): layout.shards_count for name, each in layouts.items() for layout in each.all}
        identity = Identity(nonce, served, self.threads, VERSION)
        self.name = identity.name
        self.broker = Broker(
            identity, shards, self.client, maintenance_client, config,
            splitter=self._new_splitter(),
            groups=list(groups.values()),
            shares={
                name: Share(worker.weight, worker.max_threads, limits_of(worker), worker.batch_size)
                for name, worker in self._workers.items()
            },
            activities=self._all_activities, queues=[queue_options_of(worker) for worker in self._workers.values()],
            registrations=lambda: [
                app.registrations.call(worker.queue_name, worker.shards_count, worker)
                for worker in self._all_workers.values()
            ],
            chore=self._enter_schedules if self._schedules else None,
            layouts=layouts, make_shards=make_shards, read_layouts=app.registrations.layouts_in,
            heartbeat_extras=[self._recorder, ErrorRecorder(config.namespace, failed, app.events_of)],
            more_details=self._details,
            on_ready=self._on_ready, on_command=self._on_command, on_fatal=self.fail, resumes=self._resumes,
        )  # fmt: skip
        dispatchers = dict(zip(groups, self.broker.dispatchers, strict=True))
        self._threads = [
            WorkerThread(
                self, number, activity, dispatchers["threads"], {name: self.new_runtime(name) for name in thread_queues}
            )
            for number, activity in enumerate(activities)
        ]
        if self._schedules:
            self._schedule_thread = WorkerThread(
                self, 0, BatchActivity(0), dispatchers["schedules"],
                {name: self.new_runtime(name) for name in schedule_queues}, name="schedules",
            )  # fmt: skip
        if loop_queues:
            self._loop = EventLoop(
                self, dispatchers["loop"], {name: self.new_runtime(name) for name in loop_queues}, config.concurrency
            )  # fmt: skip
        self._watchdog = Watchdog(
            self._all_activities,
            [seconds for worker in self._workers.values() for seconds in time_limits_of(worker) if seconds is not None],
            config.warn_after or 0.0,
            write_off=self._write_off, on_fatal=self.fail,
        )  # fmt: skip
        self._when_ready(self._warn_of_eviction)
        self._when_ready(self._warn_of_channels)
        self._when_ready(partial(self._warn_of_unserved, app, registered))
        performers = [f"{self.threads} threads"] if thread_queues else []
        if loop_queues:
            performers.append(f"an event loop for {config.concurrency} shards at once")
        log.info(
            "node %s starts%s: %s, %d shards of %s, namespace %r on %s",
            self.name, " with new code" if self._resumes else "", " and ".join(performers), shards_count,
            ", ".join(self._workers), config.namespace, app.store_name,
            extra={"event": "start", "node": self.name},
        )  # fmt: skip
        have_started = self._set_up_workers()
        self.broker.start()
        for performer in [] if have_started else self._performers():
            performer.start()
        self._watchdog.start()
        self._stop_export = app.export_metrics(
            node_source(self._recorder.tallies, lambda: self.broker.shards, self._all_activities, self.threads)
        )
        for request in self._too_early:
            self._signals.wake(request)
        self._too_early = []

    def rehearse(self) -> None:
        """Does of a start what is the application's own, for a process that ends then. What `on_server_init` can't have
        because the node that runs has it, such as a port, is there after an exec.

        Raises:
            What on_server_init, a splitter, a scheduler or a worker's __init__ raises.
        """
        try:
            self.app.config.on_server_init()
        except OSError as error:
            if error.errno not in _HELD_BY_OTHERS:
                raise
        self._new_splitter()
        self._new_scheduler()
        for queue, worker in self._workers.items():
            runtime = self.new_runtime(queue, self.app.events_of(queue))
            if has_life(worker):
                self._rehearse_setup(worker, runtime)

    def _rehearse_setup(self, worker: type, runtime: WorkerRuntime) -> None:
        instances = Instances()

        async def rehearse() -> None:
            await instances.set_up([runtime.instance])
            await instances.tear_down()

        try:
            if is_async(worker):
                run_first(asyncio.run, rehearse())
            else:
                at_once(rehearse())
        except OSError as error:
            if error.errno not in _HELD_BY_OTHERS:
                raise

    def _set_up_workers(self) -> bool:
        """Where workers have a setup: starts the threads, and waits until all of it has ended. They have no shards yet.
        Whether it has started them.

        Raises:
            What a setup raises. The instances that were set up are torn down.
        """
        if not any(has_life(worker) for worker in self._workers.values()):
            return False
        performers = self._performers()
        for performer in performers:
            performer.start()
        for performer in performers:
            while not performer.is_set_up.wait(0.05) and not (self._signals.stop_requested or self.stopping.is_set()):
                pass
        errors = [performer.setup_error for performer in performers if performer.setup_error is not None]
        if errors:
            for dispatcher in self.broker.dispatchers:
                dispatcher.close()
            deadline = time.monotonic() + self.app.config.shutdown_timeout
            while any(performer.is_alive() for performer in performers) and time.monotonic() < deadline:
                time.sleep(0.01)
            if not isinstance(errors[0], Exception):  # which would end the process without a word
                log.error("a worker could not be set up: %r", errors[0], exc_info=errors[0])
            raise errors[0]
        return True

    def _new_splitter(self) -> Splitter[Shard]:
        config = self.app.config
        made: Splitter[Shard] = (
            config.build_splitter()
            if config.build_splitter
            else drivers.load("splitter", config.splitter)(max(self.threads, 1))
        )
        return _checked_made("splitter", made)

    def _new_scheduler(self) -> Scheduler[Shard]:
        config = self.app.config
        build = config.build_scheduler or drivers.load("scheduler", config.scheduler)
        made: Scheduler[Shard] = build()
        return _checked_made("scheduler", made)

    def _when_ready(self, do: Callable[[], object]) -> None:
        """Does what is to be done at the start, as soon as Redis can serve.

        Raises:
            RedisUnavailable: there is no Redis, or the node is to stop. What else ``do`` raises.
        """
        main = threading.current_thread() is threading.main_thread()

        def wait(seconds: float) -> bool:
            if not main:
                return self.stopping.wait(seconds)
            self._wait_for_requests(seconds)
            return self.stopping.is_set()

        self._start_outage.start(do, wait, has_answered=lambda: self._resumes or self.app.client.is_known)

    def _all_activities(self) -> list[BatchActivity]:
        return [*self._activities, *([] if self._loop is None else self._loop.activities())]

    def _performers(self) -> "list[WorkerThread | EventLoop]":
        own = [] if self._schedule_thread is None else [self._schedule_thread]
        return [*self._threads, *own, *([] if self._loop is None else [self._loop])]

    def _enter_schedules(self, client: Client, _now: float) -> float:
        return min(schedules.enter(client) for schedules in self._schedules)

    def new_runtime(self, queue: str, events: QueueEvents | None = None) -> WorkerRuntime:
        """With a new instance of the queue's worker. ``events``: of the thread that is replaced. It raises what that
        raises.
        """
        if events is None:
            events = self.app.events_of(queue)
            if queue in self._workers:
                offset = lambda: self.broker.maintenance.server_clock.offset  # noqa: E731
                events = events.counted_by(self._recorder.new_tally(queue), offset)
        return WorkerRuntime.of(self._all_workers[queue], self.app.config, events=events)

    def _on_command(self, command: str) -> None:
        log.warning(
            "node %s has received a command: %s", self.name, command, extra={"event": "command", "command": command}
        )
        if command == "quiet":
            self.quiet()
        elif command == "stop":
            self.request_stop()
        elif command == "reload":
            self._signals.wake(Request.RELOAD)

    def _warn_of_eviction(self) -> None:
        try:
            policy = self.client.server_info().get("maxmemory_policy", "noeviction")
        except RedisRefused as error:
            log.warning(
                "Redis does not let this user ask about itself, so it is not known whether it is 7.0 or newer, whether "
                "it evicts keys (it needs maxmemory-policy noeviction), and when it was started, which decides whether "
                "jobs of a node that is gone are charged with a crash; allow +info, see docs/rights.md: %s", error,
                extra={"event": "unchecked"},
            )  # fmt: skip
            return
        if policy != "noeviction":
            log.warning(
                "Redis has maxmemory-policy %s: under memory pressure it removes keys, and jobs are lost; "
                "set it to noeviction", policy, extra={"event": "eviction", "policy": policy},
            )  # fmt: skip

    def _warn_of_channels(self) -> None:
        channel = nodes_key(self.app.config.namespace)
        if self.client.call(rights(channel, ["SPUBLISH"])):
            log.warning(
                "Redis does not let this user publish (SPUBLISH on %s): what it pushes and gives back is found up to "
                "poll_interval (%g s) later; allow +spublish and the channels, see docs/rights.md",
                channel, self.app.config.poll_interval, extra={"event": "unpublished"},
            )  # fmt: skip

    def _find_former_schedules(self, registered: Sequence[QueueInfo]) -> None:
        """Of workers that have no schedules any more: what is left of them has to be ended, and only nodes that serve
        these workers are there to do it. They go on until old nodes are gone. What has ended is dropped by the next
        node that starts.
        """
        names = {queue.name for queue in registered}
        present = {item.queue_name for item in self._schedules}
        for name, worker in self._workers.items():
            if schedules_queue(name) not in names or name in present:
                continue
            former = self.app.queue(schedules_queue(name), 1)
            stats = former.stats()
            if stats.length + stats.taken:
                self._schedules.append(QueueSchedules(self.app, worker))
                continue
            try:
                former.drop()
            except QueueInUse:
                continue  # of a node that started before

    def _warn_of_unserved(self, app: Lowq, registered: Sequence[QueueInfo]) -> None:
        served = {queue for node in app.nodes() for queue in node.queues} | set(app.workers)
        for queue in registered:
            if queue.name not in served and not is_internal(queue.name):
                stats = app.queue(queue.name).stats()
                if stats.length or stats.taken:
                    log.warning(
                        "queue %r holds jobs (%d) and no live node serves it: start a node that works it. If its "
                        "worker was renamed, give the new one queue_name=%r",
                        queue.name, stats.length + stats.taken, queue.name,
                        extra={"event": "unserved", "queue": queue.name},
                    )  # fmt: skip

    def trouble(self) -> str | None:
        """Why the node is not well, for people; None: it is. May be called from any thread."""
        broker = getattr(self, "broker", None)
        if self._start_outage.trouble is not None:
            return self._start_outage.trouble
        if broker is None:
            return "the node has not started yet"
        if not broker.maintenance.is_alive():
            return "the node's maintenance loop has ended"
        if broker.outage.trouble is not None:
            return broker.outage.trouble
        hanging = len(self.hanging()) + (0 if self._loop is None else len(self._loop.hanging()))
        if hanging:
            return f"handlers have exceeded their ttr and still run: {hanging}; the node has {self.threads} threads"
        tasks = [] if self._loop is None else self._loop.activities()
        # With fewer tasks than there may be, others can still begin.
        tasks = tasks if len(tasks) >= self.app.config.concurrency else []
        for activities, what in ((self._activities, "threads"), (tasks, "tasks")):
            seconds = self._seconds_stuck(activities)
            if seconds:
                return (
                    f"all {len(activities)} {what} have been stuck for {duration(seconds)}, each with the batch it "
                    "performs"
                )
        return None

    def _seconds_stuck(self, activities: Iterable[BatchActivity]) -> float:
        """For how long all of them have been stuck; 0.0: they are not."""
        moment = now()
        batches = [activity.performing for activity in activities]
        return self._stuck_limits.seconds_stuck(
            [None if batch is None else (batch.shard.queue, moment - batch.since) for batch in batches]
        )

    # --- handlers that hang ---

    def limit_moved(self) -> None:
        """The deadline of a batch that is being performed is nearer than it was."""
        self._watchdog.nudge()

    def hanging(self) -> list[WorkerThread]:
        """The threads that were written off and whose handlers have not come back since."""
        return [thread for thread in self._written_off if thread.is_alive()]

    def _details(self) -> dict[str, Any]:
        hanging = len(self.hanging()) + (0 if self._loop is None else len(self._loop.hanging()))
        says = {
            "written_off": hanging,
            "concurrency": 0 if self._loop is None else self.app.config.concurrency,
            "strict": self.app.config.strict_shards_count,
            "reload_refusal": self._reload.refusal,
            # A node that ends does not vouch for them any more.
            "schedules": {
                item.queue_name: item.shown()
                for item in self._schedules
                if item.own and not (self.draining or self.stopping.is_set())
            },
        }
        return {name: value for name, value in says.items() if value}

    def _write_off(self, activity: BatchActivity) -> None:
        """Replaces the thread, whose handler has exceeded its ttr. Called by the watchdog. Until this returns the
        thread can't end, so at any time its place has a thread that lives.
        """
        number = activity.number
        if number is None:
            assert self._loop is not None
            self._loop.write_off(activity)
            return
        old = self._threads[number]
        # First of all, as a log may hang too, and its lock may be what the handler hangs in. It is logged later:
        # `on_thread_written_off`.
        self._stacks[old] = _stack_of(old)
        self._written_off = [*self.hanging(), old]
        successor = old.successor(BatchActivity(number))
        try:
            successor.start()
        except RuntimeError as error:  # no more threads: the shard would stay claimed
            self.fail(error)
            return
        self._activities[number], self._threads[number] = successor.activity, successor

    def on_thread_written_off(self, thread: WorkerThread) -> None:
        """What the thread had in hand is reported. Drains the node when half of its threads hang. Called by the
        successor.
        """
        hanging = len(self.hanging())
        is_lost = 2 * hanging >= self.threads and not self.draining and not self.stopping.is_set()
        if is_lost:
            if self.exit_code == EXIT_OK:
                self.exit_code = EXIT_REPLACE
            self.drain()
            self._signals.wake(Request.DRAIN)  # `run` sleeps until it is woken, and looks then
        performing = thread.activity.performing or (thread.activity.performed or (None, 0.0))[0]
        log.error(
            "%s exceeded its ttr: its thread %d is written off and replaced, and its jobs are charged with a crash and "
            "performed again, unless that makes max_crash_count of them. It was here:\n%s",
            performing, thread.activity.number, self._stacks.pop(thread, ""),
            extra={"event": "written_off", "thread_number": thread.activity.number, **_described(performing)},
        )  # fmt: skip
        if is_lost:
            log.critical(
                "node %s drains and exits with %d, for another process to take its place: handlers hang in %d threads, "
                "and it has %d", self.name, EXIT_REPLACE, hanging, self.threads,
                extra={"event": "hanging", "hanging": hanging},
            )  # fmt: skip

    def on_task_written_off(self, performing: Performing | None, stack: str, *, hanging: int, is_lost: bool) -> None:
        """What a task had in hand, which was written off, is reported. ``is_lost``: too many hang, or its handler
        blocks the event loop, so that no other task can go on. Then the node ends, for another process to replace it.
        """
        log.error(
            "%s exceeded its ttr: its task is written off, and its jobs are charged with a crash and performed again, "
            "unless that makes max_crash_count of them. It was here:\n%s",
            performing, stack, extra={"event": "written_off", **_described(performing)},
        )  # fmt: skip
        if is_lost and not self.stopping.is_set():
            if self.exit_code == EXIT_OK:
                self.exit_code = EXIT_REPLACE
            log.critical(
                "node %s exits with %d, for another process to take its place: a handler blocks its event loop for "
                "longer than its ttr, or too many hang (%d)", self.name, EXIT_REPLACE, hanging,
                extra={"event": "hanging", "hanging": hanging},
            )  # fmt: skip
            self.request_stop()

    # --- requests ---

    def _wait_for_requests(self, timeout: float | None) -> None:
        """Waits until something is asked of the node, up to ``timeout`` seconds, and does it."""
        received = self._signals.wait(timeout)
        if received:
            received, self._too_early = [*self._too_early, *received], []
        for request in received:
            if request is Request.STOP:
                self.stopping.set()
            elif request is Request.DUMP:
                self.dump()
            elif request is Request.CHECKED:
                self._on_checked()
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
        self._go_quiet()  # before it says so
        self._reload.call_off(self.name)
        log.warning("node %s goes quiet: it takes nothing more", self.name, extra={"event": "quiet"})

    def _go_quiet(self) -> None:
        self.broker.quiet()

    def drain(self) -> None:
        """Goes quiet, and `run` ends as soon as what runs is finished, however long that takes. For a node that is
        being replaced.
        """
        if not self.draining:
            self.draining = True
            self._go_quiet()  # before it says so
            self._reload.call_off(self.name)
            log.info(
                "node %s drains: it ends when it has finished what it performs", self.name, extra={"event": "drain"}
            )

    def _has_drained(self) -> bool:
        return self.draining and not any(performer.is_alive() for performer in self._performers())

    # --- new code ---

    def reload(self) -> None:
        """Has the new code checked. If it can be run, `run` returns as soon as what runs is finished, with the leases
        kept for it. Only for the thread that is in `run`.
        """
        if self._reload.refusal:
            log.error(
                "node %s can't be reloaded: %s", self.name, self._reload.refusal, extra={"event": "reload_refused"}
            )  # fmt: skip
        elif self.draining or self.stopping.is_set():
            log.warning("node %s is not reloaded: it is ending", self.name, extra={"event": "reload_refused"})
        else:
            self._reload.request(self.name)

    def _on_checked(self) -> None:
        if not self._reload.checked(self.name):
            return
        seconds = self.app.config.shutdown_timeout
        self._finish_by = time.monotonic() + seconds
        busy = self._busy()
        log.info(
            "node %s changes to the new code%s", self.name,
            f", waiting up to {seconds:g} s for {'; '.join(busy)}" if busy else "", extra={"event": "reload"},
        )  # fmt: skip
        self.broker.finish()

    def _has_finished(self) -> bool:
        """For new code."""
        if not self._reload.is_finishing:
            return False
        return time.monotonic() > self._finish_by or not any(performer.is_alive() for performer in self._performers())

    def _keep(self) -> None:
        """Ends, but for membership and leases, which the new code resumes.

        What still runs is cut short by the exec. Its leases run on until it is surely gone, and the new code asks for
        all of them as another process: so what it had in flight is treated as after any stop that was cut short. If
        Redis is away, that can't be said to it, and the new code resumes the leases with what was in flight.
        """
        self._watchdog.stop()
        running, busy = [performer for performer in self._performers() if performer.is_alive()], self._busy()
        if self._loop in running:
            self._loop.cancel()
        for thread in self._threads:
            if thread in running:
                thread.ack_done()
        self.end_by = self._finish_by + LEEWAY
        if not running:
            self._call_on_server_stop()  # while leases are renewed
        self.broker.stop()
        nonce = self._nonce
        if running:
            log.error(
                "node %s changes to the new code while it still performs: %s; these jobs are performed again, and not "
                "charged", self.name, "; ".join(busy) or "nothing", extra={"event": "cut_short"},
            )  # fmt: skip
        try:
            if running:
                self.broker.give_up(LEAVE_SECONDS)
                nonce = nonce[:8] + secrets.token_hex(4)
            else:
                self.broker.keep(nonce)
        except LowqError as error:
            log.warning("the leases could not be renewed, they may run out: %s", error)
        self.broker.close()
        self._reload.kept()
        self.succeeds_as = nonce
        flush()

    def dump(self) -> None:
        """Writes the stacks of all threads to the log, with what each performs."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        busy = {thread.ident: thread.activity.performing for thread in self._threads}
        hanging = {thread.ident: thread.activity.performing for thread in self.hanging()}
        parts = []
        for ident, frame in sys._current_frames().items():
            performing = busy.get(ident)
            head = f"--- {names.get(ident, ident)}" + (f", performing {performing}" if performing else "")
            if ident in hanging:
                head += f", written off: it exceeded its ttr with {hanging[ident]}"
            parts.append(head + "\n" + "".join(traceback.format_stack(frame)))
        for performing, lines in [] if self._loop is None else self._loop.stacks():
            parts.append(f"--- task, performing {performing}\n" + "".join(lines))
        trouble = self.trouble()
        log.warning(
            "%sstacks of all threads:\n%s", f"{trouble}; " if trouble else "", "\n".join(parts), extra={"event": "dump"}
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
        """Once for each start. What it raises is logged: the node stops as it is. Where it hangs, the process ends."""
        if not self._has_init:
            return
        self._has_init = False
        call_off = None
        if self._in_run and self.end_by is not None:
            code = self.exit_code or EXIT_CUT_SHORT
            call_off = end_process_by(self.end_by, code, at_once=lambda: self._signals.cut_short)
        try:
            self.app.config.on_server_stop()
        except BaseException:
            log.exception("on_server_stop failed")
        finally:
            if call_off is not None:
                call_off()

    def _busy(self) -> list[str]:
        """What is being performed, for people."""
        activities: list[Activity] = [thread.activity for thread in self._threads]
        activities += [] if self._loop is None else self._loop.activities()
        return [str(activity.performing) for activity in activities if activity.performing]

    def stop(self, timeout: float | None = None) -> bool:
        """Stops: takes nothing more, waits for what runs, surrenders the leases. False when something still runs
        after ``timeout`` seconds (shutdown_timeout): then the process should end at once, as its leases do soon.
        """
        self.stopping.set()
        seconds = self.app.config.shutdown_timeout if timeout is None else timeout
        self._go_quiet()  # what rests is given up at once, so that nobody waits for what still runs
        busy = self._busy()
        log.info(
            "node %s stops%s", self.name,
            f", waiting up to {seconds:g} s for {'; '.join(busy)}; a second INT ends it at once" if busy else "",
            extra={"event": "stop"},
        )  # fmt: skip
        deadline = time.monotonic() + seconds
        self.end_by = deadline + LEEWAY
        main = threading.current_thread() is threading.main_thread()
        while any(performer.is_alive() for performer in self._performers()):
            left = deadline - time.monotonic()
            if left <= 0 or self._signals.cut_short:
                break
            if main:
                self._wait_for_requests(min(left, 0.02))
            else:
                time.sleep(min(left, 0.02))
        self._watchdog.stop()
        deadline = time.monotonic() + 1.0
        for thread in self._threads:
            if thread.activity.performing is None:
                thread.join(max(deadline - time.monotonic(), 0.0))  # on its way out
        running = [performer for performer in self._performers() if performer.is_alive()]
        busy = self._busy() or ["nothing"]
        if self._loop in running:
            self._loop.cancel()
        for thread in self._threads:
            if thread in running:
                thread.ack_done()
        self.broker.stop()
        if running:
            if self.exit_code != EXIT_REPLACE:
                self.exit_code = EXIT_CUT_SHORT
            log.error(
                "node %s ends while it still performs: %s; these jobs are performed again, and not charged",
                self.name, "; ".join(busy), extra={"event": "cut_short"},
            )  # fmt: skip
            flush()  # now: from here on the leases run out
        try:
            self.broker.leave(LEAVE_SECONDS if running else 0.0)
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


def _stack_of(thread: WorkerThread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "" if frame is None else "".join(traceback.format_stack(frame)).rstrip()


def _described(performing: Performing | None) -> dict[str, object]:
    if performing is None:
        return {}
    return {"queue": performing.shard.queue, "shard": performing.shard.index, "ids": performing.ids[:100]}
