"""What Sentry is told of: each error once, where an id is charged for it; and observers that harm nothing."""

import asyncio
import contextlib
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any

import pytest
import sentry_sdk
from sentry_sdk.envelope import Envelope
from sentry_sdk.integrations import Integration
from sentry_sdk.integrations.dedupe import DedupeIntegration
from sentry_sdk.integrations.logging import LoggingIntegration
from sentry_sdk.transport import Transport

import lowq
import lowq.contrib.sentry
from lowq.errors import ConfigError, LeaseLost
from lowq.job import Job
from lowq.observe.events import Batch, BatchObservation, Observer
from lowq.store.keys import shard_prefix
from lowq.testing import drain
from lowq.work import event_loop
from lowq.workers import Worker
from tests.leases import run_out
from tests.rules.contrib.workers import Handler, make_worker, running_node
from tests.waiting import NEVER, PATIENCE, until


class Sent(list[Any]):
    """What Sentry was sent: errors and messages."""

    def __init__(self) -> None:
        super().__init__()
        self.transactions: list[Any] = []
        self.check_ins: list[Any] = []

    def errors(self) -> list[tuple[str, list[str]]]:
        """Of each event: the exception or the message, and the ids."""
        return [(said(event), event["contexts"]["lowq"]["ids"]) for event in self]


def said(event: Mapping[str, Any]) -> str:
    if "exception" in event:
        return str(event["exception"]["values"][-1]["type"])
    return str(event.get("message") or event["logentry"]["formatted"])


def connect(found: Sent, *more: Integration, traces_sample_rate: float | None = None) -> None:
    """Sentry's client, whose events go there."""

    class Memory(Transport):
        def capture_envelope(self, envelope: Envelope) -> None:
            event = envelope.get_event()
            if event is not None:
                found.append(event)
            found.transactions += [item.payload.json for item in envelope.items if item.type == "transaction"]
            found.check_ins += [item.payload.json for item in envelope.items if item.type == "check_in"]

    sentry_sdk.init(
        dsn="http://key@localhost/1", transport=Memory, default_integrations=False,
        integrations=[LoggingIntegration(), *more], traces_sample_rate=traces_sample_rate,
    )  # fmt: skip


@pytest.fixture
def sent() -> Iterator[Sent]:
    found = Sent()
    connect(found, DedupeIntegration())
    yield found
    sentry_sdk.get_global_scope().set_client(None)


@pytest.fixture
def app(redis_url: str) -> Iterator[lowq.Lowq]:
    """On one store: none sees what is captured."""
    with closing(lowq.Lowq(redis_url=redis_url)) as app:
        lowq.contrib.sentry.instrument(app, capture="attempt")
        yield app


def push(worker: type[Worker[Any]], *ids: str) -> None:
    worker.perform_async({"id": job_id, "payload": f"of {job_id}", "score": 1} for job_id in ids)


def fail_for(job_id: str, error: Callable[[], BaseException] = lambda: ValueError("boom")) -> Handler:
    def handler(payloads_by_id: dict[str, list[Any]]) -> None:
        if job_id in payloads_by_id:
            raise error()

    return handler


def test_an_error_is_captured_once_for_the_id_that_is_charged(app: lowq.Lowq, sent: Sent, is_async: bool) -> None:
    worker = make_worker(app, fail_for("b"), is_async=is_async)
    push(worker, "a", "b", "c")
    assert drain(worker).batches == 4, "the three, then each alone"
    (event,) = sent
    assert event["exception"]["values"][0]["mechanism"] == {"type": "lowq", "handled": False}
    assert event["tags"] == {
        "lowq.queue": "Orders", "lowq.shard": "0", "lowq.worker": worker.__name__, "lowq.id": "b",
        "lowq.buried": "false",
    }  # fmt: skip
    assert event["contexts"]["lowq"]["delivery"] >= 2
    assert {name: event["contexts"]["lowq"][name] for name in ("queue", "shard", "ids", "retry_count", "verdict")} == {
        "queue": "Orders", "shard": 0, "ids": ["b"], "retry_count": 0, "verdict": "retry",
    }  # fmt: skip


def test_a_retry_is_an_event_of_its_own_and_the_last_one_marked_as_buried(app: lowq.Lowq, sent: Sent) -> None:
    @app.worker(shards_count=1, max_retry_count=1)
    class Broken(lowq.Worker[Any]):
        def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
            raise ValueError("boom")

        def retries_exhausted(self, jobs: list[Job]) -> None:
            raise KeyError("and this")

    push(Broken, "b")
    drain(Broken)
    drain(Broken, now=4e9)
    assert [said(event) for event in sent] == ["ValueError", "ValueError", "KeyError"]
    contexts = [event["contexts"]["lowq"] for event in sent[:2]]
    assert [(item["retry_count"], item["verdict"]) for item in contexts] == [(0, "retry"), (1, "exhausted")]
    assert [event["tags"]["lowq.buried"] for event in sent[:2]] == ["false", "true"]


