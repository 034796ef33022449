"""Sentry: what handlers raise, reported once; spans of pushes and batches; and check-ins of schedules.

::

    push           a span queue.publish, if its caller is in a transaction of Sentry
    batch begins   an isolation scope of its own, tagged with queue, shard and worker; a transaction with a span
                   queue.process; check-ins "in progress" of the schedules whose jobs it has
    it fails       nothing: each of its ids is tried again alone, uncharged
    an id fails    one event, with the breadcrumbs of its scope, once the outcome is written in Redis: when its job goes
                   to the morgue, or each time
    it has ended   the spans end, and the check-ins are "ok" or "error"

Sentry's tracing is on where its client has ``traces_sample_rate`` or ``traces_sampler``.
"""

import re
from collections.abc import Iterable, Mapping, Sized
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Any, Literal, get_args
from zlib import crc32

from lowq.application import Lowq, default
from lowq.contrib import add_observer
from lowq.errors import ConfigError
from lowq.observe.events import Batch, BatchObservation, BatchResult, JobFailure, Observer, PushObservation
from lowq.schedules import Schedule
from lowq.workers import schedules_of

try:
    import sentry_sdk
    from sentry_sdk.crons import capture_checkin
    from sentry_sdk.scope import Scope, add_global_event_processor, use_isolation_scope
    from sentry_sdk.tracing_utils import has_tracing_enabled
    from sentry_sdk.utils import event_from_exception
except ImportError as error:
    raise ImportError("lowq.contrib.sentry needs sentry-sdk 2: pip install 'lowq[sentry]'") from error

#: Ids that an event names at most.
MAX_IDS = 20
#: Verdicts by which an id is charged, or given up.
_CHARGED = frozenset({"retry", "exhausted", "buried", "crashed"})
_BURIED = frozenset({"exhausted", "buried"})
#: When an error is captured: when its job goes to the morgue, or each time that its id is charged.
Capture = Literal["buried", "attempt"]
#: A span beside payloads: the header traceparent.
_TRACE = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(?:;.*)?")
#: Seconds of Sentry's units for the intervals of schedules; it knows none that are shorter.
_UNITS = {"day": 86400, "hour": 3600, "minute": 60}


def instrument(
    app: Lowq = default, *, capture: Capture = "buried", capture_released: bool = False, monitor_schedules: bool = False
) -> None:
    """Has Sentry told of what fails in nodes of this application, and in `lowq.testing.drain`. Before or after
    ``sentry_sdk.init()``; without that nothing is sent. Called again, it changes the options.

    ``capture``: an error is captured when its job goes to the morgue ("buried"), or at each attempt that is charged
    ("attempt"). ``capture_released``: also what is expected, and not charged: what ``release_on`` names, and a Redis
    that did not answer. ``monitor_schedules``: the jobs of ``@lowq.every`` are monitored as crons, whose time tables
    Sentry is told.

    Raises:
        ConfigError: no application, or a wrong option.
    """
    flags = {"capture_released": capture_released, "monitor_schedules": monitor_schedules}
    for name, option in flags.items():
        value: object = option
        if not isinstance(value, bool):
            raise ConfigError(f"lowq.contrib.sentry.instrument: {name}={value!r:.100} must be True or False")
    if capture not in get_args(Capture):
        raise ConfigError(f'lowq.contrib.sentry.instrument: capture={capture!r:.100} must be "buried" or "attempt"')
    captured = (_BURIED if capture == "buried" else _CHARGED) | ({"released"} if capture_released else set())
    add_observer(app, _SentryObserver(captured, monitor_schedules=monitor_schedules), __name__)
    _drop_logged_failures(captures_poison=capture != "buried")


class _SentryObserver(Observer):
    def __init__(self, captured: frozenset[str], *, monitor_schedules: bool) -> None:
        self._captured = captured
        self._monitor_schedules = monitor_schedules
        #: (queue, schedule) -> the check-in that is in progress, also of a job that waits again uncharged.
        self._check_ins: dict[tuple[str, str], str | None] = {}

    def push_began(self, queue: str, jobs: object) -> PushObservation | None:
        is_traced = has_tracing_enabled(sentry_sdk.get_client().options) and sentry_sdk.get_current_span() is not None
        return _SentryPush(queue, jobs) if is_traced else None

    def batch_began(self, batch: Batch) -> BatchObservation | None:
        if not sentry_sdk.get_client().is_active():
            return None
        schedules = schedules_of(batch.worker) if self._monitor_schedules else ()
        return _SentryBatch(batch, self._captured, {each.name: each for each in schedules}, self._check_ins)


