"""The description of the API in OpenAPI, and a check of documents against its schemas.

The schemas are part of what is promised, so they are written out here, not derived from the code that must keep them;
a test sends requests of all kinds and compares.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

import lowq

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Parameter:
    """Something in the path or the query."""

    name: str
    place: Literal["path", "query"]
    schema: Schema
    text: str
    required: bool = False


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A method of a path, and what it takes and gives."""

    method: Literal["GET", "POST"]
    path: str
    handler: Callable[[Request, dict[str, Any]], Response]
    text: str
    answer: Schema
    parameters: Sequence[Parameter] = ()
    body: Schema | None = None
    statuses: Sequence[int] = (200,)
    #: The answer with the second of the statuses.
    other: Schema | None = None


def obj(properties: Mapping[str, Any], required: Sequence[str] | None = None) -> dict[str, Any]:
    """The schema of an object that has these properties and no others."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties if required is None else required),
        "additionalProperties": False,
    }


def _list(items: Schema) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _map(values: Schema) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": values}


def _or_null(kind: str) -> dict[str, Any]:
    return {"type": [kind, "null"]}


_TEXT, _INT, _NUMBER, _BOOL = {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}

_LOWKIQ = obj({"length": _INT, "morgue_length": _INT, "lag": _NUMBER})
STATS = obj({"total": _LOWKIQ, "by_worker": _map(_LOWKIQ)})

_FIGURES = {
    **dict.fromkeys(("due", "length", "fresh", "retries", "taken", "morgue_length", "processed", "failed"), _INT),
    "lag": _NUMBER,
    "processed_rate": _or_null("number"),
    "failed_rate": _or_null("number"),
}
OVERVIEW = obj({"at": _NUMBER, "total": obj(_FIGURES), "queues": _map(obj(_FIGURES | {"paused": _BOOL}))})

_RATE = obj({"at": _NUMBER, **{name: _or_null("number") for name in ("processed", "failed", "lag")}})
HISTORY = obj({"span": _TEXT, "step": _INT, "rates": _list(_RATE)})

_COUNTS = (
    "shards_count", "length", "due", "scheduled", "fresh", "retries", "taken", "morgue_length", "processed", "failed",
    "buried",
)  # fmt: skip
_STATS = obj(
    {
        "name": _TEXT,
        **dict.fromkeys(_COUNTS, _INT),
        "lag": _NUMBER,
        "paused": _BOOL,
        "oldest_id": _or_null("string"),
        "oldest_at": _or_null("number"),
    }
)
QUEUES = obj({"queues": _list(_STATS)})
QUEUE = obj({"stats": _STATS, "options": {"type": "object"}})
TIMES = obj({"count": _INT, "seconds": _NUMBER, "buckets": _list(obj({"up_to": _or_null("number"), "count": _INT}))})
_SHARD = obj(
    {
        "index": _INT,
        "length": _INT,
        "taken": _INT,
        "morgue_length": _INT,
        "lag": _NUMBER,
        "owner": _or_null("string"),
        "fence": _or_null("integer"),
        "lease_seconds": _or_null("number"),
        "paused": _BOOL,
        "oldest_id": _or_null("string"),
    }
)
SHARDS = obj({"shards": _list(_SHARD)})
_JOB = obj(
    {
        "id": _TEXT,
        "state": _TEXT,
        "payloads": _list(obj({"payload": {}, "score": _or_null("number")})),
        "perform_at": _or_null("number"),
        "retry_count": _INT,
        "error": _or_null("string"),
        "crashes": _INT,
        "buried_at": _or_null("number"),
        "payloads_count": _INT,
    }
)
JOBS = obj({"jobs": _list(_JOB), "cursor": _or_null("string")})
_REASONS = (
    "absent", "buried", "performing", "not_due", "retry_wait", "paused", "no_owner", "busy", "no_thread", "behind",
    "next",
)  # fmt: skip
_WHY = obj(
    {
        "state": _or_null("string"),
        "reason": {"type": "string", "enum": list(_REASONS)},
        "until": _or_null("number"),
        "detail": _TEXT,
        "node": _or_null("string"),
        "thread": _or_null("integer"),
        "ahead": _INT,
        "paused_by": _or_null("string"),
        "in_flight": _INT,
        "in_flight_ids": _list(_TEXT),
        "in_flight_since": _or_null("number"),
    }
)
JOB = obj(
    {
        "id": _TEXT,
        "queue": _TEXT,
        "why": _WHY,
        "shard": _SHARD,
        "max_retry_count": _INT,
        "retries": _list(obj({"number": _INT, "earliest": _NUMBER, "latest": _NUMBER})),
        "jobs": _list(_JOB),
    }
)
ACTED = obj(
    {
        "done": {"type": "integer", "description": "To how many of the ids it was done"},
        "in_flight": {"type": "integer", "description": "How many are in flight, and were left alone"},
        "missing": {
            "type": "integer",
            "description": "How many are not where the action looks, be they elsewhere or nowhere: kick looks in the "
            "morgue, perform_now and bury among those that wait, delete in both",
        },
        "not_done": {
            **_list(obj({"id": _TEXT, "why": _TEXT})),
            "description": "Each of these ids, and why nothing was done to it, in words; as many as were named at most",
        },
    }
)
FOUND = obj({"found": _list(obj({"queue": _TEXT, "states": _list(_TEXT)}))})
COUNT = obj({"count": _INT, "at": {"type": "number", "description": "As of when, by Redis's clock"}})
PAUSED = obj({"paused": _BOOL, "changed": _BOOL})
SENT = obj({"sent": _TEXT})
NODES = obj({"nodes": _list({"type": "object", "required": ["name", "heartbeat_at", "seconds_ago", "host", "pid"]})})
TASK = obj(
    {
        "id": _TEXT,
        "who": _TEXT,
        "queue": _TEXT,
        "action": _TEXT,
        "filter": {"type": "object"},
        "reason": _or_null("string"),
        "owner": {"type": "string", "description": "The process that runs it"},
        "state": {
            "type": "string",
            "enum": ["running", "done", "cancelled", "failed", "interrupted"],
            "description": "interrupted: its process has not reported for 20 s, and has probably died",
        },
        "done": _INT,
        "total": _or_null("integer"),
        "began_at": _NUMBER,
        "heartbeat_at": {"type": "number", "description": "When its process reported last"},
        "ended_at": _or_null("number"),
        "error": _or_null("string"),
    }
)
TASKS = obj({"tasks": _list(TASK)})
AUDIT = obj(
    {
        "audit": _list(
            obj(
                {
                    "at": _NUMBER,
                    "who": _TEXT,
                    "action": _TEXT,
                    "target": _TEXT,
                    "count": _or_null("integer"),
                    "detail": {"type": "object"},
                }
            )
        )
    }
)
REDIS = obj(
    {
        "version": _TEXT,
        "used_memory": _INT,
        "max_memory": _INT,
        "clients": _INT,
        "uptime": _INT,
        "eviction": _TEXT,
        "persistence": _TEXT,
        "warnings": _list(_TEXT),
    }
)
_ERROR = obj({"error": _TEXT})

#: Status -> what it means, for every endpoint, as far as it applies.
_ERRORS = {
    400: "The request is malformed; the error says what is expected",
    401: "A user and a password are needed",
    403: "This user may not do this, or a page of another site has sent it",
    404: "There is no such queue, node or task",
    409: "More jobs match than at_most says",
    413: "The request is too large",
    415: "The request is no JSON document",
    429: "Too many tasks or scans of all ids run already, or too many logins have failed",
    500: "A bug of the dashboard, or keys in Redis that another program has written",
    503: "Redis does not answer",
}


def describe(endpoints: Sequence[Endpoint], server: str) -> dict[str, Any]:
    """The description, an OpenAPI 3.1 document."""
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": "lowq", "version": lowq.__version__, "description": "Times are Unix time in seconds."},
        "servers": [{"url": server}],
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"basic": {"type": "http", "scheme": "basic"}},
        },
        "security": [{}, {"basic": []}],
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    def content(schema: Schema) -> dict[str, Any]:
        return {"application/json": {"schema": schema}}

    answers: dict[str, Any] = {
        str(status): {"description": "Done", "content": content(schema)}
        for status, schema in zip(endpoint.statuses, (endpoint.answer, endpoint.other or {}), strict=False)
    }
    acts = endpoint.method == "POST"
    for status, text in _ERRORS.items():
        if status not in (409, 413, 415) or acts:
            answers[str(status)] = {"description": text, "content": content({"$ref": "#/components/schemas/Error"})}
    operation: dict[str, Any] = {
        "summary": endpoint.text,
        "operationId": endpoint.handler.__name__,
        "parameters": [
            {
                "name": item.name,
                "in": item.place,
                "required": item.required or item.place == "path",
                "schema": item.schema,
                "description": item.text,
            }
            for item in endpoint.parameters
        ],
        "responses": answers,
    }
    if endpoint.body is not None:
        operation["requestBody"] = {"required": True, "content": content(endpoint.body)}
    return operation


# --- checking ------------------------------------------------------------------------------------------------

#: Numbers are smaller: an integer of any length would be no float, and NaN is no number.
_MOST = 1e300

_KINDS: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool) and -_MOST < value < _MOST,
    "boolean": lambda value: isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def is_text(text: str, schema: Schema) -> bool:
    """Whether UTF-8 has it. Ids may be any bytes (``x-bytes``): those that are no UTF-8 come and go as surrogates."""
    try:
        text.encode("utf-8", "surrogateescape" if schema.get("x-bytes") else "strict")
    except UnicodeEncodeError:
        return False
    return True


def mismatch(value: Any, schema: Schema, name: str = "the document") -> str | None:
    """Why a value doesn't fit a schema of those that requests have; None: it fits."""
    kind = schema.get("type")
    if kind is not None and not _KINDS[kind](value):
        return f"{name} must be of type {kind}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{name} must be one of {', '.join(schema['enum'])}"
    if "minimum" in schema and value < schema["minimum"]:
        return f"{name} must be at least {schema['minimum']}"
    if isinstance(value, str) and not is_text(value, schema):
        return f"{name} is no text that UTF-8 has"
    if isinstance(value, str | list):
        least, most = ("minLength", "maxLength") if isinstance(value, str) else ("minItems", "maxItems")
        if not schema.get(least, 0) <= len(value) <= schema.get(most, math.inf):
            return f"{name} must have a length of {schema.get(least, 0)} to {schema.get(most, 'any number')}"
    if isinstance(value, list):
        reasons = (mismatch(item, schema.get("items", {}), f"an item of {name}") for item in value)
        return next((reason for reason in reasons if reason), None)
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        for missing in schema.get("required", ()):
            if missing not in value:
                return f"{name} lacks {missing!r}"
        for key, item in value.items():
            if key not in properties:
                return f"{name} has an unknown property {key!r:.50}; known: {', '.join(properties)}"
            reason = mismatch(item, properties[key], repr(key))
            if reason:
                return reason
    return None
