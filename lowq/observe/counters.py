"""What the threads of a node count, and how it gets into the histories of their queues.

Each thread counts for itself (`Tally`, in its activity). With every heartbeat a node sends what was counted since the
last one (`Recorder`), one call per queue. ``lua/count.lua`` adds it to the queue's history, see `history`. What was
counted while Redis was away is lost; the exact counters are those of `Stats`.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

from lowq import clock as lowq_clock
from lowq.observe import slowest
from lowq.observe.slowest import EndedBatch, SlowestOfNode, SlowestOfThread
from lowq.shards.inflow import Inflow
from lowq.store import Call, registry
from lowq.store.keys import history_key

Span = Literal["hour", "day", "month"]
#: span -> (seconds of a stretch, stretches).
RINGS: dict[Span, tuple[int, int]] = {"hour": (10, 360), "day": (300, 288), "month": (7200, 360)}
#: The same of waits and performs by their length.
TIMES_RINGS: dict[Span, tuple[int, int]] = {"hour": (60, 60), "day": (900, 96), "month": (28800, 90)}
#: The same of what came in and how the backlog has changed: a forecast looks at the last minutes alone.
FLOW_RING = (10, 60)
#: Seconds after which a history that nobody adds to is forgotten.
_FORGET = 31 * 86400

#: Upper bounds of the lengths by which performs are counted, in seconds; what takes longer comes last.
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
#: The same of the times that jobs wait.
WAIT_BOUNDS = (*BOUNDS, 1800.0, 7200.0, 28800.0, 86400.0)


class Tally:
    """What one thread did for one queue since it started. Written by that thread alone, field by field: with fast jobs
    that is done a hundred thousand times a second. Others read it.
    """

    __slots__ = ("buried", "failed", "lengths", "processed", "seconds", "slowest", "waited", "waits")

    def __init__(self) -> None:
        self.processed = 0
        self.failed = 0
        #: Ids that its reports have buried, exhausted or by the handler's word.
        self.buried = 0
        #: Of all performs together.
        self.seconds = 0.0
        #: Performs by their length, as in `BOUNDS`.
        self.lengths = [0] * (len(BOUNDS) + 1)
        #: Jobs taken by how long they had waited since they were due, as in `WAIT_BOUNDS`; and all of that together.
        self.waits = [0] * (len(WAIT_BOUNDS) + 1)
        self.waited = 0.0
        self.slowest = SlowestOfThread()


def bucket_of(seconds: float) -> int:
    """Where in `Tally.lengths` a perform of this length counts."""
    return bisect_left(BOUNDS, seconds)


class Counted(NamedTuple):
    """What was counted for a queue, over all threads."""

    processed: int
    failed: int
    seconds: float
    lengths: tuple[int, ...]
    buried: int = 0
    waits: tuple[int, ...] = ()
    waited: float = 0.0


def count(tallies: Iterable[Tally]) -> Counted:
    """The sum of some tallies."""
    some = list(tallies)
    lengths = tuple(sum(column) for column in zip(*(tally.lengths for tally in some), strict=True))
    waits = tuple(sum(column) for column in zip(*(tally.waits for tally in some), strict=True))
    return Counted(
        sum(tally.processed for tally in some),
        sum(tally.failed for tally in some),
        sum(tally.seconds for tally in some),
        lengths or (0,) * (len(BOUNDS) + 1),
        sum(tally.buried for tally in some),
        waits,
        sum(tally.waited for tally in some),
    )


def _added(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Of counts by buckets: index of a bucket, how many more, ..."""
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
    """The call that adds what was counted between two moments, ``seconds`` apart, the lag at the second of them, and
    what came in between; None: it is not known. ``slow``: slow batches, each with how many seconds ago it ended.
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
        " ".join(map(str, (len(slow), slowest.MOST, slowest.STRETCH, slowest.SLOTS))) if slow else "",
        len(RINGS),
    ]
    batches: list[str | int | float | bytes] = []
    for ago, batch in slow:
        batches += [repr(max(ago, 0.0)), repr(batch.seconds), batch.ids_count, batch.shard]
        batches.append(batch.id.encode("utf-8", "surrogateescape"))
    return registry.count(key, [*head, *rings, *batches, *performs], now)


class Recorder:
    """What a node adds to the histories of its queues, with each heartbeat. For one thread, the maintenance loop's.

    ``tallies``: queue -> those of all threads; ``lag_of``: the longest lag of the node's shards of a queue, seconds, or
    None when it holds none of them. ``take_inflow``: what came in to the node's shards of a queue since it was asked
    last, or None when it doesn't know.
    """

    def __init__(
        self,
        namespace: str,
        tallies: Mapping[str, Sequence[Tally]],
        lag_of: Callable[[str], float | None],
        clock: Callable[[], float] = lowq_clock.now,
        take_inflow: Callable[[str], Inflow | None] = lambda _: None,
    ) -> None:
        self._namespace = namespace
        self._tallies = tallies
        self._lag_of = lag_of
        self._take_inflow = take_inflow
        self._clock = clock
        self._reported = {queue: count(some) for queue, some in tallies.items()}
        self._slowest = {queue: SlowestOfNode() for queue in tallies}
        self._slowest_at = {history_key(namespace, queue): slow for queue, slow in self._slowest.items()}
        self._reported_at = clock()

    def answered(self, call: Call[Any], reply: Any) -> None:  # noqa: ARG002 - of a heartbeat extra
        """Redis has what was recorded."""
        self._slowest_at[call.key].recorded()

    def __call__(self) -> list[Call[Any]]:
        now = self._clock()
        seconds, self._reported_at = now - self._reported_at, now
        calls = []
        for queue, some in self._tallies.items():
            before = self._reported[queue]
            after = self._reported[queue] = count(some)
            key, lag, inflow = history_key(self._namespace, queue), self._lag_of(queue), self._take_inflow(queue)
            slow = self._slowest[queue].update([tally.slowest for tally in some], now)
            ended = [(now - batch.ended, batch) for batch in slow]
            calls.append(record_call(key, before, after, seconds, lag, inflow=inflow, slow=ended))
        return calls
