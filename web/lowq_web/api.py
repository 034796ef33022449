"""The JSON API: everything that the pages show and do.

Each handler is declared with what it takes and answers (`Endpoint`), by the types in `documents`. `received` checks
strictly: what is unknown or malformed is answered with 400 and the reason. Errors are ``{"error": reason}``.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
from lowq_web.background import BackgroundAction, find_action, read_actions
from lowq_web.context import context_of, queue_of
from lowq_web.fields import query_of
from lowq_web.listing import JobQuery, Queues, Target
from lowq_web.live import document
from lowq_web.openapi import Endpoint
from lowq_web.received import Nothing, Received, read_document, read_query
from lowq_web.retry_clock import coming_retries
from lowq_web.security import is_json, visit_of
from lowq_web.threads import FinalResult


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
        return endpoint.handler(request, _received(request, endpoint))

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


# --- reading -------------------------------------------------------------------------------------------------


def stats(request: Request, _query: Nothing) -> Response:
    figures = context_of(request).stats_cache.figures()

    def of(source: Any) -> documents.LowkiqFigures:
        return documents.LowkiqFigures(source.length, source.morgue_length, source.lag)

    by_worker = {item.stats.name: of(item.stats) for item in figures.queues}
    return _answer(documents.LowkiqStats(of(figures.total), by_worker))


def overview(request: Request, _query: Nothing) -> Response:
    return _answer(document(context_of(request).stats_cache.figures()))


def rates(request: Request, query: documents.SpanQuery) -> Response:
    return _answer(context_of(request).stats_cache.history("", query.span))


def search(request: Request, query: documents.IdQuery) -> Response:
    app, found = context_of(request).app, []
    for info in app.queues():
        places = app.queue(info.name).places(query.id)
        if places:
            found.append(documents.FoundIn(info.name, [item.state for item in places]))
    return _answer(documents.Found(found))


def queues(request: Request, _query: Nothing) -> Response:
    figures = context_of(request).stats_cache.figures()
    return _answer(documents.Queues([item.stats for item in figures.queues]))


def queue(request: Request, _query: Nothing) -> Response:
    handle = queue_of(request)
    limits = [documents.Limit.of(state) for state in handle.limits()]
    return _answer(documents.QueueDetails(handle.stats(), dict(handle.options), limits))


def reshard_progress(request: Request, _query: Nothing) -> Response:
    handle = queue_of(request)
    layouts, progress = handle.layouts, handle.reshard_progress()
    if progress is None:
        return _answer(
            documents.Reshard(layouts.current.shards_count, layouts.current.epoch, None, 0, 0, [], None, None)
        )
    began_at, by = progress.facts.get("began_at"), progress.facts.get("by")
    return _answer(
        documents.Reshard(
            progress.before.shards_count,
            progress.before.epoch,
            progress.after.shards_count,
            progress.shards_moved,
            progress.jobs_left or 0,
            list(progress.waits_for),
            untrusted.number(began_at),
            untrusted.text(by),
        )
    )


def statistics(request: Request, _query: Nothing) -> Response:
    return _answer(queue_of(request).statistics())


def queue_rates(request: Request, query: documents.SpanQuery) -> Response:
    return _answer(context_of(request).stats_cache.history(queue_of(request).name, query.span))


def forecast(request: Request, _query: Nothing) -> Response:
    found = queue_of(request).forecast()
    return _answer(documents.Forecast(**dataclasses.asdict(found), text=found.text))


def perform_times(request: Request, _query: Nothing) -> Response:
    times = queue_of(request).perform_times()
    buckets = [documents.Bucket(_finite(bound), count) for bound, count in times.buckets]
    return _answer(documents.PerformTimes(times.count, times.seconds, buckets))


def times(request: Request, query: documents.SpanQuery) -> Response:
    found = queue_of(request).times(query.span)
    stretches = [
        documents.StretchTimes(item.at, _percentiles(item.wait), _percentiles(item.run)) for item in found.stretches
    ]
    return _answer(
        documents.Times(found.span, found.step, _percentiles(found.wait), _percentiles(found.run), stretches)
    )


def _percentiles(times: inspection.Histogram) -> documents.Percentiles:
    return documents.Percentiles(
        times.count, **{name: _finite(times.percentile(share)) for name, share in PERCENTILES.items()}
    )


def slowest(request: Request, _query: Nothing) -> Response:
    return _answer(documents.Slowest(queue_of(request).slowest()))


def shards(request: Request, _query: Nothing) -> Response:
    return _answer(documents.Shards(context_of(request).app.shards(queue_of(request))))


def jobs(request: Request, query: documents.JobsQuery) -> Response:
    def answer(page: inspection.Page) -> Response:
        return _answer(documents.Jobs([_job(request, job) for job in page.jobs], page.cursor, page.looked))

    return _listed(request, queue_of(request), query, answer)


def all_jobs(request: Request, query: documents.AllJobsQuery) -> Response:
    def answer(page: inspection.FoundPage) -> Response:
        found = [documents.FoundJob(item.queue, _job(request, item.job)) for item in page]
        return _answer(documents.FoundJobs(found, page.cursor, page.looked))

    return _listed(request, _queues(request, query.queue), query, answer)


def _queues(request: Request, part: str | UnsetType) -> Queues:
    return Queues(context_of(request).app, "" if part is UNSET else part)


def _listed(
    request: Request, target: Target, query: documents.ListQuery, answer: Callable[[Any], Response]
) -> Response:
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
    return FinalResult(context.scans, context.threads.iterate(pages), answer)


def _bound(name: str, raw: str, order_by: str | None) -> float | str:
    if order_by == "id":
        return raw
    try:
        return float(raw)
    except ValueError:
        raise HTTPException(400, f"{name}={raw!r:.50}: it is a number") from None


def _job(request: Request, job: lowq.Job) -> documents.Job:
    redact = context_of(request).redact
    return documents.Job(
        id=job.id,
        state=job.state,
        payloads=[documents.Payload(redact(payload), score) for payload, score in job.payloads],
        perform_at=job.perform_at,
        retry_count=job.retry_count,
        error=job.error,
        crashes=job.crashes,
        buried_at=job.buried_at,
        payloads_count=job.payloads_count,
        priority=job.priority,
        expires_at=job.expires_at,
        attempts=[documents.Attempt(one.at, one.seconds, one.node, one.error) for one in job.attempts],
    )


def job(request: Request, query: documents.IdQuery) -> Response:
    found = queue_of(request).describe(query.id)
    jobs, retries = [_job(request, item) for item in found.jobs], coming_retries(found)
    return _answer(
        documents.Described(found.id, found.queue, found.why, found.shard, found.max_retry_count, retries, jobs)
    )


def stack(request: Request, query: documents.IdQuery) -> Response:
    with context_of(request).scans:
        return _answer(documents.StackFound(queue_of(request).stack(query.id)))


def nodes(request: Request, _query: Nothing) -> Response:
    app = context_of(request).app
    return _answer(documents.Nodes(app.nodes(), app.nodes(lost=True)))


def schedules(request: Request, _query: Nothing) -> Response:
    return _answer(documents.Schedules(context_of(request).app.schedules()))


def limits(request: Request, _query: Nothing) -> Response:
    return _answer(documents.Limits([documents.Limit.of(state) for state in context_of(request).app.limits()]))


def stuck(request: Request, _query: Nothing) -> Response:
    return _answer(documents.Stuck(context_of(request).app.stuck()))


def errors(request: Request, _query: Nothing) -> Response:
    return _answer(documents.Errors(context_of(request).app.error_groups()))


def queue_errors(request: Request, _query: Nothing) -> Response:
    return _answer(documents.Errors(queue_of(request).error_groups()))


def redis(request: Request, _query: Nothing) -> Response:
    return _answer(context_of(request).app.redis_info())


def audit(request: Request, query: documents.AuditQuery) -> Response:
    return _answer(documents.Audit(context_of(request).app.audit(**query.given())))


def tasks(request: Request, _query: Nothing) -> Response:
    return _answer(documents.Tasks([_task_document(item) for item in read_actions(context_of(request).app)]))


def task(request: Request, _query: Nothing) -> Response:
    return _answer(_task_document(_task(request)))


def _task(request: Request) -> BackgroundAction:
    found = find_action(context_of(request).app, request.path_params["task"])
    if found is None:
        raise HTTPException(404, "there is no such task, or it is not remembered any more")
    return found


def _task_document(item: BackgroundAction) -> documents.Task:
    same = {name: getattr(item, name) for name in documents.Task.__struct_fields__ if name != "filter"}
    return documents.Task(filter=item.filter.given(), **same)


def index(request: Request) -> Response:
    """Redirects to the description."""
    return RedirectResponse(f"{request.scope.get('lowq_root', '')}/api/v1/openapi.json", 307)


def description(request: Request, _query: Nothing) -> Response:
    root = request.scope.get("lowq_root", "")
    return _answer(openapi.describe(ENDPOINTS, f"{root}/api/v1"))


# --- acting --------------------------------------------------------------------------------------------------


def act(request: Request, body: documents.ActDocument) -> Response:
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
    return _answer(documents.Acted(acted.done, acted.signalled, acted.in_flight, acted.missing, left))


def act_on_all(request: Request, body: documents.ActOnAllDocument) -> Response:
    return _act_on_all(request, _queues(request, body.queue), body)


def _act_on_all(request: Request, target: Target, body: documents.BulkDocument) -> Response:
    context, given, reason = context_of(request), body.given(), _reason(body)
    wanted, before = _filter(request, body.all), given.get("before")
    if before is not None and before > context.stats_cache.redis_time():
        raise HTTPException(400, f"before={before!r} lies in the future")
    if "at_most" in given:
        before = _counted(request, target, body.action, wanted, given["at_most"], before)
    bounded = dataclasses.replace(wanted, before=before)
    started = context.actions.on_all(visit_of(request).actor, target, body.action, bounded, reason)
    return _answer(_task_document(started), 202)


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
    request: Request,
    target: Target,
    action: ActionName,
    wanted: inspection.JobFilter,
    at_most: int,
    before: float | None,
) -> float | inspection.Snapshot:
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


def count(request: Request, body: documents.CountDocument) -> Response:
    return _count(request, queue_of(request), body)


def count_all(request: Request, body: documents.CountAllDocument) -> Response:
    return _count(request, _queues(request, body.queue), body)


def _count(request: Request, target: Target, body: documents.CountDocument) -> Response:
    context, wanted = context_of(request), _filter(request, body.all)
    with context.scans:
        # The time is read first: as `before` it leaves out what came during the count.
        at = context.stats_cache.redis_time()
        found = target.count(body.action, wanted)
    return _answer(documents.Count(found, at))


def pause(request: Request, body: documents.PauseDocument) -> Response:
    reason = body.given().get("reason")
    changed = context_of(request).actions.pause(visit_of(request).actor, queue_of(request).name, reason)
    return _answer(documents.Paused(paused=True, changed=changed))


def resume(request: Request, _body: Nothing) -> Response:
    changed = context_of(request).actions.resume(visit_of(request).actor, queue_of(request).name)
    return _answer(documents.Paused(paused=False, changed=changed))


def reshard(request: Request, body: documents.ReshardDocument) -> Response:
    who, actions = visit_of(request).actor, context_of(request).actions
    return _answer(_task_document(actions.reshard(who, queue_of(request).name, body.shards_count)), 202)


def run_schedule(request: Request, body: documents.ScheduleDocument) -> Response:
    planned_at = context_of(request).actions.run_schedule(visit_of(request).actor, body.name, _queue_in(body))
    return _answer(documents.RanSchedule(planned_at))


def pause_schedule(request: Request, body: documents.ScheduleDocument) -> Response:
    changed = context_of(request).actions.pause_schedule(visit_of(request).actor, body.name, _queue_in(body))
    return _answer(documents.Paused(paused=True, changed=changed))


def resume_schedule(request: Request, body: documents.ScheduleDocument) -> Response:
    changed = context_of(request).actions.resume_schedule(visit_of(request).actor, body.name, _queue_in(body))
    return _answer(documents.Paused(paused=False, changed=changed))


def _queue_in(body: documents.ScheduleDocument) -> str | None:
    return None if body.queue is UNSET else body.queue


def send_command(request: Request, body: documents.CommandDocument) -> Response:
    context_of(request).actions.send_command(visit_of(request).actor, body.node, body.do)
    return _answer(documents.Sent(body.do), 202)


def cancel(request: Request, _body: Nothing) -> Response:
    context_of(request).actions.cancel(visit_of(request).actor, _task(request))
    return _answer(_task_document(_task(request)), 202)


# --- endpoints -----------------------------------------------------------------------------------------------


def _get(path: str, handler: Callable[..., Response], text: str, answer: Any, query: Any = Nothing) -> Endpoint:
    return Endpoint("GET", path, handler, text, {200: answer}, query)


# What takes nothing has to be sent a document all the same: the content type distinguishes the request from one that a
# page of another site makes a browser send.
def _post(path: str, handler: Callable[..., Response], text: str, answers: dict[int, Any], body: Any) -> Endpoint:
    return Endpoint("POST", path, handler, text, answers, body)


ENDPOINTS: Sequence[Endpoint] = (
    _get("/stats", stats, "Length, morgue and lag of all queues, in the form of Lowkiq", documents.LowkiqStats),
    _get("/overview", overview, "All queues in figures, with rates", documents.Overview),
    _get("/rates", rates, "Rates and lag of all queues together, over time", inspection.History, documents.SpanQuery),
    _get("/search", search, "In which queues an id is", documents.Found, documents.IdQuery),
    _get("/queues", queues, "All queues in figures", documents.Queues),
    _get("/queues/{queue}", queue, "A queue in figures, its worker's options, and its limits", documents.QueueDetails),
    _get("/queues/{queue}/statistics", statistics, "Its tasks by state and calls by verb", inspection.Statistics),
    _get("/queues/{queue}/rates", queue_rates, "Its rates and lag over time", inspection.History, documents.SpanQuery),
    _get("/queues/{queue}/forecast", forecast, "When its backlog is gone", documents.Forecast),
    _get("/queues/{queue}/perform-times", perform_times, "How long its performs take", documents.PerformTimes),
    _get(
        "/queues/{queue}/times", times, "How long its jobs wait and run", documents.Times, documents.SpanQuery
    ),
    _get("/queues/{queue}/slowest", slowest, "The batches that ran longest in the last hour", documents.Slowest),
    _get("/queues/{queue}/errors", queue_errors, "What fails in it, alike errors together", documents.Errors),
    _get("/queues/{queue}/shards", shards, "Its shards", documents.Shards),
    _get("/queues/{queue}/jobs", jobs, "A page of its jobs", documents.Jobs, documents.JobsQuery),
    _get("/jobs", all_jobs, "A page of the jobs of all queues", documents.FoundJobs, documents.AllJobsQuery),
    _post(
        "/jobs/actions", act_on_all, "Do something to the jobs of all queues that match, in the background",
        {202: documents.Task}, documents.ActOnAllDocument,
    ),
    _post(
        "/jobs/count", count_all, "To how many jobs of all queues an action would do something now",
        {200: documents.Count}, documents.CountAllDocument,
    ),
    _get("/queues/{queue}/job", job, "Everything that is known of an id", documents.Described, documents.IdQuery),
    _get(
        "/queues/{queue}/stack", stack, "Where in its code a running id is; null: nothing performs it",
        documents.StackFound, documents.IdQuery,
    ),
    _post(
        "/queues/{queue}/actions", act, "Do something to ids (200), or in the background to all that match (202)",
        {200: documents.Acted, 202: documents.Task}, documents.ActDocument,
    ),
    _post(
        "/queues/{queue}/count", count, "To how many jobs an action would do something now", {200: documents.Count},
        documents.CountDocument,
    ),
    _post("/queues/{queue}/pause", pause, "Take no more jobs of it", {200: documents.Paused}, documents.PauseDocument),
    _post("/queues/{queue}/resume", resume, "Take its jobs again", {200: documents.Paused}, Nothing),
    _get("/queues/{queue}/reshard", reshard_progress, "How far it is with another number of shards", documents.Reshard),
    _post(
        "/queues/{queue}/reshard", reshard, "Give it another number of shards, in the background",
        {202: documents.Task}, documents.ReshardDocument,
    ),
    _get("/schedules", schedules, "What is pushed at set times, and when", documents.Schedules),
    _post(
        "/schedules/run-now", run_schedule, "Push a job of a schedule now", {200: documents.RanSchedule},
        documents.ScheduleDocument,
    ),
    _post(
        "/schedules/pause", pause_schedule, "Push no tick of a schedule any more", {200: documents.Paused},
        documents.ScheduleDocument,
    ),
    _post(
        "/schedules/resume", resume_schedule, "End a pause of a schedule", {200: documents.Paused},
        documents.ScheduleDocument,
    ),
    _get("/limits", limits, "All limits over all nodes, and how far they are used", documents.Limits),
    _get("/nodes", nodes, "The nodes that live, and those lost within the last hour", documents.Nodes),
    _get("/errors", errors, "What fails: failures of all queues, alike errors together", documents.Errors),
    _get("/stuck", stuck, "The batches that run for much longer than those of their queue do", documents.Stuck),
    _post(
        "/nodes/command", send_command, "Send a node a command: to go quiet, take jobs again, stop or reload",
        {202: documents.Sent},
        documents.CommandDocument,
    ),
    _get("/tasks", tasks, "What runs in the background", documents.Tasks),
    _get("/tasks/{task}", task, "How far something is", documents.Task),
    _post("/tasks/{task}/cancel", cancel, "Stop it after its current step", {202: documents.Task}, Nothing),
    _get("/audit", audit, "What people did, the latest first", documents.Audit, documents.AuditQuery),
    _get("/redis", redis, "The server, and what to be warned of", inspection.RedisInfo),
    _get("/openapi.json", description, "This description", dict[str, Any]),
)  # fmt: skip
