"""How long the jobs of a queue wait and run, over the API."""

from typing import Annotated, Self

from msgspec import Meta
from starlette.requests import Request

from lowq import inspection
from lowq.observe.histories import PERCENTILES
from lowq_web.api.answer import Answer
from lowq_web.api.endpoint import get
from lowq_web.api.received import SpanQuery
from lowq_web.context import queue_of


class Bucket(Answer, frozen=True):
    up_to: Annotated[float | None, Meta(description="Seconds; null: more than those of the others")]
    count: int


class PerformTimes(Answer, frozen=True):
    count: int
    seconds: float
    buckets: list[Bucket]


@get("/queues/{queue}/perform-times", "How long its performs take")
def perform_times(request: Request) -> PerformTimes:
    found = queue_of(request).perform_times()
    return PerformTimes.of(found, buckets=[Bucket(*bucket) for bucket in found.buckets])


_Seconds = Annotated[float | None, Meta(description="Seconds, an upper bound; null: more than the largest bound")]


class Percentiles(Answer, frozen=True):
    """How long something took."""

    count: Annotated[int, Meta(description="How many there were; with none the others are 0")]
    p50: _Seconds
    p95: _Seconds
    p99: _Seconds

    @classmethod
    def of_times(cls, times: inspection.Histogram) -> Self:
        return cls(times.count, **{name: times.percentile(share) for name, share in PERCENTILES.items()})


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


@get("/queues/{queue}/times", "How long its jobs wait and run")
def times(request: Request, query: SpanQuery) -> Times:
    def both(source: inspection.Times | inspection.StretchTimes) -> dict[str, Percentiles]:
        return {"wait": Percentiles.of_times(source.wait), "run": Percentiles.of_times(source.run)}

    found = queue_of(request).times(query.span)
    return Times.of(found, stretches=[StretchTimes(one.at, **both(one)) for one in found.stretches], **both(found))


class Slowest(Answer, frozen=True):
    """The batches that ran longest in the last hour."""

    slowest: list[inspection.SlowBatch]


@get("/queues/{queue}/slowest", "The batches that ran longest in the last hour")
def slowest(request: Request) -> Slowest:
    return Slowest(queue_of(request).slowest())
