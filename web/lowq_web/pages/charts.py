"""The charts of a page, throughput, failures and latency, and their time span."""

import json
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lowq import inspection
from lowq_web.chart import chart, known
from lowq_web.context import context_of
from lowq_web.fields import query_of
from lowq_web.pages.rendering import render, url


def newest_charts(request: Request) -> Response:
    """The charts of a page alone, as a page that shows them asks for newer ones. ``queue``: "" for all together."""
    query = query_of(request)
    queue = query.get("queue", "")
    return render(
        request, "charts.html", queue=queue, **charts(request, "queue" if queue else "dashboard", query, queue)
    )


def charts(request: Request, page: str, query: Mapping[str, str], queue: str = "") -> dict[str, Any]:
    """The arguments of the macro `charts` of that page. ``queue``: "" for all queues together."""
    span = span_of(query)
    rates = context_of(request).stats_cache.history(queue, span).rates
    readings = [[rate.at, known(rate.processed), known(rate.failed), known(rate.lag)] for rate in rates]
    return {
        "span": span,
        "spans": spans(request, page, span, query, **({"queue": queue} if queue else {})),
        "readings": json.dumps(readings, separators=(",", ":")),
        "drawn": {
            "Processed": chart(rates, ["processed"]),
            "Failed": chart(rates, ["failed"]),
            "Latency": chart(rates, ["lag"], seconds=True),
        },
    }


def span_of(query: Mapping[str, str]) -> inspection.Span:
    """The span that is asked for, or the hour."""
    span = query.get("span", "hour")
    return span if span in ("hour", "day", "month") else "hour"  # type: ignore[return-value]  # just checked


def spans(
    request: Request, name: str, current: inspection.Span, query: Mapping[str, str], **parts: Any
) -> list[tuple[str, str, bool]]:
    """The choice of spans on a page: the word, its address, whether it is the current one."""
    kept = {key: value for key, value in query.items() if key in ("sort", "dir")}
    words = {"hour": "Hour", "day": "Day", "month": "30 days"}
    return [
        (word, url(request, name, {**kept, "span": span}, **parts), span == current) for span, word in words.items()
    ]