def mark(job_id: str) -> None:
    """What a handler adds to the scope, and fails."""
    sentry_sdk.set_tag(f"saw.{job_id}", "yes")
    sentry_sdk.add_breadcrumb(message=f"crumb of {job_id}")
    raise ValueError(job_id)


def assert_own_scopes(events: list[Any], *ids: str) -> None:
    """One event of each id, with what its own handler has added and nothing else."""
    found = {event["tags"]["lowq.id"]: event for event in events}
    assert found.keys() == set(ids)
    assert len(events) == len(ids)
    for job_id, event in found.items():
        assert event["contexts"]["lowq"]["ids"] == [job_id]
        assert event["exception"]["values"][-1]["value"] == job_id
        assert [crumb["message"] for crumb in event["breadcrumbs"]["values"]] == [f"crumb of {job_id}"]
        assert [tag for tag in event["tags"] if tag.startswith("saw.")] == [f"saw.{job_id}"]


def test_perform_one_has_an_event_and_a_scope_for_each_id(app: lowq.Lowq, sent: Sent, is_async: bool) -> None:
    def plain(job_id: str, payloads: list[Any]) -> None:
        if job_id != "b":
            mark(job_id)

    async def awaits(job_id: str, payloads: list[Any]) -> None:
        await asyncio.sleep(0)
        plain(job_id, payloads)

    class Orders(lowq.Worker[Any]):
        perform_one = staticmethod(awaits if is_async else plain)

    worker = app.worker(shards_count=1, batch_size=10)(Orders)
    push(worker, "a", "b", "c")
    assert drain(worker).batches == 1
    assert_own_scopes(sent, "a", "c")
    sentry_sdk.capture_message("from elsewhere")
    assert "lowq" not in sent[-1]["contexts"]
    assert "tags" not in sent[-1]


def test_handlers_at_the_same_time_share_no_scope(app: lowq.Lowq, sent: Sent, is_async: bool) -> None:
    connect(sent)  # without what else would leave out a second event of the same error
    together = threading.Barrier(3)

    @app.worker(shards_count=3, max_retry_count=0)
    class Plain(lowq.Worker[Any]):
        def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
            together.wait(PATIENCE)
            mark(*payloads_by_id)

    @app.worker(shards_count=3, max_retry_count=0)
    class Awaits(lowq.Worker[Any]):
        async def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
            await asyncio.to_thread(together.wait, PATIENCE)
            await asyncio.to_thread(mark, *payloads_by_id)

    worker = Awaits if is_async else Plain
    ids = [next(name for name in "abcdefghijkl" if worker.queue.shard_of(name) == shard) for shard in range(3)]
    push(worker, *ids)
    with running_node(app, threads=3):
        until(lambda: len(sent) >= 3, "an event of each")
        until(lambda: worker.queue.stats().morgue_length == 3, "the end of all")
    assert_own_scopes(sent, *ids)
    logging.getLogger("lowq.node").error("something else")
    assert said(sent[-1]) == "something else"


def test_what_a_handler_captures_itself_is_not_captured_twice(app: lowq.Lowq, sent: Sent, is_async: bool) -> None:
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
    assert [event["tags"]["lowq.queue"] for event in sent] == ["Orders", "Orders"]


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
    assert [event["tags"]["lowq.buried"] for event in sent if said(event) == "enough"] == ["true"]
    assert {event["level"] for event in sent} == {"error"}


def test_what_is_released_is_captured_only_on_demand_and_what_is_buried_is_marked(app: lowq.Lowq, sent: Sent) -> None:
    worker = make_worker(app, fail_for("a"), release_on={ValueError: 30})
    for number, capture_released in enumerate((False, True)):
        lowq.contrib.sentry.instrument(app, capture="attempt", capture_released=capture_released)
        assert len(app.observers) == 1
        push(worker, "a")
        drain(worker, now=4e9 + 1000 * number)
        assert sent.errors() == [("ValueError", ["a"])] * number
    buries = make_worker(app, fail_for("a"), bury_on=(ValueError,), queue_name="Buries")
    push(buries, "a")
    drain(buries)
    assert (sent[-1]["tags"]["lowq.buried"], sent[-1]["contexts"]["lowq"]["verdict"]) == ("true", "buried")


