"""The event loop of a node: performs the shards of async workers, many at once.

::

    thread lowq-loop       one asyncio loop; a task for each delivery: batch by batch, as a worker thread does it
    thread lowq-loop-io    the round trips to Redis, for all of them
    thread lowq-loop-watch names in the log the handler that blocks the loop

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
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

from lowq.clock import Clock
from lowq.clock import now as clock_now
from lowq.coroutines import run_first, stack_of
from lowq.errors import LeaseLost, RedisUnavailable
from lowq.logs import get_log
from lowq.shards.delivery import Delivery, Report
from lowq.shards.dispatcher import Dispatcher
from lowq.shards.shard import Performing, Shard
from lowq.store import Call
from lowq.verdicts import TROUBLE_SECONDS, read_takes
from lowq.work.handler import WorkerRuntime
from lowq.work.lifecycle import LoopState, new_event_loop, raise_gc_threshold
from lowq.work.loop import BatchActivity
from lowq.work.threads import NodeContext, NodeLoop, backoff
from lowq.work.time_limits import WrittenOff, interrupt_task

log = get_log("lowq.node")

#: Seconds without a sign of life after which a loop counts as blocked for good. The machine may be busy.
STUCK_SECONDS = 5.0
#: Prefix of the names of the threads that handlers use by `asyncio.to_thread`.
_EXECUTOR = "lowq-loop-thread"
#: Shards whose tasks have ended, of one round trip at most. With hundreds of them Redis and the tasks take turns, and
#: each waits for the other.
MAX_ENDED = 64
#: Seconds that cancelled tasks have for their clean-up.
CLEAN_UP_SECONDS = 1.0
#: Seconds for which a handler may go on without awaiting anything before it is named in the log.
BLOCKED_SECONDS = 0.1


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
        self.state = LoopState.of(node.app)
        self._concurrency = concurrency
        self._loop = new_event_loop()
        # Of our own, so that it is known which threads run what handlers have left there.
        self._executor = ThreadPoolExecutor(thread_name_prefix=_EXECUTOR)
        self._loop.set_default_executor(self._executor)
        self._thread = threading.Thread(target=self._run, name="lowq-loop", daemon=True)
        self._io = threading.Thread(target=self._run_io, name="lowq-loop-io", daemon=True)
        #: The activity of each shard's task, from the start of the task until it has ended.
        self._running: dict[Shard, BatchActivity] = {}
        self._tasks: dict[Shard, asyncio.Task[None]] = {}
        #: From the tasks to the thread of the round trips: shards whose task has ended; and reports to be written, each
        #: with the future that gets their replies.
        self._ended: deque[Shard] = deque()
        self._writes: deque[tuple[Sequence[Report], asyncio.Future[list[Any]]]] = deque()
        #: Claimed, neither running nor in a round trip, and perhaps with something unacknowledged. Of the thread of the
        #: round trips.
        self._resting: set[Shard] = set()
        #: Tasks that were written off and have not ended since, and those that are to be.
        self._hanging: list[asyncio.Task[None]] = []
        self._overdue: deque[BatchActivity] = deque()
        #: The last round trip is over, and the loop is to end.
        self._is_closing = False
        #: The tasks were cancelled, as the node's time to stop is over.
        self._cancelled: bool = False
        #: Set when its instances are set up, or could not be: then `setup_error` says why.
        self.is_set_up = threading.Event()
        self.setup_error: BaseException | None = None
        #: Set while tasks run: then the loop is watched.
        self._busy = threading.Event()

    # --- from other threads ---

    def start(self) -> None:
        """Starts its threads."""
        self._thread.start()
        self._io.start()
        threading.Thread(target=self._watch, name="lowq-loop-watch", daemon=True).start()

    def is_alive(self) -> bool:
        """Whether anything is being performed, still to be written or to be torn down, or may be."""
        return self._io.is_alive() or (self._is_set_up and self._thread.is_alive() and not self.hanging())

    @property
    def _is_set_up(self) -> bool:
        """Whether anything is to be torn down."""
        return bool(self._set_up) or (self.state is not None and self.state.is_started)

    def activities(self) -> list[BatchActivity]:
        """The activities of the running tasks."""
        return list(self._running.values())

    def stacks(self) -> list[tuple[Performing | None, list[str]]]:
        """The batch of each task, and the lines of its stack, outermost first; of one that blocks it, the loop's."""
        found, current = [], asyncio.current_task(self._loop)
        for shard, task in list(self._tasks.items()):
            lines = traceback.format_stack(self._frame()) if task is current else stack_of(task)
            found.append((getattr(self._running.get(shard), "performing", None), lines))
        return found

    def hanging(self) -> list["asyncio.Task[None]"]:
        """The tasks that were written off and whose handlers have not ended since."""
        return [task for task in self._hanging if not task.done()]

    def wait_for_end(self, seconds: float) -> bool:
        """Waits so many seconds for the loop, and for the threads that handlers have left running. False: some still
        run.
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
        with suppress(RuntimeError):  # it has ended meanwhile
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
        self._is_closing = True
        self._busy.set()  # for the watch to end
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _turn(self) -> bool:
        """One round trip, if anything is to be sent. False: nothing more is to be taken, nor left to be written."""
        while self._ended and len(self._resting) < MAX_ENDED:
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
            stack = "".join(traceback.format_stack(self._frame()))
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
        calls += [report.call for reports, _ in writes for report in reports]
        if not calls:
            return
        begun = self._node.broker.outage.begun
        try:
            replies = iter(self._client.run_many(calls))
        except BaseException:
            self._writes.extendleft(reversed(writes))
            raise
        self._resting.clear()
        deliveries: dict[Shard, Delivery] = {}
        trouble = read_takes(
            self._client, self._dispatcher, takes, replies, deliveries.__setitem__, self.lost, drops_failed=True
        )
        if deliveries and self._node.broker.outage.is_on:
            self._node.broker.outage.end(begun)
        answers = [(future, [next(replies) for _ in reports]) for reports, future in writes]
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
        raise_gc_threshold(self._concurrency)
        try:
            instances = [runtime.instance for runtime in self._runtimes.values()]
            run_first(self._loop.run_until_complete, self.set_up_instances(instances))
        except BaseException as error:
            self.setup_error = error
        lasting = asyncio.all_tasks(self._loop)
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
        self._reap(but=lasting)  # what the teardown closes may need them, to send what it has gathered
        if self._is_set_up:
            self._loop.run_until_complete(self._tear_down())
        self._reap()
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._loop.close()
        asyncio.set_event_loop(None)

    async def _tear_down(self) -> None:
        await self.tear_down_instances()
        if self.state is not None:
            await self.state.stop()

    def _reap(self, but: Collection["asyncio.Task[Any]"] = ()) -> None:
        """Cancels the tasks that are left: those that were written off, and what handlers, or the setup, have started.
        ``but``: others.
        """
        left = asyncio.all_tasks(self._loop).difference(but)
        for task in left:
            task.cancel()
        if left:
            try:
                self._loop.run_until_complete(asyncio.wait(left, timeout=CLEAN_UP_SECONDS / 2))
            except BaseException as error:  # raised by one of them
                log.warning("a task that was cancelled ended with %r", error)

    def _received(
        self, begin: list[tuple[Shard, Delivery]], answers: list[tuple["asyncio.Future[list[Any]]", list[Any]]]
    ) -> None:
        """Begins tasks for the deliveries of a round trip, and answers those that wait for replies."""
        for future, replies in answers:
            if not future.done():  # cancelled meanwhile
                future.set_result(replies)
        for shard, delivery in begin:
            self._tasks[shard] = self._loop.create_task(self._work(shard, delivery), name=f"lowq {shard.name}")
        if begin and not self._busy.is_set():
            self._busy.set()

    async def _work(self, shard: Shard, delivery: Delivery) -> None:
        activity, task = self._running[shard], self._tasks[shard]
        activity.interrupt = partial(interrupt_task, task, lambda: activity.limits)
        activity.ident = threading.get_ident()
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
        activity.interrupt = None  # it refers to the activity and the task: all of them would wait for the collector
        self._tasks.pop(shard, None)
        self._ended.append(shard)
        self._dispatcher.nudge()

    # --- a handler that blocks the loop ---

    def _watch(self) -> None:
        """While tasks run, asks the loop for a sign of life, and names the handler that has not awaited anything for
        long.
        """
        while self._busy.wait() and not self._is_closing:
            if not self._tasks:
                self._busy.clear()
                if self._tasks or self._is_closing:  # since it was looked at
                    self._busy.set()
                continue
            answered, asked_at, warn_after = threading.Event(), self._clock(), BLOCKED_SECONDS
            with suppress(RuntimeError):  # the loop has been closed since
                self._loop.call_soon_threadsafe(answered.set)
            time.sleep(BLOCKED_SECONDS / 4)
            while not (answered.is_set() or self._is_closing):
                seconds = self._clock() - asked_at
                if seconds >= warn_after and self._name_blocker(seconds, answered):
                    warn_after *= 2
                time.sleep(BLOCKED_SECONDS / 4)

    def _name_blocker(self, seconds: float, answered: threading.Event) -> bool:
        """False: it is the machine, or it is over."""
        task, frame = asyncio.current_task(self._loop), self._frame()
        if task is None or frame is None or answered.is_set():
            return False
        running = list(self._running.items())
        performing = next((activity.performing for shard, activity in running if self._tasks.get(shard) is task), None)
        log.warning(
            "%s has blocked the event loop for %.1f s, and with it all other tasks: await what waits, and run what "
            "computes in asyncio.to_thread\n%s",
            performing or f"task {task.get_name()!r}", seconds,
            "".join(traceback.format_stack(frame)), extra={"event": "loop_blocked", "seconds": seconds},
        )  # fmt: skip
        return True

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._thread.ident or 0)

    # --- as a driver of the loop ---

    async def write(self, shard: Shard, reports: Sequence[Report]) -> list[str]:
        """Has reports written, however long Redis is away: only the end of the process or of the lease ends that.

        Raises:
            LeaseLost
        """
        failures = 0
        while reports:
            future: asyncio.Future[list[Any]] = self._loop.create_future()
            self._writes.append((reports, future))
            self._dispatcher.nudge()
            try:
                return shard.in_flight.note_written(reports, await future)
            except RedisUnavailable as error:
                self._node.broker.outage.begin(error)
                failures += 1
                await asyncio.sleep(backoff(failures))
        return []
