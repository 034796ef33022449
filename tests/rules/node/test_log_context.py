"""What a handler logs says which job it is about; and the lines for jobs that begin and end."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import lowq
from lowq.node import job_log
from lowq.testing import drain
from lowq.workers import Worker
from tests.rules.thread_rig import ThreadRig

pytestmark = pytest.mark.parametrize("store_url", ["redis"], indirect=True)

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


def by_drain(_app: lowq.Lowq, worker: type[Worker[Any]]) -> None:
    drain(worker)


def in_a_thread(app: lowq.Lowq, worker: type[Worker[Any]]) -> None:
    ThreadRig(app, worker).turn()


def push(worker: type[Worker[Any]], *ids: str) -> None:
    worker.perform_async({"id": job_id, "score": 1} for job_id in ids)


@pytest.mark.parametrize("perform", [by_drain, in_a_thread])
def test_records_of_a_handler_carry_queue_shard_ids_and_delivery(
    app: lowq.Lowq, kept: Kept, perform: Callable[[lowq.Lowq, type[Worker[Any]]], object]
) -> None:
    deliveries: list[int] = []

    @app.worker(shards_count=1, batch_size=2, queue_name="Orders")
    def orders(payloads_by_id: PayloadsById) -> None:
        deliveries.append(lowq.current().delivery)
        log.info("selling %s", [*payloads_by_id])

    push(orders, "a", "b")
    log.info("before")
    perform(app, orders)
    log.info("after")
    assert len(deliveries) == 1
    assert deliveries[0] > 0
    fields = {"queue": "Orders", "shard": 0, "ids": ["a", "b"], "delivery": deliveries[0]}
    assert kept.fields() == [{}, fields, {}]


def test_each_task_has_its_own_also_in_threads_that_it_uses(app: lowq.Lowq, kept: Kept) -> None:
    @app.worker(shards_count=1)
    async def orders(payloads_by_id: PayloadsById) -> None:
        log.info("in the loop")
        await asyncio.to_thread(log.info, "in a thread")

    push(orders, "a", "b")
    drain(orders)
    assert [fields["ids"] for fields in kept.fields()] == [["a"], ["a"], ["b"], ["b"]]


def test_the_ids_are_bounded(app: lowq.Lowq, kept: Kept) -> None:
    @app.worker(shards_count=1, batch_size=50)
    def orders(payloads_by_id: PayloadsById) -> None:
        log.info("selling")

    push(orders, *(f"{n:02}" for n in range(12)))
    drain(orders)
    (fields,) = kept.fields()
    assert fields["ids"] == [f"{n:02}" for n in range(10)]
    assert fields["ids_count"] == 12


def test_in_perform_one_it_is_the_id_that_is_performed(app: lowq.Lowq, kept: Kept) -> None:
    def around(_worker: Any, _batch: Any, call_next: Callable[[], None]) -> None:
        log.info("around it")
        call_next()
        log.info("around it")

    app.config.server_middlewares = [around]

    @app.worker(shards_count=1, batch_size=3)
    def orders(job_id: str, payloads: list[Any]) -> None:
        log.info("selling")

    push(orders, "a", "b", "c")
    drain(orders)
    every = ["a", "b", "c"]
    assert [fields["ids"] for fields in kept.fields()] == [every, ["a"], ["b"], ["c"], every]


def test_what_a_record_has_stays(app: lowq.Lowq, kept: Kept) -> None:
    @app.worker(shards_count=1, queue_name="Orders")
    def orders(payloads_by_id: PayloadsById) -> None:
        log.info("selling", extra={"queue": "till", "ids": 7})

    push(orders, "a")
    drain(orders)
    (fields,) = kept.fields()
    assert (fields["queue"], fields["ids"], fields["shard"]) == ("till", 7, 0)


def test_a_handler_that_is_called_by_a_test_has_it_as_well(app: lowq.Lowq, kept: Kept) -> None:
    @app.worker(queue_name="Orders")
    def orders(payloads_by_id: PayloadsById) -> None:
        log.info("selling")

    with lowq.testing.execution(orders, {"a": [1]}):
        orders().perform({"a": [1]})
    assert kept.fields() == [{"queue": "Orders", "shard": 0, "ids": ["a"], "delivery": 0}]


# --- a line for each job that begins, and that ends ---


def of_jobs(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name in ("lowq.jobs", "shop")]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Without the seconds."""
    return [record.getMessage().partition(",")[0] for record in of_jobs(caplog)]