class _SentryPush(PushObservation):
    """A push and its span, which is the current one meanwhile."""

    def __init__(self, queue: str, jobs: object) -> None:
        self._span = sentry_sdk.start_span(op="queue.publish", name=queue)
        self._span.__enter__()
        self._span.set_data("messaging.system", "lowq")
        self._span.set_data("messaging.destination.name", queue)
        if isinstance(jobs, Mapping) and "id" in jobs:
            self._span.set_data("messaging.message.id", str(jobs["id"]))
        elif isinstance(jobs, Sized):
            self._span.set_data("messaging.batch.message_count", len(jobs))
        if self._span.sampled:
            self.trace = f"00-{self._span.trace_id}-{self._span.span_id}-01"

    def ended(self, accepted: int, error: BaseException | None) -> None:  # noqa: ARG002  # Sentry has no name for it
        self._span.set_status("ok" if error is None else "internal_error")
        self._span.__exit__(None, None, None)


class _BatchSpans:
    """The transaction of a batch, and its span queue.process: the current one while the handler runs."""

    def __init__(self, batch: Batch) -> None:
        traces = {found for job in batch.jobs for text in job.traces if (found := _TRACE.fullmatch(text)) is not None}
        pushes = {(found[1], found[2]) for found in traces}
        # Of several pushes none is the parent.
        headers = {"sentry-trace": "-".join((*pushes.pop(), "1"))} if len(pushes) == 1 else {}
        name = batch.worker.__name__
        self._transaction = sentry_sdk.start_transaction(
            sentry_sdk.continue_trace(headers, op="queue.task.lowq", name=name, source="task")
        )
        self._transaction.__enter__()
        self.span = sentry_sdk.start_span(op="queue.process", name=name)
        self.span.__enter__()
        waited = [job.waited for job in batch.jobs if job.waited is not None]
        data: dict[str, Any] = {
            "messaging.system": "lowq", "messaging.destination.name": batch.queue,
            "messaging.batch.message_count": sum(job.payloads_count for job in batch.jobs),
        }  # fmt: skip
        if waited:
            data["messaging.message.receive.latency"] = max(waited) * 1000  # milliseconds
        if len(batch.jobs) == 1:
            (job,) = batch.jobs
            data |= {"messaging.message.id": job.id, "messaging.message.retry.count": job.retry_count + 1}
        for key, value in data.items():
            self.span.set_data(key, value)
        self._left_at: datetime | None = None

    def left(self) -> None:
        """The handler has ended."""
        self._left_at = datetime.now(UTC)

    def ended(self, status: str) -> None:
        """Ends both, at the moment at which the handler has."""
        for span in (self.span, self._transaction):
            span.set_status(status)
            span.finish(end_timestamp=self._left_at)


class _SentryBatch(BatchObservation):
    """One batch: its scope, and in ``perform_one`` a scope for each id."""

    def __init__(
        self, batch: Batch, captured: frozenset[str], schedules: Mapping[str, Schedule],
        check_ins: dict[tuple[str, str], str | None],
    ) -> None:  # fmt: skip
        self._batch = batch
        self._captured = captured
        self._outer: AbstractContextManager[Scope] = sentry_sdk.isolation_scope()
        self._scope = self._outer.__enter__()
        self._scope.clear_breadcrumbs()  # of the thread, with what it logged of other jobs
        self._describe(self._scope, [job.id for job in batch.jobs])
        self._spans = _BatchSpans(batch) if has_tracing_enabled(sentry_sdk.get_client().options) else None
        self._schedules = [schedules[job.id] for job in batch.jobs if job.id in schedules]
        self._check_ins = check_ins
        self._began = datetime.now(UTC)
        for schedule in self._schedules:
            key = batch.queue, schedule.name
            check_ins[key] = _check_in(batch.queue, schedule, "in_progress", check_ins.get(key))
        self._inner: AbstractContextManager[Scope] | None = None
        self._of_ids: dict[str, Scope] = {}

    def _describe(self, scope: Scope, ids: list[str], **more: Any) -> None:
        batch = self._batch
        scope.set_tag("lowq.queue", batch.queue)
        scope.set_tag("lowq.shard", str(batch.shard))
        scope.set_tag("lowq.worker", batch.worker.__name__)
        if len(ids) == 1:
            scope.set_tag("lowq.id", ids[0])
        context = {"queue": batch.queue, "shard": batch.shard, "delivery": batch.delivery, "ids": ids[:MAX_IDS]}
        if len(ids) > MAX_IDS:
            context["ids_count"] = len(ids)
        scope.set_context("lowq", context | more)

    def id_began(self, job_id: str) -> None:
        self._leave_id()
        inner = sentry_sdk.isolation_scope()
        self._of_ids[job_id] = inner.__enter__()
        self._inner = inner
        self._of_ids[job_id].clear_breadcrumbs()
        self._describe(self._of_ids[job_id], [job_id])

    def _leave_id(self) -> None:
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.__exit__(None, None, None)

    def left(self) -> None:
        self._leave_id()
        if self._spans is not None:
            self._spans.left()
        self._outer.__exit__(None, None, None)

    def ended(self, result: BatchResult | None) -> None:
        if result is not None:
            self._capture_all(result)
            self._end_check_ins(result)
        if self._spans is not None:
            failed = result is not None and any(item.verdict != "released" for item in result.failures)
            with use_isolation_scope(self._scope):
                self._spans.ended("cancelled" if result is None else "internal_error" if failed else "ok")

    def _end_check_ins(self, result: BatchResult) -> None:
        failed = {item.id for item in result.failures if item.verdict in _CHARGED}
        for schedule in self._schedules if result.is_written else ():
            if schedule.name in failed or schedule.name in result.finished:
                check_in = self._check_ins.pop((self._batch.queue, schedule.name), None)
                seconds = (datetime.now(UTC) - self._began).total_seconds()
                status: _Status = "error" if schedule.name in failed else "ok"
                _check_in(self._batch.queue, schedule, status, check_in, seconds)

    def _capture_all(self, result: BatchResult) -> None:
        # What is not written whoever performs it next reports; but a crash is charged by its next owner without a word.
        captured = self._captured if result.is_written else self._captured & {"crashed"}
        for failures in _by_error(failure for failure in result.failures if failure.verdict in captured):
            self._capture(failures)

    def _capture(self, failures: list[JobFailure]) -> None:
        first = failures[0]
        with use_isolation_scope(self._of_ids.get(first.id, self._scope)), sentry_sdk.new_scope() as scope:
            if self._spans is not None:
                scope.span = self._spans.span
            is_buried = any(failure.verdict in _BURIED for failure in failures)
            self._describe(
                scope, [failure.id for failure in failures], retry_count=first.retries, verdict=first.verdict
            )
            scope.set_tag("lowq.buried", "true" if is_buried else "false")
            if isinstance(first.error, BaseException):
                event, hint = event_from_exception(
                    first.error,
                    client_options=sentry_sdk.get_client().options,
                    mechanism={"type": "lowq", "handled": False},
                )
                sentry_sdk.capture_event(event, hint=hint)
            else:
                sentry_sdk.capture_message(first.error or "the handler has said no reason", level="error")


