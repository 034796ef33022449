"""The JSON API: everything that the pages show and do.

Each handler is declared with what `openapi` says of it (`Endpoint`). Parameters are checked strictly: what is unknown
or malformed is answered with 400 and the reason. Errors are ``{"error": reason}``.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

import lowq
from lowq_web import openapi
from lowq_web.actions import ACTIONS, MAX_IDS
from lowq_web.context import context_of, queue_of
from lowq_web.fields import query_of
from lowq_web.listing import ORDERS, STATES, JobQuery
from lowq_web.live import document
from lowq_web.openapi import Endpoint, Parameter
from lowq_web.retry_clock import coming_retries
from lowq_web.security import is_json, visit_of
from lowq_web.tasks import ActionName, Task
from lowq_web.threads import FinalResult

_QUEUE = Parameter("queue", "path", {"type": "string"}, "A queue; a slash in its name is written %252F")
_SPAN = Parameter(
    "span", "query", {"type": "string", "enum": ["hour", "day", "month"], "default": "hour"}, "How far back"
)
_ONE_ID = {"type": "string", "minLength": 1, "maxLength": 512, "x-bytes": True}
_ID = Parameter(
    "id",
    "query",
    {"type": "string", "minLength": 1, "maxLength": 512},
    "The id: up to 512 bytes of UTF-8",
    required=True,
)
_TASK = Parameter("task", "path", {"type": "string"}, "The id of a task")


def routes() -> list[Route]:
    """One route per path, with all its methods, so that a wrong method is answered with those that there are."""
    found = []
    for path in dict.fromkeys(endpoint.path for endpoint in ENDPOINTS):
        methods: dict[str, Endpoint] = {endpoint.method: endpoint for endpoint in ENDPOINTS if endpoint.path == path}
        found.append(Route(path.replace("{queue}", "{queue:name}"), _handler(methods), methods=list(methods)))
    return found


def _handler(methods: Mapping[str, Endpoint]) -> Callable[[Request], Response]:
    def handle(request: Request) -> Response:
        endpoint = methods["GET" if request.method == "HEAD" else request.method]
        if "queue" in request.path_params:
            queue_of(request)  # an unknown queue is reported before anything else that is wrong
        return endpoint.handler(request, _checked(request, endpoint))

    return handle


def _checked(request: Request, endpoint: Endpoint) -> dict[str, Any]:
    """The query or the document that was sent, checked against what the endpoint takes."""
    known = {parameter.name: parameter for parameter in endpoint.parameters if parameter.place == "query"}
    query = query_of(request)
    values: dict[str, Any] = {}
    for name, raw in query.items():
        if name not in known:
            names = ", ".join(known) or "none"
            raise HTTPException(400, f"unknown parameter {name!r:.50}; known here: {names}")
        values[name] = _parsed(known[name], raw)
    for name, parameter in known.items():
        if parameter.required and name not in values:
            raise HTTPException(400, f"the parameter {name} is missing")
    if endpoint.body is not None:
        values |= _document(request, endpoint.body)
    return values


def _parsed(parameter: Parameter, raw: str) -> Any:
    schema, name = parameter.schema, parameter.name
    kind = schema.get("type")
    if kind == "boolean":
        if raw not in ("true", "false"):
            raise HTTPException(400, f"{name}={raw!r:.50}: it is true or false")
        return raw == "true"
    if kind == "integer":
        if not re.fullmatch(r"-?[0-9]{1,9}", raw) or not schema.get("minimum", -math.inf) <= int(raw) <= schema.get(
            "maximum", math.inf
        ):
            raise HTTPException(
                400, f"{name}={raw!r:.50}: it is an integer from {schema.get('minimum')} to {schema.get('maximum')}"
            )
        return int(raw)
    if "enum" in schema and raw not in schema["enum"]:
        raise HTTPException(400, f"{name}={raw!r:.50}: it is one of {', '.join(schema['enum'])}")
    if kind == "string" and not openapi.is_text(raw, schema):
        raise HTTPException(400, f"{name}={raw!r:.50} is no text that UTF-8 has")
    if not schema.get("minLength", 0) <= len(raw) <= schema.get("maxLength", 4096):
        raise HTTPException(400, f"{name} is too short or too long")
    return raw


def _document(request: Request, schema: Mapping[str, Any]) -> dict[str, Any]:
    if not visit_of(request).body and not schema["required"]:
        return {}
    if not is_json(request.headers):
        raise HTTPException(415, "send a JSON document, with Content-Type: application/json")
    try:
        sent = json.loads(visit_of(request).body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"this is no JSON: {error}") from None
    reason = openapi.mismatch(sent, schema)
    if reason is not None:
        raise HTTPException(400, reason)
    found: dict[str, Any] = sent
    return found


def _answer(document: Any, status: int = 200) -> Response:
    # Pure ASCII, so that ids of any bytes can be sent.
    try:
        text = json.dumps(document, default=_plain, allow_nan=False)
    except ValueError:  # NaN or an infinity: JSON has none of them
        text = json.dumps(_without_infinities(json.loads(json.dumps(document, default=_plain))))
    return Response(text, status, media_type="application/json")


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _finite(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _without_infinities(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_infinities(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_infinities(item) for item in value]
    return _finite(value)


# --- reading -------------------------------------------------------------------------------------------------


def stats(request: Request, _values: dict[str, Any]) -> Response:
    """``{"total": {"length", "morgue_length", "lag"}, "by_worker": {queue: {the same}}}``; lag in seconds."""
    figures = context_of(request).stats_cache.figures()

    def of(source: Any) -> dict[str, Any]:
        return {name: getattr(source, name) for name in ("length", "morgue_length", "lag")}

    by_worker = {item.stats.name: of(item.stats) for item in figures.queues}
    return _answer({"total": of(figures.total), "by_worker": by_worker})


def overview(request: Request, _values: dict[str, Any]) -> Response:
    return _answer(document(context_of(request).stats_cache.figures()))


def rates(request: Request, values: dict[str, Any]) -> Response:
    return _answer(context_of(request).stats_cache.history("", values.get("span", "hour")))


def search(request: Request, values: dict[str, Any]) -> Response:
    context = context_of(request)
    found = []
    for info in context.app.queues():
        places = context.app.queue(info.name).places(values["id"])
        if places:
            found.append({"queue": info.name, "states": [item.state for item in places]})
    return _answer({"found": found})


def queues(request: Request, _values: dict[str, Any]) -> Response:
    figures = context_of(request).stats_cache.figures()
    return _answer({"queues": [item.stats for item in figures.queues]})


def queue(request: Request, _values: dict[str, Any]) -> Response:
    handle = queue_of(request)
    return _answer({"stats": handle.stats(), "options": dict(handle.options)})


def queue_rates(request: Request, values: dict[str, Any]) -> Response:
    return _answer(context_of(request).stats_cache.history(queue_of(request).name, values.get("span", "hour")))


def perform_times(request: Request, _values: dict[str, Any]) -> Response:
    times = queue_of(request).perform_times()
    buckets = [{"up_to": _finite(bound), "count": count} for bound, count in times.buckets]
    return _answer({"count": times.count, "seconds": times.seconds, "buckets": buckets})


def shards(request: Request, _values: dict[str, Any]) -> Response:
    return _answer({"shards": context_of(request).app.shards(queue_of(request))})


def jobs(request: Request, values: dict[str, Any]) -> Response:
    order_by = values.get("order_by")
    fields: dict[str, Any] = {
        name: values[name] for name in ("state", "match", "order_by", "reverse") if name in values
    }
    fields |= {name: _bound(name, values.get(name), order_by) for name in ("min", "max")}

    def answer(page: lowq.Page) -> Response:
        return _answer({"jobs": [_job(request, job) for job in page.jobs], "cursor": page.cursor})

    asked = JobQuery(lowq.JobFilter(**fields), values.get("after"), values.get("limit", 50), {})
    pages = asked.pages(queue_of(request))
    if not asked.scans:
        found: list[lowq.Page | None] = list(pages)
        return answer([page for page in found if page is not None][-1])
    context = context_of(request)
    return FinalResult(context.scans, context.threads.iterate(pages), answer)


def _bound(name: str, raw: str | None, order_by: str | None) -> float | str | None:
    if raw is None or order_by == "id":
        return raw
    try:
        return float(raw)
    except ValueError:
        raise HTTPException(400, f"{name}={raw!r:.50}: it is a number") from None


def _job(request: Request, job: lowq.Job) -> dict[str, Any]:
    redact = context_of(request).redact
    found = {item.name: _finite(getattr(job, item.name)) for item in dataclasses.fields(job)}
    return found | {
        "payloads": [{"payload": redact(payload), "score": _finite(score)} for payload, score in job.payloads]
    }


def job(request: Request, values: dict[str, Any]) -> Response:
    found = queue_of(request).describe(values["id"])
    return _answer(
        {
            "id": found.id,
            "queue": found.queue,
            "why": found.why,
            "shard": found.shard,
            "max_retry_count": found.max_retry_count,
            "retries": coming_retries(found),
            "jobs": [_job(request, item) for item in found.jobs],
        }
    )


def nodes(request: Request, _values: dict[str, Any]) -> Response:
    return _answer({"nodes": context_of(request).app.nodes()})


def redis(request: Request, _values: dict[str, Any]) -> Response:
    return _answer(context_of(request).app.redis_info())


def audit(request: Request, values: dict[str, Any]) -> Response:
    return _answer({"audit": context_of(request).app.audit(values.get("limit", 100))})


def tasks(request: Request, _values: dict[str, Any]) -> Response:
    return _answer({"tasks": [_task_document(item) for item in context_of(request).tasks.all()]})


def task(request: Request, _values: dict[str, Any]) -> Response:
    return _answer(_task_document(_task(request)))


def _task(request: Request) -> Task:
    found = context_of(request).tasks.get(request.path_params["task"])
    if found is None:
        raise HTTPException(404, "there is no such task, or it is not remembered any more")
    return found


def _task_document(item: Task) -> dict[str, Any]:
    return {
        "id": item.id,
        "who": item.who,
        "queue": item.queue,
        "action": item.action,
        "filter": item.filter.given(),
        "reason": item.reason,
        "owner": item.owner,
        "state": item.state,
        "done": item.done,
        "total": item.total,
        "began_at": item.began_at,
        "heartbeat_at": item.heartbeat_at,
        "ended_at": item.ended_at,
        "error": item.error,
    }


def index(request: Request) -> Response:
    """Redirects to the description."""
    return RedirectResponse(f"{request.scope.get('lowq_root', '')}/api/v1/openapi.json", 307)


def description(request: Request, _values: dict[str, Any]) -> Response:
    root = request.scope.get("lowq_root", "")
    return _answer(openapi.describe(ENDPOINTS, f"{root}/api/v1"))


# --- acting --------------------------------------------------------------------------------------------------


def act(request: Request, values: dict[str, Any]) -> Response:
    who, actions = visit_of(request).user.name, context_of(request).actions
    handle, action, reason = queue_of(request), values["action"], values.get("reason")
    if reason is not None and action != "bury":
        raise HTTPException(400, f"reason: only bury takes one, not {action}")
    if ("ids" in values) == ("all" in values):
        raise HTTPException(400, "say either which ids, or all with a filter: {} for all that it can be done to")
    bounds = [name for name in ("at_most", "before") if name in values]
    if "ids" in values:
        if bounds:
            raise HTTPException(400, f"{bounds[0]}: it bounds an action on all that match, not one on ids")
        # An id that is named twice would count as missing the second time.
        acted = actions.on_ids(who, handle.name, action, list(dict.fromkeys(values["ids"])), reason)
        counts = {"done": acted.done, "in_flight": acted.in_flight, "missing": acted.missing}
        return _answer(counts | {"not_done": [{"id": job_id, "why": why} for job_id, why in acted.left]})
    wanted, before = lowq.JobFilter(**values["all"]), values.get("before")
    if before is not None and before > context_of(request).stats_cache.redis_time():
        raise HTTPException(400, f"before={before!r} lies in the future")
    bound = before if "at_most" not in values else _counted(request, action, wanted, values["at_most"], before)
    started = actions.on_all(who, handle.name, action, dataclasses.replace(wanted, before=bound), reason)
    return _answer(_task_document(started), 202)


def _counted(
    request: Request, action: ActionName, wanted: lowq.JobFilter, at_most: int, before: float | None
) -> float | lowq.Snapshot:
    """What bounds the action: a snapshot or a time.

    Raises:
        HTTPException: more jobs match than ``at_most``.
    """
    handle = queue_of(request)
    bound: float | lowq.Snapshot
    with context_of(request).scans:
        if before is None:
            # The action is done to exactly the jobs that are counted here, whatever comes meanwhile.
            bound = found = handle.snapshot(action, wanted)
            total = found.total
        else:
            bound = before
            total = handle.count(action, wanted, before=before)
    if total > at_most:
        raise HTTPException(409, f"at_most={at_most}: there are {total} such jobs now. Nothing was done")
    return bound


def count(request: Request, values: dict[str, Any]) -> Response:
    wanted = lowq.JobFilter(**values.get("all", {}))
    handle = queue_of(request)
    context = context_of(request)
    with context.scans:
        # The time is read first: as `before` it leaves out what came during the count.
        at = context.stats_cache.redis_time()
        found = handle.count(values["action"], wanted)
    return _answer({"count": found, "at": at})


def pause(request: Request, _values: dict[str, Any]) -> Response:
    changed = context_of(request).actions.pause(visit_of(request).user.name, queue_of(request).name)
    return _answer({"paused": True, "changed": changed})


def resume(request: Request, _values: dict[str, Any]) -> Response:
    changed = context_of(request).actions.resume(visit_of(request).user.name, queue_of(request).name)
    return _answer({"paused": False, "changed": changed})


def send_command(request: Request, values: dict[str, Any]) -> Response:
    context_of(request).actions.send_command(visit_of(request).user.name, values["node"], values["do"])
    return _answer({"sent": values["do"]}, 202)


def cancel(request: Request, _values: dict[str, Any]) -> Response:
    context_of(request).actions.cancel(visit_of(request).user.name, _task(request))
    return _answer(_task_document(_task(request)), 202)


# --- endpoints -------------------------------------------------------------------------------------------

_FILTER = openapi.obj(
    {
        "state": {"type": "string", "enum": list(STATES)},
        "match": {"type": "string", "minLength": 1, "maxLength": 512},
        "min": {"type": "number"},
        "max": {"type": "number"},
    },
    required=(),
)
_ACTION = {"type": "string", "enum": list(ACTIONS)}
_IDS = {
    "type": "array",
    "items": _ONE_ID,
    "minItems": 1,
    "maxItems": MAX_IDS,
}
_ACT = openapi.obj(
    {
        "action": _ACTION,
        "ids": _IDS,
        "all": _FILTER,
        "reason": {"type": "string", "maxLength": 300},
        "at_most": {
            "type": "integer",
            "minimum": 0,
            "description": "With all: refused with 409 when more jobs match, and done to those that match now, none of "
            "those that come meanwhile",
        },
        "before": {
            "type": "number",
            "description": "With all: nothing is touched that came after this, Unix time in seconds, not in the "
            "future; /count answers it as at. Jobs that were not due by then are left alone in shards that got a push "
            "since, as they can't be distinguished from new ones; so are those that have become due since",
        },
    },
    required=("action",),
)
_COUNT = openapi.obj({"action": _ACTION, "all": _FILTER}, required=("action",))
#: The body of a request without parameters. It has to be sent all the same: its content type distinguishes the request
#: from one that a page of another site makes a browser send.
_NOTHING = openapi.obj({})
_COMMAND = openapi.obj(
    {"node": {"type": "string"}, "do": {"type": "string", "enum": ["quiet", "stop"]}}, required=("node", "do")
)

_JOBS: Sequence[Parameter] = (
    Parameter("state", "query", {"type": "string", "enum": list(STATES)}, "Absent: all that wait"),
    Parameter(
        "match", "query", {"type": "string", "minLength": 1, "maxLength": 512}, "A pattern of ids: 4*, order-?, [a-c]*"
    ),
    Parameter(
        "order_by", "query", {"type": "string", "enum": list(ORDERS)}, "By default perform_at, in the morgue buried_at"
    ),
    Parameter("reverse", "query", {"type": "boolean"}, "The last ones first"),
    Parameter("limit", "query", {"type": "integer", "minimum": 1, "maximum": 1000, "default": 50}, "Jobs of the page"),
    Parameter("after", "query", {"type": "string", "x-bytes": True}, "The cursor of the page before"),
    Parameter(
        "min",
        "query",
        {"type": "string", "x-bytes": True},
        "Bounds what it is ordered by: a number, or with order_by=id an id",
    ),
    Parameter("max", "query", {"type": "string", "x-bytes": True}, "Likewise. Both are included"),
)
_LIMIT = Parameter(
    "limit", "query", {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100}, "Entries, at most"
)

ENDPOINTS: Sequence[Endpoint] = (
    Endpoint("GET", "/stats", stats, "Length, morgue and lag of all queues, in the form of Lowkiq", openapi.STATS),
    Endpoint("GET", "/overview", overview, "All queues in figures, with rates", openapi.OVERVIEW),
    Endpoint("GET", "/rates", rates, "Rates and lag of all queues together, over time", openapi.HISTORY, (_SPAN,)),
    Endpoint("GET", "/search", search, "In which queues an id is", openapi.FOUND, (_ID,)),
    Endpoint("GET", "/queues", queues, "All queues in figures", openapi.QUEUES),
    Endpoint(
        "GET",
        "/queues/{queue}",
        queue,
        "A queue in figures, and its worker's options",
        openapi.QUEUE,
        (_QUEUE,),
    ),
    Endpoint(
        "GET",
        "/queues/{queue}/rates",
        queue_rates,
        "Its rates and lag over time",
        openapi.HISTORY,
        (_QUEUE, _SPAN),
    ),
    Endpoint(
        "GET",
        "/queues/{queue}/perform-times",
        perform_times,
        "How long its performs take",
        openapi.TIMES,
        (_QUEUE,),
    ),
    Endpoint("GET", "/queues/{queue}/shards", shards, "Its shards", openapi.SHARDS, (_QUEUE,)),
    Endpoint("GET", "/queues/{queue}/jobs", jobs, "A page of its jobs", openapi.JOBS, (_QUEUE, *_JOBS)),
    Endpoint("GET", "/queues/{queue}/job", job, "Everything that is known of an id", openapi.JOB, (_QUEUE, _ID)),
    Endpoint(
        "POST",
        "/queues/{queue}/actions",
        act,
        "Do something to ids (200), or in the background to all that match (202)",
        openapi.ACTED,
        (_QUEUE,),
        _ACT,
        statuses=(200, 202),
        other=openapi.TASK,
    ),
    Endpoint(
        "POST",
        "/queues/{queue}/count",
        count,
        "To how many jobs an action would do something now",
        openapi.COUNT,
        (_QUEUE,),
        _COUNT,
    ),
    Endpoint("POST", "/queues/{queue}/pause", pause, "Take no more jobs of it", openapi.PAUSED, (_QUEUE,), _NOTHING),
    Endpoint("POST", "/queues/{queue}/resume", resume, "Take its jobs again", openapi.PAUSED, (_QUEUE,), _NOTHING),
    Endpoint("GET", "/nodes", nodes, "The nodes that live", openapi.NODES),
    Endpoint(
        "POST",
        "/nodes/command",
        send_command,
        "Send a node the command to go quiet, or to stop",
        openapi.SENT,
        (),
        _COMMAND,
        statuses=(202,),
    ),
    Endpoint("GET", "/tasks", tasks, "What runs in the background", openapi.TASKS),
    Endpoint("GET", "/tasks/{task}", task, "How far something is", openapi.TASK, (_TASK,)),
    Endpoint(
        "POST",
        "/tasks/{task}/cancel",
        cancel,
        "Stop it after its current step",
        openapi.TASK,
        (_TASK,),
        _NOTHING,
        statuses=(202,),
    ),
    Endpoint("GET", "/audit", audit, "What people did, the latest first", openapi.AUDIT, (_LIMIT,)),
    Endpoint("GET", "/redis", redis, "The server, and what to be warned of", openapi.REDIS),
    Endpoint("GET", "/openapi.json", description, "This description", {"type": "object"}),
)
