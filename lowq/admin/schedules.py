"""Pause and resume a schedule, and push a job of it by hand."""

from typing import Any

from lowq.backend import Backend
from lowq.errors import RedisUnavailable, UnknownScheduleError
from lowq.inspection.registry import find_queue
from lowq.inspection.schedules import read_record, set_record
from lowq.schedules import Record, schedules_queue
from lowq.store import Call
from lowq.store.keys import shard_prefix
from lowq.store.shard import ShardScripts

#: Times that a change is tried anew, when somebody else has changed the record meanwhile.
_TRIES = 20


def pause_schedule(backend: Backend, queue: str, name: str, by: str = "") -> bool:
    """No tick of the schedule is pushed from now on. Whether that changed anything.

    Raises:
        UnknownScheduleError, UnknownQueueError, RedisUnavailable
    """

    def paused(record: Record, now: float) -> Record | None:
        return record.changed(paused_at=now, paused_by=by) if record.paused_at is None else None

    return _change(backend, queue, name, paused)


def resume_schedule(backend: Backend, queue: str, name: str) -> bool:
    """Ends a pause of the schedule. Ticks that came meanwhile were missed: its ``missed`` says what becomes of them.
    Whether that changed anything.

    Raises:
        UnknownScheduleError, UnknownQueueError, RedisUnavailable
    """

    def resumed(record: Record, _now: float) -> Record | None:
        return None if record.paused_at is None else record.changed(paused_at=None, paused_by="")

    changed = _change(backend, queue, name, resumed)
    if changed:
        look_now(backend, queue, [name])
    return changed


def look_now(backend: Backend, queue: str, names: list[str]) -> None:
    """Has the nodes look at the time tables now, and not only at the next tick."""
    for reply in backend.client.run_many([look_call(backend.config.namespace, queue, names)]):
        if isinstance(reply, Exception):
            raise reply


def look_call(namespace: str, queue: str, names: list[str]) -> Call[Any]:
    """The call with which nodes look at the schedules of a queue now."""
    return ShardScripts(shard_prefix(namespace, schedules_queue(queue), 0)).perform_now(
        [name.encode() for name in names]
    )


def _change(backend: Backend, queue: str, name: str, make: Any) -> bool:
    find_queue(backend, queue)
    for _ in range(_TRIES):
        found = read_record(backend, queue, name)
        if found.record is None:
            raise UnknownScheduleError(f"there is no schedule {name!r} of the queue {queue!r}")
        changed: Record | None = make(found.record, found.now)
        if changed is None:
            return False
        if set_record(backend, queue, name, found.raw, changed.encode()):
            return True
    raise RedisUnavailable(f"the schedule {name!r} changes all the time; nothing was done")
