"""What is special about async workers in nodes. What they share with others the rest of this folder runs for both."""

import asyncio
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

import lowq
import lowq.testing
from lowq.node import event_loop
from lowq.node.node import Node
from lowq.sharding import shard_of
from lowq.store import Client
from lowq.workers import Worker
from tests.processes.node.conftest import Start
from tests.waiting import PATIENCE, auntil, until


def stats(app: lowq.Lowq, worker: type[Worker[Any]]) -> tuple[int, int]:
    """What waits, and what is in flight."""
    found = app.queue(worker.queue_name).stats()
    return found.length, found.taken


def test_so_many_shards_at_once_as_concurrency_says(app: lowq.Lowq, start: Start) -> None:
    app.config.concurrency = 3
    running: set[str] = set()
    most: list[int] = []
    go = threading.Event()

    @app.worker(shards_count=10)
    async def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        running.update(payloads_by_id)
        most.append(len(running))
        while not go.is_set():
            await asyncio.sleep(0.001)
        running.difference_update(payloads_by_id)

    app.queue("orders", 10).push({"id": n} for n in range(40))
    start()
    until(lambda: len(running) == 3, "three tasks")
    (node,) = app.nodes()
    until(lambda: len(app.nodes()[0].longest_tasks) == 3, "a heartbeat that says so")
    assert (app.nodes()[0].tasks, app.nodes()[0].concurrency) == (3, 3)
    assert node.performing == ()  # no threads
    go.set()
    until(lambda: stats(app, orders) == (0, 0), "the end of all jobs")
    assert max(most) == 3
    assert len(most) == 40


