"""The documents of the API: what it takes (`Received`), and what it answers.

They are what is promised: `openapi` describes the API by them, and a test compares the description with the one that
was agreed on.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from msgspec import UNSET, Meta, Struct, UnsetType

import lowq
from lowq import admin, inspection
from lowq.codec import MAX_PRIORITY
from lowq.job import State
from lowq.observe.error_groups import ErrorGroup
from lowq.operate.actions import ActionName
from lowq.operate.job_filter import FilterState, OrderBy
from lowq.operate.nodes import NodeCommand, NodeInfo, StuckBatch
from lowq.store.keys import MAX_SHARDS
from lowq_web.actions import MAX_IDS
from lowq_web.background import TaskState
from lowq_web.received import Received
from lowq_web.retry_clock import Retry
from lowq_web.stats_cache import Total
from lowq_web.words import TaskAction

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
    span: Annotated[inspection.Span, Meta(description="How far back")] = "hour"


class IdQuery(Received, frozen=True):
    id: _Id


class AuditQuery(Received, frozen=True):
    limit: Annotated[int, Meta(ge=1, le=1000, description="Entries, at most")] = 100
    who: Annotated[str, Meta(max_length=300, description="A part of the name, in any case")] | UnsetType = UNSET
    action: Annotated[str, Meta(max_length=300, description="Such as kick or pause")] | UnsetType = UNSET
    target: Annotated[str, Meta(max_length=300, description="The name of a queue or a node")] | UnsetType = UNSET
    since: Annotated[float, Meta(description="Unix time, seconds; both bounds are included")] | UnsetType = UNSET
    until: Annotated[float, Meta(description="Unix time, seconds")] | UnsetType = UNSET
    after: (
        Annotated[
            str,
            Meta(
                pattern=r"^-?[0-9]{1,15}\.[0-9]{6}-[0-9a-f]{0,32}$",
                description="The cursor of an entry, for those that are older",
            ),
        ]
        | UnsetType
    ) = UNSET


_PayloadField = Annotated[
    str, Meta(min_length=3, max_length=512, description="A field of a payload and its value: customer:7, order.id:7")
]
_ErrorText = Annotated[str, Meta(min_length=1, max_length=512, description="A part of the error's text, in any case")]


_ErrorGroup = Annotated[
    str,
    Meta(pattern="^[0-9a-f]{12}$", description="The fingerprint of a group of errors: those whose last error is in it"),
]
_QueuePart = Annotated[str, Meta(max_length=512, description="A part of the queue's name, in any case")]
_Shard = Annotated[int, Meta(ge=0, description="Only this shard")]
_Priority = Annotated[int, Meta(ge=0, le=MAX_PRIORITY, description="Only waiting jobs of this priority")]
_OlderThan = Annotated[
    float,
    Meta(ge=0, description="Seconds for which the time of the jobs, perform_at or buried_at, has passed at least"),
]
_NewerThan = Annotated[
    float, Meta(ge=0, description="Seconds for which that time has passed at most; also jobs whose time is to come")
]


class _Filter(Received, frozen=True):
    """What a list and an action ask of jobs."""

    match: _Pattern | UnsetType = UNSET
    error: _ErrorText | UnsetType = UNSET
    error_group: _ErrorGroup | UnsetType = UNSET
    priority: _Priority | UnsetType = UNSET
    older_than: _OlderThan | UnsetType = UNSET
    newer_than: _NewerThan | UnsetType = UNSET


class ListQuery(_Filter, frozen=True):
    of_bytes = frozenset({"after", "min", "max"})

    state: (
        Annotated[
            FilterState, Meta(description="Absent: all that wait; any: what is in flight, what waits, then the morgue")
        ]
        | UnsetType
    ) = UNSET
    order_by: Annotated[OrderBy, Meta(description="By default perform_at, in the morgue buried_at")] | UnsetType = UNSET
    reverse: Annotated[bool, Meta(description="The last ones first")] = False
    limit: Annotated[int, Meta(ge=1, le=1000, description="Jobs of the page")] = 50
    after: (
        Annotated[str, Meta(max_length=4096, description="The cursor of the page before", extra_json_schema=_BYTES)]
        | UnsetType
    ) = UNSET
    min: _Bound | UnsetType = UNSET
    max: _Bound | UnsetType = UNSET
    payload: _PayloadField | UnsetType = UNSET


class JobsQuery(ListQuery, frozen=True):
    shard: _Shard | UnsetType = UNSET


class AllJobsQuery(ListQuery, frozen=True):
    queue: _QueuePart | UnsetType = UNSET


# --- bodies --------------------------------------------------------------------------------------------------


class JobFilter(_Filter, frozen=True):
    """Which jobs are meant: all that have this state, match this pattern, have a time within these bounds, ..."""

    state: State | UnsetType = UNSET
    min: float | UnsetType = UNSET
    max: float | UnsetType = UNSET
    shard: _Shard | UnsetType = UNSET


class PauseDocument(Received, frozen=True):
    reason: (
        Annotated[str, Meta(max_length=300, description="For the audit log and the page of the queue")] | UnsetType
    ) = UNSET


class CountDocument(Received, frozen=True):
    action: ActionName
    all: JobFilter | UnsetType = UNSET


class CountAllDocument(CountDocument, frozen=True):
    queue: _QueuePart | UnsetType = UNSET


class BulkDocument(CountDocument, frozen=True):
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


class ActDocument(BulkDocument, frozen=True):
    ids: (
        Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=512, extra_json_schema=_BYTES)]],
            Meta(min_length=1, max_length=MAX_IDS),
        ]
        | UnsetType
    ) = UNSET


class ActOnAllDocument(BulkDocument, frozen=True):
    all: JobFilter
    queue: _QueuePart | UnsetType = UNSET


class CommandDocument(Received, frozen=True):
    node: str
    do: NodeCommand


class ScheduleDocument(Received, frozen=True):
    name: Annotated[str, Meta(min_length=1, max_length=512)]
    queue: Annotated[str, Meta(description="Needed where schedules of several queues have the name")] | UnsetType = (
        UNSET
    )


class ReshardDocument(Received, frozen=True):
    shards_count: Annotated[int, Meta(ge=1, le=MAX_SHARDS, description="What the queue is given")]


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


@dataclass(frozen=True)
class Totals(Total):
    processed_rate: float | None
    failed_rate: float | None


@dataclass(frozen=True)
class QueueFigures(Totals):
    paused: bool
    reshard_to: Annotated[int | None, Meta(description="While it is resharded: how many shards it is given")]
    forecast: Annotated[str, Meta(description="When its backlog is gone, in words")]


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
    queues: list[inspection.Stats]


class Limit(Answer, frozen=True):
    """A limit over all nodes, of a worker or around calls, and what is granted of it."""

    kind: Literal["rate", "concurrency"]
    limit: Annotated[int, Meta(description="Jobs that begin within the time, or batches that run at once, at most")]
    per: Annotated[float | None, Meta(description="Seconds, of a rate")]
    strict: Annotated[bool, Meta(description="A rate that counts until its time after what it allowed has ended")]
    key: Annotated[str | None, Meta(description="What queues that share it call it; null: it is the queue's own")]
    used: int
    wait: Annotated[
        float | None,
        Meta(description="Seconds until more may begin; 0: more may now; null: as soon as a batch ends"),
    ]
    waiting: Annotated[int, Meta(description="Queues of nodes that wait for a permit")]

    @classmethod
    def of(cls, state: inspection.LimitState) -> Self:
        limit = state.limit
        kind: Literal["rate", "concurrency"] = "rate" if isinstance(limit, lowq.Rate) else "concurrency"
        per, strict = (limit.seconds, limit.strict) if isinstance(limit, lowq.Rate) else (None, False)
        return cls(kind, limit.limit, per, strict, limit.key, state.used, state.wait, state.waiting)


class Limits(Answer, frozen=True):
    limits: list[Limit]


class QueueDetails(Answer, frozen=True):
    stats: inspection.Stats
    options: dict[str, Any]
    limits: list[Limit]


class Reshard(Answer, frozen=True):
    shards_count: int
    epoch: Annotated[int, Meta(description="Counts the reshards that have ended")]
    to: Annotated[int | None, Meta(description="The number of shards that the queue is given; null: none is under way")]
    shards_moved: Annotated[int, Meta(description="Shards that nothing is left in, of shards_count")]
    jobs_left: Annotated[int, Meta(description="Jobs that are still in shards of the layout before")]
    waits_for: Annotated[list[int], Meta(description="Shards whose holders finish what is in flight")]
    began_at: float | None
    by: Annotated[str | None, Meta(description="Who began it")]


class Forecast(Answer, frozen=True):
    """When its backlog is gone, if it goes on as in the last 5 minutes."""

    backlog: Annotated[int, Meta(description="Jobs that are due or in flight")]
    pushed_rate: Annotated[float | None, Meta(description="Payloads that came in per second; null: not known")]
    performed_rate: Annotated[float | None, Meta(description="Jobs performed per second; null: not known")]
    drain_seconds: Annotated[
        float | None, Meta(description="Until the backlog is gone; null: not known, or it does not shrink")
    ]
    growing_rate: Annotated[
        float | None, Meta(description="Jobs per second by which the backlog grows, or 0; null: not known")
    ]
    is_worked: Annotated[bool, Meta(description="Whether somebody holds a shard of it")]
    is_paused: bool
    is_late: Annotated[bool, Meta(description="Whether a job waits for longer than the latency goal of the queue")]
    text: Annotated[str, Meta(description="The same in words")]


class Bucket(Answer, frozen=True):
    up_to: Annotated[float | None, Meta(description="Seconds; null: more than those of the others")]
    count: int


class PerformTimes(Answer, frozen=True):
    count: int
    seconds: float
    buckets: list[Bucket]


_Seconds = Annotated[float | None, Meta(description="Seconds, an upper bound; null: more than the largest bound")]


class Percentiles(Answer, frozen=True):
    """How long something took."""

    count: Annotated[int, Meta(description="How many there were; with none the others are 0")]
    p50: _Seconds
    p95: _Seconds
    p99: _Seconds


class StretchTimes(Answer, frozen=True):
    at: Annotated[float, Meta(description="Its beginning: Unix time, seconds")]
    wait: Percentiles
    run: Percentiles


class Times(Answer, frozen=True):
    """How long its jobs waited since they were due, and how long its batches ran, as nodes have recorded it."""

    span: inspection.Span
    step: Annotated[int, Meta(description="Seconds of a stretch")]
    wait: Percentiles
    run: Percentiles
    stretches: list[StretchTimes]


class Slowest(Answer, frozen=True):
    """The batches that ran longest in the last hour."""

    slowest: list[inspection.SlowBatch]


class Shards(Answer, frozen=True):
    shards: list[inspection.ShardInfo]


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


class Described(Answer, frozen=True):
    id: str
    queue: str
    why: inspection.Why
    shard: inspection.ShardInfo
    max_retry_count: int
    retries: list[Retry]
    jobs: list[Job]


class StackFound(Answer, frozen=True):
    stack: inspection.Stack | None


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
    #: Those that died within the last hour, the latest first, as of their last heartbeats.
    lost: list[NodeInfo]


class Interruption(Answer, frozen=True):
    """A running batch that a stop of its node would probably cut off, to be performed again: it has been running for
    longer than the node's ``shutdown_timeout``, or batches of its queue often do (`usual`).
    """

    node: str
    thread: Annotated[int | None, Meta(description="From 0; null: a task of the node's event loop")]
    batch: inspection.RunningBatch
    shutdown_timeout: Annotated[float, Meta(description="Seconds that a stop of the node waits")]
    usual: Annotated[
        float | None,
        Meta(description="Seconds that 95 % of its queue's batches take at most; 0: not known; null: more than 300"),
    ]


class Deploy(Answer, frozen=True):
    is_safe: bool
    interruptions: Annotated[list[Interruption], Meta(description="What a stop of all nodes would probably cut off")]
    consumers: Annotated[list[str], Meta(description="Those with jobs in hand")]
    tasks: Annotated[int, Meta(description="Actions that run in processes of the dashboard")]
    versions: Annotated[dict[str, int], Meta(description="How many nodes have each")]


class Schedules(Answer, frozen=True):
    schedules: list[inspection.ScheduleInfo]


class RanSchedule(Answer, frozen=True):
    planned_at: float


class Stuck(Answer, frozen=True):
    batches: list[StuckBatch]


class Errors(Answer, frozen=True):
    errors: list[ErrorGroup]


class Task(Answer, frozen=True):
    id: str
    who: str
    queue: Annotated[str | None, Meta(description="null: all queues whose names have part in them")]
    part: str
    action: TaskAction
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
    shards_count: Annotated[
        int | None, Meta(description="Of reshard: what the queue is given; done and total count shards then")
    ]


class Tasks(Answer, frozen=True):
    tasks: list[Task]


class Audit(Answer, frozen=True):
    audit: list[admin.AuditEntry]
