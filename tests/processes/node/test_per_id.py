"""``perform_one`` in nodes: what ends a batch in the middle."""

import asyncio
import gc
import logging
import threading
import time
import weakref
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest

import lowq
from lowq.node import event_loop
from lowq.workers import Worker
from tests.processes.node.conftest import Start, is_idle
from tests.waiting import NEVER, PATIENCE, until

IDS = ("a", "b", "c", "d")


def push(worker: type[Worker[Any]]) -> None:
    worker.perform_async({"id": job_id} for job_id in IDS)


def charged(worker: type[Worker[Any]]) -> dict[str, tuple[int, int]]:
    """Id -> retry count and crashes, of those that are not finished."""
    jobs = worker.queue.fetch(IDS).values()
    return {job.id: (job.retry_count, job.crashes) for job in jobs}


def test_a_thread_that_is_cut_short_has_acknowledged_what_is_done(app: lowq.Lowq, start: Start) -> None:
    begun, go = threading.Event(), threading.Event()
    performed: list[str] = []

    @app.worker(shards_count=1, batch_size=10, max_crash_count=1)
    def orders(job_id: str, payloads: list[Any]) -> None:
        performed.append(job_id)
        if job_id == "c" and not begun.is_set():
            begun.set()
            go.wait()

    push(orders)
    node = start(threads=1)
    until(begun.is_set, "the third id")
    assert not node.stop(0.0)
    try:
        assert [job_id for job_id in IDS if orders.queue.peek(job_id) is None] == ["a", "b"]
        start(threads=1)
        until(lambda: is_idle(orders), "the other ids")
        assert performed == ["a", "b", "c", "c", "d"]
        assert orders.queue.stats().morgue_length == 0
    finally:
        go.set()


def test_a_task_that_is_cut_short_has_acknowledged_what_is_done(
    app: lowq.Lowq, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_loop, "CLEAN_UP_SECONDS", PATIENCE)
    performed: list[str] = []

    @app.worker(shards_count=1, batch_size=10, max_crash_count=1)
    async def orders(job_id: str, payloads: list[Any]) -> None:
        performed.append(job_id)
        if performed == ["a", "b", "c"]:
            await asyncio.sleep(3600)

    push(orders)
    node = start()
    until(lambda: len(performed) == 3, "the third id")
    assert not node.stop(0.0)
    start()
    until(lambda: is_idle(orders), "the other ids")
    assert performed == ["a", "b", "c", "c", "d"]
    assert orders.queue.stats().morgue_length == 0


def test_a_node_that_stops_finishes_the_id_and_gives_the_others_back(app: lowq.Lowq, start: Start) -> None:
    begun, go = threading.Event(), threading.Event()

    @app.worker(shards_count=1, batch_size=10)
    def orders(job_id: str, payloads: list[Any]) -> None:
        if job_id == "b":
            begun.set()
            go.wait()

    push(orders)
    node = start(threads=1)
    until(begun.is_set, "the second id")
    node.request_stop()
    node.quiet()  # as whoever sees the request does: until then its thread may take those that it has given back
    go.set()
    assert node.stop(60.0)
    assert charged(orders) == {"c": (-1, 0), "d": (-1, 0)}
    assert orders.queue.stats().taken == 0


def test_an_id_that_exceeds_its_ttr_is_charged_alone(app: lowq.Lowq, start: Start) -> None:
    go = threading.Event()
    performed: list[str] = []
    hangs: list[threading.Thread] = []

    @app.worker(shards_count=1, batch_size=10, ttr=0.3)
    def orders(job_id: str, payloads: list[Any]) -> None:
        performed.append(job_id)
        if performed == ["a", "b"]:
            hangs.append(threading.current_thread())
            go.wait(PATIENCE)
        else:
            lowq.current().touch(NEVER)  # however long the machine stands still

    push(orders)
    start(threads=5)
    until(lambda: is_idle(orders), "the other tries")
    assert sorted(performed) == ["a", "b", "b", "c", "d"]
    go.set()
    hangs[0].join(PATIENCE)
    assert not hangs[0].is_alive()
    assert sorted(performed) == ["a", "b", "b", "c", "d"]  # it began no other id


