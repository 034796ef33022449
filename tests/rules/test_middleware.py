"""What middlewares are around, in which order, and what becomes of a batch when one of them doesn't do its part."""

from collections.abc import Callable
from typing import Any

import pytest

import lowq
from lowq.testing import drain
from tests.rows import case

Next = Callable[[], Any]


class Shop:
    """What happened, in order, with these middlewares around a worker whose handler may fail."""

    def __init__(self, *middlewares: Any, error: Exception | None = None) -> None:
        self.events: list[Any] = []
        self.app = lowq.Lowq(redis_url="memory://", server_middlewares=middlewares)

        @self.app.worker(shards_count=1)
        def orders(payloads_by_id: dict[str, list[Any]]) -> None:
            self.events.append(payloads_by_id)
            if error is not None:
                raise error

        self.worker = orders

    def perform(self, *ids: str) -> str | None:
        """The error of the last id; None: it is finished."""
        for job_id in ids:
            self.worker.push(job_id, 7)
            drain(self.worker, limit=1)
        job = self.worker.queue.peek(ids[-1])
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

    def look(worker: Any, batch: Any, call_next: Next) -> None:
        got.append((worker, batch))
        batch["more"] = [8]
        call_next()

    events: list[Any] = []
    shop = Shop(around(events, "a"), around(events, "b"), look)
    shop.events = events
    assert shop.perform("1", "2") is None
    both = [{"1": [7], "more": [8]}, {"2": [7], "more": [8]}]
    assert events == [event for batch in both for event in ("a in", "b in", batch, "b out", "a out")]
    assert [batch for _, batch in got] == both
    assert {worker for worker, _ in got} == {shop.worker}


def veto(worker: Any, batch: Any, call_next: Next) -> None:
    """Returns without a word."""


class Veto:
    """An object that is called."""

    def __call__(self, worker: Any, batch: Any, call_next: Next) -> None: ...

    def __repr__(self) -> str:
        return "<the veto>"


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
        (Veto(), None, "middleware <the veto> returned", 0),
        (twice, None, "middleware twice called call_next() twice", 1),
        (refuse, None, "PermissionError: closed on Sundays", 0),
        (call, ValueError("boom"), "ValueError: boom", 1),
        (forgive, ZeroDivisionError(), None, 1),
    ]
    for middleware, error, said, performs in rows:
        with case(middleware):
            events: list[Any] = []
            shop = Shop(around(events, "a"), middleware, error=error)
            found = shop.perform("1")
            assert found is None if said is None else said in (found or "")
            assert len(shop.events) == performs
            assert events == ["a in", "a out"]  # an error goes out through all of them
