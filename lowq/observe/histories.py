"""Histories of queues over the last month, as nodes record them, for charts, forecasts and percentiles.

A queue's history is a hash of at most about 2,000 fields, which expires a month after the last heartbeat of any node::

    WIDTH:SLOT         rates and lag, in three rings: of an hour, a day and 30 days
    times:WIDTH:SLOT   waits of jobs and lengths of batches in each stretch, in three rings
    wait:N, perform:N  their totals, by length
    flow:SLOT          payloads that came in, and the change of the backlog, in the last minutes
    slow:SLOT:N        the slowest batches of each ten minutes: old ones of an hour would hide the others

The slot of a stretch of time is its number modulo the slots of its ring, and a field has the number that it is of.
All functions here may raise RedisUnavailable, RedisRefused.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self, get_args

from lowq.backend import Backend
from lowq.codec import decode_id
from lowq.errors import ConfigError, ScriptError
from lowq.store import Command, untrusted
from lowq.store.calls import time_of
from lowq.store.keys import history_key

Span = Literal["hour", "day", "month"]
SPANS: tuple[Span, ...] = get_args(Span)


class Ring(NamedTuple):
    """The stretches of time that are kept."""

    #: Seconds of a stretch.
    width: int
    slots: int


RINGS: dict[Span, Ring] = {"hour": Ring(10, 360), "day": Ring(300, 288), "month": Ring(7200, 360)}
#: Those of waits and performs by their length.
TIMES_RINGS: dict[Span, Ring] = {"hour": Ring(60, 60), "day": Ring(900, 96), "month": Ring(28800, 90)}
#: The ring of flows: a forecast looks at the last minutes alone.
FLOW_RING = Ring(10, 60)
#: Seconds over which a flow is measured.
FLOW_WINDOW = 300.0
#: Latest stretches from which the growth of the backlog is computed; and how many of them must be known.
LATEST, LEAST_KNOWN = 6, 3

#: Upper bounds of the lengths by which performs are counted, in seconds; longer ones are counted last.
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
#: Those of the times that jobs wait.
WAIT_BOUNDS = (*BOUNDS, 1800.0, 7200.0, 28800.0, 86400.0)

#: Slow batches of a queue that are shown, each of another id; also the number kept of each stretch of time.
MOST_SLOW = 20
#: Seconds over which slow batches are shown, and seconds of a stretch.
SLOW_WINDOW, SLOW_STRETCH = 3600, 600
#: Their stretches in Redis. When one begins, its slot's batches have all left the window.
SLOW_SLOTS = SLOW_WINDOW // SLOW_STRETCH + 1

#: Seconds until all nodes have reported a stretch: they do it with their heartbeats.
_DELAY = 6.0
#: A larger figure was never counted.
_ABSURD = 1e15


def _read(
    backend: Backend, queues: Sequence[str], fields: Iterable[str], together: int, *, is_lenient: bool = True
) -> Iterator[tuple[str, str, list[bytes | None]]]:
    """Yields each queue, the key of its history, and these fields of it. ``together``: queues that are read in one
    write. ``is_lenient``: a key of the wrong type has no fields, and is logged.

    Raises:
        ScriptError: a key of the wrong type.
    """
    some_fields = [*fields]
    for start in range(0, len(queues), together):
        some = queues[start : start + together]
        keys = [history_key(backend.config.namespace, queue) for queue in some]
        replies = backend.client.run_many([Command(key, "HMGET", key, *some_fields) for key in keys])
        for queue, key, reply in zip(some, keys, replies, strict=True):
            if isinstance(reply, ScriptError) and is_lenient:
                untrusted.log_skipped("history", key, str(reply))
                yield queue, key, [None] * len(some_fields)
            elif isinstance(reply, Exception):
                raise reply
            else:
                yield queue, key, reply


def _read_now(
    backend: Backend, queue: str, fields: Iterable[str], now: float | None
) -> tuple[str, list[bytes | None], float]:
    """The key of a queue's history, these fields of it, and ``now``, by default Redis's time."""
    key = history_key(backend.config.namespace, queue)
    found, time = backend.client.commands([("HMGET", key, *fields), ("TIME",)], key=key)
    return key, found, time_of(time) if now is None else now


def _ring_of(rings: Mapping[Span, Ring], span: Span) -> Ring:
    if span not in rings:
        raise ConfigError(f"span={span!r}: it is one of {', '.join(rings)}")
    return rings[span]


# --- rates and lag ---


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """A stretch of time."""

    #: Its beginning: Unix time, seconds.
    at: float
    #: Jobs performed, and failures, per second; None: no node was running.
    processed: float | None
    failed: float | None
    #: The longest that a node saw, in seconds; None: no node saw any.
    lag: float | None


@dataclass(frozen=True, slots=True)
class History:
    """A queue's rates and lag over a span, oldest first."""

    span: Span
    #: Seconds of a stretch.
    step: int
    rates: list[HistoryPoint]


