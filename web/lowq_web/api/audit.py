"""The audit log over the API."""

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request

from lowq import admin
from lowq_web.api.answer import Answer
from lowq_web.api.endpoint import get
from lowq_web.api.received import Received
from lowq_web.context import context_of

_Cursor = Annotated[
    str,
    Meta(
        pattern=r"^-?[0-9]{1,15}\.[0-9]{6}-[0-9a-f]{0,32}$",
        description="The cursor of an entry, for those that are older",
    ),
]


class AuditQuery(Received, frozen=True):
    limit: Annotated[int, Meta(ge=1, le=1000, description="Entries, at most")] = 100
    who: Annotated[str, Meta(max_length=300, description="A part of the name, in any case")] | UnsetType = UNSET
    action: Annotated[str, Meta(max_length=300, description="Such as kick or pause")] | UnsetType = UNSET
    target: Annotated[str, Meta(max_length=300, description="The name of a queue or a node")] | UnsetType = UNSET
    since: Annotated[float, Meta(description="Unix time, seconds; both bounds are included")] | UnsetType = UNSET
    until: Annotated[float, Meta(description="Unix time, seconds")] | UnsetType = UNSET
    after: _Cursor | UnsetType = UNSET


class Audit(Answer, frozen=True):
    audit: list[admin.AuditEntry]


@get("/audit", "What people did, the latest first")
def audit(request: Request, query: AuditQuery) -> Audit:
    return Audit(context_of(request).app.audit(**query.given()))
