"""The search for an id in all queues."""

import re
from collections.abc import Iterable

from starlette.requests import Request
from starlette.responses import Response

from lowq import inspection
from lowq_web.context import context_of
from lowq_web.fields import query_of
from lowq_web.pages.rendering import redirect, render

#: Characters of a pattern that a search is turned into.
MAX_PATTERN = 64


def search(request: Request) -> Response:
    """Finds an id in all queues."""
    context, typed = context_of(request), query_of(request).get("id", "")
    if not typed.strip():
        return redirect(request, "dashboard")
    names = [info.name for info in context.app.queues()]
    # Spaces around it most likely came with copying; but ids may have some.
    job_id, found = typed, []
    for job_id in dict.fromkeys((typed, typed.strip())):
        for name in names:
            places = context.app.queue(name).places(job_id)
            if places:
                found.append((name, [item.state for item in places]))
        if found:
            break
    if len(found) == 1:
        return redirect(request, "job", {"id": job_id}, queue=found[0][0])
    pattern = like(job_id)
    return render(
        request,
        "search.html",
        200,
        found=found,
        places=[] if found or pattern is None else _places(context.stats_cache.figures().queues),
        pattern=pattern,
        job_id=job_id,
        searched=job_id,
    )


def like(typed: str) -> str | None:
    """The pattern of ids that contain this text, or the text if it is a pattern already; None: it is too long."""
    if "*" in typed:
        pattern = typed
    else:
        pattern = "*" + re.sub(r"([?\[\]\\])", r"\\\1", typed) + "*"
    return pattern if len(pattern) <= MAX_PATTERN else None


def _places(queues: Iterable[inspection.QueueOverview]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The first queues that have jobs, with the states of these and their labels: where to search by a pattern."""
    found = []
    for stats in (item.stats for item in queues):
        counts = (("", "queued", stats.length), ("taken", "running", stats.taken),
                  ("morgue", "dead", stats.morgue_length))  # fmt: skip
        places = [(state, words) for state, words, number in counts if number]
        if places:
            found.append((stats.name, places))
    return found[:50]
