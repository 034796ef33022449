"""Rates and lag of a queue over time, and how long its performs take: recorded by the nodes, for charts.

Each thread counts for itself (`Tally`, in its seat). With every heartbeat a node sends what was counted since the last
one (`Recorder`), one call per queue. ``lua/record.lua`` adds it to the queue's history: three rings, of an hour, a day
and 30 days, in one hash of at most about 1,000 fields, which expires a month after the last word of any node. What
was counted while Redis was away is lost; the exact counters are those of `Stats`.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from lowq.backend import Backend
from lowq.errors import ConfigError
from lowq.store import Call, untrusted
from lowq.store.keys import history_key

Span = Literal["hour", "day", "month"]
SPANS: tuple[Span, ...] = get_args(Span)

#: span -> (seconds of a stretch, stretches).
_RINGS: dict[Span, tuple[int, int]] = {"hour": (10, 360), "day": (300, 288), "month": (7200, 360)}
#: Seconds after which a history that nobody adds to is forgotten.
_FORGET = 31 * 86400
#: Seconds until everybody has told what happened in a stretch: nodes tell with their heartbeats.
_DELAY = 6.0
#: What is beyond that was never counted.
_ABSURD = 1e15

#: Upper bounds of the lengths by which performs are counted, in seconds; what takes longer comes last.
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Tally:
    """What one thread did for one queue since it started. Written by that thread alone, field by field: with fast jobs
    that is done a hundred thousand times a second. Others read it.
    """

    __slots__ = ("failed", "lengths", "processed", "seconds")

    def __init__(self) -> None:
        self.processed = 0
        self.failed = 0
        #: Of all performs together.
        self.seconds = 0.0
        #: Performs by their length, as in `BOUNDS`.
        self.lengths = [0] * (len(BOUNDS) + 1)


def bucket_of(seconds: float) -> int:
    """Where in `Tally.lengths` a perform of this length counts."""
    return bisect_left(BOUNDS, seconds)


class Counted(NamedTuple):
    """What was counted for a queue, over all threads."""

    processed: int
    failed: int
    seconds: float
    lengths: tuple[int, ...]


def count(tallies: Iterable[Tally]) -> Counted:
    """The sum of some tallies."""
    some = list(tallies)
    lengths = tuple(sum(column) for column in zip(*(tally.lengths for tally in some), strict=True))
    return Counted(
        sum(tally.processed for tally in some),
        sum(tally.failed for tally in some),
        sum(tally.seconds for tally in some),
        lengths or (0,) * (len(BOUNDS) + 1),
    )


def record_call(
    key: str, before: Counted, after: Counted, seconds: float, lag: float | None, now: float | None = None
) -> Call:
    """The call that adds what was counted between two moments, ``seconds`` apart, and the lag at the second of them;
    None: it is not known.
    """
    rings = [number for ring in _RINGS.values() for number in ring]
    performs: list[int] = []
    for index, (earlier, later) in enumerate(zip(before.lengths, after.lengths, strict=True)):
        if later > earlier:
            performs += (index, later - earlier)
    head: list[str | int | float] = [
        "" if now is None else repr(float(now)),
        repr(seconds),
        after.processed - before.processed,
        after.failed - before.failed,
        "" if lag is None else repr(lag),
        repr(max(after.seconds - before.seconds, 0.0)),
        _FORGET,
        len(_RINGS),
    ]
    return Call("record", key, [*head, *rings, *performs])


class Recorder:
    """What a node adds to the histories of its queues, with each heartbeat. For one thread, the keeper's.

    ``tallies``: queue -> those of all threads; ``lag_of``: the longest lag of the node's shards of a queue, seconds, or
    None when it holds none of them.
    """

    def __init__(
        self,
        namespace: str,
        tallies: Mapping[str, Sequence[Tally]],
        lag_of: Callable[[str], float | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._namespace = namespace
        self._tallies = tallies
        self._lag_of = lag_of
        self._clock = clock
        self._told = {queue: count(some) for queue, some in tallies.items()}
        self._told_at = clock()

    def __call__(self) -> list[Call]:
        now = self._clock()
        seconds, self._told_at = now - self._told_at, now
        calls = []
        for queue, some in self._tallies.items():
            before = self._told[queue]
            after = self._told[queue] = count(some)
            calls.append(record_call(history_key(self._namespace, queue), before, after, seconds, self._lag_of(queue)))
        return calls


# --- reading -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rate:
    """A stretch of time."""

    #: Its beginning: Unix time, seconds.
    at: float
    #: Jobs performed, and failures, per second; None: no node was running.
    processed: float | None
    failed: float | None
    #: The longest that was seen, in seconds; None: nobody saw any.
    lag: float | None


@dataclass(frozen=True, slots=True)
class History:
    """A queue's rates and lag over a span, oldest first."""

    span: Span
    #: Seconds of a stretch.
    step: int
    rates: list[Rate]


@dataclass(frozen=True, slots=True)
class PerformTimes:
    """How long the performs of a queue take, since about a month at least."""

    #: (upper bound in seconds, how many took no longer and longer than the bound before), the last one infinite.
    buckets: tuple[tuple[float, int], ...]
    #: Of all together.
    seconds: float

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(number for _, number in self.buckets)


def history(backend: Backend, queue: str, span: Span, now: float | None = None) -> History:
    """What the nodes have recorded.

    Raises:
        ConfigError: an unknown span. RedisUnavailable, RedisRefused
    """
    if span not in _RINGS:
        raise ConfigError(f"span={span!r}: it is one of {', '.join(SPANS)}")
    width, slots = _RINGS[span]
    key = history_key(backend.config.namespace, queue)
    fields = [f"{width}:{slot}" for slot in range(slots)]
    found, (seconds, microseconds) = backend.client.commands([("HMGET", key, *fields), ("TIME",)], key=key)
    if now is None:
        now = int(seconds) + int(microseconds) / 1e6
    last = int(now // width)
    rates = []
    for number in range(last - slots + 1, last + 1):
        at = number * width
        # The stretch that goes on, if enough of it has passed to tell a rate; not one of which words are still to come.
        length = min(width, now - at)
        if now < at + width + _DELAY and length < 10 * _DELAY:
            continue
        rates.append(_rate(key, at, number, length, found[number % slots]))
    return History(span, width, rates)


def _rate(key: str, at: float, number: int, length: float, raw: bytes | None) -> Rate:
    parts = [] if raw is None else raw.split()
    figures = [value for value in map(untrusted.finite, parts) if value is not None and -1 <= value <= _ABSURD]
    if len(parts) != 4 or len(figures) != 4 or min(figures[:3]) < 0:
        if parts:
            untrusted.left_out("history", key, f"{raw!r:.60} is no stretch of time")
        return Rate(at, None, None, None)
    told, processed, failed, lag = figures
    if told != number:  # of a round before
        return Rate(at, None, None, None)
    return Rate(at, processed / length, failed / length, None if lag < 0 else lag)


def perform_times(backend: Backend, queue: str) -> PerformTimes:
    """How long performs took, as the nodes have recorded it.

    Raises:
        RedisUnavailable, RedisRefused
    """
    key = history_key(backend.config.namespace, queue)
    fields = [*(f"perform:{index}" for index in range(len(BOUNDS) + 1)), "perform:seconds"]
    *counts, seconds = backend.client.command("HMGET", key, *fields, key=key)
    bounds = [*BOUNDS, float("inf")]
    return PerformTimes(
        tuple((bound, untrusted.count(number)) for bound, number in zip(bounds, counts, strict=True)),
        untrusted.finite(seconds, 0.0),
    )
