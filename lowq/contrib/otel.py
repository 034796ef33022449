"""OpenTelemetry: a producer span for each push, a consumer span for each batch with links to them, and metrics.

::

    caller's span                                  span "perform Orders" (consumer), in a trace of its own
      +- span "push Orders" (producer)  <--link--    +- spans of the handler
             |                                       +- span "push Mails" (producer): what the handler pushes
             +-- its context and baggage, beside the payload in Redis, until the id is performed

Names follow OpenTelemetry's conventions for messaging, which are in development still; what these have no name for
begins with ``lowq.``.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import suppress
from contextvars import Token
from typing import Any, ClassVar

from lowq.application import Lowq, default, with_all
from lowq.contrib import add_observer, remove_observer
from lowq.errors import ConfigError
from lowq.observe.events import MAX_TRACE_BYTES, Batch, BatchObservation, BatchResult, Observer, PushObservation
from lowq.version import VERSION

try:
    from opentelemetry import baggage, context, metrics, trace
    from opentelemetry.baggage.propagation import W3CBaggagePropagator
    from opentelemetry.context import Context
    from opentelemetry.metrics import Histogram, MeterProvider
    from opentelemetry.trace import Link, SpanContext, SpanKind, StatusCode, TraceFlags, TracerProvider, TraceState
except ImportError as error:
    raise ImportError("lowq.contrib.otel needs opentelemetry-api: pip install 'lowq[otel]'") from error

#: Bounds of histograms, seconds: those of the conventions; and of waits, which may be long.
_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_WAIT_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200, 28800, 86400)

#: Verdicts of what went wrong; what is only released is expected.
_FAILED = frozenset({"retry", "exhausted", "buried", "crashed", "solo"})

#: A span context beside payloads: the header traceparent; perhaps a semicolon and the header tracestate; and perhaps
#: two semicolons and the header baggage.
_CONTEXT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:;(?!;)([!-~]+?))?(?:;;([!-:<-~]*))?")
_BAGGAGE = W3CBaggagePropagator()


def instrument(
    app: Lowq = default, *, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
) -> None:
    """Has pushes and batches of this application traced and measured, from now on, in this process: call it in
    producers and in nodes. The providers are OpenTelemetry's global ones by default, whenever they are set. Called
    again, it changes the providers.

    Of a push whose span is sampled, or which has baggage, the span's context and the baggage are kept in Redis beside
    the payloads, 55 to 256 bytes, until their id is performed.

    Raises:
        ConfigError: no application, or no provider.
    """
    for name, provider, kind in (
        ("tracer_provider", tracer_provider, TracerProvider),
        ("meter_provider", meter_provider, MeterProvider),
    ):
        value: object = provider
        if value is not None and not isinstance(value, kind):
            raise ConfigError(
                f"lowq.contrib.otel.instrument: {name}={value!r:.100} is no {kind.__name__} of OpenTelemetry; leave it "
                "out for the global one"
            )
    add_observer(app, _OtelObserver(tracer_provider, meter_provider), __name__)


class LowqInstrumentor:
    """Instruments every application of the process, also those that are made later. It is the entry point that
    ``opentelemetry-instrument lowq run`` finds.
    """

    _end: ClassVar[Callable[[], None]] = staticmethod(lambda: None)

    def instrument(
        self, *, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None,
        **_options: object,
    ) -> None:  # fmt: skip
        """``tracer_provider``, ``meter_provider``: as of the function. Options of other instrumentors are accepted.

        Raises:
            ConfigError: as of the function.
        """
        type(self)._end()
        type(self)._end = staticmethod(
            with_all(lambda app: instrument(app, tracer_provider=tracer_provider, meter_provider=meter_provider))
        )

    def uninstrument(self, **_options: object) -> None:
        """Ends it, for pushes and batches that begin from now on."""
        type(self)._end()
        type(self)._end = staticmethod(lambda: None)
        with_all(lambda app: remove_observer(app, _OtelObserver))()


class _OtelObserver(Observer):
    """Traces and measures pushes and batches."""

    def __init__(self, tracer_provider: TracerProvider | None, meter_provider: MeterProvider | None) -> None:
        self.tracer = trace.get_tracer("lowq", VERSION, tracer_provider)
        meter = metrics.get_meter("lowq", VERSION, meter_provider)
        counter = meter.create_counter

        def seconds(name: str, meaning: str, bounds: Sequence[float] = _BOUNDS) -> Histogram:
            return meter.create_histogram(name, "s", meaning, explicit_bucket_boundaries_advisory=bounds)

        self.pushed = counter("messaging.client.sent.messages", "{message}", "Payloads that a push was to bring in")
        self.push_seconds = seconds("messaging.client.operation.duration", "How long pushes take")
        self.handed_over = counter(
            "messaging.client.consumed.messages", "{message}", "Payloads that were handed to handlers"
        )
        self.run_seconds = seconds("messaging.process.duration", "How long handlers run, a batch each")
        self.wait_seconds = seconds("lowq.job.wait", "From when a job was due until its batch began", _WAIT_BOUNDS)
        self.performed = counter("lowq.jobs.performed", "{job}", "Jobs that finished")
        self.failed = counter("lowq.jobs.failed", "{job}", "Jobs that were charged a retry")
        self.buried = counter("lowq.jobs.buried", "{job}", "Jobs that a node has buried")

    def push_began(self, queue: str, jobs: object) -> PushObservation | None:
        return _OtelPush(self, queue, jobs)

    def batch_began(self, batch: Batch) -> BatchObservation | None:
        return _OtelBatch(self, batch)


def _attributes(queue: str, name: str, kind: str) -> dict[str, Any]:
    return {
        "messaging.system": "lowq",
        "messaging.destination.name": queue,
        "messaging.operation.name": name,
        "messaging.operation.type": kind,
    }


class _OtelPush(PushObservation):
    """A push and its span, which is the current one meanwhile: middlewares, and what makes the jobs, see it."""

    def __init__(self, observer: _OtelObserver, queue: str, jobs: object) -> None:
        self._observer = observer
        self._attributes = _attributes(queue, "push", "send")
        self._is_single = isinstance(jobs, Mapping)
        #: The number of jobs, if they are a list.
        self._count = 1 if self._is_single else len(jobs) if isinstance(jobs, Sized) else 0
        attributes = dict(self._attributes)
        if isinstance(jobs, Mapping) and "id" in jobs:
            attributes["lowq.job.id"] = str(jobs["id"])
        self._began = time.perf_counter()
        self._span = observer.tracer.start_span(f"push {queue}", kind=SpanKind.PRODUCER, attributes=attributes)
        self._token: Token[Context] = context.attach(trace.set_span_in_context(self._span))
        carrier: dict[str, str] = {}
        if baggage.get_all():
            _BAGGAGE.inject(carrier)
        self.trace = encode_context(self._span.get_span_context(), carrier.get("baggage", ""))

    def ended(self, accepted: int, error: BaseException | None) -> None:
        context.detach(self._token)
        seconds = time.perf_counter() - self._began
        attributes = dict(self._attributes)
        if not self._is_single:
            self._span.set_attribute("messaging.batch.message_count", accepted if error is None else self._count)
        if accepted:
            self._observer.pushed.add(accepted, attributes)
        if error is not None:
            attributes["error.type"] = _name_of(error)
            _mark_failed(self._span, error)
            if self._count > accepted:
                self._observer.pushed.add(self._count - accepted, attributes)
        self._observer.push_seconds.record(seconds, attributes)
        self._span.end()


class _OtelBatch(BatchObservation):
    """A batch and its span, which is the current one while the handler runs."""

    def __init__(self, observer: _OtelObserver, batch: Batch) -> None:
        self._observer = observer
        self._attributes = _attributes(batch.queue, "perform", "process")
        payloads = sum(job.payloads_count for job in batch.jobs)
        attributes = self._attributes | {
            "messaging.destination.partition.id": str(batch.shard),
            "messaging.batch.message_count": payloads,
            "lowq.job.count": len(batch.jobs),
            "lowq.delivery": batch.delivery,
        }
        if len(batch.jobs) == 1:
            (job,) = batch.jobs
            attributes |= {"lowq.job.id": job.id, "lowq.job.retry_count": job.retry_count + 1}
        found = [(job.id, decode_context(text)) for job in batch.jobs for text in job.traces]
        pushes = [(job_id, *pair) for job_id, pair in found if pair is not None]
        links = [Link(linked, {"lowq.job.id": job_id}) for job_id, linked, _ in pushes if linked.trace_flags.sampled]
        observer.handed_over.add(payloads, self._attributes)
        for job in batch.jobs:
            if job.waited is not None:
                observer.wait_seconds.record(job.waited, self._attributes)
        self._began = time.perf_counter()
        self._seconds: float | None = None
        self._ended_at: int | None = None
        self._span = observer.tracer.start_span(
            f"perform {batch.queue}", kind=SpanKind.CONSUMER, attributes=attributes, links=links
        )
        entries = _common([header for _, _, header in pushes])
        self._token: Token[Context] = context.attach(trace.set_span_in_context(self._span, entries))

    def left(self) -> None:
        context.detach(self._token)
        self._seconds, self._ended_at = time.perf_counter() - self._began, time.time_ns()

    def ended(self, result: BatchResult | None) -> None:
        attributes = dict(self._attributes)
        if result is None:
            attributes["error.type"] = "cancelled"
            self._span.set_attribute("error.type", "cancelled")
            self._span.set_status(StatusCode.ERROR, "cancelled, as the node stops: it is performed again")
        else:
            self._note(result, attributes)
        seconds = time.perf_counter() - self._began if self._seconds is None else self._seconds
        self._observer.run_seconds.record(seconds, attributes)
        self._span.end(self._ended_at)

    def _note(self, result: BatchResult, attributes: dict[str, Any]) -> None:
        failed = [failure for failure in result.failures if failure.verdict in _FAILED]
        if failed:
            error = next((item.error for item in failed if item.error is not None), result.error)
            attributes["error.type"] = _name_of(error)
            _mark_failed(self._span, error if result.error is None else result.error)
        elif result.error is not None:
            _record(self._span, result.error)
        counts = {
            self._observer.performed: len(result.finished),
            self._observer.failed: sum(failure.verdict in ("retry", "exhausted") for failure in failed),
            self._observer.buried: sum(failure.verdict in ("exhausted", "buried") for failure in failed),
        }
        if result.is_written:
            for counter, count in counts.items():
                if count:
                    counter.add(count, self._attributes)


def _mark_failed(span: trace.Span, error: BaseException | str | None) -> None:
    span.set_attribute("error.type", _name_of(error))
    if isinstance(error, BaseException):
        _record(span, error)
    span.set_status(StatusCode.ERROR, _described(error))


def _record(span: trace.Span, error: BaseException) -> None:
    with suppress(Exception):  # its text is not to be had
        span.record_exception(error)


def _described(error: BaseException | str | None) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:500] if isinstance(error, BaseException) else str(error or "")[:500]
    except Exception:  # its text is not to be had
        return type(error).__name__


def _name_of(error: BaseException | str | None) -> str:
    """The value of the conventions' ``error.type``, which is to have few values."""
    if not isinstance(error, BaseException):
        return "_OTHER"
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _common(headers: Sequence[str]) -> Context | None:
    """A context with the baggage that all pushes of a batch agree on; None: there is none. What one of them did not
    have, or has otherwise, is not the batch's.
    """
    if not any(headers):
        return None
    read = [baggage.get_all(_BAGGAGE.extract({"baggage": header}, Context())) for header in set(headers)]
    found = context.get_current()
    for name, value in read[0].items():
        if all(entries.get(name) == value for entries in read):
            found = baggage.set_baggage(name, value, found)
    return found


