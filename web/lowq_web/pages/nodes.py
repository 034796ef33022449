"""The nodes that live, and the commands that are sent to them."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from lowq import inspection
from lowq.schedules import is_internal
from lowq_web.context import context_of
from lowq_web.fields import form_of
from lowq_web.pages.rendering import redirect, render
from lowq_web.security import visit_of

_COMMANDS = ("quiet", "stop", "reload")
#: The supervisor of a node, as the node says why it can't be reloaded itself.
_SUPERVISOR = re.compile(r"a process of a supervisor: .* pid ([0-9]+) on (.+)")


class Supervisor(NamedTuple):
    """The process that starts another node in the place of one that ends."""

    pid: int
    host: str
    #: Names of the nodes that it has started.
    nodes: list[str]


def nodes(request: Request) -> Response:
    """The nodes that live, and those that were lost within the last hour."""
    app = context_of(request).app
    return render(request, "nodes.html", nodes=app.nodes(), lost=app.nodes(lost=True))


def command(request: Request) -> Response:
    """Sends a node the command to go quiet, stop or reload, after a confirmation page: none can be undone here."""
    context, form = context_of(request), dict(form_of(request))
    name, what = form.get("node", ""), form.get("do", "")
    living = context_of(request).app.nodes()
    node = next((node for node in living if node.name == name), None)
    if node is not None and what in _COMMANDS and form.get("sure") != "1":
        others = [other for other in living if other is not node and not other.quiet]
        return render(request, "command.html", node=node, what=what, last=not others, alone=_alone(node, others),
                      supervisor=_supervisor_of(node, living))  # fmt: skip
    context.actions.send_command(visit_of(request).actor, name, what)
    return redirect(request, "nodes", done=f"Sent {what} to {name}.")


def _supervisor_of(node: inspection.NodeInfo, living: Sequence[inspection.NodeInfo]) -> Supervisor | None:
    found = _SUPERVISOR.search(node.reload_refusal)
    if found is None:
        return None
    names = [other.name for other in living if other.reload_refusal == node.reload_refusal]
    return Supervisor(int(found[1]), found[2], names)


def _alone(node: inspection.NodeInfo, others: Sequence[inspection.NodeInfo]) -> list[str]:
    """The queues that no other node works."""
    return [
        queue for queue in node.queues if not is_internal(queue) and not any(queue in other.queues for other in others)
    ]
