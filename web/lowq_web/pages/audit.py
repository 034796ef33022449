"""The audit log: filtered, page by page, with links to what was acted on."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

import lowq
from lowq import admin
from lowq.operate.actions import ACTIONS
from lowq.operate.audit import MAX_TEXT
from lowq.operate.nodes import NODE_COMMANDS
from lowq.store.keys import is_queue_name
from lowq_web import text
from lowq_web.context import context_of, query_of
from lowq_web.pages.rendering import render, url
from lowq_web.words import VERBS

#: Entries of a page.
LIMIT = 100
#: Actions that entries are written of: what can be filtered by, in the order of the form.
ON_QUEUES = (
    *ACTIONS, "pause", "resume", "release_all", "reshard", "drop", "repair", "run_schedule", "pause_schedule",
    "resume_schedule",
)  # fmt: skip
ON_NODES = NODE_COMMANDS


class _Part(NamedTuple):
    """A text, and the page that it leads to."""

    text: str
    link: str | None


class _Row(NamedTuple):
    entry: admin.AuditEntry
    target: _Part
    #: Name -> the values.
    detail: list[tuple[str, list[_Part]]]


def audit(request: Request) -> Response:
    """The latest entries that match, and the way to those before."""
    context, query = context_of(request), query_of(request)
    given = {
        name: query[name].strip()
        for name in ("who", "action", "target", "since", "until")
        if query.get(name, "").strip()
    }
    found: list[admin.AuditEntry] = []
    form_error = None
    try:
        since, until = (_time(given, name, context.stats_cache.now()) for name in ("since", "until"))
        found = context.app.audit(
            LIMIT + 1, who=given.get("who"), action=given.get("action"), target=given.get("target"), since=since,
            until=until, after=query.get("after") or None,
        )  # fmt: skip
    except lowq.ConfigError as error:
        form_error = str(error)
    return render(
        request,
        "audit.html",
        400 if form_error else 200,
        rows=[_row(request, entry) for entry in found[:LIMIT]],
        older={**given, "after": found[LIMIT - 1].cursor} if len(found) > LIMIT else None,
        given=given,
        continued="after" in query,
        form_error=form_error,
        actions=(*ON_QUEUES, *ON_NODES),
        verbs=VERBS,
    )


def _time(given: Mapping[str, str], name: str, now: float) -> float | None:
    try:
        return text.moment(given[name], now) if name in given else None
    except (ValueError, OverflowError):
        label = {"since": "From", "until": "To"}[name]
        raise lowq.ConfigError(
            f"{label} can't be {given[name]!r:.50}: it is a time, 2027-01-31T12:00Z, Unix seconds, or -2h"
        ) from None


def _row(request: Request, entry: admin.AuditEntry) -> _Row:
    queue = entry.target if entry.action not in ON_NODES and is_queue_name(entry.target) else None
    if entry.action in ON_NODES:
        target = _Part(entry.target, f"{url(request, 'nodes')}#node-{text.encode_id(entry.target)}")
    else:
        target = _Part(entry.target, queue and url(request, "queue", queue=queue))
    given = {**entry.detail}
    if given.get("changed") is False:
        given = {**given, "changed": "nothing"}
    detail = [(name.replace("_", " "), _parts(request, queue, name, value)) for name, value in given.items()]
    return _Row(entry, target, detail)


def _parts(request: Request, queue: str | None, name: str, value: Any) -> list[_Part]:
    values = value if isinstance(value, list) else [value]
    if name == "ids" and queue is not None:
        return [_Part(str(item), _job_link(request, queue, item)) for item in values]
    if name == "task" and isinstance(value, str) and value and "/" not in value:
        return [_Part(value, url(request, "task", task=value))]
    return [_Part(str(item), None) for item in values]


def _job_link(request: Request, queue: str, job_id: Any) -> str | None:
    """None for an id that the log has cut."""
    if not isinstance(job_id, str) or not job_id or (len(job_id) >= MAX_TEXT and job_id.endswith("…")):
        return None
    return url(request, "job", {"id": job_id}, queue=queue)
