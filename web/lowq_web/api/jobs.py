"""Jobs over the API: found, listed, and explained."""

from collections.abc import Callable
from typing import Annotated, Any, Self, TypeVar

from msgspec import UNSET, Meta, UnsetType
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import lowq
from lowq import inspection
from lowq.codec import MAX_PRIORITY
from lowq.job import State
from lowq.operate.job_filter import FilterState, OrderBy
from lowq_web.api.answer import Answer, respond
from lowq_web.api.endpoint import get
from lowq_web.api.received import BYTES, IdQuery, QueuePart, Received
from lowq_web.context import context_of, queue_of, queues_of
from lowq_web.listing import JobQuery, Target
from lowq_web.redaction import Redact
from lowq_web.retry_clock import Retry, coming_retries
from lowq_web.threads import FinalResult

A = TypeVar("A", bound=Answer)


class FoundIn(Answer, frozen=True):
    queue: str
    states: list[State]


class Found(Answer, frozen=True):
    found: list[FoundIn]


@get("/search", "In which queues an id is")
def search(request: Request, query: IdQuery) -> Found:
    app, found = context_of(request).app, []
    for info in app.queues():
        places = app.queue(info.name).places(query.id)
        if places:
            found.append(FoundIn(info.name, [item.state for item in places]))
    return Found(found)


Shard = Annotated[int, Meta(ge=0, description="Only this shard")]
_Pattern = Annotated[str, Meta(min_length=1, max_length=512, description="A pattern of ids: 4*, order-?, [a-c]*")]
_ErrorText = Annotated[str, Meta(min_length=1, max_length=512, description="A part of the error's text, in any case")]
_ErrorGroup = Annotated[
    str,
    Meta(pattern="^[0-9a-f]{12}$", description="The fingerprint of a group of errors: those whose last error is in it"),
]
_Priority = Annotated[int, Meta(ge=0, le=MAX_PRIORITY, description="Only waiting jobs of this priority")]
_OlderThan = Annotated[
    float,
    Meta(ge=0, description="Seconds for which the time of the jobs, perform_at or buried_at, has passed at least"),
]
_NewerThan = Annotated[
    float, Meta(ge=0, description="Seconds for which that time has passed at most; also jobs whose time is to come")
]


class Filter(Received, frozen=True):
    """What a list and an action ask of jobs."""

    match: _Pattern | UnsetType = UNSET
    error: _ErrorText | UnsetType = UNSET
    error_group: _ErrorGroup | UnsetType = UNSET
    priority: _Priority | UnsetType = UNSET
    older_than: _OlderThan | UnsetType = UNSET
    newer_than: _NewerThan | UnsetType = UNSET


_State = Annotated[
    FilterState, Meta(description="Absent: all that wait; any: what is in flight, what waits, then the morgue")
]
_OrderBy = Annotated[OrderBy, Meta(description="By default perform_at, in the morgue buried_at")]
_Cursor = Annotated[str, Meta(max_length=4096, description="The cursor of the page before", extra_json_schema=BYTES)]
_Bound = Annotated[
    str,
    Meta(
        max_length=4096,
        description="Bounds what it is ordered by: a number, or with order_by=id an id. Both bounds are included",
        extra_json_schema=BYTES,
    ),
]
_PayloadField = Annotated[
    str, Meta(min_length=3, max_length=512, description="A field of a payload and its value: customer:7, order.id:7")
]


class ListQuery(Filter, frozen=True):
    of_bytes = frozenset({"after", "min", "max"})

    state: _State | UnsetType = UNSET
    order_by: _OrderBy | UnsetType = UNSET
    reverse: Annotated[bool, Meta(description="The last ones first")] = False
    limit: Annotated[int, Meta(ge=1, le=1000, description="Jobs of the page")] = 50
    after: _Cursor | UnsetType = UNSET
    min: _Bound | UnsetType = UNSET
    max: _Bound | UnsetType = UNSET
    payload: _PayloadField | UnsetType = UNSET


class JobsQuery(ListQuery, frozen=True):
    shard: Shard | UnsetType = UNSET


