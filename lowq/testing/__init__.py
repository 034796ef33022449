"""For tests of applications: everything due performed in the calling thread, on an embedded store if wanted.

The same scripts, middlewares and retry rules as in a node::

    with lowq.testing.embedded(OrderSync):
        OrderSync.perform_async({"id": 1, "payload": {"version": 1}, "score": 1})
        assert lowq.testing.drain(OrderSync).performed == 1
"""

import asyncio
import inspect
import secrets
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from lowq import clock
from lowq.application import Lowq, default
from lowq.broker.lease import LeaseDenied
from lowq.broker.shard import Shard, shards_of
from lowq.errors import ConfigError, LowqError, QueueInUse
from lowq.job import Job
from lowq.node.execution import (
    Execution,
    Outcome,
    WorkerRuntime,
    anotify_worker,
    aperform,
    conclude,
    current_execution,
    decodable_jobs,
    log_remarks,
    perform,
    report,
)
from lowq.node.limits import TimeLimits
from lowq.workers import Worker, is_async, limits_of

#: Seconds that a drain waits for callbacks, for one that hangs.
FLUSH_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Drained:
    """What `drain` did."""

    #: Jobs that were performed and finished.
    performed: int = 0
    #: Times that a job failed, or had to be tried again because its batch failed.
    failed: int = 0
    #: Batches handed to ``perform``.
    batches: int = 0


def drain(*workers: type, now: float | None = None, limit: int | None = None, raises: bool = False) -> Drained:
    """Performs everything due, in the calling thread, until nothing is due or ``limit`` batches are done. Async workers
    are performed in an event loop of its own. Callbacks have had all events when it returns.

    ``now``: Unix time in seconds that counts as the present; the server's clock by default. ``raises``: what a
    handler raises is raised here, after its outcome was written. Nothing happens when a ``time_limit`` or ``ttr``
    passes.

    Raises:
        QueueInUse: a node works the queue. ConfigError: something that is no worker; an async one, called from a
        running event loop.
    """
    try:
        return _drain_here(workers, now, limit, raises=raises)
    finally:
        _flush_events(workers)


def _drain_here(workers: Sequence[type], now: float | None, limit: int | None, *, raises: bool) -> Drained:
    if not any(is_async(_worker(item)) for item in workers):
        return _never_suspended(_drain(workers, now, limit, raises=raises))
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_drain(workers, now, limit, raises=raises))
    raise ConfigError("drain() can't run an event loop inside the running one; write: await lowq.testing.adrain(...)")


async def adrain(*workers: type, now: float | None = None, limit: int | None = None, raises: bool = False) -> Drained:
    """As `drain`, in the running event loop: for async tests. Sync workers are performed in a thread."""
    try:
        return await _drain(workers, now, limit, raises=raises, in_thread=True)
    finally:
        await asyncio.to_thread(_flush_events, workers)


def _flush_events(workers: Sequence[type]) -> None:
    """Callbacks have had all events of their applications when a drain returns."""
    found = (getattr(item, "_app", None) for item in workers)
    for app in {id(app): app for app in found if isinstance(app, Lowq)}.values():
        app.flush_events(FLUSH_SECONDS)


