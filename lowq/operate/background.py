"""The registry of tasks: bulk actions that run in the background of a process, for all processes to see and to cancel.

::

    begin --> running --report--> done | cancelled | failed
                 |
                 +-- no report for SILENCE seconds: shown as interrupted, as its process has probably died

The work itself is done by the process that has begun the task: it reports how far it is, and learns from the reply
whether somebody wants it cancelled. When the process dies, nothing needs to be cleaned up: a record without reports no
longer counts as running, and the latest records push out older ones. A process that was only frozen goes on, and so
does its record.
"""

import json
import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from lowq.backend import Backend
from lowq.errors import ConfigError
from lowq.operate.actions import ACTIONS, ActionName
from lowq.operate.job_filter import JobFilter
from lowq.store import registry, untrusted
from lowq.store.keys import MAX_SHARDS, is_queue_name, tasks_key
from lowq.store.scripts import time_of

#: Tasks that run at once, in all processes together; and others that are kept, the latest.
MAX_RUNNING, MAX_ENDED = 4, 100
#: Seconds without a report after which a task is shown as interrupted: longer than Redis may leave a call unanswered.
SILENCE = 20.0
#: Seconds after the last report until the registry expires.
KEPT = 30 * 86400
#: Characters of a user's name, a reason or an error; more are cut off.
MAX_TEXT = 1000
#: The bounds of a filter: what is further from 0 is taken for a forgery when it is read back.
MAX_BOUND = untrusted.MAX_NUMBER
#: What a task does: an action on jobs, or another number of shards for its queue.
TaskAction = Literal[ActionName, "reshard"]
TaskState = Literal["running", "done", "cancelled", "failed", "interrupted"]
_RECORD = re.compile(
    rb"(?P<state>running|done|cancelled|failed) (?P<began_at>\S+) (?P<heartbeat_at>\S+) (?P<ended_at>\S+) "
    rb"(?P<done>\d{1,16}) (?P<total>\d{1,16}|-) (?P<cancel>[01]) (?P<size>\d{1,9}) (?P<rest>.*)",
    re.DOTALL,
)
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class TooManyTasks(Exception):
    """As many tasks run as may."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task, as its process reported it last."""

    id: str
    who: str
    queue: str
    action: TaskAction
    #: Of a snapshot the time.
    filter: JobFilter
    #: The process that runs it: "host:pid".
    owner: str
    #: Unix time, seconds, by Redis's clock.
    began_at: float
    heartbeat_at: float
    ended_at: float | None = None
    state: TaskState = "running"
    done: int = 0
    #: None: they are still counted.
    total: int | None = None
    #: Somebody has asked for its end.
    cancelling: bool = False
    #: Why it failed.
    error: str | None = None
    #: Of bury.
    reason: str | None = None
    #: ``before`` is the time of a snapshot, which knows each job.
    exact: bool = False
    #: Of reshard: what the queue is given. ``done`` and ``total`` count shards.
    shards_count: int | None = None


def begin(backend: Backend, task: Task) -> Task:
    """Enters a task; its times are ignored. Returns it with those of Redis.

    Raises:
        TooManyTasks, ConfigError: nothing was entered; a bound of the filter is beyond what can be read back.
        RedisUnavailable, RedisRefused, ScriptError
    """
    for name in ("min", "max", "before"):
        bound = task.filter.given().get(name)
        if bound is not None and untrusted.number(bound) is None:
            raise ConfigError(f"{name}={bound!r:.50}: a bound of a task is a number from {-MAX_BOUND} to {MAX_BOUND}")
    facts = {
        "who": task.who[:MAX_TEXT],
        "queue": task.queue,
        "action": task.action,
        "filter": task.filter.given(),
        "owner": task.owner,
        "reason": task.reason and task.reason[:MAX_TEXT],
        "exact": task.exact,
        **({} if task.shards_count is None else {"shards_count": task.shards_count}),
    }
    entered, value = backend.client.call(
        registry.task_begin(_key(backend), task.id, json.dumps(facts), MAX_RUNNING, MAX_ENDED, SILENCE, KEPT)
    )
    if not entered:
        raise TooManyTasks(f"{value} tasks are running already; wait for one of them to end, or cancel it")
    return replace(task, began_at=float(value), heartbeat_at=float(value))


