"""What people do, the same for pages and API. Each is written into the log of what was done."""

import logging
from collections.abc import Sequence
from typing import Any, get_args

import lowq
from lowq_web.lookout import Lookout
from lowq_web.tasks import ActionName, Filter, Task, Tasks

log = logging.getLogger(__name__)

ACTIONS: tuple[ActionName, ...] = get_args(ActionName)
#: Ids that are acted on while the browser waits: as many as a page has.
MAX_IDS = 1000


class Actions:
    """Safe for threads."""

    def __init__(self, app: lowq.Lowq, lookout: Lookout, tasks: Tasks) -> None:
        self._app = app
        self._lookout = lookout
        self._tasks = tasks

    def on_ids(
        self, who: str, queue: str, action: ActionName, ids: Sequence[str], reason: str | None = None
    ) -> lowq.Acted:
        """Something done to some ids, at once.

        Raises:
            ConfigError: too many of them. JobError, UnknownQueueError, RedisUnavailable
        """
        if len(ids) > MAX_IDS:
            raise lowq.ConfigError(
                f"{len(ids)} ids are more than the {MAX_IDS} that one request may name; use a filter"
            )
        handle = self._app.queue(queue)
        if action == "bury":
            acted = handle.bury(ids, reason or None)
        else:
            acted = {"kick": handle.kick, "delete": handle.delete, "perform_now": handle.perform_now}[action](ids)
        self._did(who, action, queue, acted.done, {"ids": list(ids[:5]), **({"reason": reason} if reason else {})})
        return acted

    def on_all(self, who: str, queue: str, action: ActionName, wanted: Filter, reason: str | None = None) -> Task:
        """Something done to all jobs that match, in the background.

        Raises:
            TooManyTasks, ConfigError, UnknownQueueError, RedisUnavailable
        """
        self._app.queue(queue).shards_count  # noqa: B018 - raises for a queue that nobody has used
        return self._tasks.start(who, queue, action, wanted, reason if action == "bury" and reason else None)

    def pause(self, who: str, queue: str) -> bool:
        """Whether that changed anything.

        Raises:
            UnknownQueueError, RedisUnavailable
        """
        changed = self._app.queue(queue).pause(by=who)
        self._did(who, "pause", queue, None, {})
        return changed

    def resume(self, who: str, queue: str) -> bool:
        """Whether that changed anything.

        Raises:
            UnknownQueueError, RedisUnavailable
        """
        changed = self._app.queue(queue).resume()
        self._did(who, "resume", queue, None, {})
        return changed

    def tell(self, who: str, node: str, what: str) -> None:
        """A node is told to go quiet or to stop.

        Raises:
            UnknownNodeError, ConfigError, RedisUnavailable
        """
        self._app.tell(node, what)  # type: ignore[arg-type]  # anything else is refused there
        self._did(who, what, node, None, {})

    def cancel(self, who: str, task: Task) -> None:
        """The task stops after its current step; what it did stays done."""
        task.cancelled.set()
        self._did(who, "cancel", task.queue, None, {"task": task.id})

    def _did(self, who: str, action: str, target: str, count: int | None, detail: dict[str, Any]) -> None:
        self._lookout.forget()
        try:
            self._app.note(who, action, target, count, detail)
        except lowq.LowqError as error:
            # It was done; to say it failed would have it done twice.
            log.warning("%s of %s by %s could not be written to the audit log: %s", action, target, who, error)
