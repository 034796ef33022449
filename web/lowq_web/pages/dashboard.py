"""All queues: figures, warnings, the hottest shards."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lowq import inspection
from lowq_web.chart import heat_maps
from lowq_web.context import AppContext, context_of
from lowq_web.fields import query_of
from lowq_web.pages.charts import charts
from lowq_web.pages.rendering import render
from lowq_web.severity import find_problems, levels_of

#: Queues of a page; and how many the filter of their names begins to be of use for.
PER_PAGE, MANY = 50, 8

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
    problems = find_problems(figures.queues, figures.flows, around.stuck)
    return {
        "figures": figures,
        "heats": heat_maps(figures.queues),
        "hottest": _hottest(figures.queues),
        "problems": problems,
        "levels": levels_of(problems),
        "redis": around.redis,
        "nodes": around.nodes,
        "stuck": around.stuck,
    }


def _number(typed: str) -> int:
    return int(typed) if typed.isascii() and typed.isdecimal() and len(typed) < 7 else 1


def _hottest(queues: tuple[inspection.QueueOverview, ...]) -> list[tuple[str, inspection.ShardInfo]]:
    found = [(item.stats.name, shard) for item in queues for shard in item.shards if shard.lag > 1]
    return sorted(found, key=lambda item: item[1].lag, reverse=True)[:3]