def report(
    backend: Backend, task_id: str, state: TaskState, done: int, total: int | None, error: str | None = None
) -> registry.TaskReply:
    """Writes how far a task is, or how it ended. A report of a task that has ended changes nothing.

    Raises:
        RedisUnavailable, RedisRefused, ScriptError
    """
    # Cut between characters: half of one would be read as escapes.
    text = (error or "").encode("utf-8", "backslashreplace").decode()[:MAX_TEXT]
    return backend.client.call(registry.task_report(_key(backend), task_id, state, done, total, text, KEPT))


def cancel(backend: Backend, task_id: str) -> bool:
    """Asks for the end of a task; its process ends it after the current step. False: it has ended already.

    Raises:
        RedisUnavailable, RedisRefused, ScriptError
    """
    return bool(backend.client.call(registry.task_cancel(_key(backend), task_id)))


def forget(backend: Backend, task_id: str) -> None:
    """Removes the record of a task that did nothing.

    Raises:
        RedisUnavailable, RedisRefused, ScriptError
    """
    backend.client.command("HDEL", _key(backend), task_id, key=_key(backend))


def find_task(backend: Backend, task_id: str) -> Task | None:
    """A task by its id.

    Raises:
        RedisUnavailable, RedisRefused, ScriptError
    """
    key = _key(backend)
    time, record = backend.client.commands([("TIME",), ("HGET", key, task_id.encode("utf-8", "replace"))], key=key)
    return None if record is None else _task(task_id.encode("utf-8", "replace"), record, time_of(time))


def all_tasks(backend: Backend) -> list[Task]:
    """All that are kept, the latest first. Records that can't be read are left out.

    Raises:
        RedisUnavailable, RedisRefused, ScriptError
    """
    key = _key(backend)
    time, raw = backend.client.commands([("TIME",), ("HGETALL", key)], key=key)
    now = time_of(time)
    tasks = [_task(task_id, record, now) for task_id, record in zip(raw[::2], raw[1::2], strict=True)]
    return sorted((task for task in tasks if task is not None), key=lambda task: task.began_at, reverse=True)


def _key(backend: Backend) -> str:
    return tasks_key(backend.config.namespace)


def _task(raw_id: bytes, record: bytes, now: float) -> Task | None:
    task_id = raw_id.decode("utf-8", "replace")
    parts = _RECORD.fullmatch(record)
    task = None if parts is None or not _ID.fullmatch(task_id) else _decoded(task_id, parts)
    if task is None:
        untrusted.log_skipped("task", raw_id[:100], "it is no record of ours")
        return None
    # Whatever the clock did: a process that lives reports with its present time.
    if task.state == "running" and abs(now - task.heartbeat_at) > SILENCE:
        return replace(task, state="interrupted")
    return task


def _decoded(task_id: str, parts: re.Match[bytes]) -> Task | None:
    rest, size = parts["rest"], int(parts["size"])
    facts = untrusted.json_object(rest[:size]) or {}
    began_at, heartbeat_at = (_time(parts[name]) for name in ("began_at", "heartbeat_at"))
    who, owner, queue = (untrusted.text(facts.get(name)) for name in ("who", "owner", "queue"))
    action, wanted = facts.get("action"), _filter(facts.get("filter"))
    if began_at is None or heartbeat_at is None or who is None or owner is None or not is_queue_name(queue):
        return None
    shards_count = untrusted.whole(facts.get("shards_count"), 1, MAX_SHARDS)
    if wanted is None or (action not in ACTIONS and (action != "reshard" or shards_count is None)):
        return None
    state: Any = parts["state"].decode()  # the pattern has only those that there are
    return Task(
        task_id, who, queue, action, wanted, owner, began_at, heartbeat_at, _time(parts["ended_at"]), state,
        done=int(parts["done"]), total=None if parts["total"] == b"-" else int(parts["total"]),
        cancelling=parts["cancel"] == b"1", error=rest[size:].decode("utf-8", "backslashreplace") or None,
        reason=untrusted.text(facts.get("reason")), exact=facts.get("exact") is True, shards_count=shards_count,
    )  # fmt: skip


def _time(raw: bytes) -> float | None:
    value = untrusted.finite(raw)
    return None if value is None or not 0 <= value < 2**33 else value


def _filter(value: Any) -> JobFilter | None:
    """What the record says of the jobs; None: it is no filter of ours."""
    try:
        wanted = JobFilter(**value)
    except (TypeError, ConfigError):  # no mapping, or fields that are not known; values that make no sense
        return None
    bounds = [bound for bound in (wanted.min, wanted.max, wanted.before) if bound is not None]
    if any(untrusted.number(bound) is None for bound in bounds):
        return None
    return None if wanted.match is not None and untrusted.text(wanted.match) is None else wanted