@pytest.mark.parametrize("is_async", [False, True], ids=["thread", "loop"])
def test_a_time_limit_charges_the_id_that_exceeded_it(app: lowq.Lowq, start: Start, is_async: bool) -> None:
    performed: list[str] = []

    def begin(job_id: str) -> None:
        performed.append(job_id)
        if job_id != "b":
            lowq.current().touch(NEVER)  # however long the machine stands still

    async def awaits(job_id: str, payloads: list[Any]) -> None:
        begin(job_id)
        if job_id == "b":
            await asyncio.sleep(NEVER)

    def loops(job_id: str, payloads: list[Any]) -> None:
        begin(job_id)
        while job_id == "b":
            pass

    handler: Any = awaits if is_async else loops
    worker = app.worker(shards_count=1, batch_size=10, time_limit=0.3, max_retry_count=0)(handler)
    push(worker)
    start()
    until(partial(is_idle, worker), "the end of all")
    assert performed == [*IDS]
    (job,) = worker.queue.jobs(state="morgue")
    assert job.id == "b"
    assert "TimeLimitExceeded" in (job.error or "")


def test_each_id_has_a_time_limit_also_after_one_that_swallowed_its_own(app: lowq.Lowq, start: Start) -> None:
    def run_long() -> bool:
        """Whether it was interrupted."""
        give_up_at = time.monotonic() + PATIENCE
        try:
            while time.monotonic() < give_up_at:
                time.sleep(0.001)
        except lowq.TimeLimitExceeded:
            return True
        return False

    interrupted: dict[str, bool] = {}

    @app.worker(shards_count=1, batch_size=10, time_limit=0.2)
    def orders(job_id: str, payloads: list[Any]) -> None:
        interrupted[job_id] = run_long()

    push(orders)
    start(threads=1)
    until(lambda: is_idle(orders), "all ids")
    assert interrupted == dict.fromkeys(IDS, True)


def test_what_a_call_sets_of_context_variables_the_next_does_not_see(app: lowq.Lowq, start: Start) -> None:
    tenant: ContextVar[str] = ContextVar("tenant", default="none")
    seen: list[tuple[str, str]] = []

    def see(name: str, value: str) -> None:
        seen.append((name, tenant.get()))
        tenant.set(value)

    def by_id(job_id: str, payloads: list[Any]) -> None:
        see("by id", job_id)

    def by_batch(payloads_by_id: dict[str, list[Any]]) -> None:
        see("by batch", str(payloads_by_id))

    async def aby_id(job_id: str, payloads: list[Any]) -> None:
        see("async by id", job_id)
        await asyncio.sleep(0)
        assert tenant.get() == job_id
        assert asyncio.current_task() is not None
        async with asyncio.timeout(PATIENCE):
            assert await asyncio.create_task(read()) == job_id

    async def read() -> str:
        return tenant.get()

    async def aby_batch(payloads_by_id: dict[str, list[Any]]) -> None:
        for job_id in payloads_by_id:
            await aby_id(job_id, [])

    handlers: list[tuple[Any, int]] = [(by_id, 2), (by_batch, 2), (aby_id, 2), (aby_batch, 1)]
    workers = [
        app.worker(shards_count=1, queue_name=handler.__name__, batch_size=size)(handler) for handler, size in handlers
    ]
    for worker in workers:
        push(worker)
    start(threads=1)
    for worker in workers:
        until(partial(is_idle, worker), "all ids")
    assert {value for _, value in seen} == {"none"}
    assert len(seen) == 3 * len(IDS) + len(IDS) // 2


@pytest.mark.parametrize("is_async", [False, True], ids=["thread", "loop"])
def test_a_node_lets_go_of_what_a_failed_handler_held(app: lowq.Lowq, start: Start, is_async: bool) -> None:
    class Connection:
        pass

    kept: list[weakref.ref[Connection]] = []

    def perform(payloads_by_id: dict[str, list[Any]]) -> None:
        held = Connection()
        kept.append(weakref.ref(held))
        raise ValueError("boom")

    async def aperform(payloads_by_id: dict[str, list[Any]]) -> None:
        perform(payloads_by_id)

    worker = app.worker(shards_count=1, max_retry_count=0, queue_name="Connections")(aperform if is_async else perform)
    logging.disable()  # pytest keeps what is logged, and with it what was raised
    gc.collect()
    gc.disable()
    try:
        push(worker)
        start(threads=1)
        until(lambda: worker.queue.stats().morgue_length == len(IDS), "the morgue")
        until(lambda: not any(ref() is not None for ref in kept), "the end of what the handlers held")
        assert len(kept) >= len(IDS)
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)
