"""One shard of a queue, as the process that leases it sees it: take, acknowledge, fail, release, bury.

A life of a batch::

    take -> Delivery (delivery n) -> finish(ids) / fail / release / bury  -> the next take acknowledges what finished

Whatever cites an id also cites the delivery that it was taken under and the token of the lease, so that a repeat
after a lost reply, and a word of an owner that lost the shard meanwhile, do nothing.

Who owns what: `lease` is replaced, never changed, by the thread that keeps the leases. Everything about the delivery
in hand belongs to the thread that has claimed the shard (one at a time). `next_due`, `paused`, `claimed` and
`leaving` belong to the dispatcher's lock.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from lowq import clock
from lowq.broker.delivery import Delivery, Failure, TakenJob, Undecodable
from lowq.broker.lease import Lease, LeaseDenied
from lowq.errors import LeaseLost, ShardsCountError
from lowq.logs import describe
from lowq.settings import Config
from lowq.store import Call, Client, Refusal
from lowq.store.keys import shard_prefix
from lowq.store.scripts import time_argument

#: Bytes of payloads in one reply; a single payload always fits.
MAX_DELIVERY_BYTES = 2**20
#: Jobs of one delivery: bounds the time that a script may take.
MAX_DELIVERY_JOBS = 500


class Shard:
    """A shard that this process works, or waits to work."""

    def __init__(
        self,
        client: Client,
        namespace: str,
        queue: str,
        index: int,
        *,
        shards_count: int,
        nonce: str,
        load_payload: Callable[[bytes], Any],
        max_payloads: int = 1000,
        max_crash_count: int = 3,
    ) -> None:
        self.queue = queue
        self.index = index
        self.prefix = shard_prefix(namespace, queue, index)
        self.lease: Lease | None = None
        #: Monotonic time until which the lease is surely held: counted from before its renewal was sent.
        self.deadline = 0.0
        #: Monotonic time at which the oldest waiting job is due, as far as known; None: nothing waits.
        self.next_due: float | None = None
        self.paused = False
        self.claimed = False
        #: It is to be given up: no thread begins anything of it any more.
        self.leaving = False
        self._client = client
        self._shards_count = shards_count
        self._nonce = nonce
        self._load_payload = load_payload
        self._max_payloads = max_payloads
        self._max_crash_count = max_crash_count
        #: Counts wake-ups: tells whether one came while a take was under way.
        self.wakes = 0
        #: Of the last lease.
        self._fence = 0
        self._delivery = 0
        self._token_in_hand = ""
        #: Taken and neither finished nor reported.
        self._in_hand: set[str] = set()
        #: Finished and not acknowledged.
        self._finished: list[str] = []
        #: id -> how many times in a row it was released because its handler found no Redis; see `execution`.
        self.found_no_redis: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"{self.queue}:{self.index}"

    def ready(self, now: float) -> bool:
        """Whether a thread may work it: it has due work, is held, not paused, and nobody else's."""
        return (
            self.next_due is not None
            and self.next_due <= now
            and not self.claimed
            and not self.paused
            and not self.leaving
            and now < self.deadline
        )

    # --- the lease ---

    def acquire_call(self, lease_ttl: float, now: float | None = None, *, charge: bool = True) -> Call:
        """``charge``: what is found in flight counts as a crash of its owner; not so when Redis was away."""
        args = (time_argument(now), self._nonce, _milliseconds(lease_ttl), self._shards_count, self._max_crash_count)
        return Call("acquire", self.prefix, [*args, random.getrandbits(31), "" if charge else "1", self._fence])

    def acquired(self, reply: Any, deadline: float) -> Lease | LeaseDenied:
        """Takes note of the reply to `acquire_call`. ``deadline``: monotonic, from before it was sent.

        Raises:
            ShardsCountError
        """
        if isinstance(reply, Refusal):
            raise ShardsCountError(self.queue, int(reply.detail), self._shards_count) from None
        if isinstance(reply, Exception):
            raise reply
        if reply[0] == b"held":
            self.lease = None
            self.deadline = 0.0
            return LeaseDenied(max(reply[1], 0) / 1000)
        fence = self._fence = int(reply[1])
        resumed = reply[0] == b"resumed"
        poisoned = tuple(_text(job_id) for job_id in reply[3:])
        lease = Lease(f"{self._nonce}:{fence}", fence, resumed, 0 if resumed else reply[2], poisoned)
        if self.lease is None or self.lease.token != lease.token:
            self.lease = lease
        self.deadline = deadline
        return lease

    def acquire(self, lease_ttl: float, now: float | None = None) -> Lease | LeaseDenied:
        """The lease, or who keeps it from us for how long. What a dead owner left in flight waits again.

        Raises:
            ShardsCountError: the queue has another number of shards.
            RedisUnavailable
        """
        deadline = clock.now() + lease_ttl
        (reply,) = self._client.run_many([self.acquire_call(lease_ttl, now)])
        return self.acquired(reply, deadline)

    def renew_call(self, lease_ttl: float) -> Call:
        return Call("renew", self.prefix, ["", self._token(), _milliseconds(lease_ttl)])

    def lose(self) -> None:
        """Somebody else may have the shard by now: nothing of it is worked any further."""
        self.lease = None
        self.deadline = 0.0

    def surrender_call(self, leave: float | None = None) -> Call:
        return Call("surrender", self.prefix, ["", self._token(), "" if leave is None else _milliseconds(leave)])

    def surrender(self, leave: float | None = None) -> bool:
        """Gives the shard up. With jobs in flight it is refused (False), unless ``leave`` says how many seconds the
        lease is to run on: for a process that is about to exit. What is in flight is not charged then.

        Raises:
            LeaseLost, RedisUnavailable
        """
        call = self.surrender_call(leave)
        if self._client.run(call.script, call.key, *call.args) == 0:
            return False
        self.lose()
        return True

    def _token(self) -> str:
        # Without a lease: what no token is like, so Redis refuses, as it refuses a lease that was lost.
        lease = self.lease
        return "none" if lease is None else lease.token

    # --- a batch ---

    def take_call(self, limit: int, now: float | None = None) -> Call:
        """Acknowledges what finished, and takes up to ``limit`` jobs; 0 only acknowledges."""
        token = self._token()
        if token != self._token_in_hand:
            self.drop_delivery()
            self._token_in_hand = token
        last = self._delivery if self._in_hand else 0
        args = (time_argument(now), token, last, min(limit, MAX_DELIVERY_JOBS), self._max_payloads, MAX_DELIVERY_BYTES)
        return Call("take", self.prefix, [*args, self._delivery, *map(_bytes, self._finished)])

    def took(self, reply: Any) -> Delivery:
        """Takes note of the reply to `take_call`.

        Raises:
            LeaseLost: what is in hand is somebody else's. RedisUnavailable: repeat the call.
        """
        if isinstance(reply, Exception):
            if isinstance(reply, LeaseLost):
                self._refused()
            raise reply
        lease = self.lease
        if lease is None or lease.token != self._token_in_hand:
            # Taken under a lease that was lost, and perhaps regained, before the reply was read: others may have
            # worked the shard meanwhile, so these jobs may be old. They are in flight under the old delivery.
            self.drop_delivery()
            raise LeaseLost(f"queue {self.queue!r}, shard {self.index}: the lease was lost during take")
        number, delay, paused = reply[0], reply[1], reply[2]
        self._finished.clear()
        delivery = Delivery(number, lease, [], None if delay is None else delay / 1e6, bool(paused))
        if len(reply) > 4:
            self._delivery = number
            items = iter(reply[4:])
            for item in items:
                if type(item) is list:
                    delivery.jobs.append(self._decode(item, delivery))
                    continue
                # A fresh job with an inline payload, which most are.
                perform_at, inline = next(items), next(items)
                score, _, payload = inline.partition(b" ")
                raw = [item, perform_at, b"-1", payload, score]
                try:
                    job = TakenJob(_text(item), [self._load_payload(payload)], -1, raw)
                except Exception:
                    job = self._decode(raw, delivery)
                delivery.jobs.append(job)
            self._in_hand.update([job.id for job in delivery.jobs])
        return delivery

    def take(self, limit: int, now: float | None = None) -> Delivery:
        """Acknowledges what finished and takes the next jobs, in one round trip.

        Raises:
            LeaseLost, RedisUnavailable
        """
        (reply,) = self._client.run_many([self.take_call(limit, now)])
        return self.took(reply)

    def _decode(self, raw: list[bytes], delivery: Delivery) -> TakenJob:
        job_id = _text(raw[0])
        try:
            payloads = [self._load_payload(payload) for payload in raw[3::2]]
        except Exception:
            payloads, sound = [], raw[:3]
            for payload, score in zip(raw[3::2], raw[4::2], strict=True):
                try:
                    payloads.append(self._load_payload(payload))
                    sound += [payload, score]
                except Exception as error:
                    why = describe(error, str)
                    delivery.undecodable.append(Undecodable(job_id, payload, f"the payload can't be decoded: {why}"))
            raw = sound
        return TakenJob(job_id, payloads, int(float(raw[2])), raw)

    def finish(self, ids: Iterable[str]) -> None:
        """These ids were performed; the next take acknowledges them."""
        for job_id in ids:
            if job_id in self._in_hand:
                self._in_hand.remove(job_id)
                self._finished.append(job_id)

    def fail(self, failures: Sequence[Failure], now: float | None = None) -> None:
        """The outcome of a batch that failed.

        Raises:
            LeaseLost, RedisUnavailable
        """
        args: list[Any] = []
        for job_id, verdict, retry_count, delay, error in failures:
            args += [_bytes(job_id), verdict, retry_count, repr(float(delay)), error]
        self._report("fail", args, now, [item.id for item in failures])

    def release(
        self, delays: Sequence[tuple[str, float | None]], now: float | None = None, *, crashed: bool = False
    ) -> None:
        """Taken jobs wait again, uncharged: ``(id, seconds)``, None keeps the time they were due. ``crashed``: they
        made their process stop, which is counted, and after max_crash_count times they are buried.

        Raises:
            LeaseLost, RedisUnavailable
        """
        args: list[Any] = [self._max_crash_count]
        for job_id, delay in delays:
            args += [_bytes(job_id), "" if delay is None else repr(float(delay)), "1" if crashed else ""]
        self._report("release", args, now, [job_id for job_id, _ in delays])

    def bury(self, reasons: Sequence[tuple[str, bytes, Sequence[bytes]]], now: float | None = None) -> None:
        """Taken jobs to the morgue: ``(id, reason, payloads)``; no payloads means the whole job.

        Raises:
            LeaseLost, RedisUnavailable
        """
        args: list[Any] = ["", ""]
        for job_id, reason, payloads in reasons:
            args += [_bytes(job_id), reason, len(payloads), *payloads]
        self._report("bury", args, now, [job_id for job_id, _, payloads in reasons if not payloads])

    def _report(self, script: str, args: list[Any], now: float | None, ids: Iterable[str]) -> None:
        try:
            self._client.run(script, self.prefix, time_argument(now), self._token_in_hand, self._delivery, *args)
        except LeaseLost:
            self._refused()
            raise
        self._in_hand.difference_update(ids)

    def _refused(self) -> None:
        # What is in hand is somebody else's. The lease is lost with it, unless a new one was got meanwhile.
        self.drop_delivery()
        if self._token() == self._token_in_hand:
            self.lose()

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
        args = ("", self._token_in_hand, 0, 0, self._max_payloads, MAX_DELIVERY_BYTES, delivery)
        return Call("take", self.prefix, [*args, *map(_bytes, finished)]), len(finished)

    def refresh_call(self) -> Call:
        """Asks when the next job is due, taking and acknowledging nothing."""
        args = ("", self._token(), 0, 0, self._max_payloads, MAX_DELIVERY_BYTES, 0)
        return Call("take", self.prefix, args)

    def drop_delivery(self) -> None:
        """Nothing of the delivery in hand is reported any more: the lease was lost, its next owner restores it."""
        self._in_hand.clear()
        self._finished.clear()
        self.found_no_redis.clear()

    @property
    def delivery(self) -> int:
        """The number of the delivery in hand, or of the last one."""
        return self._delivery

    @property
    def unacknowledged(self) -> bool:
        """Whether something finished that Redis has not been told."""
        return bool(self._finished)


class QueueOptions(Protocol):
    """What a worker, or whoever takes from a queue, says of it."""

    queue_name: str
    shards_count: int
    max_payloads: int
    max_crash_count: int


def shards_of(client: Client, config: Config, queue: QueueOptions, nonce: str) -> list[Shard]:
    """All shards of a queue, for a process with that nonce; none of them leased yet."""
    return [
        Shard(
            client,
            config.namespace,
            queue.queue_name,
            index,
            shards_count=queue.shards_count,
            nonce=nonce,
            load_payload=config.load_payload,
            max_payloads=queue.max_payloads,
            max_crash_count=queue.max_crash_count,
        )
        for index in range(queue.shards_count)
    ]


def _milliseconds(seconds: float) -> int:
    return max(int(seconds * 1000), 1)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _bytes(job_id: str) -> bytes:
    return job_id.encode("utf-8", "surrogateescape")