class AllJobsQuery(ListQuery, frozen=True):
    queue: QueuePart | UnsetType = UNSET


class Payload(Answer, frozen=True):
    payload: Any
    score: float | None


class Attempt(Answer, frozen=True):
    """An attempt that failed."""

    at: Annotated[float, Meta(description="Unix time, seconds")]
    seconds: Annotated[float, Meta(description="How long it was in flight, with all of its batch")]
    node: str
    error: Annotated[str, Meta(description="The last line of the error")]


class Job(Answer, frozen=True):
    id: str
    state: State
    payloads: list[Payload]
    perform_at: float | None
    retry_count: int
    error: str | None
    crashes: int
    buried_at: float | None
    payloads_count: int
    priority: int
    expires_at: float | None
    attempts: Annotated[
        list[Attempt], Meta(description="The last five that failed, oldest first, of a queue with `keep_finished`")
    ]

    @classmethod
    def of_job(cls, job: lowq.Job, redact: Redact) -> Self:
        payloads = [Payload(redact(payload), score) for payload, score in job.payloads]
        return cls.of(job, payloads=payloads, attempts=[Attempt.of(attempt) for attempt in job.attempts])


_Looked = Annotated[int | None, Meta(description="How many jobs were looked at, where the filter asks what is in them")]


class Jobs(Answer, frozen=True):
    jobs: list[Job]
    cursor: str | None
    looked: _Looked


class FoundJob(Answer, frozen=True):
    queue: str
    job: Job


class FoundJobs(Answer, frozen=True):
    found: list[FoundJob]
    cursor: str | None
    looked: _Looked


@get("/queues/{queue}/jobs", "A page of its jobs")
def jobs(request: Request, query: JobsQuery) -> Jobs | Response:
    def answer(page: inspection.Page, redact: Redact) -> Jobs:
        return Jobs.of(page, jobs=[Job.of_job(job, redact) for job in page])

    return _listed(request, queue_of(request), query, answer)


@get("/jobs", "A page of the jobs of all queues")
def all_jobs(request: Request, query: AllJobsQuery) -> FoundJobs | Response:
    def answer(page: inspection.FoundPage, redact: Redact) -> FoundJobs:
        return FoundJobs.of(page, found=[FoundJob(item.queue, Job.of_job(item.job, redact)) for item in page])

    return _listed(request, queues_of(request, query.given().get("queue", "")), query, answer)


def _listed(request: Request, target: Target, query: ListQuery, answer: Callable[[Any, Redact], A]) -> A | Response:
    context, given = context_of(request), query.given()
    after, limit = given.pop("after", None), given.pop("limit")
    given.pop("queue", None)
    for name in ("min", "max"):
        if name in given and given.get("order_by") != "id":
            given[name] = _number(name, given[name])
    asked = JobQuery(inspection.JobFilter(**given), after, limit, {})
    pages = asked.pages(target, context.redact)
    if not asked.scans:
        return answer([page for page in pages if page is not None][-1], context.redact)
    return FinalResult(
        context.scans, context.threads.iterate(pages), lambda page: respond(answer(page, context.redact))
    )


def _number(name: str, raw: str) -> float:
    try:
        return float(raw)
    except ValueError:
        raise HTTPException(400, f"{name}={raw!r:.50}: it is a number") from None


class Described(Answer, frozen=True):
    id: str
    queue: str
    why: inspection.Why
    shard: inspection.ShardInfo
    max_retry_count: int
    retries: list[Retry]
    jobs: list[Job]


@get("/queues/{queue}/job", "Everything that is known of an id")
def job(request: Request, query: IdQuery) -> Described:
    found, redact = queue_of(request).describe(query.id), context_of(request).redact
    shown = [Job.of_job(item, redact) for item in found.jobs]
    return Described.of(found, retries=coming_retries(found), jobs=shown)


class StackFound(Answer, frozen=True):
    stack: inspection.Stack | None


@get("/queues/{queue}/stack", "Where in its code a running id is; null: nothing performs it")
def stack(request: Request, query: IdQuery) -> StackFound:
    with context_of(request).scans:
        return StackFound(queue_of(request).stack(query.id))
