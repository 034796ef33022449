"""The jobs that a consumer has in hand, by receipt: taken, and neither reported nor lost; and their reports.

A receipt is the queue, the shard, the delivery and the id: when an id is taken again, its earlier receipt is void.

One lock guards what is in hand, and nothing else can be reported. So when a report is repeated after a lost reply, and
Redis has nothing in flight under it any more, the first attempt got through.
"""

import os
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from typing import Any, NamedTuple

from lowq import options
from lowq.clock import Lock
from lowq.clock import now as monotonic
from lowq.codec import MAX_TIME, future_delay
from lowq.errors import ConsumerClosed, LeaseLost, LowqError, NotTaken, RedisUnavailable
from lowq.logs import get_log
from lowq.options import QueueOptions
from lowq.retry import default_retry_in
from lowq.settings import Config
from lowq.shards.broker import Broker
from lowq.shards.delivery import Delivery, InFlight, Report, TakenJob
from lowq.shards.dispatcher import Dispatcher
from lowq.shards.shard import Shard
from lowq.store import Client
from lowq.verdicts import Remarks, charge, error_bytes, log_lost

log = get_log("lowq.consumer")

_TIME = options.seconds(optional=False)
#: Jobs that one call gives back: it must not hold Redis for long.
RELEASED_TOGETHER = 100


@dataclass(slots=True, eq=False)
class Held:
    """A job in hand."""

    id: str
    shard: Shard
    #: Its lease is the one under which the job was taken, or that was got when it was adopted. Without its jobs.
    delivery: Delivery
    #: -1 fresh, n: failed n + 1 times.
    retry_count: int
    #: Monotonic time at which it is released; inf: never.
    deadline: float
    #: The thread that has taken it; None: a caller has received it.
    taker: int | None
    #: Nobody will receive it: it is to be given back.
    is_unwanted: bool = False
    #: A report of it got no answer.
    is_uncertain: bool = False

    @property
    def in_flight(self) -> InFlight:
        """Makes its reports."""
        return self.shard.in_flight

    @property
    def is_current(self) -> bool:
        """Whether the lease is the one under which jobs of the shard may be reported."""
        return self.delivery.lease.token == self.in_flight.token


class Sent(NamedTuple):
    """A report of jobs of one delivery, with their receipts."""

    shard: Shard
    receipts: list[str]
    report: Report
    #: Seconds for which they wait then, if they do.
    delay: float = 0.0


