"""What Sentry is told of: each error once, where an id is charged for it."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import sentry_sdk
from sentry_sdk.envelope import Envelope
from sentry_sdk.integrations.dedupe import DedupeIntegration
from sentry_sdk.integrations.logging import LoggingIntegration
from sentry_sdk.transport import Transport

import lowq
import lowq.contrib.sentry
from lowq.broker.lease import Lease
from lowq.broker.shard import shards_of
from lowq.errors import ConfigError, LeaseLost
from lowq.job import Job
from lowq.node.activity import ThreadActivity
from lowq.node.execution import WorkerRuntime, aperform
from lowq.observers import Batch, BatchObservation, Observer, PushObservation
from lowq.testing import drain
from lowq.workers import Worker
from tests.contract.contrib.workers import Handler, make_worker
from tests.contract.support import TTL
from tests.contract.thread_rig import ThreadRig
from tests.leases import run_out
from tests.waiting import PATIENCE


class Sent:
    """What Sentry was sent."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def errors(self) -> list[tuple[str, list[str]]]:
        """Of each event: the exception or the message, and the ids."""
        return [(_said(event), event["contexts"]["lowq"]["ids"]) for event in self.events]

    def only(self) -> Any:
        (event,) = self.events
        return event


def _said(event: Mapping[str, Any]) -> str:
    if "exception" in event:
        return str(event["exception"]["values"][-1]["type"])
    return str(event.get("message") or event["logentry"]["formatted"])


@pytest.fixture
def sent() -> Iterator[Sent]:
    found = Sent()

    class Memory(Transport):
        def capture_envelope(self, envelope: Envelope) -> None:
            event = envelope.get_event()
            if event is not None:
                found.events.append(event)

    sentry_sdk.init(
        dsn="http://key@localhost/1", transport=Memory, default_integrations=False,
        integrations=[LoggingIntegration(), DedupeIntegration()],
    )  # fmt: skip
    yield found
    sentry_sdk.get_global_scope().set_client(None)


@pytest.fixture
def store_url(redis_url: str) -> str:
    """One store will do: none sees what is captured."""
    return redis_url


@pytest.fixture
def app(store_url: str) -> Iterator[lowq.Lowq]:
    app = lowq.Lowq(redis_url=store_url)
    lowq.contrib.sentry.instrument(app)
    yield app
    app.close()


def push(worker: type[Worker[Any]], *ids: str) -> None:
    worker.perform_async({"id": job_id, "payload": f"of {job_id}", "score": 1} for job_id in ids)


def fail_for(job_id: str, error: Callable[[], BaseException] = lambda: ValueError("boom")) -> Handler:
    def handler(payloads_by_id: dict[str, list[Any]]) -> None:
        if job_id in payloads_by_id:
            raise error()

    return handler


def test_an_error_of_a_batch_is_captured_once_for_the_id_that_is_charged(
    app: lowq.Lowq, sent: Sent, is_async: bool
) -> None:
    worker = make_worker(app, fail_for("b"), is_async=is_async)
    push(worker, "a", "b", "c")
    assert drain(worker).batches == 4, "the three, then each alone"
    event = sent.only()
    assert event["exception"]["values"][0]["mechanism"] == {"type": "lowq", "handled": False}
    assert event["tags"] == {
        "lowq.queue": "Orders", "lowq.shard": "0", "lowq.worker": worker.__name__, "lowq.id": "b",
        "lowq.buried": "false",
    }  # fmt: skip
    assert event["contexts"]["lowq"]["delivery"] >= 2
    assert {name: event["contexts"]["lowq"][name] for name in ("queue", "shard", "ids", "retry_count", "verdict")} == {
        "queue": "Orders", "shard": 0, "ids": ["b"], "retry_count": 0, "verdict": "retry",
    }  # fmt: skip


