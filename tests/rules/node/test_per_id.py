"""``perform_one``: called id by id within a batch, and what is raised concerns only the id that raised it."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import lowq
from lowq.errors import LowqError, RedisUnavailable
from lowq.middleware import Middleware
from lowq.node.execution import WorkerRuntime
from lowq.testing import drain
from lowq.workers import Worker
from tests.rules.thread_rig import ThreadRig

pytestmark = pytest.mark.parametrize("store_url", ["redis"], indirect=True)

#: Called with the id and its payloads.
Handler = Callable[[str, list[Any]], object]
#: Performs one batch.
Perform = Callable[[type[Worker[Any]]], None]

IDS = ("a", "b", "c", "d")


def make_worker(
    app: lowq.Lowq, handler: Handler = lambda *_: None, *, is_async: bool = False, **options: Any
) -> type[Worker[Any]]:
    class Plain(lowq.Worker[Any]):
        def perform_one(self, job_id: str, payloads: list[Any]) -> None:
            handler(job_id, payloads)

        def retry_in(self, retry_count: int) -> float:
            return 100.0

    class Awaits(lowq.Worker[Any]):
        async def perform_one(self, job_id: str, payloads: list[Any]) -> None:
            await asyncio.sleep(0)
            handler(job_id, payloads)

        def retry_in(self, retry_count: int) -> float:
            return 100.0

    return app.worker(**{"shards_count": 1, "batch_size": 10, "queue_name": "Orders", **options})(
        Awaits if is_async else Plain
    )


def push(worker: type[Worker[Any]], *ids: str) -> None:
    worker.perform_async({"id": job_id, "payload": f"of {job_id}", "score": 1} for job_id in ids or IDS)


def states(worker: type[Worker[Any]], *ids: str) -> dict[str, tuple[str, int] | None]:
    """State and retry count of each id; None: it is finished."""
    found = {job_id: worker.queue.peek(job_id) for job_id in ids or IDS}
    return {job_id: None if job is None else (job.state, job.retry_count) for job_id, job in found.items()}


def fail_for(*failing: str, error: Callable[[], BaseException] = lambda: ValueError("boom")) -> Handler:
    def handler(job_id: str, _payloads: list[Any]) -> None:
        if job_id in failing:
            raise error()

    return handler


def test_each_id_of_a_batch_is_performed_with_its_payloads(app: lowq.Lowq, is_async: bool) -> None:
    seen: dict[str, list[Any]] = {}
    worker = make_worker(app, seen.__setitem__, is_async=is_async)
    push(worker)
    worker.push("a", "newer", score=2)
    done = drain(worker)
    assert (done.batches, done.performed) == (1, 4)
    assert seen == {"a": ["of a", "newer"], "b": ["of b"], "c": ["of c"], "d": ["of d"]}
    assert worker.queue.stats().taken == 0


def test_an_exception_charges_its_id_and_the_others_are_performed(app: lowq.Lowq, is_async: bool) -> None:
    worker = make_worker(app, fail_for("b"), is_async=is_async)
    push(worker)
    done = drain(worker, limit=1)
    assert (done.performed, done.failed) == (3, 1)
    assert states(worker) == {"a": None, "b": ("retrying", 0), "c": None, "d": None}
    job = worker.queue.peek("b")
    assert job is not None
    assert "ValueError: boom" in (job.error or "")


def test_in_a_thread_of_a_node_as_well(app: lowq.Lowq) -> None:
    worker = make_worker(app, fail_for("b", "c"))
    push(worker)
    rig = ThreadRig(app, worker)
    rig.turn()
    rig.shards[0].in_flight.take(0)
    assert states(worker) == {"a": None, "b": ("retrying", 0), "c": ("retrying", 0), "d": None}
    assert worker.queue.stats().taken == 0


def test_what_was_raised_is_told_to_middlewares_and_to_who_drains(app: lowq.Lowq, is_async: bool) -> None:
    told: list[Exception] = []

    def around(_worker: Any, _batch: Any, call_next: Callable[[], Any]) -> None:
        try:
            call_next()
        except Exception as error:
            told.append(error)
            raise

    async def aaround(_worker: Any, _batch: Any, call_next: Callable[[], Any]) -> None:
        try:
            await call_next()
        except Exception as error:
            told.append(error)
            raise

    middleware: Middleware = aaround if is_async else around
    app.config.server_middlewares = [middleware]
    worker = make_worker(app, fail_for("b", "d"), is_async=is_async)
    push(worker)
    with pytest.raises(ExceptionGroup, match="2 of 4 ids failed") as caught:
        drain(worker, raises=True)
    assert [type(error) for error in caught.value.exceptions] == [ValueError, ValueError]
    assert told == [caught.value]
    push(worker, "e", "d", "f")
    worker.queue.perform_now("d")
    with pytest.raises(ValueError, match="boom"):
        drain(worker, raises=True)


def test_an_error_that_a_middleware_swallows_charges_its_id(app: lowq.Lowq) -> None:
    def swallow(_worker: Any, _batch: Any, call_next: Callable[[], Any]) -> None:
        try:
            call_next()
        except ValueError:
            pass

    app.config.server_middlewares = [swallow]
    worker = make_worker(app, fail_for("b"))
    push(worker)
    drain(worker, limit=1)
    assert states(worker) == {"a": None, "b": ("retrying", 0), "c": None, "d": None}


def test_what_the_handler_says_of_its_id_comes_first(app: lowq.Lowq, is_async: bool) -> None:
    def handler(job_id: str, _payloads: list[Any]) -> None:
        batch = lowq.current()
        if job_id == "a":
            batch.bury("a", "enough")
        if job_id == "b":
            batch.release("b", 50)
        if job_id == "c":
            batch.done("c")
            raise ValueError("too late")
        if job_id == "d":
            batch.fail("d", "no")

    worker = make_worker(app, handler, is_async=is_async)
    push(worker)
    drain(worker, limit=1)
    assert states(worker) == {"a": ("morgue", -1), "b": ("scheduled", -1), "c": None, "d": ("retrying", 0)}


def test_an_id_released_by_an_earlier_one_is_performed_and_waits_again(app: lowq.Lowq) -> None:
    seen: list[str] = []

    def handler(job_id: str, _payloads: list[Any]) -> None:
        seen.append(job_id)
        if job_id == "a":
            lowq.current().release("c", 50)

    worker = make_worker(app, handler)
    push(worker)
    drain(worker, limit=1)
    assert seen == [*IDS]
    assert states(worker) == {"a": None, "b": None, "c": ("scheduled", -1), "d": None}


def test_a_merge_function_goes_before_it(app: lowq.Lowq) -> None:
    seen: dict[str, list[Any]] = {}

    def merge(payloads: list[Any]) -> list[Any]:
        if payloads == ["of b"]:
            raise ValueError("can't be merged")
        return [f"{payload} merged" for payload in payloads] if payloads != ["of c"] else []

    worker = make_worker(app, seen.__setitem__, merge=merge)
    push(worker)
    drain(worker, limit=1)
    assert seen == {"a": ["of a merged"], "d": ["of d merged"]}
    assert states(worker) == {"a": None, "b": ("retrying", 0), "c": None, "d": None}


def test_a_handler_that_finds_no_redis_is_not_charged(app: lowq.Lowq, is_async: bool) -> None:
    worker = make_worker(app, fail_for("b", error=lambda: RedisUnavailable("away")), is_async=is_async)
    push(worker)
    drain(worker, limit=1)
    assert states(worker) == {"a": None, "b": ("due", -1), "c": None, "d": None}


def test_when_the_shard_is_to_be_given_up_no_other_id_begins_and_those_wait_again_uncharged(app: lowq.Lowq) -> None:
    seen: list[str] = []

    def handler(job_id: str, _payloads: list[Any]) -> None:
        seen.append(job_id)
        if job_id == "b":
            rig.shards[0].dispatch.leaving = True
            raise ValueError("boom")

    worker = make_worker(app, handler)
    push(worker)
    rig = ThreadRig(app, worker)
    rig.turn()
    rig.shards[0].in_flight.take(0)
    assert seen == ["a", "b"]
    assert states(worker) == {"a": None, "b": ("retrying", 0), "c": ("due", -1), "d": ("due", -1)}
    assert worker.queue.stats().taken == 0


class Stop(BaseException):
    """No Exception: what stops a process."""


def test_what_stops_the_process_is_charged_to_the_id_that_raised_it_alone(app: lowq.Lowq) -> None:
    worker = make_worker(app, fail_for("b", error=Stop))
    push(worker)
    with pytest.raises(Stop):
        drain(worker)
    crashes = {job_id: job.crashes for job_id, job in worker.queue.fetch(IDS).items()}
    assert crashes == {"b": 1, "c": 0, "d": 0}
    assert states(worker, "a", "c") == {"a": None, "c": ("due", -1)}


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
    assert [job_id for job_id in IDS if orders.queue.peek(job_id) is None] == ["a", "b"]
    assert [job.crashes for job in orders.queue.fetch(["c", "d"]).values()] == [0, 0]


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
    assert states(orders) == {"a": None, "b": ("retrying", 0), "c": None, "d": None}
    job = orders.queue.peek("b")
    assert job is not None
    assert "what the handler awaited was cancelled" in (job.error or "")


def test_a_decorator_that_hides_an_async_def_fails_each_id(app: lowq.Lowq) -> None:
    async def hidden(job_id: str, payloads: list[Any]) -> None: ...

    worker = make_worker(app, hidden)
    worker.perform_one = lambda _self, job_id, payloads: hidden(job_id, payloads)  # type: ignore[method-assign]
    push(worker)
    assert drain(worker, limit=1).failed == 4
    job = worker.queue.peek("a")
    assert job is not None
    assert "Plain.perform_one returned a coroutine, which nobody runs" in (job.error or "")


def test_each_id_has_the_time_limit_for_itself(app: lowq.Lowq, is_async: bool) -> None:
    deadlines: list[float] = []

    def handler(_job_id: str, _payloads: list[Any]) -> None:
        deadline = lowq.current().deadline
        assert deadline is not None
        deadlines.append(deadline)

    worker = make_worker(app, handler, is_async=is_async, time_limit=100, ttr=200)
    push(worker)
    drain(worker)
    assert deadlines == sorted(set(deadlines))
    assert len(deadlines) == 4


def test_a_middleware_of_the_wrong_kind_is_refused_by_the_name_of_the_method(app: lowq.Lowq) -> None:
    async def around(_worker: Any, _batch: Any, call_next: Callable[[], Any]) -> None:
        await call_next()

    app.config.server_middlewares = [around]
    with pytest.raises(LowqError, match=r"Plain\.perform_one is a plain def and middleware .*around is an async def"):
        drain(make_worker(app))


def test_when_the_lease_is_not_surely_held_no_other_id_begins(app: lowq.Lowq) -> None:
    seen: list[str] = []

    def handler(job_id: str, _payloads: list[Any]) -> None:
        seen.append(job_id)
        if job_id == "b":
            rig.shards[0].lease.lose()

    worker = make_worker(app, handler)
    push(worker)
    rig = ThreadRig(app, worker)
    rig.runtimes[worker.queue_name] = WorkerRuntime.of(worker, app.config, rig.stopping.is_set)
    rig.turn()
    assert seen == ["a", "b"]
    assert states(worker, "c", "d") == {"c": ("due", -1), "d": ("due", -1)}
