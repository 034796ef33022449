"""Counts of the threads of a node, and how they get into the histories of their queues.

::

    events --> Tally        of each thread, and of the event loop, for each queue
                 +--------> SlowBatches of each queue
                 |  with each heartbeat, one call per queue: lua/count.lua
                 v
    Redis, see `histories`; and each second Graphite and StatsD

Counts of the time in which Redis was away are lost; the exact counters are those of `Stats`.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from lowq import clock as lowq_clock
from lowq.clock import Lock
from lowq.observe.events import Observer, waited
from lowq.observe.graphite_statsd import Source
from lowq.observe.health import Reading
from lowq.observe.histories import (
    BOUNDS,
    FLOW_RING,
    MOST_SLOW,
    RINGS,
    SLOW_SLOTS,
    SLOW_STRETCH,
    TIMES_RINGS,
    WAIT_BOUNDS,
)
from lowq.shards.delivery import TakenJob
from lowq.shards.shard import Activity, Inflow, Shard, lag_of
from lowq.store import Call, registry
from lowq.store.keys import history_key
from lowq.work.outcome import Outcome

#: Seconds after the last heartbeat until a history expires.
_FORGET = 31 * 86400
#: Jobs of a delivery whose waiting time is read, at most.
WAITS_READ = 4
#: Seconds. A shorter batch is never slow.
FLOOR = 0.01


class Tally(Observer):
    """The counts of one thread for one queue since it started. Written by that thread alone, field by field, as fast
    jobs do it a hundred thousand times a second. Others read it.
    """

    __slots__ = ("_slow", "buried", "cancelled", "failed", "lengths", "processed", "seconds", "waited", "waits")

    def __init__(self, slow: "SlowBatches") -> None:
        self._slow = slow
        self.processed = 0
        self.failed = 0
        #: Ids that were buried: exhausted, or by the handler.
        self.buried = 0
        #: Ids that were cancelled while they ran.
        self.cancelled = 0
        #: The length of all performs together.
        self.seconds = 0.0
        #: Performs by their length, as in `BOUNDS`.
        self.lengths = [0] * (len(BOUNDS) + 1)
        #: Jobs taken by their waiting time since they were due, as in `WAIT_BOUNDS`; and the sum of these times.
        self.waits = [0] * (len(WAIT_BOUNDS) + 1)
        self.waited = 0.0

    def jobs_taken(self, jobs: Sequence[TakenJob], taken_at: float) -> None:
        """Counts the waiting times of a delivery's jobs.

        Some jobs of a long delivery are read, evenly spread, and each stands for its neighbours: all were taken at
        once, most of them in the order in which they became due.
        """
        left, step, waits = len(jobs), -(-len(jobs) // WAITS_READ), self.waits
        for job in jobs[::step]:
            number = min(step, left)
            left -= number
            seconds = waited(job, taken_at)
            if seconds is not None:
                waits[bisect_left(WAIT_BOUNDS, seconds)] += number
                self.waited += seconds * number

    def batch_performed(
        self, shard: Shard, jobs: Sequence[TakenJob], outcome: Outcome, seconds: float, ended: float
    ) -> None:
        """Counts a batch, and keeps it if it is slow."""
        self.processed += len(outcome.finished)
        if outcome.failures:
            self.failed += sum(failure.verdict != "solo" for failure in outcome.failures)
            self.buried += len(outcome.exhausted)
        if outcome.buries:
            self.buried += len(outcome.buries)
        if outcome.cancelled:
            self.cancelled += len(outcome.cancelled)
        self.seconds += seconds
        self.lengths[0 if seconds <= BOUNDS[0] else bisect_left(BOUNDS, seconds)] += 1
        if seconds > self._slow.floor:
            self._slow.add(EndedBatch(jobs[0].id, len(jobs), shard.index, seconds, ended))


class EndedBatch(NamedTuple):
    """A batch that a thread has performed."""

    #: Its first id, and the number of its ids.
    id: str
    ids_count: int
    shard: int
    seconds: float
    #: When it ended, by `lowq.clock`.
    ended: float


class SlowBatches:
    """The slowest batches of a queue on this node in the last ten minutes, one per id. A batch that is not among them
    costs a comparison, and a heartbeat carries only those that may be among the slowest of all nodes.
    """

    def __init__(self) -> None:
        #: A batch that took no longer is not among the slowest.
        self.floor = FLOOR
        #: Guards the fields below, and changes of `floor`: threads add, the maintenance loop records.
        self._lock = Lock()
        self._kept: dict[str, EndedBatch] = {}
        #: Those of them that Redis has, and those that were sent last.
        self._recorded: set[EndedBatch] = set()
        self._sent: list[EndedBatch] = []

    def add(self, batch: EndedBatch) -> None:
        """Keeps it, unless `MOST_SLOW` others took longer."""
        with self._lock:
            before = self._kept.get(batch.id)
            if before is None or before.seconds < batch.seconds:
                self._kept[batch.id] = batch
            if len(self._kept) > MOST_SLOW:
                del self._kept[min(self._kept, key=lambda job_id: self._kept[job_id].seconds)]
            self._set_floor()

    def _set_floor(self) -> None:
        is_full = len(self._kept) >= MOST_SLOW
        self.floor = min(batch.seconds for batch in self._kept.values()) if is_full else FLOOR

    def unrecorded(self, now: float) -> list[EndedBatch]:
        """The batches that Redis does not have yet. They may be sent again: it keeps a batch once. ``now``: by
        `lowq.clock`.
        """
        with self._lock:
            self._kept = {job_id: batch for job_id, batch in self._kept.items() if now - batch.ended < SLOW_STRETCH}
            self._set_floor()
            self._recorded.intersection_update(self._kept.values())
            self._sent = [batch for batch in self._kept.values() if batch not in self._recorded]
            return self._sent

    def recorded(self) -> None:
        """Notes that Redis has the batches that `unrecorded` returned last."""
        self._recorded.update(self._sent)


class Counted(NamedTuple):
    """The counts of a queue, over all threads."""

    processed: int
    failed: int
    seconds: float
    lengths: tuple[int, ...]
    buried: int = 0
    waits: tuple[int, ...] = ()
    waited: float = 0.0
    cancelled: int = 0


def count(tallies: Iterable[Tally]) -> Counted:
    """The sum of some tallies."""
    some = [Tally(SlowBatches()), *tallies]  # with an empty one: the sum of none has its buckets, too

    def total(name: str) -> Any:
        values = [getattr(tally, name) for tally in some]
        return tuple(map(sum, zip(*values, strict=True))) if isinstance(values[0], list) else sum(values)

    return Counted(*map(total, Counted._fields))


def _added(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """The growth of counts by buckets: index of a bucket, its growth, ..."""
    found = []
    for index, (earlier, later) in enumerate(zip_longest(before, after, fillvalue=0)):
        if later > earlier:
            found += [index, later - earlier]
    return found


def record_call(
    key: str,
    before: Counted,
    after: Counted,
    seconds: float,
    lag: float | None,
    now: float | None = None,
    inflow: Inflow | None = None,
    slow: Sequence[tuple[float, EndedBatch]] = (),
) -> Call[Any]:
    """The call that adds the counts between two moments, ``seconds`` apart. ``lag``: at the second moment; ``inflow``:
    payloads that came in between; None: not known. ``slow``: slow batches, each with the seconds since its end.
    """
    rings = [number for ring in RINGS.values() for number in ring]
    performs, waits = _added(before.lengths, after.lengths), _added(before.waits, after.waits)
    waited = max(after.waited - before.waited, 0.0)
    times_rings = [number for ring in TIMES_RINGS.values() for number in ring] if performs or waits else []
    head: list[str | int | float] = [
        repr(seconds),
        after.processed - before.processed,
        after.failed - before.failed,
        "" if lag is None else repr(lag),
        repr(max(after.seconds - before.seconds, 0.0)),
        _FORGET,
        "" if inflow is None else " ".join(map(str, (*inflow, *FLOW_RING))),
        " ".join(map(str, times_rings)),
        " ".join(map(str, (waited, *waits))) if waits else "",
        " ".join(map(str, (len(slow), MOST_SLOW, SLOW_STRETCH, SLOW_SLOTS))) if slow else "",
        len(RINGS),
    ]
    batches: list[str | int | float | bytes] = []
    for ago, batch in slow:
        batches += [repr(max(ago, 0.0)), repr(batch.seconds), batch.ids_count, batch.shard]
        batches.append(batch.id.encode("utf-8", "surrogateescape"))
    return registry.count(key, [*head, *rings, *batches, *performs], now)


class Recorder:
    """Adds the counts of a node to the histories of its queues with each heartbeat. For the thread of the maintenance
    loop alone; `tallies` are made before it starts.

    ``lag_of``: the longest lag of the node's shards of a queue, seconds, or None when it holds none of them.
    ``take_inflow``: the inflow of the node's shards of a queue since the last call, or None when it is not known.
    """

    def __init__(
        self,
        namespace: str,
        queues: Iterable[str],
        lag_of: Callable[[str], float | None],
        clock: Callable[[], float] = lowq_clock.now,
        take_inflow: Callable[[str], Inflow | None] = lambda _: None,
    ) -> None:
        self._namespace = namespace
        #: queue -> the tallies of all threads.
        self.tallies: dict[str, list[Tally]] = {queue: [] for queue in queues}
        self.slow = {queue: SlowBatches() for queue in self.tallies}
        self._lag_of = lag_of
        self._take_inflow = take_inflow
        self._clock = clock
        self._reported = dict.fromkeys(self.tallies, count(()))
        self._slow_at = {history_key(namespace, queue): slow for queue, slow in self.slow.items()}
        self._reported_at = clock()

    def new_tally(self, queue: str) -> Tally:
        """The tally of one more thread, or of the event loop."""
        tally = Tally(self.slow[queue])
        self.tallies[queue].append(tally)
        return tally

    def answered(self, call: Call[Any], reply: Any) -> None:  # noqa: ARG002 - of a heartbeat extra
        """Notes that Redis has the counts of a call."""
        self._slow_at[call.key].recorded()

    def __call__(self) -> list[Call[Any]]:
        now = self._clock()
        seconds, self._reported_at = now - self._reported_at, now
        calls = []
        for queue, some in self.tallies.items():
            before = self._reported[queue]
            after = self._reported[queue] = count(some)
            key, lag, inflow = history_key(self._namespace, queue), self._lag_of(queue), self._take_inflow(queue)
            slow = [(now - batch.ended, batch) for batch in self.slow[queue].unrecorded(now)]
            calls.append(record_call(key, before, after, seconds, lag, inflow=inflow, slow=slow))
        return calls


def node_source(
    tallies: Mapping[str, Sequence[Tally]],
    shards: Callable[[], Iterable[Shard]],
    activities: Callable[[], Iterable[Activity]],
    threads: int,
) -> Source:
    """The figures of a node for Graphite and StatsD. ``tallies``: queue -> those of all threads; ``shards``: returns
    the shards that the node knows; ``activities``: returns those of threads, and of tasks of the event loop.
    """

    def read() -> dict[str, Reading]:
        shards_of: dict[str, list[Shard]] = {queue: [] for queue in tallies}
        for shard in list(shards()):
            shards_of.get(shard.queue, []).append(shard)
        readings = {queue: _read_queue(queue, some, shards_of[queue]) for queue, some in tallies.items()}
        busy = [activity for activity in activities() if activity.performing is not None]
        tasks = sum(activity.number is None for activity in busy)
        readings[""] = Reading({}, {"threads": threads, "threads_busy": len(busy) - tasks, "tasks_busy": tasks})
        return readings

    return read


def _read_queue(queue: str, tallies: Iterable[Tally], shards: Sequence[Shard]) -> Reading:
    counted = count(tallies)
    counters = {
        "processed": counted.processed,
        "failed": counted.failed,
        "buried": counted.buried,
        "cancelled": counted.cancelled,
        "performs": sum(counted.lengths),
        "perform_seconds": counted.seconds,
    }
    held = sum(shard.lease.current is not None for shard in shards)
    lag = lag_of(shards, queue)
    return Reading(counters, {"shards": held} | ({} if lag is None else {"lag": lag}))
