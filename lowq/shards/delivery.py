"""Deliveries: what was taken of a shard, and what becomes of it.

What is in flight of a shard belongs to whoever has claimed the shard, one at a time::

    take -> delivery number n -> finish(ids) / fail / release / bury -> the next take acknowledges the finished ids

Each report of an id cites the delivery under which the id was taken, and the token of the lease. So a repeat after a
lost reply, and the late report of an owner that lost the shard meanwhile, change nothing.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from lowq.codec import APPENDED, decode_id, original_payload
from lowq.errors import LeaseLost
from lowq.job import Job
from lowq.logs import describe, get_log
from lowq.observe.events import InFlightEvents
from lowq.shards.lease import Lease, ShardLease
from lowq.store import Call
from lowq.store.shard import CANCELLED, POISONED, SentTake, TakeLimits, TakeReply

log = get_log("lowq.shards")

#: Bytes of payloads in one reply; a single payload always fits.
MAX_DELIVERY_BYTES = 2**20
#: Jobs of one delivery: bounds the time that a script may take.
MAX_DELIVERY_JOBS = 500
#: The error that the scripts write for a job that is buried as poison.
_POISON = b"poison: its process died, or its batch exceeded ttr, %d times with this job in flight"


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
        """The job as it was taken. Its payloads are decoded again, as a handler may have changed those it was given."""
        pairs = [
            (load_payload(original_payload(data)), float(score))
            for data, score in zip(self.raw[3::2], self.raw[4::2], strict=True)
        ]
        perform_at = float(self.raw[1])
        return Job(self.id, "taken", pairs, perform_at, retry_count=self.retry_count, payloads_count=len(pairs))


class Undecodable(NamedTuple):
    """A payload in Redis that can't be decoded."""

    id: str
    payload: bytes
    reason: str


@dataclass(slots=True)
class Delivery:
    """The jobs of one take, under one delivery number and one lease."""

    number: int
    lease: Lease
    jobs: list[TakenJob]
    #: Seconds until the oldest waiting job is due, negative when it is overdue; None: nothing waits.
    delay: float | None
    paused: bool
    #: Of a shard with priorities: level -> seconds until the oldest job of it that stays is due; else None.
    levels: dict[int, float] | None = None
    undecodable: list[Undecodable] = field(default_factory=list)
    #: Of the jobs with a ttl: id -> monotonic time from which on a payload may have expired.
    expires: dict[str, float] = field(default_factory=dict)
    #: The job must be performed alone: its process died with it in flight, or its batch failed.
    is_solo: bool = False

    def is_held(self, lease: ShardLease, now: float) -> bool:
        """Whether the lease that it was taken under is surely held at that monotonic time, and was ever since."""
        current = lease.current
        return current is not None and current.fence == self.lease.fence and now < lease.deadline

    def take_out_expired(self, jobs: list[TakenJob], start: int, now: float) -> list[str]:
        """Removes the jobs with a payload that may have expired from ``jobs``, from ``start`` on, and returns their
        ids. They are to be released, as Redis decides by its own clock.
        """
        gone = [job.id for job in jobs[start:] if self.expires.get(job.id, inf) <= now]
        if gone:
            jobs[start:] = [job for job in jobs[start:] if self.expires.get(job.id, inf) > now]
        return gone


class Report(NamedTuple):
    """The outcomes of jobs in hand, to be written to Redis."""

    call: Call[Any]
    kind: Literal["acked", "failed", "released", "buried"]
    #: The ids that are in hand no more once it is written.
    ids: list[str]
    #: The delivery under which they were taken. An id that was taken again since stays in hand.
    delivery: int
    #: Of "failed".
    failures: Sequence[Failure] = ()
    #: Of "buried": id, reason, payloads; no payloads: the whole job.
    burials: Sequence[tuple[str, bytes, Sequence[bytes]]] = ()


