"""The jobs of a queue: by state, sorted, filtered, page by page.

Listings that look at every id are streamed: the rows found so far, again and again, each time in a table body that
hides the one before.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import lowq
from lowq.operate.actions import ActionName
from lowq_web import text
from lowq_web.context import context_of, queue_of
from lowq_web.fields import form_of, query_of
from lowq_web.listing import JobQuery, P, as_typed, asked_of, group_text, tab_counts
from lowq_web.pages.charts import charts
from lowq_web.pages.rendering import redirect, render, stream
from lowq_web.security import shown_error, visit_of

#: Characters of the reason of a pause.
MAX_REASON = 200
#: State of a list -> the counter that grows when there is more for it; otherwise that of pushes.
_ARRIVALS = {"retrying": "failed", "taken": "processed", "morgue": "buried"}
#: What the fields of the filter are called on the page.
_LABELS = {"min": "From", "max": "To", "match": "Id like", "order_by": "Order", "state": "State", "payload": "Payload",
           "error": "Error", "error_group": "Error group", "shard": "Shard"}  # fmt: skip


def queue(request: Request) -> Response:
    """Its jobs: by state, sorted, filtered, page by page."""
    context, handle = context_of(request), queue_of(request)
    query = query_of(request)
    now = context.stats_cache.now()
    form_error, status = None, 200
    try:
        asked = asked_of(query, now)
        pages = asked.pages(handle, context.redact)
    except lowq.ConfigError as error:
        # The error is shown beside the form, which keeps what was typed.
        asked, pages, form_error, status = as_typed(query), iter(()), in_words(str(error)), 400
    stats = context.stats_cache.stats(handle)
    drawn = charts(request, "queue", query, handle.name)
    counts = tab_counts(handle, stats)
    values: dict[str, Any] = {
        "queue": handle.name,
        "stats": stats,
        "forecast": context.stats_cache.figures().forecasts.get(handle.name),
        "limits": handle.limits(),
        # Read only while there is something to say.
        "pause": context.actions.pause_of(handle) if stats.paused else None,
        "reshard": None if stats.reshard_to is None else handle.reshard_progress(),
        "counts": counts,
        "asked": asked,
        "form_error": form_error,
        "verbs": _verbs(asked),
        "elsewhere": _elsewhere(asked, counts),
        "group_text": group_text(handle, asked.filter.error_group),
        "arrivals": _ARRIVALS.get(asked.filter.state or "", "pushed"),
        "masked": context.redact,
        **drawn,
    }
    if asked.scans and form_error is None:
        return stream(request, "queue.html", pages=with_error(request, pages), **values)
    return render(request, "queue.html", status, pages=list(pages), **values)


def in_words(reason: str) -> str:
    """The reason of an error, with the label that the field has on the page."""
    parts = re.fullmatch(r"(\w+)=(.+?): it is (.+)", reason, re.DOTALL)
    if parts is None or parts[1] not in _LABELS:
        return reason
    return f"{_LABELS[parts[1]]} can't be {parts[2]}: it is {parts[3]}"


def _elsewhere(asked: JobQuery, counts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Other states in which the pattern may match, with their labels. Without numbers, which would look like hits."""
    if not asked.filter.match:
        return []
    here = "" if asked.filter.state is None else asked.filter.state
    places = [("", "queued"), ("taken", "running"), ("morgue", "dead")]
    return [(state, word) for state, word in places if state != here and counts[state].number]


def with_error(request: Request, pages: Iterable[P | None]) -> Iterator[P | str | None]:
    """The pages, and at the end an error as text: the answer has begun already."""
    try:
        yield from pages
    except lowq.LowqError as error:
        yield shown_error(request, error)


def _verbs(asked: JobQuery) -> list[ActionName]:
    if asked.filter.state == "taken":
        return []
    if asked.filter.state == "morgue":
        return ["kick", "delete"]
    return ["perform_now", "bury", "delete"] if asked.filter.state != "due" else ["bury", "delete"]


def pause(request: Request) -> Response:
    """Pauses the queue."""
    handle = queue_of(request)
    reason = dict(form_of(request)).get("reason", "").strip()[:MAX_REASON]
    if context_of(request).actions.pause(visit_of(request).actor, handle.name, reason or None):
        return redirect(request, "queue", done="Paused.", queue=handle.name)
    return redirect(request, "queue", done="It was paused already.", queue=handle.name)


def resume(request: Request) -> Response:
    """Resumes the queue."""
    handle = queue_of(request)
    done = context_of(request).actions.resume(visit_of(request).actor, handle.name)
    said = "Resumed." if done else "It was not paused."
    return redirect(request, *_asked_from(request), done=said, queue=handle.name)


def _asked_from(request: Request) -> tuple[str, dict[str, str]]:
    """The page of an id, if the form says that it stood there; otherwise that of the queue."""
    job_id = dict(form_of(request)).get("id")
    return ("queue", {}) if job_id is None else ("job", {"id": text.decode_id(job_id)})
