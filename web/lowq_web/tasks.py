"""Bulk actions in the background of this process, with progress, cancellable.

Their records are in Redis (`lowq.operate.background`), so every process of the dashboard shows the same and may cancel
any of them. The work is done here, each task in a thread of its own. When this process ends, its tasks stop where they
are, what they did is done, and they are shown as interrupted.
"""

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import lowq
from lowq import admin, inspection
from lowq.admin import ReshardProgress
from lowq.operate import background as tasks
from lowq.operate.actions import ActionName
from lowq.operate.background import MAX_RUNNING, Task, TaskAction, TaskState, TooManyTasks
from lowq.operate.reshard import reshard
from lowq_web.journal import Actor, Entry
from lowq_web.stats_cache import StatsCache

__all__ = ["MAX_RUNNING", "ActionName", "Task", "TaskAction", "Tasks", "TooManyTasks"]

log = logging.getLogger(__name__)

#: Seconds between two reports of a task, at least.
REPORT_INTERVAL = 0.5
#: Seconds for which the end of a task is reported to a Redis that does not answer, and those between two attempts. An
#: attempt that has begun by then is waited for.
END_PATIENCE, END_PAUSE = 60.0, 1.0


class _Reports:
    """When a running task reports. Its own thread asks, others hurry it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._next = clock()

    def are_due(self) -> bool:
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + REPORT_INTERVAL
        return True

    def hurry(self) -> None:
        """Makes the next step report: the reply says that the task is cancelled."""
        self._next = self._clock()


class Tasks:
    """Safe for threads."""

    def __init__(self, app: lowq.Lowq, stats_cache: StatsCache, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._stats_cache = stats_cache
        self._clock = clock
        self._lock = threading.Lock()
        #: Of the tasks that run here.
        self._reports: dict[str, _Reports] = {}

    def start(
        self, who: Actor, queue: str, action: ActionName, wanted: inspection.JobFilter, reason: str | None = None
    ) -> Task:
        """Starts it and returns.

        Raises:
            TooManyTasks, ConfigError, UnknownQueueError, RedisUnavailable, RedisRefused: nothing was done to any job.
                After RedisUnavailable there may be a record of the task: it counts as running until it is shown as
                interrupted.
        """
        steps = self._app.queue(queue).bulk(action, wanted, reason=reason)
        owner = f"{socket.gethostname()}:{os.getpid()}"
        task = Task(
            secrets.token_urlsafe(8), who.name, queue, action, inspection.JobFilter(**wanted.given()), owner, 0.0, 0.0,
            reason=reason, exact=isinstance(wanted.before, inspection.Snapshot) and wanted.before.remembers,
        )  # fmt: skip
        return self._start(who, task, lambda: steps)

    def reshard(self, who: Actor, queue: str, shards_count: int) -> Task:
        """Gives a queue so many shards, or goes on with that; returns at once.

        Raises:
            TooManyTasks, ConfigError, UnknownQueueError, RedisUnavailable, RedisRefused: as of `start`. Resharding: it
                is being given another number.
        """
        owner = f"{socket.gethostname()}:{os.getpid()}"
        task = Task(
            secrets.token_urlsafe(8), who.name, queue, "reshard", inspection.JobFilter(), owner, 0.0, 0.0,
            shards_count=shards_count,
        )  # fmt: skip
        return self._start(who, task, lambda: _moved(reshard(self._app, queue, shards_count, by=who.name)))

    def _start(self, who: Actor, task: Task, begin: Callable[[], Iterator[admin.Step]]) -> Task:
        reports = _Reports(self._clock)
        with self._lock:
            # Those too whose end can't be reported, and whose records say that they were interrupted.
            if len(self._reports) >= MAX_RUNNING:
                raise TooManyTasks(f"{len(self._reports)} tasks of this process have not ended yet; try again later")
            self._reports[task.id] = reports
        try:
            try:
                task = tasks.begin(self._app, task)
                entry = Entry(self._app, who, task.action, task.queue, _detail(task))
                steps = _begun(begin, entry)
            except lowq.LowqError:
                # It may have been entered, also when no answer came. Nobody will work on it.
                with contextlib.suppress(lowq.LowqError):
                    tasks.forget(self._app, task.id)
                raise
            run = threading.Thread(
                target=self._run, args=(task, steps, reports, entry), name=f"lowq-task-{task.id}", daemon=True
            )
            run.start()
        except BaseException:
            with self._lock:
                del self._reports[task.id]
            raise
        return task

    def get(self, task_id: str) -> Task | None:
        """A task by its id.

        Raises:
            RedisUnavailable, RedisRefused
        """
        return tasks.find_task(self._app, task_id)

    def all(self) -> list[Task]:
        """All that are remembered, the latest first.

        Raises:
            RedisUnavailable, RedisRefused
        """
        return tasks.all_tasks(self._app)

    def cancel(self, task_id: str) -> bool:
        """Has it end after its current step, wherever it runs. False: it has ended already.

        Raises:
            RedisUnavailable, RedisRefused
        """
        found = tasks.cancel(self._app, task_id)
        reports = self._reports.get(task_id)
        if reports is not None:
            reports.hurry()
        return found

    def _run(self, task: Task, steps: Iterator[admin.Step], reports: _Reports, entry: Entry) -> None:
        outcome: TaskState = "done"
        fault: Exception | None = None
        error: str | None = None
        done, total = 0, None
        try:
            for step in steps:
                done, total = step.done, None if step.counting else step.total
                if not reports.are_due():
                    continue
                reply = tasks.report(self._app, task.id, "running", done, total)
                if reply.is_cancelled:
                    outcome = "cancelled"
                    break
                if reply.state != "running":
                    outcome, error = "failed", "its record in Redis is gone, so nobody could see or cancel it"
                    break
        except lowq.LowqError as failed:
            outcome, error = "failed", str(failed)
        except Exception as failed:
            fault = failed
            outcome, error = "failed", f"{type(failed).__name__}; the log of the dashboard says more"
        if isinstance(steps, Generator):
            # What it holds in Redis is given up before anybody sees that it has ended.
            with contextlib.suppress(lowq.LowqError):
                steps.close()
        self._stats_cache.forget()
        entry.ended(done, {"outcome": outcome, **({"error": error} if error else {})})
        try:
            # Last: whoever sees that it has ended sees its entry in the audit log, too.
            self._report_end(task, outcome, done, total, error)
        finally:
            with self._lock:
                del self._reports[task.id]
            if fault is not None:  # after all else, which a handler of the application's could keep from being done
                log.error("task %s failed", task.id, exc_info=fault)

    def _report_end(self, task: Task, outcome: TaskState, done: int, total: int | None, error: str | None) -> None:
        """Redis may be away just now, which may be why the task has ended. One that refuses the report is not asked
        again: it would refuse the next one, too.
        """
        gives_up_at = self._clock() + END_PATIENCE
        while True:
            try:
                tasks.report(self._app, task.id, outcome, done, total, error)
                return
            except lowq.LowqError as failed:
                if not isinstance(failed, lowq.RedisUnavailable) or self._clock() + END_PAUSE > gives_up_at:
                    log.warning("task %s: its end can't be written, it is shown as interrupted: %s", task.id, failed)
                    return
            time.sleep(END_PAUSE)


def _begun(begin: Callable[[], Iterator[admin.Step]], entry: Entry) -> Iterator[admin.Step]:
    try:
        return begin()
    except lowq.LowqError as error:
        entry.ended(None, {"outcome": "failed", "error": str(error)})
        raise


def _moved(progress: Iterator[ReshardProgress]) -> Iterator[admin.Step]:
    """How far a reshard is, in shards."""
    try:
        for step in progress:
            yield admin.Step(step.shards_moved, step.shards_count)
    finally:
        if isinstance(progress, Generator):
            progress.close()


def _detail(task: Task) -> dict[str, Any]:
    """What the log says of it."""
    if task.shards_count is not None:
        return {"to": task.shards_count, "task": task.id}
    return {**task.filter.given(), **({"reason": task.reason} if task.reason else {}), "task": task.id}
