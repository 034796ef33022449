"""What becomes of a consumer's jobs in hand: reported by receipt, released when their time has passed.

What is in hand is known here, and guarded by one lock. Only what is known here can be reported. So when a report is
repeated after a lost reply, and Redis has nothing in flight under it any more, the first attempt got through.
"""

import os
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from math import inf
from typing import Any, Literal

from lowq.clock import now as monotonic
from lowq.codec import MAX_TIME, future_delay
from lowq.codec.error_text import cut_error, dump_text
from lowq.consumer.in_hand import HeldDelivery, InHand
from lowq.consumer.job import ConsumerJob
from lowq.errors import ConfigError, LeaseLost, LowqError, NotTaken, RedisUnavailable
from lowq.logs import describe, get_log
from lowq.options import MergeFunction, QueueOptions, merged
from lowq.retry import default_retry_in, is_exhausted
from lowq.settings import Config
from lowq.shards.broker import Broker
from lowq.shards.delivery import Delivery, Failure
from lowq.shards.dispatcher import Dispatcher
from lowq.shards.in_flight import Report
from lowq.shards.shard import Shard
from lowq.store import Client

log = get_log("lowq.consumer")

#: Jobs that one call gives back: it must not hold Redis for long.
RELEASED_TOGETHER = 100


class Reports:
    """The reports of a consumer. ``ttr``: seconds; inf: none. Its broker and dispatcher come once they are made."""

    _broker: Broker
    _dispatcher: Dispatcher

    def __init__(self, options: QueueOptions, config: Config, client: Client, ttr: float) -> None:
        self.queue = options.queue_name
        self._options = options
        self._config = config
        self._client = client
        self._ttr = ttr
        #: Guards what follows, and what is in flight of every shard.
        self._lock = threading.RLock()
        self._taken = InHand(lambda shard, is_occupied: self._dispatcher.occupy(shard, is_occupied=is_occupied))
        #: The process that it belongs to.
        self._pid = os.getpid()
        #: When the maintenance loop looks for overdue jobs next, monotonic.
        self._looks_at = inf
        #: How many jobs it has reported: `Report.kind` -> number, and those that were buried because of it.
        self._reported = dict.fromkeys(("acked", "failed", "released", "buried", "exhausted"), 0)

    def _check_open(self) -> None:
        """Raises what has ended the consumer, if anything has."""
        raise NotImplementedError

    def ack(self, receipt: str) -> None:
        """The job is done.

        Raises:
            NotTaken, RedisUnavailable: as of `ConsumerJob`. So of the others.
        """
        raise NotImplementedError

    def release(self, receipt: str, delay: float | timedelta | None = None) -> None:
        """The job waits again, uncharged: for so many seconds, or as it did before."""
        seconds = None if delay is None else float(future_delay(delay))
        self._report(
            receipt,
            lambda held, job_id: held.shard.in_flight.release_report(
                [(job_id, seconds)], delivery=held.delivery.number
            ),
            seconds or 0.0,
        )

    def bury(self, receipt: str, reason: str = "") -> None:
        """The job goes to the morgue, with all payloads that were taken."""
        if not isinstance(reason, str):
            raise LowqError(f"bury: reason is a text, not {reason!r:.100}")
        data = self._error_bytes(reason)
        self._report(
            receipt,
            lambda held, job_id: held.shard.in_flight.bury_report([(job_id, data, ())], delivery=held.delivery.number),
        )

    def fail(self, receipt: str, error: BaseException | str = "", delay: float | timedelta | None = None) -> None:
        """The job is charged a retry. ``delay``: seconds until then; by default they grow from retry to retry. Without
        any left its oldest payload goes to the morgue.
        """
        if not isinstance(error, BaseException | str):
            raise LowqError(f"fail: say the exception or a text, not {error!r:.100}")
        data = self._error_bytes(error)
        given = None if delay is None else float(future_delay(delay))
        with self._lock:
            held, job_id = self._find(receipt)
            retry_count = held.retry_counts.get(job_id, -1) + 1
            seconds = min(default_retry_in(retry_count), MAX_TIME) if given is None else given
            exhausted = is_exhausted(retry_count, self._options.max_retry_count)

            verdict: Literal["exhausted", "retry"] = "exhausted" if exhausted else "retry"
            wait = 0.0 if exhausted else seconds
            failure = Failure(job_id, verdict, retry_count, wait, data)
            self._report(
                receipt,
                lambda held, _: held.shard.in_flight.fail_report([failure], delivery=held.delivery.number),
                wait,
            )

    def touch(self, receipt: str, seconds: float | timedelta) -> None:
        """From now on the job has so many seconds until ``ttr`` passes. Without ``ttr`` it has for ever, as before."""
        more = seconds_of("touch: seconds", seconds)
        with self._lock:
            self._find(receipt)
            if self._taken.deadline(receipt) < inf:
                deadline = monotonic() + more
                self._taken.touch(receipt, deadline)
                self._watch(deadline)

    def _report(self, receipt: str, report_of: Callable[[HeldDelivery, str], Report], delay: float = 0.0) -> None:
        """Reports a job in hand, which waits for ``delay`` seconds afterwards, if it does."""
        with self._lock:
            held, job_id = self._find(receipt)
            report = report_of(held, job_id)
            (reply,) = self._client.run_many([report.call])
            self._note_report(receipt, held, report, reply, delay)

    def _note_report(self, receipt: str, held: HeldDelivery, report: Report, reply: Any, delay: float) -> None:
        shard = held.shard
        try:
            shard.in_flight.reported([report], [reply])
        except RedisUnavailable:
            self._taken.uncertain.add(receipt)
            raise
        except LeaseLost:
            self._lost(shard)
            raise NotTaken(
                f"queue {self.queue!r}, id {held.ids_of([receipt])[0]!r}: the lease of {shard!r} was lost, so whoever "
                "has the shard next takes the job again"
            ) from None
        self._taken.forget([receipt])
        self._count_report(report)
        self._look_at(shard, report, reply, delay)

    def _look_at(self, shard: Shard, report: Report, reply: Any, delay: float) -> None:
        """Wakes whoever waits for what is due now of the shard, or will be."""
        if report.kind == "acked":
            state = shard.in_flight.read_state(reply)
            if state.delay is not None and not state.paused:
                self._dispatcher.wake(shard, max(state.delay, 0.0))
        else:
            self._dispatcher.wake(shard, delay)

    def _find(self, receipt: object) -> tuple[HeldDelivery, str]:
        """The delivery and the id of what is in hand under a receipt.

        Raises:
            NotTaken, ConsumerClosed
        """
        if os.getpid() != self._pid:
            self._check_open()
        if isinstance(receipt, str):
            held = self._taken.get(receipt)
            if held is not None and held.is_current:
                return held, receipt[len(held.head) :]
        self._check_open()
        raise NotTaken(
            f"queue {self.queue!r}: this consumer holds no job with the receipt {receipt!r:.200}: it was reported "
            "already, or its ttr has passed, or the lease of its shard was lost, or it is no receipt of this session"
        )

    def _acks(self, receipts: Sequence[str]) -> list[tuple[Shard, list[str], Report]]:
        """Acknowledgements of those that are in hand, each of one delivery, with their receipts."""
        return [
            (held.shard, some, held.shard.in_flight.ack_report(held.ids_of(some), held.delivery.number))
            for held, some in self._taken.by_delivery(receipts)
        ]

    def _note_acks(
        self, acks: Sequence[tuple[Shard, list[str], Report]], replies: Sequence[Any]
    ) -> RedisUnavailable | None:
        """Takes note of the replies; returns the error when there was no answer: then they stay in hand."""
        trouble: RedisUnavailable | None = None
        for (shard, receipts, report), reply in zip(acks, replies, strict=True):
            error = self._note(shard, receipts, report, reply)
            if not isinstance(reply, Exception):
                self._look_at(shard, report, reply, 0.0)
            trouble = trouble or error
        return trouble

    def _note(self, shard: Shard, receipts: Sequence[str], report: Report, reply: Any) -> RedisUnavailable | None:
        """Takes note of the reply to a report of several jobs, which are in hand no more; returns the error when there
        was no answer: then they are.
        """
        try:
            shard.in_flight.reported([report], [reply])
        except LeaseLost:
            self._lost(shard)
        except RedisUnavailable as error:
            self._taken.uncertain.update(receipts)
            return error
        else:
            self._count_report(report)
        self._taken.forget(receipts)
        return None

    def _count_report(self, report: Report) -> None:
        self._reported[report.kind] += len(report.ids)
        self._reported["exhausted"] += sum(failure.verdict == "exhausted" for failure in report.failures)

    def _error_bytes(self, error: BaseException | str) -> bytes:
        config = self._config
        try:
            return dump_text(config.dump_error, error if isinstance(error, str) else config.format_error(error))
        except Exception:
            log.exception("format_error or dump_error failed; the bare error is kept")
            text = error if isinstance(error, str) else describe(error, str)
            return cut_error(text).encode("utf-8", "backslashreplace")

    # --- what is in hand ---

    def _deadline(self) -> float:
        deadline = monotonic() + self._ttr
        self._watch(deadline)
        return deadline

    def _watch(self, deadline: float) -> None:
        """The maintenance loop is to look for overdue jobs then, at the latest."""
        if deadline < self._looks_at:
            self._looks_at = deadline
            self._broker.maintenance.nudge()

    def _lost(self, shard: Shard) -> None:
        """The lease was lost: whoever has it next takes what is in flight."""
        self._taken.forget(self._taken.of_shard(shard))
        self._broker.maintenance.check(shard)
        log.warning(
            "%r: the lease was lost; whoever has the shard next takes what was in flight", shard,
            extra={"event": "lease_lost", "queue": self.queue, "shard": shard.index},
        )  # fmt: skip

    def _release(self, receipts: Sequence[str], client: Client | None = None, *, crashed: bool = False) -> None:
        """Jobs in hand wait again. ``crashed``: their ttr has passed.

        Raises:
            RedisUnavailable: they are still in hand.
        """
        reports: list[tuple[Shard, list[str], float, Report]] = []
        for held, all_of_it in self._taken.by_delivery(receipts):
            for start in range(0, len(all_of_it), RELEASED_TOGETHER):
                some = all_of_it[start : start + RELEASED_TOGETHER]
                delay = random.uniform(0.05, 0.5) if crashed else None
                ids = [(job_id, delay) for job_id in held.ids_of(some)]
                report = held.shard.in_flight.release_report(ids, crashed=crashed, delivery=held.delivery.number)
                reports.append((held.shard, some, delay or 0.0, report))
        replies = (client or self._client).run_many([report.call for *_, report in reports])
        trouble: RedisUnavailable | None = None
        for (shard, some, due_in, report), reply in zip(reports, replies, strict=True):
            if crashed and not isinstance(reply, Exception):
                self._log_overdue(shard, report.ids)
            trouble = self._note(shard, some, report, reply) or trouble
            if not isinstance(reply, Exception):
                self._dispatcher.wake(shard, due_in)
        if trouble is not None:
            raise trouble

    def _give_back_later(self, receipts: Iterable[str]) -> None:
        self._taken.unwanted.update(receipt for receipt in receipts if receipt in self._taken)
        self._looks_at = 0.0
        self._broker.maintenance.nudge()

    def _merge(self, merge: MergeFunction, job: ConsumerJob) -> bool:
        """Whether a merge function leaves any of the job's payloads, which are then those. A job that it can't merge
        fails; one without any left is done.
        """
        try:
            try:
                job.payloads = merged(merge, job.payloads)
            except Exception as error:
                log.exception("queue %r, id %r: its payloads can't be merged, so it fails", self.queue, job.id)
                self.fail(job.receipt, error)
                return False
            if not job.payloads:
                self.ack(job.receipt)
        except RedisUnavailable:  # it waits again, and comes again
            self._give_back_later([job.receipt])
            return False
        except NotTaken:
            return False
        return bool(job.payloads)

    def _bury_undecodable(self, shard: Shard, delivery: Delivery, jobs: list[ConsumerJob]) -> list[ConsumerJob]:
        spoilt = {item.id for item in delivery.undecodable}
        try:
            for item in delivery.undecodable:
                reason = self._error_bytes(item.reason)
                shard.in_flight.bury([(item.id, reason, (item.payload,))])
                log.error("queue %r, id %r: %s; it is in the morgue now", self.queue, item.id, item.reason)
        except RedisUnavailable:  # all that was taken of these ids waits again, and comes again
            self._give_back_later([job.receipt for job in jobs if job.id in spoilt])
            return [job for job in jobs if job.id not in spoilt]
        self._taken.forget([job.receipt for job in jobs if not job.payloads])
        return [job for job in jobs if job.payloads]

    @staticmethod
    def _log_overdue(shard: Shard, ids: Sequence[str]) -> None:
        for job_id in ids[:3]:
            log.error(
                "%r, id %r: its ttr has passed; it is charged with a crash and waits again, unless that makes "
                "max_crash_count of them", shard, job_id,
                extra={"event": "overdue", "queue": shard.queue, "shard": shard.index, "id": job_id},
            )  # fmt: skip
        if len(ids) > 3:
            log.error("... and so has that of %d more", len(ids) - 3)


def seconds_of(name: str, value: object, least: float | None = None) -> float:
    """A length of time in seconds, from a number or a timedelta; more than 0, or at least ``least``.

    Raises:
        ConfigError
    """
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= MAX_TIME:
        bound = "more than 0" if least is None else "0 or more"
        raise ConfigError(f"{name}={value!r:.100} must be seconds, or a timedelta, of {bound}, and under 272 years")
    if least is None and seconds == 0:
        raise ConfigError(f"{name}={value!r:.100} must be seconds, or a timedelta, of more than 0")
    return float(seconds)
