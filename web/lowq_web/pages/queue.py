"""A queue: its jobs, its figures, its pause."""

from starlette.requests import Request
from starlette.responses import Response

from lowq_web import text
from lowq_web.actions import find_pause
from lowq_web.context import actions_of, context_of, form_of, query_of, queue_of
from lowq_web.listing import WAITING, count_retrying
from lowq_web.pages.charts import charts
from lowq_web.pages.jobs import list_jobs
from lowq_web.pages.rendering import redirect

#: Characters of the reason of a pause.
MAX_REASON = 200


def queue(request: Request) -> Response:
    """Its jobs, and what is known of it."""
    context, handle = context_of(request), queue_of(request)
    stats = context.stats_cache.stats(handle)
    return list_jobs(
        request,
        "queue.html",
        handle,
        stats,
        count_retrying(handle, stats),
        WAITING,
        forecast=context.stats_cache.figures().forecasts.get(handle.name),
        limits=handle.limits(),
        # Read only while there is something to say.
        pause=find_pause(context.app, handle) if stats.paused else None,
        reshard=None if stats.reshard_to is None else handle.reshard_progress(),
        **charts(request, "queue", query_of(request), handle.name),
    )


def pause(request: Request) -> Response:
    """Pauses the queue."""
    handle = queue_of(request)
    reason = dict(form_of(request)).get("reason", "").strip()[:MAX_REASON]
    if actions_of(request).pause(handle.name, reason or None):
        return redirect(request, "queue", done="Paused.", queue=handle.name)
    return redirect(request, "queue", done="It was paused already.", queue=handle.name)


def resume(request: Request) -> Response:
    """Resumes the queue."""
    handle = queue_of(request)
    done = actions_of(request).resume(handle.name)
    said = "Resumed." if done else "It was not paused."
    return redirect(request, *_asked_from(request), done=said, queue=handle.name)


def _asked_from(request: Request) -> tuple[str, dict[str, str]]:
    """The page of an id, if the form says that it stood there; otherwise that of the queue."""
    job_id = dict(form_of(request)).get("id")
    return ("queue", {}) if job_id is None else ("job", {"id": text.decode_id(job_id)})
