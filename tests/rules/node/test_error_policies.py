"""What becomes of a job by what its handler raised: `bury_on`, `release_on`, `retry_in`."""

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import lowq
from lowq.errors import RedisUnavailable
from lowq.testing import drain
from lowq.workers import Worker
from tests.rules.thread_rig import ThreadRig
from tests.waiting import PATIENCE

pytestmark = pytest.mark.parametrize("store_url", ["redis"], indirect=True)

PayloadsById = dict[str, list[Any]]


class RateLimited(Exception):
    """The other side wants to be left alone."""


class HardLimited(RateLimited):
    """It insists."""


def make_worker(
    app: lowq.Lowq, error: Callable[[], BaseException], *, is_async: bool = False, **options: Any
) -> type[Worker[Any]]:
    """A worker whose handler raises it, and that retries in 1000 s."""

    class Orders(lowq.Worker[Any]):
        def perform(self, payloads_by_id: PayloadsById) -> None:
            raise error()

        def retry_in(self, retry_count: int) -> float:
            return 1000.0

    class Awaits(Orders):
        async def perform(self, payloads_by_id: PayloadsById) -> None:  # type: ignore[override]  # another form
            raise error()

    return app.worker(**{"shards_count": 1, "queue_name": "Orders", **options})(Awaits if is_async else Orders)


def outcome(worker: type[Worker[Any]], job_id: str = "1") -> tuple[str, int]:
    job = worker.queue.peek(job_id)
    assert job is not None
    return job.state, job.retry_count


def seconds_left(worker: type[Worker[Any]], job_id: str = "1") -> float:
    job = worker.queue.peek(job_id)
    assert job is not None
    assert job.perform_at is not None
    return job.perform_at - time.time()


# --- bury_on, release_on ---


def test_bury_on_buries_at_once_with_the_error(app: lowq.Lowq, is_async: bool) -> None:
    worker = make_worker(app, lambda: ValueError("boom"), is_async=is_async, bury_on=(ValueError,))
    worker.push(1)
    drain(worker, limit=1)
    assert outcome(worker) == ("morgue", -1)
    job = worker.queue.peek(1)
    assert job is not None
    assert "ValueError: boom" in (job.error or "")


def test_release_on_has_it_wait_uncharged(app: lowq.Lowq, is_async: bool) -> None:
    worker = make_worker(app, RateLimited, is_async=is_async, release_on={RateLimited: timedelta(minutes=50)})
    worker.push(1)
    drain(worker, limit=1)
    assert outcome(worker) == ("scheduled", -1)
    assert 2000 < seconds_left(worker) < 4000


