"""The list of jobs, of all queues or of one: by state, sorted, filtered, page by page.

Listings that look at every id are streamed: the rows found so far, again and again, each time in a table body that
hides the one before.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import lowq
from lowq.operate.actions import ActionName
from lowq_web.context import context_of, query_of
from lowq_web.listing import Page, Queues, Target, as_typed, asked_of, group_text, tabs
from lowq_web.pages.rendering import render, stream, url
from lowq_web.security import shown_error

#: State of a list -> the counter that grows when there is more for it; otherwise that of pushes.
_ARRIVALS = {"retrying": "failed", "taken": "processed", "morgue": "buried"}
#: State of a list -> what can be done to its jobs; otherwise as to all that wait.
_VERBS: Mapping[str, list[ActionName]] = {
    "any": ["perform_now", "kick", "bury", "cancel", "delete"],
    "due": ["bury", "delete"],
    "taken": ["cancel"],
    "morgue": ["kick", "delete"],
}
#: What the fields of the filter are called on the page.
_LABELS = {"min": "From", "max": "To", "match": "Id like", "order_by": "Order", "state": "State", "payload": "Payload",
           "error": "Error", "error_group": "Error group", "shard": "Shard", "priority": "Priority"}  # fmt: skip


def jobs(request: Request) -> Response:
    """Those of all queues."""
    context, part = context_of(request), query_of(request).get("queue", "").strip()
    figures = context.stats_cache.figures()
    # Only queues that have jobs, as of the latest figures, need be asked.
    queues = Queues(context.app, part, [
        item.stats.name
        for item in figures.queues
        if item.stats.length or item.stats.taken or item.stats.morgue_length
    ])  # fmt: skip
    return list_jobs(request, "jobs.html", queues, figures.total, None, "any")


def list_jobs(
    request: Request, template: str, target: Target, stats: Any, retrying: int | None, default: str, **values: Any
) -> Response:
    """A page with a list. ``stats``: the figures of these queues. ``retrying``: as of `tabs`. ``default``: the state
    that is listed where the address has none.
    """
    context, query = context_of(request), query_of(request)
    form_error, status = None, 200
    pages: Iterator[Page | None] = iter(())
    try:
        asked = asked_of(query, context.stats_cache.now(), default)
        pages = asked.pages(target, context.redact)
    except lowq.ConfigError as error:
        # The error is shown beside the form, which keeps what was typed.
        asked, form_error, status = as_typed(query, default), in_words(str(error)), 400
    values |= {
        "queue": None if isinstance(target, Queues) else target.name,
        "several": isinstance(target, Queues),
        "here": _addresses(request, target),
        "default": default,
        "stats": stats,
        "tabs": tabs(stats, retrying),
        "asked": asked,
        "form_error": form_error,
        "verbs": _VERBS.get(asked.tab, ["perform_now", "bury", "delete"]),
        "group_text": group_text(target, asked.filter.error_group),
        "arrivals": _ARRIVALS.get(asked.tab, "pushed"),
        "masked": context.redact,
    }
    if asked.scans and form_error is None:
        return stream(request, template, pages=_with_error(request, pages), **values)
    return render(request, template, status, pages=list(pages), **values)


def _addresses(request: Request, target: Target) -> Callable[[Mapping[str, Any]], str]:
    if isinstance(target, Queues):
        return lambda query: url(request, "jobs", query)
    return lambda query: url(request, "queue", query, queue=target.name)


def in_words(reason: str) -> str:
    """The reason of an error, with the label that the field has on the page."""
    parts = re.fullmatch(r"(\w+)=(.+?): it is (.+)", reason, re.DOTALL)
    if parts is None or parts[1] not in _LABELS:
        return reason
    return f"{_LABELS[parts[1]]} can't be {parts[2]}: it is {parts[3]}"


def _with_error(request: Request, pages: Iterable[Page | None]) -> Iterator[Page | str | None]:
    """The pages, and at the end an error as text: the answer has begun already."""
    try:
        yield from pages
    except lowq.LowqError as error:
        yield shown_error(request, error)
