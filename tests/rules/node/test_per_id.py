"""``perform_one``: called id by id within a batch. What is raised, or said, of one id is in test_outcomes."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import lowq
from lowq import clock
from lowq.errors import TimeLimitExceeded
from lowq.testing import drain
from lowq.workers import Worker
from tests.rows import case
from tests.rules.node.conftest import MakeApp
from tests.rules.node.drivers import Driver, job_of, states
from tests.rules.thread_rig import ThreadRig
from tests.waiting import NEVER

IDS = "abcd"


def push(worker: type[Worker[Any]]) -> None:
    worker.perform_async({"id": job_id, "payload": f"of {job_id}", "score": 1} for job_id in IDS)


def test_each_id_of_a_batch_is_performed_with_its_payloads_and_all_of_the_time_limit(
    app: lowq.Lowq, driver: Driver
) -> None:
    seen: dict[str, list[Any]] = {}
    deadlines: list[float | None] = []

    def handler(job_id: str, payloads: list[Any]) -> None:
        seen[job_id] = payloads
        deadlines.append(lowq.current().deadline)

    worker = driver.worker(app, handler, per_id=True, time_limit=100, ttr=200)
    push(worker)
    worker.push("a", "newer", score=2)
    driver.perform(app, worker)
    assert seen == {"a": ["of a", "newer"], "b": ["of b"], "c": ["of c"], "d": ["of d"]}
    assert len({deadline for deadline in deadlines if deadline is not None}) == 4
    assert states(worker, IDS) == dict.fromkeys(IDS)


def test_what_the_handler_says_of_its_id_comes_first(app: lowq.Lowq, driver: Driver) -> None:
    def handler(job_id: str, _payloads: list[Any]) -> None:
        batch = lowq.current()
        if job_id == "a":
            batch.bury("a", "enough")
            batch.release("d", 50)  # which is performed all the same, and waits again then
        if job_id == "b":
            batch.fail("b", "no")
        if job_id == "c":
            batch.done("c")
            raise ValueError("too late")

    worker = driver.worker(app, handler, per_id=True)
    push(worker)
    driver.perform(app, worker)
    assert states(worker, IDS) == {"a": ("morgue", -1), "b": ("retrying", 0), "c": None, "d": ("scheduled", -1)}


def test_what_was_raised_is_told_to_middlewares_and_to_who_drains(make_app: MakeApp) -> None:
    told: list[Exception] = []

    class Around:
        """For workers of both kinds. Of a plain one it swallows what concerns one id alone."""

        def __call__(self, _worker: Any, _batch: Any, call_next: Callable[[], Any]) -> None:
            try:
                call_next()
            except ExceptionGroup as error:
                told.append(error)
                raise
            except ValueError:
                pass

        async def acall(self, _worker: Any, _batch: Any, call_next: Callable[[], Any]) -> None:
            try:
                await call_next()
            except ExceptionGroup as error:
                told.append(error)
                raise

    def handler(job_id: str, _payloads: list[Any]) -> None:
        if job_id in "bd":
            raise ValueError("boom")

    for driver in (Driver("drain"), Driver("async drain")):
        with case(driver.is_async):
            worker = driver.worker(make_app(server_middlewares=[Around()]), handler, per_id=True)
            push(worker)
            with pytest.raises(ExceptionGroup, match="2 of 4 ids failed") as caught:
                drain(worker, raises=True)
            assert [type(error) for error in caught.value.exceptions] == [ValueError, ValueError]
            assert told.pop() is caught.value
            worker.queue.clear()
            worker.perform_async({"id": job_id, "score": 1} for job_id in "ab")
            drain(worker)
            assert states(worker, "ab") == {"a": None, "b": ("retrying", 0)}


def test_a_merge_function_goes_before_it(app: lowq.Lowq, driver: Driver) -> None:
    seen: dict[str, list[Any]] = {}

    def merge(payloads: list[Any]) -> list[Any]:
        if payloads == ["of b"]:
            raise ValueError("can't be merged")
        return [f"{payload} merged" for payload in payloads] if payloads != ["of c"] else []

    worker = driver.worker(app, seen.__setitem__, per_id=True, merge=merge)
    push(worker)
    driver.perform(app, worker)
    assert seen == {"a": ["of a merged"], "d": ["of d merged"]}
    assert states(worker, IDS) == {"a": None, "b": ("retrying", 0), "c": None, "d": None}


def test_an_id_that_expires_behind_a_slow_one_does_not_begin(app: lowq.Lowq) -> None:
    seen: list[str] = []
    ahead = 0.0

    def handler(job_id: str, _payloads: list[Any]) -> None:
        nonlocal ahead
        seen.append(job_id)
        ahead = 2 * NEVER
        rig.shards[0].lease.deadline += ahead  # as its node renews it meanwhile

    worker = Driver("thread").worker(app, handler, per_id=True)
    worker.perform_async({"id": job_id, "score": 1, **({"ttl": NEVER} if job_id == "c" else {})} for job_id in IDS)
    rig = ThreadRig(app, worker, lambda: clock.now() + ahead)
    rig.turn()
    assert seen == ["a", "b", "d"]


def test_an_id_that_raises_the_error_of_a_time_limit_itself_is_charged_alone(app: lowq.Lowq) -> None:
    for driver in (Driver("drain"), Driver("async drain")):
        with case(driver.is_async):

            def handler(job_id: str, _payloads: list[Any]) -> None:
                if job_id == "b":
                    raise TimeLimitExceeded

            worker = driver.worker(app, handler, per_id=True, queue_name=f"Orders{driver.is_async}")
            push(worker)
            driver.perform(app, worker)
            assert states(worker, IDS) == {"a": None, "b": ("retrying", 0), "c": ("due", -1), "d": ("due", -1)}


def test_a_batch_that_is_cancelled_acknowledges_what_is_done_and_charges_nothing(app: lowq.Lowq) -> None:
    begun = asyncio.Event()

    @app.worker(shards_count=1, batch_size=10)
    async def orders(job_id: str, payloads: list[Any]) -> None:
        if job_id == "c":
            begun.set()
            await asyncio.sleep(3600)

    push(orders)

    async def cancel() -> None:
        task = asyncio.create_task(lowq.testing.adrain(orders))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert {job.id: job.crashes for job in orders.queue.fetch([*IDS]).values()} == {"c": 0, "d": 0}


def test_something_awaited_that_is_cancelled_fails_its_id_alone(app: lowq.Lowq) -> None:
    @app.worker(shards_count=1, batch_size=10)
    async def orders(job_id: str, payloads: list[Any]) -> None:
        if job_id == "b":
            inner = asyncio.create_task(asyncio.sleep(3600))
            await asyncio.sleep(0)
            inner.cancel()
            await inner

    push(orders)
    drain(orders, limit=1)
    assert states(orders, IDS) == {"a": None, "b": ("retrying", 0), "c": None, "d": None}
    assert "what the handler awaited was cancelled" in (job_of(orders, "b").error or "")


def test_when_the_node_stops_or_the_shard_is_given_up_or_not_surely_held_no_other_id_begins(make_app: MakeApp) -> None:
    """Those wait again, uncharged."""
    rows: list[tuple[str, Callable[[ThreadRig], object]]] = [
        ("given up", lambda rig: rig.dispatcher.leave(rig.shards)),
        ("lost", lambda rig: rig.shards[0].lease.lose()),
        ("the node stops", lambda rig: rig.stopping.set()),
    ]
    for name, happens in rows:
        with case(name):
            seen: list[str] = []

            def handler(job_id: str, _payloads: list[Any], seen: list[str] = seen) -> None:
                seen.append(job_id)
                if job_id == "b":
                    happens(rig)  # noqa: B023  # called in this turn of the loop
                    raise ValueError("boom")

            app = make_app()
            worker = Driver("thread").worker(app, handler, per_id=True)
            push(worker)
            rig = ThreadRig(app, worker)
            rig.turn()
            assert seen == ["a", "b"]
            assert {job.id: job.crashes for job in worker.queue.fetch(["c", "d"]).values()} == {"c": 0, "d": 0}
            if name == "given up":
                rig.shards[0].in_flight.take(0)
                assert states(worker, IDS) == {"a": None, "b": ("retrying", 0), "c": ("due", -1), "d": ("due", -1)}
