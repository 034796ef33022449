"""Bulk actions in the background, with progress, cancellable.

A task lives in the memory of this process: when the process ends it stops where it is, and what it did is done. Each
task has a thread of its own; a few run at once, and the latest ones that ended are remembered.
"""

import logging
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import lowq
from lowq_web.journal import Entry
from lowq_web.stats_cache import StatsCache

log = logging.getLogger(__name__)

#: Tasks that run at once, and ended ones that are remembered.
MAX_RUNNING, MAX_ENDED = 4, 100

TaskState = Literal["running", "done", "cancelled", "failed"]
ActionName = Literal["perform_now", "bury", "kick", "delete"]


class TooManyTasks(Exception):
    """As many tasks run as may."""


@dataclass(slots=True)
class Task:
    """Written by its own thread, read by others."""

    id: str
    who: str
    queue: str
    action: ActionName
    filter: lowq.JobFilter
    began_at: float
    state: TaskState = "running"
    done: int = 0
    #: None: still being counted.
    total: int | None = None
    ended_at: float | None = None
    error: str | None = None
    #: Of bury.
    reason: str | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)


class Tasks:
    """Safe for threads."""

    def __init__(self, app: lowq.Lowq, stats_cache: StatsCache) -> None:
        self._app = app
        self._stats_cache = stats_cache
        self._lock = threading.Lock()
        self._tasks: dict[str, Task] = {}

    def start(
        self, who: str, queue: str, action: ActionName, wanted: lowq.JobFilter, reason: str | None = None
    ) -> Task:
        """Starts it and returns.

        Raises:
            TooManyTasks; ConfigError, UnknownQueueError, RedisUnavailable: nothing was done.
        """
        steps = self._app.queue(queue).bulk(action, wanted, reason=reason)
        task = Task(secrets.token_urlsafe(8), who, queue, action, wanted, time.time(), reason=reason)
        with self._lock:
            running = sum(item.state == "running" for item in self._tasks.values())
            if running >= MAX_RUNNING:
                raise TooManyTasks(f"{running} tasks are running already; wait for one of them to end, or cancel it")
            for old in [item.id for item in self._tasks.values() if item.state != "running"][: -MAX_ENDED or None]:
                del self._tasks[old]
            self._tasks[task.id] = task
        try:
            entry = Entry(self._app, who, action, queue, _detail(task))
        except lowq.LowqError:
            with self._lock:
                del self._tasks[task.id]
            raise
        run = threading.Thread(target=self._run, args=(task, steps, entry), name=f"lowq-task-{task.id}", daemon=True)
        run.start()
        return task

    def get(self, task_id: str) -> Task | None:
        """A task by its id."""
        with self._lock:
            return self._tasks.get(task_id)

    def all(self) -> list[Task]:
        """All that are remembered, the latest first."""
        with self._lock:
            return list(self._tasks.values())[::-1]

    def _run(self, task: Task, steps: Iterator[lowq.Step], entry: Entry) -> None:
        outcome: TaskState = "done"
        fault: Exception | None = None
        try:
            for step in steps:
                task.done, task.total = step.done, None if step.counting else step.total
                if task.cancelled.is_set():
                    outcome = "cancelled"
                    break
        except lowq.LowqError as error:
            outcome, task.error = "failed", str(error)
        except Exception as error:
            fault = error
            outcome, task.error = "failed", f"{type(error).__name__}; the log of the dashboard says more"
        self._stats_cache.forget()
        entry.ended(task.done, {"outcome": outcome, **({"error": task.error} if task.error else {})})
        task.ended_at = time.time()
        task.state = outcome  # last: whoever sees that it has ended sees the rest of it, too
        if fault is not None:  # after all else, which a handler of the application's that fails could keep from being
            log.error("task %s failed", task.id, exc_info=fault)


def _detail(task: Task) -> dict[str, Any]:
    """What the log says of it."""
    return {**task.filter.given(), **({"reason": task.reason} if task.reason else {}), "task": task.id}
