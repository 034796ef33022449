"""The two charts of a page, throughput and lag, and their time span."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from lowq import inspection
from lowq_web.chart import chart
from lowq_web.context import context_of
from lowq_web.pages.rendering import url


def charts(request: Request, page: str, query: Mapping[str, str], queue: str = "") -> dict[str, Any]:
    """The arguments of the macro `charts` of that page. ``queue``: "" for all queues together."""
    span = span_of(query)
    rates = context_of(request).stats_cache.history(queue, span).rates
    return {
        "span": span,
        "spans": spans(request, page, span, query, **({"queue": queue} if queue else {})),
        "rates": chart(rates, ["processed", "failed"]),
        "lags": chart(rates, ["lag"], seconds=True),
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
