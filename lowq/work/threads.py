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

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lowq.application import Lowq
from lowq.clock import Clock
from lowq.clock import now as clock_now
from lowq.coroutines import at_once
from lowq.errors import LeaseLost, LowqError, RedisUnavailable
from lowq.logs import get_log
from lowq.observe.events import QueueEvents, end_observed
from lowq.shards.broker import Broker
from lowq.shards.delivery import Delivery, Report, TakenJob
from lowq.shards.dispatcher import Dispatcher
from lowq.shards.shard import Performing, Shard
from lowq.store import Call, Client
from lowq.store.shard import SentTake
from lowq.verdicts import log_lost, read_takes
from lowq.work.handler import Execution, WorkerRuntime
from lowq.work.lifecycle import has_life
from lowq.work.loop import BatchActivity, Loop
from lowq.work.outcome import Outcome, log_failure, reports_of, write_off
from lowq.work.time_limits import WrittenOff, interrupt_of_this_thread

log = get_log("lowq.node")


def backoff(failures: int) -> float:
    """Seconds to wait after so many failures in a row, with jitter."""
    return min(0.05 * 2.0 ** min(failures, 10), 2.0) * random.uniform(0.5, 1.0)


class NodeContext(Protocol):
    """The node, as its threads and its event loop see it."""

    app: Lowq
    client: Client
    broker: Broker
    #: Set when the node is to stop.
    stopping: threading.Event
    prefetch: bool
    #: It takes nothing more.
    draining: bool

    def limit_moved(self) -> None:
        """The deadline of a batch that is being performed is nearer than it was."""
        ...

    def new_runtime(self, queue: str, events: QueueEvents | None = None) -> WorkerRuntime:
        """Makes an instance of the queue's worker; it raises what that raises. ``events``: of the thread that is
        replaced.
        """
        ...

    def on_task_written_off(self, performing: Performing | None, stack: str, *, hanging: int, is_lost: bool) -> None:
        """Called when all that a task had in hand is reported, which was written off. ``hanging``: how many such tasks
        hang by now. ``is_lost``: too many, or its handler blocks the loop.
        """
        ...

    def on_thread_written_off(self, thread: "WorkerThread") -> None:
        """Called when all that the thread had in hand is reported."""
        ...

    def fail(self, error: BaseException, /) -> object:
        """Stops the node because of an error."""
        ...


class NodeLoop(Loop):
    """A loop of a node, which takes from the shards that its dispatcher hands out."""

    def __init__(
        self, node: NodeContext, dispatcher: Dispatcher, runtimes: dict[str, WorkerRuntime], clock: Clock
    ) -> None:
        super().__init__(node.app.config, runtimes, clock, prefetch=node.prefetch)
        self._node = node
        self._client = node.client
        self._dispatcher = dispatcher

    def is_leaving(self, shard: Shard) -> bool:
        return shard.dispatch.leaving or self._node.stopping.is_set()

    def may_go_on(self, shard: Shard, delivery: Delivery) -> bool:
        return delivery.is_held(shard.lease, self._clock()) and not self.is_leaving(shard)

    def next_id_began(self, shard: Shard) -> None:
        self._dispatcher.shares.next_id_began(shard)

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

    def until_written(self, write: Callable[[], Any]) -> Any:
        """Repeats it, in a thread, while Redis is away: only the end of the process or of the lease ends that. Returns
        what it does.

        Raises:
            LeaseLost
        """
        failures = 0
        while True:
            try:
                return write()
            except RedisUnavailable as error:
                self._node.broker.outage.begin(error)
                failures += 1
                time.sleep(backoff(failures))

    def lost(self, shard: Shard) -> None:
        """The lease was lost with what was taken under it."""
        shard.in_flight.drop_delivery()
        self._dispatcher.look_again(shard)
        self._node.broker.maintenance.check(shard)
        log_lost(shard)

    def give_up(self, shard: Shard, batch: Execution) -> None:
        """Reports what was in hand of a batch that was written off, and has the lease surrendered and got anew. Until
        then the shard is suspended, and nothing of it is taken.
        """
        in_flight, token = shard.in_flight, shard.in_flight.token
        jobs: Sequence[Any] = batch._jobs
        outcome = Outcome(observed=batch._observed)
        outcome.is_written = False
        try:
            outcome = write_off(self._runtimes[shard.queue].instance, shard, batch, self._config)
            in_flight.finish(outcome.finished)
            outcome.note_written(self.until_written(lambda: in_flight.write(reports_of(shard, outcome))))
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