class InFlight:
    """What is in flight of a shard, and the calls about it. Belongs to whoever has claimed the shard."""

    def __init__(
        self, lease: ShardLease, index: int, *, load_payload: Callable[[bytes], Any], max_payloads: int, keeps: str = ""
    ) -> None:
        """``keeps``: what reports say beside the delivery, of a queue with ``keep_finished``; see ``lib/kept.lua``."""
        self._lease = lease
        self._clock = lease.clock
        self._scripts = lease.scripts
        self._index = index
        self._keeps = keeps
        #: Bytes -> payload.
        self.load_payload = load_payload
        #: Of calls that only acknowledge, or ask.
        self._no_jobs = TakeLimits(0, max_payloads, MAX_DELIVERY_BYTES)
        self.events = lease.events
        #: Called when a reply says that the shard is sealed.
        self.on_sealed: Callable[[], object] = lambda: None
        self._job_events = InFlightEvents(lease.events)
        #: The number of the delivery in hand, or of the last one.
        self.delivery = 0
        #: The token of the lease under which the delivery in hand was taken.
        self.token = ""
        #: Taken, and neither finished nor reported: id -> the delivery. An id that is removed here without a report
        #: stays in flight, and the next take, or the next owner, gets it.
        self.in_hand: dict[str, int] = {}
        #: Finished and not acknowledged.
        self.unacknowledged: list[str] = []
        #: Whether payloads of the shard have a ttl, as far as a reply has told: then it is to be swept.
        self.has_ttl = False
        #: The lease under which so much is in flight that a take would bring nothing before some of it is reported;
        #: None: there is room. Only `read_delivery` sets it: another reply may be older than a report.
        self.full_under: Lease | None = None
        #: id -> how many times in a row it was released because its handler found no Redis; see `execution`.
        self.found_no_redis: dict[str, int] = {}
        #: id -> trace contexts, as Redis keeps them, of the delivery in hand.
        self._traces: Mapping[bytes, bytes] = {}
        #: Monotonic time of the last `take_call`: times to expiry count from then.
        self._asked_at = 0.0
        #: `Delivery.expires` of the last delivery.
        self._expires: dict[str, float] = {}
        #: The take that the listener sends for the thread that is being woken; None: that sends its own.
        self.sent: SentTake | None = None

    # --- takes ---

    def take_call(self, limit: int, now: float | None = None) -> Call[TakeReply]:
        """Acknowledges what finished, and takes up to ``limit`` jobs; 0 only acknowledges."""
        token = self._lease.token
        if token != self.token:
            self.drop_delivery()
            self.token = token
        last = self.delivery if self.in_hand else 0
        self._asked_at = self._clock()
        limits = self._no_jobs._replace(jobs=min(limit, MAX_DELIVERY_JOBS)) if limit else self._no_jobs
        finished = [job_id.encode("utf-8", "surrogateescape") for job_id in self.unacknowledged]
        cited = self._cited(self.delivery) if finished and self._keeps else self.delivery
        return self._scripts.ack_and_take(token, last, limits, cited, finished, now)

    def read_delivery(self, reply: Any) -> Delivery:
        """Reads the reply to `take_call`: what was finished is acknowledged, and its jobs are in hand.

        Raises:
            LeaseLost: what is in hand is somebody else's. RedisUnavailable: repeat the call.
        """
        if isinstance(reply, Exception):
            if isinstance(reply, LeaseLost):
                self._lose_lease()
            raise reply
        lease = self._lease.current
        if lease is None or lease.token != self.token:
            # The lease was lost, and perhaps got again, before the reply was read: others may have worked the shard
            # meanwhile, so these jobs may be old. They are in flight under the old delivery.
            self.drop_delivery()
            raise LeaseLost(f"queue {self._lease.queue!r}, shard {self._index}: the lease was lost during take")
        taken: TakeReply = reply
        number = taken.delivery
        if self.events.follows_jobs:
            self._job_events.emit("acked", list(self.unacknowledged))
        self.unacknowledged.clear()
        self.has_ttl |= taken.has_ttl
        if taken.sealed:
            self.on_sealed()
        self.full_under = lease if taken.is_full else None
        delivery = Delivery(number, lease, [], taken.delay, taken.paused, taken.levels)
        if taken.items:
            self.delivery = number
            delivery.is_solo = taken.is_solo
            self._traces = taken.traces
            self._expires = delivery.expires
            self._read_items(taken, delivery)
            self.in_hand.update(dict.fromkeys([job.id for job in delivery.jobs], number))
            if self.events.follows_jobs:
                self._job_events.taken(delivery.jobs, delivery.undecodable)
        return delivery

    def _read_items(self, taken: TakeReply, delivery: Delivery) -> None:
        """Decodes the jobs, and notes when their payloads expire."""
        items, jobs, load_payload = iter(taken.items), delivery.jobs, self.load_payload
        expires, ahead, ends_at = delivery.expires, 0.0, b""
        if taken.expiries:
            at_server, *expiries = taken.expiries
            ahead = self._asked_at - float(at_server)
            for job_id, at in zip(expiries[::2], expiries[1::2], strict=True):
                expires[decode_id(job_id)] = ahead + float(at)
        for item in items:
            if type(item) is list:
                jobs.append(self._decode(item, delivery))
                continue
            # A fresh job with an inline payload, which most are.
            perform_at, inline = next(items), next(items)
            score, _, payload = inline.partition(b" ")
            if taken.expiries:
                score, _, ends_at = score.partition(b",")
            raw = (item, perform_at, b"-1", payload, score)
            if payload[:3] == APPENDED:
                payload = original_payload(payload)
            try:
                if ends_at:
                    expires[decode_id(item)] = ahead + float(ends_at)
                jobs.append(TakenJob(decode_id(item), [load_payload(payload)], -1, raw))
            except Exception:
                jobs.append(self._decode(raw, delivery))

    def _decode(self, raw: Sequence[bytes], delivery: Delivery) -> TakenJob:
        job_id, payloads, sound = decode_id(raw[0]), [], [*raw[:3]]
        for payload, score in zip(raw[3::2], raw[4::2], strict=True):
            try:
                payloads.append(self.load_payload(original_payload(payload)))
                sound += [payload, score]
            except Exception as error:
                why = describe(error, str)
                delivery.undecodable.append(Undecodable(job_id, payload, f"the payload can't be decoded: {why}"))
        return TakenJob(job_id, payloads, int(float(raw[2])), sound)

    def take(self, limit: int, now: float | None = None) -> Delivery:
        """Acknowledges what finished and takes the next jobs, in one round trip.

        Raises:
            LeaseLost, RedisUnavailable
        """
        (reply,) = self._lease.client.run_many([self.take_call(limit, now)])
        return self.read_delivery(reply)

    def early_ack_call(self, already: int) -> tuple[Call[TakeReply], int]:
        """Acknowledges what finished so far of a delivery under way, but for the first ``already`` jobs. For another
        thread than the performing one: it changes nothing here, and citing an id twice does no harm.
        """
        # The delivery first: should a new delivery begin between the two lines, its ids are cited under the old one,
        # which does nothing. The other way round they would be acknowledged unperformed.
        delivery = self.delivery
        finished = self.unacknowledged[already:]
        return self.ack_report(finished, delivery).call, len(finished)

    def refresh_call(self) -> Call[TakeReply]:
        """Asks when the next job is due, taking and acknowledging nothing."""
        last = self.delivery if self.in_hand else 0
        return self._scripts.ack_and_take(self._lease.token, last, self._no_jobs, 0, ())

    def read_state(self, reply: TakeReply) -> TakeReply:
        """Takes note of what any reply of ack_and_take says of the shard, but for a delivery."""
        self.has_ttl |= reply.has_ttl
        if reply.sealed:
            self.on_sealed()
        if not reply.is_full:
            self.full_under = None
        return reply

    def has_expired(self, job_id: str) -> bool:
        """Whether a payload of an id of the delivery in hand may have expired; see `Delivery.take_out_expired`."""
        return bool(self._expires) and self._expires.get(job_id, inf) <= self._clock()

    def traces_of(self, job_id: str) -> tuple[str, ...]:
        """The trace contexts of an id of the delivery in hand, oldest first."""
        text = self._traces.get(_bytes(job_id), b"").decode("ascii", "replace")
        return tuple(line for line in text.split("\n") if line)

    # --- reports ---

    def _cited(self, delivery: int) -> int | str:
        """A delivery as reports of outcomes cite it."""
        return f"{delivery} {self._keeps}" if self._keeps else delivery

    def finish(self, ids: Iterable[str]) -> None:
        """These ids were performed; the next take acknowledges them."""
        for job_id in ids:
            if self.in_hand.pop(job_id, None) is not None:
                self.unacknowledged.append(job_id)

    def adopt_jobs(self, delivery: int, ids: Iterable[str]) -> None:
        """Takes in hand what an earlier holder with the same session left in flight, taken under that delivery."""
        self.token = self._lease.token
        self.delivery = max(delivery, self.delivery)
        self.in_hand.update(dict.fromkeys(ids, delivery))

    def ack_report(self, ids: Sequence[str], delivery: int, now: float | None = None) -> Report:
        """Acknowledges ids of a delivery. For holders with several deliveries in hand; see `finish`."""
        encoded = [job_id.encode("utf-8", "surrogateescape") for job_id in ids]
        call = self._scripts.ack_and_take(self.token, self.delivery, self._no_jobs, self._cited(delivery), encoded, now)
        return Report(call, "acked", list(ids), delivery)

    def fail_report(
        self, failures: Sequence[Failure], now: float | None = None, *, delivery: int | None = None
    ) -> Report:
        """The outcome of a batch that failed. Here and below, ``delivery``: None is the last one."""
        args: list[Any] = []
        for job_id, verdict, retry_count, delay, error in failures:
            args += [_bytes(job_id), verdict, retry_count, repr(float(delay)), error]
        number = self.delivery if delivery is None else delivery
        call = self._scripts.fail(self.token, self._cited(number), args, now)
        return Report(call, "failed", [item.id for item in failures], number, failures)

    def release_report(
        self, delays: Sequence[tuple[str, float | None]], now: float | None = None, *, crashed: bool = False,
        delivery: int | None = None,
    ) -> Report:  # fmt: skip
        """Taken jobs wait again, uncharged: ``(id, seconds)``, None keeps the time they were due. ``crashed``: they
        made their process stop, which is counted, and after max_crash_count times they are buried.
        """
        args: list[Any] = []
        for job_id, delay in delays:
            args += [_bytes(job_id), "" if delay is None else repr(float(delay)), "1" if crashed else ""]
        number = self.delivery if delivery is None else delivery
        call = self._scripts.release(self.token, number, self._lease.max_crash_count, args, now)
        return Report(call, "released", [job_id for job_id, _ in delays], number)

    def bury_report(
        self, reasons: Sequence[tuple[str, bytes, Sequence[bytes]]], now: float | None = None, *,
        delivery: int | None = None,
    ) -> Report:  # fmt: skip
        """Taken jobs to the morgue: ``(id, reason, payloads)``; no payloads means the whole job."""
        args: list[Any] = []
        for job_id, reason, payloads in reasons:
            args += [_bytes(job_id), reason, len(payloads), *payloads]
        number = self.delivery if delivery is None else delivery
        call = self._scripts.bury_taken(self.token, self._cited(number), args, now)
        ids = [job_id for job_id, _, payloads in reasons if not payloads]
        return Report(call, "buried", ids, number, burials=reasons)

    def write(self, reports: Sequence[Report]) -> list[str]:
        """Sends reports in one write. May be repeated as a whole. Returns what `note_written` does.

        Raises:
            LeaseLost, RedisUnavailable
        """
        return self.note_written(reports, self._lease.client.run_many([report.call for report in reports]))

    def note_written(self, reports: Sequence[Report], replies: Sequence[Any]) -> list[str]:
        """Takes note of the replies to reports: their jobs are in hand no more. Returns the ids that failed, and were
        cancelled before that was written: nothing of them is left.

        Raises:
            The first error among the replies.
        """
        cancelled = list[str]()
        for report, reply in zip(reports, replies, strict=True):
            if isinstance(reply, LeaseLost):
                self._lose_lease()
            if isinstance(reply, Exception):
                raise reply
            self.full_under = None
            for job_id in report.ids:
                if self.in_hand.get(job_id) == report.delivery:
                    del self.in_hand[job_id]
            if report.kind == "failed" and CANCELLED in reply:
                gone = [item.id for item, state in zip(report.failures, reply, strict=True) if state == CANCELLED]
                if self.events.follows_jobs:
                    self._job_events.emit("cancelled", gone)
                report = report._replace(failures=[item for item in report.failures if item.id not in gone])
                cancelled += gone
            if self.events.follows_jobs:
                self._job_events.reported(report, reply)
            if report.kind == "released":
                states = zip(report.ids, reply, strict=True)
                self.note_poisoned([job_id for job_id, state in states if state == POISONED], report.delivery)
            elif report.kind != "acked":
                failed = [(_bytes(item.id), item.error) for item in report.failures if item.verdict != "solo"]
                self.events.jobs_failed(failed + [(_bytes(job_id), reason) for job_id, reason, _ in report.burials])
        return cancelled

    def drop_delivery(self) -> None:
        """Reports nothing more of the delivery in hand: the lease was lost, and its next owner restores the jobs."""
        self.in_hand.clear()
        self.unacknowledged.clear()
        self._job_events.forget()
        self.found_no_redis.clear()

    def _lose_lease(self) -> None:
        # What is in hand is somebody else's. The lease is lost with it, unless a new one was got meanwhile.
        self.drop_delivery()
        if self._lease.token == self.token:
            self._lease.lose()

    # --- logs and events ---

    def note_poisoned(self, ids: Sequence[str], delivery: int | None = None) -> None:
        """Logs and emits ids that are in the morgue now, as their process died too often. ``delivery``: under which
        this process took them; None: a former owner did.
        """
        log_poisoned(self._lease.queue, self._index, ids, {} if delivery is None else {"delivery": delivery})
        reason = _POISON % self._lease.max_crash_count
        self.events.jobs_failed([(_bytes(job_id), reason) for job_id in ids])


def _bytes(job_id: str) -> bytes:
    return job_id.encode("utf-8", "surrogateescape")


def log_poisoned(queue: str, index: int, ids: Iterable[str], more: Mapping[str, object] = MappingProxyType({})) -> None:
    """Ids of that shard that are in the morgue now. ``more``: fields of the records."""
    for job_id in ids:
        log.error(
            "%s:%d: id %r is buried as poison: its process died, or its batch exceeded ttr, too often with it in "
            "flight", queue, index, job_id,
            extra={"event": "poison", "id": job_id, "queue": queue, "shard": index, **more},
        )  # fmt: skip
