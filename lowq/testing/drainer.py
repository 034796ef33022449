"""Performs everything that is due in the calling thread: a broker without threads.

It leases the shards of the workers that are drained, and takes, performs and reports batch after batch with the code of
a node.
"""

import asyncio
import inspect
import secrets
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from lowq import clock
from lowq.application import Lowq
from lowq.coroutines import at_once, run_first, running_loop
from lowq.errors import ConfigError, LowqError, QueueFull, QueueInUse
from lowq.limits import no_limits
from lowq.logs import describe
from lowq.node.schedules import take_turn
from lowq.observe.events import end_observed
from lowq.observe.tallies import SlowBatches, Tally
from lowq.shards.delivery import Report, TakenJob
from lowq.shards.lease import Lease, LeaseDenied
from lowq.shards.shard import Shard, shards_of
from lowq.work.handler import WorkerRuntime
from lowq.work.lifecycle import LoopState, has_life
from lowq.work.loop import BatchActivity, Loop
from lowq.work.outcome import Outcome
from lowq.work.time_limits import WrittenOff
from lowq.workers import Worker, is_async, payload_type_of, queue_options_of, schedules_of

T = TypeVar("T")

#: Seconds that a drain waits for callbacks: one may hang.
FLUSH_SECONDS = 10.0
#: Errors that a `Drained` has, at most.
ERRORS_KEPT = 10


class Watcher(Protocol):
    """Watches a drain, and makes batches crash."""

    def has_jobs(self, shard: Shard) -> bool:
        """Whether the shard has ever had jobs; others are not leased."""
        ...

    def on_perform(self, worker: type[Worker[Any]], payloads_by_id: dict[str, list[Any]]) -> object:
        """Called before the handler gets these payloads."""

    def loses_outcome(self) -> bool:
        """Whether the process dies now, between ``perform`` and the outcome."""
        ...

    def on_takeover(self) -> object:
        """Called when the jobs in flight have been restored."""


#: The last one is in use.
watchers: list[Watcher] = []


@dataclass(frozen=True, slots=True)
class Drained:
    """What `drain` did."""

    #: Jobs that were performed and finished.
    performed: int = 0
    #: Failures of jobs, also of those that are tried again alone because their batch failed.
    failed: int = 0
    #: Batches handed to ``perform``.
    batches: int = 0
    #: The first 10 exceptions of ``perform``, as texts: a test that fails shows them.
    errors: tuple[str, ...] = ()


def drain(*workers: type, now: float | None = None, limit: int | None = None, raises: bool = False) -> Drained:
    """Performs everything due, in the calling thread, until nothing is due or ``limit`` batches are done. Async workers
    are performed in an event loop of its own. Callbacks have had all events when it returns.

    ``now``: Unix time in seconds that counts as the present; the server's clock by default. ``raises``: an exception of
    a handler is raised here, after its outcome was written. Nothing happens when a ``time_limit`` or ``ttr`` passes.
    The ticks of the workers' schedules up to ``now`` are pushed before: a schedule begins with the first drain that
    sees it, at the server's time.

    Raises:
        QueueInUse: a node works the queue.
        ConfigError: an argument is no worker; or a worker is async, and an event loop runs here.
    """
    try:
        with no_limits():
            return _drain_here(workers, now, limit, raises=raises)
    finally:
        _flush_events(workers)


def _drain_here(workers: Sequence[type], now: float | None, limit: int | None, *, raises: bool) -> Drained:
    if not any(is_async(worker_of(item)) for item in workers):
        return at_once(_drain(workers, now, limit, raises=raises))
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass  # and out of this block, or what is raised there would have this error as its context
    else:
        raise ConfigError(
            "drain() can't run an event loop inside the running one; write: await lowq.testing.adrain(...); "
            "with the fixtures: await lowq_adrain()"
        )
    return run_first(asyncio.run, _drain(workers, now, limit, raises=raises))


async def adrain(*workers: type, now: float | None = None, limit: int | None = None, raises: bool = False) -> Drained:
    """As `drain`, in the running event loop: for async tests. Sync workers are performed in a thread; where Django is
    used, in that of the test's database connection, and so within the transaction of a ``TestCase``.
    """
    running_loop()
    try:
        with no_limits():
            return await _drain(workers, now, limit, raises=raises, in_thread=True)
    finally:
        await asyncio.to_thread(_flush_events, workers)


async def _call_in_thread(function: Callable[..., T], *args: Any) -> T:
    """Calls the function in a thread. Django binds a connection to its thread; its async tests and the functions that
    they call by `sync_to_async` share one thread.
    """
    asgiref = sys.modules.get("asgiref.sync") if "django" in sys.modules else None
    if asgiref is None:
        return await asyncio.to_thread(function, *args)
    result: T = await asgiref.sync_to_async(function, thread_sensitive=True)(*args)
    return result