def test_what_stops_the_process_is_captured_for_all_ids_at_once(app: lowq.Lowq, sent: Sent) -> None:
    worker = make_worker(app, fail_for("a", KeyboardInterrupt))
    push(worker, "a", "b")
    with pytest.raises(KeyboardInterrupt):
        drain(worker)
    assert sent.errors() == [("KeyboardInterrupt", ["a", "b"])]


def test_an_outcome_that_is_not_written_is_captured_only_if_its_next_owner_says_nothing(
    app: lowq.Lowq, sent: Sent
) -> None:
    """A crash is charged by the next owner, who does not know what was raised."""
    for raised, expected, captured in ((ValueError, LeaseLost, []), (KeyboardInterrupt, KeyboardInterrupt, ["a"])):

        def lose(payloads_by_id: dict[str, list[Any]], raised: type[BaseException] = raised) -> None:
            run_out(app.client, shard_prefix("lowq", raised.__name__, 0))
            raise raised

        worker = make_worker(app, lose, queue_name=raised.__name__)
        push(worker, "a")
        with pytest.raises(expected):
            drain(worker)
        assert [ids for _, ids in sent.errors()] == [captured] * bool(captured)


def test_past_ttr_the_id_is_captured_once_by_whoever_reports_it(
    app: lowq.Lowq, sent: Sent, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on = threading.Event()

    @app.worker(shards_count=1, ttr=NEVER, max_crash_count=1)
    class Plain(lowq.Worker[Any]):
        def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
            sentry_sdk.add_breadcrumb(message="about to hang")
            lowq.current().touch(0.01)  # ttr passes now, not while the machine stands still before this
            goes_on.wait(PATIENCE)
            raise ValueError("too late")

    @app.worker(shards_count=1, ttr=NEVER, max_crash_count=1)
    class Awaits(lowq.Worker[Any]):
        async def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
            sentry_sdk.add_breadcrumb(message="about to hang")
            lowq.current().touch(0.01)
            while not goes_on.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.01)
            raise ValueError("too late")

    worker = Awaits if is_async else Plain
    push(worker, "a")
    with running_node(app, threads=4):
        until(lambda: sent and worker.queue.stats().morgue_length, "an event of what hangs, and its burial")
        until(lambda: any("exceeded its ttr" in record.getMessage() for record in caplog.records), "the log's line")
        goes_on.set()
    (event,) = sent
    assert "longer than its ttr" in said(event)
    assert event["contexts"]["lowq"]["verdict"] == "crashed"
    assert [crumb["message"] for crumb in event["breadcrumbs"]["values"]] == ["about to hang"]


def test_without_sentry_nothing_is_done(app: lowq.Lowq) -> None:
    worker = make_worker(app, fail_for("a"))
    push(worker, "a")
    assert drain(worker).failed == 1
    assert app.observers[0].batch_began(Batch(worker, "Orders", 0, 1, ())) is None


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"lowq.contrib.sentry.instrument\('shop'\): write instrument\(\), or instr"):
        lowq.contrib.sentry.instrument("shop")  # type: ignore[arg-type]  # that is the point
    with pytest.raises(ConfigError, match="capture_released=1 must be True or False"):
        lowq.contrib.sentry.instrument(lowq.Lowq(), capture_released=1)  # type: ignore[arg-type]  # that is the point
    with pytest.raises(ConfigError, match="monitor_schedules=None must be True or False"):
        lowq.contrib.sentry.instrument(lowq.Lowq(), monitor_schedules=None)  # type: ignore[arg-type]  # likewise
    with pytest.raises(ConfigError, match='capture=\'morgue\' must be "buried" or "attempt"'):
        lowq.contrib.sentry.instrument(lowq.Lowq(), capture="morgue")  # type: ignore[arg-type]  # likewise


# --- when it is captured ---


def test_by_default_an_error_is_captured_when_its_job_goes_to_the_morgue(
    app: lowq.Lowq, sent: Sent, is_async: bool
) -> None:
    lowq.contrib.sentry.instrument(app)
    worker = make_worker(app, fail_for("b"), is_async=is_async, max_retry_count=2)
    push(worker, "a", "b")
    for number in range(3):
        assert sent == []
        drain(worker, now=4e9 + 1e6 * number)
    assert sent.errors() == [("ValueError", ["b"])]
    assert (sent[0]["tags"]["lowq.buried"], sent[0]["contexts"]["lowq"]["verdict"]) == ("true", "exhausted")
    buries = make_worker(app, fail_for("a"), bury_on=(ValueError,), queue_name="Buries", is_async=is_async)
    push(buries, "a")
    drain(buries)
    assert sent[-1]["contexts"]["lowq"]["verdict"] == "buried"


