"""The schedules in Redis: when they came last and come next, and how people pause and resume them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lowq.backend import Backend
from lowq.errors import RedisUnavailable, UnknownScheduleError
from lowq.operate.actions import Pause, read_pause
from lowq.operate.nodes import nodes
from lowq.operate.queues import QueueShards, all_queues, find_entry, find_queue
from lowq.operate.walk import COMMANDS_TOGETHER, ask
from lowq.registrations import QueueInfo
from lowq.schedules import Record, Schedule, grace_of, is_internal, queue_of_schedules, schedules_queue
from lowq.sharding import Layouts
from lowq.store import Call, Command, untrusted
from lowq.store.calls import time_of
from lowq.store.keys import shard_prefix
from lowq.store.shard import ShardScripts
from lowq.store.shard_operations import ShardOperations

#: Times that a change is tried anew, when somebody else has changed the record meanwhile.
_TRIES = 20


def pause_schedule(backend: Backend, queue: str, name: str, pauses: bool, by: str = "") -> bool:
    """Pauses a schedule, so that no tick of it is pushed from now on, or resumes it: then its ``missed`` decides about
    the ticks that came meanwhile. Returns whether that changed anything.

    Raises:
        UnknownScheduleError, UnknownQueueError, RedisUnavailable
    """
    find_queue(backend, queue)
    for _ in range(_TRIES):
        found = read_record(backend, queue, name)
        if found.record is None:
            raise UnknownScheduleError(f"there is no schedule {name!r} of the queue {queue!r}")
        if (found.record.paused_at is not None) == pauses:
            return False
        record = found.record.changed(paused_at=found.now if pauses else None, paused_by=by)
        if set_record(backend, queue, name, found.raw, record.encode()):
            if not pauses:
                backend.client.call(look_call(backend.config.namespace, queue, [name]))
            return True
    raise RedisUnavailable(f"the schedule {name!r} changes all the time; nothing was done")


def look_call(namespace: str, queue: str, names: list[str]) -> Call[Any]:
    """Has the nodes read the time tables of these schedules now, not only at the next tick."""
    return ShardOperations(shard_prefix(namespace, schedules_queue(queue), 0)).perform_now(
        [name.encode() for name in names]
    )


@dataclass(frozen=True, slots=True)
class ScheduleInfo:
    """A schedule, as of one look. Times are Unix time, seconds."""

    #: The id of its jobs.
    name: str
    #: The queue that they are pushed to.
    queue: str
    #: A cron string, or seconds.
    at: str | float
    #: The time zone of a cron string; None: UTC.
    tz: str | None
    #: Which of the ticks are pushed that nobody could perform in time: "one", "all" or "skip".
    missed: str
    #: The next tick; in the past if it is due and not pushed yet. None: it is paused, or no node knows it.
    next_at: float | None
    #: The tick that was pushed last.
    last_at: float | None = None
    #: Since when it is paused, by itself or together with all others of its queue, and by whom.
    paused_at: float | None = None
    paused_by: str = ""
    #: Whether a node lives that knows it. Without one nothing is pushed, and after an hour in which other nodes perform
    #: schedules of its queue it is removed.
    is_known: bool = True
    #: How many of its ticks came when no node could push them in time, or when it was paused: they were skipped, or
    #: pushed late, as ``missed`` says.
    missed_count: int = 0

    @property
    def text(self) -> str:
        """The time table, for people."""
        return Schedule(self.name, self.at, self.tz).text


class Found(NamedTuple):
    """The record of a schedule as it is in Redis."""

    #: Empty: there is none.
    raw: bytes
    #: None: there is none, or none that can be read.
    record: Record | None
    #: Unix time, seconds, by Redis's clock.
    now: float


def read_record(backend: Backend, queue: str, name: str, now: float | None = None) -> Found:
    """The record of a schedule. ``now`` stands for Redis's clock.

    Raises:
        RedisUnavailable, RedisRefused
    """
    raw: bytes | None = None
    time: Sequence[bytes] = ()
    for prefix in record_prefixes(backend, queue, name):
        raw, time = backend.client.commands([("HGET", prefix + "schedules", name), ("TIME",)], key=prefix)
        if raw is not None:
            break
    return Found(raw or b"", None if raw is None else Record.decode(raw), time_of(time) if now is None else now)


def record_prefixes(backend: Backend, queue: str, name: str) -> list[str]:
    """The shards that may have the record: the one that its ticks are pushed to, and while a reshard is under way the
    next one.
    """
    routes = backend.registrations.routes_of(queue)
    if routes is None or routes.is_doubtful or routes.layouts.next is not None or routes.sealed:
        entry = find_entry(backend.client, backend.config.namespace, queue)
        layouts = None if entry is None else entry.layouts
        routes = routes if layouts is None else backend.registrations.note_layouts(queue, layouts)
    layouts = Layouts.plain(1) if routes is None else routes.layouts
    return [layout.prefix(backend.config.namespace, queue, layout.shard_of(name.encode())) for layout in layouts.all]


def set_record(backend: Backend, queue: str, name: str, before: bytes, record: bytes) -> bool:
    """Replaces the record; empty ones: there is none, or it is removed. False: it has changed, or is being moved to
    another shard: read it again.

    Raises:
        RedisUnavailable, RedisRefused
    """
    return any(
        backend.client.call(ShardScripts(prefix).set_schedule(name, before, record))
        for prefix in record_prefixes(backend, queue, name)
    )


class Declared(NamedTuple):
    """A schedule that live nodes know."""

    schedule: Schedule
    #: The names of those nodes.
    nodes: frozenset[str]


def declared_by_nodes(backend: Backend) -> dict[tuple[str, str], Declared]:
    """(queue, name) -> the schedule, of all that live nodes know. Where nodes disagree, as during a deploy, the latest
    to start is right.

    Raises:
        RedisUnavailable, RedisRefused
    """
    found: dict[tuple[str, str], Declared] = {}
    for node in sorted(nodes(backend), key=lambda info: (info.started_at or 0.0, info.name)):
        for queue, tables in node.schedules.items():
            for name, table in tables.items():
                schedule = Schedule.of(name, table)
                if schedule is not None:
                    before = found.get((queue, name))
                    others = before.nodes if before is not None else frozenset()
                    found[queue, name] = Declared(schedule, others | {node.name})
    return found


def schedules(backend: Backend) -> list[ScheduleInfo]:
    """All schedules, by queue and name. Where there are none, this costs one command.

    Raises:
        RedisUnavailable, RedisRefused
    """
    infos = {info.name: info for info in all_queues(backend)}
    queues = [infos[name] for name in map(queue_of_schedules, filter(is_internal, infos)) if name in infos]
    if not queues:
        return []
    declared = declared_by_nodes(backend)
    found: dict[tuple[str, str], Record] = {}
    pauses: dict[str, Pause | None] = {}
    for info in queues:
        found |= _records(backend, info)
        prefix = shard_prefix(backend.config.namespace, schedules_queue(info.name), 0)
        pauses[info.name] = read_pause(backend.client, prefix)  # all schedules of the queue
    now = time_of(backend.client.command("TIME"))
    grace = grace_of(backend.config.lease_ttl)
    rows = []
    for queue, name in sorted(found):
        record, known = found[queue, name], (queue, name) in declared
        schedule = record.schedule(name)
        if schedule is None:
            untrusted.log_skipped("schedule", name, "its record is of another version")
            continue
        pause = pauses[queue]
        paused_at = record.paused_at if pause is None else pause.at
        paused_by = record.paused_by if pause is None else pause.by or ""
        next_at = _next(schedule, record, now, grace) if known and paused_at is None else None
        rows.append(
            ScheduleInfo(
                name, queue, schedule.at, schedule.tz, schedule.missed, next_at, record.last, paused_at, paused_by,
                is_known=known, missed_count=record.missed,
            )
        )  # fmt: skip
    return rows


def find_schedule(backend: Backend, name: str, queue: str | None = None) -> ScheduleInfo:
    """A schedule by its name, and the queue where several have it.

    Raises:
        UnknownScheduleError: there is none, or there are several. RedisUnavailable, RedisRefused
    """
    everything = schedules(backend)
    found = [info for info in everything if info.name == name and queue in (None, info.queue)]
    if len(found) == 1:
        return found[0]
    if found:
        queues = ", ".join(repr(info.queue) for info in found)
        raise UnknownScheduleError(f"there are several schedules {name!r}: say which queue, of {queues}")
    known = ", ".join(map(repr, list(dict.fromkeys(info.name for info in everything))[:10])) or "none"
    where = "" if queue is None else f" of the queue {queue!r}"
    raise UnknownScheduleError(f"there is no schedule {name!r}{where}; known are: {known}")


def _next(schedule: Schedule, record: Record, now: float, grace: float) -> float | None:
    ticks, _ = schedule.due(record.settled, now, grace)
    at = ticks[0] if ticks else schedule.next(max(now, record.settled))
    return None if at == float("inf") else at


def _records(backend: Backend, info: QueueInfo) -> dict[tuple[str, str], Record]:
    found: dict[tuple[str, str], Record] = {}
    prefixes = QueueShards(backend, info.name).prefixes_in(info.layouts)
    calls = [Command(prefix, "HGETALL", prefix + "schedules") for prefix in prefixes]
    for fields in ask(backend.client, calls, COMMANDS_TOGETHER):
        for name, data in zip(fields[::2], fields[1::2], strict=True):
            record, text = Record.decode(data), name.decode("utf-8", "replace")
            if record is None:
                untrusted.log_skipped("schedule", name, "its record is none of ours")
            else:
                found[info.name, text] = record
    return found
