"""The audit log."""

from starlette.requests import Request
from starlette.responses import Response

from lowq_web.actions import VERBS
from lowq_web.context import context_of
from lowq_web.pages.rendering import render


def audit(request: Request) -> Response:
    """The latest entries of the audit log."""
    return render(
        request,
        "audit.html",
        entries=context_of(request).app.audit(200),
        verbs=VERBS,
    )
