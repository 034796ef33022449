"""The schedules of a node: each waits for its ticks as a job of an internal queue, which pushes them.

::

    job of the internal queue            the worker's queue, one shard             if the process dies here
    -------------------------            ------------------------------            ------------------------------------
    taken: a tick is due
                       reads --------->  the schedule's record                     taken again by the next holder
                       push -----------> the ticks, and the record: settled        the next holder reads the record,
                                                                                   and finds nothing to push
    released until the next tick                                                   waits

The internal queue of a worker's queue has one shard, and every node that serves a worker with schedules works it: so
one node at a time performs the schedules, and another takes over when it is gone. That alone would push a tick twice
when a node dies between push and release, or when it is frozen there and goes on after another one has taken over. What
forbids it is the record: a push changes it in the same script call, and only from what the pusher has read. So each
tick is pushed once, however late somebody tries again, and the time table advances only together with its ticks. The
tokens of pushes would not do: Redis remembers them for some seconds, and an outage may last for hours. What Redis
itself loses (a failover, a restart without its last writes) it loses together: ticks and record are in one shard.

The record also says which time table counts. When code with another one is deployed, the ticks of the old one are
settled up to that moment, and those of the new one begin there. As long as nodes disagree, that of the node which has
started last counts, for all of them; a schedule that only old nodes know goes on until they are gone. When no node that
lives knows it, it rests, and is removed after an hour: in which a restart of the nodes that know it may end.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from lowq.application import Lowq
from lowq.codec import EncodedJob, dump_payload, encode_id
from lowq.codec.types import PayloadType
from lowq.decorators import build_worker
from lowq.errors import LowqError, QueueInUse
from lowq.logs import describe, get_log
from lowq.operate.schedules import declared_by_nodes, look_call, read_record, set_record
from lowq.push.calls import new_token, push_arguments
from lowq.push.target import ANEW, CALL_JOBS
from lowq.queue import Queue
from lowq.registrations import QueueInfo
from lowq.schedules import Record, Schedule, grace_of, schedules_queue
from lowq.store import Call, Client, Command
from lowq.store.calls import time_of
from lowq.store.keys import shard_prefix
from lowq.store.shard import PUSH
from lowq.work.handler import current
from lowq.workers import Worker, schedules_of

log = get_log("lowq.node")

#: Seconds after which a schedule is looked at, also when its next tick is later: it may be another one's by now.
LOOK_SECONDS = 60.0
#: Seconds until the next attempt, when something went wrong.
TROUBLE_SECONDS = 5.0
#: Seconds after which the jobs of the schedules are entered anew, should somebody have removed them.
ENTER_SECONDS = 30.0
#: Seconds for which a schedule is kept that no live node knows.
FORGET_SECONDS = 3600.0
#: Seconds that a record may be ahead of Redis's clock, which was put back: those ticks were pushed. What is further
#: ahead comes from a clock that was wrong altogether, and would keep the schedule silent for too long: it begins anew.
AHEAD_SECONDS = 86400.0
#: Times that a turn begins anew, when somebody else has changed the record meanwhile.
TRIES = 5

#: The schedules of a queue that live nodes know, by name.
Known = Callable[[], Mapping[str, Schedule]]


def take_turn(app: Lowq, queue: Queue, name: str, known: Known, *, now: float | None = None) -> float | None:
    """Pushes the ticks of a schedule that are due. Returns the seconds until the next turn; None: the schedule has
    ended. It may be called by several at once. ``now`` stands for Redis's clock.

    Raises:
        LowqError: Redis does not answer, the queue is full, a client middleware failed ...; nothing is lost.
    """
    schedules = known()
    if app.registrations.routes_of(queue.name) is None:
        app.registrations.note_layouts(queue.name, queue.layouts)
    for _ in range(TRIES):
        found = read_record(app, queue.name, name, now)
        turn = _Turn(found.record, schedules.get(name), name, found.now, grace_of(app.config.lease_ttl))
        if turn.record == found.record:
            return turn.wait
        new = b"" if turn.record is None else turn.record.encode()
        if turn.ticks:
            if queue.push_ticks(name, turn.ticks, found.raw, new):
                return turn.wait
            continue
        if set_record(app, queue.name, name, found.raw, new):
            if turn.record is None:
                log.info(
                    "schedule %r of queue %r has ended: no node knows it any more", name, queue.name,
                    extra={"event": "schedule_ended", "queue": queue.name},
                )  # fmt: skip
            return turn.wait
    return 1.0  # somebody else is at it


class _Turn:
    """The outcome of a turn: the new record, the ticks to push, and the wait until the next turn."""

    def __init__(self, record: Record | None, known: Schedule | None, name: str, now: float, grace: float) -> None:
        #: None: there is to be none.
        self.record = record
        self.ticks: Sequence[float] = ()
        #: Seconds until the next turn; None: there is none.
        self.wait: float | None = LOOK_SECONDS
        if known is None:
            self._forget(now)
            return
        table = known.shown()
        if record is None:
            record = self.record = Record(table, settled=now)
        elif record.settled > now + AHEAD_SECONDS:
            record = self.record = record.changed(settled=now, last=None)
        if record.unknown_since is not None:
            record = self.record = record.changed(unknown_since=None)
        if record.paused_at is not None:
            return
        # Those of the time table so far come first; one that can't be read here has none.
        before = record.schedule(name) or known
        self.ticks, settled = before.due(record.settled, now, grace)
        is_behind = settled < now
        changes: dict[str, Any] = {"table": record.table if is_behind else table}
        missed = before.count(record.settled, min(settled, math.nextafter(now - grace, 0.0)))
        if self.ticks or missed or changes["table"] != record.table:
            changes |= {"settled": settled, "last": self.ticks[-1] if self.ticks else record.last}
            changes["missed"] = record.missed + missed
            self.record = record.changed(**changes)
        self.wait = 0.0 if is_behind else min(max(known.next(max(now, settled)) - now, 0.0), LOOK_SECONDS)

    def _forget(self, now: float) -> None:
        record = self.record
        if record is None:
            self.wait = None
        elif record.unknown_since is None:
            self.record = record.changed(unknown_since=now)
        elif now - record.unknown_since > FORGET_SECONDS:
            self.record = self.wait = None


class QueueSchedules:
    """The schedules of a worker's queue, as a node performs them."""

    def __init__(self, app: Lowq, worker: type[Worker[Any]], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._queue = app.queue_of(worker)
        self._clock = clock
        #: Those of this node's code.
        self.own = {schedule.name: schedule for schedule in schedules_of(worker)}
        self.queue_name = worker.queue_name
        self._prefix = shard_prefix(app.config.namespace, schedules_queue(worker.queue_name), 0)
        self._enter_at = 0.0
        self._is_entered = False
        #: How far Redis's clock was ahead of this process's when it was looked at last.
        self._offset = -math.inf
        #: What went wrong last, by name: it is not logged again at each attempt.
        self._trouble: dict[str, str] = {}
        #: Performs them, as jobs of the internal queue.
        self.worker = self._make_worker()

    def _make_worker(self) -> type[Worker[Any]]:
        def perform(_self: object, payloads_by_id: dict[str, list[Any]]) -> None:
            self.perform(list(payloads_by_id))

        made = type(f"SchedulesOf{self._queue.name}", (Worker,), {"perform": perform, "_is_internal": True})
        options = {
            "queue_name": schedules_queue(self.queue_name), "shards_count": 1, "batch_size": 10,
            # A schedule is not to blame for nodes that die while they perform it, and never goes to the morgue.
            "max_crash_count": 2**31,
        }  # fmt: skip
        worker = build_worker(self._app, made, options)
        # Nobody looks at the payloads, and the application's own codec could not read them.
        worker._payload_type = PayloadType("Any", dump_payload, bytes)
        return worker

    def perform(self, names: Sequence[str]) -> None:
        """Takes a turn of each schedule, and releases it until the next one."""
        seen: dict[str, Schedule] | None = None

        def known() -> dict[str, Schedule]:
            nonlocal seen
            if seen is None:
                seen = self._known()
            return seen

        for name in names:
            try:
                wait = take_turn(self._app, self._queue, name, known)
                self._trouble.pop(name, None)
            except Exception as error:  # whatever it is, the schedule must not end in the morgue
                self._log_trouble(name, error)
                wait = TROUBLE_SECONDS
            if wait is not None:  # otherwise it is done with
                current().release(name, wait)

    def _log_trouble(self, name: str, error: Exception) -> None:
        text = describe(error)
        if self._trouble.get(name) != text:
            self._trouble[name] = text
            log.error(
                "schedule %r of queue %r could not push its ticks, and tries again: %s", name, self.queue_name, text,
                exc_info=None if isinstance(error, LowqError) else error,
                extra={"event": "schedule_failed", "queue": self.queue_name},
            )  # fmt: skip

    def _known(self) -> dict[str, Schedule]:
        """The schedules that live nodes know, with those of this node."""
        declared = declared_by_nodes(self._app)
        return self.own | {name: item.schedule for (queue, name), item in declared.items() if queue == self.queue_name}

    def shown(self) -> dict[str, dict[str, Any]]:
        """name -> time table, for the registry of nodes."""
        return {name: schedule.shown() for name, schedule in self.own.items()}

    def enter(self, client: Client) -> float:
        """Enters the jobs of the schedules, where they are not; at first it also has whoever performs them look at this
        node's time tables, and again when Redis's clock has stepped back: they would wait for as long as the step.
        Called by the maintenance loop, once the registry of nodes says what this node knows. Returns the monotonic time
        of the next time.

        Raises:
            RedisUnavailable, and what else Redis answers.
        """
        now = self._clock()
        if now < self._enter_at or not self.own:
            return self._enter_at if self.own else float("inf")
        calls: list[Call[Any]] = []
        looks: list[Call[Any]] = []
        names = list(self.own)
        for first in range(0, len(names), CALL_JOBS):
            some = names[first : first + CALL_JOBS]
            entries: list[EncodedJob] = [(encode_id(name), b'""', b"", b"") for name in some]
            arguments = push_arguments(1, entries, new_token(), b"", self._app.group.writer.keep, ANEW)
            calls.append(Call[int](PUSH, self._prefix, (), arguments))
            looks.append(look_call(self._app.config.namespace, self.queue_name, some))
        if not self._is_entered:
            calls += looks
        *_, seconds = _answers(client, [*calls, Command(self._prefix, "TIME")])
        self._is_entered = True
        offset = time_of(seconds) - now
        if offset < self._offset - LOOK_SECONDS:
            _answers(client, looks)
        self._offset = offset
        self._enter_at = now + ENTER_SECONDS
        return self._enter_at


def _answers(client: Client, calls: Sequence[Call[Any]]) -> list[Any]:
    replies = client.run_many(calls, repeats=0)
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


def former_schedules(
    app: Lowq, registered: Iterable[QueueInfo], workers: Iterable[type[Worker[Any]]]
) -> list[QueueSchedules]:
    """Of workers that have no schedules any more: what is left of them has to be ended, and only nodes that serve these
    workers are there to do it. They go on until old nodes are gone. What has ended is dropped by the next node that
    starts.
    """
    names = {queue.name for queue in registered}
    found = []
    for worker in workers:
        if schedules_queue(worker.queue_name) in names and not schedules_of(worker):
            former = app.queue(schedules_queue(worker.queue_name), 1)
            stats = former.stats()
            if stats.length + stats.taken:
                found.append(QueueSchedules(app, worker))
            else:
                with suppress(QueueInUse):  # of a node that started before
                    former.drop()
    return found
