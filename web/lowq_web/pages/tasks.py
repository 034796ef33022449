"""Bulk actions in the background, and their progress."""

from starlette.requests import Request
from starlette.responses import Response

from lowq_web.context import context_of
from lowq_web.pages.rendering import redirect, render, trouble
from lowq_web.security import visit_of
from lowq_web.words import DONE, VERBS


def tasks(request: Request) -> Response:
    """All tasks, of all processes."""
    return render(request, "tasks.html", tasks=context_of(request).tasks.all(), verbs=VERBS)


def task(request: Request) -> Response:
    """One task and its progress."""
    found = context_of(request).tasks.get(request.path_params["task"])
    if found is None:
        return trouble(request, 404, "There is no such task, or it is not remembered any more.")
    return render(request, "task.html", task=found, done=DONE)


def cancel(request: Request) -> Response:
    """A task stops after its current step."""
    context = context_of(request)
    found = context.tasks.get(request.path_params["task"])
    if found is None:
        return trouble(request, 404, "There is no such task, or it is not remembered any more.")
    context.actions.cancel(visit_of(request).actor, found)
    return redirect(request, "task", task=found.id)