def history(backend: Backend, queue: str, span: Span, now: float | None = None) -> History:
    """The rates and lag of one queue.

    Raises:
        ConfigError: an unknown span.
    """
    width, slots = _ring_of(RINGS, span)
    key, found, now = _read_now(backend, queue, (f"{width}:{slot}" for slot in range(slots)), now)
    stretches = _finished_stretches(RINGS[span], now)
    return History(span, width, [_rates_in(key, at, n, length, found[n % slots]) for n, at, length in stretches])


def total_history(backend: Backend, queues: Sequence[str], span: Span, now: float, since: float = 0.0) -> History:
    """The rates and lag of many queues as one: rates are summed, the longest lag counts. They are added up while they
    are read, as there may be hundreds of queues. ``now``, and ``since``, of the earliest stretch: Unix time, seconds.
    """
    width, slots = RINGS[span]
    stretches = [stretch for stretch in _finished_stretches(RINGS[span], now) if stretch[1] >= since]
    totals = {number: HistoryPoint(at, None, None, None) for number, at, _ in stretches}
    fields = [f"{width}:{number % slots}" for number, _, _ in stretches]
    for _, key, found in _read(backend, queues, fields, 20, is_lenient=False):
        for (number, at, length), raw in zip(stretches, found, strict=True):
            point = _rates_in(key, at, number, length, raw)
            if point.processed is not None:
                totals[number] = _sum_of_rates(totals[number], point)
    return History(span, width, list(totals.values()) if queues else [])


def _sum_of_rates(one: HistoryPoint, other: HistoryPoint) -> HistoryPoint:
    return HistoryPoint(
        one.at,
        (one.processed or 0.0) + (other.processed or 0.0),
        (one.failed or 0.0) + (other.failed or 0.0),
        max((lag for lag in (one.lag, other.lag) if lag is not None), default=None),
    )


