"""Results of tasks, in one of Django's caches, for a time: an optional record beside the job.

A record that can't be read or written is logged, and harms no task.
"""

from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

from django.conf import settings
from django.core.cache import caches
from django.core.cache.backends.dummy import DummyCache
from django.core.cache.backends.locmem import LocMemCache
from django.utils.module_loading import import_string

from lowq.logs import get_log

log = get_log(__name__)

#: Seconds that a record is kept after its last change.
DEFAULT_TTL = 24 * 3600


class TaskRecords:
    """The records of a backend. ``alias``: the name of its cache; None: it keeps none."""

    def __init__(self, alias: str | None, ttl: float | None) -> None:
        self.alias = alias
        self.ttl = ttl

    @property
    def is_shared(self) -> bool:
        """Whether another process can read what this one writes."""
        if self.alias is None or self.alias not in settings.CACHES:
            return False
        kind: type = import_string(settings.CACHES[self.alias]["BACKEND"])
        return not issubclass(kind, LocMemCache | DummyCache)

    def save(self, result: Any, *, only_new: bool = False) -> None:
        """Keeps its state. ``only_new``: unless there is a record, as a worker was faster."""
        if self.alias is None:
            return
        try:
            cache = caches[self.alias]
            (cache.add if only_new else cache.set)(_key(result.id), record_of(result), self.ttl)
        except Exception:
            log.exception(
                "the record of task %s could not be written", result.id, extra={"event": "task_record_failed"}
            )

    def load(self, result_id: str) -> Mapping[str, Any] | None:
        """The record; None: there is none, or none any more. Raises what the cache raises."""
        record: Mapping[str, Any] | None = None if self.alias is None else caches[self.alias].get(_key(result_id))
        return record

    def attempts(self, result_id: str) -> Mapping[str, Any]:
        """The record, for a worker, which does without it when it can't be read."""
        try:
            return self.load(result_id) or {}
        except Exception:
            log.exception("the record of task %s can't be read", result_id, extra={"event": "task_record_failed"})
            return {}


def _key(result_id: str) -> str:
    return f"lowq:task:{result_id}"


#: The fields of a record that are times.
TIMES = ("enqueued_at", "started_at", "finished_at", "last_attempted_at")


def record_of(result: Any) -> dict[str, Any]:
    """The record of a ``TaskResult``: JSON values, which any cache can keep."""
    task = result.task
    record = {
        "id": result.id,
        "task": task.module_path,
        "queue": task.queue_name,
        "priority": task.priority,
        "run_after": None if task.run_after is None else task.run_after.isoformat(),
        "backend": result.backend,
        "args": result.args,
        "kwargs": result.kwargs,
        "status": str(result.status),
        "errors": [[error.exception_class_path, error.traceback] for error in result.errors],
        "worker_ids": list(result.worker_ids),
        "return_value": None,
    }
    with suppress(ValueError):  # it has none yet
        record["return_value"] = result.return_value
    for name in TIMES:
        time: datetime | None = getattr(result, name)
        record[name] = None if time is None else time.isoformat()
    return record
