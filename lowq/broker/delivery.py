"""A delivery: what one take hands out of a shard, and what may become of it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from lowq.broker.lease import Lease
from lowq.codec import original_payload
from lowq.job import Job

#: A bit of what `ack_and_take` answers of the shard: its last item are contexts of traces, by id.
HAS_TRACES = 4


class Failure(NamedTuple):
    """What is to happen to one id of a batch that failed."""

    id: str
    #: retry: charged; exhausted: charged, and its oldest payload is buried; solo: not charged, taken alone next.
    verdict: Literal["retry", "exhausted", "solo"]
    retry_count: int
    #: Seconds until the retry.
    delay: float
    error: bytes


@dataclass(slots=True, eq=False)  # not frozen, nor a tuple: this is made for every job
class TakenJob:
    """A job in flight. Scores are kept as Redis wrote them until somebody asks."""

    id: str
    payloads: list[Any]
    retry_count: int
    #: id, perform_at, retry_count, payload, score, payload, score...
    raw: Sequence[bytes]

    def job(self, load_payload: Callable[[bytes], Any]) -> Job:
        """The job as a value, as it was taken: its payloads are decoded anew, as a handler may have changed those that
        it was given.
        """
        pairs = [
            (load_payload(original_payload(data)), float(score))
            for data, score in zip(self.raw[3::2], self.raw[4::2], strict=True)
        ]
        return Job(
            self.id,
            "taken",
            pairs,
            float(self.raw[1]),
            retry_count=self.retry_count,
            payloads_count=len(pairs),
        )


def handed_over(reply: Sequence[Any]) -> Iterator[tuple[bytes, list[tuple[bytes, float]]]]:
    """Each id of a reply of ``ack_and_take``, with its payloads and scores as Redis has them, in the order in which
    they are handed over. For tests: `InFlight.took` does more, and is in a hurry.
    """
    items = iter(reply[4:-1] if reply[2] & HAS_TRACES else reply[4:])
    for item in items:
        if isinstance(item, list):
            yield item[0], [(payload, float(score)) for payload, score in zip(item[3::2], item[4::2], strict=True)]
            continue
        _, inline = next(items), next(items)
        score, _, payload = inline.partition(b" ")
        yield item, [(payload, float(score))]


class Undecodable(NamedTuple):
    """A payload in Redis that can't be decoded."""

    id: str
    payload: bytes
    reason: str


@dataclass(slots=True)
class Delivery:
    """What one take handed out, under one delivery and one lease."""

    number: int
    lease: Lease
    jobs: list[TakenJob]
    #: Seconds until the oldest waiting job is due, negative when it is overdue; None: nothing waits.
    delay: float | None
    paused: bool
    undecodable: list[Undecodable] = field(default_factory=list)
