"""Background actions: bulk actions and reshards that run in threads of this process, with progress, cancellable.

::

    begin --> running --report--> done | cancelled | failed
                 |
                 +-- no report for TASK_SILENCE seconds: shown as interrupted, as its process has probably died

Their records are in Redis, so every process of the dashboard shows the same and may cancel any of them. The process
that has begun an action does the work. It reports how far it is, and learns from the reply whether the action is
cancelled. When that process dies, nothing needs to be cleaned up: what was done is done, a record without reports no
longer counts as running, and the latest records push out older ones. A process that was only frozen goes on, and so
does its record. Pages and the API call these actions tasks.
"""

import contextlib
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import lowq
from lowq.admin import ReshardProgress, Step
from lowq.inspection import JobFilter, Snapshot
from lowq.operate.actions import ACTIONS, ActionName
from lowq.operate.deploy import TASK_SILENCE
from lowq.operate.reshard import reshard
from lowq.store import registry, untrusted
from lowq.store.calls import time_of
from lowq.store.keys import MAX_SHARDS, is_queue_name, tasks_key
from lowq_web.journal import Actor, Entry
from lowq_web.listing import Queues, Target, queues_with
from lowq_web.stats_cache import StatsCache
from lowq_web.words import TaskAction

log = logging.getLogger(__name__)

#: Actions that run at once, in all processes together; and others that are kept, the latest.
MAX_RUNNING, MAX_ENDED = 4, 100
#: Seconds after the last report until the records expire.
KEPT = 30 * 86400
#: Characters of a user's name, a reason or an error; more are cut off.
MAX_TEXT = 1000
#: The bounds of a filter: what is further from 0 is taken for a forgery when it is read back.
MAX_BOUND = untrusted.MAX_NUMBER
#: Seconds between two reports of an action, at least.
REPORT_INTERVAL = 0.5
#: Seconds for which the end of an action is reported to a Redis that does not answer, and those between two attempts.
#: An attempt that has begun by then is waited for.
END_PATIENCE, END_PAUSE = 60.0, 1.0
TaskState = Literal["running", "done", "cancelled", "failed", "interrupted"]
_RECORD = re.compile(
    rb"(?P<state>running|done|cancelled|failed) (?P<began_at>\S+) (?P<heartbeat_at>\S+) (?P<ended_at>\S+) "
    rb"(?P<done>\d{1,16}) (?P<total>\d{1,16}|-) (?P<cancel>[01]) (?P<size>\d{1,9}) (?P<rest>.*)",
    re.DOTALL,
)
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class TooManyTasks(Exception):
    """As many actions run in the background as may."""


@dataclass(frozen=True, slots=True)
class BackgroundAction:
    """An action that runs in the background, as its process reported it last."""

    id: str
    who: str
    #: None: those whose names have ``part``.
    queue: str | None
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
    #: Of reshard: the new number of shards. ``done`` and ``total`` count shards.
    shards_count: int | None = None
    #: Of an action on several queues: in any case; "" for all queues.
    part: str = ""

    @property
    def target(self) -> str:
        """What it is done to, for people."""
        return self.queue or queues_with(self.part)


# --- running them ---