def test_in_a_thread_of_a_node_as_well(app: lowq.Lowq, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lowq.node")
    worker = make_worker(app, lambda: RateLimited("slow down"), release_on={RateLimited: 50})
    worker.push(1)
    ThreadRig(app, worker).turn()
    assert outcome(worker) == ("scheduled", -1)
    (record,) = [record for record in caplog.records if "slow down" in record.getMessage()]
    assert (record.levelname, record.exc_info) == ("INFO", None)
    assert "as release_on says: 1, the first in 50 s" in record.getMessage()
    assert (vars(record)["event"], vars(record)["ids"]) == ("released", ["1"])


def test_what_is_buried_is_logged_with_its_error(app: lowq.Lowq, caplog: pytest.LogCaptureFixture) -> None:
    worker = make_worker(app, lambda: ValueError("boom"), bury_on=(ValueError,))
    worker.push(1)
    ThreadRig(app, worker).turn()
    assert outcome(worker) == ("morgue", -1)
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "in the morgue: 1" in record.getMessage()
    assert record.exc_info is not None


def test_a_retry_is_a_warning_in_one_line_and_the_morgue_an_error_with_the_traceback(
    app: lowq.Lowq, caplog: pytest.LogCaptureFixture
) -> None:
    class Wordy(Exception):
        def __repr__(self) -> str:
            return "many\nlines"

    def fail_by_name(payloads_by_id: PayloadsById) -> None:
        lowq.current().fail("1", Wordy())

    def fail_at_the_end(payloads_by_id: PayloadsById) -> None:
        lowq.current().done("1")
        raise Wordy

    def fail(payloads_by_id: PayloadsById) -> None:
        raise Wordy

    caplog.set_level(logging.DEBUG, "lowq.node")
    for handle, retries, said in (
        (fail, 1, [("WARNING", False), ("DEBUG", True)]),
        (fail, 0, [("ERROR", True)]),
        (fail_by_name, 1, [("WARNING", False), ("DEBUG", True)]),
        (fail_by_name, 0, [("ERROR", True)]),
        (fail_at_the_end, 1, [("ERROR", True)]),  # nobody will see it fail again
    ):
        name = f"{handle.__name__}-{retries}"

        @app.worker(shards_count=1, queue_name=name, max_retry_count=retries)
        class Orders(lowq.Worker[Any]):
            def perform(self, payloads_by_id: PayloadsById) -> None:
                handle(payloads_by_id)  # noqa: B023  # called in this turn of the loop

        caplog.clear()
        Orders.push(1)
        ThreadRig(app, Orders).turn()
        records = [record for record in caplog.records if vars(record).get("event") == "failed"]
        assert [(record.levelname, bool(record.exc_info)) for record in records] == said, name
        assert not [record for record in records if "\n" in record.getMessage()], name


@pytest.mark.parametrize(
    ("error", "state"), [(RateLimited, "scheduled"), (HardLimited, "morgue"), (LookupError, "retrying")]
)
def test_the_nearest_class_counts(app: lowq.Lowq, error: type[Exception], state: str) -> None:
    worker = make_worker(app, error, bury_on=[HardLimited], release_on={RateLimited: 50})
    worker.push(1)
    drain(worker, limit=1)
    assert outcome(worker)[0] == state


def test_a_batch_that_is_to_be_buried_is_tried_id_by_id_first(app: lowq.Lowq) -> None:
    def perform(payloads_by_id: PayloadsById) -> None:
        if "b" in payloads_by_id:
            raise ValueError("boom")

    worker = app.worker(shards_count=1, batch_size=3, bury_on=(ValueError,))(perform)
    worker.perform_async({"id": job_id} for job_id in "abc")
    drain(worker)
    assert [worker.queue.peek(job_id) is None for job_id in "ac"] == [True, True]
    assert outcome(worker, "b") == ("morgue", -1)


def test_a_batch_that_is_to_be_released_is_so_as_a_whole(app: lowq.Lowq) -> None:
    def perform(payloads_by_id: PayloadsById) -> None:
        lowq.current().done("a")
        raise RateLimited

    worker = app.worker(shards_count=1, batch_size=3, release_on={RateLimited: 50})(perform)
    worker.perform_async({"id": job_id} for job_id in "abc")
    assert drain(worker).batches == 1
    assert worker.queue.peek("a") is None
    assert [outcome(worker, job_id) for job_id in "bc"] == [("scheduled", -1)] * 2


def test_each_id_of_perform_one_by_its_own_error(app: lowq.Lowq) -> None:
    errors = {"a": ValueError("boom"), "b": RateLimited(), "c": KeyError("boom")}

    def perform_one(job_id: str, payloads: list[Any]) -> None:
        if job_id in errors:
            raise errors[job_id]

    worker = app.worker(shards_count=1, batch_size=4, bury_on=(ValueError,), release_on={RateLimited: 50})(perform_one)
    worker.perform_async({"id": job_id} for job_id in "abcd")
    assert drain(worker, limit=1).batches == 1
    assert [outcome(worker, job_id) for job_id in "abc"] == [("morgue", -1), ("scheduled", -1), ("retrying", 0)]
    assert worker.queue.peek("d") is None


def test_errors_that_the_handler_names_fall_under_them_and_texts_do_not(app: lowq.Lowq) -> None:
    def perform(payloads_by_id: PayloadsById) -> None:
        batch = lowq.current()
        batch.fail("a", ValueError("boom"))
        batch.fail("b", RateLimited())
        batch.fail("c", "ValueError")

    worker = app.worker(shards_count=1, batch_size=3, bury_on=(ValueError,), release_on={RateLimited: 50})(perform)
    worker.perform_async({"id": job_id} for job_id in "abc")
    drain(worker, limit=1)
    assert [outcome(worker, job_id) for job_id in "abc"] == [("morgue", -1), ("scheduled", -1), ("retrying", 0)]


def test_a_redis_that_is_away_buries_nothing(app: lowq.Lowq) -> None:
    worker = make_worker(app, lambda: RedisUnavailable("away"), bury_on=(Exception,))
    worker.push(1)
    drain(worker, limit=1)
    assert outcome(worker) == ("due", -1)


def test_an_error_that_stops_the_process_falls_under_none(app: lowq.Lowq) -> None:
    worker = make_worker(app, KeyboardInterrupt, bury_on=(Exception,), release_on={lowq.TimeLimitExceeded: 50})
    worker.push(1)
    with pytest.raises(KeyboardInterrupt):
        drain(worker, limit=1)
    job = worker.queue.peek(1)
    assert job is not None
    assert job.crashes == 1


# --- an application's ---


def test_the_applications_hold_where_a_worker_says_nothing(app: lowq.Lowq) -> None:
    app.config.bury_on = (ValueError,)
    app.config.release_on = {RateLimited: 50}
    buried = make_worker(app, ValueError, queue_name="Buried")
    released = make_worker(app, RateLimited, queue_name="Released", bury_on=(KeyError,))
    retried = make_worker(app, ValueError, queue_name="Retried", bury_on=())
    charged = make_worker(app, RateLimited, queue_name="Charged", release_on={})
    own = make_worker(app, ValueError, queue_name="Own", release_on={ValueError: 50})
    states = {}
    for worker in (buried, released, retried, charged, own):
        worker.push(1)
        drain(worker, limit=1)
        states[worker.queue_name] = outcome(worker)[0]
    assert states == {
        "Buried": "morgue", "Released": "scheduled", "Retried": "retrying", "Charged": "retrying", "Own": "scheduled",
    }  # fmt: skip


# --- retry_in ---


def test_retry_in_is_told_the_error(app: lowq.Lowq, is_async: bool) -> None:
    told: list[Any] = []

    class Orders(lowq.Worker[Any]):
        def perform(self, payloads_by_id: PayloadsById) -> None:
            raise RateLimited("slow down")

        def retry_in(self, retry_count: int, error: BaseException | str) -> float:
            told.append((retry_count, type(error), str(error)))
            return 500

    class Awaits(Orders):
        async def perform(self, payloads_by_id: PayloadsById) -> None:  # type: ignore[override]  # another form
            raise RateLimited("slow down")

    worker = app.worker(shards_count=1)(Awaits if is_async else Orders)
    worker.push(1)
    drain(worker, limit=1)
    assert told == [(0, RateLimited, "slow down")]
    assert 300 < seconds_left(worker) < 700


def test_retry_in_is_told_what_the_handler_said(app: lowq.Lowq) -> None:
    told: list[Any] = []

    class Orders(lowq.Worker[Any]):
        def perform(self, payloads_by_id: PayloadsById) -> None:
            lowq.current().fail("1", "no")

        def retry_in(self, retry_count: int, error: BaseException | str | None = None) -> float:
            told.append(error)
            return 500

    worker = app.worker(shards_count=1)(Orders)
    worker.push(1)
    drain(worker, limit=1)
    assert told == ["no"]


def test_the_error_is_for_a_parameter_that_must_be_given_or_is_called_error(app: lowq.Lowq) -> None:
    def with_base(retry_count: int, base: float = 9) -> float:
        return base + 991

    def with_two(retry_count: int, base: float = 9, error: object = None) -> float:
        return base + 991

    def with_any(retry_count: int, *rest: object) -> float:
        return 1000 if isinstance(rest[0], KeyError) else 0

    def with_error(retry_count: int, error: object = None) -> float:
        return 1000 if isinstance(error, KeyError) else 0

    def with_another_name(retry_count: int, reason: object) -> float:
        return 1000 if isinstance(reason, KeyError) else 0

    for retry_in in (with_base, with_two, with_any, with_error, with_another_name):
        own = staticmethod(retry_in)

        class Orders(lowq.Worker[Any]):
            retry_in = own

            def perform(self, payloads_by_id: PayloadsById) -> None:
                raise KeyError("boom")

        worker = app.worker(shards_count=1, queue_name=retry_in.__name__)(Orders)
        worker.push(1)
        drain(worker)
        assert seconds_left(worker) == pytest.approx(1000, abs=PATIENCE), retry_in


@pytest.mark.parametrize(
    "retry_in", [lambda retry_count, _error: 500 + retry_count, lambda retry_count: 500 + retry_count]
)
def test_the_applications_retry_in_holds_where_a_worker_has_none(app: lowq.Lowq, retry_in: Any) -> None:
    app.config.retry_in = retry_in

    @app.worker(shards_count=1)
    def orders(payloads_by_id: PayloadsById) -> None:
        raise ValueError("boom")

    own = make_worker(app, ValueError, queue_name="Own")
    for worker in (orders, own):
        worker.push(1)
        drain(worker, limit=1)
    assert 300 < seconds_left(orders) < 700
    assert seconds_left(own) > 800


def test_an_applications_retry_in_that_fails_is_logged_and_the_default_used(
    app: lowq.Lowq, caplog: pytest.LogCaptureFixture
) -> None:
    app.config.retry_in = lambda _retry_count, _error: 1 / 0

    @app.worker(shards_count=1)
    def orders(payloads_by_id: PayloadsById) -> None:
        raise ValueError("boom")

    orders.push(1)
    drain(orders, limit=1)
    assert outcome(orders) == ("retrying", 0)
    assert "orders.retry_in(0) failed for id '1'; the default is used" in caplog.text
