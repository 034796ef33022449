"""What a handler says of single ids with lowq.current(), and what becomes of them in the queue."""

import itertools
import math
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

import lowq
import lowq.testing
from lowq.codec import MAX_TIME
from lowq.errors import LowqError, TimeLimitExceeded
from lowq.testing import drain
from tests.rows import case

pytestmark = pytest.mark.parametrize("store_url", ["redis"], indirect=True)

PayloadsById = dict[str, list[Any]]


class Desk:
    """A worker `Orders` of one shard, whose handler each test sets."""

    def __init__(self, store_url: str) -> None:
        self.app = lowq.Lowq(redis_url=store_url)
        self.handler: Callable[[PayloadsById], None] = self.seen_by_default
        self.batches: list[PayloadsById] = []
        self.retry_in: Callable[[], Any] = lambda: 100.0
        desk = self

        @self.app.worker(shards_count=1, batch_size=10, max_retry_count=2)
        class Orders(lowq.Worker[Any]):
            def perform(self, payloads_by_id: PayloadsById) -> None:
                desk.batches.append(dict(payloads_by_id))
                desk.handler(payloads_by_id)

            def retry_in(self, retry_count: int) -> float:
                return desk.retry_in()  # type: ignore[no-any-return]  # whatever the test says

        self.worker = Orders
        self.queue = Orders.queue

    def seen_by_default(self, payloads_by_id: PayloadsById) -> None:
        """Performs in peace."""

    def push(self, *ids: str, payload: Any = "v1") -> None:
        self.worker.perform_async([{"id": job_id, "payload": payload, "score": 1} for job_id in ids])

    def drain(self, handler: Callable[[PayloadsById], None] | None = None, **options: Any) -> lowq.testing.Drained:
        """Drains with this handler, and then no more."""
        self.handler = handler or self.seen_by_default
        return drain(self.worker, **options)

    def job(self, job_id: str = "a") -> lowq.Job:
        found = self.queue.peek(job_id)
        assert found is not None
        return found

    def states(self, *ids: str) -> dict[str, str | None]:
        found = self.queue.fetch(ids)
        return {job_id: found[job_id].state if job_id in found else None for job_id in ids}

    def retry_counts(self, *ids: str) -> dict[str, int]:
        return {job_id: job.retry_count for job_id, job in self.queue.fetch(ids).items()}


@pytest.fixture
def desk(store_url: str) -> Iterator[Desk]:
    desk = Desk(store_url)
    yield desk
    desk.app.close()


#: What a handler may say of an id, and what becomes of it then: its state and retry count; None: it is finished.
WORDS: dict[str, tuple[Callable[[str], object], Any]] = {
    "nothing": (lambda _: None, None),
    "done": (lambda job_id: lowq.current().done(job_id), None),
    "fail": (lambda job_id: lowq.current().fail(job_id, "no such order"), ("retrying", 0)),
    "release": (lambda job_id: lowq.current().release(job_id, delay=500), ("scheduled", -1)),
    "bury": (lambda job_id: lowq.current().bury(job_id, reason="cancelled"), ("morgue", -1)),
}
#: What becomes of an id of which nothing was said, by what was raised: in company, and alone.
UNSAID: dict[type[BaseException], tuple[Any, Any]] = {
    ValueError: (("due", -1), ("retrying", 0)),
    TimeLimitExceeded: (("due", -1), ("retrying", 0)),
    KeyboardInterrupt: (("crashed", -1), ("crashed", -1)),
}


def outcome(desk: Desk, job_id: str) -> Any:
    job = desk.queue.peek(job_id)
    return None if job is None else ("crashed" if job.crashes else job.state, job.retry_count)


