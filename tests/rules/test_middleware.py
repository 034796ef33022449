"""What middlewares are around, in which order, and what becomes of a batch when one of them doesn't do its part."""

from collections.abc import Callable
from typing import Any

import pytest

import lowq
from lowq.testing import drain
from tests.rows import case

Next = Callable[[], Any]


def perform(events: list[Any], middlewares: list[Any], ids: list[str], error: Exception | None = None) -> Any:
    """Performs one id after the other, with these middlewares around: notes batches. Gives the error of the last."""
    app = lowq.Lowq(redis_url="memory://", server_middlewares=middlewares)

    @app.worker(shards_count=1)
    def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        events.append(payloads_by_id)
        if error is not None:
            raise error

    for job_id in ids:
        orders.push(job_id, 7)
        drain(orders, limit=1)
    job = orders.queue.peek(ids[-1])
    return None if job is None else job.error


def around(events: list[Any], name: str) -> Any:
    def middleware(worker: Any, batch: Any, call_next: Next) -> None:
        events.append(f"{name} in")
        try:
            call_next()
        finally:
            events.append(f"{name} out")

    return middleware


def test_the_first_is_outermost_each_gets_the_worker_and_the_batch_and_each_batch_counts_anew() -> None:
    got: list[Any] = []
    events: list[Any] = []

    def look(worker: Any, batch: Any, call_next: Next) -> None:
        got.append(worker.queue_name)
        batch["more"] = [8]
        call_next()

    assert perform(events, [around(events, "a"), around(events, "b"), look], ["1", "2"]) is None
    both = [{"1": [7], "more": [8]}, {"2": [7], "more": [8]}]
    assert events == [event for batch in both for event in ("a in", "b in", batch, "b out", "a out")]
    assert got == ["orders", "orders"]


def veto(worker: Any, batch: Any, call_next: Next) -> None:
    """Returns without a word."""


def twice(worker: Any, batch: Any, call_next: Next) -> None:
    call_next()
    call_next()


def refuse(worker: Any, batch: Any, call_next: Next) -> None:
    raise PermissionError("closed on Sundays")


def forgive(worker: Any, batch: Any, call_next: Next) -> None:
    with pytest.raises(ZeroDivisionError):
        call_next()


def call(worker: Any, batch: Any, call_next: Next) -> None:
    call_next()


def test_one_that_does_not_call_the_next_once_fails_the_batch() -> None:
    rows: list[tuple[Any, Exception | None, str | None, int]] = [
        (veto, None, "middleware veto returned without call_next() and without raising", 0),
        (twice, None, "middleware twice called call_next() twice", 1),
        (refuse, None, "PermissionError: closed on Sundays", 0),
        (call, ValueError("boom"), "ValueError: boom", 1),
        (forgive, ZeroDivisionError(), None, 1),
    ]
    for middleware, error, said, performs in rows:
        with case(middleware):
            events: list[Any] = []
            found = perform(events, [around(events, "a"), middleware], ["1"], error)
            assert found is None if said is None else said in (found or "")
            # An error goes out through all of them.
            assert events == ["a in", *[{"1": [7]}] * performs, "a out"]


def test_an_async_one_may_swallow_an_error_as_a_plain_one_may() -> None:
    async def forgive_async(worker: Any, batch: Any, call_next: Next) -> None:
        with pytest.raises(ZeroDivisionError):
            await call_next()

    app = lowq.Lowq(redis_url="memory://", server_middlewares=[forgive_async])

    @app.worker(shards_count=1)
    async def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        raise ZeroDivisionError

    orders.push("1", 7)
    drain(orders)
    assert orders.queue.peek("1") is None