def _never_suspended(coroutine: Coroutine[Any, Any, Drained]) -> Drained:
    """The result of a coroutine that awaits nothing but what is done at once, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: Drained = end.value
        return result
    raise AssertionError("it was suspended")


async def _drain(
    workers: Sequence[type], now: float | None, limit: int | None, *, raises: bool, in_thread: bool = False
) -> Drained:
    drainers = [_Drainer(_worker(item), now, in_thread=in_thread) for item in workers]
    performed = failed = batches = 0
    try:
        for drainer in drainers:
            drainer.acquire()
        busy = True
        while busy and (limit is None or batches < limit):
            busy = False
            for drainer in drainers:
                for shard in drainer.shards:
                    if limit is not None and batches >= limit:
                        break
                    outcome = await drainer.step(shard)
                    if outcome is None:
                        continue
                    busy = True
                    batches += 1
                    performed += len(outcome.finished)
                    failed += len(outcome.failures) + len(outcome.crashed)
                    if outcome.stop is not None:
                        raise outcome.stop
                    if raises and outcome.error is not None:
                        raise outcome.error
    finally:
        for drainer in drainers:
            drainer.leave()
    return Drained(performed, failed, batches)


def _worker(item: type) -> type[Worker[Any]]:
    if not (inspect.isclass(item) and issubclass(item, Worker) and isinstance(vars(item).get("_app"), Lowq)):
        raise ConfigError(f"{item!r} is no worker; decorate it with @lowq.worker")
    return item


class _Drainer:
    """The shards of one worker, leased for the time of a drain."""

    def __init__(self, worker: type[Worker[Any]], now: float | None, *, in_thread: bool) -> None:
        assert isinstance(worker._app, Lowq)
        self._app: Lowq = worker._app
        self._now = now
        self._is_async = is_async(worker)
        #: A sync worker is performed in a thread, as the event loop goes on meanwhile.
        self._in_thread = in_thread
        self._runtime = WorkerRuntime.of(worker, self._app.config)
        self._app.register(worker.queue_name, worker.shards_count, worker)
        events = self._app.events_of(worker.queue_name)
        self.shards = shards_of(self._app.client, self._app.config, worker, secrets.token_hex(8), events=events)

    def acquire(self) -> None:
        for shard in self.shards:
            if isinstance(shard.lease.acquire(self._app.config.lease_ttl, self._now), LeaseDenied):
                raise QueueInUse(
                    f"queue {shard.queue!r}: shard {shard.index} is worked by a node, or by another drain; "
                    "drain only queues that nobody works"
                )

    async def step(self, shard: Shard) -> Outcome | None:
        """Takes and performs one batch; None: nothing is due."""
        ttl = self._app.config.lease_ttl
        if clock.now() > shard.lease.deadline - ttl / 2:
            shard.lease.acquire(ttl, self._now)
        config = self._app.config
        delivery = shard.in_flight.take(self._runtime.batch_size, self._now)
        jobs = decodable_jobs(shard, delivery, config, self._now)
        if not jobs:
            shard.in_flight.keep_finished()
            return Outcome() if delivery.jobs else None
        limits = _limits(self._runtime.time_limit, self._runtime.ttr)
        batch = (self._runtime, shard, delivery.lease.fence, jobs, config, limits)
        if self._is_async:
            outcome = await aperform(*batch)
        elif self._in_thread:
            outcome = await asyncio.to_thread(perform, *batch)
        else:
            outcome = perform(*batch)
        try:
            if self._is_async:
                shard.in_flight.finish(outcome.finished)
                report(shard, outcome, self._now)
                await anotify_worker(outcome, self._runtime.instance, config)
            else:
                conclude(self._runtime, shard, outcome, config, partial(report, now=self._now))
        except LowqError:
            if outcome.stop is not None:  # also when the lease was lost meanwhile
                raise outcome.stop from None
            raise
        finally:
            shard.in_flight.keep_finished()
            log_remarks(outcome)
        return outcome

    def leave(self) -> None:
        for shard in self.shards:
            if shard.lease.current is not None:
                try:
                    shard.in_flight.take(0, self._now)
                    shard.lease.surrender(leave=0.001)
                except LowqError:
                    continue


@contextmanager
def embedded(*workers: type) -> Iterator[None]:
    """An empty in-memory store for these workers (and all of their application) for the time of the block."""
    apps = {id(item._app): item._app for item in map(_worker, workers)} or {0: default}
    with ExitStack() as stack:
        for app in apps.values():
            assert isinstance(app, Lowq)
            stack.enter_context(app.embedded())
        yield


def _limits(time_limit: float | None, ttr: float | None) -> TimeLimits | None:
    """What ``deadline`` and ``touch`` go by. Nobody watches, so nothing is enforced."""
    return None if time_limit is None and ttr is None else TimeLimits(time_limit, ttr)


@contextmanager
def execution(
    worker: type, jobs: Mapping[str, Sequence[Any]] | Sequence[Job] = (), *, shard: int = 0, fence: int = 1
) -> Iterator[Execution]:
    """Provides `lowq.current` to a direct call of ``perform``. ``jobs``: payloads by id, or `Job` values.

    ``deadline`` and ``touch`` work as in a node, but nothing happens when a limit passes.
    """
    if isinstance(jobs, Mapping):
        jobs = [
            Job(
                str(job_id), "taken", [(payload, float(score)) for score, payload in enumerate(payloads)], time.time(),
                payloads_count=len(payloads),
            )
            for job_id, payloads in jobs.items()
        ]  # fmt: skip
    value = Execution(worker, shard, fence, jobs, limits=_limits(*limits_of(worker)))
    token = current_execution.set(value)
    try:
        yield value
    finally:
        current_execution.reset(token)