def test_by_default_poison_is_the_line_of_the_log(app: lowq.Lowq, sent: Sent) -> None:
    lowq.contrib.sentry.instrument(app)
    worker = make_worker(app, fail_for("a", KeyboardInterrupt), max_crash_count=2)
    push(worker, "a")
    for number in range(2):
        assert sent == []
        with pytest.raises(KeyboardInterrupt):
            drain(worker, now=4e9 + 1e6 * number)
    (event,) = sent
    assert "buried as poison" in said(event)


# --- spans ---


def test_a_push_and_a_batch_have_the_spans_of_a_queue(app: lowq.Lowq, sent: Sent, is_async: bool) -> None:
    connect(sent, traces_sample_rate=1.0)
    worker = make_worker(app, fail_for("bad"), is_async=is_async, max_retry_count=0)
    with sentry_sdk.start_transaction(name="request"):
        worker.perform_async({"id": "a", "payload": 1, "score": 1})
    drain(worker)
    request, batch = sent.transactions
    (publish,), (process,) = request["spans"], batch["spans"]
    assert (publish["op"], publish["description"], publish["status"]) == ("queue.publish", "Orders", "ok")
    assert publish["data"]["messaging.destination.name"] == "Orders"
    assert publish["data"]["messaging.message.id"] == "a"
    trace = batch["contexts"]["trace"]
    assert (trace["op"], trace["trace_id"]) == ("queue.task.lowq", request["contexts"]["trace"]["trace_id"])
    assert (trace["parent_span_id"], trace["status"]) == (publish["span_id"], "ok")
    assert (process["op"], process["status"]) == ("queue.process", "ok")
    names = ("system", "destination.name", "message.id", "message.retry.count", "batch.message_count")
    assert [process["data"][f"messaging.{name}"] for name in names] == ["lowq", "Orders", "a", 0, 1]
    assert process["data"]["messaging.message.receive.latency"] >= 0
    assert batch["tags"]["lowq.id"] == "a"
    # Of several pushes none is the parent; and a failure, which is a part of the trace.
    with sentry_sdk.start_transaction(name="request"):
        push(worker, "b")
        worker.perform_async([{"id": "bad", "score": 1}, {"id": "c", "score": 1}])
        with pytest.raises(lowq.JobError):
            worker.perform_async({"id": ""})
    drain(worker)
    request, batch, *alone = sent.transactions[2:]
    assert [span["status"] for span in request["spans"]] == ["ok", "ok", "internal_error"]
    assert request["spans"][1]["data"]["messaging.batch.message_count"] == 2
    traces = [item["contexts"]["trace"] for item in (request, batch)]
    assert traces[0]["trace_id"] != traces[1]["trace_id"]
    assert traces[1]["status"] == batch["spans"][0]["status"] == "internal_error"
    (error,) = sent
    trace = next(item["contexts"]["trace"] for item in alone if item["tags"]["lowq.id"] == "bad")
    assert (error["contexts"]["trace"]["trace_id"], trace["status"]) == (trace["trace_id"], "internal_error")


def test_without_tracing_there_is_no_span_and_nothing_in_redis(app: lowq.Lowq, sent: Sent) -> None:
    worker = make_worker(app)
    with sentry_sdk.start_transaction(name="request"):
        push(worker, "a")
    assert not [key for key in app.client.command("KEYS", "*") if b"traces" in key]
    drain(worker)
    assert sent.transactions == []


# --- schedules ---


def test_jobs_of_schedules_are_check_ins_with_their_time_tables(app: lowq.Lowq, sent: Sent) -> None:
    lowq.contrib.sentry.instrument(app, monitor_schedules=True)
    fails = [True]

    @lowq.every("0 8 * * 1", tz="Europe/Berlin", name="Weekly report!")
    @lowq.every(120, name="quick")
    @lowq.every(90, name="odd")
    @app.worker(queue_name="Reports", shards_count=1, batch_size=10)
    def report(payloads_by_id: dict[str, list[Any]]) -> None:
        if fails[0]:
            raise ValueError("boom")

    for job_id in ("Weekly report!", "quick", "odd", "other"):
        push(report, job_id)
    drain(report)
    fails.clear()
    fails.append(False)
    drain(report, now=4e9)
    by_slug: dict[str, list[Any]] = {}
    for item in sent.check_ins:
        by_slug.setdefault(item["monitor_slug"], []).append(item)
    assert set(by_slug) == {"reports-weekly-report", "reports-quick"}
    for items in by_slug.values():
        # In company, uncharged; alone; and again.
        assert [item["status"] for item in items] == ["in_progress", "in_progress", "error", "in_progress", "ok"]
        first, again, ended, *later = [item["check_in_id"] for item in items]
        assert first == again == ended != later[0] == later[1]
        assert items[2]["duration"] >= 0
    weekly, quick = (by_slug[slug][0]["monitor_config"] for slug in ("reports-weekly-report", "reports-quick"))
    assert weekly == {"schedule": {"type": "crontab", "value": "0 8 * * 1"}, "timezone": "Europe/Berlin"}
    assert quick == {"schedule": {"type": "interval", "value": 2, "unit": "minute"}, "timezone": "UTC"}