def test_each_id_gets_its_word_and_otherwise_what_the_exception_means(desk: Desk) -> None:
    errors = [None, *UNSAID]
    said = [*itertools.product(WORDS, repeat=2), *itertools.product(WORDS)]
    for error, some in itertools.product(errors, said):
        with case(error, some):
            words = dict(zip("ab", some, strict=False))
            desk.queue.clear()
            desk.push(*words)

            def handler(payloads_by_id: PayloadsById) -> None:
                for job_id, word in words.items():  # noqa: B023  # called in this turn of the loop
                    WORDS[word][0](job_id)
                if error is not None:  # noqa: B023
                    raise error  # noqa: B023

            try:
                desk.drain(handler, limit=1)
            except KeyboardInterrupt:
                assert error is KeyboardInterrupt  # it comes out once the outcome is written
            for job_id, word in words.items():
                unsaid = None if error is None else UNSAID[error][len(words) == 1]
                assert outcome(desk, job_id) == (unsaid if word == "nothing" else WORDS[word][1]), job_id


class TestDone:
    def test_an_id_that_is_done_counts_as_performed_though_perform_raises(self, desk: Desk) -> None:
        desk.push("a", "b")

        def handler(payloads_by_id: PayloadsById) -> None:
            lowq.current().done("a")
            raise ValueError("boom")

        drained = desk.drain(handler, limit=1)
        assert (drained.performed, drained.failed) == (1, 1)
        assert desk.queue.stats().processed == 1

    def test_what_arrived_meanwhile_is_kept(self, desk: Desk) -> None:
        desk.push("a")

        def handler(payloads_by_id: PayloadsById) -> None:
            desk.push("a")  # equal to what is in flight
            desk.push("a", payload="v2")
            lowq.current().done("a")

        desk.drain(handler, limit=1)
        desk.drain()
        assert desk.batches == [{"a": ["v1"]}, {"a": ["v1", "v2"]}]


class TestFail:
    def test_its_error_is_kept_and_its_payloads_stay(self, desk: Desk) -> None:
        for error in (ValueError("no such order"), "no such order"):
            with case(error):
                desk.queue.clear()
                desk.push("a", "b")
                drained = desk.drain(lambda _: lowq.current().fail("a", error))  # noqa: B023
                assert (drained.performed, drained.failed) == (1, 1)
                job = desk.job()
                assert (job.retry_count, job.payloads) == (0, [("v1", 1.0)])
                assert (job.error or "").rpartition("ValueError: ")[2].strip() == "no such order"

    def test_the_others_of_a_batch_that_raises_are_tried_alone(self, desk: Desk) -> None:
        desk.push("a", "b", "c")

        def handler(payloads_by_id: PayloadsById) -> None:
            lowq.current().fail("b", "no such order")
            raise ValueError("boom")

        assert desk.drain(handler, limit=1).failed == 3
        desk.batches.clear()
        desk.drain()
        assert sorted(desk.batches, key=list) == [{"a": ["v1"]}, {"c": ["v1"]}]

    def test_retries_are_exhausted_when_the_count_reaches_the_maximum(self, desk: Desk) -> None:
        for maximum in (0, 1, 3):
            with case(maximum):
                desk.worker.max_retry_count = maximum
                job_id = f"{maximum} retries"
                desk.batches.clear()
                desk.push(job_id)
                desk.push(job_id, payload="v2")
                first = desk.job(job_id).perform_at or 0
                for attempt in range(maximum + 1):
                    assert desk.queue.peek(job_id, "morgue") is None
                    desk.drain(lambda _: lowq.current().fail(job_id, "no"), now=first + 200 * attempt, limit=1)  # noqa: B023
                waiting, buried = desk.queue.places(job_id)
                assert buried.state == "morgue"
                assert (buried.payloads, waiting.payloads) == ([("v1", 1.0)], [("v2", 1.0)])  # the oldest is given up
                desk.queue.delete(job_id)
                assert len(desk.batches) == maximum + 1


