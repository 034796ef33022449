"""The latest figures of all queues, read once for everybody who watches.

A look costs Redis some 20 microseconds a shard. So it is taken no oftener than every two seconds, and with many shards
less often: whatever the number of shards and viewers, watching takes less than half a percent of Redis's time.
"""

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import lowq

#: Seconds between two looks, at least, and for each shard.
INTERVAL, PER_SHARD = 2.0, 0.005
#: Seconds that a history is kept: its finest stretches are 10 s long.
HISTORY_AGE = 8.0
#: Seconds for which the difference to the server's clock is taken to stay the same.
CLOCK_AGE = 30.0
#: Shards of a queue up to which its figures are read for every page.
MANY_SHARDS = 200


@dataclass(frozen=True, slots=True)
class Total:
    """All queues together."""

    length: int = 0
    due: int = 0
    scheduled: int = 0
    fresh: int = 0
    retries: int = 0
    taken: int = 0
    morgue_length: int = 0
    lag: float = 0.0
    processed: int = 0
    failed: int = 0
    died: int = 0


@dataclass(frozen=True, slots=True)
class Figures:
    """A look at all queues."""

    #: Unix time, seconds, of this machine; and monotonic.
    at: float
    moment: float
    #: Seconds for which it is the latest.
    interval: float
    queues: tuple[lowq.QueueOverview, ...]
    total: Total
    #: queue -> (performed, failed) per second since the look before; "" is all of them. Empty at the first look.
    rates: dict[str, tuple[float, float]] = field(default_factory=dict)


class Lookout:
    """Safe for threads. ``app`` is asked by whoever comes first; the others wait for what that one sees."""

    def __init__(self, app: lowq.Lowq) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._figures: Figures | None = None
        #: When the server's clock was looked at, monotonic, and how far it is ahead of ours.
        self._clock = (-math.inf, 0.0)
        self._histories: dict[tuple[str, str], tuple[float, lowq.History]] = {}

    def figures(self) -> Figures:
        """The latest figures.

        Raises:
            RedisUnavailable, RedisRefused
        """
        with self._lock:
            before = self._figures
            now = time.monotonic()
            if before is None or now - before.moment >= before.interval:
                self._figures = _look(self._app, before)
            assert self._figures is not None
            return self._figures

    def stats(self, queue: lowq.Queue) -> lowq.Stats:
        """A queue in figures: as they are now, but of very many shards as they were at the latest look.

        Raises:
            UnknownQueueError, RedisUnavailable, RedisRefused
        """
        if queue.shards_count > MANY_SHARDS:
            for item in self.figures().queues:
                if item.stats.name == queue.name:
                    return item.stats
        return queue.stats()

    def shards(self, queue: lowq.Queue) -> list[lowq.ShardInfo]:
        """Its shards; of very many as they were at the latest look.

        Raises:
            UnknownQueueError, RedisUnavailable, RedisRefused
        """
        if queue.shards_count > MANY_SHARDS:
            for item in self.figures().queues:
                if item.stats.name == queue.name:
                    return item.shards
        return self._app.shards(queue)

    def now(self) -> float:
        """Unix time, seconds, by the server's clock: due times are judged by that, not by ours.

        Raises:
            RedisUnavailable, RedisRefused
        """
        with self._lock:
            measured_at, ahead = self._clock
            if time.monotonic() - measured_at > CLOCK_AGE:
                seconds, microseconds = self._app.client.command("TIME")
                ahead = int(seconds) + int(microseconds) / 1e6 - time.time()
                self._clock = time.monotonic(), ahead
            return time.time() + ahead

    def forget(self) -> None:
        """Something was changed: the next one who asks shall see it."""
        with self._lock:
            if self._figures is not None:
                # Its counters are still what the next rates are reckoned from.
                before = self._figures
                self._figures = Figures(before.at, before.moment, 0.0, before.queues, before.total, before.rates)

    def history(self, queue: str, span: lowq.Span) -> lowq.History:
        """Rates and lag of one queue, or with ``""`` of all together.

        Raises:
            UnknownQueueError, RedisUnavailable, RedisRefused
        """
        with self._lock:
            known = self._histories.get((queue, span))
        now = time.monotonic()
        if known is not None and now - known[0] < HISTORY_AGE:
            return known[1]
        if queue:
            handle = self._app.queue(queue)
            handle.shards_count  # noqa: B018 - raises for a queue that nobody has used
            found = handle.rates(span)
        else:
            found = add_up(span, [self._app.queue(info.name).rates(span) for info in self._app.queues()])
        with self._lock:
            if len(self._histories) > 200:
                self._histories.clear()
            self._histories[queue, span] = now, found
        return found


def _look(app: lowq.Lowq, before: Figures | None) -> Figures:
    queues = tuple(app.overview())
    now = time.monotonic()
    shards = sum(len(item.shards) for item in queues)
    figures = [item.stats for item in queues]
    sums = ("length", "due", "scheduled", "fresh", "retries", "taken", "morgue_length", "processed", "failed", "died")
    total = Total(
        **{name: sum(getattr(stats, name) for stats in figures) for name in sums},
        lag=max((stats.lag for stats in figures), default=0.0),
    )
    rates: dict[str, tuple[float, float]] = {}
    if before is not None and now - before.moment >= 0.5:
        seconds = now - before.moment
        earlier = {item.stats.name: item.stats for item in before.queues}
        for stats in figures:
            if stats.name in earlier:
                was = earlier[stats.name]
                rates[stats.name] = (
                    max(stats.processed - was.processed, 0) / seconds,
                    max(stats.failed - was.failed, 0) / seconds,
                )
        rates[""] = sum(rate[0] for rate in rates.values()), sum(rate[1] for rate in rates.values())
    elif before is not None:
        rates = before.rates
    return Figures(time.time(), now, max(INTERVAL, shards * PER_SHARD), queues, total, rates)


def add_up(span: lowq.Span, histories: Sequence[lowq.History]) -> lowq.History:
    """Several histories as one: rates are summed, the longest lag counts."""
    if not histories:
        return lowq.History(span, 0, [])
    by_time: dict[float, list[lowq.Rate]] = {}
    for history in histories:
        for stretch in history.rates:
            by_time.setdefault(stretch.at, []).append(stretch)

    def summed(at: float, stretches: list[lowq.Rate]) -> lowq.Rate:
        known = [item for item in stretches if item.processed is not None]
        if not known:
            return lowq.Rate(at, None, None, None)
        return lowq.Rate(
            at,
            sum(item.processed or 0.0 for item in known),
            sum(item.failed or 0.0 for item in known),
            max((item.lag for item in known if item.lag is not None), default=None),
        )

    return lowq.History(span, histories[0].step, [summed(at, items) for at, items in sorted(by_time.items())])