def test_a_retry_that_fails_is_an_event_of_its_own_and_the_last_one_is_marked_as_buried(
    app: lowq.Lowq, sent: Sent, is_async: bool
) -> None:
    worker = make_worker(app, fail_for("b"), is_async=is_async, max_retry_count=1)
    push(worker, "b")
    drain(worker)
    drain(worker, now=4e9)
    contexts = [event["contexts"]["lowq"] for event in sent.events]
    assert [(context["retry_count"], context["verdict"]) for context in contexts] == [(0, "retry"), (1, "exhausted")]
    assert [event["tags"]["lowq.buried"] for event in sent.events] == ["false", "true"]


def test_perform_one_has_an_event_for_each_id_and_a_scope_as_well(app: lowq.Lowq, sent: Sent, is_async: bool) -> None:
    def perform(job_id: str) -> None:
        sentry_sdk.set_tag(f"saw.{job_id}", "yes")
        sentry_sdk.add_breadcrumb(message=f"crumb of {job_id}")
        if job_id != "b":
            raise ValueError(job_id)

    class Plain(lowq.Worker[Any]):
        def perform_one(self, job_id: str, payloads: list[Any]) -> None:
            perform(job_id)

    class Awaits(lowq.Worker[Any]):
        async def perform_one(self, job_id: str, payloads: list[Any]) -> None:
            await asyncio.sleep(0)
            perform(job_id)

    worker = app.worker(shards_count=1, batch_size=10)(Awaits if is_async else Plain)
    push(worker, "a", "b", "c")
    assert drain(worker).batches == 1
    assert sent.errors() == [("ValueError", ["a"]), ("ValueError", ["c"])]
    for event, job_id in zip(sent.events, ("a", "c"), strict=True):
        assert [crumb["message"] for crumb in event["breadcrumbs"]["values"]] == [f"crumb of {job_id}"]
        assert [tag for tag in event["tags"] if tag.startswith("saw.")] == [f"saw.{job_id}"]
        assert event["tags"]["lowq.id"] == job_id


def test_jobs_share_no_scope_and_leave_none_behind(app: lowq.Lowq, sent: Sent, is_async: bool) -> None:
    def handler(payloads_by_id: dict[str, list[Any]]) -> None:
        (job_id,) = payloads_by_id
        sentry_sdk.set_tag(f"saw.{job_id}", "yes")
        sentry_sdk.add_breadcrumb(message=f"crumb of {job_id}")
        raise ValueError(job_id)

    worker = make_worker(app, handler, is_async=is_async, batch_size=1)
    push(worker, "a", "b")
    drain(worker)
    for event, job_id in zip(sent.events, ("a", "b"), strict=True):
        assert [crumb["message"] for crumb in event["breadcrumbs"]["values"]] == [f"crumb of {job_id}"]
        assert [tag for tag in event["tags"] if tag.startswith("saw.")] == [f"saw.{job_id}"]
    sentry_sdk.capture_message("from elsewhere")
    event = sent.events[-1]
    assert "lowq" not in event["contexts"]
    assert "tags" not in event


def test_what_a_handler_captures_itself_has_the_tags_too_and_is_not_captured_twice(
    app: lowq.Lowq, sent: Sent, is_async: bool
) -> None:
    def handler(payloads_by_id: dict[str, list[Any]]) -> None:
        sentry_sdk.capture_message("by hand")
        try:
            raise ValueError("boom")
        except ValueError as error:
            sentry_sdk.capture_exception(error)
            raise

    worker = make_worker(app, handler, is_async=is_async)
    push(worker, "a")
    drain(worker)
    assert sent.errors() == [("by hand", ["a"]), ("ValueError", ["a"])]
    assert [event["tags"]["lowq.queue"] for event in sent.events] == ["Orders", "Orders"]


def test_ids_that_the_handler_names(app: lowq.Lowq, sent: Sent, is_async: bool) -> None:
    shared = KeyError("shared")

    def handler(payloads_by_id: dict[str, list[Any]]) -> None:
        batch = lowq.current()
        batch.done("done")
        batch.fail("a", shared)
        batch.fail("b", shared)
        batch.fail("c", "in words")
        batch.bury("d", "enough")
        batch.release("e", 10)

    worker = make_worker(app, handler, is_async=is_async)
    push(worker, "a", "b", "c", "d", "done", "e")
    assert drain(worker).batches == 1
    assert sorted(sent.errors()) == [("KeyError", ["a", "b"]), ("enough", ["d"]), ("in words", ["c"])]
    assert [event["tags"]["lowq.buried"] for event in sent.events if _said(event) == "enough"] == ["true"]
    assert {event["level"] for event in sent.events} == {"error"}


