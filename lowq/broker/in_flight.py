"""What is in flight of one shard: taken, and neither acknowledged nor reported.

It belongs to whoever has claimed the shard, one at a time::

    take -> Delivery number n -> finish(ids) / fail / release / bury  -> the next take acknowledges what finished

Whatever cites an id also cites the delivery that it was taken under and the token of the lease. So a repeat after a
lost reply, and the late outcome of an owner that lost the shard meanwhile, do nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from typing import Any, NamedTuple

from lowq.broker.delivery import (
    HAS_EXPIRIES,
    HAS_LEVELS,
    HAS_TRACES,
    IS_SOLO,
    Delivery,
    Failure,
    TakenJob,
    Undecodable,
)
from lowq.broker.lease import ShardLease
from lowq.clock import Clock
from lowq.clock import now as clock_now
from lowq.codec import APPENDED, decode_id, original_payload
from lowq.errors import LeaseLost
from lowq.job_events import JobEventKind, QueueEvents
from lowq.logs import describe, get_log
from lowq.store import Call, Client
from lowq.store.scripts import time_argument

log = get_log("lowq.broker")

#: Bytes of payloads in one reply; a single payload always fits.
MAX_DELIVERY_BYTES = 2**20
#: What `release` answers of a job that it has buried.
_POISONED = 2
#: And of one of which nothing is left: its payloads had expired.
_EXPIRED = 3
#: What the scripts write as the error of such a job.
_POISON = b"poison: its process died, or its batch exceeded ttr, %d times with this job in flight"
#: Bits of what `ack_and_take` answers of the shard.
_PAUSED, _HAS_TTL, _SEALED, _FULL = 1, 2, 8, 128
#: Jobs of one delivery: bounds the time that a script may take.
MAX_DELIVERY_JOBS = 500


class Report(NamedTuple):
    """What becomes of jobs in hand, to be written to Redis."""

    call: Call
    #: Those that are in hand no more once it is written.
    ids: list[str]
    #: Under which they were taken: one that was taken anew since is in hand again.
    delivery: int


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
        self._prefix = prefix
        self._lease = lease
        self._queue, self._index = queue, index
        #: Bytes -> payload.
        self.load_payload = load_payload
        self._max_payloads = max_payloads
        self._max_crash_count = max_crash_count
        #: None: nobody listens.
        self.events = events
        #: Is told of failed jobs once that is written: ids and errors as Redis keeps them. None: nobody counts them.
        self.on_failed: Callable[[Iterable[tuple[bytes, bytes]]], object] | None = None
        #: Is told when a reply says that the shard is sealed.
        self.on_sealed: Callable[[], object] = lambda: None
        #: While somebody listens: how many payloads of an id are in hand.
        self._counts: dict[str, int] = {}
        self._delivery = 0
        self._token_in_hand = ""
        #: Taken and neither finished nor reported: id -> the delivery.
        self._in_hand: dict[str, int] = {}
        #: Finished and not acknowledged.
        self._finished: list[str] = []
        #: Whether payloads of the shard have a ttl, as far as a reply has told: then it wants to be swept.
        self.has_ttl = False
        #: The token of the lease under which as much is in flight as may be; see `is_full`.
        self._full_under = ""
        #: id -> how many times in a row it was released because its handler found no Redis; see `execution`.
        self.found_no_redis: dict[str, int] = {}
        #: The trace contexts of the delivery in hand, as Redis keeps them, of ids that have some.
        self._traces: dict[bytes, bytes] = {}
        #: Monotonic time of the last `take_call`: what is taken expires counted from then, and not later than it may.
        self._asked_at = 0.0
        #: `Delivery.expires` of the last delivery.
        self._expires: dict[str, float] = {}

    def take_call(self, limit: int, now: float | None = None) -> Call:
        """Acknowledges what finished, and takes up to ``limit`` jobs; 0 only acknowledges."""
        token = self._lease.token
        if token != self._token_in_hand:
            self.drop_delivery()
            self._token_in_hand = token
        last = self._delivery if self._in_hand else 0
        self._asked_at = self._clock()
        args = (time_argument(now), token, last, min(limit, MAX_DELIVERY_JOBS), self._max_payloads, MAX_DELIVERY_BYTES)
        return Call("ack_and_take", self._prefix, [*args, self._delivery, *map(_bytes, self._finished)])

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
        if lease is None or lease.token != self._token_in_hand:
            # Taken under a lease that was lost, and perhaps regained, before the reply was read: others may have
            # worked the shard meanwhile, so these jobs may be old. They are in flight under the old delivery.
            self.drop_delivery()
            raise LeaseLost(f"queue {self._queue!r}, shard {self._index}: the lease was lost during take")
        number = reply[0]
        if self.events is not None:
            self._emit("acked", list(self._finished))
        self._finished.clear()
        self._full_under = lease.token if reply[2] & _FULL else ""
        delivery = Delivery(number, lease, [], *self.read_state(reply))
        if len(reply) > 4:
            self._delivery = number
            delivery.is_solo = bool(reply[2] & IS_SOLO)
            if self._traces:
                self._traces = {}
            if reply[2] & HAS_TRACES:
                traces = reply.pop()
                self._traces = dict(zip(traces[::2], traces[1::2], strict=True))
            self._expires = delivery.expires
            if reply[2] & HAS_EXPIRIES:
                ends = reply.pop()
                for job_id, delay in zip(ends[::2], ends[1::2], strict=True):
                    delivery.expires[decode_id(job_id)] = self._asked_at + delay / 1e6
            items, jobs, load_payload = iter(reply[4:]), delivery.jobs, self.load_payload
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
            self._in_hand.update(dict.fromkeys([job.id for job in jobs], number))
            if self.events is not None:
                self._emit_taken(self.events, delivery)
        return delivery

    def has_expired(self, job_id: str) -> bool:
        """Whether a payload of an id of the delivery in hand may have expired; see `Delivery.take_out_expired`."""
        return bool(self._expires) and self._expires.get(job_id, inf) <= self._clock()

    def read_state(self, reply: Any) -> tuple[float | None, bool, dict[int, float] | None]:
        """What any reply of ack_and_take says of the shard: seconds until its oldest waiting job is due, negative when
        it is overdue, None when nothing waits; whether the queue is paused; and `Delivery.levels`, which this removes
        from the reply. Notes whether it wants to be swept, and whether there is room for more in flight.
        """
        _, delay, state, *_ = reply
        levels: dict[int, float] | None = None
        if state & HAS_LEVELS:
            each = reply.pop()
            levels = {level: until / 1e6 for level, until in zip(each[::2], each[1::2], strict=True)}
        if state & _HAS_TTL:
            self.has_ttl = True
        if state & _SEALED:
            self.on_sealed()
        if not state & _FULL:
            self._full_under = ""
        return None if delay is None else delay / 1e6, bool(state & _PAUSED), levels

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
            if self._in_hand.pop(job_id, None) is not None:
                self._finished.append(job_id)

    def ack_report(self, ids: Sequence[str], delivery: int, now: float | None = None) -> Report:
        """These ids of a delivery were performed. For whoever has several deliveries in hand; see `finish`."""
        args = (self._delivery, 0, self._max_payloads, MAX_DELIVERY_BYTES, delivery)
        call = Call("ack_and_take", self._prefix, [time_argument(now), self._token_in_hand, *args, *map(_bytes, ids)])
        return Report(call, list(ids), delivery)

    def adopt(self, delivery: int, ids: Iterable[str]) -> None:
        """An earlier holder with the same session left these in flight, taken under that delivery."""
        self._token_in_hand = self._lease.token
        self._delivery = max(delivery, self._delivery)
        self._in_hand.update(dict.fromkeys(ids, delivery))

    def fail_report(
        self, failures: Sequence[Failure], now: float | None = None, *, delivery: int | None = None
    ) -> Report:
        """The outcome of a batch that failed. Here and below, ``delivery``: None is the last one."""
        args: list[Any] = []
        for job_id, verdict, retry_count, delay, error in failures:
            args += [_bytes(job_id), verdict, retry_count, repr(float(delay)), error]
        return self._report("fail", args, now, [item.id for item in failures], delivery)

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
        args: list[Any] = [self._max_crash_count]
        for job_id, delay in delays:
            args += [_bytes(job_id), "" if delay is None else repr(float(delay)), "1" if crashed else ""]
        return self._report("release", args, now, [job_id for job_id, _ in delays], delivery)

    def bury_report(
        self,
        reasons: Sequence[tuple[str, bytes, Sequence[bytes]]],
        now: float | None = None,
        *,
        delivery: int | None = None,
    ) -> Report:
        """Taken jobs to the morgue: ``(id, reason, payloads)``; no payloads means the whole job."""
        args: list[Any] = ["", ""]
        for job_id, reason, payloads in reasons:
            args += [_bytes(job_id), reason, len(payloads), *payloads]
        return self._report("bury", args, now, [job_id for job_id, _, payloads in reasons if not payloads], delivery)

    def _report(
        self, script: str, args: list[Any], now: float | None, ids: list[str], delivery: int | None = None
    ) -> Report:
        number = self._delivery if delivery is None else delivery
        return Report(Call(script, self._prefix, [time_argument(now), self._token_in_hand, number, *args]), ids, number)

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
            self._full_under = ""
            for job_id in report.ids:
                if self._in_hand.get(job_id) == report.delivery:
                    del self._in_hand[job_id]
            if self.events is not None:
                self._emit_report(report, reply)
            if self.on_failed is not None and report.call.script == "fail":
                # Of each job: id, verdict, retry_count, delay, error.
                args: list[Any] = report.call.args[3:]
                each = zip(args[::5], args[1::5], args[4::5], strict=True)
                self.on_failed([(job_id, error) for job_id, verdict, error in each if verdict != "solo"])
            if report.call.script == "release":
                states = zip(report.ids, reply, strict=True)
                self.poisoned([job_id for job_id, state in states if state == _POISONED])
            if self.on_failed is not None and report.call.script == "bury":
                self.on_failed((job_id, reason) for job_id, reason, _ in _buried(report.call.args))

    def poisoned(self, ids: Sequence[str]) -> None:
        """Takes note of ids that are in the morgue now, as their process died too often."""
        log_poisoned(self._queue, self._index, ids)
        if self.on_failed is not None:
            reason = _POISON % self._max_crash_count
            self.on_failed((_bytes(job_id), reason) for job_id in ids)

    def _emit_taken(self, events: QueueEvents, delivery: Delivery) -> None:
        counts = {job.id: (len(job.raw) - 3) // 2 for job in delivery.jobs}
        # What can't be decoded is buried by itself, and then no longer in hand.
        self._counts.update((job_id, count) for job_id, count in counts.items() if count)
        for item in delivery.undecodable:
            counts[item.id] += 1
        events.emit("taken", [*counts], [*counts.values()])

    def _emit(self, kind: JobEventKind, ids: Sequence[str]) -> None:
        """They are in hand no more."""
        if self.events is not None:
            self.events.emit(kind, ids, [self._counts.pop(job_id, None) for job_id in ids])

    def _emit_report(self, report: Report, reply: Any) -> None:
        """What a report says of its jobs, as they are written now."""
        script, args = report.call.script, report.call.args
        assert self.events is not None
        if script == "fail":
            verdicts = list(zip(report.ids, args[4::5], strict=True))
            self._emit("failed", [job_id for job_id, verdict in verdicts if verdict != "solo"])
            self.events.emit("buried", [job_id for job_id, verdict in verdicts if verdict == "exhausted"], 1)
            self._emit("released", [job_id for job_id, verdict in verdicts if verdict == "solo"])
        elif script == "release":
            states = list(zip(report.ids, reply, strict=True))
            self._emit("released", [job_id for job_id, state in states if state not in (_POISONED, _EXPIRED)])
            self._emit("expired", [job_id for job_id, state in states if state == _EXPIRED])
            self._emit("buried", [job_id for job_id, state in states if state == _POISONED])
        elif script == "bury":
            self._emit("buried", report.ids)
            for job_id, _, count in _buried(args):
                if count:
                    self.events.emit("buried", [job_id], count)
        else:
            self._emit("acked", report.ids)

    def _refused(self) -> None:
        # What is in hand is somebody else's. The lease is lost with it, unless a new one was got meanwhile.
        self.drop_delivery()
        if self._lease.token == self._token_in_hand:
            self._lease.lose()

    def keep_finished(self) -> None:
        """Only what finished is in hand any more. The rest is not reported: it is in flight, and the next take, or
        the next owner, gets it.
        """
        self._in_hand.clear()

    def early_ack_call(self, already: int) -> tuple[Call, int]:
        """Acknowledges what finished so far while a slow job of the same delivery is still being performed. For another
        thread than the one that performs: it changes nothing here, and citing an id twice does no harm.
        """
        # The delivery first: should a new delivery begin between the two lines, its ids are cited under the old one,
        # which does nothing. The other way round they would be acknowledged unperformed.
        delivery = self._delivery
        finished = self._finished[already:]
        args = ("", self._token_in_hand, delivery, 0, self._max_payloads, MAX_DELIVERY_BYTES, delivery)
        return Call("ack_and_take", self._prefix, [*args, *map(_bytes, finished)]), len(finished)

    def refresh_call(self) -> Call:
        """Asks when the next job is due, taking and acknowledging nothing."""
        last = self._delivery if self._in_hand else 0
        args = ("", self._lease.token, last, 0, self._max_payloads, MAX_DELIVERY_BYTES, 0)
        return Call("ack_and_take", self._prefix, args)

    def drop_delivery(self) -> None:
        """Nothing of the delivery in hand is reported any more: the lease was lost, its next owner restores it."""
        self._in_hand.clear()
        self._finished.clear()
        self._counts.clear()
        self.found_no_redis.clear()

    @property
    def token(self) -> str:
        """The token of the lease that the delivery in hand was taken under."""
        return self._token_in_hand

    @property
    def in_hand(self) -> list[str]:
        """The ids that were taken and neither finished nor reported."""
        return list(self._in_hand)

    @property
    def delivery(self) -> int:
        """The number of the delivery in hand, or of the last one."""
        return self._delivery

    @property
    def is_full(self) -> bool:
        """Whether so much is in flight that a take would bring nothing before some of it is reported. Only `took` says
        so: another reply may be older than a report.
        """
        return self._full_under == self._lease.token

    @property
    def unacknowledged(self) -> bool:
        """Whether something finished that is not acknowledged in Redis."""
        return bool(self._finished)


def _bytes(job_id: str) -> bytes:
    return job_id.encode("utf-8", "surrogateescape")


def _buried(args: Sequence[Any]) -> Iterator[tuple[bytes, bytes, int]]:
    """Of the arguments of a `bury`: ids, why, and how many of their payloads; 0: all of them."""
    position = 5
    while position < len(args):
        job_id, reason, count = args[position : position + 3]
        yield job_id, reason, int(count)
        position += 3 + int(count)


def log_poisoned(queue: str, index: int, ids: Iterable[str]) -> None:
    """Ids of that shard that are in the morgue now."""
    for job_id in ids:
        log.error(
            "%s:%d: id %r is buried as poison: its process died, or its batch exceeded ttr, too often with it in "
            "flight", queue, index, job_id, extra={"event": "poison", "id": job_id, "queue": queue, "shard": index},
        )  # fmt: skip
