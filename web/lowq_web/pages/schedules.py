"""The schedules, with buttons that run one now, pause and resume it."""

from starlette.requests import Request
from starlette.responses import Response

import lowq
from lowq_web.actions import SCHEDULE_ACTIONS
from lowq_web.context import actions_of, context_of, form_of
from lowq_web.pages.rendering import redirect, render


def schedules(request: Request) -> Response:
    """All of them, by queue and name."""
    return render(request, "schedules.html", schedules=context_of(request).app.schedules())


def act(request: Request) -> Response:
    """Runs one now, pauses or resumes it. It asks nobody before: this can be undone, or is what the next tick does
    anyway.
    """
    form = dict(form_of(request))
    queue, name, action = form.get("queue", ""), form.get("name", ""), form.get("do", "")
    if action not in SCHEDULE_ACTIONS:
        raise lowq.ConfigError(f"do={action!r:.50} is no action on a schedule")
    actions = actions_of(request)
    if action == "run":
        actions.run_schedule(name, queue)
        done = f"A job of {name} is in the queue {queue}."
    elif action == "pause":
        done = f"{name} is paused." if actions.pause_schedule(name, queue) else f"{name} was paused already."
    else:
        done = f"{name} goes on." if actions.resume_schedule(name, queue) else f"{name} was not paused."
    return redirect(request, "schedules", done=done)