def _finished_stretches(ring: Ring, now: float) -> list[tuple[int, float, float]]:
    """The stretches that are shown, oldest first: number, beginning (Unix time, seconds), seconds."""
    width, slots = ring
    last = int(now // width)
    found = []
    for number in range(last - slots + 1, last + 1):
        at = number * width
        # The present stretch counts if enough of it has passed for a rate; one that still lacks reports does not.
        length = min(width, now - at)
        if now < at + width + _DELAY and length < 10 * _DELAY:
            continue
        found.append((number, float(at), length))
    return found


def _figures(key: str, number: int, raw: bytes | None, least: Sequence[float]) -> list[float] | None:
    """The figures of a stretch as it was recorded: "number figure ...". None: there are none, or they are of a round
    before. ``least``: the least value of each.
    """
    parts = [] if raw is None else raw.split()
    found = [value for value in map(untrusted.finite, parts) if value is not None and abs(value) <= _ABSURD]
    if len(parts) != 1 + len(least) or len(found) != len(parts) or any(map(float.__lt__, found[1:], least)):
        if parts:
            untrusted.log_skipped("history", key, f"{raw!r:.60} is no stretch of time")
        return None
    return found[1:] if found[0] == number else None


def _rates_in(key: str, at: float, number: int, length: float, raw: bytes | None) -> HistoryPoint:
    figures = _figures(key, number, raw, (0.0, 0.0, -1.0))
    if figures is None:
        return HistoryPoint(at, None, None, None)
    processed, failed, lag = figures
    return HistoryPoint(at, processed / length, failed / length, None if lag < 0 else lag)


# --- what came in ---


@dataclass(frozen=True, slots=True)
class Flow:
    """The payloads that came into a queue, and the jobs performed, in the last 5 minutes."""

    #: Seconds of which this is known: nodes were running.
    seconds: float
    #: Payloads that came in, also those that were merged.
    pushed: float
    #: Jobs performed.
    processed: float
    #: Growth of the backlog, the jobs that are due or in flight.
    change: float
    #: The same per second in the last minute: a burst before it says nothing about the next minutes. None: too little
    #: is known.
    growth: float | None = None
    #: Failures charged.
    failed: float = 0.0


def read_flows(backend: Backend, queues: Sequence[str], now: float | None = None) -> dict[str, Flow]:
    """The flows of these queues, without queues of which nodes have recorded none in the last 5 minutes."""
    if now is None:
        now = time_of(backend.client.command("TIME"))
    width, slots = FLOW_RING
    last = int((now - _DELAY) // width) - 1  # the latest stretch of which all have reported
    numbers = range(last - int(FLOW_WINDOW // width) + 1, last + 1)
    flows = {}
    for queue, key, found in _read(backend, queues, (f"flow:{number % slots}" for number in numbers), 100):
        stretches = [_figures(key, n, raw, (0.0, -_ABSURD, 0.0, 0.0)) for n, raw in zip(numbers, found, strict=True)]
        known = [figures for figures in stretches if figures is not None]
        if known:
            pushed, change, processed, failed = (sum(column) for column in zip(*known, strict=True))
            latest = [figures[1] for figures in stretches[-LATEST:] if figures is not None]
            growth = sum(latest) / (len(latest) * width) if len(latest) >= LEAST_KNOWN else None
            flows[queue] = Flow(len(known) * float(width), pushed, processed, change, growth, failed)
    return flows


# --- how long jobs wait and batches run ---


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts by length."""

    #: (upper bound in seconds, count of lengths up to it and beyond the bound before), the last one infinite.
    buckets: tuple[tuple[float, int], ...]

    @classmethod
    def of(cls, bounds: Sequence[float], counts: Iterable[int]) -> Self:
        """``counts``: for each of the bounds, and at the end for lengths beyond them."""
        return cls(tuple(zip((*bounds, float("inf")), counts, strict=True)))

    @property
    def count(self) -> int:
        """The sum of all counts."""
        return sum(number for _, number in self.buckets)

    def percentile(self, share: float) -> float:
        """The bound in seconds that this share does not exceed; infinite: beyond all bounds; 0.0: without counts."""
        wanted, seen = share * self.count, 0
        if wanted <= 0:
            return 0.0
        for bound, number in self.buckets:
            seen += number
            if seen >= wanted:
                return bound
        return float("inf")


#: The percentiles that are shown: name -> share.
PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class TotalTimes(Histogram):
    """Counts by length, since about a month at least."""

    #: The sum of all lengths.
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StretchTimes:
    """The waits and performs of a stretch of time."""

    #: Its beginning: Unix time, seconds.
    at: float
    #: Jobs by their waiting time, from when they were due until they were taken.
    wait: Histogram
    #: Batches by the length of their performs.
    run: Histogram


@dataclass(frozen=True, slots=True)
class Times:
    """The waits and performs of a queue over a span, oldest first."""

    span: Span
    #: Seconds of a stretch.
    step: int
    stretches: list[StretchTimes]

    @property
    def wait(self) -> Histogram:
        """Of the whole span."""
        return _sum(WAIT_BOUNDS, [stretch.wait for stretch in self.stretches])

    @property
    def run(self) -> Histogram:
        """Of the whole span."""
        return _sum(BOUNDS, [stretch.run for stretch in self.stretches])


def _sum(bounds: Sequence[float], histograms: Iterable[Histogram]) -> Histogram:
    totals = [0] * (len(bounds) + 1)
    for histogram in histograms:
        for index, (_, number) in enumerate(histogram.buckets):
            totals[index] += number
    return Histogram.of(bounds, totals)


def join(stretches: Sequence[StretchTimes]) -> StretchTimes:
    """Joins stretches in a row to one."""
    wait = _sum(WAIT_BOUNDS, [stretch.wait for stretch in stretches])
    return StretchTimes(stretches[0].at, wait, _sum(BOUNDS, [stretch.run for stretch in stretches]))


def read_times(backend: Backend, queue: str, span: Span, now: float | None = None) -> Times:
    """The waits and performs of a queue over a span. A stretch without any has no field, and a field has only the
    buckets with a count.

    Raises:
        ConfigError: an unknown span.
    """
    width, slots = _ring_of(TIMES_RINGS, span)
    key, found, now = _read_now(backend, queue, (f"times:{width}:{slot}" for slot in range(slots)), now)
    last = int(now // width)
    numbers = range(last - slots + 1, last + 1)
    return Times(span, width, [_stretch(key, number, number * width, found[number % slots]) for number in numbers])


def _stretch(key: str, number: int, at: float, raw: bytes | None) -> StretchTimes:
    """A field: "number waits performs"."""
    parts = [] if raw is None else raw.split()
    if parts and len(parts) != 3:
        untrusted.log_skipped("history", key, f"{raw!r:.60} is no stretch of times")
    if len(parts) != 3 or untrusted.count(parts[0]) != number:  # of a round before
        parts = [b"", b"-", b"-"]
    return StretchTimes(float(at), _counts(key, WAIT_BOUNDS, parts[1]), _counts(key, BOUNDS, parts[2]))


def _counts(key: str, bounds: Sequence[float], raw: bytes) -> Histogram:
    counts = [0] * (len(bounds) + 1)
    for pair in [] if raw == b"-" else raw.split(b","):
        index, _, number = pair.partition(b":")
        if not index.isdigit() or len(index) > 3 or int(index) >= len(counts):
            untrusted.log_skipped("history", key, f"{raw!r:.60} is no count of times")
            continue
        counts[int(index)] += untrusted.count(number)
    return Histogram.of(bounds, counts)


def total_times(backend: Backend, queues: Sequence[str]) -> Mapping[str, tuple[TotalTimes, TotalTimes]]:
    """Queue -> the waiting times of its jobs, and the lengths of its performs."""
    found = {}
    for queue, _, values in _read(backend, queues, (*_WAIT_FIELDS, *_RUN_FIELDS), 50):
        waits, runs = values[: len(_WAIT_FIELDS)], values[len(_WAIT_FIELDS) :]
        found[queue] = _total(WAIT_BOUNDS, waits), _total(BOUNDS, runs)
    return found


def _total(bounds: Sequence[float], values: Sequence[bytes | None]) -> TotalTimes:
    *counts, seconds = values
    return TotalTimes(Histogram.of(bounds, map(untrusted.count, counts)).buckets, untrusted.finite(seconds, 0.0))


def _fields(what: str, bounds: Sequence[float]) -> tuple[str, ...]:
    return (*(f"{what}:{index}" for index in range(len(bounds) + 1)), f"{what}:seconds")


_WAIT_FIELDS, _RUN_FIELDS = _fields("wait", WAIT_BOUNDS), _fields("perform", BOUNDS)


# --- slow batches ---


@dataclass(frozen=True, slots=True)
class SlowBatch:
    """One of the slowest batches of the last hour."""

    #: The first of its ids.
    id: str
    ids_count: int
    shard: int
    #: The length of its perform.
    seconds: float
    #: When it ended: Unix time, seconds.
    at: float


def read_slowest(backend: Backend, queue: str, now: float | None = None) -> list[SlowBatch]:
    """The slowest batches of the last hour, the slowest first, as nodes have recorded them. Batches that ended in its
    first ten minutes may be missing.
    """
    fields = (f"slow:{slot}:{n}" for slot in range(SLOW_SLOTS) for n in range(MOST_SLOW))
    key, found, until = _read_now(backend, queue, fields, now)
    slowest: dict[str, SlowBatch] = {}
    for raw in found:
        batch = None if raw is None else _slow(key, raw)
        if batch is None or abs(batch.at - until) >= SLOW_WINDOW:  # in the future, if Redis's clock was set back
            continue
        before = slowest.get(batch.id)
        if before is None or before.seconds < batch.seconds:
            slowest[batch.id] = batch
    return sorted(slowest.values(), key=lambda batch: -batch.seconds)[:MOST_SLOW]


def _slow(key: str, raw: bytes) -> SlowBatch | None:
    """A field: "at seconds count shard id"."""
    parts = raw.split(b" ", 4)
    if len(parts) == 5:
        at, seconds = untrusted.finite(parts[0]), untrusted.finite(parts[1])
        count, shard = untrusted.count(parts[2]), untrusted.count(parts[3])
        if at is not None and seconds is not None and seconds >= 0 and count:
            return SlowBatch(decode_id(parts[4]), count, shard, seconds, at)
    untrusted.log_skipped("history", key, f"{raw!r:.60} is no slow batch")
    return None