def _flush_events(workers: Sequence[type]) -> None:
    """Waits until the callbacks of the workers' applications have had all events."""
    found = (getattr(item, "_app", None) for item in workers)
    for app in {id(app): app for app in found if isinstance(app, Lowq)}.values():
        app.flush_events(FLUSH_SECONDS)


async def _drain(
    workers: Sequence[type], now: float | None, limit: int | None, *, raises: bool, in_thread: bool = False
) -> Drained:
    drainers = [_Drainer(worker_of(item), now, in_thread=in_thread) for item in workers]
    states = {drainer.app: LoopState.of(drainer.app) for drainer in drainers if drainer.is_async}
    for drainer in drainers:
        drainer.state = states.get(drainer.app) if drainer.is_async else None
    failed, batches, errors = 0, 0, list[str]()
    try:
        for drainer in drainers:
            drainer.push_ticks()
        for drainer in drainers:
            drainer.acquire()
        for drainer in drainers:
            await drainer.set_up()
        busy = True
        while busy and (limit is None or batches < limit):
            busy = False
            for drainer in drainers:
                drainer.acquire()  # a handler may have pushed to shards that were empty before
                for shard in drainer.shards:
                    if limit is not None and batches >= limit:
                        break
                    outcome = await drainer.step(shard)
                    if outcome is None:
                        continue
                    busy = True
                    batches += 1
                    failed += len(outcome.failures) + len(outcome.crashed)
                    _note_errors(outcome, errors, raises=raises)
                busy = drainer.push_ticks() or busy  # ticks that its queue had no room for
    finally:
        for drainer in drainers:
            await drainer.tear_down()
        for state in filter(None, states.values()):
            await state.stop()
        for drainer in drainers:
            drainer.leave()
    performed = sum(drainer.tally.processed for drainer in drainers)
    return Drained(performed, failed, batches, tuple(errors))


def _note_errors(outcome: Outcome, errors: list[str], *, raises: bool) -> None:
    """Adds the error of a batch to those that are kept.

    Raises:
        The batch's exception that stops a process; with ``raises``, any error of the batch.
    """
    if outcome.error is not None and len(errors) < ERRORS_KEPT:
        errors.append(describe(outcome.error))  # which is safe, whatever the error's own repr does
    if outcome.stop is not None:
        raise outcome.stop
    if raises and outcome.error is not None:
        raise outcome.error
    outcome.forget()


def worker_of(item: type) -> type[Worker[Any]]:
    """Returns the worker.

    Raises:
        ConfigError: it is none.
    """
    if not (inspect.isclass(item) and issubclass(item, Worker) and isinstance(vars(item).get("_app"), Lowq)):
        raise ConfigError(f"{item!r} is no worker; decorate it with @lowq.worker")
    return item


