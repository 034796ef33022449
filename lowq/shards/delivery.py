"""A delivery: what one take hands out of a shard, and what may become of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, NamedTuple

from lowq.codec import original_payload
from lowq.job import Job
from lowq.shards.lease import Lease, ShardLease


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
    #: Of a shard with priorities: level -> seconds until the oldest job of it that stays is due; else None.
    levels: dict[int, float] | None = None
    undecodable: list[Undecodable] = field(default_factory=list)
    #: id -> monotonic time at which the first of its payloads may have expired, of those with a ttl.
    expires: dict[str, float] = field(default_factory=dict)
    #: The job is one that must be performed alone: its process died with it in flight, or its batch failed.
    is_solo: bool = False

    def is_held(self, lease: ShardLease, now: float) -> bool:
        """Whether the lease that it was taken under is surely held at that monotonic time."""
        current = lease.current
        return current is not None and current.token == self.lease.token and now < lease.deadline

    def has_expired(self, job_id: str, now: float) -> bool:
        """Whether a payload of the id may have expired at that monotonic time: it is to be given back, for Redis to
        say.
        """
        return bool(self.expires) and self.expires.get(job_id, inf) <= now

    def take_out_expired(self, jobs: list[TakenJob], start: int, now: float) -> list[str]:
        """Removes from ``jobs``, from ``start`` on, those of which a payload may have expired. Returns their ids: they
        are to be released, which Redis, whose clock counts, does for what lives of them.
        """
        if not self.expires:
            return []
        gone = [job.id for job in jobs[start:] if self.expires.get(job.id, inf) <= now]
        if gone:
            jobs[start:] = [job for job in jobs[start:] if self.expires.get(job.id, inf) > now]
        return gone


def urgent_level(levels: Mapping[int, float] | None, now: float) -> int:
    """The most urgent of the levels that are due; 0 where nothing says so: whatever has come may be urgent."""
    return 0 if levels is None else min((level for level, due in levels.items() if due <= now), default=0)
