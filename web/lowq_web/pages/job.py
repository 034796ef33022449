"""The page of an id."""

import re

from starlette.requests import Request
from starlette.responses import Response

from lowq import inspection
from lowq_web import text
from lowq_web.context import context_of, query_of, queue_of
from lowq_web.pages.rendering import encode, render, trouble
from lowq_web.pages.search import like
from lowq_web.retry_clock import coming_retries

#: Characters of a payload that are shown, more behind a link; and payloads.
MAX_SHOWN, MAX_PAYLOADS = 4000, 100
#: Payloads that are shown at once; the others are folded.
MAX_UNFOLDED = 5


def job(request: Request) -> Response:
    """Everything that is known of an id."""
    context, handle = context_of(request), queue_of(request)
    job_id = query_of(request).get("id", "")
    found = handle.describe(job_id)
    return render(
        request,
        "job.html",
        200 if found.jobs else 404,
        queue=handle.name,
        described=found,
        retries=coming_retries(found),
        masked=context.redact,
        max_shown=MAX_SHOWN,
        max_payloads=MAX_PAYLOADS,
        max_unfolded=MAX_UNFOLDED,
        pattern=like(job_id),
        hangs=_hangs(found),
        searched=job_id,
    )


def _hangs(found: inspection.Description) -> inspection.NodeInfo | None:
    """The node that performs it, if its process is known."""
    return found.node if found.why.reason == "performing" and found.node is not None and found.node.pid else None


def stack(request: Request) -> Response:
    """Where in its code the id is: its node is asked. It waits for the answer, so it counts as a scan."""
    context, handle = context_of(request), queue_of(request)
    job_id = query_of(request).get("id", "")
    with context.scans:
        found = handle.stack(job_id)
    calls = re.split(r"(?m)^(?=  File )", found.text) if found else []
    values = {"queue": handle.name, "job_id": job_id, "stack": found, "calls": calls[::-1]}
    return render(request, "stack.html", 200 if found else 404, **values)


def payload(request: Request) -> Response:
    """One payload, whole, as plain text."""
    context, handle, query = context_of(request), queue_of(request), query_of(request)
    state, number = query.get("state", ""), query.get("n", "")
    for item in handle.places(query.get("id", "")):
        if item.state == state and number.isdecimal() and int(number[:6]) < len(item.payloads):
            shown = text.payload(context.redact(item.payloads[int(number[:6])][0]), indent=2)
            return Response(encode(text.printable(shown, "\n")), media_type="text/plain; charset=utf-8")
    return trouble(request, 404, "There is no such payload any more.")
