"""The actions of somebody, the same for pages and API. Each is written into the audit log."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import lowq
from lowq import admin, inspection
from lowq.admin import Moments
from lowq.codec import lookup_id
from lowq.operate.actions import ActionName
from lowq.options import QUEUE_OPTIONS
from lowq_web.background import BackgroundAction, BackgroundActions, TaskState
from lowq_web.journal import Actor, Entry, log_entry
from lowq_web.listing import Target
from lowq_web.stats_cache import StatsCache

log = logging.getLogger(__name__)

#: They can't be undone: pages always ask before.
DESTRUCTIVE = ("bury", "delete", "cancel")
#: Ids that are acted on while the browser waits: as many as a page has.
MAX_IDS = 1000
#: Seconds that the entry of a pause in the audit log may be older than the pause: it is written before.
ENTRY_BEFORE = 60.0
#: What is done to a schedule.
SCHEDULE_ACTIONS = ("run", "pause", "resume")
#: The states of a background action in which it can be cancelled.
STOPPABLE: tuple[TaskState, ...] = ("running", "interrupted")


def find_pause(app: lowq.Lowq, queue: lowq.Queue) -> tuple[inspection.Pause, str | None] | None:
    """The pause of a queue, and the reason that the audit log has of it; None: it is not paused.

    Raises:
        UnknownQueueError, RedisUnavailable
    """
    found = queue.find_pause()
    if found is None:
        return None
    entries = app.audit(100, action="pause", target=queue.name, since=found.at - ENTRY_BEFORE)
    own = [entry for entry in entries if entry.who == found.by]
    nearest = min(own, key=lambda entry: abs(entry.at - found.at), default=None)
    reason = nearest.detail.get("reason") if nearest else None
    return found, reason if isinstance(reason, str) else None


class Actions:
    """What somebody does. Safe for threads."""

    def __init__(self, app: lowq.Lowq, stats_cache: StatsCache, background: BackgroundActions, actor: Actor) -> None:
        self._app = app
        self._stats_cache = stats_cache
        self._background = background
        self._actor = actor

    def on_ids(
        self,
        queue: str,
        action: ActionName,
        ids: Sequence[str],
        reason: str | None = None,
        unchanged: Mapping[str, Moments] | None = None,
    ) -> admin.Acted:
        """Acts on the given ids at once. ``unchanged``, for bury and delete: only on those that are still as they were.

        Raises:
            ConfigError: too many of them. JobError, UnknownQueueError, RedisUnavailable
        """
        if len(ids) > MAX_IDS:
            raise lowq.ConfigError(
                f"{len(ids)} ids are more than the {MAX_IDS} that one request may name; use a filter"
            )
        for job_id in ids:
            lookup_id(job_id)
        handle = self._used(queue)
        detail = {"ids": list(ids[:5]), "named": len(ids), **({"reason": reason} if reason else {})}
        with self._written(action, queue, detail) as entry:
            if action == "bury":
                acted = handle.bury(ids, reason or None, unchanged=unchanged)
            elif action == "delete":
                acted = handle.delete(ids, unchanged=unchanged)
            else:
                acted = {"kick": handle.kick, "perform_now": handle.perform_now, "cancel": handle.cancel}[action](ids)
            entry.count = acted.done
            left = {"in_flight": acted.in_flight, "missing": acted.missing, "signalled": acted.signalled}
            entry.detail |= {name: number for name, number in left.items() if number}
        return acted

    def on_all(
        self, target: Target, action: ActionName, wanted: inspection.JobFilter, reason: str | None = None
    ) -> BackgroundAction:
        """Acts on all jobs that match, of a queue or of several, in the background.

        Raises:
            TooManyTasks, ConfigError, RedisUnavailable
        """
        reason = (reason or None) if action == "bury" else None
        return self._background.start(self._actor, target, action, wanted, reason)

    def pause(self, queue: str, reason: str | None = None) -> bool:
        """Whether that changed anything. ``reason``: for the audit log, where the page of the queue finds it.

        Raises:
            UnknownQueueError, RedisUnavailable
        """
        handle = self._used(queue)
        with self._written("pause", queue, {"reason": reason} if reason else {}) as entry:
            changed = handle.pause(by=self._actor.name)
            if not changed:
                pause = handle.find_pause()
                entry.detail |= {"changed": False} | ({"paused_by": pause.by} if pause and pause.by else {})
        return changed

    def resume(self, queue: str) -> bool:
        """Whether that changed anything.

        Raises:
            UnknownQueueError, RedisUnavailable
        """
        return self._changed("resume", queue, self._used(queue).resume)

    def reshard(self, queue: str, shards_count: int) -> BackgroundAction:
        """Gives a queue so many shards, in the background, or goes on with that.

        Raises:
            ConfigError: no queue can have so many; it has them already; or a node that serves it is strict about their
                number. Resharding: it is being given another number. TooManyTasks, UnknownQueueError, RedisUnavailable
        """
        QUEUE_OPTIONS["shards_count"].kind.check(f"queue {queue!r}: ", "shards_count", shards_count)
        layouts = self._app.queue(queue).layouts
        if layouts.next is None and layouts.current.shards_count == shards_count:
            raise lowq.ConfigError(f"queue {queue!r} has {shards_count} shards already")
        return self._background.reshard(self._actor, queue, shards_count)

    def run_schedule(self, name: str, queue: str | None) -> float:
        """Pushes a job of a schedule now; returns its ``planned_at``.

        Raises:
            UnknownScheduleError, QueueFull, PushError, RedisUnavailable
        """
        found = self._app.schedule(name, queue)
        with self._written("run_schedule", found.queue, {"schedule": found.name}) as entry:
            planned_at = self._app.run_schedule_now(found.name, found.queue)
            entry.count = 1
        return planned_at

    def pause_schedule(self, name: str, queue: str | None) -> bool:
        """Whether that changed anything.

        Raises:
            UnknownScheduleError, RedisUnavailable
        """
        found = self._app.schedule(name, queue)
        pause = partial(self._app.pause_schedule, found.name, found.queue, by=self._actor.name)
        return self._changed("pause_schedule", found.queue, pause, schedule=found.name)

    def resume_schedule(self, name: str, queue: str | None) -> bool:
        """Whether that changed anything.

        Raises:
            UnknownScheduleError, RedisUnavailable
        """
        found = self._app.schedule(name, queue)
        resume = partial(self._app.resume_schedule, found.name, found.queue)
        return self._changed("resume_schedule", found.queue, resume, schedule=found.name)

    def send_command(self, node: str, command: str) -> None:
        """Sends a node a command.

        Raises:
            UnknownNodeError, ConfigError, RedisUnavailable
        """
        self._app.send_command(node, command)  # type: ignore[arg-type]  # anything else is refused there
        self._stats_cache.forget()
        log_entry(self._actor, command, node, None, {})
        try:
            self._app.note(self._actor.name, command, node, address=self._actor.address)
        except lowq.LowqError as error:
            # The command was sent; an error now would have it sent twice.
            log.warning("%s of %s by %s could not be written to the log: %s", command, node, self._actor.name, error)

    def end_task(self, task: BackgroundAction) -> bool:
        """Has it stop after its current step; what it did stays done. One that is interrupted stops when its process
        goes on, if that only hung. False: it has ended already.

        Raises:
            RedisUnavailable, RedisRefused
        """
        if task.state not in STOPPABLE:
            return False
        with self._written("cancel", task.target, {"task": task.id}):
            return self._background.cancel(task.id)

    def _used(self, queue: str) -> lowq.Queue:
        """Its handle.

        Raises:
            UnknownQueueError: nobody has used it. RedisUnavailable
        """
        handle = self._app.queue(queue)
        handle.shards_count  # noqa: B018 - raises for a queue that nobody has used
        return handle

    def _changed(self, action: str, target: str, change: Callable[[], bool], **detail: Any) -> bool:
        with self._written(action, target, detail) as entry:
            changed = change()
            if not changed:
                entry.detail["changed"] = False
        return changed

    @contextmanager
    def _written(self, action: str, target: str, detail: Mapping[str, Any]) -> Iterator[Entry]:
        """Writes the action of the block into the audit log: before it begins, and how it ended.

        Raises:
            RedisUnavailable, RedisRefused: it can't be written; nothing was done.
        """
        try:
            with Entry(self._app, self._actor, action, target, detail) as entry:
                yield entry
        finally:
            self._stats_cache.forget()