@pytest.mark.parametrize("perform", [by_drain, in_a_thread])
def test_at_debug_each_job_has_a_line_when_it_begins_and_when_it_ends(
    app: lowq.Lowq, caplog: pytest.LogCaptureFixture, perform: Callable[[lowq.Lowq, type[Worker[Any]]], object]
) -> None:
    caplog.set_level(logging.DEBUG, "lowq.jobs")
    deliveries: list[int] = []

    @app.worker(shards_count=1, batch_size=10, queue_name="Orders", max_retry_count=1)
    def orders(payloads_by_id: PayloadsById) -> None:
        batch = lowq.current()
        deliveries.append(batch.delivery)
        batch.fail("b", "no")
        batch.release("c", 50)
        batch.bury("d")

    push(orders, *"abcd")
    perform(app, orders)
    assert lines(caplog) == [
        *(f"Orders:0: id {job_id} begins" for job_id in "abcd"),
        "Orders:0: id a ends: finished", "Orders:0: id b ends: failed", "Orders:0: id c ends: released",
        "Orders:0: id d ends: buried",
    ]  # fmt: skip
    first, *_, last = map(vars, of_jobs(caplog))
    assert {name: first[name] for name in ("event", *FIELDS)} == {
        "event": "job_start", "queue": "Orders", "shard": 0, "ids": ["a"], "delivery": deliveries[0],
    }  # fmt: skip
    assert {name: last[name] for name in ("event", *FIELDS, "outcome")} == {
        "event": "job_end", "queue": "Orders", "shard": 0, "ids": ["d"], "delivery": deliveries[0], "outcome": "buried",
    }  # fmt: skip
    assert last["seconds"] >= 0


def test_what_is_tried_again_alone_and_what_is_given_up_says_so(
    app: lowq.Lowq, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "lowq.jobs")

    @app.worker(shards_count=1, batch_size=10, queue_name="Orders", max_retry_count=0)
    async def orders(payloads_by_id: PayloadsById) -> None:
        if "b" in payloads_by_id:
            raise ValueError("boom")

    push(orders, *"ab")
    drain(orders)
    assert lines(caplog)[:4] == [
        "Orders:0: id a begins", "Orders:0: id b begins", "Orders:0: id a ends: solo", "Orders:0: id b ends: solo",
    ]  # fmt: skip
    assert sorted(lines(caplog)[4:]) == [
        "Orders:0: id a begins", "Orders:0: id a ends: finished", "Orders:0: id b begins",
        "Orders:0: id b ends: exhausted",
    ]  # fmt: skip


def test_in_perform_one_each_id_begins_when_it_is_called(app: lowq.Lowq, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shop")
    caplog.set_level(logging.DEBUG, "lowq.jobs")

    @app.worker(shards_count=1, batch_size=10, queue_name="Orders")
    def orders(job_id: str, payloads: list[Any]) -> None:
        log.info("selling %s", job_id)

    push(orders, *"ab")
    drain(orders)
    assert lines(caplog) == [
        "Orders:0: id a begins", "selling a", "Orders:0: id b begins", "selling b",
        "Orders:0: id a ends: finished", "Orders:0: id b ends: finished",
    ]  # fmt: skip


def test_without_debug_nothing_is_made(app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_args: Any) -> None:
        raise AssertionError("a line was made that nobody wants")

    monkeypatch.setattr(job_log, "begins", never)
    monkeypatch.setattr(job_log, "ends", never)

    @app.worker(shards_count=1, batch_size=10)
    def orders(job_id: str, payloads: list[Any]) -> None: ...

    push(orders, *"ab")
    assert drain(orders).performed == 2
    push(orders, *"ab")
    in_a_thread(app, orders)
