"""What is in flight of one shard: taken, and neither acknowledged nor reported.

It belongs to whoever has claimed the shard, one at a time::

    take -> Delivery number n -> finish(ids) / fail / release / bury  -> the next take acknowledges what finished

Whatever cites an id also cites the delivery that it was taken under and the token of the lease. So a repeat after a
lost reply, and the late outcome of an owner that lost the shard meanwhile, do nothing.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from lowq.clock import Clock
from lowq.clock import now as clock_now
from lowq.codec import APPENDED, decode_id, original_payload
from lowq.errors import LeaseLost
from lowq.logs import describe, get_log
from lowq.observe.events import JobEventKind, QueueEvents
from lowq.shards.delivery import Delivery, Failure, TakenJob, Undecodable
from lowq.shards.lease import Lease, ShardLease
from lowq.store import Call, Client
from lowq.store.shard import ShardScripts, TakeLimits
from lowq.store.shard_replies import EXPIRED, POISONED, TakeReply

log = get_log("lowq.shards")

#: Bytes of payloads in one reply; a single payload always fits.
MAX_DELIVERY_BYTES = 2**20
#: What the scripts write as the error of such a job.
_POISON = b"poison: its process died, or its batch exceeded ttr, %d times with this job in flight"
#: Jobs of one delivery: bounds the time that a script may take.
MAX_DELIVERY_JOBS = 500


class Report(NamedTuple):
    """What becomes of jobs in hand, to be written to Redis."""

    call: Call[Any]
    kind: Literal["acked", "failed", "released", "buried"]
    #: Those that are in hand no more once it is written.
    ids: list[str]
    #: Under which they were taken: one that was taken anew since is in hand again.
    delivery: int
    #: Of "failed".
    failures: Sequence[Failure] = ()
    #: Of "buried": id, reason, payloads; none are the whole job.
    burials: Sequence[tuple[str, bytes, Sequence[bytes]]] = ()


class InFlight:
    """What whoever has claimed a shard has taken of it, and the calls about that."""

    def __init__(
        self,
        client: Client,
        prefix: str,
        lease: ShardLease,
        queue: str,
        index: int,
        *,
        load_payload: Callable[[bytes], Any],
        max_payloads: int,
        max_crash_count: int,
        events: QueueEvents | None = None,
        clock: Clock = clock_now,
    ) -> None:
        self._clock = clock
        self._client = client
        self._scripts = ShardScripts(prefix)
        self._lease = lease
        self._queue, self._index = queue, index
        #: Bytes -> payload.
        self.load_payload = load_payload
        #: Of calls that only acknowledge, or ask.
        self._no_jobs = TakeLimits(0, max_payloads, MAX_DELIVERY_BYTES)
        self._max_crash_count = max_crash_count
        self.events = events or QueueEvents(queue)
        #: Is told when a reply says that the shard is sealed.
        self.on_sealed: Callable[[], object] = lambda: None
        #: While somebody follows jobs: how many payloads of an id are in hand.
        self._counts: dict[str, int] = {}
        #: The number of the delivery in hand, or of the last one.
        self.delivery = 0
        #: The token of the lease under which the delivery in hand was taken.
        self.token = ""
        #: Taken, and neither finished nor reported: id -> the delivery. What is removed otherwise stays in flight, and
        #: the next take, or the next owner, gets it.
        self.in_hand: dict[str, int] = {}
        #: Finished and not acknowledged.
        self.unacknowledged: list[str] = []
        #: Whether payloads of the shard have a ttl, as far as a reply has told: then it wants to be swept.
        self.has_ttl = False
        #: The lease under which so much is in flight that a take would bring nothing before some of it is reported;
        #: None: there is room. Only `took` says so: another reply may be older than a report.
        self.full_under: Lease | None = None
        #: id -> how many times in a row it was released because its handler found no Redis; see `execution`.
        self.found_no_redis: dict[str, int] = {}
        #: The trace contexts of the delivery in hand, as Redis keeps them, of ids that have some.
        self._traces: Mapping[bytes, bytes] = {}
        #: Monotonic time of the last `take_call`: what is taken expires counted from then, and not later than it may.
        self._asked_at = 0.0
        #: `Delivery.expires` of the last delivery.
        self._expires: dict[str, float] = {}

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
        return self._scripts.ack_and_take(token, last, limits, self.delivery, finished, now)

    def took(self, reply: Any) -> Delivery:
        """Takes note of the reply to `take_call`.

        Raises:
            LeaseLost: what is in hand is somebody else's. RedisUnavailable: repeat the call.
        """
        if isinstance(reply, Exception):
            if isinstance(reply, LeaseLost):
                self._refused()
            raise reply
        lease = self._lease.current
        if lease is None or lease.token != self.token:
            # TakeReply under a lease that was lost, and perhaps regained, before the reply was read: others may have
            # worked the shard meanwhile, so these jobs may be old. They are in flight under the old delivery.
            self.drop_delivery()
            raise LeaseLost(f"queue {self._queue!r}, shard {self._index}: the lease was lost during take")
        taken: TakeReply = reply
        number = taken.delivery
        if self.events.follows_jobs:
            self._emit("acked", list(self.unacknowledged))
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
            for job_id, delay in zip(taken.expiries[::2], taken.expiries[1::2], strict=True):
                delivery.expires[decode_id(job_id)] = self._asked_at + delay / 1e6
            items, jobs, load_payload = iter(taken.items), delivery.jobs, self.load_payload
            for item in items:
                if type(item) is list:
                    jobs.append(self._decode(item, delivery))
                    continue
                # A fresh job with an inline payload, which most are.
                perform_at, inline = next(items), next(items)
                score, _, payload = inline.partition(b" ")
                raw = (item, perform_at, b"-1", payload, score)
                if payload[:3] == APPENDED:
                    payload = original_payload(payload)
                try:
                    jobs.append(TakenJob(decode_id(item), [load_payload(payload)], -1, raw))
                except Exception:
                    jobs.append(self._decode(raw, delivery))
            self.in_hand.update(dict.fromkeys([job.id for job in jobs], number))
            if self.events.follows_jobs:
                self._emit_taken(delivery)
        return delivery

    def has_expired(self, job_id: str) -> bool:
        """Whether a payload of an id of the delivery in hand may have expired; see `Delivery.take_out_expired`."""
        return bool(self._expires) and self._expires.get(job_id, inf) <= self._clock()

    def read_state(self, reply: Any) -> TakeReply:
        """Takes note of what any reply of ack_and_take says of the shard, but for a delivery."""
        taken: TakeReply = reply
        self.has_ttl |= taken.has_ttl
        if taken.sealed:
            self.on_sealed()
        if not taken.is_full:
            self.full_under = None
        return taken

    def traces_of(self, job_id: str) -> tuple[str, ...]:
        """The trace contexts that are kept beside the payloads of an id of the delivery in hand, oldest first."""
        if not self._traces:
            return ()
        text = self._traces.get(_bytes(job_id), b"").decode("ascii", "replace")
        return tuple(line for line in text.split("\n") if line)

    def take(self, limit: int, now: float | None = None) -> Delivery:
        """Acknowledges what finished and takes the next jobs, in one round trip.

        Raises:
            LeaseLost, RedisUnavailable
        """
        (reply,) = self._client.run_many([self.take_call(limit, now)])
        return self.took(reply)

    def _decode(self, raw: Sequence[bytes], delivery: Delivery) -> TakenJob:
        job_id = decode_id(raw[0])
        try:
            payloads = [self.load_payload(original_payload(payload)) for payload in raw[3::2]]
        except Exception:
            payloads, sound = [], [*raw[:3]]
            for payload, score in zip(raw[3::2], raw[4::2], strict=True):
                try:
                    payloads.append(self.load_payload(original_payload(payload)))
                    sound += [payload, score]
                except Exception as error:
                    why = describe(error, str)
                    delivery.undecodable.append(Undecodable(job_id, payload, f"the payload can't be decoded: {why}"))
            raw = sound
        return TakenJob(job_id, payloads, int(float(raw[2])), raw)

    def finish(self, ids: Iterable[str]) -> None:
        """These ids were performed; the next take acknowledges them."""
        for job_id in ids:
            if self.in_hand.pop(job_id, None) is not None:
                self.unacknowledged.append(job_id)

    def ack_report(self, ids: Sequence[str], delivery: int, now: float | None = None) -> Report:
        """These ids of a delivery were performed. For whoever has several deliveries in hand; see `finish`."""
        encoded = map(_bytes, ids)
        call = self._scripts.ack_and_take(self.token, self.delivery, self._no_jobs, delivery, encoded, now)
        return Report(call, "acked", list(ids), delivery)

    def adopt(self, delivery: int, ids: Iterable[str]) -> None:
        """An earlier holder with the same session left these in flight, taken under that delivery."""
        self.token = self._lease.token
        self.delivery = max(delivery, self.delivery)
        self.in_hand.update(dict.fromkeys(ids, delivery))

    def fail_report(
        self, failures: Sequence[Failure], now: float | None = None, *, delivery: int | None = None
    ) -> Report:
        """The outcome of a batch that failed. Here and below, ``delivery``: None is the last one."""
        args: list[Any] = []
        for job_id, verdict, retry_count, delay, error in failures:
            args += [_bytes(job_id), verdict, retry_count, repr(float(delay)), error]
        number = self.delivery if delivery is None else delivery
        call = self._scripts.fail(self.token, number, args, now)
        return Report(call, "failed", [item.id for item in failures], number, failures)

    def release_report(
        self,
        delays: Sequence[tuple[str, float | None]],
        now: float | None = None,
        *,
        crashed: bool = False,
        delivery: int | None = None,
    ) -> Report:
        """Taken jobs wait again, uncharged: ``(id, seconds)``, None keeps the time they were due. ``crashed``: they
        made their process stop, which is counted, and after max_crash_count times they are buried.
        """
        args: list[Any] = []
        for job_id, delay in delays:
            args += [_bytes(job_id), "" if delay is None else repr(float(delay)), "1" if crashed else ""]
        number = self.delivery if delivery is None else delivery
        call = self._scripts.release(self.token, number, self._max_crash_count, args, now)
        return Report(call, "released", [job_id for job_id, _ in delays], number)

    def bury_report(
        self,
        reasons: Sequence[tuple[str, bytes, Sequence[bytes]]],
        now: float | None = None,
        *,
        delivery: int | None = None,
    ) -> Report:
        """Taken jobs to the morgue: ``(id, reason, payloads)``; no payloads means the whole job."""
        args: list[Any] = []
        for job_id, reason, payloads in reasons:
            args += [_bytes(job_id), reason, len(payloads), *payloads]
        number = self.delivery if delivery is None else delivery
        call = self._scripts.bury_taken(self.token, number, args, now)
        ids = [job_id for job_id, _, payloads in reasons if not payloads]
        return Report(call, "buried", ids, number, burials=reasons)

    def fail(self, failures: Sequence[Failure], now: float | None = None) -> None:
        """Writes `fail_report`."""
        self.write([self.fail_report(failures, now)])

    def release(
        self, delays: Sequence[tuple[str, float | None]], now: float | None = None, *, crashed: bool = False
    ) -> None:
        """Writes `release_report`."""
        self.write([self.release_report(delays, now, crashed=crashed)])

    def bury(self, reasons: Sequence[tuple[str, bytes, Sequence[bytes]]], now: float | None = None) -> None:
        """Writes `bury_report`."""
        self.write([self.bury_report(reasons, now)])

    def write(self, reports: Sequence[Report]) -> None:
        """Sends what becomes of jobs in hand, in one write. May be repeated as a whole.

        Raises:
            LeaseLost, RedisUnavailable
        """
        self.reported(reports, self._client.run_many([report.call for report in reports]))

    def reported(self, reports: Sequence[Report], replies: Sequence[Any]) -> None:
        """Takes note of the replies to reports: those jobs are in hand no more.

        Raises:
            The first error among the replies.
        """
        for report, reply in zip(reports, replies, strict=True):
            if isinstance(reply, LeaseLost):
                self._refused()
            if isinstance(reply, Exception):
                raise reply
            self.full_under = None
            for job_id in report.ids:
                if self.in_hand.get(job_id) == report.delivery:
                    del self.in_hand[job_id]
            if self.events.follows_jobs:
                self._emit_report(report, reply)
            if report.kind == "released":
                states = zip(report.ids, reply, strict=True)
                self.poisoned([job_id for job_id, state in states if state == POISONED], report.delivery)
            elif report.kind != "acked":
                failed = [(_bytes(item.id), item.error) for item in report.failures if item.verdict != "solo"]
                self.events.jobs_failed(failed + [(_bytes(job_id), reason) for job_id, reason, _ in report.burials])

    def poisoned(self, ids: Sequence[str], delivery: int | None = None) -> None:
        """Takes note of ids that are in the morgue now, as their process died too often. ``delivery``: under which
        this process took them; None: a former owner did.
        """
        log_poisoned(self._queue, self._index, ids, {} if delivery is None else {"delivery": delivery})
        reason = _POISON % self._max_crash_count
        self.events.jobs_failed([(_bytes(job_id), reason) for job_id in ids])

    def _emit_taken(self, delivery: Delivery) -> None:
        counts = {job.id: (len(job.raw) - 3) // 2 for job in delivery.jobs}
        # What can't be decoded is buried by itself, and then no longer in hand.
        self._counts.update((job_id, count) for job_id, count in counts.items() if count)
        for item in delivery.undecodable:
            counts[item.id] += 1
        self.events.jobs_changed("taken", [*counts], [*counts.values()])

    def _emit(self, kind: JobEventKind, ids: Sequence[str]) -> None:
        """They are in hand no more."""
        self.events.jobs_changed(kind, ids, [self._counts.pop(job_id, None) for job_id in ids])

    def _emit_report(self, report: Report, reply: Any) -> None:
        """What a report says of its jobs, as they are written now."""
        if report.kind == "failed":
            self._emit("failed", [item.id for item in report.failures if item.verdict != "solo"])
            self.events.jobs_changed("buried", [item.id for item in report.failures if item.verdict == "exhausted"], 1)
            self._emit("released", [item.id for item in report.failures if item.verdict == "solo"])
        elif report.kind == "released":
            states = list(zip(report.ids, reply, strict=True))
            self._emit("released", [job_id for job_id, state in states if state not in (POISONED, EXPIRED)])
            self._emit("expired", [job_id for job_id, state in states if state == EXPIRED])
            self._emit("buried", [job_id for job_id, state in states if state == POISONED])
        elif report.kind == "buried":
            self._emit("buried", report.ids)
            for job_id, _, payloads in report.burials:
                if payloads:
                    self.events.jobs_changed("buried", [job_id], len(payloads))
        else:
            self._emit("acked", report.ids)

    def _refused(self) -> None:
        # What is in hand is somebody else's. The lease is lost with it, unless a new one was got meanwhile.
        self.drop_delivery()
        if self._lease.token == self.token:
            self._lease.lose()

    def early_ack_call(self, already: int) -> tuple[Call[TakeReply], int]:
        """Acknowledges what finished so far while a slow job of the same delivery is still being performed. For another
        thread than the one that performs: it changes nothing here, and citing an id twice does no harm.
        """
        # The delivery first: should a new delivery begin between the two lines, its ids are cited under the old one,
        # which does nothing. The other way round they would be acknowledged unperformed.
        delivery = self.delivery
        finished = self.unacknowledged[already:]
        encoded = map(_bytes, finished)
        call = self._scripts.ack_and_take(self.token, delivery, self._no_jobs, delivery, encoded)
        return call, len(finished)

    def refresh_call(self) -> Call[TakeReply]:
        """Asks when the next job is due, taking and acknowledging nothing."""
        last = self.delivery if self.in_hand else 0
        return self._scripts.ack_and_take(self._lease.token, last, self._no_jobs, 0, ())

    def drop_delivery(self) -> None:
        """Nothing of the delivery in hand is reported any more: the lease was lost, its next owner restores it."""
        self.in_hand.clear()
        self.unacknowledged.clear()
        self._counts.clear()
        self.found_no_redis.clear()


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