def _by_error(failures: Iterable[JobFailure]) -> list[list[JobFailure]]:
    """Groups failures by their error. Ids that were buried without a reason are among them."""
    groups: dict[object, list[JobFailure]] = {}
    for failure in failures:
        if failure.error is not None or failure.verdict != "released":
            key = id(failure.error) if isinstance(failure.error, BaseException) else failure.error
            groups.setdefault((failure.verdict, key), []).append(failure)
    return list(groups.values())


_Status = Literal["in_progress", "ok", "error"]


def _check_in(
    queue: str, schedule: Schedule, status: _Status, check_in: str | None = None, seconds: float | None = None
) -> str | None:
    """Sends a check-in of a schedule, unless Sentry knows no such time table. Returns its id."""
    if isinstance(schedule.at, str):
        table: dict[str, Any] = {"type": "crontab", "value": schedule.at}
    else:
        unit = next((unit for unit, size in _UNITS.items() if schedule.at % size == 0), None)
        if unit is None:
            return None
        table = {"type": "interval", "value": int(schedule.at // _UNITS[unit]), "unit": unit}
    name = schedule.name if schedule.name == queue else f"{queue}-{schedule.name}"
    slug = re.sub(r"[^a-z0-9_-]+", "-", name.lower()).strip("-")
    if len(slug) > 50 or not name.isascii():  # others may be the same without what Sentry does not take
        slug = f"{slug[:41]}-{crc32(name.encode(errors='replace')):08x}".strip("-")
    config: Any = {"schedule": table, "timezone": schedule.tz or "UTC"}
    return capture_checkin(slug, check_in, status, seconds, config)


_drops_logged_failures = False
#: Whether what becomes poison by its own report was captured: of the latest call of `instrument`.
_captures_poison = False


def _drop_logged_failures(*, captures_poison: bool) -> None:
    """Sentry makes events of log records, too. That of a failure that was captured, or will be when it is charged or
    buried, is no second event; other errors that lowq logs are.
    """
    global _drops_logged_failures, _captures_poison  # noqa: PLW0603  # so are Sentry's processors
    _captures_poison = captures_poison
    if not _drops_logged_failures:
        _drops_logged_failures = True
        add_global_event_processor(_without_logged_failures)


def _without_logged_failures(event: Any, hint: dict[str, Any]) -> Any:
    record = hint.get("log_record")
    kind = "" if record is None or not record.name.startswith("lowq.") else getattr(record, "event", "")
    # What became poison by its own report, which names the delivery, has failed in a batch that was followed.
    is_failure = kind in ("failed", "written_off") or (
        kind == "poison" and _captures_poison and hasattr(record, "delivery")
    )
    return None if is_failure else event
