"""Actions on jobs over the API: on ids at once, on all that match in the background."""

from dataclasses import replace
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType
from starlette.exceptions import HTTPException
from starlette.requests import Request

from lowq import inspection
from lowq.job import State
from lowq.operate.actions import ActionName
from lowq_web.actions import MAX_IDS
from lowq_web.api.answer import Answer
from lowq_web.api.endpoint import post
from lowq_web.api.jobs import Filter, Shard
from lowq_web.api.received import BYTES, QueuePart, Received
from lowq_web.api.tasks import Task
from lowq_web.context import actions_of, context_of, queue_of, queues_of
from lowq_web.listing import Target


class JobFilter(Filter, frozen=True):
    """Which jobs are meant: all that have this state, match this pattern, have a time within these bounds, ..."""

    state: State | UnsetType = UNSET
    min: float | UnsetType = UNSET
    max: float | UnsetType = UNSET
    shard: Shard | UnsetType = UNSET


class CountDocument(Received, frozen=True):
    action: ActionName
    all: JobFilter | UnsetType = UNSET

    def filter(self, request: Request) -> inspection.JobFilter:
        """Its filter, whose ages count from now, whenever it is carried out."""
        wanted = {} if self.all is UNSET else self.all.given()
        return inspection.JobFilter(**wanted).aged(context_of(request).stats_cache.redis_time)


class CountAllDocument(CountDocument, frozen=True):
    queue: QueuePart | UnsetType = UNSET


class Count(Answer, frozen=True):
    count: int
    at: Annotated[float, Meta(description="As of when, by Redis's clock")]


@post("/queues/{queue}/count", "To how many jobs an action would do something now")
def count(request: Request, body: CountDocument) -> Count:
    return _count(request, queue_of(request), body)


@post("/jobs/count", "To how many jobs of all queues an action would do something now")
def count_all(request: Request, body: CountAllDocument) -> Count:
    return _count(request, queues_of(request, body.given().get("queue", "")), body)


def _count(request: Request, target: Target, body: CountDocument) -> Count:
    context, wanted = context_of(request), body.filter(request)
    with context.scans:
        # The time is read first: as `before` it leaves out what came during the count.
        at = context.stats_cache.redis_time()
        return Count(target.count(body.action, wanted), at)


_AtMost = Annotated[
    int,
    Meta(
        ge=0,
        description="With all: refused with 409 when more jobs match, and done to those that match now, none "
        "of those that come meanwhile",
    ),
]
_Before = Annotated[
    float,
    Meta(
        description="With all: nothing is touched that came after this, Unix time in seconds, not in the "
        "future; /count answers it as at. Jobs that were not due by then are left alone in shards that got a "
        "push since, as they can't be distinguished from new ones; so are those that have become due since"
    ),
]
_Ids = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=512, extra_json_schema=BYTES)]],
    Meta(min_length=1, max_length=MAX_IDS),
]


class BulkDocument(CountDocument, frozen=True):
    reason: Annotated[str, Meta(max_length=300)] | UnsetType = UNSET
    at_most: _AtMost | UnsetType = UNSET
    before: _Before | UnsetType = UNSET

    def checked_reason(self) -> str | None:
        """The reason.

        Raises:
            HTTPException: the action takes none.
        """
        if self.reason is not UNSET and self.action != "bury":
            raise HTTPException(400, f"reason: only bury takes one, not {self.action}")
        return self.given().get("reason")


class ActDocument(BulkDocument, frozen=True):
    ids: _Ids | UnsetType = UNSET


class ActOnAllDocument(BulkDocument, frozen=True):
    all: JobFilter
    queue: QueuePart | UnsetType = UNSET


class NotDone(Answer, frozen=True):
    id: str
    why: Annotated[str, Meta(description="In words")]


class Acted(Answer, frozen=True):
    done: Annotated[int, Meta(description="To how many of the ids it was done")]
    signalled: Annotated[int, Meta(description="Of these, by cancel: how many are in flight, and were told to end")]
    in_flight: Annotated[int, Meta(description="How many are in flight, and were left alone")]
    missing: Annotated[
        int,
        Meta(
            description="How many are not where the action looks, be they elsewhere or nowhere: kick looks in the "
            "morgue, perform_now and bury among those that wait, delete in both, cancel among those that wait or are "
            "in flight"
        ),
    ]
    not_done: Annotated[
        list[NotDone],
        Meta(description="The ids that nothing was done to, and why; as many as a request may name, at most"),
    ]


@post("/queues/{queue}/actions", "Do something to ids (200), or in the background to all that match (202)")
def act(request: Request, body: ActDocument) -> Acted | Task:
    given = body.given()
    if ("ids" in given) == ("all" in given):
        raise HTTPException(400, "say either which ids, or all with a filter: {} for all that it can be done to")
    if "ids" not in given:
        return _act_on_all(request, queue_of(request), body)
    reason = body.checked_reason()
    bounds = [name for name in ("at_most", "before") if name in given]
    if bounds:
        raise HTTPException(400, f"{bounds[0]}: it bounds an action on all that match, not one on ids")
    # An id that is named twice would count as missing the second time.
    ids = list(dict.fromkeys(given["ids"]))
    acted = actions_of(request).on_ids(queue_of(request).name, body.action, ids, reason)
    return Acted.of(acted, not_done=[NotDone(*each) for each in acted.left])


@post("/jobs/actions", "Do something to the jobs of all queues that match, in the background")
def act_on_all(request: Request, body: ActOnAllDocument) -> Task:
    return _act_on_all(request, queues_of(request, body.given().get("queue", "")), body)


def _act_on_all(request: Request, target: Target, body: BulkDocument) -> Task:
    given, reason, wanted = body.given(), body.checked_reason(), body.filter(request)
    before = given.get("before")
    if before is not None and before > context_of(request).stats_cache.redis_time():
        raise HTTPException(400, f"before={before!r} lies in the future")
    if "at_most" in given:
        before = _counted(request, target, body.action, wanted, given["at_most"], before)
    started = actions_of(request).on_all(target, body.action, replace(wanted, before=before), reason)
    return Task.of_action(started)


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
