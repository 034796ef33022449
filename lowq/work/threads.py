"""A worker thread of a node: one round trip to Redis after another, and the work that each brings.

::

    thread     dispatcher         Redis                      if the process dies here
    ------     ----------         -----                      -------------------------------------------------
    wait   --> claim a shard
    take   -------------------->  ids move to `taken`        restored by the next owner, charged as a crash
    perform                                                  the same; the batch is performed again
    report -------------------->  fail / release / bury      each is one script: done, or restored
    take   -------------------->  ack + next ids             acknowledged and taken in one step

A thread whose handler does not come back within ``ttr`` is written off. Another one has its number, the shard that it
had claimed, and what was in flight there. While it inherits::

    successor                     Redis                      if the process dies here
    ---------                     -----                      -------------------------------------------------
    report -------------------->  crash / release / bury     each is one script: done, or restored with a crash
    ack    -------------------->  what had finished          restored, performed again
    replace_lease: maintenance
    surrenders the lease                                     it runs out
    and gets it anew ---------->  a higher fence             nothing is in flight
"""

import threading
import time
from contextvars import copy_context
from typing import Any

from lowq.clock import Clock
from lowq.clock import now as clock_now
from lowq.errors import LeaseLost, LowqError, RedisUnavailable
from lowq.logs import get_log
from lowq.observe import job_log
from lowq.shards.activity import Performing
from lowq.shards.delivery import Delivery, TakenJob
from lowq.shards.dispatcher import Dispatcher
from lowq.shards.shard import Shard
from lowq.store import Call
from lowq.work import handler as execution
from lowq.work.activity import ThreadActivity
from lowq.work.batch import (
    TROUBLE_SECONDS,
    NodeContext,
    backoff,
    count_batch,
    count_waits,
    give_up,
    is_held,
    log_lost,
    report_failure,
    until_written,
)
from lowq.work.instances import Instances, has_life
from lowq.work.outcome import Outcome, conclude, decodable_jobs, done_ids, report
from lowq.work.pace import Pace
from lowq.work.time_limits import TimeLimits, WrittenOff, interrupt_of_this_thread

log = get_log("lowq.node")


