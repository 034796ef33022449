"""The search for an id in all queues, or for a field of a payload."""

import re

from starlette.requests import Request
from starlette.responses import Response

import lowq
from lowq.job import PayloadField
from lowq_web.context import context_of, query_of
from lowq_web.pages.rendering import redirect, render

#: Characters of a pattern that a search is turned into.
MAX_PATTERN = 64


def search(request: Request) -> Response:
    """Finds an id in all queues. Where it is none, ``customer:7`` finds the jobs with that in a payload."""
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
    if not found and _is_field(job_id):
        done = f"No job has the id {job_id}. These have it in a payload."
        return redirect(request, "jobs", {"payload": job_id}, done=done)
    return render(request, "search.html", found=found, pattern=like(job_id), job_id=job_id, searched=job_id)


def _is_field(typed: str) -> bool:
    try:
        PayloadField.parse(typed)
    except lowq.ConfigError:
        return False
    return True


def like(typed: str) -> str | None:
    """The pattern of ids that contain this text, or the text if it is a pattern already; None: it is too long."""
    pattern = typed if "*" in typed else "*" + re.sub(r"([?\[\]\\])", r"\\\1", typed) + "*"
    return pattern if len(pattern) <= MAX_PATTERN else None
