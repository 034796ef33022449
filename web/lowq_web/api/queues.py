"""Queues over the API: their figures, options and limits, and their pause."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request

import lowq
from lowq import inspection
from lowq_web.api.answer import Answer
from lowq_web.api.endpoint import get, post
from lowq_web.api.received import Received, SpanQuery
from lowq_web.context import actions_of, context_of, queue_of
from lowq_web.live import document
from lowq_web.stats_cache import Total


class LowkiqFigures(Answer, frozen=True):
    length: int
    morgue_length: int
    lag: Annotated[float, Meta(description="Seconds")]


class LowkiqStats(Answer, frozen=True):
    total: LowkiqFigures
    by_worker: dict[str, LowkiqFigures]


@get("/stats", "Length, morgue and lag of all queues, in the form of Lowkiq")
def stats(request: Request) -> LowkiqStats:
    figures = context_of(request).stats_cache.figures()
    by_worker = {item.stats.name: LowkiqFigures.of(item.stats) for item in figures.queues}
    return LowkiqStats(LowkiqFigures.of(figures.total), by_worker)


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


@get("/overview", "All queues in figures, with rates")
def overview(request: Request) -> Overview:
    return Overview(**document(context_of(request).stats_cache.figures()))


@get("/rates", "Rates and lag of all queues together, over time")
def rates(request: Request, query: SpanQuery) -> inspection.History:
    return context_of(request).stats_cache.history("", query.span)


class Queues(Answer, frozen=True):
    queues: list[inspection.Stats]


@get("/queues", "All queues in figures")
def queues(request: Request) -> Queues:
    return Queues([item.stats for item in context_of(request).stats_cache.figures().queues])


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
    def of_state(cls, state: inspection.LimitState) -> Self:
        rule = state.limit
        own: dict[str, Any] = {"kind": "concurrency", "per": None, "strict": False}
        if isinstance(rule, lowq.Rate):
            own = {"kind": "rate", "per": rule.seconds, "strict": rule.strict}
        return cls.of(state, limit=rule.limit, key=rule.key, **own)


class Limits(Answer, frozen=True):
    limits: list[Limit]


@get("/limits", "All limits over all nodes, and how far they are used")
def limits(request: Request) -> Limits:
    return Limits([Limit.of_state(state) for state in context_of(request).app.limits()])


class QueueDetails(Answer, frozen=True):
    stats: inspection.Stats
    options: dict[str, Any]
    limits: list[Limit]


@get("/queues/{queue}", "A queue in figures, its worker's options, and its limits")
def queue(request: Request) -> QueueDetails:
    handle = queue_of(request)
    return QueueDetails(handle.stats(), dict(handle.options), [Limit.of_state(state) for state in handle.limits()])


@get("/queues/{queue}/statistics", "Its tasks by state and calls by verb")
def statistics(request: Request) -> inspection.Statistics:
    return queue_of(request).statistics()


@get("/queues/{queue}/rates", "Its rates and lag over time")
def queue_rates(request: Request, query: SpanQuery) -> inspection.History:
    return context_of(request).stats_cache.history(queue_of(request).name, query.span)


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


@get("/queues/{queue}/forecast", "When its backlog is gone")
def forecast(request: Request) -> Forecast:
    return Forecast.of(queue_of(request).forecast())


class Shards(Answer, frozen=True):
    shards: list[inspection.ShardInfo]


@get("/queues/{queue}/shards", "Its shards")
def shards(request: Request) -> Shards:
    return Shards(context_of(request).app.shards(queue_of(request)))


_Reason = Annotated[str, Meta(max_length=300, description="For the audit log and the page of the queue")]


class PauseDocument(Received, frozen=True):
    body_optional = True
    reason: _Reason | UnsetType = UNSET


class Paused(Answer, frozen=True):
    paused: bool
    changed: bool


@post("/queues/{queue}/pause", "Take no more jobs of it")
def pause(request: Request, body: PauseDocument) -> Paused:
    changed = actions_of(request).pause(queue_of(request).name, body.given().get("reason"))
    return Paused(paused=True, changed=changed)


@post("/queues/{queue}/resume", "Take its jobs again")
def resume(request: Request) -> Paused:
    return Paused(paused=False, changed=actions_of(request).resume(queue_of(request).name))
