"""The nodes that live, and what they are told."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

import lowq
from lowq_web.context import context_of
from lowq_web.fields import form_of
from lowq_web.pages.rendering import redirect, render
from lowq_web.security import visit_of

_TOLD = {"quiet": "told to go quiet", "stop": "told to stop"}


def nodes(request: Request) -> Response:
    """The nodes that live."""
    return render(request, "nodes.html", nodes=context_of(request).app.nodes())


def tell(request: Request) -> Response:
    """A node is told to go quiet or to stop, after a page that asks: neither can be undone from here."""
    context, form = context_of(request), dict(form_of(request))
    name, what = form.get("node", ""), form.get("do", "")
    living = context_of(request).app.nodes()
    node = next((node for node in living if node.name == name), None)
    if node is not None and what in _TOLD and form.get("sure") != "1":
        others = [other for other in living if other is not node and not other.quiet]
        return render(request, "tell.html", node=node, what=what, last=not others, alone=_alone(node, others))
    context.actions.tell(visit_of(request).user.name, name, what)
    return redirect(request, "nodes", done=f"{name} was {_TOLD[what]}.")


def _alone(node: lowq.NodeInfo, others: Sequence[lowq.NodeInfo]) -> list[str]:
    """The queues that no other node works."""
    return [queue for queue in node.queues if not any(queue in other.queues for other in others)]
