"""All queues: figures, warnings, the hottest shards."""

from functools import lru_cache
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lowq_web.chart import heat_maps
from lowq_web.context import AppContext, context_of, query_of
from lowq_web.pages.charts import charts, verdict
from lowq_web.pages.rendering import draw_heat, render
from lowq_web.stats_cache import Snapshot

#: Queues of a page; and how many the filter of their names begins to be of use for.
PER_PAGE, MANY = 50, 8

#: Column -> the figure that it is sorted by.
_SORTS = {name: name for name in ("name", "lag", "due", "length", "fresh", "retries", "taken", "processed", "failed")}
_SORTS["morgue"] = "morgue_length"


def dashboard(request: Request) -> Response:
    """All queues."""
    context, query = context_of(request), query_of(request)
    figures = context.stats_cache.figures()
    sort = query.get("sort", "")
    sort = sort if sort in _SORTS else "name"
    down = query.get("dir") == "desc"
    named, trouble = query.get("queue", "").strip(), query.get("trouble", "")
    drawn = charts(request, "dashboard", query)
    found = [item for item in figures.queues if named.casefold() in item.stats.name.casefold()]
    if trouble:
        having = {each.queue for problem in drawn["problems"] if problem.kind == trouble for each in problem.troubles}
        found = [item for item in found if item.stats.name in having]
    queues = sorted(found, key=lambda item: getattr(item.stats, _SORTS[sort]), reverse=down)
    last = max(-(-len(queues) // PER_PAGE), 1)
    page = min(max(_number(query.get("page", "")), 1), last)
    shown = queues[(page - 1) * PER_PAGE : page * PER_PAGE]
    kept = {
        "sort": sort if sort != "name" else None,
        "dir": "desc" if down else None,
        "span": drawn["span"] if drawn["span"] != "hour" else None,
        "queue": named,
        "trouble": trouble,
    }
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
        kept=kept,
        trouble=trouble,
        **drawn,
        **_parts(context),
    )


def parts(request: Request) -> Response:
    """What is fetched again for pages that are left open, beside the numbers of the stream. What is shown here was read
    for all viewers together.
    """
    context = context_of(request)
    return render(request, "parts.html", **verdict(context), **_parts(context))


def _parts(context: AppContext) -> dict[str, Any]:
    figures, around = context.stats_cache.figures(), context.stats_cache.surroundings()
    return {
        "figures": figures,
        **_shards(figures),
        "redis": around.redis,
        "nodes": around.nodes,
        "stuck": around.stuck,
    }


def _number(typed: str) -> int:
    return int(typed) if typed.isascii() and typed.isdecimal() and len(typed) < 7 else 1


@lru_cache(maxsize=1)  # it holds a snapshot
def _shards(figures: Snapshot) -> dict[str, Any]:
    """The heat maps, drawn, and the hottest shards: once for all who look at these figures."""
    shards = [(item.stats.name, shard) for item in figures.queues for shard in item.shards]
    hot = [each for each in shards if each[1].lag > 1 and not each[1].paused]
    return {
        "heats": [(shown.queue, draw_heat(shown)) for shown in heat_maps(figures.queues)],
        "hottest": sorted(hot, key=lambda item: item[1].lag, reverse=True)[:3],
    }
