"""What a handler says of single ids with lowq.current(), and what that tells it. What becomes of an id by each word, in
whichever company, is in test_outcomes.
"""

import math
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import lowq
from lowq.errors import LowqError
from lowq.testing import drain
from lowq.workers import Worker
from tests.rows import case
from tests.rules.node.drivers import Driver, job_of, states

PayloadsById = dict[str, list[Any]]


class Desk:
    """A worker of one shard, whose handler each test sets."""

    def __init__(self, app: lowq.Lowq) -> None:
        self.handler: Callable[[PayloadsById], object] = lambda _: None
        self.batches: list[PayloadsById] = []
        self.worker: type[Worker[Any]] = Driver("drain").worker(app, self._perform)

    def _perform(self, payloads_by_id: PayloadsById) -> None:
        self.batches.append(dict(payloads_by_id))
        self.handler(payloads_by_id)

    def push(self, *ids: str, payload: Any = "v1") -> None:
        self.worker.perform_async([{"id": job_id, "payload": payload, "score": 1} for job_id in ids])

    def drain(self, handler: Callable[[PayloadsById], object] = lambda _: None, **options: Any) -> lowq.testing.Drained:
        """Drains with this handler, and then no more."""
        self.handler = handler
        return drain(self.worker, **options)


@pytest.fixture
def desk(app: lowq.Lowq) -> Desk:
    return Desk(app)


def test_an_id_that_is_done_counts_as_performed_though_perform_raises(desk: Desk) -> None:
    desk.push("a", "b")

    def handler(payloads_by_id: PayloadsById) -> None:
        lowq.current().done("a")
        raise ValueError("boom")

    drained = desk.drain(handler, limit=1)
    assert (drained.performed, drained.failed, desk.worker.queue.stats().processed) == (1, 1, 1)


def test_what_arrived_meanwhile_is_performed_next(desk: Desk) -> None:
    rows: list[tuple[str, list[Any]]] = [("done", ["v1", "v2"]), ("bury", ["v2"])]
    for verb, left in rows:
        with case(verb):
            desk.push(verb)

            def handler(payloads_by_id: PayloadsById) -> None:
                desk.push(verb, payload="v2")  # noqa: B023  # called in this turn of the loop
                if verb == "done":  # noqa: B023
                    desk.push(verb)  # noqa: B023  # equal to what is in flight
                getattr(lowq.current(), verb)(verb)  # noqa: B023

            desk.drain(handler, limit=1)
            desk.batches.clear()
            desk.drain()
            assert desk.batches == [{verb: left}]


def test_a_failure_or_a_burial_keeps_the_error_and_all_payloads(desk: Desk) -> None:
    rows: list[tuple[str, Callable[[], object]]] = [
        ("retrying", lambda: lowq.current().fail("a", ValueError("no such order"))),
        ("retrying", lambda: lowq.current().fail("a", "no such order")),
        ("morgue", lambda: lowq.current().bury("a", reason="no such order")),
    ]
    for state, say in rows:
        with case(state):
            desk.worker.queue.clear()
            desk.worker.perform_async([{"id": "a", "payload": n, "score": n} for n in (1, 2, 3)])
            desk.drain(lambda _: say())  # noqa: B023
            job = job_of(desk.worker, "a")
            assert (job.state, job.payloads) == (state, [(1, 1.0), (2, 2.0), (3, 3.0)])
            assert (job.error or "").rpartition("ValueError: ")[2].strip() == "no such order"


def test_a_released_id_waits_again_uncharged(desk: Desk) -> None:
    rows: list[tuple[Any, float]] = [(500, 500), (timedelta(seconds=90), 90), (-1, 0), (None, 0)]
    for delay, seconds in rows:
        with case(delay):
            desk.worker.queue.clear()
            desk.push("a", "b")
            pushed = job_of(desk.worker, "a").perform_at or 0
            drained = desk.drain(lambda _: lowq.current().release("a", delay=delay), limit=1)  # noqa: B023
            assert (drained.performed, drained.failed) == (1, 0)
            job = job_of(desk.worker, "a")
            assert (job.retry_count, job.error, job.payloads) == (-1, None, [("v1", 1.0)])
            assert seconds <= (job.perform_at or 0) - pushed + 0.001 < seconds + 60
            if delay is None:
                assert job.perform_at == pushed  # it keeps its place


