"""The event loop of a node: performs the shards of async workers, many at once.

::

    thread lowq-loop       one asyncio loop; a task for each delivery: batch by batch, as a worker thread does it
    thread lowq-loop-io    the round trips to Redis, for all of them
    thread lowq-loop-watch looks whether a handler blocks the loop (`blocked_loop`)

While a round trip is under way, what the tasks have finished and the shards that have become due gather; the next one
takes all of it along in one write: acknowledgements, takes and reports. No task waits for the reply to another's call.

A shard is claimed from its take until it is acknowledged and not taken again at once, as by a thread. While its task
runs, what is in flight belongs to the task; before and after that to the thread of the round trips.
"""

import asyncio
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any, NamedTuple

from lowq.clock import Clock
from lowq.clock import now as clock_now
from lowq.coroutines import run_first
from lowq.errors import LeaseLost, RedisUnavailable
from lowq.logs import get_log
from lowq.shards.delivery import Delivery, Report
from lowq.shards.dispatcher import Dispatcher
from lowq.shards.shard import Performing, Shard
from lowq.store import Call
from lowq.work.blocked_loop import BlockedLoopWatch, stack_of
from lowq.work.handler import Instances, WorkerRuntime
from lowq.work.loop import TROUBLE_SECONDS, BatchActivity, NodeContext, NodeLoop, backoff
from lowq.work.time_limits import Interrupt, WrittenOff, interrupt_of_this_task

log = get_log("lowq.node")

#: Seconds without a sign of life after which a loop counts as blocked for good. The machine may be busy.
STUCK_SECONDS = 5.0
#: What the names of the threads begin with that handlers use by `asyncio.to_thread`.
_EXECUTOR = "lowq-loop-thread"
#: Seconds that cancelled tasks have for their clean-up.
CLEAN_UP_SECONDS = 1.0


class _Write(NamedTuple):
    """Reports of a task that are to be written, and its future: it gets their replies."""

    reports: Sequence[Report]
    future: "asyncio.Future[list[Any]]"


