"""What handlers, hooks and Redis may do to the event loop: it harms the batch that it is about, and no other."""

import asyncio
import json
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

import lowq
from lowq.errors import RedisUnavailable, ScriptError
from lowq.sharding import shard_of
from lowq.shards.dispatcher import Dispatcher
from lowq.shards.scheduler import LagScheduler
from lowq.store import Client
from tests.processes.node.conftest import Start, is_idle
from tests.processes.node.test_event_loop import error_of
from tests.waiting import NEVER, PATIENCE, auntil, until

Batch = dict[str, list[Any]]


def answered(monkeypatch: pytest.MonkeyPatch, script: str, *errors: Exception) -> None:
    """The next calls of a script are answered with these errors."""
    run_many, left = Client.run_many, [*errors]

    def answer_all(self: Client, calls: Sequence[Any], *args: Any, **options: Any) -> list[Any]:
        replies = []
        for call in calls:
            fails = call.script == script and left
            replies.append(left.pop(0) if fails else run_many(self, [call], *args, **options)[0])
        return replies

    monkeypatch.setattr(Client, "run_many", answer_all)


# --- Redis, codecs, schedulers ---


def test_a_payload_that_can_not_be_buried_stops_no_other_shard(
    app: lowq.Lowq, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered(monkeypatch, "bury", RedisUnavailable("away"), ScriptError("bury", "no"))

    def load(data: bytes) -> Any:
        value = json.loads(data)
        if value == "bad":
            raise ValueError
        return value

    app.config.load_payload = load
    done: list[str] = []

    @app.worker(shards_count=10)
    async def orders(payloads_by_id: Batch) -> None:
        done.extend(payloads_by_id)

    orders.perform_async({"id": n, "payload": "bad" if n == 7 else n} for n in range(40))
    start()
    until(lambda: is_idle(orders), "the end of all jobs")
    assert sorted(done) == sorted(str(n) for n in range(40) if n != 7)
    assert orders.queue.stats().morgue_length == 1


def test_a_report_that_is_refused_is_no_reason_to_perform_again_at_once(
    app: lowq.Lowq, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered(monkeypatch, "fail", ScriptError("fail", "no"))
    rests: list[float] = []
    rest = Dispatcher.rest

    def noted(dispatcher: Dispatcher, shard: Any, seconds: float) -> None:
        rests.append(seconds)
        rest(dispatcher, shard, seconds)

    monkeypatch.setattr(Dispatcher, "rest", noted)

    @app.worker(shards_count=1, max_retry_count=0)
    async def orders(payloads_by_id: Batch) -> None:
        raise ValueError

    orders.push(1)
    start()
    until(lambda: orders.queue.stats().morgue_length == 1, "the morgue")
    assert min(rests) >= 0.5


def test_a_scheduler_that_raises_costs_no_place_and_max_threads_holds(app: lowq.Lowq, start: Start) -> None:
    calls, running = [0], [0]
    most: list[int] = []

    class Raising(LagScheduler):
        def __call__(self, shards: Any, now: float, ready: Any) -> Any:
            calls[0] += 1
            if calls[0] in (2, 4, 6):
                raise ValueError("mine")
            return super().__call__(shards, now, ready)

    app.config.build_scheduler = Raising

    @app.worker(shards_count=8, max_threads=2)
    async def orders(payloads_by_id: Batch) -> None:
        running[0] += 1
        most.append(running[0])
        await asyncio.sleep(0.01)
        running[0] -= 1

    @app.worker
    async def others(payloads_by_id: Batch) -> None: ...

    orders.perform_async({"id": n} for n in range(60))
    start()
    until(lambda: is_idle(orders), "the end of all jobs")  # with a place less each time it would hang
    assert max(most) == 2


# --- handlers ---


@pytest.mark.parametrize("uvloop", [True, False])
def test_what_stops_the_process_in_a_task_of_a_handler_ends_the_node_in_order(
    app: lowq.Lowq, start: Start, monkeypatch: pytest.MonkeyPatch, uvloop: bool
) -> None:
    if not uvloop:
        monkeypatch.setitem(sys.modules, "uvloop", None)
    go = threading.Event()
    begun: set[str] = set()
    finished: list[str] = []
    ids = [str(number) for number in range(1, 8)]
    of_shards = {shard_of(job_id.encode(), 4) for job_id in ids}

    async def child() -> None:
        await asyncio.sleep(0)
        raise KeyboardInterrupt

    @app.worker(shards_count=4)
    async def orders(payloads_by_id: Batch) -> None:
        begun.update(payloads_by_id)
        if "1" in payloads_by_id:
            await auntil(lambda: {shard_of(job_id.encode(), 4) for job_id in begun} == of_shards, "a task of each")
            await asyncio.gather(child(), asyncio.sleep(0))
        await auntil(go.is_set, "the end of the node")
        finished.extend(payloads_by_id)

    orders.perform_async({"id": job_id} for job_id in ids)
    node = start(prefetch=False)
    until(node.stopping.is_set, "the end of the node")
    go.set()
    assert node.stop(PATIENCE)
    assert finished
    assert node.exit_code == 1
    job = orders.queue.peek(1)
    assert job is not None
    # Who awaits the task gets that, too.
    assert (job.crashes, job.retry_count) == (1, -1)


@pytest.mark.parametrize("uvloop", [True, False])
def test_an_exit_in_a_task_of_a_handler_fails_its_job_and_nothing_else(
    app: lowq.Lowq, start: Start, monkeypatch: pytest.MonkeyPatch, uvloop: bool
) -> None:
    if not uvloop:
        monkeypatch.setitem(sys.modules, "uvloop", None)

    async def child() -> None:
        await asyncio.sleep(0)
        raise SystemExit(2)

    async def by_group() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(child())

    async def by_gather() -> None:
        await asyncio.gather(child(), asyncio.sleep(0))

    async def left_behind() -> None:
        await asyncio.wait([asyncio.create_task(child())])

    ways = {"group": by_group, "gather": by_gather, "left": left_behind}

    @app.worker(shards_count=1, max_retry_count=0)
    async def orders(job_id: str, payloads: list[Any]) -> None:
        if job_id in ways:
            await ways[job_id]()

    orders.perform_async({"id": job_id} for job_id in (*ways, "last"))
    node = start()
    until(lambda: orders.queue.stats().morgue_length == 2 and is_idle(orders), "the end of all jobs")
    assert not node.stopping.is_set()
    assert orders.queue.peek("left") is orders.queue.peek("last") is None


def test_a_handler_that_cancels_its_own_task_is_charged_and_harms_no_other_batch(app: lowq.Lowq, start: Start) -> None:
    runs: list[str] = []

    @app.worker(shards_count=1, max_retry_count=0)
    async def orders(payloads_by_id: Batch) -> None:
        runs.extend(payloads_by_id)
        task = asyncio.current_task()
        assert task is not None
        if "returns" in payloads_by_id:
            task.cancel()  # it returns before that strikes
            return
        if "awaits" in payloads_by_id:
            task.cancel()
        await asyncio.sleep(0)

    start()
    for _ in range(3):  # quick jobs teach the node to take several batches in one delivery
        orders.perform_async({"id": f"quick {n}"} for n in range(100))
        until(lambda: is_idle(orders), "the end of all jobs")
    runs.clear()
    orders.perform_async({"id": job_id} for job_id in ("returns", "a", "awaits", "b"))
    until(lambda: is_idle(orders), "the end of all jobs")
    assert sorted(runs) == ["a", "awaits", "b", "returns"]
    assert [job.id for job in orders.queue.jobs(state="morgue")] == ["awaits"]


def test_a_handler_that_swallowed_its_own_cancel_still_has_a_time_limit(app: lowq.Lowq, start: Start) -> None:
    @app.worker(shards_count=1, max_retry_count=0, time_limit=0.1)
    async def orders(payloads_by_id: Batch) -> None:
        try:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            pass
        await asyncio.sleep(NEVER)

    orders.push(1)
    start()
    until(lambda: orders.queue.stats().morgue_length == 1, "the morgue")
    assert "TimeLimitExceeded" in error_of(orders, 1)


# --- ttr ---


def test_a_handler_that_computes_and_awaits_does_not_end_the_node(app: lowq.Lowq, start: Start) -> None:
    @app.worker(shards_count=1, ttr=0.3, max_crash_count=1)
    async def orders(payloads_by_id: Batch) -> None:
        while True:
            ends_at = time.perf_counter() + 0.005
            while time.perf_counter() < ends_at:
                pass
            await asyncio.sleep(0)

    orders.push(1)
    node = start()
    until(lambda: orders.queue.stats().morgue_length == 1, "the morgue")
    assert not node.stopping.is_set()


def test_handlers_that_hang_whatever_they_are_told_are_bounded(app: lowq.Lowq, start: Start) -> None:
    app.config.concurrency = 4
    go = threading.Event()
    begun: list[str] = []

    @app.worker(shards_count=8, ttr=0.1, max_crash_count=1)
    async def orders(payloads_by_id: Batch) -> None:
        begun.extend(payloads_by_id)
        while not go.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                pass

    orders.perform_async({"id": n} for n in range(60))
    node = start()
    until(lambda: "exceeded their ttr" in (node.trouble() or ""), "a task that was written off")
    until(node.stopping.is_set, "the end of the node")
    assert len(begun) <= 8 + 4  # hanging, and not yet
    assert node.exit_code == 75
    go.set()