class TestRelease:
    def test_a_released_id_waits_again_uncharged(self, desk: Desk) -> None:
        rows: list[tuple[Any, float]] = [(500, 500), (500.0, 500), (timedelta(seconds=90), 90), (-1, 0), (None, 0)]
        for delay, seconds in rows:
            with case(delay):
                desk.queue.clear()
                desk.push("a", "b")
                pushed = desk.job().perform_at or 0
                drained = desk.drain(lambda _: lowq.current().release("a", delay=delay), limit=1)  # noqa: B023
                assert (drained.performed, drained.failed) == (1, 0)
                job = desk.job()
                assert (job.retry_count, job.error, job.payloads) == (-1, None, [("v1", 1.0)])
                assert seconds <= (job.perform_at or 0) - pushed + 0.001 < seconds + 60
                if delay is None:
                    assert job.perform_at == pushed  # it keeps its place

    def test_a_retry_keeps_its_count(self, desk: Desk) -> None:
        desk.push("a")
        first = desk.job().perform_at or 0
        desk.drain(lambda _: lowq.current().fail("a", "no"))
        desk.drain(lambda _: lowq.current().release("a", delay=1), now=first + 1000, limit=1)
        assert desk.job().retry_count == 0


class TestBury:
    def test_a_buried_id_is_in_the_morgue_with_all_its_payloads_and_the_reason(self, desk: Desk) -> None:
        desk.worker.perform_async([{"id": "a", "payload": version, "score": version} for version in (1, 2, 3)])
        desk.drain(lambda _: lowq.current().bury("a", reason="cancelled"))
        job = desk.job()
        assert (job.state, job.error, job.payloads) == ("morgue", "cancelled", [(1, 1.0), (2, 2.0), (3, 3.0)])

    def test_a_reason_with_half_a_character_is_one(self, desk: Desk) -> None:
        desk.push("a")
        desk.drain(lambda _: lowq.current().bury("a", "file \udc80"))
        assert (desk.job().error or "").startswith("file ")

    def test_what_arrived_meanwhile_waits(self, desk: Desk) -> None:
        desk.push("a")

        def handler(payloads_by_id: PayloadsById) -> None:
            desk.push("a", payload="v2")
            lowq.current().bury("a")

        desk.drain(handler, limit=1)
        desk.drain()
        assert desk.batches == [{"a": ["v1"]}, {"a": ["v2"]}]
        assert desk.states("a") == {"a": "morgue"}


def test_the_last_word_on_an_id_counts_and_an_id_may_be_given_as_it_was_pushed(desk: Desk) -> None:
    desk.push("7")

    def handler(payloads_by_id: PayloadsById) -> None:
        lowq.current().done(7)
        lowq.current().bury(7, reason="on second thoughts")

    desk.drain(handler)
    assert desk.job("7").error == "on second thoughts"


DELAYS: list[Any] = ["soon", math.nan, math.inf, True, 1e12, [], 10**5000]
#: What makes no sense: the handler learns of it, as nobody could be told once the batch is over.
SENSELESS: list[tuple[str, tuple[Any, ...], str]] = [
    *(("release", ("a", delay), "delay") for delay in DELAYS),
    *(("bury", ("a", reason), "reason") for reason in (5, None, b"x", ValueError("boom"))),
    *(("fail", ("a", error), "fail") for error in (5, None, ValueError, b"x")),
    *(("touch", (seconds,), "is not a number of seconds") for seconds in (0, -1, timedelta(0), "5", None, math.nan)),
    *(("done", (job_id,), "no such id") for job_id in ("b", 2, "", None)),
    *((verb, ("b", "x"), "no such id") for verb in ("fail", "bury")),
    ("release", ("b",), "no such id"),
]


def test_a_senseless_word_is_refused_and_fails_the_batch_unless_the_handler_goes_on(desk: Desk) -> None:
    for verb, args, message in SENSELESS:
        with case(verb, *args):
            desk.queue.clear()
            desk.push("a")

            def handler(payloads_by_id: PayloadsById) -> None:
                with pytest.raises(LowqError, match=message) as caught:  # noqa: B023  # called in this turn
                    getattr(lowq.current(), verb)(*args)  # noqa: B023
                raise caught.value

            desk.drain(handler, limit=1)
            assert outcome(desk, "a") == ("retrying", 0)
            assert message in (desk.job().error or "")