@pytest.mark.parametrize("capture_released", [False, True])
def test_what_is_released_is_captured_only_on_demand(app: lowq.Lowq, sent: Sent, capture_released: bool) -> None:
    lowq.contrib.sentry.instrument(app, capture_released=capture_released)
    assert len(app.observers) == 1
    worker = make_worker(app, fail_for("a"), release_on={ValueError: 30})
    push(worker, "a")
    drain(worker)
    assert sent.errors() == ([("ValueError", ["a"])] if capture_released else [])


def test_bury_on_is_captured_as_buried(app: lowq.Lowq, sent: Sent) -> None:
    worker = make_worker(app, fail_for("a"), bury_on=(ValueError,))
    push(worker, "a")
    drain(worker)
    event = sent.only()
    assert event["tags"]["lowq.buried"] == "true"
    assert event["contexts"]["lowq"]["verdict"] == "buried"


def test_what_stops_the_process_is_captured_for_all_ids_at_once(app: lowq.Lowq, sent: Sent) -> None:
    worker = make_worker(app, fail_for("a", KeyboardInterrupt))
    push(worker, "a", "b")
    with pytest.raises(KeyboardInterrupt):
        drain(worker)
    assert sent.errors() == [("KeyboardInterrupt", ["a", "b"])]


def test_in_a_thread_of_a_node_the_log_of_a_failure_is_no_second_event_and_other_errors_are(
    app: lowq.Lowq, sent: Sent
) -> None:
    worker = make_worker(app, fail_for("b"))
    push(worker, "a", "b")
    rig = ThreadRig(app, worker)
    for _ in range(4):
        rig.wake()
        rig.turn()
        if sent.events:
            break
    assert sent.errors() == [("ValueError", ["b"])]
    logging.getLogger("lowq.node").error("something else")
    assert _said(sent.events[-1]) == "something else"


def test_an_outcome_that_is_not_written_is_not_captured_as_somebody_else_performs_it(
    app: lowq.Lowq, sent: Sent
) -> None:
    def lose(payloads_by_id: dict[str, list[Any]]) -> None:
        run_out(rig.client, rig.shards[0].prefix)
        raise ValueError("boom")

    worker = make_worker(app, lose)
    push(worker, "a")
    rig = ThreadRig(app, worker)
    with pytest.raises(LeaseLost):
        rig.turn()
    assert sent.events == []


def test_past_ttr_the_id_is_captured_once_by_whoever_reports_it(app: lowq.Lowq, sent: Sent) -> None:
    hangs, goes_on = threading.Event(), threading.Event()

    def handler(payloads_by_id: dict[str, list[Any]]) -> None:
        sentry_sdk.add_breadcrumb(message="about to hang")
        if not hangs.is_set():
            hangs.set()
            goes_on.wait(PATIENCE)
            raise ValueError("too late")

    worker = make_worker(app, handler, ttr=1e-6)
    push(worker, "a")
    rig = ThreadRig(app, worker)
    thread = rig.thread
    thread.start()
    assert hangs.wait(PATIENCE)
    limits = thread.activity.limits
    assert limits is not None
    successors = []

    def replace() -> None:
        successors.append(thread.successor(ThreadActivity(0)))

    limits.enforce(replace)
    successors[0]._inherit(thread)
    goes_on.set()
    thread.join(PATIENCE)
    event = sent.only()
    assert "longer than its ttr" in _said(event)
    assert event["contexts"]["lowq"]["verdict"] == "crashed"
    assert [crumb["message"] for crumb in event["breadcrumbs"]["values"]] == ["about to hang"]
    assert isinstance(rig.shards[0].lease.acquire(TTL), Lease)