class BackgroundActions:
    """Runs the background actions of this process, and shows those of all. Safe for threads."""

    def __init__(self, app: lowq.Lowq, stats_cache: StatsCache, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._stats_cache = stats_cache
        self._clock = clock
        self._lock = threading.Lock()
        #: When the next report of an action that runs here is due, by its id.
        self._reports_due: dict[str, float] = {}

    def start(
        self, who: Actor, target: Target, action: ActionName, wanted: JobFilter, reason: str | None = None
    ) -> BackgroundAction:
        """Starts a bulk action and returns.

        Raises:
            TooManyTasks, ConfigError, RedisUnavailable, RedisRefused: nothing was done to any job.
                After RedisUnavailable there may be a record of the action: it counts as running until it is shown as
                interrupted.
        """
        steps = target.bulk(action, wanted, reason=reason)
        exact = isinstance(wanted.before, Snapshot) and wanted.before.remembers
        queue, part = (None, target.part) if isinstance(target, Queues) else (target.name, "")
        begun = _new(who, queue, action, JobFilter(**wanted.given()), reason=reason, exact=exact, part=part)
        return self._start(who, begun, lambda: steps)

    def reshard(self, who: Actor, queue: str, shards_count: int) -> BackgroundAction:
        """Starts a reshard, or goes on with the one that is under way, and returns.

        Raises:
            TooManyTasks, ConfigError, UnknownQueueError, RedisUnavailable, RedisRefused: as of `start`. Resharding: the
                queue is being resharded to another number.
        """
        begun = _new(who, queue, "reshard", JobFilter(), shards_count=shards_count)
        return self._start(who, begun, lambda: _moved(reshard(self._app, queue, shards_count, by=who.name)))

    def _start(
        self, who: Actor, action: BackgroundAction, begin_steps: Callable[[], Iterator[Step]]
    ) -> BackgroundAction:
        with self._lock:
            # Those too whose end can't be reported, and whose records say that they were interrupted.
            if len(self._reports_due) >= MAX_RUNNING:
                raise TooManyTasks(
                    f"{len(self._reports_due)} tasks of this process have not ended yet; try again later"
                )
            self._reports_due[action.id] = self._clock()
        try:
            try:
                action = begin(self._app, action)
                entry = Entry(self._app, who, action.action, action.target, _detail(action))
                steps = _begun(begin_steps, entry)
            except lowq.LowqError:
                # It may have been entered, also when no answer came. Nobody will work on it.
                with contextlib.suppress(lowq.LowqError):
                    forget(self._app, action.id)
                raise
            run = threading.Thread(
                target=self._run, args=(action, steps, entry), name=f"lowq-task-{action.id}", daemon=True
            )
            run.start()
        except BaseException:
            with self._lock:
                del self._reports_due[action.id]
            raise
        return action

    def cancel(self, action_id: str) -> bool:
        """Has it end after its current step, wherever it runs. False: it has ended already.

        Raises:
            RedisUnavailable, RedisRefused
        """
        is_running = cancel(self._app, action_id)
        with self._lock:
            if action_id in self._reports_due:
                self._reports_due[action_id] = self._clock()  # the reply to its next report says so
        return is_running

    def _is_report_due(self, action_id: str) -> bool:
        with self._lock:
            now = self._clock()
            if now < self._reports_due[action_id]:
                return False
            self._reports_due[action_id] = now + REPORT_INTERVAL
            return True

    def _run(self, action: BackgroundAction, steps: Iterator[Step], entry: Entry) -> None:
        outcome: TaskState = "done"
        fault: Exception | None = None
        error: str | None = None
        done, total = 0, None
        try:
            for step in steps:
                done, total = step.done, None if step.counting else step.total
                if not self._is_report_due(action.id):
                    continue
                reply = report(self._app, action.id, "running", done, total)
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
        entry.count = done
        entry.detail |= {"outcome": outcome} | ({"error": error} if error else {})
        entry.end()
        try:
            # Last: whoever sees that it has ended sees its entry in the audit log, too.
            self._report_end(action, outcome, done, total, error)
        finally:
            with self._lock:
                del self._reports_due[action.id]
            if fault is not None:  # after all else, which a handler of the application's could keep from being done
                log.error("task %s failed", action.id, exc_info=fault)

    def _report_end(
        self, action: BackgroundAction, outcome: TaskState, done: int, total: int | None, error: str | None
    ) -> None:
        """Reports how it ended. While Redis is away, which may be why it has ended, that is tried again for a while; a
        Redis that refuses the report would refuse the next one, too.
        """
        gives_up_at = self._clock() + END_PATIENCE
        while True:
            try:
                report(self._app, action.id, outcome, done, total, error)
                return
            except lowq.LowqError as failed:
                if not isinstance(failed, lowq.RedisUnavailable) or self._clock() + END_PAUSE > gives_up_at:
                    log.warning("task %s: its end can't be written, it is shown as interrupted: %s", action.id, failed)
                    return
            time.sleep(END_PAUSE)


def _new(who: Actor, queue: str | None, action: TaskAction, wanted: JobFilter, **more: Any) -> BackgroundAction:
    owner = f"{socket.gethostname()}:{os.getpid()}"
    return BackgroundAction(secrets.token_urlsafe(8), who.name, queue, action, wanted, owner, 0.0, 0.0, **more)


def _begun(begin_steps: Callable[[], Iterator[Step]], entry: Entry) -> Iterator[Step]:
    try:
        return begin_steps()
    except lowq.LowqError as error:
        entry.detail |= {"outcome": "failed", "error": str(error)}
        entry.end()
        raise


def _moved(progress: Iterator[ReshardProgress]) -> Iterator[Step]:
    """How far a reshard is, in shards."""
    try:
        for step in progress:
            yield Step(step.shards_moved, step.shards_count)
    finally:
        if isinstance(progress, Generator):
            progress.close()


def _detail(action: BackgroundAction) -> dict[str, Any]:
    """What the audit log says of it."""
    if action.shards_count is not None:
        return {"to": action.shards_count, "task": action.id}
    return {**action.filter.given(), **({"reason": action.reason} if action.reason else {}), "task": action.id}


# --- their records ---


def begin(app: lowq.Lowq, action: BackgroundAction) -> BackgroundAction:
    """Enters an action; its times are ignored. Returns it with those of Redis.

    Raises:
        TooManyTasks, ConfigError: nothing was entered; a bound of the filter is beyond what can be read back.
        RedisUnavailable, RedisRefused, ScriptError
    """
    for name in ("min", "max", "before"):
        bound = action.filter.given().get(name)
        if bound is not None and untrusted.number(bound) is None:
            raise lowq.ConfigError(
                f"{name}={bound!r:.50}: a bound of a task is a number from {-MAX_BOUND} to {MAX_BOUND}"
            )
    facts = {
        "who": action.who[:MAX_TEXT],
        "queue": action.queue,
        "action": action.action,
        "filter": action.filter.given(),
        "owner": action.owner,
        "reason": action.reason and action.reason[:MAX_TEXT],
        "exact": action.exact,
        **({} if action.shards_count is None else {"shards_count": action.shards_count}),
        **({} if action.queue is not None else {"part": action.part}),
    }
    entered, value = app.client.call(
        registry.task_begin(_key(app), action.id, json.dumps(facts), MAX_RUNNING, MAX_ENDED, TASK_SILENCE, KEPT)
    )
    if not entered:
        raise TooManyTasks(f"{value} tasks are running already; wait for one of them to end, or cancel it")
    return replace(action, began_at=float(value), heartbeat_at=float(value))


def report(
    app: lowq.Lowq, action_id: str, state: TaskState, done: int, total: int | None, error: str | None = None
) -> registry.TaskReply:
    """Writes how far an action is, or how it ended. A report of one that has ended changes nothing.

    Raises:
        RedisUnavailable, RedisRefused, ScriptError
    """
    # Cut between characters: half of one would be read as escapes.
    text = (error or "").encode("utf-8", "backslashreplace").decode()[:MAX_TEXT]
    return app.client.call(registry.task_report(_key(app), action_id, state, done, total, text, KEPT))


def cancel(app: lowq.Lowq, action_id: str) -> bool:
    """Asks for the end of an action; its process ends it after the current step. False: it has ended already.

    Raises:
        RedisUnavailable, RedisRefused, ScriptError
    """
    return bool(app.client.call(registry.task_cancel(_key(app), action_id)))


def forget(app: lowq.Lowq, action_id: str) -> None:
    """Removes the record of an action that did nothing.

    Raises:
        RedisUnavailable, RedisRefused, ScriptError
    """
    app.client.command("HDEL", _key(app), action_id, key=_key(app))


def find_action(app: lowq.Lowq, action_id: str) -> BackgroundAction | None:
    """The record of an action.

    Raises:
        RedisUnavailable, RedisRefused, ScriptError
    """
    key = _key(app)
    raw_id = action_id.encode("utf-8", "replace")
    time, record = app.client.commands([("TIME",), ("HGET", key, raw_id)], key=key)
    return None if record is None else _read(raw_id, record, time_of(time))


def read_actions(app: lowq.Lowq) -> list[BackgroundAction]:
    """All records, the latest first. Those that can't be read are left out.

    Raises:
        RedisUnavailable, RedisRefused, ScriptError
    """
    key = _key(app)
    time, raw = app.client.commands([("TIME",), ("HGETALL", key)], key=key)
    now = time_of(time)
    found = [_read(action_id, record, now) for action_id, record in zip(raw[::2], raw[1::2], strict=True)]
    return sorted((each for each in found if each is not None), key=lambda each: each.began_at, reverse=True)


def _key(app: lowq.Lowq) -> str:
    return tasks_key(app.config.namespace)


def _read(raw_id: bytes, record: bytes, now: float) -> BackgroundAction | None:
    action_id = raw_id.decode("utf-8", "replace")
    parts = _RECORD.fullmatch(record)
    action = None if parts is None or not _ID.fullmatch(action_id) else _decoded(action_id, parts)
    if action is None:
        untrusted.log_skipped("task", raw_id[:100], "it is no record of ours")
        return None
    # Whatever the clock did: a process that lives reports with its present time.
    if action.state == "running" and abs(now - action.heartbeat_at) > TASK_SILENCE:
        return replace(action, state="interrupted")
    return action


def _decoded(action_id: str, parts: re.Match[bytes]) -> BackgroundAction | None:
    rest, size = parts["rest"], int(parts["size"])
    facts = untrusted.json_object(rest[:size]) or {}
    began_at, heartbeat_at = (_time(parts[name]) for name in ("began_at", "heartbeat_at"))
    who, owner, queue, part = (untrusted.text(facts.get(name)) for name in ("who", "owner", "queue", "part"))
    action, wanted = facts.get("action"), _filter(facts.get("filter"))
    if began_at is None or heartbeat_at is None or who is None or owner is None:
        return None
    if not is_queue_name(queue) and (queue is not None or part is None):
        return None
    shards_count = untrusted.whole(facts.get("shards_count"), 1, MAX_SHARDS)
    if wanted is None or (action not in ACTIONS and (action != "reshard" or shards_count is None)):
        return None
    state: Any = parts["state"].decode()  # the pattern has only those that there are
    return BackgroundAction(
        action_id, who, queue, action, wanted, owner, began_at, heartbeat_at, _time(parts["ended_at"]), state,
        done=int(parts["done"]), total=None if parts["total"] == b"-" else int(parts["total"]),
        cancelling=parts["cancel"] == b"1", error=rest[size:].decode("utf-8", "backslashreplace") or None,
        reason=untrusted.text(facts.get("reason")), exact=facts.get("exact") is True, shards_count=shards_count,
        part=part or "",
    )  # fmt: skip


def _time(raw: bytes) -> float | None:
    value = untrusted.finite(raw)
    return None if value is None or not 0 <= value < 2**33 else value


def _filter(value: Any) -> JobFilter | None:
    """What the record says of the jobs; None: it is no filter of ours."""
    try:
        wanted = JobFilter(**value)
    except (TypeError, lowq.ConfigError):  # no mapping, or fields that are not known; values that make no sense
        return None
    bounds = [bound for bound in (wanted.min, wanted.max, wanted.before) if bound is not None]
    if any(untrusted.number(bound) is None for bound in bounds):
        return None
    return None if wanted.match is not None and untrusted.text(wanted.match) is None else wanted
