"""The JSON API: everything that the pages show and do.

A module for each subject has its endpoints: functions whose types say what they take (`Received`) and answer
(`Answer`). `endpoint` declares them and makes routes of them, and `openapi` describes them by their types. What is
unknown or malformed is answered with 400 and the reason. Errors are ``{"error": reason}``.
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from lowq_web.api import actions, audit, errors, jobs, nodes, openapi, queues, reshard, schedules, tasks, times
from lowq_web.api.endpoint import ENDPOINTS, get, routes

__all__ = [
    "ENDPOINTS", "actions", "audit", "description", "errors", "index", "jobs", "nodes", "queues", "reshard", "routes",
    "schedules", "tasks", "times",
]  # fmt: skip


@get("/openapi.json", "This description")
def description(request: Request) -> dict[str, Any]:
    root = request.scope.get("lowq_root", "")
    return openapi.describe(ENDPOINTS, f"{root}/api/v1")


def index(request: Request) -> Response:
    """Redirects to the description."""
    return RedirectResponse(f"{request.scope.get('lowq_root', '')}/api/v1/openapi.json", 307)
