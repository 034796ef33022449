"""The JSON API: everything that the pages show and do.

The types of a handler, those in `documents`, declare what it takes and answers (`Endpoint`). `received` checks
strictly: what is unknown or malformed is answered with 400 and the reason. Errors are ``{"error": reason}``.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from msgspec import UNSET, Struct, UnsetType
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

import lowq
from lowq import inspection
from lowq.observe.histories import PERCENTILES
from lowq.operate.actions import ActionName
from lowq.store import untrusted
from lowq_web import documents, openapi
from lowq_web.background import BackgroundAction, read_actions
from lowq_web.context import context_of, queue_of, task_of
from lowq_web.deploy import read_deploy
from lowq_web.fields import query_of
from lowq_web.listing import JobQuery, Queues, Target
from lowq_web.live import document
from lowq_web.openapi import Endpoint
from lowq_web.received import Nothing, Received, read_document, read_query
from lowq_web.retry_clock import coming_retries
from lowq_web.security import is_json, visit_of
from lowq_web.threads import FinalResult

A = TypeVar("A", bound=documents.Answer)
Handler = TypeVar("Handler", bound=Callable[..., Any])

#: All that are declared below, in this order.
ENDPOINTS: list[Endpoint] = []
#: What is answered with 202, when it has begun.
_BEGUN = (documents.Task, documents.Sent)


def _endpoint(method: Literal["GET", "POST"], path: str, text: str) -> Callable[[Handler], Handler]:
    """Declares a handler: of a request, and of what it takes if that is anything, to what it answers. A response is
    sent as it is.
    """

    def declare(handler: Handler) -> Handler:
        _, *takes, answer = get_type_hints(handler).values()
        kinds = get_args(answer) if isinstance(answer, UnionType) else [answer]
        answers = {_status(method, kind): kind for kind in kinds if kind is not Response}
        ENDPOINTS.append(Endpoint(method, path, handler, text, answers, takes[0] if takes else Nothing))
        return handler

    return declare


def _status(method: str, kind: Any) -> int:
    return 202 if method == "POST" and kind in _BEGUN else 200


_get = partial(_endpoint, "GET")
# What takes nothing has to be sent a document all the same: the content type distinguishes the request from one that a
# page of another site makes a browser send.
_post = partial(_endpoint, "POST")


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
        given = _received(request, endpoint)
        found = endpoint.handler(request, *([] if endpoint.takes is Nothing else [given]))
        return found if isinstance(found, Response) else _answer(found, _status(endpoint.method, type(found)))

    return handle


def _received(request: Request, endpoint: Endpoint) -> Received:
    """The query or the document that was sent, checked against what the endpoint takes."""
    body, takes = visit_of(request).body, endpoint.takes
    try:
        if endpoint.method == "GET":
            return read_query(query_of(request), takes)
        read_query(query_of(request), Nothing)
        if not body and takes in (Nothing, documents.PauseDocument):
            return takes()
        if not is_json(request.headers):
            raise HTTPException(415, "send a JSON document, with Content-Type: application/json")
        return read_document(body, takes)
    except ValueError as error:
        raise HTTPException(400, str(error)) from None


def _answer(document: Any, status: int = 200) -> Response:
    # Pure ASCII, so that ids of any bytes can be sent.
    try:
        text = json.dumps(document, default=_plain, allow_nan=False)
    except ValueError:  # NaN or an infinity: JSON has none of them
        text = json.dumps(_without_infinities(json.loads(json.dumps(document, default=_plain))))
    return Response(text, status, media_type="application/json")


def _plain(value: Any) -> Any:
    if isinstance(value, Struct):
        return {name: _finite(getattr(value, name)) for name in value.__struct_fields__}
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


@_get("/stats", "Length, morgue and lag of all queues, in the form of Lowkiq")
def stats(request: Request) -> documents.LowkiqStats:
    figures = context_of(request).stats_cache.figures()

    def of(source: Any) -> documents.LowkiqFigures:
        return documents.LowkiqFigures(source.length, source.morgue_length, source.lag)

    by_worker = {item.stats.name: of(item.stats) for item in figures.queues}
    return documents.LowkiqStats(of(figures.total), by_worker)


@_get("/overview", "All queues in figures, with rates")
def overview(request: Request) -> documents.Overview:
    return documents.Overview(**document(context_of(request).stats_cache.figures()))


@_get("/rates", "Rates and lag of all queues together, over time")
def rates(request: Request, query: documents.SpanQuery) -> inspection.History:
    return context_of(request).stats_cache.history("", query.span)


@_get("/search", "In which queues an id is")
def search(request: Request, query: documents.IdQuery) -> documents.Found:
    app, found = context_of(request).app, []
    for info in app.queues():
        places = app.queue(info.name).places(query.id)
        if places:
            found.append(documents.FoundIn(info.name, [item.state for item in places]))
    return documents.Found(found)


@_get("/queues", "All queues in figures")
def queues(request: Request) -> documents.Queues:
    figures = context_of(request).stats_cache.figures()
    return documents.Queues([item.stats for item in figures.queues])


@_get("/queues/{queue}", "A queue in figures, its worker's options, and its limits")
def queue(request: Request) -> documents.QueueDetails:
    handle = queue_of(request)
    limits = [documents.Limit.of(state) for state in handle.limits()]
    return documents.QueueDetails(handle.stats(), dict(handle.options), limits)


@_get("/queues/{queue}/statistics", "Its tasks by state and calls by verb")
def statistics(request: Request) -> inspection.Statistics:
    return queue_of(request).statistics()


@_get("/queues/{queue}/rates", "Its rates and lag over time")
def queue_rates(request: Request, query: documents.SpanQuery) -> inspection.History:
    return context_of(request).stats_cache.history(queue_of(request).name, query.span)


@_get("/queues/{queue}/forecast", "When its backlog is gone")
def forecast(request: Request) -> documents.Forecast:
    found = queue_of(request).forecast()
    return documents.Forecast(**dataclasses.asdict(found), text=found.text)


@_get("/queues/{queue}/perform-times", "How long its performs take")
def perform_times(request: Request) -> documents.PerformTimes:
    times = queue_of(request).perform_times()
    buckets = [documents.Bucket(_finite(bound), count) for bound, count in times.buckets]
    return documents.PerformTimes(times.count, times.seconds, buckets)


@_get("/queues/{queue}/times", "How long its jobs wait and run")
def times(request: Request, query: documents.SpanQuery) -> documents.Times:
    found = queue_of(request).times(query.span)
    stretches = [documents.StretchTimes(at.at, _percentiles(at.wait), _percentiles(at.run)) for at in found.stretches]
    return documents.Times(found.span, found.step, _percentiles(found.wait), _percentiles(found.run), stretches)


def _percentiles(times: inspection.Histogram) -> documents.Percentiles:
    found = {name: _finite(times.percentile(share)) for name, share in PERCENTILES.items()}
    return documents.Percentiles(times.count, **found)


@_get("/queues/{queue}/slowest", "The batches that ran longest in the last hour")
def slowest(request: Request) -> documents.Slowest:
    return documents.Slowest(queue_of(request).slowest())


@_get("/queues/{queue}/errors", "What fails in it, alike errors together")
def queue_errors(request: Request) -> documents.Errors:
    return documents.Errors(queue_of(request).error_groups())


@_get("/queues/{queue}/shards", "Its shards")
def shards(request: Request) -> documents.Shards:
    return documents.Shards(context_of(request).app.shards(queue_of(request)))


@_get("/queues/{queue}/jobs", "A page of its jobs")
def jobs(request: Request, query: documents.JobsQuery) -> documents.Jobs | Response:
    def answer(page: inspection.Page) -> documents.Jobs:
        return documents.Jobs([_job(request, job) for job in page.jobs], page.cursor, page.looked)

    return _listed(request, queue_of(request), query, answer)


@_get("/jobs", "A page of the jobs of all queues")
def all_jobs(request: Request, query: documents.AllJobsQuery) -> documents.FoundJobs | Response:
    def answer(page: inspection.FoundPage) -> documents.FoundJobs:
        found = [documents.FoundJob(item.queue, _job(request, item.job)) for item in page]
        return documents.FoundJobs(found, page.cursor, page.looked)

    return _listed(request, _queues(request, query.queue), query, answer)


def _queues(request: Request, part: str | UnsetType) -> Queues:
    return Queues(context_of(request).app, "" if part is UNSET else part)


def _listed(request: Request, target: Target, query: documents.ListQuery, answer: Callable[[Any], A]) -> A | Response:
    context, given = context_of(request), query.given()
    after, limit = given.pop("after", None), given.pop("limit")
    given.pop("queue", None)
    bounds: dict[str, Any] = {
        name: _bound(name, given.pop(name), given.get("order_by")) for name in ("min", "max") if name in given
    }
    asked = JobQuery(inspection.JobFilter(**given, **bounds), after, limit, {})
    pages = asked.pages(target, context.redact)
    if not asked.scans:
        return answer([page for page in pages if page is not None][-1])
    return FinalResult(context.scans, context.threads.iterate(pages), lambda page: _answer(answer(page)))


def _bound(name: str, raw: str, order_by: str | None) -> float | str:
    if order_by == "id":
        return raw
    try:
        return float(raw)
    except ValueError:
        raise HTTPException(400, f"{name}={raw!r:.50}: it is a number") from None


def _job(request: Request, job: lowq.Job) -> documents.Job:
    redact = context_of(request).redact
    same = {name: getattr(job, name) for name in documents.Job.__struct_fields__}
    payloads = [documents.Payload(redact(payload), score) for payload, score in job.payloads]
    attempts = [documents.Attempt(one.at, one.seconds, one.node, one.error) for one in job.attempts]
    return documents.Job(**same | {"payloads": payloads, "attempts": attempts})


@_post("/jobs/actions", "Do something to the jobs of all queues that match, in the background")
def act_on_all(request: Request, body: documents.ActOnAllDocument) -> documents.Task:
    return _act_on_all(request, _queues(request, body.queue), body)


def _act_on_all(request: Request, target: Target, body: documents.BulkDocument) -> documents.Task:
    context, given, reason = context_of(request), body.given(), _reason(body)
    wanted, before = _filter(request, body.all), given.get("before")
    if before is not None and before > context.stats_cache.redis_time():
        raise HTTPException(400, f"before={before!r} lies in the future")
    if "at_most" in given:
        before = _counted(request, target, body.action, wanted, given["at_most"], before)
    bounded = dataclasses.replace(wanted, before=before)
    started = context.actions.on_all(visit_of(request).actor, target, body.action, bounded, reason)
    return _task_document(started)


def _reason(body: documents.BulkDocument) -> str | None:
    if body.reason is UNSET:
        return None
    if body.action != "bury":
        raise HTTPException(400, f"reason: only bury takes one, not {body.action}")
    return body.reason


def _filter(request: Request, given: documents.JobFilter | UnsetType) -> inspection.JobFilter:
    """The filter of an action, whose ages count from now, whenever it is carried out."""
    wanted = {} if given is UNSET else given.given()
    return inspection.JobFilter(**wanted).aged(context_of(request).stats_cache.redis_time)


def _counted(
    request: Request, target: Target, action: ActionName, wanted: inspection.JobFilter, at_most: int,
    before: float | None,
) -> float | inspection.Snapshot:  # fmt: skip
    """What bounds the action: a snapshot or a time.

    Raises:
        HTTPException: more jobs match than ``at_most``.
    """
    bound: float | inspection.Snapshot
    with context_of(request).scans:
        if before is None:
            # The action is done to exactly the jobs that are counted here, whatever comes meanwhile.
            bound = found = target.snapshot(action, wanted)
            total = found.total
        else:
            bound = before
            total = target.count(action, wanted, before=before)
    if total > at_most:
        raise HTTPException(409, f"at_most={at_most}: there are {total} such jobs now. Nothing was done")
    return bound


@_post("/jobs/count", "To how many jobs of all queues an action would do something now")
def count_all(request: Request, body: documents.CountAllDocument) -> documents.Count:
    return _count(request, _queues(request, body.queue), body)


def _count(request: Request, target: Target, body: documents.CountDocument) -> documents.Count:
    context, wanted = context_of(request), _filter(request, body.all)
    with context.scans:
        # The time is read first: as `before` it leaves out what came during the count.
        at = context.stats_cache.redis_time()
        found = target.count(body.action, wanted)
    return documents.Count(found, at)


@_get("/queues/{queue}/job", "Everything that is known of an id")
def job(request: Request, query: documents.IdQuery) -> documents.Described:
    found = queue_of(request).describe(query.id)
    jobs, retries = [_job(request, item) for item in found.jobs], coming_retries(found)
    return documents.Described(found.id, found.queue, found.why, found.shard, found.max_retry_count, retries, jobs)


@_get("/queues/{queue}/stack", "Where in its code a running id is; null: nothing performs it")
def stack(request: Request, query: documents.IdQuery) -> documents.StackFound:
    with context_of(request).scans:
        return documents.StackFound(queue_of(request).stack(query.id))


@_post("/queues/{queue}/actions", "Do something to ids (200), or in the background to all that match (202)")
def act(request: Request, body: documents.ActDocument) -> documents.Acted | documents.Task:
    who, actions = visit_of(request).actor, context_of(request).actions
    action, given = body.action, body.given()
    if ("ids" in given) == ("all" in given):
        raise HTTPException(400, "say either which ids, or all with a filter: {} for all that it can be done to")
    if "ids" not in given:
        return _act_on_all(request, queue_of(request), body)
    reason = _reason(body)
    bounds = [name for name in ("at_most", "before") if name in given]
    if bounds:
        raise HTTPException(400, f"{bounds[0]}: it bounds an action on all that match, not one on ids")
    # An id that is named twice would count as missing the second time.
    acted = actions.on_ids(who, queue_of(request).name, action, list(dict.fromkeys(given["ids"])), reason)
    left = [documents.NotDone(job_id, why) for job_id, why in acted.left]
    return documents.Acted(acted.done, acted.signalled, acted.in_flight, acted.missing, left)


@_post("/queues/{queue}/count", "To how many jobs an action would do something now")
def count(request: Request, body: documents.CountDocument) -> documents.Count:
    return _count(request, queue_of(request), body)


@_post("/queues/{queue}/pause", "Take no more jobs of it")
def pause(request: Request, body: documents.PauseDocument) -> documents.Paused:
    reason = body.given().get("reason")
    changed = context_of(request).actions.pause(visit_of(request).actor, queue_of(request).name, reason)
    return documents.Paused(paused=True, changed=changed)


@_post("/queues/{queue}/resume", "Take its jobs again")
def resume(request: Request) -> documents.Paused:
    changed = context_of(request).actions.resume(visit_of(request).actor, queue_of(request).name)
    return documents.Paused(paused=False, changed=changed)


@_get("/queues/{queue}/reshard", "How far it is with another number of shards")
def reshard_progress(request: Request) -> documents.Reshard:
    handle = queue_of(request)
    layouts, progress = handle.layouts, handle.reshard_progress()
    if progress is None:
        return documents.Reshard(layouts.current.shards_count, layouts.current.epoch, None, 0, 0, [], None, None)
    before, began_at, by = progress.before, progress.facts.get("began_at"), progress.facts.get("by")
    return documents.Reshard(
        before.shards_count, before.epoch, progress.after.shards_count, progress.shards_moved, progress.jobs_left or 0,
        list(progress.waits_for), untrusted.number(began_at), untrusted.text(by),
    )  # fmt: skip


@_post("/queues/{queue}/reshard", "Give it another number of shards, in the background")
def reshard(request: Request, body: documents.ReshardDocument) -> documents.Task:
    who, actions = visit_of(request).actor, context_of(request).actions
    return _task_document(actions.reshard(who, queue_of(request).name, body.shards_count))


@_get("/schedules", "What is pushed at set times, and when")
def schedules(request: Request) -> documents.Schedules:
    return documents.Schedules(context_of(request).app.schedules())


@_post("/schedules/run-now", "Push a job of a schedule now")
def run_schedule(request: Request, body: documents.ScheduleDocument) -> documents.RanSchedule:
    planned_at = context_of(request).actions.run_schedule(visit_of(request).actor, body.name, _queue_in(body))
    return documents.RanSchedule(planned_at)


@_post("/schedules/pause", "Push no tick of a schedule any more")
def pause_schedule(request: Request, body: documents.ScheduleDocument) -> documents.Paused:
    changed = context_of(request).actions.pause_schedule(visit_of(request).actor, body.name, _queue_in(body))
    return documents.Paused(paused=True, changed=changed)


@_post("/schedules/resume", "End a pause of a schedule")
def resume_schedule(request: Request, body: documents.ScheduleDocument) -> documents.Paused:
    changed = context_of(request).actions.resume_schedule(visit_of(request).actor, body.name, _queue_in(body))
    return documents.Paused(paused=False, changed=changed)


def _queue_in(body: documents.ScheduleDocument) -> str | None:
    return None if body.queue is UNSET else body.queue


@_get("/limits", "All limits over all nodes, and how far they are used")
def limits(request: Request) -> documents.Limits:
    return documents.Limits([documents.Limit.of(state) for state in context_of(request).app.limits()])


@_get("/nodes", "The nodes that live, and those lost within the last hour")
def nodes(request: Request) -> documents.Nodes:
    app = context_of(request).app
    return documents.Nodes(app.nodes(), app.nodes(lost=True))


@_get("/deploy", "Whether a deploy is safe now: what a stop of all nodes would probably interrupt")
def deploy(request: Request) -> documents.Deploy:
    app = context_of(request).app
    found = read_deploy(app, app.nodes())
    consumers = [node.name for node in found.consumers]
    return documents.Deploy(found.is_safe, found.interruptions, consumers, found.tasks, found.versions)


@_get("/errors", "What fails: failures of all queues, alike errors together")
def errors(request: Request) -> documents.Errors:
    return documents.Errors(context_of(request).app.error_groups())


@_get("/stuck", "The batches that run for much longer than those of their queue do")
def stuck(request: Request) -> documents.Stuck:
    return documents.Stuck(context_of(request).app.stuck())


@_post("/nodes/command", "Send a node a command: to go quiet, take jobs again, stop or reload")
def send_command(request: Request, body: documents.CommandDocument) -> documents.Sent:
    context_of(request).actions.send_command(visit_of(request).actor, body.node, body.do)
    return documents.Sent(body.do)


@_get("/tasks", "What runs in the background")
def tasks(request: Request) -> documents.Tasks:
    return documents.Tasks([_task_document(item) for item in read_actions(context_of(request).app)])


@_get("/tasks/{task}", "How far something is")
def task(request: Request) -> documents.Task:
    return _task_document(task_of(request))


def _task_document(item: BackgroundAction) -> documents.Task:
    same = {name: getattr(item, name) for name in documents.Task.__struct_fields__ if name != "filter"}
    return documents.Task(filter=item.filter.given(), **same)


@_post("/tasks/{task}/cancel", "Stop it after its current step")
def cancel(request: Request) -> documents.Task:
    context_of(request).actions.cancel(visit_of(request).actor, task_of(request))
    return _task_document(task_of(request))


@_get("/audit", "What people did, the latest first")
def audit(request: Request, query: documents.AuditQuery) -> documents.Audit:
    return documents.Audit(context_of(request).app.audit(**query.given()))


@_get("/redis", "The server, and what to be warned of")
def redis(request: Request) -> inspection.RedisInfo:
    return context_of(request).app.redis_info()


@_get("/openapi.json", "This description")
def description(request: Request) -> dict[str, Any]:
    root = request.scope.get("lowq_root", "")
    return openapi.describe(ENDPOINTS, f"{root}/api/v1")


def index(request: Request) -> Response:
    """Redirects to the description."""
    return RedirectResponse(f"{request.scope.get('lowq_root', '')}/api/v1/openapi.json", 307)
