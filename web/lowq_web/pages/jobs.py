"""Jobs of all queues: retries, dead and running ones, filtered, page by page."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import lowq
from lowq import inspection
from lowq_web.context import AppContext, context_of
from lowq_web.fields import query_of
from lowq_web.listing import LIMIT, JobQuery, news
from lowq_web.pages.queue import in_words, with_error
from lowq_web.pages.rendering import render, stream


@dataclass(frozen=True, slots=True)
class List:
    """One of the lists."""

    #: Its name in addresses; and of the figure that counts its jobs.
    name: str
    figure: str
    #: The counter that grows when there is more for it.
    arrivals: str
    #: Fields of the filter.
    wanted: Mapping[str, Any]


LISTS = (
    # By retries: all of them, also those that are due again; what has failed most often comes first.
    List("retries", "retries", "failed", {"order_by": "retry_count", "min": 0, "reverse": True}),
    List("dead", "morgue_length", "buried", {"state": "morgue", "reverse": True}),
    List("running", "taken", "processed", {"state": "taken"}),
)
#: Fields of the form.
_FIELDS = ("queue", "match", "payload", "error", "error_group")


def jobs(request: Request) -> Response:
    """A page of one of the lists."""
    context, query = context_of(request), query_of(request)
    shown = next((item for item in LISTS if item.name == query.get("list")), LISTS[1])
    given = {name: query[name].strip() for name in _FIELDS if query.get(name, "").strip()}
    figures = context.stats_cache.figures()
    after = query.get("after") or None
    form_error = None
    scans = False
    pages: Iterator[inspection.FoundPage | None] = iter(())
    try:
        inside: dict[str, Any] = {name: given[name] for name in _FIELDS[1:] if name in given}
        fields: dict[str, Any] = {**shown.wanted, **inside}
        wanted = inspection.JobFilter(**fields)
        scans = JobQuery(wanted, after, LIMIT, given).scans
        pages = _pages(context, wanted, _with_jobs(figures.queues, shown, given.get("queue", "")), after)
    except lowq.ConfigError as error:
        form_error = in_words(str(error))
    values: dict[str, Any] = {
        "list": shown.name,
        "lists": [(item.name, getattr(figures.total, item.figure)) for item in LISTS],
        "given": given,
        "continued": after is not None,
        "scans": scans,
        "asks_for_contents": any(name in given for name in ("payload", "error", "error_group")),
        "form_error": form_error,
        "arrivals": shown.arrivals,
        "total": figures.total,
        "masked": context.redact,
    }
    if scans and form_error is None:
        return stream(request, "jobs.html", pages=with_error(request, pages), **values)
    return render(request, "jobs.html", 400 if form_error else 200, pages=list(with_error(request, pages)), **values)


def _with_jobs(queues: Iterable[inspection.QueueOverview], shown: List, part: str) -> list[str]:
    """The queues that have jobs of that list, as of the latest figures: only these need be asked."""
    return [
        item.stats.name
        for item in queues
        if getattr(item.stats, shown.figure) and part.casefold() in item.stats.name.casefold()
    ]


def _pages(
    context: AppContext, wanted: inspection.JobFilter, queues: list[str], after: str | None
) -> Iterator[inspection.FoundPage | None]:
    return news(context.app.jobs_in_steps(wanted, queues=queues, limit=LIMIT, after=after, redact=context.redact))
