"""A worker thread without its node: it takes its turns when the test says so, and nobody else moves anything."""

import secrets
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lowq
from lowq.clock import Clock
from lowq.clock import now as clock_now
from lowq.observe.events import QueueEvents
from lowq.shards.dispatcher import Dispatcher
from lowq.shards.lease import Lease
from lowq.shards.membership import ServerClock
from lowq.shards.outage import Outage
from lowq.shards.permits import Share
from lowq.shards.scheduler import LagScheduler
from lowq.shards.shard import Performing, Shard, shards_of
from lowq.store import Client
from lowq.work.handler import WorkerRuntime
from lowq.work.loop import BatchActivity
from lowq.work.threads import WorkerThread
from lowq.workers import Worker, queue_options_of
from tests.rules.support import TTL
from tests.waiting import PATIENCE


class _MaintenanceLoop:
    """Renews nothing; what the thread asks of it is written down."""

    def __init__(self) -> None:
        self.server_clock = ServerClock()
        self.doubted: list[Shard] = []
        self.replaced: list[tuple[Shard, str]] = []

    def check(self, shard: Shard) -> None:
        self.doubted.append(shard)

    def replace_lease(self, shard: Shard, token: str) -> None:
        self.replaced.append((shard, token))

    def arm(self) -> None:
        """Acknowledges nothing early."""


class _TurnDispatcher(Dispatcher):
    """Once a test takes turns, hands nothing out before the next one: a thread asks for a shard where a turn begins."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.by_turns = False
        self.begin, self.ended = threading.Semaphore(0), threading.Semaphore(0)

    def wait(self, thread: int) -> Shard | None:
        return super().wait(thread) if self._is_to_begin() else None

    def pick(self, thread: int) -> Shard | None:
        return super().pick(thread) if self._is_to_begin() else None

    def _is_to_begin(self) -> bool:
        """False: the test is over, and so is its thread."""
        if not self.by_turns:
            return True
        self.ended.release()
        return self.begin.acquire(timeout=PATIENCE)


class ThreadRig:
    """All shards of a worker, leased, and the thread that works them. It is the thread's node as well."""

    def __init__(self, app: lowq.Lowq, worker: type[Worker[Any]], clock: Clock = clock_now) -> None:
        self.app = app
        self.client: Client = app.client
        self.stopping = threading.Event()
        self.prefetch = True
        #: What the thread stopped its node for.
        self.failed: list[BaseException] = []
        self.shards = shards_of(app.client, app.config, queue_options_of(worker), secrets.token_hex(8), clock=clock)
        queue = worker.queue_name
        self.dispatcher = _TurnDispatcher(self.shards, [{queue: LagScheduler()}], {queue: Share()}, clock=clock)
        self.maintenance = _MaintenanceLoop()
        #: What a thread needs of a broker.
        self.broker: Any = SimpleNamespace(maintenance=self.maintenance, outage=Outage())
        self.worker = worker
        self.draining = False
        #: What was written off.
        self.written_off: list[WorkerThread] = []
        self.runtimes: dict[str, WorkerRuntime] = {}
        self.new_runtime(worker.queue_name)
        self.thread = WorkerThread(self, 0, BatchActivity(0), self.dispatcher, self.runtimes, clock=clock)
        app.registrations.enter(worker.queue_name, worker.shards_count, worker)
        for shard in self.shards:
            assert isinstance(shard.lease.acquire(TTL), Lease)
        self.wake()

    def on_task_written_off(self, performing: Performing | None, stack: str, *, hanging: int, is_lost: bool) -> None:
        raise AssertionError("there is no event loop")

    def fail(self, error: BaseException) -> None:
        self.failed.append(error)
        self.stopping.set()
        self.dispatcher.close()

    def limit_moved(self) -> None:
        """Nobody watches."""

    def new_runtime(self, queue: str, events: QueueEvents | None = None) -> WorkerRuntime:
        events = events or self.app.events_of(queue)
        self.runtimes[queue] = WorkerRuntime.of(self.worker, self.app.config, events=events)
        return self.runtimes[queue]

    def on_thread_written_off(self, thread: WorkerThread) -> None:
        self.written_off.append(thread)

    def wake(self) -> None:
        """All shards are to be looked at."""
        for shard in self.shards:
            self.dispatcher.wake(shard)

    def server_time(self) -> float:
        """Unix time, seconds."""
        seconds, microseconds = self.client.command("TIME")
        return int(seconds) + int(microseconds) / 1e6

    def turn(self) -> None:
        """One round trip to Redis and the work it brought. Something must be due, or in hand."""
        if not self.dispatcher.by_turns:
            self.dispatcher.by_turns = True
            self.thread.start()
            assert self.dispatcher.ended.acquire(timeout=PATIENCE), "the thread does not begin"
        self.dispatcher.begin.release()
        assert self.dispatcher.ended.acquire(timeout=PATIENCE), "the turn does not end"

    def run(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """The thread's whole life, which something must end: `fail`, or a handler that closes the dispatcher."""
        self.thread.start()
        meanwhile()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive(), "the thread goes on and on"