def test_check_ins_of_schedules_whose_names_sentry_does_not_take_are_told_apart(app: lowq.Lowq, sent: Sent) -> None:
    lowq.contrib.sentry.instrument(app, monitor_schedules=True)
    long, names = "q" * 60, ("one", "two", "\u65e5\u5831", "\u9031\u5831")

    @app.worker(queue_name=long, shards_count=1, batch_size=10)
    def report(payloads_by_id: dict[str, list[Any]]) -> None:
        pass

    for name in names:
        lowq.every(120, name=name)(report)
    push(report, *names)
    drain(report)
    slugs = {item["monitor_slug"] for item in sent.check_ins}
    assert len(slugs) == 4
    assert all(re.fullmatch("[a-z0-9_-]{1,50}", slug) for slug in slugs)


def test_schedules_are_not_monitored_unless_that_is_asked_for(app: lowq.Lowq, sent: Sent) -> None:
    @lowq.every(120, name="quick")
    @app.worker(queue_name="Reports", shards_count=1)
    def report(payloads_by_id: dict[str, list[Any]]) -> None:
        pass

    push(report, "quick")
    drain(report)
    assert sent.check_ins == []


# --- observers ---


def observing(app: lowq.Lowq, push: Callable[[], Any], batch: Callable[[], Any]) -> None:
    """An observer of which pushes and batches get these."""

    class Observing(Observer):
        def push_began(self, queue: str, jobs: object) -> Any:
            return push()

        def batch_began(self, found: Batch) -> Any:
            return batch()

    app.observers.append(Observing())


@pytest.mark.parametrize("kind", [RuntimeError, asyncio.CancelledError])
def test_an_observer_that_raises_harms_nothing(
    app: lowq.Lowq, caplog: pytest.LogCaptureFixture, kind: type[BaseException], is_async: bool
) -> None:
    class Broken(BatchObservation):
        def left(self) -> None:
            raise kind("leave")

        def ended(self, result: object) -> None:
            raise kind("ended")

    def broken_push() -> None:
        raise kind("push")

    observing(app, broken_push, Broken)
    worker = make_worker(app, is_async=is_async)
    push(worker, "a")
    assert drain(worker).performed == 1
    logged = [record.exc_info for record in caplog.records if record.name == "lowq.observe"]
    assert [str(info[1]) for info in logged if info] == ["push", "leave", "ended"]


def test_an_observer_hears_the_end_whatever_was_raised(app: lowq.Lowq, is_async: bool) -> None:
    heard: list[Any] = []

    class Follows(BatchObservation):
        def ended(self, result: Any) -> None:
            heard.append(type(result.error))

    def raises(_: object) -> Any:
        raise RuntimeError("no class")

    kind = type("NoClass", (Exception,), {"__class__": property(raises)})
    observing(app, lambda: None, Follows)
    worker = make_worker(app, fail_for("a", kind), is_async=is_async)
    push(worker, "a")
    drain(worker)
    assert heard == [kind]


def test_one_that_makes_what_is_no_observation_harms_nothing_either(app: lowq.Lowq) -> None:
    observing(app, object, object)
    worker = make_worker(app)
    push(worker, "a")
    assert drain(worker).performed == 1


def test_a_batch_that_is_cancelled_has_ended_after_its_handler_was_left(
    app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_loop, "CLEAN_UP_SECONDS", PATIENCE)
    heard: list[str] = []

    class Follows(BatchObservation):
        def left(self) -> None:
            heard.append("leave")

        def ended(self, result: object) -> None:
            heard.append(f"ended: {result}")

    @app.worker(shards_count=1)
    async def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        heard.append("begun")
        await asyncio.sleep(PATIENCE)

    observing(app, lambda: None, Follows)
    app.config.shutdown_timeout = 0.0
    push(orders, "a")
    with running_node(app):
        until(lambda: heard, "a handler that is performed")
    assert heard == ["begun", "leave", "ended: None"]
