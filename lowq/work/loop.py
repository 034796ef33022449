"""The loop: one delivery, batch by batch, from what was taken to what is written of it.

::

    undecodable payloads -> morgue
    for each batch:   is to be left?   -> the rest waits again
                      has expired?     -> those wait again, which Redis judges
                      surely held?     -> else nothing more begins
                      begin            what others see of it: activity, time limits, observers
                      perform          middlewares and handler (`handler`)
                      decide           what becomes of each job (`outcome`)
                      write            what did not simply finish; that the next take acknowledges
                      tell             the worker's hooks, observers, the log

It is a coroutine that awaits nothing but its driver and the handler. In a worker thread and in a drain all of that is
done at once; on an event loop it really waits.

A batch that fails as a whole says nothing about any one id: each is tried again alone, uncharged. Only an id that
fails alone, or that the handler named, is charged a retry.
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any, Protocol

from lowq.application import Lowq
from lowq.clock import Clock
from lowq.coroutines import OwnContext, as_raised
from lowq.errors import LeaseLost, RedisUnavailable
from lowq.logs import get_log
from lowq.observe.events import QueueEvents, end_observed
from lowq.settings import Config
from lowq.shards.broker import Broker
from lowq.shards.delivery import MAX_DELIVERY_JOBS, Delivery, Report, TakenJob
from lowq.shards.dispatcher import Dispatcher
from lowq.shards.shard import Activity, Performing, Shard
from lowq.store import Client
from lowq.verdicts import bury_undecodable, log_lost
from lowq.work.execution import Execution, current_execution
from lowq.work.handler import WorkerRuntime, cancelled_inside
from lowq.work.outcome import RAISED, Outcome, log_failure, notify_worker, outcome_of, reports_of, write_off
from lowq.work.time_limits import Interrupt, TimeLimits, WrittenOff

if TYPE_CHECKING:
    from lowq.work.threads import WorkerThread

log = get_log("lowq.node")

#: Seconds for which a shard is left alone when its script fails.
TROUBLE_SECONDS = 1.0
#: Seconds of work that one delivery may take in advance of its acknowledgement: a crash repeats about that much.
PREFETCH_SECONDS = 0.005


@dataclass(slots=True)
class BatchActivity(Activity):
    """Shows other threads the batch of a thread, or of a task of the event loop."""

    #: The batch that it performs. A batch that was written off stays here.
    batch: Execution | None = None

    @property
    def limits(self) -> TimeLimits | None:
        """The time limits of the batch; None: it has none."""
        batch = self.batch  # read once: the performer may replace it meanwhile
        return None if batch is None else batch._limits


class Loop:
    """Performs deliveries. A driver says how: it writes, and interrupts, in its own way.

    ``runtimes``: by queue. ``prefetch``: a delivery may be of several batches, while these are quick.
    """

    #: Unix time that counts as the present, in seconds; None: Redis's.
    now: float | None = None
    #: Whether its tasks were cancelled, as their time is over; None: it cancels none.
    is_cancelled: Callable[[], bool] | None = None

    def __init__(
        self,
        config: Config,
        runtimes: dict[str, WorkerRuntime],
        clock: Clock,
        *,
        prefetch: bool,
    ) -> None:
        self._config = config
        self._runtimes = runtimes
        self._clock = clock
        self._prefetch = prefetch
        #: queue -> seconds that one of its batches took lately.
        self._seconds: dict[str, float] = {}

    # --- what a driver says ---

    async def write(self, shard: Shard, reports: Sequence[Report]) -> None:
        """Writes reports.

        Raises:
            LeaseLost
        """
        raise NotImplementedError

    def interrupt(self, _activity: BatchActivity) -> Interrupt | None:
        """Returns how the batch that begins is interrupted; None: nobody watches the time."""
        return None

    def on_earlier_limit(self) -> None:
        """Called when the deadline of a running batch has moved nearer."""

    def is_leaving(self, shard: Shard) -> bool:
        """Whether nothing more of the shard is to begin, and the rest waits again."""
        return shard.dispatch.leaving

    def may_go_on(self, shard: Shard, _delivery: Delivery) -> bool:
        """Whether the next id of a batch may begin."""
        return not self.is_leaving(shard)

    def look_again(self, shard: Shard) -> None:
        """Has the dispatcher look at the shard, of which something waits again."""

    def on_unacknowledged(self) -> None:
        """Called when a batch begins and earlier ones of its delivery are not acknowledged yet."""

    def ended(self, shard: Shard, jobs: list[TakenJob], outcome: Outcome) -> None:
        """Tells observers and the log what went wrong, once the outcome is written or can't be any more."""
        raise NotImplementedError

    # --- how much is taken ---

    def limit(self, shard: Shard) -> int:
        """How many jobs the next delivery of the shard, which is claimed, may bring: more while batches are quick."""
        allowance = shard.dispatch.allowance
        if allowance is not None:  # of one batch, which begins at once
            return allowance.jobs
        size = self._runtimes[shard.queue].batch_size
        if not self._prefetch:
            return size
        pace = self._seconds.get(shard.queue)
        batches = 1 if pace is None else int(PREFETCH_SECONDS / max(pace, 1e-6))
        return max(min(batches * size, MAX_DELIVERY_JOBS // size * size), size)

    # --- one delivery ---

    async def perform(self, shard: Shard, delivery: Delivery, activity: BatchActivity) -> None:
        """Performs a delivery batch by batch, in order. What it leaves in hand has not begun: it is in flight, and the
        next take, or the next owner, gets it.

        Raises:
            LeaseLost. WrittenOff: the shard and what was in hand are somebody else's. What a hook stops the process
            with.
        """
        jobs = delivery.jobs
        if delivery.undecodable:
            await bury_undecodable(shard, delivery.undecodable, self._config, self.write, self.now)
            self.look_again(shard)
            jobs = [job for job in jobs if job.payloads]
        if not jobs:
            return
        runtime, began, batches = self._runtimes[shard.queue], self._clock(), 0
        size = runtime.batch_size
        runtime.events.jobs_taken(jobs, began)
        for start in range(0, len(jobs), size):
            if start and self.is_leaving(shard):
                await self._release(shard, [job.id for job in jobs[start:]])
                break
            now = self._clock()
            # With a present that stands still Redis has judged by that, and the clock of this process knows no better.
            judges = self.now is None
            while (is_held := delivery.is_held(shard.lease, now)) and judges and delivery.expires:
                expired = delivery.take_out_expired(jobs, start, now)
                if not expired:
                    break
                await self._release(shard, expired)
                now = self._clock()
            if start >= len(jobs):
                break
            if not is_held:
                self.look_again(shard)
                break
            await self._perform_batch(shard, delivery, runtime, jobs[start : start + size], activity, now)
            batches += 1
        if batches:
            seconds = (self._clock() - began) / batches
            known = self._seconds.get(shard.queue)
            # Slow ones count at once, quick ones bit by bit, at most doubling what the next delivery takes.
            is_slower = known is not None and seconds > known
            self._seconds[shard.queue] = seconds if is_slower else max(seconds, (known or PREFETCH_SECONDS) / 2)

    async def _release(self, shard: Shard, ids: Sequence[str]) -> None:
        await self.write(shard, [shard.in_flight.release_report([(job_id, None) for job_id in ids], self.now)])
        self.look_again(shard)

    async def _perform_batch(
        self,
        shard: Shard,
        delivery: Delivery,
        runtime: WorkerRuntime,
        jobs: list[TakenJob],
        activity: BatchActivity,
        now: float,
    ) -> None:
        """Performs one batch.

        Raises:
            WrittenOff: the batch, the shard and what is in flight of it are somebody else's, who reports it all.
            asyncio.CancelledError: the task was cancelled. Nothing is decided then, and what the handler has said to be
            done is finished.
        """
        in_flight, events = shard.in_flight, runtime.events
        if in_flight.unacknowledged:
            self.on_unacknowledged()
        payloads_by_id = {job.id: job.payloads for job in jobs}
        ids = [*payloads_by_id]
        batch = Execution(
            type(runtime.instance), shard.index, delivery.lease.fence, jobs, in_flight.load_payload, source=shard
        )
        limits: TimeLimits | None = None
        if runtime.time_limit is not None or runtime.ttr is not None:
            limits = batch._limits = TimeLimits(
                runtime.time_limit, runtime.ttr, interrupt=self.interrupt(activity), on_earlier=self.on_earlier_limit
            )
        if runtime.is_per_id:
            batch._may_go_on = partial(self.may_go_on, shard, delivery)
        if self.is_cancelled is not None:
            batch._is_cancelled = self.is_cancelled
        performing = activity.performing = Performing(shard, ids, now)
        activity.batch = batch
        # What a batch sets of context variables is not there for the next one. What is called and logged because of its
        # outcome has them.
        context = copy_context()
        error: BaseException | None = None
        try:
            if events.follows_batches:
                batch._observed = context.run(
                    events.batch_began, batch.worker, shard, jobs, is_per_id=runtime.is_per_id
                )
            context.run(current_execution.set, batch)
            try:
                called = runtime.call(payloads_by_id, context=context)
                await (called if limits is None else limits.run(called, context))
            except WrittenOff:
                raise
            except BaseException as raised:
                error = raised
            finally:
                if batch._observed is not None:
                    context.run(batch._observed.left)
            if self.is_cancelled is not None and (task := asyncio.current_task()) is not None and task.cancelling():
                error = await _take_back_cancels(task, self.is_cancelled, error)
            if error is None and not (batch._outcomes or in_flight.found_no_redis):
                outcome = Outcome(ids, observed=batch._observed)
            else:
                outcome = self._decide(runtime, batch, error, context)
        finally:
            del error  # this frame is a part of its traceback
            ended = self._clock()
            if limits is None or not limits.written_off:
                activity.performed = performing, ended
                activity.performing = activity.batch = None
        events.tally.batch_performed(shard, jobs, outcome, ended - now, ended)
        in_flight.finish(outcome.finished)
        try:
            if outcome.error is not None or outcome.failures or outcome.releases or outcome.buries:
                await OwnContext(self._conclude(shard, jobs, runtime, outcome), context)
            elif outcome.observed is not None:
                context.run(current_execution.set, None)
                context.run(end_observed, outcome, jobs)
        finally:
            del outcome  # as with the error, which it has

    def _decide(
        self, runtime: WorkerRuntime, batch: Execution, error: BaseException | None, context: Context
    ) -> Outcome:
        """Decides the outcome of a batch that has not simply finished.

        Raises:
            asyncio.CancelledError: the task was cancelled.
        """
        try:
            error = None if error is None else as_raised(error)
            if runtime.is_async and issubclass(type(error), asyncio.CancelledError):
                assert error is not None
                if batch._is_cancelled():
                    assert batch._source is not None
                    batch._source.in_flight.finish(batch._done_ids())
                    if batch._observed is not None:
                        batch._observed.ended(None)
                    raise error
                error = cancelled_inside(error)  # for the batch that is an error
            context.run(current_execution.set, None)
            outcome: Outcome = context.run(outcome_of, runtime.instance, batch, error, self._config)
            for job_id, (verb, _) in batch._outcomes.items():
                if verb in ("fail", RAISED):
                    batch._outcomes[job_id] = (verb, None)  # nothing but the outcome refers to what was raised
            return outcome
        finally:
            del error

    async def _conclude(self, shard: Shard, jobs: list[TakenJob], runtime: WorkerRuntime, outcome: Outcome) -> None:
        """Writes what did not simply finish, then notifies the worker, then tells the others.

        Should the process die before that is written, the jobs are restored and performed again.
        """
        outcome.is_written = False
        try:
            await self.write(shard, reports_of(shard, outcome, self.now))
            outcome.is_written = True
            self.look_again(shard)
            await notify_worker(outcome, runtime.instance, self._config)
        finally:
            # Also when the lease was lost meanwhile: what was raised was raised.
            self.ended(shard, jobs, outcome)


async def _take_back_cancels(
    task: "asyncio.Task[Any]", is_cancelled: Callable[[], bool], error: BaseException | None
) -> BaseException | None:
    """A handler may have cancelled its own task: what is awaited from here on is not to be cancelled for that. Returns
    the error of the batch: its own, or the cancellation if the task was cancelled by others meanwhile.
    """
    if is_cancelled():
        return error
    try:
        await asyncio.sleep(0)  # one that has not struck yet strikes here
    except asyncio.CancelledError as raised:
        if is_cancelled():
            return raised
    while task.uncancel():
        pass
    return error


def backoff(failures: int) -> float:
    """Seconds to wait after so many failures in a row, with jitter."""
    return min(0.05 * 2.0 ** min(failures, 10), 2.0) * random.uniform(0.5, 1.0)


class NodeContext(Protocol):
    """What threads and the event loop need of their node."""

    app: Lowq
    client: Client
    broker: Broker
    #: Set when the node is to stop.
    stopping: Event
    prefetch: bool
    #: It takes nothing more.
    draining: bool

    def limit_moved(self) -> None:
        """The deadline of a batch that is being performed is nearer than it was."""
        ...

    def new_runtime(self, queue: str, events: QueueEvents | None = None) -> WorkerRuntime:
        """With a new instance of the queue's worker. ``events``: of the thread that is replaced. It raises what that
        raises.
        """
        ...

    def on_task_written_off(self, performing: Performing | None, stack: str, *, hanging: int, is_lost: bool) -> None:
        """What a task had in hand, which was written off, is reported. ``hanging``: how many of them hang by now.
        ``is_lost``: too many, or its handler blocks the loop.
        """
        ...

    def on_thread_written_off(self, thread: "WorkerThread") -> None:
        """All that it had in hand is reported."""
        ...

    def fail(self, error: BaseException, /) -> object:
        """Stops the node because of an error."""
        ...


class NodeLoop(Loop):
    """A loop of a node, which takes from the shards that its dispatcher hands out."""

    def __init__(
        self,
        node: NodeContext,
        dispatcher: Dispatcher,
        runtimes: dict[str, WorkerRuntime],
        clock: Clock,
    ) -> None:
        super().__init__(node.app.config, runtimes, clock, prefetch=node.prefetch)
        self._node = node
        self._client = node.client
        self._dispatcher = dispatcher

    def is_leaving(self, shard: Shard) -> bool:
        return shard.dispatch.leaving or self._node.stopping.is_set()

    def may_go_on(self, shard: Shard, delivery: Delivery) -> bool:
        return delivery.is_held(shard.lease, self._clock()) and not self.is_leaving(shard)

    def on_earlier_limit(self) -> None:
        self._node.limit_moved()

    def look_again(self, shard: Shard) -> None:
        self._dispatcher.look_again(shard)

    def on_unacknowledged(self) -> None:
        self._node.broker.maintenance.arm()

    def ended(self, shard: Shard, jobs: list[TakenJob], outcome: Outcome) -> None:
        """Stops the node, too, if it has to."""
        try:
            end_observed(outcome, jobs)  # first: Sentry takes the second of two events for a duplicate
            log_failure(shard, jobs, outcome, self._runtimes[shard.queue].instance)
            outcome.log()
        finally:
            if outcome.stop is not None:
                self._node.fail(outcome.stop)
            outcome.forget()

    def until_written(self, write: Callable[[], object]) -> None:
        """Repeats it, in a thread, while Redis is away: only the end of the process or of the lease ends that.

        Raises:
            LeaseLost
        """
        failures = 0
        while True:
            try:
                write()
                return
            except RedisUnavailable as error:
                self._node.broker.outage.begin(error)
                failures += 1
                time.sleep(backoff(failures))

    def read_takes(
        self, takes: Iterable[tuple[Shard, int]], replies: Iterable[Any], begun: int
    ) -> tuple[dict[Shard, Delivery], BaseException | None]:
        """Reads the replies to takes of shards, each given with its wake-ups before it was sent. ``begun``: the
        outages that had begun then.

        Returns the deliveries, and what concerns all shards: Redis did not answer, or the process is to stop. What
        concerns one shard alone is dealt with here: it rests for a while, or is looked at anew.
        """
        deliveries: dict[Shard, Delivery] = {}
        trouble: BaseException | None = None
        for (shard, wakes), reply in zip(takes, replies, strict=False):
            try:
                delivery = shard.in_flight.read_delivery(reply)
                self._dispatcher.note_delivery(shard, wakes, delivery)
                deliveries[shard] = delivery
            except LeaseLost:
                self.lost(shard)
            except RedisUnavailable as error:
                trouble = trouble or error
                if self._client.has_several_primaries:
                    self._dispatcher.rest_for_failover(shard)
            except BaseException as error:
                shard.in_flight.drop_delivery()
                self._dispatcher.rest(shard, TROUBLE_SECONDS)
                if not issubclass(type(error), Exception):
                    trouble = error
                log.error("%r rests for %g s: %s", shard, TROUBLE_SECONDS, error, extra={"event": "trouble"})
        if deliveries and self._node.broker.outage.is_on:
            self._node.broker.outage.end(begun)
        return deliveries, trouble

    def lost(self, shard: Shard) -> None:
        """The lease was lost with what was taken under it."""
        shard.in_flight.drop_delivery()
        self._dispatcher.look_again(shard)
        self._node.broker.maintenance.check(shard)
        log_lost(shard)

    def give_up(self, shard: Shard, batch: Execution) -> None:
        """Reports what was in hand of a batch that was written off, and has the lease surrendered and got anew. Until
        then the shard is withheld, and nothing of it is taken.
        """
        in_flight, token = shard.in_flight, shard.in_flight.token
        jobs: Sequence[Any] = batch._jobs
        outcome = Outcome(observed=batch._observed)
        outcome.is_written = False
        try:
            outcome = write_off(self._runtimes[shard.queue].instance, shard, batch, self._config)
            in_flight.finish(outcome.finished)
            self.until_written(lambda: in_flight.write(reports_of(shard, outcome)))
            outcome.is_written = True
            self._dispatcher.look_again(shard)
            # Last: should the lease have been lost and got again, it begins a new delivery.
            self.until_written(lambda: in_flight.take(0))
        except LeaseLost:
            log_lost(shard)
        except Exception:
            log.exception("%r: what was in hand of a batch that was written off can't be reported", shard)
        finally:
            in_flight.drop_delivery()
            self._dispatcher.suspend(shard)
            self._node.broker.maintenance.replace_lease(shard, token)
            end_observed(outcome, jobs)
