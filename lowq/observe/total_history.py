"""Rates and lag of many queues as one: added up while they are read, as there may be hundreds of them."""

from collections.abc import Sequence

from lowq.backend import Backend
from lowq.observe.counters import RINGS, Span
from lowq.observe.history import History, HistoryPoint, finished_stretches, read_stretch
from lowq.store import Command
from lowq.store.keys import history_key

#: Queues whose histories are asked for together.
TOGETHER = 20


def total_history(backend: Backend, queues: Sequence[str], span: Span, now: float) -> History:
    """Rates are summed, the longest lag counts. ``now``: Unix time, seconds.

    Raises:
        RedisUnavailable, RedisRefused
    """
    width, slots = RINGS[span]
    stretches = finished_stretches(span, now)
    totals: dict[int, HistoryPoint] = {number: HistoryPoint(at, None, None, None) for number, at, _ in stretches}
    fields = [f"{width}:{slot}" for slot in range(slots)]
    keys = [history_key(backend.config.namespace, name) for name in queues]
    for start in range(0, len(keys), TOGETHER):
        some = keys[start : start + TOGETHER]
        replies = backend.client.run_many([Command(key, "HMGET", key, *fields) for key in some])
        for key, reply in zip(some, replies, strict=True):
            if isinstance(reply, Exception):
                raise reply
            for number, at, length in stretches:
                if reply[number % slots] is not None:
                    totals[number] = _sum(totals[number], read_stretch(key, at, number, length, reply[number % slots]))
    return History(span, width, list(totals.values()) if queues else [])


def _sum(one: HistoryPoint, other: HistoryPoint) -> HistoryPoint:
    if other.processed is None:
        return one
    lags = [lag for lag in (one.lag, other.lag) if lag is not None]
    return HistoryPoint(
        one.at,
        (one.processed or 0.0) + other.processed,
        (one.failed or 0.0) + (other.failed or 0.0),
        max(lags, default=None),
    )
