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
import logging
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any

from lowq.clock import Clock
from lowq.coroutines import OwnContext, as_raised
from lowq.errors import JobCancelled
from lowq.observe.events import end_observed
from lowq.settings import Config
from lowq.shards.delivery import MAX_DELIVERY_JOBS, Delivery, Report, TakenJob
from lowq.shards.shard import Activity, Performing, Shard
from lowq.verdicts import bury_undecodable
from lowq.work.handler import RAISED, Execution, WorkerRuntime, cancelled_inside, current_execution
from lowq.work.lifecycle import LoopState, has_life, set_up, tear_down
from lowq.work.outcome import Outcome, notify_worker, outcome_of, reports_of
from lowq.work.time_limits import Interrupt, TimeLimits, WrittenOff, watch_thread

#: Seconds of work that one delivery may take in advance of its acknowledgement: a crash repeats about that much.
PREFETCH_SECONDS = 0.005
#: Ids that a log record carries at most.
MAX_LOGGED_IDS = 10


@dataclass(slots=True)
class BatchActivity(Activity):
    """Shows other threads the batch of a thread, or of a task of the event loop."""

    #: The batch that it performs. A batch that was written off stays here.
    batch: Execution | None = None
    #: Interrupts the performer; None: nobody watches it. And the thread that it is in.
    interrupt: Interrupt | None = None
    ident: int = 0

    def interrupt_stopping(self) -> None:
        """Interrupts the batch if a job of it is to end. A batch without `TimeLimits` gets them now: its performer sets
        `Execution._has_left` and then looks for limits, and this does the two the other way round. So one sees the
        other.
        """
        batch = self.batch
        if batch is None or self.interrupt is None or not (batch._has_entered and batch._is_stopping()):
            return
        limits = batch._limits
        if limits is None:
            limits = TimeLimits(None, None, interrupt=self.interrupt, running=True)
            watch_thread(self.ident, limits)
            batch._limits = limits
            if batch._has_left:
                return
        limits.cancel(batch._is_stopping)

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
    #: What its workers share; None: nothing.
    state: LoopState | None = None
    #: The name of what is being set up.
    setting_up = ""

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
        #: Instances that were set up and are to be torn down.
        self._set_up: list[object] = []

    # --- what a driver says ---

    async def write(self, shard: Shard, reports: Sequence[Report]) -> list[str]:
        """Writes reports. Returns what `InFlight.note_written` does.

        Raises:
            LeaseLost
        """
        raise NotImplementedError

    def on_earlier_limit(self) -> None:
        """Called when the deadline of a running batch has moved nearer."""

    def is_leaving(self, shard: Shard) -> bool:
        """Whether nothing more of the shard is to begin, and the rest waits again."""
        return shard.dispatch.leaving

    def may_go_on(self, shard: Shard, _delivery: Delivery) -> bool:
        """Whether the next id of a batch may begin."""
        return not self.is_leaving(shard)

    def next_id_began(self, shard: Shard) -> None:
        """Called when an id of a batch begins after others of it, where limits over all nodes count that."""

    def look_again(self, shard: Shard) -> None:
        """Has the dispatcher look at the shard, of which something waits again."""

    def on_unacknowledged(self) -> None:
        """Called when a batch begins and earlier ones of its delivery are not acknowledged yet."""

    def ended(self, shard: Shard, jobs: list[TakenJob], outcome: Outcome) -> None:
        """Tells observers and the log what went wrong, once the outcome is written or can't be any more."""
        raise NotImplementedError

    # --- its instances ---

    async def set_up_instances(self, instances: Iterable[object]) -> None:
        """Calls ``setup`` of those that have one; before, what begins the state that they share.

        Raises:
            As `set_up` and `LoopState.start`.
        """

        def note(name: str) -> None:
            self.setting_up = name

        if self.state is not None and not self.state.is_started:
            await self.state.start(note)
        for instance in instances:
            if has_life(instance):
                note(f"{type(instance).__name__}.setup")
                await set_up(instance)
                self._set_up.append(instance)

    async def tear_down_instances(self) -> None:
        """Calls ``teardown`` of all that were set up, the last first."""
        while self._set_up:
            await tear_down(self._set_up.pop())

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
        """Performs one batch: the steps of the drawing above, over one `Execution`.

        Raises:
            WrittenOff: the batch, the shard and what is in flight of it are somebody else's, who reports it all.
            asyncio.CancelledError: the task was cancelled. Nothing is decided then, and what the handler has said to be
            done is finished.
        """
        in_flight = shard.in_flight
        if in_flight.unacknowledged:
            self.on_unacknowledged()
        payloads_by_id = {job.id: job.payloads for job in jobs}
        ids = [*payloads_by_id]
        batch = Execution(
            type(runtime.instance), shard.index, delivery.lease.fence, jobs, in_flight.load_payload, shard
        )
        if runtime.time_limit is not None or runtime.ttr is not None:
            batch._limits = TimeLimits(
                runtime.time_limit, runtime.ttr, interrupt=activity.interrupt, on_earlier=self.on_earlier_limit
            )
        if runtime.is_per_id:
            batch._may_go_on = partial(self.may_go_on, shard, delivery)
            if shard.dispatch.begun.later:
                batch._next_began = partial(self.next_id_began, shard)
        if self.is_cancelled is not None:
            batch._is_cancelled = self.is_cancelled
        if self.state is not None:
            batch._state = self.state
        performing = activity.performing = Performing(shard, ids, now)
        activity.batch = batch
        # Context variables that a batch sets do not reach the next batch. They are there for what is called and logged
        # because of its outcome.
        context = copy_context()
        error: BaseException | None = None
        try:
            error = await self._call_handler(runtime, batch, payloads_by_id, context)
            if error is None and not (batch._outcomes or in_flight.found_no_redis):
                outcome = Outcome(ids, observed=batch._observed)
            else:
                outcome = self._decide(runtime, batch, error, context)
        finally:
            del error  # this frame is a part of its traceback
            ended = self._clock()
            if batch._limits is None or not batch._limits.written_off:
                activity.performed = performing, ended
                activity.performing = activity.batch = None
        runtime.events.tally.batch_performed(shard, jobs, outcome, ended - now, ended)
        in_flight.finish(outcome.finished)
        try:
            if outcome.error is not None or outcome.failures or outcome.releases or outcome.buries:
                await OwnContext(self._conclude(shard, jobs, runtime, outcome), context)
            elif outcome.observed is not None:
                context.run(current_execution.set, None)
                context.run(end_observed, outcome, jobs)
        finally:
            del outcome  # as with the error, which it has

    async def _call_handler(
        self, runtime: WorkerRuntime, batch: Execution, payloads_by_id: dict[str, list[Any]], context: Context
    ) -> BaseException | None:
        """Calls the handler, in the context. Returns what it raised.

        Raises:
            WrittenOff
        """
        limits, events, source = batch._limits, runtime.events, batch._source
        if events.follows_batches:
            began = partial(events.batch_began, is_per_id=runtime.is_per_id)
            batch._observed = context.run(began, batch.worker, batch._source, batch._jobs)
        context.run(current_execution.set, batch)
        error: BaseException | None = None
        try:
            try:
                batch._has_entered = True  # first: who sees it too late is seen by the next line
                if source is not None and source.stopping and batch._is_stopping():
                    batch._is_refused = True
                    raise JobCancelled
                called = runtime.call(payloads_by_id, context=context)
                await (called if limits is None else limits.run(called, context))
            finally:
                # From here on no interrupt comes. One may strike within this: then the second `end` does the rest.
                batch._has_left = True
                if batch._limits is not None:
                    batch._limits.end()
        except WrittenOff:
            raise
        except BaseException as raised:
            batch._has_left = True
            if (limits := batch._limits) is not None:
                limits.end()
            error = as_raised(raised if limits is None else limits.shown(raised))
        finally:
            if batch._observed is not None:
                context.run(batch._observed.left)
        try:
            if self.is_cancelled is not None and (task := asyncio.current_task()) is not None and task.cancelling():
                return await _take_back_cancels(task, self.is_cancelled, error)
            return error
        finally:
            del error  # this frame is a part of its traceback

    def _decide(
        self, runtime: WorkerRuntime, batch: Execution, error: BaseException | None, context: Context
    ) -> Outcome:
        """Decides the outcome of a batch that has not simply finished.

        Raises:
            asyncio.CancelledError: the task was cancelled.
        """
        assert batch._source is not None
        try:
            if issubclass(type(error), asyncio.CancelledError):
                assert error is not None
                if batch._is_cancelled():
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
        """Writes what did not simply finish, then notifies the worker, then the observers and the log.

        Should the process die before that is written, the jobs are restored and performed again.
        """
        outcome.is_written = False
        try:
            outcome.note_written(await self.write(shard, reports_of(shard, outcome, self.now)))
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


