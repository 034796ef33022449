"""Bulk actions in the background, and their progress."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lowq_web.background import BackgroundAction, read_actions
from lowq_web.context import actions_of, context_of, task_of
from lowq_web.listing import WAITING, Queues, group_text
from lowq_web.pages.rendering import redirect, render
from lowq_web.words import DONE, VERBS

#: Fields of a filter that say nothing about which jobs of a bulk action are meant, or that the next one has of its own.
_NOT_REPEATED = ("order_by", "reverse", "before")


def tasks(request: Request) -> Response:
    """All tasks, of all processes."""
    return render(request, "tasks.html", tasks=read_actions(context_of(request).app), verbs=VERBS)


def task(request: Request) -> Response:
    """One task and its progress."""
    context, found = context_of(request), task_of(request)
    target = Queues(context.app, found.part) if found.queue is None else context.app.queue(found.queue)
    group = group_text(target, found.filter.error_group)
    return render(request, "task.html", task=found, done=DONE, again=_again(found), group_text=group)


def _again(task: BackgroundAction) -> dict[str, Any]:
    """The form that asks for the same action on the same jobs: every field of the filter, since without one it would be
    done to more of them.
    """
    fields = {name: value for name, value in task.filter.given().items() if name not in _NOT_REPEATED}
    if task.queue is None:
        fields |= {"queue": task.part, "state": task.filter.state or WAITING}
    return fields | ({"reason": task.reason} if task.reason else {})


def cancel(request: Request) -> Response:
    """A task stops after its current step."""
    found = task_of(request)
    actions_of(request).end_task(found)
    return redirect(request, "task", task=found.id)
