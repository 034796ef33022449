"""The charts of a page, throughput, failures and latency, and their time span."""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lowq import inspection
from lowq_web.chart import chart, known
from lowq_web.context import AppContext, context_of, query_of
from lowq_web.pages.rendering import render, url
from lowq_web.severity import find_problems, level_of_redis, levels_of
from lowq_web.stats_cache import Snapshot, Surroundings


def newest_charts(request: Request) -> Response:
    """The charts of a page alone, as a page that shows them asks for newer ones. ``queue``: "" for all together."""
    query = query_of(request)
    queue = query.get("queue", "")
    return render(
        request, "charts.html", queue=queue, **charts(request, "queue" if queue else "dashboard", query, queue)
    )


def verdict(context: AppContext, queue: str = "") -> dict[str, Any]:
    """What is wrong with all queues, or with one, and what is coloured for it: as of the latest figures."""
    return _verdict(context.stats_cache.figures(), context.stats_cache.surroundings(), queue)


@lru_cache(maxsize=2)  # it holds as many snapshots
def _verdict(figures: Snapshot, around: Surroundings, queue: str) -> dict[str, Any]:
    queues = [item for item in figures.queues if queue in ("", item.stats.name)]
    problems = find_problems(queues, figures.flows, around.stuck, figures.deaths, any_node=bool(around.nodes))
    levels = levels_of(problems)
    # For the script, which colours what is live.
    marks = json.dumps({f"{column} {name}": level for (name, column), level in levels.items()})
    redis_level = level_of_redis(around.redis)
    return {"problems": problems, "levels": levels, "marks": marks, "redis_level": redis_level}


def charts(request: Request, page: str, query: Mapping[str, str], queue: str = "") -> dict[str, Any]:
    """The arguments of the macro `charts` of that page, with the verdict. ``queue``: "" for all queues together."""
    wrong = verdict(context_of(request), queue)
    levels = wrong["levels"]
    span = span_of(query)
    rates = context_of(request).stats_cache.history(queue, span).rates
    readings = [[rate.at, known(rate.processed), known(rate.failed), known(rate.lag)] for rate in rates]
    return {
        "span": span,
        "spans": spans(request, page, span, query, **({"queue": queue} if queue else {})),
        "readings": json.dumps(readings, separators=(",", ":")),
        # Name -> the chart, and how bad it is.
        "drawn": {
            "Processed": (chart(rates, ["processed"]), None),
            "Failed": (chart(rates, ["failed"]), levels.get((queue, "failed"))),
            "Latency": (chart(rates, ["lag"], seconds=True), levels.get((queue, "lag"))),
        },
        **wrong,
    }


def span_of(query: Mapping[str, str]) -> inspection.Span:
    """The span that is asked for, or the hour."""
    span = query.get("span", "hour")
    return span if span in ("hour", "day", "month") else "hour"  # type: ignore[return-value]  # just checked


def spans(
    request: Request, name: str, current: inspection.Span, query: Mapping[str, str], **parts: Any
) -> list[tuple[str, str, bool]]:
    """The choice of spans on a page: the word, its address, whether it is the current one."""
    kept = {key: value for key, value in query.items() if key not in ("after", "page", "said")}
    words = {"hour": "Hour", "day": "Day", "month": "30 days"}
    return [
        (word, url(request, name, {**kept, "span": span}, **parts), span == current) for span, word in words.items()
    ]