# --- log records of what is performed ---


class LogContext(logging.Filter):
    """A filter for handlers of `logging`: each record made inside of ``perform`` gets the attributes ``queue``,
    ``shard``, ``ids`` (the first 10 of the batch, and ``ids_count`` if there are more; in ``perform_one`` its id), and
    ``delivery``. Records from elsewhere, and attributes that a record has, stay as they are. All records pass.

    It goes by context variables: it works in coroutines, and in what copies the context, such as `asyncio.to_thread`.
    ``lowq run`` adds it to the handlers of the root logger.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Adds the attributes. Always True."""
        execution = current_execution.get()
        if execution is not None:
            for name, value in _log_fields(execution).items():
                record.__dict__.setdefault(name, value)
        return True


def add_log_context() -> None:
    """Adds the filter to those handlers of the root logger that don't have it."""
    for handler in logging.getLogger().handlers:
        if not any(isinstance(item, LogContext) for item in handler.filters):
            handler.addFilter(LogContext())


def _log_fields(execution: Execution) -> dict[str, Any]:
    running, ids = execution._running_id, [job.id for job in execution._jobs[:MAX_LOGGED_IDS]]
    fields = {
        "queue": getattr(execution.worker, "queue_name", execution.worker.__name__),
        "shard": execution.shard,
        "ids": ids if running is None else [running],
        "delivery": execution.delivery,
    }
    if running is None and len(execution._jobs) > MAX_LOGGED_IDS:
        fields["ids_count"] = len(execution._jobs)
    return fields
