"""What is special about async workers in nodes. What they share with others the rest of this folder runs for both."""

import asyncio
import logging
import sys
import threading
from typing import Any

import pytest

import lowq
from lowq.store import Client
from lowq.work import event_loop, lifecycle
from tests.processes.node.conftest import Start, ids_of_shards, is_idle
from tests.waiting import NEVER, PATIENCE, until


def error_of(worker: type[lowq.Worker[Any]], job_id: int) -> str:
    job = worker.queue.peek(job_id)
    assert job is not None
    return job.error or ""


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

    orders.perform_async({"id": n} for n in range(40))
    start()
    until(lambda: len(running) == 3, "three tasks")
    until(lambda: len(app.nodes()[0].longest_tasks) == 3, "a heartbeat that says so")
    (node,) = app.nodes()
    assert (node.tasks, node.concurrency, node.performing) == (3, 3, ())  # no threads
    go.set()
    until(lambda: is_idle(orders), "the end of all jobs")
    assert (max(most), len(most)) == (3, 40)


def test_round_trips_are_shared(app: lowq.Lowq, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is under way, here for as long as anything is performed, what ends gathers for the next."""
    calls: list[int] = []
    running: set[str] = set()
    run_many = Client.run_many

    def noted(self: Client, some: Any, *args: Any, **options: Any) -> Any:
        if threading.current_thread().name == "lowq-loop-io":
            calls.append(len(some))
            until(lambda: not running, "the end of all that runs")
        return run_many(self, some, *args, **options)

    monkeypatch.setattr(Client, "run_many", noted)

    @app.worker(shards_count=50, max_retry_count=0)
    async def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        running.update(payloads_by_id)
        await asyncio.sleep(0.01)
        running.difference_update(payloads_by_id)
        if int(min(payloads_by_id)) % 7 == 0:
            raise RuntimeError

    orders.perform_async({"id": n} for n in range(500))
    start(prefetch=False)
    until(lambda: is_idle(orders), "the end of all jobs")
    assert sum(calls) >= 500
    assert len(calls) < 400, "each call went alone"


def test_what_has_ended_at_once_goes_in_several_round_trips(
    app: lowq.Lowq, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So Redis and the tasks need not take turns."""
    app.config.concurrency = 200
    acknowledged: list[int] = []
    running: set[str] = set()
    go = threading.Event()
    run_many = Client.run_many

    def noted(self: Client, some: Any, *args: Any, **options: Any) -> Any:
        if threading.current_thread().name == "lowq-loop-io" and go.is_set():
            until(lambda: not running, "the end of all that runs")
            acknowledged.append(sum(len(call.args) > 7 for call in some))
        return run_many(self, some, *args, **options)

    monkeypatch.setattr(Client, "run_many", noted)

    @app.worker(shards_count=200)
    async def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        running.update(payloads_by_id)
        while not go.is_set():
            await asyncio.sleep(0.001)
        running.difference_update(payloads_by_id)

    orders.perform_async({"id": job_id} for job_id in ids_of_shards(200))
    start()
    until(lambda: len(running) == 200, "a task for each shard")
    go.set()
    until(lambda: is_idle(orders), "the end of all jobs")
    assert sum(acknowledged) >= 200
    assert max(acknowledged) <= event_loop.MAX_ENDED


def test_a_task_that_is_cut_short_cleans_up_has_acknowledged_what_is_done_and_comes_again_uncharged(
    app: lowq.Lowq, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_loop, "CLEAN_UP_SECONDS", PATIENCE)
    performed: list[str] = []
    cleaned: list[str] = []

    @app.worker(shards_count=1, batch_size=10, max_crash_count=1)
    async def orders(job_id: str, payloads: list[Any]) -> None:
        performed.append(job_id)
        if performed == ["a", "b", "c"]:
            try:
                await asyncio.sleep(NEVER)
            finally:
                await asyncio.sleep(0)
                cleaned.append(job_id)

    orders.perform_async({"id": job_id} for job_id in "abcd")
    node = start()
    until(lambda: len(performed) == 3, "the third id")
    assert not node.stop(0.0)
    assert cleaned == ["c"]
    start()
    until(lambda: is_idle(orders), "the other ids")
    assert performed == ["a", "b", "c", "c", "d"]
    assert orders.queue.stats().morgue_length == 0


def test_a_handler_that_blocks_the_loop_is_named(
    app: lowq.Lowq, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    go = threading.Event()

    @app.worker(shards_count=1)
    async def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        go.wait(PATIENCE)

    def is_in_the_handler(said: str) -> bool:
        return "has blocked the event loop" in said and "in orders" in said

    with caplog.at_level(logging.WARNING, "lowq.node"):
        orders.push(7)
        start()
        # On a busy machine it may be named before it gets there.
        said = until(lambda: next(filter(is_in_the_handler, caplog.messages), None), "a warning that says where it is")
        go.set()
    assert said is not None
    assert said.startswith("orders:0 ids 7 for ")


def test_without_uvloop_it_is_the_standard_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    loop = lifecycle.new_event_loop()
    assert type(loop).__module__.startswith("asyncio")
    loop.close()


# --- time limits ---


def test_a_time_limit_that_is_swallowed_cancels_nothing_else(app: lowq.Lowq, start: Start) -> None:
    @app.worker(shards_count=1, batch_size=2, time_limit=0.05)
    async def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        try:
            await asyncio.sleep(NEVER)
        except asyncio.CancelledError:
            lowq.current().fail("1", "too long")  # so a report is awaited, too
        await asyncio.sleep(0.01)

    orders.perform_async([{"id": 1}, {"id": 2}])
    start()
    until(lambda: orders.queue.stats().retries == 1 and not orders.queue.stats().taken, "the outcome")
    assert "too long" in error_of(orders, 1)
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
    until(lambda: is_idle(orders), "the end of all jobs")
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
    until(lambda: len(fences) > 1 and is_idle(orders), "the end of the second attempt and of the other job")
    assert late.wait(PATIENCE)
    assert fences == sorted(set(fences))
    assert set(others) == {"other"}  # on a machine that stands still either may exceed it once more
    assert "orders:0 ids hangs for" in caplog.text
    assert "exceeded its ttr: its task is written off" in caplog.text


def test_a_handler_that_blocks_the_loop_beyond_its_ttr_ends_the_node_for_another(app: lowq.Lowq, start: Start) -> None:
    go = threading.Event()

    @app.worker(shards_count=1, ttr=0.1)
    async def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        go.wait(PATIENCE)

    orders.push(1)
    node = start()
    until(node.stopping.is_set, "the end of the node")
    go.set()
    assert node.exit_code == 75