class TestCurrent:
    def test_it_tells_what_the_queue_knows(self, desk: Desk) -> None:
        desk.worker.perform_async(
            [
                {"id": "a", "payload": "x", "score": 1.5},
                {"id": "a", "payload": "y", "score": 2},
                {"id": "b", "score": 7},
            ]
        )
        waiting = desk.queue.fetch(["a", "b"])
        told: list[Any] = []

        def handler(payloads_by_id: PayloadsById) -> None:
            execution = lowq.current()
            execution.touch(5)
            told.extend([execution.worker, execution.shard, execution.fence, execution.deadline, execution.jobs])

        desk.drain(handler)
        worker, shard, fence, deadline, jobs = told
        assert (worker, shard, deadline) == (desk.worker, 0, None)
        assert isinstance(fence, int)
        assert {job.id: (job.payloads, job.retry_count, job.state) for job in jobs} == {
            "a": ([("x", 1.5), ("y", 2.0)], -1, "taken"),
            "b": ([("", 7.0)], -1, "taken"),
        }
        assert {job.id: job.perform_at for job in jobs} == {key: job.perform_at for key, job in waiting.items()}

    def test_the_fencing_token_grows_with_every_owner(self, desk: Desk) -> None:
        fences: list[int] = []
        for job_id in "abc":
            desk.push(job_id)
            desk.drain(lambda _: fences.append(lowq.current().fence))
        assert fences == sorted(set(fences))
        assert len(fences) == 3

    def test_a_retry_knows_how_often_it_failed(self, desk: Desk) -> None:
        desk.push("a")
        first = desk.job().perform_at or 0
        counts: list[int] = []

        def handler(payloads_by_id: PayloadsById) -> None:
            counts.extend(job.retry_count for job in lowq.current().jobs)
            raise ValueError("boom")

        for attempt in range(3):
            desk.drain(handler, now=first + 200 * attempt)
        assert counts == [-1, 0, 1]

    def test_there_is_none_outside_of_perform_nor_in_another_thread(self, desk: Desk) -> None:
        def ask(*_: object) -> None:
            with pytest.raises(LowqError, match=r"outside of perform; .* use lowq\.testing\.execution"):
                lowq.current()
            asked.append(1)

        def fail(payloads_by_id: PayloadsById) -> None:
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
            raise ValueError("boom")

        asked: list[int] = []
        desk.push("a")
        desk.drain(fail)
        ask()
        assert len(asked) == 2


def test_retry_in_is_seconds_and_nonsense_is_logged_and_the_default_used(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    def divide() -> float:
        raise ZeroDivisionError

    values: list[Any] = [None, "soon", math.nan, math.inf, -math.inf, timedelta(1), [], 10**400, divide]
    rows: list[tuple[Any, float]] = [
        (700, 700), (0, 0), (-3, 0), (2.5, 2.5), (True, 1), (2.0**33, MAX_TIME), (1e300, MAX_TIME),
        *((value, -1) for value in values),
    ]  # fmt: skip
    for value, seconds in rows:
        with case(value):
            desk.queue.clear()
            caplog.clear()
            desk.push("a")
            desk.retry_in = value if callable(value) else itertools.repeat(value).__next__
            pushed = desk.job().perform_at or 0
            desk.drain(lambda _: lowq.current().fail("a", "no"), limit=1)
            delay = (desk.job().perform_at or 0) - pushed
            if seconds == -1:
                assert 15 <= delay <= 15 + 1 + 30 + 60
                assert "Orders.retry_in(0)" in caplog.text
            else:
                assert seconds <= delay + 0.001 < seconds + 60 or seconds == MAX_TIME <= (desk.job().perform_at or 0)
                assert caplog.text == ""
