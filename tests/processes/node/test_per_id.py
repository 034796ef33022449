"""``perform_one`` in nodes: what ends a batch in the middle."""

import asyncio
import threading
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest

import lowq
from lowq.workers import Worker
from tests.processes.node.conftest import Start, is_idle
from tests.waiting import NEVER, PATIENCE, until

IDS = ("a", "b", "c", "d")


def push(worker: type[Worker[Any]]) -> None:
    worker.perform_async({"id": job_id} for job_id in IDS)


@pytest.mark.parametrize("is_per_id", [True, False], ids=["perform_one", "done"])
def test_a_thread_that_is_cut_short_has_acknowledged_what_is_done(
    app: lowq.Lowq, start: Start, is_per_id: bool
) -> None:
    begun, go = threading.Event(), threading.Event()
    performed: list[str] = []

    def one(job_id: str, payloads: list[Any]) -> None:
        performed.append(job_id)
        if job_id == "c" and not begun.is_set():
            begun.set()
            go.wait()

    def several(payloads_by_id: dict[str, list[Any]]) -> None:
        for job_id, payloads in payloads_by_id.items():
            one(job_id, payloads)
            lowq.current().done(job_id)

    orders = app.worker(shards_count=1, batch_size=10, max_crash_count=1)(one if is_per_id else several)
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


def test_an_id_that_exceeds_its_ttr_is_charged_alone(app: lowq.Lowq, start: Start) -> None:
    go = threading.Event()
    performed: list[str] = []
    hangs: list[threading.Thread] = []

    @app.worker(shards_count=1, batch_size=10, ttr=NEVER)
    def orders(job_id: str, payloads: list[Any]) -> None:
        performed.append(job_id)
        if performed == ["a", "b"]:
            hangs.append(threading.current_thread())
            lowq.current().touch(0.3)  # it alone: the machine may stand still while others are performed
            go.wait(PATIENCE)

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
        if job_id == "b":
            lowq.current().touch(0.3)  # it alone: the machine may stand still while others are performed

    async def awaits(job_id: str, payloads: list[Any]) -> None:
        begin(job_id)
        if job_id == "b":
            await asyncio.sleep(NEVER)

    def loops(job_id: str, payloads: list[Any]) -> None:
        begin(job_id)
        while job_id == "b":
            pass

    handler: Any = awaits if is_async else loops
    worker = app.worker(shards_count=1, batch_size=10, time_limit=NEVER, max_retry_count=0)(handler)
    push(worker)
    start()
    until(partial(is_idle, worker), "the end of all")
    assert performed == [*IDS]
    (job,) = worker.queue.jobs(state="morgue")
    assert job.id == "b"
    assert "TimeLimitExceeded" in (job.error or "")


def test_what_a_call_sets_of_context_variables_the_next_does_not_see(app: lowq.Lowq, start: Start) -> None:
    tenant: ContextVar[str] = ContextVar("tenant", default="none")
    seen: list[str] = []

    def see(value: object) -> None:
        seen.append(tenant.get())
        tenant.set(str(value))

    def by_id(job_id: str, payloads: list[Any]) -> None:
        see(job_id)

    def by_batch(payloads_by_id: dict[str, list[Any]]) -> None:
        see(payloads_by_id)

    async def read() -> str:
        return tenant.get()

    async def aby_id(job_id: str, payloads: list[Any]) -> None:
        see(job_id)
        await asyncio.sleep(0)
        assert await asyncio.create_task(read()) == tenant.get() == job_id

    async def aby_batch(payloads_by_id: dict[str, list[Any]]) -> None:
        see(payloads_by_id)

    handlers: list[Any] = [by_id, by_batch, aby_id, aby_batch]
    workers = [app.worker(shards_count=1, queue_name=one.__name__, batch_size=2)(one) for one in handlers]
    for worker in workers:
        push(worker)
    start(threads=1)
    for worker in workers:
        until(partial(is_idle, worker), "all ids")
    assert set(seen) == {"none"}
    assert len(seen) == 3 * len(IDS)  # of two handlers for each id, of two for a batch of two
