"""How long jobs wait and how long they are performed, by length: in all, and over time, as nodes have recorded it.

The rings of times are sparse: a stretch has a field when something was taken or performed in it, with the buckets that
something fell into. There are at most 246 of them, and each has at most about 500 bytes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from lowq.backend import Backend
from lowq.errors import ConfigError, ScriptError
from lowq.observe.counters import BOUNDS, TIMES_RINGS, WAIT_BOUNDS, Span
from lowq.store import Command, untrusted
from lowq.store.keys import history_key
from lowq.store.scripts import time_of


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many of something took how long."""

    #: (upper bound in seconds, how many took no longer and longer than the bound before), the last one infinite.
    buckets: tuple[tuple[float, int], ...]

    @classmethod
    def of(cls, bounds: Sequence[float], counts: Iterable[int]) -> Self:
        """Counts for each of the bounds, and at the end for what is beyond them."""
        return cls(tuple(zip((*bounds, float("inf")), counts, strict=True)))

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(number for _, number in self.buckets)

    def percentile(self, share: float) -> float:
        """Seconds that this share of them took no longer than, as an upper bound; infinite: beyond all bounds; 0.0:
        there were none.
        """
        wanted, seen = share * self.count, 0
        if wanted <= 0:
            return 0.0
        for bound, number in self.buckets:
            seen += number
            if seen >= wanted:
                return bound
        return float("inf")


#: What is told of histograms: name -> share.
PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class TotalTimes(Histogram):
    """How many of something took how long, since about a month at least."""

    #: Of all together.
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StretchTimes:
    """What was taken and performed in a stretch of time."""

    #: Its beginning: Unix time, seconds.
    at: float
    #: Jobs by how long they had waited since they were due, when they were taken.
    wait: Histogram
    #: Batches by how long they were performed.
    run: Histogram


@dataclass(frozen=True, slots=True)
class Times:
    """How long the jobs of a queue waited and were performed, over a span, oldest first."""

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
    """Some stretches in a row as one."""
    wait = _sum(WAIT_BOUNDS, [stretch.wait for stretch in stretches])
    return StretchTimes(stretches[0].at, wait, _sum(BOUNDS, [stretch.run for stretch in stretches]))


def read_times(backend: Backend, queue: str, span: Span, now: float | None = None) -> Times:
    """Over a span.

    Raises:
        ConfigError: an unknown span. RedisUnavailable, RedisRefused
    """
    if span not in TIMES_RINGS:
        raise ConfigError(f"span={span!r}: it is one of {', '.join(TIMES_RINGS)}")
    width, slots = TIMES_RINGS[span]
    key = history_key(backend.config.namespace, queue)
    fields = [f"times:{width}:{slot}" for slot in range(slots)]
    found, time = backend.client.commands([("HMGET", key, *fields), ("TIME",)], key=key)
    last = int((time_of(time) if now is None else now) // width)
    numbers = range(last - slots + 1, last + 1)
    return Times(span, width, [_stretch(key, number, number * width, found[number % slots]) for number in numbers])


def _stretch(key: str, number: int, at: float, raw: bytes | None) -> StretchTimes:
    """A field: "stretch waits performs"."""
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


def perform_times(backend: Backend, queue: str) -> TotalTimes:
    """How long the batches of a queue were performed.

    Raises:
        RedisUnavailable, RedisRefused
    """
    return total_times(backend, [queue])[queue][1]


def wait_times(backend: Backend, queue: str) -> TotalTimes:
    """How long the jobs of a queue had waited since they were due, when they were taken.

    Raises:
        RedisUnavailable, RedisRefused
    """
    return total_times(backend, [queue])[queue][0]


def total_times(backend: Backend, queues: Sequence[str]) -> Mapping[str, tuple[TotalTimes, TotalTimes]]:
    """Queue -> how long its jobs had waited since they were due, when they were taken, and how long its batches were
    performed.

    Raises:
        RedisUnavailable, RedisRefused
    """
    found = {}
    for start in range(0, len(queues), _TOGETHER):
        some = queues[start : start + _TOGETHER]
        keys = [history_key(backend.config.namespace, queue) for queue in some]
        replies = backend.client.run_many([Command(key, "HMGET", key, *_WAIT_FIELDS, *_RUN_FIELDS) for key in keys])
        for queue, key, reply in zip(some, keys, replies, strict=True):
            if isinstance(reply, ScriptError):  # a key of the wrong type
                untrusted.log_skipped("history", key, str(reply))
                reply = [None] * (len(_WAIT_FIELDS) + len(_RUN_FIELDS))
            if isinstance(reply, Exception):
                raise reply
            waits, runs = reply[: len(_WAIT_FIELDS)], reply[len(_WAIT_FIELDS) :]
            found[queue] = _total(WAIT_BOUNDS, waits), _total(BOUNDS, runs)
    return found


def _total(bounds: Sequence[float], reply: Sequence[bytes | None]) -> TotalTimes:
    *counts, seconds = reply
    return TotalTimes(Histogram.of(bounds, map(untrusted.count, counts)).buckets, untrusted.finite(seconds, 0.0))


def _fields(what: str, bounds: Sequence[float]) -> tuple[str, ...]:
    return (*(f"{what}:{index}" for index in range(len(bounds) + 1)), f"{what}:seconds")


_WAIT_FIELDS, _RUN_FIELDS = _fields("wait", WAIT_BOUNDS), _fields("perform", BOUNDS)
#: Queues that are asked for together.
_TOGETHER = 50