def test_retries_exhausted_that_fails_as_well_is_an_event_of_its_own(app: lowq.Lowq, sent: Sent) -> None:
    class Broken(lowq.Worker[Any]):
        def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
            raise ValueError("boom")

        def retries_exhausted(self, jobs: list[Job]) -> None:
            raise KeyError("and this")

    worker = app.worker(shards_count=1, max_retry_count=0)(Broken)
    push(worker, "a")
    drain(worker)
    assert [_said(event) for event in sent.events] == ["ValueError", "KeyError"]


def test_without_sentry_nothing_is_done(app: lowq.Lowq) -> None:
    worker = make_worker(app, fail_for("a"))
    push(worker, "a")
    assert drain(worker).failed == 1
    assert app.observers[0].batch(Batch(worker, "Orders", 0, 1, ())) is None


@pytest.mark.parametrize("kind", [RuntimeError, asyncio.CancelledError])
@pytest.mark.parametrize("is_async", [False, True])
def test_an_observer_that_raises_harms_nothing(
    app: lowq.Lowq, caplog: pytest.LogCaptureFixture, kind: type[BaseException], is_async: bool
) -> None:
    class Broken(Observer):
        def push(self, queue: str, jobs: object) -> None:
            raise kind("push")

        def batch(self, batch: Batch) -> BatchObservation:
            return BrokenBatch()

    class BrokenBatch(BatchObservation):
        def leave(self) -> None:
            raise kind("leave")

        def ended(self, result: object) -> None:
            raise kind("ended")

    app.observers.append(Broken())
    worker = make_worker(app, lambda _: None, is_async=is_async)
    push(worker, "a")
    assert drain(worker).performed == 1
    said = [str(record.exc_info[1]) for record in caplog.records if record.name == "lowq.observers" and record.exc_info]
    assert said == ["push", "leave", "ended"]


def test_a_batch_that_is_cancelled_has_ended_after_its_handler_was_left(app: lowq.Lowq) -> None:
    heard = []

    class Follows(Observer):
        def batch(self, batch: Batch) -> BatchObservation:
            return FollowsBatch()

    class FollowsBatch(BatchObservation):
        def leave(self) -> None:
            heard.append("leave")

        def ended(self, result: object) -> None:
            heard.append(f"ended: {result}")

    def handler(payloads_by_id: dict[str, list[Any]]) -> None:
        raise asyncio.CancelledError

    worker = make_worker(app, handler, is_async=True)
    runtime = WorkerRuntime.of(worker, app.config, observers=[Follows()])
    push(worker, "a")
    (shard,) = shards_of(app.client, app.config, worker, "node")
    lease = shard.lease.acquire(TTL)
    assert isinstance(lease, Lease)
    jobs = shard.in_flight.take(1).jobs
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(aperform(runtime, shard, lease.fence, jobs, app.config, cancelled=lambda: True))
    assert heard == ["leave", "ended: None"]


class Nothing:
    """No observation at all."""


class NoText(PushObservation):
    trace: Any = None


@pytest.mark.parametrize("found", [Nothing(), NoText(), True])
def test_an_observer_that_returns_something_else_harms_nothing(app: lowq.Lowq, found: Any) -> None:
    class Wrong(Observer):
        def push(self, queue: str, jobs: object) -> Any:
            return found

        def batch(self, batch: Batch) -> Any:
            return found

    performed = []

    class Orders(lowq.Worker[Any]):
        def perform_one(self, job_id: str, payloads: list[Any]) -> None:
            performed.append(job_id)

    app.observers.append(Wrong())
    worker = app.worker(shards_count=1, batch_size=10)(Orders)
    push(worker, "a", "b")
    assert drain(worker).performed == 2
    assert performed == ["a", "b"]


@pytest.mark.parametrize(
    ("app", "options", "message"),
    [
        ("shop", {}, r"lowq.contrib.sentry.instrument\('shop'\): write instrument\(\), or instrument\(app\)"),
        (None, {"capture_released": 1}, "capture_released=1 must be True or False"),
    ],
)
def test_bad_arguments_are_refused(app: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lowq.contrib.sentry.instrument(lowq.Lowq() if app is None else app, **options)
