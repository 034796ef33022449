"""Sentry: what handlers raise, reported once, where the id is charged for it.

::

    batch begins   an isolation scope of its own, tagged with queue, shard and worker
    it fails       nothing: each of its ids is tried again alone, uncharged
    an id fails    one event, with the breadcrumbs of its scope, once the outcome is written in Redis
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from lowq.application import Lowq, default
from lowq.contrib import add_observer
from lowq.errors import ConfigError
from lowq.observe.events import Batch, BatchObservation, BatchResult, JobFailure, Observer

try:
    import sentry_sdk
    from sentry_sdk.scope import Scope, add_global_event_processor, use_isolation_scope
    from sentry_sdk.utils import event_from_exception
except ImportError as error:
    raise ImportError("lowq.contrib.sentry needs sentry-sdk 2: pip install 'lowq[sentry]'") from error

#: Ids that an event names at most.
MAX_IDS = 20
#: Verdicts by which an id is charged, or given up.
_CHARGED = frozenset({"retry", "exhausted", "buried", "crashed"})
_BURIED = frozenset({"exhausted", "buried"})


def instrument(app: Lowq = default, *, capture_released: bool = False) -> None:
    """Has Sentry told of what fails in nodes of this application, and in `lowq.testing.drain`. Before or after
    ``sentry_sdk.init()``; without that nothing is sent. Called again, it changes the option.

    ``capture_released``: also what is expected, and not charged: what ``release_on`` names, and a Redis that did not
    answer.

    Raises:
        ConfigError: no application, or an option that is no bool.
    """
    option: object = capture_released
    if not isinstance(option, bool):
        raise ConfigError(f"lowq.contrib.sentry.instrument: capture_released={option!r:.100} must be True or False")
    add_observer(app, _SentryObserver(capture_released=capture_released), __name__)
    _drop_logged_failures()


class _SentryObserver(Observer):
    def __init__(self, *, capture_released: bool) -> None:
        self._captured = _CHARGED | ({"released"} if capture_released else set())

    def batch_began(self, batch: Batch) -> BatchObservation | None:
        return _SentryBatch(batch, self._captured) if sentry_sdk.get_client().is_active() else None


class _SentryBatch(BatchObservation):
    """One batch: its scope, and in ``perform_one`` a scope for each id."""

    def __init__(self, batch: Batch, captured: frozenset[str]) -> None:
        self._batch = batch
        self._captured = captured
        self._outer: AbstractContextManager[Scope] = sentry_sdk.isolation_scope()
        self._scope = self._outer.__enter__()
        self._scope.clear_breadcrumbs()  # of the thread, with what it logged of other jobs
        self._describe(self._scope, [job.id for job in batch.jobs])
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
        self._outer.__exit__(None, None, None)

    def ended(self, result: BatchResult | None) -> None:
        if result is None:
            return
        # What is not written whoever performs it next reports; but a crash is charged by its next owner without a word.
        captured = self._captured if result.is_written else frozenset({"crashed"})
        for failures in _by_error(failure for failure in result.failures if failure.verdict in captured):
            self._capture(failures)

    def _capture(self, failures: list[JobFailure]) -> None:
        first = failures[0]
        with use_isolation_scope(self._of_ids.get(first.id, self._scope)), sentry_sdk.new_scope() as scope:
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


_drops_logged_failures = False


def _drop_logged_failures() -> None:
    """Sentry makes events of log records, too. That of a failure that was captured, or will be when it is charged, is
    no second event; other errors that lowq logs are.
    """
    global _drops_logged_failures  # noqa: PLW0603  # so are Sentry's processors
    if not _drops_logged_failures:
        _drops_logged_failures = True
        add_global_event_processor(_without_logged_failures)


def _without_logged_failures(event: Any, hint: dict[str, Any]) -> Any:
    record = hint.get("log_record")
    kind = "" if record is None or not record.name.startswith("lowq.") else getattr(record, "event", "")
    # What became poison by its own report, which names the delivery, has failed in a batch that was followed.
    is_failure = kind in ("failed", "written_off") or (kind == "poison" and hasattr(record, "delivery"))
    return None if is_failure else event
