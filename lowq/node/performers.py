"""The performers of a node: its worker threads, its event loop, the thread of its schedules, and their broker.

A thread whose handler hangs is written off and replaced, so each place always has a thread that lives. The successor
reports what the hanging handler had in hand.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any

from lowq.application import Lowq
from lowq.clock import duration, now
from lowq.errors import EXIT_REPLACE
from lowq.logs import get_log
from lowq.node.checks import new_scheduler, new_splitter
from lowq.node.schedules import QueueSchedules
from lowq.node.watchdog import Watchdog, stack_of_thread, stack_sender
from lowq.observe.error_groups import ErrorCounts, ErrorRecorder
from lowq.observe.events import QueueEvents
from lowq.observe.health import Reading, Vitals
from lowq.observe.tallies import Recorder
from lowq.operate.nodes import StuckLimits
from lowq.sharding import Layout, Layouts
from lowq.shards.broker import Broker, WorkerGroup
from lowq.shards.membership import Identity
from lowq.shards.permits import Share
from lowq.shards.scheduler import LagScheduler
from lowq.shards.shard import Performing, Shard, lag_of, shards_of, take_inflow
from lowq.store import Client
from lowq.version import VERSION
from lowq.work.event_loop import EventLoop
from lowq.work.handler import WorkerRuntime
from lowq.work.lifecycle import has_life
from lowq.work.loop import BatchActivity
from lowq.work.threads import WorkerThread
from lowq.workers import Worker, handler_of, is_async, limits_of, payload_type_of, queue_options_of, time_limits_of

log = get_log("lowq.node")

Workers = dict[str, type[Worker[Any]]]
#: Seconds after which a setup that has not returned is named in the log, and again after twice as many.
SLOW_SETUP = 10.0


class Performers:
    """The performers of a node, and the watchdog over them. For threads and event loop it is their `NodeContext`.

    ``workers``: by queue. ``threads``: how many, for workers that are not async. ``stopping``: set when the node is to
    stop. ``fail``: stops it because of an error. ``on_lost``: called when so many handlers hang that another process is
    to take its place, with True if it is to finish what runs; returns its name.
    """

    #: From `make` on, as the two below.
    client: Client
    broker: Broker
    #: Writes the histories of the queues.
    recorder: Recorder

    def __init__(
        self, app: Lowq, workers: Workers, threads: int, *, prefetch: bool, stopping: threading.Event,
        fail: Callable[[BaseException], object], on_lost: Callable[[bool], str],
    ) -> None:  # fmt: skip
        self.app = app
        self.prefetch = prefetch
        self.stopping = stopping
        #: The node takes nothing more.
        self.draining = False
        self.fail = fail
        self._on_lost = on_lost
        self._workers = workers
        self._loop_queues = [name for name, worker in workers.items() if is_async(worker)]
        self._thread_queues = [name for name in workers if name not in self._loop_queues]
        #: How many threads there are for workers.
        self.count = threads if self._thread_queues else 0
        self._threads: list[WorkerThread] = []
        self._loop: EventLoop | None = None
        #: Performs schedules, so that no thread of the workers' is ever taken for it, and none of theirs delays a tick.
        self._schedules: WorkerThread | None = None
        self._schedule_workers: Workers = {}
        #: Threads whose handlers exceeded their ttr; some of them may have come back since.
        self._written_off: list[WorkerThread] = []
        #: Where they were then, until that is logged.
        self._stacks: dict[WorkerThread, str] = {}
        #: Workers are set up before the node takes jobs.
        self._has_to_set_up = False
        #: The performers whose setup was not waited for, as the node stops.
        self._left_waiting: list[WorkerThread | EventLoop] = []
        self._stuck_limits = StuckLimits(app)
        limits = [seconds for worker in workers.values() for seconds in time_limits_of(worker) if seconds is not None]
        self._watchdog = Watchdog(
            self.activities, limits, app.config.warn_after or 0.0, write_off=self._write_off, on_fatal=fail
        )

    # --- start and stop ---

    def make(self, nonce: str, client: Client, schedules: Sequence[QueueSchedules], **node: Any) -> None:
        """Makes the broker and all performers, with instances of their workers. The queues are registered. ``node``:
        more arguments of the broker.

        Raises:
            ConfigError: a splitter or a scheduler can't be called; and what building it, or a worker, raises.
        """
        self.client = client
        self.send_stack = stack_sender(self.app.config.namespace, client, self._stack_of)
        self._schedule_workers = {item.worker.queue_name: item.worker for item in schedules}
        self.broker = self._new_broker(nonce, schedules, node)
        dispatchers = iter(self.broker.dispatchers)
        if self._thread_queues:
            dispatcher = next(dispatchers)
            self._threads = [
                WorkerThread(self, number, BatchActivity(number), dispatcher, self._runtimes(self._thread_queues))
                for number in range(self.count)
            ]
            dispatcher.send_take = self._threads[0].send_take
        if self._loop_queues:
            runtimes = self._runtimes(self._loop_queues)
            self._loop = EventLoop(self, next(dispatchers), runtimes, self.app.config.concurrency)
        if self._schedule_workers:
            runtimes = self._runtimes(self._schedule_workers)
            self._schedules = WorkerThread(self, 0, BatchActivity(0), next(dispatchers), runtimes, name="schedules")

    def _new_broker(self, nonce: str, schedules: Sequence[QueueSchedules], node: dict[str, Any]) -> Broker:
        app, config, client = self.app, self.app.config, self.client
        workers = self._workers | self._schedule_workers
        failed = {name: ErrorCounts(config.load_error) for name in self._workers}

        def make_shards(queue: str, layout: Layout) -> list[Shard]:
            events = app.events_of(queue)
            return shards_of(
                client, config, queue_options_of(workers[queue]), nonce, layout=layout, node=identity.name,
                events=events.joined_by(failed[queue]) if queue in failed else events,
                payload_type=payload_type_of(workers[queue]),
            )  # fmt: skip

        def layouts_of(queue: str) -> Layouts:
            routes = app.registrations.routes_of(queue)
            return Layouts.plain(workers[queue].shards_count) if routes is None else routes.layouts

        layouts = {name: layouts_of(name) for name in workers}
        each = [(name, layout) for name, found in layouts.items() for layout in found.all]
        served = {layout.name(name): layout.shards_count for name, layout in each}
        identity = Identity(nonce, served, self.count, VERSION)
        self.recorder = Recorder(
            config.namespace, self._workers, lambda queue: lag_of(self.broker.of_queue.get(queue, ()), queue),
            take_inflow=lambda queue: take_inflow(self.broker.of_queue.get(queue, ())),
        )  # fmt: skip
        return Broker(
            identity, [shard for name, layout in each for shard in make_shards(name, layout)],
            client, app.connect(2, socket_timeout=max(config.lease_ttl / 4, 0.1)), config,
            splitter=new_splitter(config, self.count), groups=self._groups(),
            shares={
                name: Share(
                    worker.weight, worker.max_threads, limits_of(worker), worker.batch_size,
                    is_per_id=handler_of(worker) == "perform_one",
                )
                for name, worker in self._workers.items()
            },
            activities=self.activities, queues=[queue_options_of(worker) for worker in self._workers.values()],
            registrations=lambda: [
                app.registrations.call(name, worker.shards_count, worker) for name, worker in workers.items()
            ],
            chore=lambda client, _now: min((item.enter(client) for item in schedules), default=inf),
            layouts=layouts, make_shards=make_shards, read_layouts=app.registrations.layouts_in,
            heartbeat_extras=[self.recorder, ErrorRecorder(config.namespace, failed, app.events_of)],
            **node,
        )  # fmt: skip

    def _groups(self) -> list[WorkerGroup]:
        """The queues of each group of performers, with their schedulers."""
        build = partial(new_scheduler, self.app.config)
        groups = [
            WorkerGroup(queues, [{name: build() for name in queues} for _ in range(number)])
            for queues, number in ((self._thread_queues, self.count), (self._loop_queues, 1))
        ]
        internal = self._schedule_workers
        groups.append(WorkerGroup([*internal], [{name: LagScheduler() for name in internal}]))
        return [group for group in groups if group.queues]

    def _runtimes(self, queues: Iterable[str]) -> dict[str, WorkerRuntime]:
        return {name: self.new_runtime(name) for name in queues}

    def new_runtime(self, queue: str, events: QueueEvents | None = None) -> WorkerRuntime:
        """A runtime with a new instance of the queue's worker, whose errors it raises. ``events``: of the thread
        that is replaced.
        """
        if events is None:
            events = self.app.events_of(queue)
            if queue in self._workers:
                offset = lambda: self.broker.membership.server_clock.offset  # noqa: E731
                events = events.counted_by(self.recorder.new_tally(queue), offset)
        worker = (self._workers | self._schedule_workers)[queue]
        return WorkerRuntime.of(worker, self.app.config, events=events)

    def start(self, take: Callable[[], object], is_stopping: Callable[[], bool]) -> None:
        """Starts the performers, and calls ``take``, which gets shards, once all workers with a setup are set up, or
        the node ``is_stopping``.

        Raises:
            What a setup, or a function of `Lowq.on_loop_start`, raises. What was set up is torn down.
        """
        has_setup = any(has_life(worker) for worker in self._workers.values()) or (
            self._loop is not None and self._loop.state is not None
        )
        for performer in self._all() if has_setup else ():
            performer.start()
        self._has_to_set_up = has_setup
        begun, warn_after = now(), SLOW_SETUP
        while (name := self.waits_for_setup()) and not is_stopping():
            if now() - begun >= warn_after:
                log.warning(
                    "%s has not returned for %s: the node takes no jobs before it has", name, duration(now() - begun),
                    extra={"event": "slow_setup"},
                )  # fmt: skip
                warn_after *= 2
            time.sleep(0.01)
        if name:  # the node stops, and what hangs there has performed nothing
            self._left_waiting = self._all()
        self._has_to_set_up = False
        error = next((performer.setup_error for performer in self._all() if performer.setup_error is not None), None)
        if error is not None:
            for dispatcher in self.broker.dispatchers:
                dispatcher.close()
            deadline = time.monotonic() + self.app.config.shutdown_timeout
            while self.living() and time.monotonic() < deadline:
                time.sleep(0.01)
            if not isinstance(error, Exception):  # which would end the process without a word
                log.error("a worker could not be set up: %r", error, exc_info=error)
            raise error
        take()
        for performer in () if has_setup else self._all():
            performer.start()
        self._watchdog.start()

    def waits_for_setup(self) -> str:
        """The name of what is still to return before the node takes jobs; "": nothing."""
        performers = self._all() if self._has_to_set_up else ()
        waits = (performer for performer in performers if not performer.is_set_up.is_set())
        return next((performer.setting_up or "the setup" for performer in waits), "")

    def cut_short(self) -> bool:
        """Acknowledges the finished ids of batches that still run, when the time is over. Returns whether any run."""
        self._watchdog.stop()
        deadline = time.monotonic() + 1.0
        for thread in self._threads:
            if thread.activity.performing is None:
                thread.join(max(deadline - time.monotonic(), 0.0))  # on its way out
        living = self.living()
        if self._loop is not None and self._loop in living:
            self._loop.cancel()
        for thread in self._threads:
            if thread in living:
                thread.ack_done()
        return bool(living)

    def can_exit(self) -> bool:
        """Whether the process can end by itself: no handler that was written off still runs."""
        return not self._hanging() and (self._loop is None or self._loop.wait_for_end(1.0))

    # --- what they do ---

    def _all(self) -> "list[WorkerThread | EventLoop]":
        others = [performer for performer in (self._schedules, self._loop) if performer is not None]
        return [*self._threads, *others]

    def living(self) -> "list[WorkerThread | EventLoop]":
        """Threads, and the event loop, that have not ended; without those whose setup a stop does not wait for."""
        waiting = [performer for performer in self._left_waiting if not performer.is_set_up.is_set()]
        return [performer for performer in self._all() if performer not in waiting and performer.is_alive()]

    def activities(self) -> list[BatchActivity]:
        """The activities of the workers' threads, and of the tasks of the event loop."""
        return [
            *(thread.activity for thread in self._threads),
            *([] if self._loop is None else self._loop.activities()),
        ]

    def busy(self) -> list[str]:
        """What is being performed, for people."""
        return [str(activity.performing) for activity in self.activities() if activity.performing]

    def described(self) -> str:
        """How many there are, for people."""
        performers = [f"{self.count} threads"] if self.count else []
        if any(map(is_async, self._workers.values())):
            performers.append(f"an event loop for {self.app.config.concurrency} shards at once")
        return " and ".join(performers)

    def details(self) -> dict[str, float]:
        """Fields of the node's entry, besides the activities."""
        return {
            "written_off": self._count_hanging(),
            "concurrency": 0 if self._loop is None else self.app.config.concurrency,
            "shutdown_timeout": self.app.config.shutdown_timeout,
        }

    def vitals(self, trouble: str | None, figures: Mapping[str, Reading]) -> Vitals:
        """How the node is, for probes. ``trouble``, ``figures``: those of the node."""
        maintenance, is_stopping = self.broker.maintenance, self.stopping.is_set()
        hangs = 0.0 if is_stopping else maintenance.hang()
        dead = f"the maintenance loop has been hanging for {duration(hangs)}" if hangs else None
        if is_stopping or self.draining:
            unready: str | None = "the node is stopping"
        elif maintenance.is_quiet:
            unready = "the node is quiet: it takes no jobs"
        else:
            unready = trouble or (None if maintenance.is_ready else "the node has not asked for its shards yet")
        return Vitals(dead, unready, {"": figures})

    def trouble(self) -> str | None:
        """Why the node is not well, once it has its broker, for people; None: it is."""
        if setup := self.waits_for_setup():
            return f"the node takes no jobs yet: it waits for {setup}"
        if not self.broker.maintenance.is_alive():
            return "the node's maintenance loop has ended"
        return self.broker.outage.trouble or self._stuck()

    def _stuck(self) -> str | None:
        """Which handlers hang, for people."""
        hanging = self._count_hanging()
        if hanging:
            return f"handlers have exceeded their ttr and still run: {hanging}; the node has {self.count} threads"
        tasks = [] if self._loop is None else self._loop.activities()
        # With fewer tasks than there may be, others can still begin.
        tasks = tasks if len(tasks) >= self.app.config.concurrency else []
        moment = now()
        for activities, what in (([thread.activity for thread in self._threads], "threads"), (tasks, "tasks")):
            batches = [activity.performing for activity in activities]
            seconds = self._stuck_limits.seconds_stuck(
                [None if batch is None else (batch.shard.queue, moment - batch.since) for batch in batches]
            )
            if seconds:
                return (
                    f"all {len(activities)} {what} have been stuck for {duration(seconds)}, each with the batch it "
                    "performs"
                )
        return None

    def stacks(self) -> str:
        """The stacks of all threads of the process, and of all tasks, with the batch of each."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        running = ((thread.ident, thread.activity.performing) for thread in self._threads)
        says = {ident: f", performing {performing}" for ident, performing in running if performing}
        for thread in self._hanging():
            says[thread.ident] = f", written off: it exceeded its ttr with {thread.activity.performing}"
        parts = [
            f"--- {names.get(ident, ident)}{says.get(ident, '')}\n" + "".join(stack_of_thread(ident))
            for ident in sys._current_frames()
        ]
        for performing, lines in [] if self._loop is None else self._loop.stacks():
            parts.append(f"--- task, performing {performing}\n" + "".join(lines))
        return "\n".join(parts)

    def _stack_of(self, queue: str, job_id: str) -> tuple[int | None, list[str]]:
        def performs_it(performing: Performing | None) -> bool:
            return performing is not None and performing.shard.queue == queue and job_id in performing.ids

        for thread in self._threads:
            if performs_it(thread.activity.performing):
                return thread.activity.number, stack_of_thread(thread.ident)
        tasks = [] if self._loop is None else self._loop.stacks()
        return None, next((lines for performing, lines in tasks if performs_it(performing)), [])

    # --- handlers that hang ---

    def limit_moved(self) -> None:
        """Has the watchdog look again: the deadline of a running batch has moved nearer."""
        self._watchdog.nudge()

    def _hanging(self) -> list[WorkerThread]:
        """The threads that were written off and whose handlers have not come back since."""
        return [thread for thread in self._written_off if thread.is_alive()]

    def _count_hanging(self) -> int:
        return len(self._hanging()) + (0 if self._loop is None else len(self._loop.hanging()))

    def _write_off(self, activity: BatchActivity) -> None:
        """Replaces the thread, whose handler has exceeded its ttr, or gives up the task. Called by the watchdog. Until
        this returns the thread can't end.
        """
        number = activity.number
        if number is None:
            assert self._loop is not None
            self._loop.write_off(activity)
            return
        old = self._threads[number]
        # First of all, as a log may hang too, and its lock may be what the handler hangs in. It is logged later:
        # `on_thread_written_off`.
        self._stacks[old] = "".join(stack_of_thread(old.ident)).rstrip()
        self._written_off = [*self._hanging(), old]
        successor = old.successor(BatchActivity(number))
        try:
            successor.start()
        except RuntimeError as error:  # no more threads: the shard would stay claimed
            self.fail(error)
            return
        self._threads[number] = successor

    def on_thread_written_off(self, thread: WorkerThread) -> None:
        """Logs that the thread is written off, once its jobs in hand are reported. Drains the node when half of its
        threads hang. Called by the successor.
        """
        hanging = len(self._hanging())
        is_lost = 2 * hanging >= self.count and not self.draining and not self.stopping.is_set()
        node = self._on_lost(True) if is_lost else ""
        number, performing = thread.activity.number, thread.activity.performing
        performing = performing or (thread.activity.performed or (None, 0.0))[0]
        what = f"thread {number} is written off and replaced"
        _log_written_off(performing, what, self._stacks.pop(thread, ""), thread_number=number)
        if is_lost:
            log.critical(
                "node %s drains and exits with %d, for another process to take its place: handlers hang in %d threads, "
                "and it has %d", node, EXIT_REPLACE, hanging, self.count,
                extra={"event": "hanging", "hanging": hanging},
            )  # fmt: skip

    def on_task_written_off(self, performing: Performing | None, stack: str, *, hanging: int, is_lost: bool) -> None:
        """Logs that a task is written off, once its jobs in hand are reported. ``is_lost``: too many hang, or its
        handler blocks the event loop. Then the node ends, for another process to replace it.
        """
        is_lost = is_lost and not self.stopping.is_set()
        node = self._on_lost(False) if is_lost else ""
        _log_written_off(performing, "task is written off", stack)
        if is_lost:
            log.critical(
                "node %s exits with %d, for another process to take its place: a handler blocks its event loop for "
                "longer than its ttr, or too many hang (%d)", node, EXIT_REPLACE, hanging,
                extra={"event": "hanging", "hanging": hanging},
            )  # fmt: skip


def _log_written_off(performing: Performing | None, what: str, stack: str, **extra: object) -> None:
    if performing is not None:
        extra |= {"queue": performing.shard.queue, "shard": performing.shard.index, "ids": performing.ids[:100]}
    log.error(
        "%s exceeded its ttr: its %s, and its jobs are charged with a crash and performed again, unless that makes "
        "max_crash_count of them. It was here:\n%s", performing, what, stack, extra={"event": "written_off", **extra},
    )  # fmt: skip
