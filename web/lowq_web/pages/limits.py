"""The limits over all nodes, and how far they are used."""

from starlette.requests import Request
from starlette.responses import Response

from lowq_web.context import context_of
from lowq_web.pages.rendering import render


def limits(request: Request) -> Response:
    """All of them: of workers, and around calls of nodes that live."""
    return render(request, "limits.html", limits=context_of(request).app.limits())
