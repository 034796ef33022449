"""Rates and lag of a queue over time, and how long its performs take: as the nodes have recorded them, for charts.

A queue's history is three rings, of an hour, a day and 30 days, in one hash of at most about 1,000 fields, which
expires a month after the last heartbeat of any node.
"""

from dataclasses import dataclass
from typing import get_args

from lowq.backend import Backend
from lowq.errors import ConfigError
from lowq.metrics.counters import BOUNDS, RINGS, Span
from lowq.store import untrusted
from lowq.store.keys import history_key
from lowq.store.scripts import time_of

SPANS: tuple[Span, ...] = get_args(Span)

#: Seconds until everybody has reported what happened in a stretch: nodes report with their heartbeats.
_DELAY = 6.0
#: What is beyond that was never counted.
_ABSURD = 1e15


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
    if span not in RINGS:
        raise ConfigError(f"span={span!r}: it is one of {', '.join(SPANS)}")
    width, slots = RINGS[span]
    key = history_key(backend.config.namespace, queue)
    fields = [f"{width}:{slot}" for slot in range(slots)]
    found, time = backend.client.commands([("HMGET", key, *fields), ("TIME",)], key=key)
    if now is None:
        now = time_of(time)
    last = int(now // width)
    rates = []
    for number in range(last - slots + 1, last + 1):
        at = number * width
        # The stretch that goes on, if enough of it has passed for a rate; not one of which reports are still to come.
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
            untrusted.log_skipped("history", key, f"{raw!r:.60} is no stretch of time")
        return Rate(at, None, None, None)
    of_slot, processed, failed, lag = figures
    if of_slot != number:  # of a round before
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
