"""The nodes that live, the commands that are sent to them, and what a deploy would interrupt."""

from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lowq import inspection
from lowq.schedules import is_internal
from lowq_web.context import context_of
from lowq_web.deploy import Process, read_deploy, supervisor_of
from lowq_web.fields import form_of, query_of
from lowq_web.pages.rendering import redirect, render
from lowq_web.security import visit_of

#: Commands that are asked about.
CONFIRMED = ("quiet", "stop", "reload")


_SORTS: dict[str, Callable[[Process], Any]] = {
    "name": lambda process: process.name,
    "version": lambda process: process.version,
    "up": lambda process: -(process.started_at or 0.0),
    "longest": lambda process: process.seconds,
}


def nodes(request: Request) -> Response:
    """The nodes that live, and those that were lost within the last hour."""
    app, query = context_of(request).app, query_of(request)
    sort, down = query.get("sort", "name"), query.get("dir") == "desc"
    sort = sort if sort in _SORTS else "name"
    living = app.nodes()
    deploy = read_deploy(app, living)
    deploy.processes.sort(key=_SORTS[sort], reverse=down)
    return render(request, "nodes.html", nodes=living, lost=app.nodes(lost=True), deploy=deploy, sort=sort, down=down)


def command(request: Request) -> Response:
    """Sends a node a command; after a confirmation page, unless it only takes jobs again."""
    context, form = context_of(request), dict(form_of(request))
    name, what = form.get("node", ""), form.get("do", "")
    living = context_of(request).app.nodes()
    node = next((node for node in living if node.name == name), None)
    if node is not None and what in CONFIRMED and form.get("sure") != "1":
        others = [other for other in living if other is not node and not other.quiet]
        return render(request, "command.html", node=node, what=what, last=not others, alone=_alone(node, others),
                      supervisor=supervisor_of(node, living))  # fmt: skip
    context.actions.send_command(visit_of(request).actor, name, what)
    return redirect(request, "nodes", done=f"Sent {what} to {name}.")


def _alone(node: inspection.NodeInfo, others: Sequence[inspection.NodeInfo]) -> list[str]:
    """The queues that no other node works."""
    return [
        queue for queue in node.queues if not is_internal(queue) and not any(queue in other.queues for other in others)
    ]