def test_a_retry_knows_how_often_it_failed_and_a_release_keeps_that(desk: Desk) -> None:
    desk.push("a")
    first, counts = job_of(desk.worker, "a").perform_at or 0, list[int]()

    def handler(payloads_by_id: PayloadsById) -> None:
        counts.extend(job.retry_count for job in lowq.current().jobs)
        if len(counts) == 2:
            lowq.current().release("a", delay=1)
        raise ValueError("boom")

    for attempt in range(4):
        desk.drain(handler, now=first + 200 * attempt)
    assert counts == [-1, 0, 0, 1]


def test_the_last_word_on_an_id_counts_and_an_id_may_be_given_as_it_was_pushed(desk: Desk) -> None:
    desk.push("7")

    def handler(payloads_by_id: PayloadsById) -> None:
        lowq.current().done(7)
        lowq.current().bury(7, reason="on second thoughts")

    desk.drain(handler)
    assert job_of(desk.worker, "7").error == "on second thoughts"


#: What makes no sense: the handler learns of it, as nobody could be told once the batch is over.
SENSELESS: list[tuple[str, tuple[Any, ...], str]] = [
    *(("release", ("a", delay), "delay") for delay in ("soon", math.nan, True, 1e12)),
    *(("bury", ("a", reason), "reason") for reason in (5, None)),
    *(("fail", ("a", error), "fail") for error in (None, ValueError)),
    *(("touch", (seconds,), "must be seconds") for seconds in (0, timedelta(-1), "5", math.nan)),
    *(("done", (job_id,), "no such id") for job_id in ("b", None)),
    *((verb, ("b", "x"), "no such id") for verb in ("fail", "bury")),
    ("release", ("b",), "no such id"),
]


def test_a_senseless_word_is_refused_and_fails_the_batch_unless_the_handler_goes_on(desk: Desk) -> None:
    for verb, args, message in SENSELESS:
        with case(verb, *args):
            desk.worker.queue.clear()
            desk.push("a")

            def handler(payloads_by_id: PayloadsById) -> None:
                getattr(lowq.current(), verb)(*args)  # noqa: B023  # called in this turn

            with pytest.raises(LowqError, match=message):
                desk.drain(handler, limit=1, raises=True)
            assert states(desk.worker, "a") == {"a": ("retrying", 0)}


def test_it_tells_what_the_queue_knows_as_it_was_taken(app: lowq.Lowq, driver: Driver) -> None:
    told: list[Any] = []

    def handler(payloads_by_id: PayloadsById) -> None:
        payloads_by_id["a"].clear()
        execution = lowq.current()
        execution.touch(5)
        told.extend([execution.worker, execution.shard, execution.fence, execution.deadline, execution.jobs])

    worker = driver.worker(app, handler)
    worker.perform_async({"id": job_id, "payload": n, "score": n + 0.5} for job_id, n in (("a", 1), ("a", 2), ("b", 7)))
    waiting = worker.queue.fetch(["a", "b"])
    driver.perform(app, worker)
    kind, shard, fence, deadline, jobs = told
    assert (kind, shard, deadline) == (worker, 0, None)
    assert isinstance(fence, int)
    assert {job.id: (job.payloads, job.retry_count, job.state) for job in jobs} == {
        "a": ([(1, 1.5), (2, 2.5)], -1, "taken"),
        "b": ([(7, 7.5)], -1, "taken"),
    }
    assert {job.id: job.perform_at for job in jobs} == {job_id: job.perform_at for job_id, job in waiting.items()}


def test_the_fencing_token_grows_with_every_owner(desk: Desk) -> None:
    fences: list[int] = []
    for job_id in "abc":
        desk.push(job_id)
        desk.drain(lambda _: fences.append(lowq.current().fence))
    assert fences == sorted(set(fences))
    assert len(fences) == 3


def test_there_is_none_outside_of_perform_nor_in_another_thread(desk: Desk) -> None:
    asked: list[int] = []

    def ask(*_: object) -> None:
        with pytest.raises(LowqError, match=r"outside of perform; .* use lowq\.testing\.execution"):
            lowq.current()
        asked.append(1)

    def fail(payloads_by_id: PayloadsById) -> None:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        raise ValueError("boom")

    desk.push("a")
    desk.drain(fail)
    ask()
    assert len(asked) == 2