def test_round_trips_are_shared(app: lowq.Lowq, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    begin_many = Client.begin_many

    def counted(self: Client, some: Any, *args: Any, **options: Any) -> Any:
        if threading.current_thread().name == "lowq-loop-io":
            calls.append(len(some))
        return begin_many(self, some, *args, **options)

    monkeypatch.setattr(Client, "begin_many", counted)

    @app.worker(shards_count=50)
    async def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        await asyncio.sleep(0.05)

    orders.perform_async({"id": n} for n in range(500))
    start(prefetch=False)
    until(lambda: stats(app, orders) == (0, 0), "the end of all jobs")
    assert sum(calls) >= 500
    assert len(calls) < 400, "each call went alone"


def test_a_round_trip_is_sent_before_the_replies_to_the_one_before_are_read(
    app: lowq.Lowq, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way: list[set[str]] = []
    most: list[int] = []
    of_one_shard: list[set[str]] = []
    begin_many = Client.begin_many

    def noted(self: Client, some: Any, *args: Any, **options: Any) -> Any:
        if threading.current_thread().name != "lowq-loop-io":
            return begin_many(self, some, *args, **options)
        shards = {call.key for call in some}
        of_one_shard.extend(shards & others for others in under_way if shards & others)
        under_way.append(shards)
        most.append(len(under_way))
        wait = begin_many(self, some, *args, **options)

        def waited() -> Any:
            under_way.remove(shards)
            return wait()

        return waited

    monkeypatch.setattr(Client, "begin_many", noted)

    @app.worker(shards_count=50, max_retry_count=0)
    async def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        await asyncio.sleep(0.01)
        if int(min(payloads_by_id)) % 7 == 0:
            raise RuntimeError

    orders.perform_async({"id": n} for n in range(500))
    start(prefetch=False)
    until(lambda: stats(app, orders) == (0, 0), "the end of all jobs")
    assert max(most) == 2
    assert of_one_shard == []


def test_the_context_of_a_batch_goes_along_into_its_tasks(app: lowq.Lowq, start: Start) -> None:
    seen: list[tuple[int, str]] = []

    async def look() -> None:
        await asyncio.sleep(0.01)
        current = lowq.current()
        seen.append((current.shard, current.jobs[0].id))

    @app.worker(shards_count=5)
    async def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        await asyncio.gather(look(), asyncio.create_task(look()))

    orders.perform_async({"id": n} for n in range(20))
    start()
    until(lambda: len(seen) == 40, "all jobs")
    assert {job_id for _, job_id in seen} == {str(n) for n in range(20)}
    assert all(shard_of(job_id.encode(), 5) == shard for shard, job_id in seen)


def test_what_still_runs_is_cancelled_when_the_node_stops_and_comes_again(
    app: lowq.Lowq, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_loop, "CLEAN_UP_SECONDS", PATIENCE)
    cleaned: list[str] = []
    attempts: list[str] = []

    @app.worker(max_crash_count=1)
    async def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        attempts.append(",".join(payloads_by_id))
        if len(attempts) > 1:
            return
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            cleaned.append("yes")

    orders.perform_async({"id": 1})
    node = start()
    until(lambda: attempts, "the first attempt")
    assert not node.stop(0.0)
    assert cleaned == ["yes"]
    start()
    until(lambda: stats(app, orders) == (0, 0), "the second attempt")
    assert attempts == ["1", "1"]
    assert orders.queue.peek(1) is None


def test_something_awaited_that_is_cancelled_is_an_error_like_any_other(app: lowq.Lowq, start: Start) -> None:
    @app.worker(max_retry_count=0)
    async def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        inner = asyncio.create_task(asyncio.sleep(3600))
        await asyncio.sleep(0)
        inner.cancel()
        await inner

    orders.perform_async({"id": 1})
    start()
    until(lambda: orders.queue.stats().morgue_length == 1, "the morgue")
    job = orders.queue.peek(1)
    assert job is not None
    assert "what the handler awaited was cancelled" in (job.error or "")


def test_a_handler_that_blocks_the_loop_is_named(
    app: lowq.Lowq, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    go = threading.Event()

    @app.worker(shards_count=1)
    async def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        if "7" in payloads_by_id:
            go.wait(60)

    def is_in_the_handler(said: str) -> bool:
        return "has blocked the event loop" in said and "in orders" in said

    with caplog.at_level(logging.WARNING, "lowq.node"):
        orders.perform_async([{"id": 7}])
        start()
        # On a busy machine it may be named before it gets there.
        said = until(lambda: next(filter(is_in_the_handler, caplog.messages), None), "a warning that says where it is")
        go.set()
    assert said is not None
    assert said.startswith("orders:0 ids 7 for ")


def test_async_middlewares_are_around_the_batch(app: lowq.Lowq, start: Start) -> None:
    steps: list[str] = []

    async def outer(worker: Any, batch: Any, call_next: Callable[[], Any]) -> None:
        steps.append("outer begins")
        await call_next()
        steps.append("outer ends")

    class Inner:
        def __call__(self, worker: Any, batch: Any, call_next: Callable[[], Any]) -> None:
            raise AssertionError("this is the form for threads")

        async def acall(self, worker: Any, batch: Any, call_next: Callable[[], Any]) -> None:
            await asyncio.sleep(0)
            steps.append(",".join(batch))
            await call_next()

    app.config.server_middlewares = [outer, Inner()]

    @app.worker
    async def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        steps.append("performs")

    orders.perform_async({"id": 1})
    start()
    until(lambda: stats(app, orders) == (0, 0), "the end of the job")
    assert steps == ["outer begins", "1", "performs", "outer ends"]


def test_a_sync_middleware_around_an_async_worker_keeps_the_node_from_starting(app: lowq.Lowq) -> None:
    def plain(worker: Any, batch: Any, call_next: Callable[[], Any]) -> None:
        call_next()

    app.config.server_middlewares = [plain]

    @app.worker
    async def orders(payloads_by_id: dict[str, list[Any]]) -> None: ...

    with pytest.raises(lowq.ConfigError, match=r"middleware .*plain is a plain def, .* write async def"):
        Node(app).start()


@pytest.mark.parametrize("calls", [0, 2])
def test_an_async_middleware_that_does_not_call_on_once_fails_the_batch(
    app: lowq.Lowq, start: Start, calls: int
) -> None:
    async def wrong(worker: Any, batch: Any, call_next: Callable[[], Any]) -> None:
        for _ in range(calls):
            await call_next()

    app.config.server_middlewares = [wrong]

    @app.worker(max_retry_count=0)
    async def orders(payloads_by_id: dict[str, list[Any]]) -> None: ...

    orders.perform_async({"id": 1})
    start()
    until(lambda: orders.queue.stats().morgue_length == 1, "the morgue")
    job = orders.queue.peek(1)
    assert job is not None
    assert "call_next() twice" in (job.error or "") if calls else "without awaiting call_next()" in (job.error or "")


def test_without_uvloop_it_is_the_standard_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    loop = event_loop.new_event_loop()
    assert type(loop).__module__.startswith("asyncio")
    loop.close()


def test_an_awaiting_drain_leaves_the_loop_to_others(app: lowq.Lowq) -> None:
    ticks: list[int] = []

    @app.worker
    async def waits(payloads_by_id: dict[str, list[Any]]) -> None:
        before = len(ticks)
        await auntil(lambda: len(ticks) > before + 3, "ticks while it waits")

    @app.worker
    def computes(payloads_by_id: dict[str, list[Any]]) -> None:
        before = len(ticks)
        until(lambda: len(ticks) > before + 3, "ticks while it computes")

    async def tick() -> None:
        while True:
            ticks.append(1)
            await asyncio.sleep(0.001)

    async def main() -> lowq.testing.Drained:
        ticking = asyncio.create_task(tick())
        try:
            return await lowq.testing.adrain(waits, computes)
        finally:
            ticking.cancel()

    with lowq.testing.embedded(waits, computes):
        waits.perform_async({"id": 1})
        computes.perform_async({"id": 1})
        assert asyncio.run(main()).performed == 2


def test_a_drain_inside_a_running_loop_says_what_to_write(app: lowq.Lowq) -> None:
    @app.worker
    async def waits(payloads_by_id: dict[str, list[Any]]) -> None: ...

    async def main() -> None:
        lowq.testing.drain(waits)

    with lowq.testing.embedded(waits), pytest.raises(lowq.ConfigError, match=r"await lowq\.testing\.adrain"):
        asyncio.run(main())


# --- time limits ---


def test_a_time_limit_cancels_the_handler_and_is_a_failure(app: lowq.Lowq, start: Start) -> None:
    cleaned: list[str] = []

    @app.worker(shards_count=1, time_limit=0.1, max_retry_count=0)
    async def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        if "slow" not in payloads_by_id:
            return
        try:
            await asyncio.sleep(3600)
        finally:
            cleaned.append("yes")

    orders.perform_async([{"id": "slow"}, {"id": "quick"}])
    start()
    until(lambda: orders.queue.stats().morgue_length == 1 and not orders.queue.stats().length, "the morgue")
    job = orders.queue.peek("slow")
    assert job is not None
    assert "TimeLimitExceeded: the batch has run for longer than its time_limit of" in (job.error or "")
    assert cleaned == ["yes"]


def test_a_time_limit_that_is_swallowed_cancels_nothing_else(app: lowq.Lowq, start: Start) -> None:
    @app.worker(shards_count=1, batch_size=2, time_limit=0.05)
    async def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            lowq.current().fail("1", "too long")  # so a report is awaited, too
        await asyncio.sleep(0.01)

    orders.perform_async([{"id": 1}, {"id": 2}])
    start()
    until(lambda: stats(app, orders) == (1, 0), "the outcome")
    job = orders.queue.peek(1)
    assert job is not None
    assert (job.state, job.retry_count, "too long" in (job.error or "")) == ("retrying", 0, True)
    assert orders.queue.peek(2) is None


def test_batches_about_as_long_as_their_limit_end_or_fail_and_nothing_else(app: lowq.Lowq, start: Start) -> None:
    ended: list[str] = []

    @app.worker(shards_count=20, time_limit=0.02, max_retry_count=0)
    async def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        for job_id in payloads_by_id:
            await asyncio.sleep(0.016 + int(job_id) % 9 / 1000)
            ended.append(job_id)

    orders.perform_async({"id": n} for n in range(300))
    start()
    until(lambda: stats(app, orders) == (0, 0), "the end of all jobs")
    assert len(set(ended)) + orders.queue.stats().morgue_length == 300
    assert len(ended) == len(set(ended))


def test_a_task_that_exceeds_its_ttr_is_written_off(
    app: lowq.Lowq, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    fences: list[int] = []
    late = threading.Event()
    others: list[str] = []

    @app.worker(shards_count=1, ttr=0.1, max_crash_count=5)
    async def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        if "hangs" not in payloads_by_id:
            others.extend(payloads_by_id)
            return
        fences.append(lowq.current().fence)
        while len(fences) == 1:  # whatever it is told
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                pass
        late.set()

    orders.perform_async([{"id": "hangs"}, {"id": "other"}])
    start()
    until(lambda: len(fences) == 2, "the second attempt")
    until(lambda: stats(app, orders) == (0, 0), "the end of all jobs")
    assert late.wait(60)
    assert fences[1] > fences[0]
    assert others == ["other"]
    assert "orders:0 ids hangs for" in caplog.text
    assert "exceeded its ttr: its task is written off" in caplog.text


def test_a_job_whose_handler_hangs_each_time_is_buried(app: lowq.Lowq, start: Start) -> None:
    @app.worker(shards_count=1, ttr=0.05, max_crash_count=2)
    async def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        await asyncio.sleep(3600)

    orders.perform_async({"id": 1})
    start()
    until(lambda: orders.queue.stats().morgue_length == 1, "the morgue")
    assert orders.queue.stats().taken == 0


def test_a_handler_that_blocks_the_loop_beyond_its_ttr_ends_the_node_for_another(app: lowq.Lowq, start: Start) -> None:
    go = threading.Event()

    @app.worker(shards_count=1, ttr=0.1)
    async def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        go.wait(60)

    orders.perform_async({"id": 1})
    node = start()
    until(node.stopping.is_set, "the end of the node")
    go.set()
    assert node.exit_code == 75


def test_the_deadline_is_what_is_left_and_can_be_moved(app: lowq.Lowq, start: Start) -> None:
    deadlines: list[float] = []

    @app.worker(shards_count=1, time_limit=0.1)
    async def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        current = lowq.current()
        for _ in range(5):
            assert current.deadline is not None
            deadlines.append(current.deadline)
            current.touch(60)
            await asyncio.sleep(0.05)

    orders.perform_async({"id": 1})
    start()
    until(lambda: stats(app, orders) == (0, 0), "the end of the job")
    assert len(deadlines) == 5
    assert deadlines == sorted(deadlines)


# --- fairness ---


def test_max_threads_holds_for_tasks(app: lowq.Lowq, start: Start) -> None:
    running: list[int] = [0]
    most: list[int] = []

    @app.worker(shards_count=10, max_threads=2)
    async def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        running[0] += 1
        most.append(running[0])
        await asyncio.sleep(0.005)
        running[0] -= 1

    orders.perform_async({"id": n} for n in range(60))
    start()
    until(lambda: stats(app, orders) == (0, 0), "the end of all jobs")
    assert max(most) == 2