class EventLoop(NodeLoop):
    """Performs the async workers of a node. ``concurrency``: shards at once."""

    def __init__(
        self,
        node: NodeContext,
        dispatcher: Dispatcher,
        runtimes: dict[str, WorkerRuntime],
        concurrency: int,
        *,
        clock: Clock = clock_now,
    ) -> None:
        super().__init__(node, dispatcher, runtimes, clock)
        self.is_cancelled = lambda: self._cancelled
        self._concurrency = concurrency
        self._loop = new_event_loop()
        # Of our own, so that it is known which threads run what handlers have left there.
        self._executor = ThreadPoolExecutor(thread_name_prefix=_EXECUTOR)
        self._loop.set_default_executor(self._executor)
        self._thread = threading.Thread(target=self._run, name="lowq-loop", daemon=True)
        self._io = threading.Thread(target=self._run_io, name="lowq-loop-io", daemon=True)
        #: What each shard's task shows to others. A shard is in it from the start of its task until that has ended.
        self._running: dict[Shard, BatchActivity] = {}
        self._tasks: dict[Shard, asyncio.Task[None]] = {}
        #: Shards whose task has ended, and reports: from the tasks to the thread of the round trips.
        self._ended: deque[Shard] = deque()
        self._writes: deque[_Write] = deque()
        #: Claimed, neither running nor in a round trip, and perhaps with something unacknowledged. Of the thread of the
        #: round trips.
        self._resting: set[Shard] = set()
        #: Tasks that were written off and have not ended since, and those that are to be.
        self._hanging: list[asyncio.Task[None]] = []
        self._overdue: deque[BatchActivity] = deque()
        #: The tasks were cancelled, as the node's time to stop is over.
        self._cancelled: bool = False
        self._instances = Instances()
        #: Set when its instances are set up, or could not be: then `setup_error` says why.
        self.is_set_up = threading.Event()
        self.setup_error: BaseException | None = None
        self._watch = BlockedLoopWatch(self._loop, self._thread, lambda: bool(self._tasks), self._performing, clock)

    def _performing(self, task: "asyncio.Task[Any]") -> Performing | None:
        """What a task performs."""
        running = list(self._running.items())
        return next((activity.performing for shard, activity in running if self._tasks.get(shard) is task), None)

    # --- from other threads ---

    def start(self) -> None:
        """Starts its threads."""
        self._thread.start()
        self._io.start()
        self._watch.start()

    def is_alive(self) -> bool:
        """Whether anything is being performed, still to be written or to be torn down, or may be."""
        return self._io.is_alive() or (bool(self._instances) and self._thread.is_alive() and not self.hanging())

    def activities(self) -> list[BatchActivity]:
        """Those of the running tasks."""
        return list(self._running.values())

    def stacks(self) -> list[tuple[Performing | None, list[str]]]:
        """What each task performs, and where it is: lines of its stack, outermost first."""
        found = []
        for shard, task in list(self._tasks.items()):
            activity = self._running.get(shard)
            found.append((None if activity is None else activity.performing, stack_of(task)))
        return found

    def hanging(self) -> list["asyncio.Task[None]"]:
        """The tasks that were written off and whose handlers have not ended since."""
        return [task for task in self._hanging if not task.done()]

    def wait_for_end(self, seconds: float) -> bool:
        """Waits so many seconds for what handlers have left running: the loop, and the threads of its executor. False:
        some of it still runs.
        """
        deadline = time.monotonic() + seconds
        for thread in threading.enumerate():
            if thread is self._thread or thread.name.startswith(_EXECUTOR):
                thread.join(max(deadline - time.monotonic(), 0.0))
                if thread.is_alive():
                    return False
        return True

    def write_off(self, activity: BatchActivity) -> None:
        """The handler of the task has exceeded its ttr: from here on nothing belongs to it. By the watchdog."""
        self._overdue.append(activity)
        self._dispatcher.nudge()

    def cancel(self) -> None:
        """Cancels what runs, and waits a moment for its clean-up. Nothing of it is reported: its next owner performs
        it again.
        """
        deadline = time.monotonic() + CLEAN_UP_SECONDS
        self._loop.call_soon_threadsafe(self._cancel_all)
        # And for the last round trip, as what is done of their batches is acknowledged.
        while (self._tasks or self._io.is_alive()) and time.monotonic() < deadline:
            time.sleep(0.01)

    def _cancel_all(self) -> None:
        self._cancelled = True
        for task in list(self._tasks.values()):
            task.cancel()

    # --- the round trips ---

    def _run_io(self) -> None:
        self.is_set_up.wait()
        failures = 0
        while True:
            try:
                if not self._turn():
                    break
                failures = 0
            except RedisUnavailable as error:
                self._node.broker.outage.begin(error)
                failures += 1
                time.sleep(backoff(failures))
            except Exception:
                log.exception("a round trip failed outside of a worker; it is tried again")
                failures += 1
                time.sleep(backoff(failures))
            except BaseException as error:
                # SystemExit or the like from what a user has given us besides `perform`.
                self._dispatcher.close()
                self._node.fail(error)
                failures += 1
                time.sleep(backoff(failures))
        self._watch.close()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _turn(self) -> bool:
        """One round trip, if anything is to be sent. False: nothing more is to be taken, nor left to be written."""
        while self._ended:
            shard = self._ended.popleft()
            del self._running[shard]
            self._resting.add(shard)
        if self._overdue:
            self._give_up(self._overdue.popleft())
            return True
        free = self._concurrency - len(self._running)
        picked = self._dispatcher.pick_many(free, self._resting)
        if not (picked or self._resting or self._writes):
            if self._dispatcher.closed and not self._running:
                return False
            picked = self._dispatcher.wait_many(free)
        self._exchange(picked)
        return True

    def _give_up(self, activity: BatchActivity) -> None:
        """Reports what a task had in hand that was written off, and has the lease got anew: so what its handler still
        does has a lower fence than what anybody does with these jobs from now on.
        """
        batch, performing = activity.batch, activity.performing
        shard = next(shard for shard, running in self._running.items() if running is activity)
        assert batch is not None
        task = self._tasks.pop(shard)
        stack = "".join(stack_of(task))
        answered = threading.Event()
        self._loop.call_soon_threadsafe(answered.set)
        blocked = asyncio.current_task(self._loop) is task and not answered.wait(STUCK_SECONDS)
        if blocked:
            frame = sys._current_frames().get(self._thread.ident or 0)
            stack = "".join(traceback.format_stack(frame))
        self._hanging = [*self.hanging(), task]
        self._loop.call_soon_threadsafe(task.cancel)
        try:
            self.give_up(shard, batch)
        finally:
            del self._running[shard]
            hanging = len(self.hanging())
            is_lost = blocked or 2 * hanging >= self._concurrency
            self._node.on_task_written_off(performing, stack, hanging=hanging, is_lost=is_lost)

    def _exchange(self, picked: list[Shard]) -> None:
        """Acknowledges what the resting shards finished, takes from those that were picked, and writes reports, all in
        one write; then has tasks begin and go on. What holds if the process dies, or a reply is lost, is as in a worker
        thread.

        Raises:
            RedisUnavailable: what it is about is in the next round trip.
        """
        self._resting -= set(picked)
        for shard in [shard for shard in self._resting if not shard.in_flight.unacknowledged]:
            self._let_go(shard)
        # What rests is acknowledged, and nothing more is taken of it.
        limits = dict.fromkeys(self._resting, 0) | {shard: self.limit(shard) for shard in picked}
        takes = [(shard, shard.dispatch.wakes) for shard in limits]
        self._resting.update(picked)
        calls: list[Call[Any]] = [shard.in_flight.take_call(limit) for shard, limit in limits.items()]
        writes = [self._writes.popleft() for _ in range(len(self._writes))]
        calls += [report.call for write in writes for report in write.reports]
        if not calls:
            return
        begun = self._node.broker.outage.begun
        try:
            replies = iter(self._client.run_many(calls))
        except BaseException:
            self._writes.extendleft(reversed(writes))
            raise
        self._resting.clear()
        deliveries, trouble = self.read_takes(takes, replies, begun)
        answers = [(write.future, [next(replies) for _ in write.reports]) for write in writes]
        goes_on = isinstance(trouble, RedisUnavailable) and self._client.has_several_primaries
        for shard, _ in takes:
            if shard not in deliveries:
                if trouble is None or goes_on:
                    self._let_go(shard)
                else:
                    self._resting.add(shard)  # what it finished is still to be acknowledged
            elif deliveries[shard].jobs:
                self._running[shard] = BatchActivity(None)
            else:
                shard.in_flight.in_hand.clear()
                self._let_go(shard)
        begin = [(shard, delivery) for shard, delivery in deliveries.items() if delivery.jobs]
        if begin or answers:
            self._loop.call_soon_threadsafe(self._received, begin, answers)
        if isinstance(trouble, RedisUnavailable) and goes_on:
            self._node.broker.outage.begin(trouble)  # work on shards of other primaries goes on
        elif trouble is not None:
            raise trouble

    def _let_go(self, shard: Shard) -> None:
        self._resting.discard(shard)
        self._dispatcher.unclaim(shard)

    # --- the loop ---

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            instances = [runtime.instance for runtime in self._runtimes.values()]
            run_first(self._loop.run_until_complete, self._instances.set_up(instances))
        except BaseException as error:
            self.setup_error = error
        self.is_set_up.set()
        while True:
            try:
                self._loop.run_forever()
                break
            except SystemExit as error:
                # A task that a handler started has raised it: who awaits the task gets that, too, and it fails the job.
                log.error("a task that a handler has started raised %r", error, exc_info=error)
            except BaseException as error:
                self._node.fail(error)
        self._reap()
        if self._instances:
            self._loop.run_until_complete(self._instances.tear_down())
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._loop.close()
        asyncio.set_event_loop(None)

    def _reap(self) -> None:
        """Cancels the tasks that are left: those that were written off, and what handlers have started."""
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            try:
                self._loop.run_until_complete(asyncio.wait(left, timeout=CLEAN_UP_SECONDS / 2))
            except BaseException as error:  # raised by one of them
                log.warning("a task that was cancelled ended with %r", error)

    def _received(
        self,
        begin: list[tuple[Shard, Delivery]],
        answers: list[tuple["asyncio.Future[list[Any]]", list[Any]]],
    ) -> None:
        """What a round trip has brought: tasks to begin, and replies that tasks wait for."""
        for future, replies in answers:
            if not future.done():  # cancelled meanwhile
                future.set_result(replies)
        for shard, delivery in begin:
            self._tasks[shard] = self._loop.create_task(self._work(shard, delivery), name=f"lowq {shard!r}")
        if begin:
            self._watch.nudge()

    async def _work(self, shard: Shard, delivery: Delivery) -> None:
        activity = self._running[shard]
        try:
            await self.perform(shard, delivery, activity)
        except WrittenOff:
            return  # the shard and what was in hand are somebody else's
        except LeaseLost:
            self.lost(shard)
        except asyncio.CancelledError:
            log.warning("%r was cancelled; its next owner performs it again", shard, extra={"event": "cancelled"})
        except BaseException as error:
            if activity.limits is not None and activity.limits.written_off:
                return
            log.exception("a task failed outside of a worker")
            self._dispatcher.rest(shard, TROUBLE_SECONDS)
            if not issubclass(type(error), Exception):
                self._node.fail(error)
        # What did not finish is in flight, and no longer in hand. The next take, or the next owner, gets it.
        shard.in_flight.in_hand.clear()
        self._tasks.pop(shard, None)
        self._ended.append(shard)
        self._dispatcher.nudge()

    # --- as a driver of the loop ---

    def interrupt(self, activity: BatchActivity) -> Interrupt:
        return interrupt_of_this_task(lambda: activity.limits)

    async def write(self, shard: Shard, reports: Sequence[Report]) -> None:
        """Has reports written, however long Redis is away: only the end of the process or of the lease ends that.

        Raises:
            LeaseLost
        """
        failures = 0
        while reports:
            future: asyncio.Future[list[Any]] = self._loop.create_future()
            self._writes.append(_Write(reports, future))
            self._dispatcher.nudge()
            try:
                shard.in_flight.note_written(reports, await future)
                return
            except RedisUnavailable as error:
                self._node.broker.outage.begin(error)
                failures += 1
                await asyncio.sleep(backoff(failures))


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's, when that is installed."""
    try:
        uvloop = import_module("uvloop")
    except ImportError:
        return asyncio.new_event_loop()
    made: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return made