class Hand:
    """See above. ``ttr``: seconds; inf: none. ``close``: closes the consumer, which sets broker and dispatcher."""

    broker: Broker
    dispatcher: Dispatcher

    def __init__(
        self, queue_options: QueueOptions, config: Config, client: Client, ttr: float, close: Callable[[], object]
    ) -> None:
        self.queue = queue_options.queue_name
        self.options = queue_options
        self.client = client
        self.ttr = ttr
        self._config = config
        self._close = close
        #: Guards what follows, and what is in flight of every shard.
        self.lock = Lock()
        self.is_closed = False
        #: The error that has ended the consumer.
        self.failure: BaseException | None = None
        #: The process that it belongs to.
        self.pid = os.getpid()
        #: By receipt.
        self.held: dict[str, Held] = {}
        #: How many of each shard, and the lease that was taken under last.
        self._counts: dict[Shard, int] = {}
        self._tokens: dict[Shard, str] = {}
        self._has_uncertain = False
        #: When the maintenance loop looks for overdue jobs next, monotonic.
        self.looks_at = inf
        #: How many jobs were reported: `Report.kind` -> number, and those that were buried because of it.
        self.reported = dict.fromkeys(("acked", "failed", "released", "buried", "exhausted"), 0)

    def check_process(self) -> None:
        """Refuses a forked child, before it waits for the lock: a thread of the parent may have had it."""
        if os.getpid() != self.pid:
            raise ConsumerClosed(
                f"the consumer of queue {self.queue!r} belongs to another process; make one in this one"
            )

    def check_open(self) -> None:
        """Raises what has ended the consumer, if it has ended."""
        self.check_process()
        if self.failure is not None:
            failure = self.failure
            if not self.is_closed:
                self._close()
            raise failure
        if self.is_closed:
            raise ConsumerClosed(f"the consumer of queue {self.queue!r} is closed; make a new one")

    # --- what comes and goes ---

    def add(self, shard: Shard, delivery: Delivery, retry_counts: Iterable[tuple[str, int]]) -> list[str]:
        """Jobs of a delivery, as ids and retry counts, are in hand from now on; returns their receipts. Of the shard
        nothing is in hand that was taken under an earlier lease.
        """
        head, deadline, taker = f"{shard!r}:{delivery.number}:", self.new_deadline(), threading.get_ident()
        new = {
            head + job_id: Held(job_id, shard, delivery, retry_count, deadline, taker)
            for job_id, retry_count in retry_counts
        }
        self.held.update(new)
        self._count(shard, len(new))
        return list(new)

    def unreceived(self) -> list[str]:
        """The receipts that no caller has."""
        return [one for one, held in self.held.items() if held.taker is not None or held.is_unwanted]

    def forget(self, receipts: Iterable[str]) -> None:
        """Removes these jobs: they are in hand no more."""
        gone: dict[Shard, int] = {}
        for receipt in receipts:
            held = self.held.pop(receipt, None)
            if held is not None:
                gone[held.shard] = gone.get(held.shard, 0) + 1
        for shard, count in gone.items():
            self._count(shard, -count)

    def forget_uncertain(self, taken: Iterable[TakenJob]) -> None:
        """Forgets jobs whose report got no answer and whose id was taken anew: so the report did get there."""
        if self._has_uncertain:
            ids = {job.id for job in taken}
            self.forget([receipt for receipt, one in self.held.items() if one.is_uncertain and one.id in ids])
            self._has_uncertain = any(one.is_uncertain for one in self.held.values())

    def forget_earlier(self, shard: Shard, token: str) -> None:
        """Forgets the jobs of the shard that were taken under another lease: they are somebody else's."""
        if self._tokens.get(shard) != token:
            self._tokens[shard] = token
            of_shard = [(receipt, held) for receipt, held in self.held.items() if held.shard is shard]
            self.forget([receipt for receipt, held in of_shard if held.delivery.lease.token != token])

    def forget_replaced(self) -> None:
        """`forget_earlier` of each shard that is leased."""
        for shard in list(self._counts):
            if (lease := shard.lease.current) is not None:
                self.forget_earlier(shard, lease.token)

    def lost(self, shard: Shard) -> None:
        """The lease was lost: whoever has it next takes what is in flight."""
        self.forget([receipt for receipt, held in self.held.items() if held.shard is shard])
        self.broker.maintenance.check(shard)
        log_lost(shard)

    def _count(self, shard: Shard, more: int) -> None:
        before = self._counts.get(shard, 0)
        after = self._counts[shard] = before + more
        if (before > 0) != (after > 0):
            self.dispatcher.note_in_hand(shard, has_jobs=after > 0)

    # --- deadlines ---

    def new_deadline(self) -> float:
        """That of what is handed over now."""
        deadline = monotonic() + self.ttr
        self.watch(deadline)
        return deadline

    def watch(self, deadline: float) -> None:
        """The maintenance loop is to look for overdue jobs then, at the latest."""
        if deadline < self.looks_at:
            self.looks_at = deadline
            self.broker.maintenance.nudge()

    def release_due(self, now: float, client: Client) -> float:
        """Releases what is to be given back, and what is overdue. Returns when the next deadline passes; inf: never.

        Raises:
            RedisUnavailable: some of it is still in hand.
        """
        self.release_all([receipt for receipt, held in self.held.items() if held.is_unwanted], client)
        overdue = [receipt for receipt, held in self.held.items() if held.deadline <= now]
        self.release_all(overdue, client, crashed=True)
        return min((held.deadline for held in self.held.values()), default=inf)

    def give_back(self, receipts: Iterable[str]) -> None:
        """These, which nobody has been given, wait again as soon as Redis answers."""
        with self.lock:
            for receipt in receipts:
                if receipt in self.held:
                    self.held[receipt].is_unwanted = True
            self.looks_at = 0.0
            self.broker.maintenance.nudge()

    # --- reports of one job ---

    def find(self, receipt: object) -> Held:
        """The job in hand under a receipt.

        Raises:
            NotTaken, ConsumerClosed
        """
        held = self.held.get(receipt) if isinstance(receipt, str) else None
        if held is not None and held.is_current:
            return held
        self.check_open()
        raise NotTaken(
            f"queue {self.queue!r}: this consumer holds no job with the receipt {receipt!r:.200}: it was reported "
            "already, or its ttr has passed, or the lease of its shard was lost, or it is no receipt of this session"
        )

    def is_cancelled(self, receipt: str) -> bool:
        """Whether the job in hand under a receipt is to end."""
        held = self.held.get(receipt)
        return held is not None and held.shard.stopping.get(held.id, (None,))[0] == held.delivery.number

    def report(self, receipt: str, make: Callable[[Held], tuple[Report, float]]) -> None:
        """Reports a job in hand. ``make``: gives the report, and the seconds for which the job waits then, if it does.

        Raises:
            NotTaken, RedisUnavailable: as of `ConsumerJob`.
        """
        self.check_process()
        with self.lock:
            held = self.find(receipt)
            sent = Sent(held.shard, [receipt], *make(held))
            (reply,) = self.client.run_many([sent.report.call])
            self.check(held, self.note(sent, reply))

    def check(self, held: Held, error: Exception | None) -> None:
        """Raises the error of the report of one job, as a caller knows it."""
        if isinstance(error, LeaseLost):
            raise NotTaken(
                f"queue {self.queue!r}, id {held.id!r}: the lease of {held.shard!r} was lost, so whoever has the shard "
                "next takes the job again"
            ) from None
        if error is not None:
            raise error

    def ack(self, receipt: str) -> None:
        """The job is done."""
        self.report(receipt, lambda held: (held.in_flight.ack_report([held.id], held.delivery.number), 0.0))

    def release(self, receipt: str, delay: float | timedelta | None) -> None:
        seconds = None if delay is None else float(future_delay(delay))

        def make(held: Held) -> tuple[Report, float]:
            return held.in_flight.release_report([(held.id, seconds)], delivery=held.delivery.number), seconds or 0.0

        self.report(receipt, make)

    def bury(self, receipt: str, reason: str) -> None:
        if not isinstance(reason, str):
            raise LowqError(f"bury: reason is a text, not {reason!r:.100}")
        data = self._error_bytes(reason)
        self.report(
            receipt,
            lambda held: (held.in_flight.bury_report([(held.id, data, ())], delivery=held.delivery.number), 0.0),
        )

    def fail(self, receipt: str, error: BaseException | str, delay: float | timedelta | None = None) -> None:
        if not isinstance(error, BaseException | str):
            raise LowqError(f"fail: say the exception or a text, not {error!r:.100}")
        data = self._error_bytes(error)
        given = None if delay is None else float(future_delay(delay))

        def retry_in(retry_count: int) -> float:
            return min(default_retry_in(retry_count), MAX_TIME) if given is None else given

        def make(held: Held) -> tuple[Report, float]:
            failure = charge(held.id, held.retry_count, self.options.max_retry_count, retry_in, data)
            return held.in_flight.fail_report([failure], delivery=held.delivery.number), failure.delay

        self.report(receipt, make)

    def touch(self, receipt: str, seconds: float | timedelta) -> None:
        more: float = _TIME.check("touch: ", "seconds", seconds)
        self.check_process()
        with self.lock:
            held = self.find(receipt)
            if held.deadline < inf:
                held.deadline = monotonic() + more
                self.watch(held.deadline)

    def _error_bytes(self, error: BaseException | str) -> bytes:
        remarks = Remarks()
        data = error_bytes(remarks, error, self._config)
        remarks.log()
        if remarks.stop is not None:
            raise remarks.stop
        return data

    # --- reports of several jobs ---

    def acks(self, receipts: Iterable[str]) -> list[Sent]:
        """Acknowledgements of those that are in hand."""
        return [
            Sent(shard, some, shard.in_flight.ack_report([self.held[one].id for one in some], number))
            for (shard, number), some in self._by_delivery(receipts)
        ]

    def release_all(self, receipts: Iterable[str], client: Client | None = None, *, crashed: bool = False) -> None:
        """Jobs in hand wait again. ``crashed``: their ttr has passed.

        Raises:
            RedisUnavailable: they are still in hand.
        """
        sent: list[Sent] = []
        for (shard, number), all_of_it in self._by_delivery(receipts):
            for start in range(0, len(all_of_it), RELEASED_TOGETHER):
                some = all_of_it[start : start + RELEASED_TOGETHER]
                delay = random.uniform(0.05, 0.5) if crashed else None
                ids = [(self.held[receipt].id, delay) for receipt in some]
                report = shard.in_flight.release_report(ids, crashed=crashed, delivery=number)
                sent.append(Sent(shard, some, report, delay or 0.0))
        replies = (client or self.client).run_many([one.report.call for one in sent])
        errors = [self.note(one, reply) for one, reply in zip(sent, replies, strict=True)]
        for one, error in zip(sent, errors, strict=True):
            if crashed and error is None:
                _log_overdue(one.shard, one.report.ids)
        for error in errors:
            if error is not None and not isinstance(error, LeaseLost):
                raise error

    def note(self, sent: Sent, reply: Any) -> Exception | None:
        """Takes note of the reply to a report: its jobs are in hand no more. Returns the error that the reply is: when
        the lease was lost, they are lost, too; otherwise they are still in hand.
        """
        shard, report = sent.shard, sent.report
        try:
            shard.in_flight.note_written([report], [reply])
        except Exception as error:
            if not isinstance(reply, Exception):
                raise
            if isinstance(error, LeaseLost):
                self.lost(shard)
            elif isinstance(error, RedisUnavailable):
                self._has_uncertain = True
                for receipt in sent.receipts:
                    if receipt in self.held:
                        self.held[receipt].is_uncertain = True
            return error
        self.forget(sent.receipts)
        self.reported[report.kind] += len(report.ids)
        self.reported["exhausted"] += sum(failure.verdict == "exhausted" for failure in report.failures)
        # Wakes whoever waits for what is due now of the shard, or will be.
        if report.kind != "acked":
            self.dispatcher.wake(shard, sent.delay)
        else:
            state = shard.in_flight.read_state(reply)
            if state.delay is not None and not state.paused:
                self.dispatcher.wake(shard, max(state.delay, 0.0))
        return None

    def _by_delivery(self, receipts: Iterable[str]) -> Iterable[tuple[tuple[Shard, int], list[str]]]:
        """Groups the receipts that may be reported by their deliveries."""
        groups: dict[tuple[Shard, int], list[str]] = {}
        latest: Delivery | None = None  # mostly the same as of the receipt before
        some: list[str] = []
        for receipt in receipts:
            held = self.held.get(receipt)
            if held is None:
                continue
            if held.delivery is not latest:
                latest = held.delivery
                some = groups.setdefault((held.shard, latest.number), []) if held.is_current else []
            some.append(receipt)
        return groups.items()


def _log_overdue(shard: Shard, ids: Sequence[str]) -> None:
    for job_id in ids[:3]:
        log.error(
            "%r, id %r: its ttr has passed; it is charged with a crash and waits again, unless that makes "
            "max_crash_count of them", shard, job_id,
            extra={"event": "overdue", "queue": shard.queue, "shard": shard.index, "id": job_id},
        )  # fmt: skip
    if len(ids) > 3:
        log.error("... and so has that of %d more", len(ids) - 3)
