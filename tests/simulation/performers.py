"""Who performs in a story: nodes with threads or an event loop, and consumers, each in a process of its own."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import lowq
from lowq.consumer import AsyncConsumerJob, Consumer, ConsumerJob
from lowq.node.node import Node
from lowq.shards.shard import Shard
from tests.simulation.world import Process

if TYPE_CHECKING:
    from tests.simulation.story import Story

QUEUE = "Orders"
#: The queue of a schedule, its shard as the history names it, and the id of its jobs.
TICKS, TICKS_SHARD, TICK = "Ticks", 90_000, "tick"
#: The limit around calls of handlers.
CALLS = "erp"
#: What is tried again later.
AWAY = (lowq.RedisUnavailable, lowq.RedisRefused)

Payloads = Mapping[str, Sequence[Mapping[str, Any]]]


def number_of(shard: Shard | None) -> int:
    """A shard as the history names it: no two of a queue have one number, also when it was resharded."""
    assert shard is not None
    return shard.index + 100_000 * shard.epoch


def versions_of(payloads_by_id: Payloads) -> dict[str, list[int]]:
    return {job_id: [payload["version"] for payload in payloads] for job_id, payloads in payloads_by_id.items()}


class Performer:
    """A process that performs, and after its end the one that takes its place. ``kind``: one of `KINDS`."""

    KINDS = ("threads", "loop", "consumer", "async consumer")

    def __init__(self, story: "Story", name: str, kind: str) -> None:
        self.story = story
        self.name = name
        self.kind = kind
        self.process: Process = story.new_process(name)
        self._is_told_to_stop = False
        self._restart_in = 0.1

    def start(self) -> None:
        """A fresh process."""
        self.process = self.story.new_process(self.name)
        self._is_told_to_stop = False
        run = {"consumer": self._consume, "async consumer": lambda: asyncio.run(self._aconsume())}
        self.story.world.spawn(self.process, run.get(self.kind, self._run_node), "main")

    # --- what is done to it ---

    def _after_steps(self, steps: int, do: Callable[[], object]) -> None:
        left = [max(steps, 1)]

        def at_step() -> bool:
            left[0] -= 1
            if left[0] == 0:  # once: of a process that froze all threads come to their next step
                do()
            return left[0] <= 0

        self.process.at_step = at_step

    def kill_after(self, steps: int, restart_in: float) -> None:
        """SIGKILL, between any two of its steps."""
        process, story = self.process, self.story

        def die() -> None:
            story.note(f"{process} dies")
            story.history.gone(process.pid, -9)
            story.trouble_until(restart_in)
            story.world.after(restart_in, self.start)
            process.die()

        if process.is_alive and not self._is_told_to_stop:
            self._after_steps(steps, die)

    def freeze_after(self, steps: int, seconds: float) -> None:
        """SIGSTOP, between any two of its steps, and SIGCONT."""
        process, story = self.process, self.story

        def freeze() -> None:
            story.note(f"{process} freezes for {seconds:.3f} s")
            story.history.frozen(process.pid)
            story.world.after(seconds, lambda: story.history.thawed(process.pid))
            story.trouble_until(seconds)
            process.freeze(seconds)

        if process.is_alive:
            self._after_steps(steps, freeze)

    def stop(self, restart_in: float) -> None:
        """SIGTERM."""
        if self.process.is_alive and not self._is_told_to_stop:
            self._is_told_to_stop = True
            self._restart_in = restart_in

    def _end(self) -> None:
        """The process ends in good order."""
        self.story.history.gone(self.process.pid, 0)
        self.story.world.after(self._restart_in, self.start)
        self.process.die()

    # --- a node ---

    def _run_node(self) -> None:
        app = self.story.new_app()
        self._register(app)
        while True:
            node = Node(app, threads=2)
            try:
                node.start()
                break
            except AWAY:  # whoever supervises it starts it again
                time.sleep(0.2)
        # That a node drains it tells nobody but its own `run`, which ends the process.
        while not (self._is_told_to_stop or node.stopping.is_set() or node._performers.draining):
            time.sleep(0.05)
        if node.stopping.is_set():
            self.story.outcome.problems.append(f"{self.process}: the node stops by itself")
        node.stop()  # also when handlers that hang have it ask for another process
        app.close()
        self._end()

    def _register(self, app: lowq.Lowq) -> None:
        story, plan = self.story, self.story.plan
        queue = app.queue(QUEUE, plan.shards)

        def performing(payloads_by_id: Payloads) -> AbstractContextManager[str]:
            batch = lowq.current()
            versions, limit = versions_of(payloads_by_id), batch.deadline
            return story.history.performing(number_of(batch._source), batch.fence, versions, limit=limit)

        def calling() -> AbstractContextManager[None]:
            return story.history.calling(CALLS, until=lowq.current().deadline)

        class Orders(lowq.Worker[Any]):
            def perform(self, payloads_by_id: Payloads) -> None:
                with performing(payloads_by_id):
                    for job_id, payloads in payloads_by_id.items():
                        for payload in payloads:
                            if story.is_call(payload):
                                with story.limit_of(app), calling():
                                    time.sleep(story.seconds_of(job_id, payload))
                            else:
                                time.sleep(story.seconds_of(job_id, payload))
                            story.may_raise(job_id, payload, lowq.current())
                            if "push" in payload:
                                pending = story.pushing_on(job_id, payload)
                                with story.pushing(pending):
                                    queue.push(pending, durability=story.durability)

            def retry_in(self, retry_count: int) -> float:
                return 0.1

        class AsyncOrders(Orders):
            async def perform(self, payloads_by_id: Payloads) -> None:  # type: ignore[override]  # either is a worker
                with performing(payloads_by_id):
                    for job_id, payloads in payloads_by_id.items():
                        for payload in payloads:
                            if story.is_call(payload):
                                async with story.limit_of(app):
                                    with calling():
                                        await asyncio.sleep(story.seconds_of(job_id, payload))
                            else:
                                await asyncio.sleep(story.seconds_of(job_id, payload))
                            if "cancel" in payload and story.seconds_of(job_id, {**payload, "for": 1.0}):
                                raise asyncio.CancelledError
                            story.may_raise(job_id, payload, lowq.current())
                            if "push" in payload:
                                pending = story.pushing_on(job_id, payload)
                                with story.pushing(pending):
                                    await queue.apush(pending, durability=story.durability)

        if plan.has_ticks:

            @lowq.every(1, name=TICK, missed="all")
            @app.worker(queue_name=TICKS, shards_count=1)
            def tick(_job_id: str, payloads: list[Any]) -> None:
                batch, times = lowq.current(), [payload["planned_at"] for payload in payloads]
                for planned_at in times:
                    story.tick(planned_at)
                with story.history.performing(TICKS_SHARD, batch.fence, {TICK: [int(each) for each in times]}):
                    pass

        app.worker(
            queue_name=QUEUE,
            shards_count=plan.shards,
            batch_size=1 if plan.cancels_running else plan.batch_size,
            on_push="cancel_running" if plan.cancels_running else None,
            max_retry_count=3,
            ttr=plan.ttr,
            time_limit=plan.time_limit,
            max_payloads=plan.max_payloads,
            limit=None if plan.concurrency is None else lowq.Concurrency(plan.concurrency),
        )(AsyncOrders if self.kind == "loop" else Orders)

    # --- a consumer ---

    def _consume(self) -> None:
        app = self.story.new_app()
        queue = app.queue(QUEUE, self.story.plan.shards)
        consumer: Consumer | None = None
        while consumer is None:
            try:
                consumer = queue.consumer(ttr=self.story.plan.ttr)
            except AWAY:
                time.sleep(0.2)
        while not self._is_told_to_stop:
            try:
                jobs = consumer.take(2, timeout=0.2)
            except AWAY:
                time.sleep(0.05)
                continue
            for job in jobs:
                self._perform(consumer, job, is_first=job is jobs[0])
        try:
            consumer.close()
        except AWAY:
            pass
        app.close()
        self._end()

    def _perform(self, consumer: Consumer, job: ConsumerJob, *, is_first: bool) -> None:
        begun = begin(consumer, job, is_first=is_first)
        if begun is None:
            self._report(job.release)
            return
        shard, until = begun
        try:
            with self.story.history.performing(
                shard, job.fence, versions_of({job.id: job.payloads}), by_hand=True, until=until
            ) as perform:
                for payload in job.payloads:
                    time.sleep(self.story.seconds_of(job.id, payload))
                    self.story.may_raise(job.id, payload)
        except RuntimeError as error:
            failure = error
            self._report(lambda: job.fail(failure, 0.1))
            return
        if self._report(job.ack):
            self.story.history.acked(shard, [job.id], perform)

    def _report(self, report: Callable[[], object]) -> bool:
        """Reports until Redis has it. Returns whether it counts."""
        while True:
            try:
                report()
                return True
            except (lowq.NotTaken, lowq.ConsumerClosed):
                return False
            except AWAY:
                time.sleep(0.05)

    async def _aconsume(self) -> None:
        app = self.story.new_app()
        consumer = app.queue(QUEUE, self.story.plan.shards).aconsumer(ttr=self.story.plan.ttr)
        while True:
            try:
                await consumer.start()
                break
            except AWAY:
                await asyncio.sleep(0.2)
        async with consumer:
            while not self._is_told_to_stop:
                try:
                    jobs = await consumer.take(2, timeout=0.2)
                except AWAY:
                    await asyncio.sleep(0.05)
                    continue
                for job in jobs:
                    begun = begin(consumer._consumer, job, is_first=job is jobs[0])
                    if begun is None:
                        await self._areport(job.release)
                        continue
                    shard, until = begun
                    try:
                        with self.story.history.performing(
                            shard, job.fence, versions_of({job.id: job.payloads}), by_hand=True, until=until
                        ) as perform:
                            for payload in job.payloads:
                                await asyncio.sleep(self.story.seconds_of(job.id, payload))
                            if job.is_cancelled:
                                raise lowq.JobCancelled
                    except lowq.JobCancelled:
                        await self._areport(job.release)
                        continue
                    if await self._areport(job.ack):
                        self.story.history.acked(shard, [job.id], perform)
        app.close()
        self._end()

    async def _areport(self, report: Callable[[], Awaitable[object]]) -> bool:
        while True:
            try:
                await report()
                return True
            except (lowq.NotTaken, lowq.ConsumerClosed):
                return False
            except AWAY:
                await asyncio.sleep(0.05)


def begin(
    consumer: Consumer, job: ConsumerJob | AsyncConsumerJob, *, is_first: bool
) -> tuple[int, float | None] | None:
    """The job's shard, and when its ttr passes; None: its lease is not surely held any more. The first job of a list
    was handed out just now: not to hand out what is not its own is the consumer's part.
    """
    held = consumer._hand.held.get(job.receipt)  # nobody who performs is told of which layout a shard is
    if held is None or not (is_first or held.delivery.is_held(held.shard.lease, time.monotonic())):
        return None
    return number_of(held.shard), held.deadline if held.deadline < float("inf") else None
