"""Spans of pushes and batches, the links between them, and metrics, by OpenTelemetry's own exporters in memory."""

import asyncio
import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from opentelemetry import baggage, trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanContext, SpanKind, StatusCode, TraceFlags, TraceState

import lowq
import lowq.contrib.otel
from lowq.contrib.otel import LowqInstrumentor, decode_context, encode_context
from lowq.errors import ConfigError, PayloadError, QueueFull
from lowq.store.keys import shard_prefix
from lowq.testing import drain
from tests.rows import case
from tests.rules.contrib.workers import make_worker


class Telemetry:
    """What was traced and measured."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("test")
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader])

    def instrument(self, app: lowq.Lowq) -> None:
        lowq.contrib.otel.instrument(app, tracer_provider=self.provider, meter_provider=self.meters)

    def spans(self, name: str = "") -> list[ReadableSpan]:
        """Those that have ended, in that order."""
        return [span for span in self.exporter.get_finished_spans() if name in (span.name or "")]

    def links(self) -> list[list[tuple[str, str]]]:
        """Of each batch that has ended: the ids that it has links for, and the span that each leads to, by its number
        among the pushes.
        """
        pushes = {span_id_of(span): f"push {number}" for number, span in enumerate(self.spans("push"))}
        return [
            [(str((link.attributes or {})["lowq.job.id"]), pushes[link.context.span_id]) for link in span.links]
            for span in self.spans("perform")
        ]

    def metrics(self) -> list[Any]:
        data: Any = self.reader.get_metrics_data()
        return [metric for r in data.resource_metrics for s in r.scope_metrics for metric in s.metrics]

    def measured(self) -> dict[str, float]:
        """The sum of each counter, and how many values each histogram has."""
        return {
            metric.name: sum(getattr(p, "count", 0) or getattr(p, "value", 0) for p in metric.data.data_points)
            for metric in self.metrics()
        }


def span_id_of(span: ReadableSpan) -> int:
    found = span.get_span_context()
    assert found is not None
    return found.span_id


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    found = Telemetry()
    yield found
    found.provider.shutdown()
    found.meters.shutdown()


@pytest.fixture
def app(redis_url: str, telemetry: Telemetry) -> Iterator[lowq.Lowq]:
    """On one store: what is kept of a trace is tested in tests/rules/shards/test_traces.py."""
    with closing(lowq.Lowq(redis_url=redis_url)) as app:
        telemetry.instrument(app)
        yield app


def keys(app: lowq.Lowq) -> set[str]:
    """The names of keys that hold contexts."""
    return {name.decode() for name in app.client.command("KEYS", "*") if b"traces" in name}


# --- spans ---


def test_a_batch_has_one_span_with_a_link_for_each_push(app: lowq.Lowq, telemetry: Telemetry, is_async: bool) -> None:
    worker = make_worker(app, is_async=is_async)
    worker.push("a", {"v": 1}, score=1)
    worker.push("a", {"v": 1}, score=2)  # equal: its payload collapses, its link does not
    worker.perform_async([{"id": i, "payload": n, "score": n} for i, n in (("a", 4), ("b", 5), ("b", 6))])
    assert drain(worker).batches == 1
    (span,) = telemetry.spans("perform")
    assert (span.name, span.kind, span.parent) == ("perform Orders", SpanKind.CONSUMER, None)
    assert dict(span.attributes or {}) == {
        "messaging.system": "lowq",
        "messaging.destination.name": "Orders",
        "messaging.destination.partition.id": "0",
        "messaging.operation.name": "perform",
        "messaging.operation.type": "process",
        "messaging.batch.message_count": 4,
        "lowq.job.count": 2,
        "lowq.delivery": 1,
    }
    assert sorted(telemetry.links()[0]) == [("a", "push 0"), ("a", "push 1"), ("a", "push 2"), ("b", "push 2")]
    assert {link.context.trace_id for link in span.links} == {push.context.trace_id for push in telemetry.spans("push")}
    assert keys(app) == set()


def test_a_push_is_a_producer_span_below_that_of_its_caller(app: lowq.Lowq, telemetry: Telemetry) -> None:
    worker = make_worker(app)

    async def push() -> None:
        await worker.apush(43)
        await worker.aperform_async({"id": number} for number in range(3))

    with telemetry.tracer.start_as_current_span("request") as request:
        worker.push(42)
        worker.perform_async([{"id": 1}, {"id": 2}])
        job_id = worker.queue.put("mail")
        asyncio.run(push())
        assert trace.get_current_span() is request
    spans = telemetry.spans("push")
    assert {(span.name, span.kind) for span in spans} == {("push Orders", SpanKind.PRODUCER)}
    assert {span.parent and span.parent.span_id for span in spans} == {request.get_span_context().span_id}
    said = [dict(span.attributes or {}) for span in spans]
    assert [attributes.get("messaging.batch.message_count") for attributes in said] == [None, 2, None, None, 3]
    assert [attributes.get("lowq.job.id") for attributes in said] == ["42", None, job_id, "43", None]
    assert {attributes["messaging.operation.type"] for attributes in said} == {"send"}


def test_what_a_handler_does_is_below_its_span(app: lowq.Lowq, telemetry: Telemetry, is_async: bool) -> None:
    mails = make_worker(app, queue_name="Mails")
    worker = make_worker(app, lambda _: mails.push("mail"), is_async=is_async)
    worker.push("a")
    drain(worker)
    (batch,), (push,) = telemetry.spans("perform Orders"), telemetry.spans("push Mails")
    assert push.parent == batch.context
    assert trace.get_current_span() is trace.INVALID_SPAN


# --- retries ---


def test_a_retry_links_to_the_same_pushes(app: lowq.Lowq, telemetry: Telemetry, is_async: bool) -> None:
    fails = [True]

    def handler(payloads_by_id: dict[str, list[Any]]) -> None:
        if fails.pop():
            raise ValueError("boom")

    worker = make_worker(app, handler, is_async=is_async)
    worker.push("a", 1, score=1)
    drain(worker)
    worker.push("a", 2, score=2)
    fails.append(False)
    drain(worker, now=4e9)
    assert telemetry.links() == [[("a", "push 0")], [("a", "push 0"), ("a", "push 1")]]
    failed, performed = telemetry.spans("perform")
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.status.description == "ValueError: boom"
    assert (failed.attributes or {})["error.type"] == "ValueError"
    assert [event.name for event in failed.events] == ["exception"]
    assert performed.status.status_code is StatusCode.UNSET
    assert [(span.attributes or {})["lowq.job.retry_count"] for span in (failed, performed)] == [0, 1]
    assert keys(app) == set()


def test_what_is_expected_is_no_error_of_the_span(app: lowq.Lowq, telemetry: Telemetry) -> None:
    def handler(payloads_by_id: dict[str, list[Any]]) -> None:
        raise ValueError("later")

    worker = make_worker(app, handler, release_on={ValueError: 30})
    worker.push("a")
    drain(worker)
    (span,) = telemetry.spans("perform")
    assert span.status.status_code is StatusCode.UNSET
    assert [event.name for event in span.events] == ["exception"]


# --- pushes that fail ---


def test_an_error_whose_text_is_not_to_be_had_ends_its_span(app: lowq.Lowq, telemetry: Telemetry) -> None:
    class NoText(Exception):
        def __str__(self) -> str:
            raise RuntimeError("this error has no text")

    def jobs() -> Iterator[dict[str, Any]]:
        yield {"id": 1}
        raise NoText

    worker = make_worker(app)
    with pytest.raises(NoText):
        worker.perform_async(jobs())
    (span,) = telemetry.spans("push")
    assert (span.status.description, span.status.status_code) == ("NoText", StatusCode.ERROR)


def test_a_push_that_is_refused_is_an_error_of_its_span(app: lowq.Lowq, telemetry: Telemetry) -> None:
    worker = make_worker(app, capacity=2)
    worker.perform_async([{"id": 0}])
    with pytest.raises(PayloadError):
        worker.push("a", {1, 2})
    with pytest.raises(QueueFull):
        worker.perform_async([{"id": number} for number in range(4)])
    _, refused, full = telemetry.spans("push")
    assert (refused.attributes or {})["error.type"] == "lowq.errors.PayloadError"
    assert full.status.status_code is StatusCode.ERROR
    assert trace.get_current_span() is trace.INVALID_SPAN
    assert telemetry.measured()["messaging.client.sent.messages"] == 6
    drain(worker)
    assert telemetry.links() == [[("0", "push 0"), ("0", "push 2"), ("1", "push 2")]]


def test_what_is_not_sampled_leaves_nothing_in_redis(redis_url: str, telemetry: Telemetry) -> None:
    with closing(lowq.Lowq(redis_url=redis_url)) as app:
        worker = make_worker(app)
        worker.push("a")
        lowq.contrib.otel.instrument(app, tracer_provider=TracerProvider(sampler=ALWAYS_OFF))
        worker.push("a")
        assert keys(app) == set()
        telemetry.instrument(app)  # instead
        worker.push("a")
        drain(worker)
    assert telemetry.links() == [[("a", "push 0")]]


def test_pushes_that_leave_together_keep_their_own_contexts(app: lowq.Lowq, telemetry: Telemetry) -> None:
    worker = make_worker(app, batch_size=100)

    async def push() -> None:
        await worker.apush("first")
        await asyncio.gather(*(worker.apush(f"id{number:02}", number) for number in range(50)))

    asyncio.run(push())
    of_ids = {str((span.attributes or {})["lowq.job.id"]): span_id_of(span) for span in telemetry.spans("push")}
    drain(worker)
    (batch,) = telemetry.spans("perform")
    links = {str((link.attributes or {})["lowq.job.id"]): link.context.span_id for link in batch.links}
    assert links == of_ids
    assert len(links) == len(batch.links) == 51


# --- metrics ---


def test_what_is_measured(app: lowq.Lowq, telemetry: Telemetry) -> None:
    def handler(payloads_by_id: dict[str, list[Any]]) -> None:
        if "bad" in payloads_by_id:
            raise ValueError("boom")
        if "enough" in payloads_by_id:
            lowq.current().bury("enough")

    worker = make_worker(app, handler, batch_size=1, max_retry_count=0)
    worker.perform_async([{"id": "a"}, {"id": "a", "payload": 2}, {"id": "bad"}, {"id": "enough"}])
    drain(worker)
    assert telemetry.measured() == {
        "messaging.client.sent.messages": 4,
        "messaging.client.operation.duration": 1,
        "messaging.client.consumed.messages": 4,
        "messaging.process.duration": 3,
        "lowq.job.wait": 3,
        "lowq.jobs.performed": 1,
        "lowq.jobs.failed": 1,
        "lowq.jobs.buried": 2,
    }
    points = [point for metric in telemetry.metrics() for point in metric.data.data_points]
    assert {point.attributes["messaging.destination.name"] for point in points} == {"Orders"}
    assert {point.attributes.get("error.type") for point in points} == {None, "ValueError", "_OTHER"}


# --- contexts ---

TRACE_ID, SPAN_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def span_context(*state: tuple[str, str], flags: int = 1) -> SpanContext:
    return SpanContext(TRACE_ID, SPAN_ID, False, TraceFlags(flags), TraceState(list(state)))


def test_a_context_is_kept_as_its_headers_and_read_as_it_was_kept() -> None:
    for state, kept in (((), PARENT), ((("vendor", "x1"), ("other", "y")), f"{PARENT};vendor=x1,other=y")):
        with case(kept):
            assert encode_context(span_context(*state)) == kept
            read = decode_context(kept)
            assert read is not None
            found, header = read
            assert (found.is_remote, header) == (True, "")
            assert encode_context(found) == kept
    for nothing in (span_context(flags=0), trace.INVALID_SPAN_CONTEXT):
        assert encode_context(nothing) == ""


def test_what_does_not_fit_or_is_no_context_is_left_out(app: lowq.Lowq, telemetry: Telemetry) -> None:
    states = [
        [(f"vendor{number}", "x" * 250) for number in range(30)],  # the most that W3C allows, and more
        [("vendor", "two words")],
        [("vendor", "x\ny")],
        [("vendor", "é")],
    ]
    for state in states:
        with case(state):
            assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-0[0-9a-f]", encode_context(span_context(*state)))
    texts = ["", "x", "00-0-0-00", f"00-{'0' * 32}-{'0' * 16}-01", PARENT.upper(), f"{PARENT};", f"{PARENT};two words"]
    worker, key = make_worker(app), shard_prefix("lowq", "Orders", 0) + "traces:a"
    for text in texts:
        with case(text):
            assert decode_context(text) is None
            telemetry.exporter.clear()
            worker.push("a")
            app.client.command("SET", key, f"{text}\n", key=key)
            assert drain(worker).performed == 1
            assert [list(span.links) for span in telemetry.spans("perform")] == [[]]


# --- baggage ---


def test_baggage_is_kept_behind_the_headers_and_goes_before_a_tracestate_that_does_not_fit_beside_it() -> None:
    state, odd, long = ("vendor", "x1"), ("vendor", "x;;y"), ("vendor", "x" * 190)
    rows: list[tuple[SpanContext, str, str]] = [
        (span_context(), "tenant=7", f"{PARENT};;tenant=7"),
        (span_context(state), "tenant=7,lang=de", f"{PARENT};vendor=x1;;tenant=7,lang=de"),
        (span_context(flags=0), "tenant=7", f"{PARENT[:-1]}0;;tenant=7"),
        (span_context(long), "tenant=7", f"{PARENT};;tenant=7"),
        (span_context(odd), "tenant=7", f"{PARENT};vendor=x;;y;;tenant=7"),
        (span_context(odd), "", PARENT),
        (span_context(state), "tenant=" + "7" * 250, f"{PARENT};vendor=x1"),
        (span_context(flags=0), "tenant=" + "7" * 250, ""),
        (span_context(), "tenant=7;more=1", PARENT),
        (span_context(), "tenant=two words", PARENT),
        (trace.INVALID_SPAN_CONTEXT, "tenant=7", ""),
    ]
    for found, header, kept in rows:
        with case(found, header):
            assert encode_context(found, header) == kept
            if ";;" in kept:
                read = decode_context(kept)
                assert read is not None
                assert read[1] == header
                assert encode_context(read[0], header) == kept


def test_a_handler_has_the_baggage_that_the_pushes_of_its_batch_agree_on(
    app: lowq.Lowq, telemetry: Telemetry, is_async: bool
) -> None:
    seen: list[dict[str, object]] = []
    worker = make_worker(app, lambda _: seen.append(dict(baggage.get_all())), is_async=is_async)

    def push(job_id: str, **entries: str) -> None:
        context = Context()
        for name, value in entries.items():
            context = baggage.set_baggage(name, value, context)
        token = attach(context)
        worker.push(job_id, entries)
        detach(token)

    rows: list[tuple[list[dict[str, str]], dict[str, str]]] = [
        ([{"tenant": "7", "lang": "de"}], {"tenant": "7", "lang": "de"}),
        ([{"tenant": "7", "lang": "de"}, {"tenant": "7", "lang": "fr"}], {"tenant": "7"}),
        ([{"tenant": "7"}, {}], {}),
        ([{"name": "Zoë, two words; x=1"}], {"name": "Zoë, two words; x=1"}),
        ([{}], {}),
    ]
    for pushes, expected in rows:
        with case(pushes):
            seen.clear()
            for number, entries in enumerate(pushes):
                push(f"id{number}", **entries)
            drain(worker)
            assert seen == [expected]
            assert baggage.get_all() == {}
    never = TracerProvider(sampler=ALWAYS_OFF)
    lowq.contrib.otel.instrument(app, tracer_provider=never)
    seen.clear()
    push("a", tenant="7")
    drain(worker)
    assert seen == [{"tenant": "7"}], "whether the trace is sampled or not"


# --- all applications ---


def test_the_instrumentor_follows_applications_made_before_and_after_it(redis_url: str, telemetry: Telemetry) -> None:
    instrumentor = LowqInstrumentor()
    with closing(lowq.Lowq(redis_url=redis_url)) as before:
        for _ in range(2):  # once or twice
            LowqInstrumentor().instrument(tracer_provider=telemetry.provider, skip_dep_check=True)
        try:
            with closing(lowq.Lowq(redis_url=redis_url)) as after:
                assert [len(app.observers) for app in (before, after)] == [1, 1]
                worker = make_worker(after)
                worker.push("a")
                drain(worker)
                assert [span.name for span in telemetry.spans()] == ["push Orders", "perform Orders"]
                instrumentor.uninstrument()
                instrumentor.uninstrument()
                assert [app.observers for app in (before, after, lowq.Lowq())] == [[], [], []]
        finally:
            instrumentor.uninstrument()


# --- arguments ---


def test_bad_arguments_are_refused() -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"app": "shop"}, r"lowq.contrib.otel.instrument\('shop'\): write instrument\(\), or instrument\(app\)"),
        ({"tracer_provider": 5}, "tracer_provider=5 is no TracerProvider of OpenTelemetry; leave it out for the glo"),
        ({"meter_provider": 5}, "meter_provider=5 is no MeterProvider of OpenTelemetry; leave it out for the global"),
    ]
    for arguments, message in rows:
        with case(arguments), pytest.raises(ConfigError, match=message):
            lowq.contrib.otel.instrument(**{"app": lowq.Lowq(), **arguments})
