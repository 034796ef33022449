"""All queues: figures, warnings, the hottest shards."""

from collections.abc import Iterable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

import lowq
from lowq_web.chart import heat_maps
from lowq_web.context import context_of
from lowq_web.fields import query_of
from lowq_web.pages.charts import charts
from lowq_web.pages.rendering import render

#: Queues that are shown.
MAX_QUEUES = 500
#: Seconds of lag above which a shard without an owner is a warning: during a deploy it is normal for a few.
OWNERLESS_LAG = 10.0

_SORTS = {
    "name": lambda stats: stats.name,
    "lag": lambda stats: stats.lag,
    "due": lambda stats: stats.due,
    "length": lambda stats: stats.length,
    "fresh": lambda stats: stats.fresh,
    "retries": lambda stats: stats.retries,
    "taken": lambda stats: stats.taken,
    "morgue": lambda stats: stats.morgue_length,
    "processed": lambda stats: stats.processed,
    "failed": lambda stats: stats.failed,
}


def dashboard(request: Request) -> Response:
    """All queues."""
    context, query = context_of(request), query_of(request)
    figures = context.stats_cache.figures()
    sort = query.get("sort", "")
    sort = sort if sort in _SORTS else "name"
    down = query.get("dir") == "desc"
    queues = sorted(figures.queues, key=lambda item: _SORTS[sort](item.stats), reverse=down)
    drawn = charts(request, "dashboard", query)
    return render(
        request,
        "dashboard.html",
        figures=figures,
        queues=queues[:MAX_QUEUES],
        hidden_count=max(len(queues) - MAX_QUEUES, 0),
        sort=sort,
        down=down,
        heats=heat_maps(queues),
        hottest=_hottest(figures.queues),
        warnings=_unworked(figures.queues),
        redis=context.app.redis_info(),
        nodes=context.app.nodes(),
        **drawn,
    )


@dataclass(frozen=True, slots=True)
class Unworked:
    """A queue some of whose jobs nobody works."""

    queue: str
    #: Shards without an owner in which jobs wait, and of how many.
    shards: int
    of: int
    #: Jobs that wait in them, or were in flight.
    jobs: int
    lag: float

    @property
    def wholly(self) -> bool:
        """Whether no node works it at all."""
        return self.shards == self.of


def _unworked(queues: Iterable[lowq.QueueOverview]) -> list[Unworked]:
    """The queues with jobs that nobody works: those without any node, then those of which shards have no owner for
    longer than a deploy takes.
    """
    found = []
    for item in queues:
        lost = [shard for shard in item.shards if shard.owner is None]
        jobs = sum(shard.length + shard.taken for shard in lost)
        lag = max((shard.lag for shard in lost), default=0.0)
        if len(lost) == len(item.shards):
            lost_ones = len(lost)
        else:
            lost_ones = sum(shard.lag > OWNERLESS_LAG for shard in lost)
        if jobs and lost_ones:
            found.append(Unworked(item.stats.name, lost_ones, len(item.shards), jobs, lag))
    return sorted(found, key=lambda item: (not item.wholly, item.queue))


def _hottest(queues: tuple[lowq.QueueOverview, ...]) -> list[tuple[str, lowq.ShardInfo]]:
    found = [(item.stats.name, shard) for item in queues for shard in item.shards if shard.lag > 1]
    return sorted(found, key=lambda item: item[1].lag, reverse=True)[:3]