class WorkerThread:
    """Works one shard after another. Everything but `activity` belongs to the thread itself. ``predecessor``: the
    thread that was written off and that it replaces; all that one had is its own then.
    """

    def __init__(
        self,
        node: NodeContext,
        number: int,
        activity: ThreadActivity,
        dispatcher: Dispatcher,
        runtimes: dict[str, execution.WorkerRuntime],
        *,
        predecessor: "WorkerThread | None" = None,
        name: str = "",
        clock: Clock = clock_now,
    ) -> None:
        self._clock = clock
        self._thread = threading.Thread(target=self._run, name=f"lowq-{name or number}", daemon=True)
        self.activity = activity
        self._number = number
        self._node = node
        self._client = node.client
        self._dispatcher = dispatcher
        self._runtimes = runtimes
        self._config = node.app.config
        self._predecessor = predecessor
        self._held: Shard | None = None
        self._pace = Pace(runtimes, prefetch=node.prefetch)
        self._instances = Instances()
        #: Set when its instances are set up, or could not be: then `setup_error` says why.
        self.is_set_up = threading.Event()
        self.setup_error: BaseException | None = None

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def join(self, timeout: float) -> None:
        """Waits so many seconds for the thread to end."""
        self._thread.join(timeout)

    @property
    def ident(self) -> int | None:
        """The thread's number, as in ``sys._current_frames``; None: not started yet."""
        return self._thread.ident

    @property
    def is_written_off(self) -> bool:
        """Whether its handler did not come back within ttr. It does nothing more, should that come back."""
        return self.activity.limits is not None and self.activity.limits.written_off

    def ack_done(self) -> None:
        """Acknowledges what is done of a batch that is to be cut short. For another thread: it changes nothing here,
        and what it cites may be acknowledged again.
        """
        performing, limits = self.activity.performing, self.activity.limits
        if performing is None or limits is None:
            return
        # The delivery first: see `InFlight.early_ack_call`.
        in_flight = performing.shard.in_flight
        delivery, ids = in_flight.delivery, done_ids(limits.outcomes)
        if ids and self.activity.performing is performing:
            try:
                self._client.run_many([in_flight.ack_report(ids, delivery).call])
            except LowqError as error:
                log.warning("%r: what is done of it can't be acknowledged: %s", performing, error)

    def successor(self, activity: ThreadActivity) -> "WorkerThread":
        """The thread that is to replace this one, which is written off."""
        return WorkerThread(
            self._node, self._number, activity, self._dispatcher, dict(self._runtimes), predecessor=self,
            clock=self._clock,
        )  # fmt: skip

    def _run(self) -> None:
        try:
            if self._predecessor is None:  # else `_inherit` makes new ones
                self._instances.set_up(runtime.instance for runtime in self._runtimes.values())
        except BaseException as error:
            self.setup_error = error
        self.is_set_up.set()
        try:
            if self.setup_error is None:
                self._take_turns()
        finally:
            self._instances.tear_down()

    def _take_turns(self) -> None:
        failures = 0
        while not self.is_written_off:
            try:
                old, self._predecessor = self._predecessor, None
                if (old is not None and not self._inherit(old)) or not self._turn():
                    return
                failures = 0
            except WrittenOff:
                return
            except RedisUnavailable as error:
                self._node.broker.outage.begin(error)
                failures += 1
                if not self._pause(failures):
                    return
            except LeaseLost:
                held = self._held
                self._let_go()
                if held is not None:
                    log_lost(held)
            except Exception:
                self._let_go()
                log.exception("a thread failed outside of a worker; it goes on")
                failures += 1
                if not self._pause(failures):
                    return
            except BaseException as error:
                # SystemExit or the like from what a user has given us besides `perform`.
                self._let_go()
                self._node.fail(error)
                return

    def _pause(self, failures: int) -> bool:
        """Waits, longer each time. False: the node stops and nothing is left to be written to Redis."""
        if self._node.stopping.wait(backoff(failures)):
            if self._held is None or not self._held.in_flight.unacknowledged:
                self._let_go()
                return False
            time.sleep(backoff(1))
        return True

    def _let_go(self) -> None:
        shard, self._held = self._held, None
        if shard is not None and not self.is_written_off:
            shard.in_flight.drop_delivery()
            self._dispatcher.look_again(shard)
            self._dispatcher.unclaim(shard)
            self._node.broker.maintenance.check(shard)

    def _turn(self) -> bool:
        """One round trip to Redis and the work it brought. False: nothing more is to be taken."""
        held = self._held
        if held is None:
            shard = self._dispatcher.wait(self._number)
            if shard is None:
                return False
        else:
            shard = self._dispatcher.pick(self._number)
        delivery = self._exchange(shard)
        if shard is not None and delivery is not None:
            try:
                self._work(shard, delivery)
            finally:
                # Whatever went wrong: what did not finish is in flight, and no longer in hand. The next take, or
                # the next owner, gets it. If this thread was written off, it is its successor's.
                if not self.is_written_off:
                    shard.in_flight.keep_finished()
        return True

    def _inherit(self, old: "WorkerThread") -> bool:
        """Reports what the thread that it replaces had in hand, and has the lease got anew: so what that thread's
        handler still does has a lower fence than what anybody does with these jobs from now on. False: the node stops.

        Until the lease was surrendered the shard stays claimed, and nothing of it is taken. Should Redis be away, this
        waits for it as any outcome does.
        """
        shard, limits = old._held, old.activity.limits
        assert shard is not None
        assert limits is not None
        self._held = shard
        try:
            give_up(self._node, self._dispatcher, self._runtimes[shard.queue], shard, limits)
        finally:
            self._held = None
        self._node.on_thread_written_off(old)
        if not self._node.draining:
            # The handler that hangs may still use the instance; and one with a setup belongs to its thread.
            try:
                for queue, runtime in list(self._runtimes.items()):
                    if queue == shard.queue or has_life(runtime.instance):
                        self._runtimes[queue] = self._node.new_runtime(queue)
                        self._instances.set_up([self._runtimes[queue].instance])
            except Exception as error:  # as at the start of a node
                log.exception("a thread can't replace another one: what it needs of a worker failed")
                self._node.fail(error)
                return False
        return True

    def _exchange(self, shard: Shard | None) -> Delivery | None:
        """Acknowledges what the shard in hand finished and takes from ``shard``, which is claimed, in one write.

        Should the process die after Redis has executed it, the acknowledgement stands and the jobs taken are
        restored. Should only the reply be lost, the next take brings them again.
        """
        held = self._held
        leaving = held if held is not shard else None
        calls: list[tuple[Shard, int, Call[Any]]] = []
        try:
            if leaving is not None and leaving.in_flight.unacknowledged:
                calls.append((leaving, leaving.dispatch.wakes, leaving.in_flight.take_call(0)))
            if shard is not None:
                calls.append((shard, shard.dispatch.wakes, shard.in_flight.take_call(self._pace.limit(shard))))
            deliveries, trouble = self._send(calls)
        except BaseException:
            if shard is not None and shard is not held:
                self._dispatcher.unclaim(shard)
            raise

        # The primary of one shard may be away while those of others are not: its shard is nobody's meanwhile.
        goes_on = trouble is not None and self._client.is_cluster
        if leaving is not None and (goes_on or not leaving.in_flight.unacknowledged):
            self._dispatcher.unclaim(leaving)
            self._held = None
        if shard is not None and shard is held:
            if shard not in deliveries and (goes_on or trouble is None):  # lost, or in trouble of its own
                self._dispatcher.unclaim(shard)
                self._held = None
        elif shard is not None:
            if shard in deliveries and self._held is None:
                self._held = shard
            else:
                # Its take failed, or what the other finished could not be acknowledged, and that comes first.
                if shard in deliveries:
                    shard.in_flight.drop_delivery()
                    self._dispatcher.look_again(shard)
                self._dispatcher.unclaim(shard)
        if trouble is not None:
            if not goes_on:
                raise trouble
            self._node.broker.outage.begin(trouble)
        return deliveries[shard] if shard is not None and self._held is shard else None

    def _send(self, calls: list[tuple[Shard, int, Call[Any]]]) -> tuple[dict[Shard, Delivery], RedisUnavailable | None]:
        """The deliveries of those calls that succeeded, and the error when there was no answer. What concerns one shard
        alone is dealt with here: it rests for a while, the thread goes on with others.
        """
        deliveries: dict[Shard, Delivery] = {}
        trouble: RedisUnavailable | None = None
        if calls:
            begun = self._node.broker.outage.begun
            replies = self._client.run_many([call for _, _, call in calls])
            for (shard, wakes, _), reply in zip(calls, replies, strict=True):
                try:
                    deliveries[shard] = shard.in_flight.took(reply)
                    self._dispatcher.took(shard, wakes, deliveries[shard])
                except LeaseLost:
                    self._node.broker.maintenance.check(shard)
                    log_lost(shard)
                except RedisUnavailable as error:
                    trouble = trouble or error
                    if self._client.is_cluster:
                        self._dispatcher.rest_for_failover(shard)
                except Exception as error:
                    shard.in_flight.drop_delivery()
                    self._dispatcher.rest(shard, TROUBLE_SECONDS)
                    log.error("%r rests for %g s: %s", shard, TROUBLE_SECONDS, error, extra={"event": "trouble"})
            if deliveries:
                self._node.broker.outage.end(begun)
        return deliveries, trouble

    def _work(self, shard: Shard, delivery: Delivery) -> None:
        """Performs a delivery batch by batch, in order."""
        jobs = decodable_jobs(shard, delivery, self._config)
        if not jobs:
            if delivery.undecodable:
                self._dispatcher.look_again(shard)
            return
        runtime = self._runtimes[shard.queue]
        size = runtime.batch_size
        began, logs_jobs, batches = self._clock(), job_log.is_on(), 0
        count_waits(self.activity.tallies[shard.queue], jobs, began, self._node.broker.maintenance.server_clock.offset)
        for start in range(0, len(jobs), size):
            if start and (shard.dispatch.leaving or self._node.stopping.is_set()):
                shard.in_flight.release([(job.id, None) for job in jobs[start:]])
                break
            now = self._clock()
            while is_held(shard, delivery, now) and (expired := delivery.take_out_expired(jobs, start, now)):
                shard.in_flight.release([(job_id, None) for job_id in expired])
                self._dispatcher.look_again(shard)
                now = self._clock()
            if start >= len(jobs):
                break
            if not is_held(shard, delivery, now):
                self._dispatcher.look_again(shard)
                break  # not surely ours any more
            # What a handler sets of context variables is not there for the next batch.
            copy_context().run(self._perform, shard, delivery, runtime, jobs[start : start + size], now, logs_jobs)
            batches += 1
        self._pace.note(shard.queue, self._clock() - began, batches)

    def _perform(
        self,
        shard: Shard,
        delivery: Delivery,
        runtime: execution.WorkerRuntime,
        jobs: list[TakenJob],
        now: float,
        logs_jobs: bool,
    ) -> None:
        if shard.in_flight.unacknowledged:
            self._node.broker.maintenance.arm()
        limits = None
        if logs_jobs:
            execution.log_begin(runtime, shard, jobs, delivery.number)
        performing = self.activity.performing = Performing(shard, [job.id for job in jobs], now)
        if runtime.time_limit is not None or runtime.ttr is not None:
            limits = self.activity.limits = TimeLimits(
                runtime.time_limit, runtime.ttr, jobs,
                interrupt=interrupt_of_this_thread(), on_earlier=self._node.limit_moved,
            )  # fmt: skip
        elif runtime.is_per_id:
            limits = self.activity.limits = TimeLimits(None, None, jobs)  # which knows what is done: `ack_done`
        try:
            outcome = execution.perform(runtime, shard, delivery.lease.fence, jobs, self._config, limits)
        finally:
            ended = self._clock()
            self.activity.performed = performing, ended
            self.activity.performing = None
            if limits is not None and not limits.written_off:
                self.activity.limits = None
        count_batch(self.activity.tallies[shard.queue], outcome, performing, ended)
        if outcome.whole:
            shard.in_flight.finish(outcome.finished)
            if outcome.observed is not None:
                execution.end_observed(outcome, jobs)
        else:
            try:
                conclude(runtime.instance, shard, outcome, self._config, self._report)
            finally:
                # Also when the lease was lost meanwhile: what was raised was raised.
                report_failure(self._node, shard, jobs, outcome, runtime)
        if logs_jobs:
            job_log.ends(shard, jobs, delivery.number, outcome, ended - now)

    def _report(self, shard: Shard, outcome: Outcome) -> None:
        """Writes an outcome, however long Redis is away: only the end of the process or of the lease ends that."""
        until_written(self._node, lambda: report(shard, outcome))
        self._dispatcher.look_again(shard)