class _Drainer(Loop):
    """The shards of one worker, leased for the time of a drain."""

    def __init__(self, worker: type[Worker[Any]], now: float | None, *, in_thread: bool) -> None:
        assert isinstance(worker._app, Lowq)
        self.app: Lowq = worker._app
        self.now = now
        self.is_async = is_async(worker)
        #: Whether a sync worker is performed in a thread, so that the event loop goes on.
        self._in_thread = in_thread
        self._worker = worker
        #: Schedules whose ticks are to be pushed.
        self._to_push = [schedule.name for schedule in schedules_of(worker)]
        self._watcher = watchers[-1] if watchers else None
        self.tally = Tally(SlowBatches())
        events = self.app.events_of(worker.queue_name)
        self._events = events.counted_by(self.tally)
        super().__init__(self.app.config, {worker.queue_name: self._new_runtime()}, clock.now, prefetch=False)
        self._activity = BatchActivity(None)
        #: The outcome of the last batch, if it did not simply finish.
        self._outcome = Outcome()
        self.app.registrations.enter(worker.queue_name, worker.shards_count, worker)
        #: Leased shards; `_others` are not leased yet.
        self.shards: list[Shard] = []
        layouts = self.app.registrations.note_layouts(worker.queue_name, self.app.queue_of(worker).layouts).layouts
        self._others = [
            shard
            for layout in layouts.all
            for shard in shards_of(
                self.app.client,
                self.app.config,
                queue_options_of(worker),
                secrets.token_hex(8),
                layout=layout,
                node="drain",
                events=events,
                payload_type=payload_type_of(worker),
            )
        ]

    def _new_runtime(self) -> WorkerRuntime:
        """The runtime of the worker; with a watcher its process may die between ``perform`` and the outcome."""
        watcher, in_thread = self._watcher, _call_in_thread if self._in_thread else None
        if watcher is None:
            return WorkerRuntime.of(self._worker, self.app.config, events=self._events, in_thread=in_thread)
        runtime = WorkerRuntime.of(
            self._worker, self.app.config, events=self._events, in_thread=in_thread,
            on_perform=partial(watcher.on_perform, self._worker),
        )  # fmt: skip

        async def call(payloads_by_id: dict[str, list[Any]], *, context: Context) -> None:
            try:
                await runtime.call(payloads_by_id, context=context)
            finally:
                if watcher.loses_outcome():
                    raise WrittenOff

        return replace(runtime, call=call)

    def acquire(self) -> None:
        others, self._others = self._others, []
        for shard in others:
            if self._watcher is not None and not self._watcher.has_jobs(shard):
                self._others.append(shard)
                continue
            self.shards.append(shard)
            if isinstance(shard.lease.acquire(self.app.config.lease_ttl, self.now), LeaseDenied):
                raise QueueInUse(
                    f"queue {shard.queue!r}: shard {shard.index} is worked by a node, or by another drain; "
                    "drain only queues that nobody works"
                )

    async def set_up(self) -> None:
        await self._call(self.set_up_instances([self._runtimes[self._worker.queue_name].instance]))

    async def tear_down(self) -> None:
        await self._call(self.tear_down_instances())

    async def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine that calls the worker, in the thread that performs it."""
        if self._in_thread and not self.is_async and has_life(self._worker):
            return await _call_in_thread(at_once, coroutine)
        return await coroutine

    async def step(self, shard: Shard) -> Outcome | None:
        """Takes and performs one batch; None: nothing is due."""
        ttl = self._config.lease_ttl
        if clock.now() > shard.lease.deadline - ttl / 2:
            shard.lease.acquire(ttl, self.now)
        delivery = shard.in_flight.take(self.limit(shard), self.now)
        if not delivery.jobs:
            return None
        self._outcome = Outcome()
        try:
            await self.perform(shard, delivery, self._activity)
        except WrittenOff:
            assert self._watcher is not None
            await self._die(shard, self._watcher)
            return Outcome()
        except LowqError:
            if self._outcome.stop is not None:  # also when the lease was lost meanwhile
                raise self._outcome.stop from None
            raise
        finally:
            shard.in_flight.in_hand.clear()
        return self._outcome

    async def write(self, shard: Shard, reports: Sequence[Report]) -> list[str]:
        return shard.in_flight.write(reports)

    def ended(self, _shard: Shard, jobs: list[TakenJob], outcome: Outcome) -> None:
        self._outcome = outcome
        end_observed(outcome, jobs)
        outcome.log()

    async def _die(self, shard: Shard, watcher: Watcher) -> None:
        """Acts as if a node were killed now, and another one took the shard over once the lease has run out. The
        outcome of one batch is lost; the other shards stay as they are.
        """
        client = self.app.client
        client.command("DEL", f"{shard.prefix}lease", key=shard.prefix)
        client.command("HSET", f"{shard.prefix}meta", "leased_until", 0, key=shard.prefix)
        shard.in_flight.drop_delivery()
        shard.lease.lose()
        shard.lease.renew_nonce()
        lease = shard.lease.acquire(self.app.config.lease_ttl, self.now)
        if isinstance(lease, Lease) and lease.poisoned:
            shard.in_flight.note_poisoned(lease.poisoned)
        self._runtimes[shard.queue] = self._new_runtime()
        await self.set_up()
        watcher.on_takeover()

    def push_ticks(self) -> bool:
        """Pushes the ticks of schedules that are still to be pushed; False: none could be. A new schedule begins now,
        by the server's clock. As in a node, ticks wait until the queue has room for them.
        """
        before = len(self._to_push)
        own = {schedule.name: schedule for schedule in schedules_of(self._worker)}
        for name in [*self._to_push]:
            with suppress(QueueFull):
                for now in dict.fromkeys([None, self.now]):
                    wait: float | None = 0.0
                    while wait == 0.0:  # there are more ticks
                        queue = self.app.queue_of(self._worker)
                        wait = take_turn(self.app, queue, name, lambda: own, now=now)
                self._to_push.remove(name)
        return len(self._to_push) < before

    def leave(self) -> None:
        for shard in self.shards:
            if shard.lease.current is not None:
                try:
                    shard.in_flight.take(0, self.now)
                    shard.lease.surrender(leave=0.001)
                except LowqError:
                    continue
