"""Rates and lag of a queue over time, as the nodes have recorded them, for charts.

A queue's history is three rings, of an hour, a day and 30 days, in one hash of at most about 1,500 fields, which
expires a month after the last heartbeat of any node. The rest of them are the rings of `flow` and of `times`.
"""

from dataclasses import dataclass
from typing import get_args

from lowq.backend import Backend
from lowq.errors import ConfigError
from lowq.observe.counters import RINGS, Span
from lowq.store import untrusted
from lowq.store.keys import history_key
from lowq.store.scripts import time_of

SPANS: tuple[Span, ...] = get_args(Span)

#: Seconds until everybody has reported what happened in a stretch: nodes report with their heartbeats.
_DELAY = 6.0
#: What is beyond that was never counted.
_ABSURD = 1e15


@dataclass(frozen=True, slots=True)
class HistoryPoint:
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
    rates: list[HistoryPoint]


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
    rates = [
        read_stretch(key, at, number, length, found[number % slots])
        for number, at, length in finished_stretches(span, now)
    ]
    return History(span, width, rates)


def finished_stretches(span: Span, now: float) -> list[tuple[int, float, float]]:
    """The stretches of a span that are shown, oldest first: number, beginning (Unix time, seconds), seconds."""
    width, slots = RINGS[span]
    last = int(now // width)
    found = []
    for number in range(last - slots + 1, last + 1):
        at = number * width
        # The stretch that goes on, if enough of it has passed for a rate; not one of which reports are still to come.
        length = min(width, now - at)
        if now < at + width + _DELAY and length < 10 * _DELAY:
            continue
        found.append((number, float(at), length))
    return found


def read_stretch(key: str, at: float, number: int, length: float, raw: bytes | None) -> HistoryPoint:
    """A stretch as it was recorded under that key, if it is this one and not one of a round before."""
    parts = [] if raw is None else raw.split()
    figures = [value for value in map(untrusted.finite, parts) if value is not None and -1 <= value <= _ABSURD]
    if len(parts) != 4 or len(figures) != 4 or min(figures[:3]) < 0:
        if parts:
            untrusted.log_skipped("history", key, f"{raw!r:.60} is no stretch of time")
        return HistoryPoint(at, None, None, None)
    of_slot, processed, failed, lag = figures
    if of_slot != number:  # of a round before
        return HistoryPoint(at, None, None, None)
    return HistoryPoint(at, processed / length, failed / length, None if lag < 0 else lag)
