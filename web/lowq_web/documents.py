"""The documents of the API: what it takes (`Received`), and what it answers.

They are what is promised: `openapi` describes the API by them, and a test compares the description with the one that
was agreed on.
"""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

import lowq
from lowq.admin.tasks import TaskState
from lowq.inspection.job_filter import OrderBy
from lowq.inspection.queries import NodeInfo
from lowq.job import State
from lowq_web.actions import MAX_IDS
from lowq_web.received import Received
from lowq_web.retry_clock import Retry
from lowq_web.tasks import ActionName

#: Bytes that are no UTF-8 come and go as surrogates.
_BYTES = {"x-bytes": True}
_Id = Annotated[str, Meta(min_length=1, max_length=512, description="The id: up to 512 bytes of UTF-8")]
_Pattern = Annotated[str, Meta(min_length=1, max_length=512, description="A pattern of ids: 4*, order-?, [a-c]*")]
_Bound = Annotated[
    str,
    Meta(
        max_length=4096,
        description="Bounds what it is ordered by: a number, or with order_by=id an id. Both bounds are included",
        extra_json_schema=_BYTES,
    ),
]

# --- queries -------------------------------------------------------------------------------------------------


class SpanQuery(Received, frozen=True):
    span: Annotated[lowq.Span, Meta(description="How far back")] = "hour"


class IdQuery(Received, frozen=True):
    id: _Id


class AuditQuery(Received, frozen=True):
    limit: Annotated[int, Meta(ge=1, le=1000, description="Entries, at most")] = 100


class JobsQuery(Received, frozen=True):
    of_bytes = frozenset({"after", "min", "max"})

    state: Annotated[State, Meta(description="Absent: all that wait")] | UnsetType = UNSET
    match: _Pattern | UnsetType = UNSET
    order_by: Annotated[OrderBy, Meta(description="By default perform_at, in the morgue buried_at")] | UnsetType = UNSET
    reverse: Annotated[bool, Meta(description="The last ones first")] = False
    limit: Annotated[int, Meta(ge=1, le=1000, description="Jobs of the page")] = 50
    after: (
        Annotated[str, Meta(max_length=4096, description="The cursor of the page before", extra_json_schema=_BYTES)]
        | UnsetType
    ) = UNSET
    min: _Bound | UnsetType = UNSET
    max: _Bound | UnsetType = UNSET


# --- bodies --------------------------------------------------------------------------------------------------


class JobFilter(Received, frozen=True):
    """Which jobs are meant: all that have this state, match this pattern, and whose time is within these bounds."""

    state: State | UnsetType = UNSET
    match: _Pattern | UnsetType = UNSET
    min: float | UnsetType = UNSET
    max: float | UnsetType = UNSET


class ActDocument(Received, frozen=True):
    action: ActionName
    ids: (
        Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=512, extra_json_schema=_BYTES)]],
            Meta(min_length=1, max_length=MAX_IDS),
        ]
        | UnsetType
    ) = UNSET
    all: JobFilter | UnsetType = UNSET
    reason: Annotated[str, Meta(max_length=300)] | UnsetType = UNSET
    at_most: (
        Annotated[
            int,
            Meta(
                ge=0,
                description="With all: refused with 409 when more jobs match, and done to those that match now, none "
                "of those that come meanwhile",
            ),
        ]
        | UnsetType
    ) = UNSET
    before: (
        Annotated[
            float,
            Meta(
                description="With all: nothing is touched that came after this, Unix time in seconds, not in the "
                "future; /count answers it as at. Jobs that were not due by then are left alone in shards that got a "
                "push since, as they can't be distinguished from new ones; so are those that have become due since"
            ),
        ]
        | UnsetType
    ) = UNSET


class CountDocument(Received, frozen=True):
    action: ActionName
    all: JobFilter | UnsetType = UNSET


class CommandDocument(Received, frozen=True):
    node: str
    do: Literal["quiet", "stop", "reload"]


# --- answers -------------------------------------------------------------------------------------------------


class Answer(Struct, frozen=True):
    """What is answered; all fields are always there."""


class Error(Answer, frozen=True):
    error: str


class LowkiqFigures(Answer, frozen=True):
    length: int
    morgue_length: int
    lag: Annotated[float, Meta(description="Seconds")]


class LowkiqStats(Answer, frozen=True):
    total: LowkiqFigures
    by_worker: dict[str, LowkiqFigures]


class Totals(Answer, frozen=True):
    lag: float
    due: int
    length: int
    fresh: int
    retries: int
    taken: int
    morgue_length: int
    processed: int
    failed: int
    processed_rate: float | None
    failed_rate: float | None


class QueueFigures(Totals, frozen=True):
    paused: bool


class Overview(Answer, frozen=True):
    at: float
    total: Totals
    queues: dict[str, QueueFigures]


class FoundIn(Answer, frozen=True):
    queue: str
    states: list[State]


class Found(Answer, frozen=True):
    found: list[FoundIn]


class Queues(Answer, frozen=True):
    queues: list[lowq.Stats]


class QueueDetails(Answer, frozen=True):
    stats: lowq.Stats
    options: dict[str, Any]


class Bucket(Answer, frozen=True):
    up_to: Annotated[float | None, Meta(description="Seconds; null: more than those of the others")]
    count: int


class PerformTimes(Answer, frozen=True):
    count: int
    seconds: float
    buckets: list[Bucket]


class Shards(Answer, frozen=True):
    shards: list[lowq.ShardInfo]


class Payload(Answer, frozen=True):
    payload: Any
    score: float | None


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


class Jobs(Answer, frozen=True):
    jobs: list[Job]
    cursor: str | None


class Described(Answer, frozen=True):
    id: str
    queue: str
    why: lowq.Why
    shard: lowq.ShardInfo
    max_retry_count: int
    retries: list[Retry]
    jobs: list[Job]


class NotDone(Answer, frozen=True):
    id: str
    why: Annotated[str, Meta(description="In words")]


class Acted(Answer, frozen=True):
    done: Annotated[int, Meta(description="To how many of the ids it was done")]
    in_flight: Annotated[int, Meta(description="How many are in flight, and were left alone")]
    missing: Annotated[
        int,
        Meta(
            description="How many are not where the action looks, be they elsewhere or nowhere: kick looks in the "
            "morgue, perform_now and bury among those that wait, delete in both"
        ),
    ]
    not_done: Annotated[
        list[NotDone],
        Meta(description="The ids that nothing was done to, and why; as many as a request may name, at most"),
    ]


class Count(Answer, frozen=True):
    count: int
    at: Annotated[float, Meta(description="As of when, by Redis's clock")]


class Paused(Answer, frozen=True):
    paused: bool
    changed: bool


class Sent(Answer, frozen=True):
    sent: str


class Nodes(Answer, frozen=True):
    nodes: list[NodeInfo]


class Task(Answer, frozen=True):
    id: str
    who: str
    queue: str
    action: ActionName
    filter: dict[str, Any]
    reason: str | None
    owner: Annotated[str, Meta(description="The process that runs it")]
    state: Annotated[
        TaskState, Meta(description="interrupted: its process has not reported for 20 s, and has probably died")
    ]
    done: int
    total: int | None
    began_at: float
    heartbeat_at: Annotated[float, Meta(description="When its process reported last")]
    ended_at: float | None
    error: str | None


class Tasks(Answer, frozen=True):
    tasks: list[Task]


class Audit(Answer, frozen=True):
    audit: list[lowq.AuditEntry]