def encode_context(span_context: SpanContext, header: str = "") -> str:
    """The text of a span that is kept beside payloads, with the header baggage; "": nobody records the span, and there
    is no baggage. Baggage that is too long, or not printable, is left out, and so is such a tracestate.
    """
    if not span_context.is_valid:
        return ""
    text = f"00-{span_context.trace_id:032x}-{span_context.span_id:016x}-{int(span_context.trace_flags):02x}"
    state = span_context.trace_state.to_header()
    for entries in ([state, header], ["", header]) if header else ():
        whole = f"{text};{entries[0]};;{header}" if entries[0] else f"{text};;{header}"
        if _is_fit(whole, entries):
            return whole
    if not span_context.trace_flags.sampled:
        return ""
    whole = f"{text};{state}"
    return whole if state and _is_fit(whole, [state, ""]) else text


def _is_fit(text: str, entries: Sequence[str]) -> bool:
    """Whether it can be kept, and says these when it is read."""
    found = _CONTEXT.fullmatch(text)
    return len(text) <= MAX_TRACE_BYTES and found is not None and [found[4] or "", found[5] or ""] == entries


def decode_context(text: str) -> tuple[SpanContext, str] | None:
    """The span that was kept, and the header baggage; None: it is none, as anybody may write to Redis."""
    found = _CONTEXT.fullmatch(text)
    if found is None:
        return None
    trace_id, span_id, flags, state, header = found.groups()
    span_context = SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)),
        trace_state=TraceState.from_header([state]) if state else TraceState(),
    )  # fmt: skip
    return (span_context, header or "") if span_context.is_valid else None