class WorkerThread(NodeLoop):
    """Works one shard after another. Everything but `activity` belongs to the thread itself. ``predecessor``: the
    thread that was written off and that it replaces; all that one had is its own then.
    """

    def __init__(
        self,
        node: NodeContext,
        number: int,
        activity: BatchActivity,
        dispatcher: Dispatcher,
        runtimes: dict[str, WorkerRuntime],
        *,
        predecessor: "WorkerThread | None" = None,
        name: str = "",
        clock: Clock = clock_now,
    ) -> None:
        super().__init__(node, dispatcher, runtimes, clock)
        self._thread = threading.Thread(target=self._run, name=f"lowq-{name or number}", daemon=True)
        self.activity = activity
        self._number = number
        self._predecessor = predecessor
        self._held: Shard | None = None
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
        batch = self.activity.batch
        return batch is not None and batch._limits is not None and batch._limits.written_off

    def ack_done(self) -> None:
        """Acknowledges what is done of a batch that is to be cut short. For another thread: it changes nothing here,
        and what it cites may be acknowledged again.
        """
        performing, batch = self.activity.performing, self.activity.batch
        if performing is None or batch is None:
            return
        # The delivery first: see `InFlight.early_ack_call`.
        in_flight = performing.shard.in_flight
        delivery, ids = in_flight.delivery, batch._done_ids()
        if ids and self.activity.performing is performing:
            try:
                self._client.run_many([in_flight.ack_report(ids, delivery).call])
            except LowqError as error:
                log.warning("%r: what is done of it can't be acknowledged: %s", performing, error)

    def successor(self, activity: BatchActivity) -> "WorkerThread":
        """The thread that is to replace this one, which is written off."""
        return WorkerThread(
            self._node, self._number, activity, self._dispatcher, dict(self._runtimes), predecessor=self,
            clock=self._clock,
        )  # fmt: skip

    def _run(self) -> None:
        try:
            if self._predecessor is None:  # else `_inherit` makes new ones
                at_once(self.set_up_instances([runtime.instance for runtime in self._runtimes.values()]))
        except BaseException as error:
            self.setup_error = error
        self.is_set_up.set()
        try:
            if self.setup_error is None:
                self.activity.interrupt, self.activity.ident = interrupt_of_this_thread(), threading.get_ident()
                self._take_turns()
        finally:
            at_once(self.tear_down_instances())

    def _take_turns(self) -> None:
        failures = 0
        while not (failures and self.is_written_off):
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
        shard = (self._dispatcher.wait if self._held is None else self._dispatcher.pick)(self._number)
        if shard is None and self._held is None:
            return False
        delivery = self._exchange(shard)
        if shard is not None and delivery is not None:
            # What did not finish is in flight then, and no longer in hand: the next take, or the next owner, gets it.
            # If this thread was written off, its successor does.
            try:
                at_once(self.perform(shard, delivery, self.activity))
            except BaseException:
                if not self.is_written_off:
                    shard.in_flight.in_hand.clear()
                raise
            shard.in_flight.in_hand.clear()
        return True

    def _inherit(self, old: "WorkerThread") -> bool:
        """Reports what the thread that it replaces had in hand, and has the lease got anew: so what that thread's
        handler still does has a lower fence than what anybody does with these jobs from now on. False: the node stops.

        Until the lease was surrendered the shard stays claimed, and nothing of it is taken. Should Redis be away, this
        waits for it as any outcome does.
        """
        shard, batch = old._held, old.activity.batch
        assert shard is not None
        assert batch is not None
        self._held = shard
        try:
            self.give_up(shard, batch)
        finally:
            self._held = None
        self._node.on_thread_written_off(old)
        if not self._node.draining:
            # The handler that hangs may still use the instance; and one with a setup belongs to its thread.
            try:
                for queue, runtime in list(self._runtimes.items()):
                    if queue == shard.queue or has_life(runtime.instance):
                        self._runtimes[queue] = self._node.new_runtime(queue, runtime.events)
                        at_once(self.set_up_instances([self._runtimes[queue].instance]))
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
        deliveries: dict[Shard, Delivery] = {}
        takes: list[tuple[Shard, int]] = []
        calls: list[Call[Any]] = []
        try:
            if leaving is not None and leaving.in_flight.unacknowledged:
                takes.append((leaving, leaving.dispatch.wakes))
                calls.append(leaving.in_flight.take_call(0))
            begun = self._node.broker.outage.begun
            replies = [] if shard is None else self._reply_to_sent(shard, takes)
            if shard is not None and not replies:
                takes.append((shard, shard.dispatch.wakes))
                calls.append(shard.in_flight.take_call(self.limit(shard)))
            if calls:
                replies = self._client.run_many(calls)
            trouble = read_takes(
                self._client, self._dispatcher, takes, replies, deliveries.__setitem__, self.lost, drops_failed=True
            )
            if deliveries and self._node.broker.outage.is_on:
                self._node.broker.outage.end(begun)
        except BaseException:
            if shard is not None and shard is not held:
                self._dispatcher.unclaim(shard)
            raise

        # The primary of one shard may be away while those of others are not: its shard is nobody's meanwhile.
        goes_on = isinstance(trouble, RedisUnavailable) and self._client.has_several_primaries
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
        if goes_on and isinstance(trouble, RedisUnavailable):
            self._node.broker.outage.begin(trouble)
        elif trouble is not None:
            raise trouble
        return deliveries[shard] if shard is not None and self._held is shard else None

    def send_take(self, shard: Shard, sent: SentTake) -> None:
        """Sends the take of a shard that is claimed for a thread which is being woken. By the listener."""
        found = None
        try:
            wakes, call = shard.dispatch.wakes, shard.in_flight.take_call(self.limit(shard))
            found = wakes, call, self._client.start([call])
        finally:
            sent.put(found)

    def _reply_to_sent(self, shard: Shard, takes: list[tuple[Shard, int]]) -> list[Any]:
        """The reply to the take that the listener has sent, which is added; empty: it has sent none."""
        sent, shard.in_flight.sent = shard.in_flight.sent, None
        if sent is None or (found := sent.get()) is None:
            return []
        wakes, call, receive = found
        takes.append((shard, wakes))
        replies = receive()
        return self._client.run_many([call]) if isinstance(replies[0], RedisUnavailable) else replies

    # --- as a driver of the loop ---

    async def write(self, shard: Shard, reports: Sequence[Report]) -> list[str]:
        cancelled: list[str] = self.until_written(lambda: shard.in_flight.write(reports))
        return cancelled
