"""When the backlog of a queue is gone, if it goes on as in the last 5 minutes.

What counts is by how much the backlog, the jobs that are due or in flight, has changed, not what was pushed less what
was performed: payloads that are merged are one job, jobs that were scheduled become due without a push, and what
expires or is buried goes without being performed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lowq.inspection.figures import Stats
from lowq.inspection.overview import QueueOverview
from lowq.observe.flow import Flow

#: A queue whose backlog is what its nodes perform in so many seconds keeps up: what is due is always some jobs that
#: have just come.
KEPT_UP_SECONDS = 10.0
#: Seconds after which no end is foreseen: over so long a time the last 5 minutes say nothing.
FORESEEN_SECONDS = 30 * 86400.0
#: Jobs per second below which a backlog does not count as growing.
_GROWING = 0.05


@dataclass(frozen=True, slots=True)
class Forecast:
    """What becomes of the backlog of a queue, if it goes on as in the last 5 minutes."""

    #: Jobs that are due or in flight.
    backlog: int
    #: Payloads that came in per second, also those that were merged; None: it is not known.
    pushed_rate: float | None
    #: Jobs performed per second; None: it is not known.
    performed_rate: float | None
    #: Seconds until the backlog is gone: 0.0 when there is none; None: it is not known, or the backlog does not shrink.
    drain_seconds: float | None
    #: Jobs per second by which the backlog grows; 0.0: it does not grow; None: it is not known.
    growing_rate: float | None
    #: Whether somebody holds a shard of the queue.
    is_worked: bool = True

    @property
    def keeps_up(self) -> bool:
        """Whether there is a backlog, and no larger one than what is performed in 10 seconds."""
        return 0 < self.backlog <= (self.performed_rate or 0.0) * KEPT_UP_SECONDS

    @property
    def text(self) -> str:
        """In words: ``empty in about 58 min``, ``growing by 12/s``, ``keeps up``, ``steady``, ``empty``,
        ``no node works it``, ``nothing is performed``, ``not known yet``.
        """
        if not self.backlog:
            return "empty"
        if not self.is_worked:
            return "no node works it"
        if self.growing_rate is None:
            return "not known yet"
        if self.keeps_up:
            return "keeps up"
        if self.growing_rate:
            return f"growing by {_rate(self.growing_rate)}"
        if self.drain_seconds is not None:
            return f"empty in about {_about(self.drain_seconds)}"
        return "steady" if self.performed_rate else "nothing is performed"


def forecast_of(stats: Stats, flow: Flow | None, *, is_worked: bool) -> Forecast:
    """The forecast of a queue from its figures and what its nodes have recorded; None: nothing. ``is_worked``: whether
    somebody holds a shard of it.
    """
    backlog = stats.due + stats.taken
    if flow is None or not is_worked:
        return Forecast(backlog, None, None, None if backlog else 0.0, None, is_worked)
    pushed, performed, change = (number / flow.seconds for number in (flow.pushed, flow.processed, flow.change))
    drain_seconds, growing_rate = None, 0.0
    if not backlog:
        drain_seconds = 0.0
    elif backlog <= performed * KEPT_UP_SECONDS:
        drain_seconds = backlog / performed
    elif change >= _GROWING:
        growing_rate = change
    elif change < 0 and backlog / -change <= FORESEEN_SECONDS:
        drain_seconds = backlog / -change
    return Forecast(backlog, pushed, performed, drain_seconds, growing_rate)


def forecasts_of(queues: Iterable[QueueOverview], flows: Mapping[str, Flow]) -> dict[str, Forecast]:
    """The forecast of each of these queues, by its name."""
    return {
        item.stats.name: forecast_of(
            item.stats, flows.get(item.stats.name), is_worked=any(shard.owner is not None for shard in item.shards)
        )
        for item in queues
    }


def _about(seconds: float) -> str:
    """In one unit: ``58 min``."""
    for unit, size, upto in (("s", 1, 90), ("min", 60, 7200), ("h", 3600, 2 * 86400)):
        if seconds < upto:
            return f"{max(round(seconds / size), 1)} {unit}"
    return f"{round(seconds / 86400)} d"


def _rate(rate: float) -> str:
    return f"{rate:,.0f}/s" if rate >= 9.95 else f"{rate:.1f}/s"
