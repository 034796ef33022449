"""What a handler logs says which job it is about; and the lines for jobs that begin and end."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import lowq
from lowq.testing import drain
from lowq.workers import Worker
from tests.rules.node.conftest import MakeApp
from tests.rules.node.drivers import Driver

PayloadsById = dict[str, list[Any]]
log = logging.getLogger("shop")
FIELDS = ("queue", "shard", "ids", "delivery")


class Kept(logging.Handler):
    """Keeps the records that it gets, as an application's own handler."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.addFilter(lowq.LogContext())

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def fields(self) -> list[dict[str, Any]]:
        """Of what the handlers of the test have logged."""
        return [
            {name: getattr(record, name) for name in (*FIELDS, "ids_count") if hasattr(record, name)}
            for record in self.records
            if record.name == "shop"
        ]


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler, root = Kept(), logging.getLogger()
    root.addHandler(handler)
    level = log.level
    log.setLevel(logging.INFO)
    yield handler
    root.removeHandler(handler)
    log.setLevel(level)


def push(worker: type[Worker[Any]], *ids: str) -> None:
    worker.perform_async({"id": job_id, "score": 1} for job_id in ids)


def test_records_of_a_handler_carry_queue_shard_some_ids_and_delivery(
    app: lowq.Lowq, kept: Kept, driver: Driver
) -> None:
    deliveries: list[int] = []

    def handler(payloads_by_id: PayloadsById) -> None:
        deliveries.append(lowq.current().delivery)
        log.info("selling %s", [*payloads_by_id])

    worker = driver.worker(app, handler, batch_size=50)
    push(worker, *(f"{n:02}" for n in range(12)))
    log.info("before")
    driver.perform(app, worker)
    log.info("after")
    (delivery,) = deliveries
    assert delivery > 0
    ids = [f"{n:02}" for n in range(10)]
    assert kept.fields() == [{}, {"queue": "Orders", "shard": 0, "ids": ids, "delivery": delivery, "ids_count": 12}, {}]


def test_each_task_has_its_own_also_in_threads_that_it_uses(app: lowq.Lowq, kept: Kept) -> None:
    @app.worker(shards_count=1)
    async def orders(payloads_by_id: PayloadsById) -> None:
        log.info("in the loop")
        await asyncio.to_thread(log.info, "in a thread")

    push(orders, "a", "b")
    drain(orders)
    assert [fields["ids"] for fields in kept.fields()] == [["a"], ["a"], ["b"], ["b"]]


def test_in_perform_one_it_is_the_id_that_is_performed(make_app: MakeApp, kept: Kept) -> None:
    def around(_worker: Any, _batch: Any, call_next: Callable[[], None]) -> None:
        log.info("around it")
        call_next()
        log.info("around it")

    @make_app(server_middlewares=[around]).worker(shards_count=1, batch_size=3)
    def orders(job_id: str, payloads: list[Any]) -> None:
        log.info("selling")

    push(orders, "a", "b", "c")
    drain(orders)
    every = ["a", "b", "c"]
    assert [fields["ids"] for fields in kept.fields()] == [every, ["a"], ["b"], ["c"], every]


def test_what_a_record_has_stays_and_a_test_that_calls_a_handler_has_it_as_well(app: lowq.Lowq, kept: Kept) -> None:
    @app.worker(queue_name="Orders")
    def orders(payloads_by_id: PayloadsById) -> None:
        log.info("selling", extra={"queue": "till"})

    with lowq.testing.execution(orders, {"a": [1]}):
        orders().perform({"a": [1]})
    assert kept.fields() == [{"queue": "till", "shard": 0, "ids": ["a"], "delivery": 0}]


# --- a line for each job that begins, and that ends ---


def of_jobs(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name in ("lowq.jobs", "shop")]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Without the seconds."""
    return [record.getMessage().removeprefix("Orders:0: id ").partition(",")[0] for record in of_jobs(caplog)]


def test_at_debug_each_job_has_a_line_when_it_begins_and_when_it_ends(
    app: lowq.Lowq, caplog: pytest.LogCaptureFixture, driver: Driver
) -> None:
    caplog.set_level(logging.DEBUG, "lowq.jobs")
    deliveries: list[int] = []

    def handler(payloads_by_id: PayloadsById) -> None:
        batch = lowq.current()
        deliveries.append(batch.delivery)
        batch.fail("b", "no")
        batch.release("c", 50)
        batch.bury("d")
        raise ValueError("boom")

    worker = driver.worker(app, handler, max_retry_count=1)
    push(worker, *"abcd")
    driver.perform(app, worker)
    ends = ["a ends: solo", "b ends: failed", "c ends: released", "d ends: buried"]
    assert lines(caplog)[:8] == [*(f"{job_id} begins" for job_id in "abcd"), *ends]
    for record, event, job_id in ((of_jobs(caplog)[0], "job_start", "a"), (of_jobs(caplog)[7], "job_end", "d")):
        said = {name: vars(record)[name] for name in ("event", *FIELDS)}
        assert said == {"event": event, "queue": "Orders", "shard": 0, "ids": [job_id], "delivery": deliveries[0]}
    assert vars(of_jobs(caplog)[7])["outcome"] == "buried"
    assert vars(of_jobs(caplog)[7])["seconds"] >= 0


def test_in_perform_one_each_id_begins_when_it_is_called(
    app: lowq.Lowq, caplog: pytest.LogCaptureFixture, driver: Driver
) -> None:
    caplog.set_level(logging.INFO, "shop")
    caplog.set_level(logging.DEBUG, "lowq.jobs")

    def handler(job_id: str, payloads: list[Any]) -> None:
        log.info("selling %s", job_id)
        if job_id == "b":
            raise ValueError("boom")

    worker = driver.worker(app, handler, per_id=True, max_retry_count=0)
    push(worker, *"ab")
    driver.perform(app, worker)
    assert lines(caplog) == ["a begins", "selling a", "b begins", "selling b", "a ends: finished", "b ends: exhausted"]


def test_without_debug_nothing_is_made(app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    def never(*_args: Any) -> None:
        raise AssertionError("a line was made that nobody wants")

    for made in ("Batch", "ObservedBatch", "ObservedJob"):
        monkeypatch.setattr(f"lowq.observe.events.{made}", never)
    worker = driver.worker(app, lambda *_: None, per_id=True)
    push(worker, *"ab")
    driver.perform(app, worker)
    assert worker.queue.stats().processed == 2
