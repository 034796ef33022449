"""All queues: figures, warnings, the hottest shards."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lowq import inspection
from lowq_web.chart import heat_maps
from lowq_web.context import AppContext, context_of
from lowq_web.fields import query_of
from lowq_web.pages.charts import charts
from lowq_web.pages.rendering import render

#: Queues of a page; and how many the filter of their names begins to be of use for.
PER_PAGE, MANY = 50, 8
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
    named = query.get("queue", "").strip()
    queues = sorted(
        (item for item in figures.queues if named.casefold() in item.stats.name.casefold()),
        key=lambda item: _SORTS[sort](item.stats),
        reverse=down,
    )
    last = max(-(-len(queues) // PER_PAGE), 1)
    page = min(max(_number(query.get("page", "")), 1), last)
    shown = queues[(page - 1) * PER_PAGE : page * PER_PAGE]
    drawn = charts(request, "dashboard", query)
    return render(
        request,
        "dashboard.html",
        queues=shown,
        matching=len(queues),
        page_number=page,
        pages=last,
        named=named,
        many=len(figures.queues) >= MANY,
        sort=sort,
        down=down,
        **_parts(context),
        **drawn,
    )


def parts(request: Request) -> Response:
    """What is fetched again for pages that are left open, beside the numbers of the stream. What is shown here was read
    for all viewers together.
    """
    return render(request, "parts.html", **_parts(context_of(request)))


def _parts(context: AppContext) -> dict[str, Any]:
    figures, around = context.stats_cache.figures(), context.stats_cache.surroundings()
    return {
        "figures": figures,
        "heats": heat_maps(figures.queues),
        "hottest": _hottest(figures.queues),
        "warnings": _unworked(figures.queues),
        "redis": around.redis,
        "nodes": around.nodes,
        "stuck": around.stuck,
    }


def _number(typed: str) -> int:
    return int(typed) if typed.isascii() and typed.isdecimal() and len(typed) < 7 else 1


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


def _unworked(queues: Iterable[inspection.QueueOverview]) -> list[Unworked]:
    """The queues with jobs that nobody works: those without any node, then those of which shards have no owner for
    longer than a deploy takes.
    """
    found = []
    for item in queues:
        # Nobody is to hold a shard whose jobs are being moved, or are still to come.
        held = [shard for shard in item.shards if not (shard.sealed or shard.fed)]
        lost = [shard for shard in held if shard.owner is None]
        jobs = sum(shard.length + shard.taken for shard in lost)
        lag = max((shard.lag for shard in lost), default=0.0)
        if len(lost) == len(held):
            lost_ones = len(lost)
        else:
            lost_ones = sum(shard.lag > OWNERLESS_LAG for shard in lost)
        if jobs and lost_ones:
            found.append(Unworked(item.stats.name, lost_ones, len(held), jobs, lag))
    return sorted(found, key=lambda item: (not item.wholly, item.queue))


def _hottest(queues: tuple[inspection.QueueOverview, ...]) -> list[tuple[str, inspection.ShardInfo]]:
    found = [(item.stats.name, shard) for item in queues for shard in item.shards if shard.lag > 1]
    return sorted(found, key=lambda item: item[1].lag, reverse=True)[:3]
