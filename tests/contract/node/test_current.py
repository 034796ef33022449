"""What a handler says of single ids with lowq.current(), and what becomes of them in the queue, on both stores."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

import lowq
import lowq.testing
from lowq.errors import LowqError
from lowq.testing import drain

PayloadsById = dict[str, list[Any]]


class Desk:
    """A worker `Orders` of one shard, whose handler each test sets."""

    def __init__(self, store_url: str) -> None:
        self.app = lowq.Lowq(redis_url=store_url)
        self.handler: Callable[[PayloadsById], None] = self.seen_by_default
        self.batches: list[PayloadsById] = []
        desk = self

        @self.app.worker(shards_count=1, batch_size=10, max_retry_count=2)
        class Orders(lowq.Worker[Any]):
            def perform(self, payloads_by_id: PayloadsById) -> None:
                desk.batches.append(dict(payloads_by_id))
                desk.handler(payloads_by_id)

            def retry_in(self, retry_count: int) -> float:
                return 100.0

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


class TestDone:
    def test_an_id_that_is_done_stays_done_though_perform_raises(self, desk: Desk) -> None:
        desk.push("a", "b")

        def handler(payloads_by_id: PayloadsById) -> None:
            lowq.current().done("a")
            raise ValueError("boom")

        drained = desk.drain(handler, limit=1)
        assert (drained.performed, drained.failed) == (1, 1)
        assert desk.states("a", "b") == {"a": None, "b": "due"}
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
    def test_only_the_named_id_is_charged_and_the_others_are_finished(self, desk: Desk) -> None:
        desk.push("a", "b", "c")
        drained = desk.drain(lambda _: lowq.current().fail("b", ValueError("no such order")))
        assert (drained.performed, drained.failed) == (2, 1)
        assert desk.states("a", "b", "c") == {"a": None, "b": "retrying", "c": None}
        job = desk.queue.peek("b")
        assert job is not None
        assert (job.retry_count, job.payloads) == (0, [("v1", 1.0)])
        assert job.error is not None
        assert "ValueError: no such order" in job.error

    def test_when_perform_raises_too_the_others_are_tried_alone_uncharged(self, desk: Desk) -> None:
        desk.push("a", "b", "c")

        def handler(payloads_by_id: PayloadsById) -> None:
            lowq.current().fail("b", "no such order")
            raise ValueError("boom")

        assert desk.drain(handler, limit=1).failed == 3
        assert desk.retry_counts("a", "b", "c") == {"a": -1, "b": 0, "c": -1}
        desk.batches.clear()
        desk.drain()
        assert sorted(desk.batches, key=list) == [{"a": ["v1"]}, {"c": ["v1"]}]

    def test_its_error_may_be_a_text(self, desk: Desk) -> None:
        desk.push("a")
        desk.drain(lambda _: lowq.current().fail("a", "no such order"))
        job = desk.queue.peek("a")
        assert job is not None
        assert job.error == "no such order"

    def test_retries_are_exhausted_by_it_too(self, desk: Desk) -> None:
        desk.push("a")
        now = desk.queue.peek("a")
        assert now is not None
        assert now.perform_at is not None
        for attempt in range(3):
            desk.drain(lambda _: lowq.current().fail("a", "no"), now=now.perform_at + 200 * attempt)
        assert desk.states("a") == {"a": "morgue"}
        assert len(desk.batches) == 3


class TestRelease:
    def test_a_released_id_waits_again_uncharged(self, desk: Desk) -> None:
        desk.push("a", "b")
        drained = desk.drain(lambda _: lowq.current().release("a", delay=500))
        assert (drained.performed, drained.failed) == (1, 0)
        assert desk.states("a", "b") == {"a": "scheduled", "b": None}
        job = desk.queue.peek("a")
        assert job is not None
        assert (job.retry_count, job.error, job.payloads) == (-1, None, [("v1", 1.0)])

    @pytest.mark.parametrize("delay", [500, 500.0, timedelta(seconds=500)])
    def test_for_as_long_as_it_says(self, desk: Desk, delay: Any) -> None:
        desk.push("a")
        pushed = desk.queue.peek("a")
        desk.drain(lambda _: lowq.current().release("a", delay=delay))
        job = desk.queue.peek("a")
        assert job is not None
        assert pushed is not None
        assert 499 < (job.perform_at or 0) - (pushed.perform_at or 0) < 560

    def test_without_a_delay_it_keeps_its_place(self, desk: Desk) -> None:
        desk.push("a")
        pushed = desk.queue.peek("a")
        desk.drain(lambda _: lowq.current().release("a"), limit=1)
        job = desk.queue.peek("a")
        assert pushed is not None
        assert job is not None
        assert (job.state, job.perform_at, job.retry_count) == ("due", pushed.perform_at, -1)

    def test_a_retry_keeps_its_count(self, desk: Desk) -> None:
        desk.push("a")
        first = desk.queue.peek("a")
        assert first is not None
        assert first.perform_at is not None
        desk.drain(lambda _: lowq.current().fail("a", "no"))
        desk.drain(lambda _: lowq.current().release("a", delay=1), now=first.perform_at + 1000, limit=1)
        assert desk.retry_counts("a") == {"a": 0}


class TestBury:
    def test_a_buried_id_is_in_the_morgue_with_all_its_payloads_and_the_reason(self, desk: Desk) -> None:
        desk.worker.perform_async([{"id": "a", "payload": version, "score": version} for version in (1, 2, 3)])
        desk.push("b")
        drained = desk.drain(lambda _: lowq.current().bury("a", reason="cancelled"))
        assert (drained.performed, drained.failed) == (1, 0)
        job = desk.queue.peek("a")
        assert job is not None
        assert (job.state, job.error, job.payloads) == ("morgue", "cancelled", [(1, 1.0), (2, 2.0), (3, 3.0)])
        assert desk.states("b") == {"b": None}

    def test_what_arrived_meanwhile_waits(self, desk: Desk) -> None:
        desk.push("a")

        def handler(payloads_by_id: PayloadsById) -> None:
            desk.push("a", payload="v2")
            lowq.current().bury("a")

        desk.drain(handler, limit=1)
        desk.drain()
        assert desk.batches == [{"a": ["v1"]}, {"a": ["v2"]}]
        assert desk.states("a") == {"a": "morgue"}


class TestTogether:
    def test_each_id_gets_its_own_word_and_the_last_one_counts(self, desk: Desk) -> None:
        desk.push("done", "fail", "release", "bury", "silent")

        def handler(payloads_by_id: PayloadsById) -> None:
            execution = lowq.current()
            execution.done("fail")
            execution.done("done")
            execution.fail("fail", "no")
            execution.release("release", delay=500)
            execution.bury("bury", reason="enough")
            raise ValueError("boom")

        drained = desk.drain(handler, limit=1)
        assert (drained.performed, drained.failed, drained.batches) == (1, 2, 1)
        assert desk.states("done", "fail", "release", "bury", "silent") == {
            "done": None,
            "fail": "retrying",
            "release": "scheduled",
            "bury": "morgue",
            "silent": "due",
        }
        assert desk.retry_counts("fail", "release", "silent") == {"fail": 0, "release": -1, "silent": -1}

    def test_a_senseless_word_fails_the_batch_and_not_the_shard(self, desk: Desk) -> None:
        desk.push("a")
        desk.drain(lambda _: lowq.current().release("a", delay=float("nan")))
        assert desk.retry_counts("a") == {"a": 0}
        job = desk.queue.peek("a")
        assert job is not None
        assert job.error is not None
        assert "delay" in job.error

    def test_a_word_of_an_id_of_another_batch_is_refused(self, desk: Desk) -> None:
        desk.push("a")
        caught: list[LowqError] = []

        def handler(payloads_by_id: PayloadsById) -> None:
            try:
                lowq.current().done("b")
            except LowqError as error:
                caught.append(error)

        assert desk.drain(handler).performed == 1
        assert "no such id" in str(caught[0])


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
            told.extend([execution.worker, execution.shard, execution.fence, execution.jobs])

        desk.drain(handler)
        worker, shard, fence, jobs = told
        assert (worker, shard) == (desk.worker, 0)
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
        first = desk.queue.peek("a")
        assert first is not None
        assert first.perform_at is not None
        counts: list[int] = []

        def handler(payloads_by_id: PayloadsById) -> None:
            counts.extend(job.retry_count for job in lowq.current().jobs)
            raise ValueError("boom")

        for attempt in range(3):
            desk.drain(handler, now=first.perform_at + 200 * attempt)
        assert counts == [-1, 0, 1]
