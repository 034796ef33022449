"""Takes of a consumer: jobs from one shard after another, as its callers ask for them.

A shard is claimed for the time of a take alone; one with jobs in hand is not given up before they are
reported. What a caller gets is surely its own: the same is asked of a delivery as before a worker's handler is called.

A caller that takes one job after the other would make two round trips for each: a take and an acknowledgement. So once
that has gone on for a while, the acknowledgement takes the next job *ahead*. The shard is this consumer's, so nobody
else could have that job. Should the process die before somebody asks for it, it is charged as if it had been handed
over. Should nobody ask for it, it waits again after `AHEAD_SECONDS`.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from typing import Any

from lowq.clock import now as monotonic
from lowq.codec import decode_id
from lowq.consumer.hand import Hand
from lowq.coroutines import at_once
from lowq.errors import ConsumerClosed, LeaseLost, LowqError, NotTaken, RedisUnavailable
from lowq.job import ConsumerJob
from lowq.logs import get_log
from lowq.options import MergeFunction, whole
from lowq.options import seconds as seconds_kind
from lowq.settings import Config
from lowq.shards.delivery import Delivery, Report
from lowq.shards.shard import Shard
from lowq.store import Call, Client
from lowq.verdicts import bury_undecodable, merged, read_takes

log = get_log("lowq.consumer")

#: Jobs that one take may be asked for.
LIMIT = whole(1, 10_000)
TIMEOUT = seconds_kind(zero=True)
#: So many jobs taken one by one, each at once after the last was acknowledged: then the next one is taken ahead.
AHEAD_AFTER = 16
#: Seconds within which that is at once.
AHEAD_GAP = 0.005
#: Seconds after which what was taken ahead waits again, as nobody has asked for it.
AHEAD_SECONDS = 0.5


@dataclass(slots=True, eq=False)
class Caller:
    """Somebody who takes jobs, and may be cancelled while waiting for them."""

    is_cancelled: bool = False


class Taker:
    """The takes of a consumer, which it hands over as the jobs of ``consumer``."""

    def __init__(self, hand: Hand, config: Config, consumer: Any) -> None:
        self._hand = hand
        self._config = config
        self._consumer = consumer
        self._client = hand.client
        #: `quiet` was called, and set by that and by the end.
        self.is_quiet = False
        self.ended = threading.Event()
        #: Jobs that were taken ahead, for the next `take`; and until when they are kept, monotonic.
        self._ahead: list[ConsumerJob] = []
        self.ahead_until = inf
        #: So many were taken one by one, each at once after an acknowledgement; and when the last of these was.
        self._one_by_one, self._acked_at = 0, -inf
        #: The callers that are in `take` now.
        self._callers: set[Caller] = set()
        #: Shards of which a take got no answer, and none has since: something may be in flight that nobody knows of.
        self.unanswered: set[Shard] = set()

    # --- for a caller ---

    def take_here(self, take: Callable[[Caller], list[ConsumerJob]]) -> list[ConsumerJob]:
        """Takes for whoever is in this thread. What an exception in the middle (Ctrl-C) leaves in nobody's hand waits
        again.
        """
        try:
            while jobs := take(Caller()):
                if held := self.receive(jobs):
                    return held
            return []
        except (LowqError, GeneratorExit):
            raise
        except BaseException:
            self._give_back_interrupted()
            raise

    def receive(self, jobs: list[ConsumerJob]) -> list[ConsumerJob]:
        """The caller gets these jobs: those that are surely this consumer's still. Its thread may have been frozen for
        longer than the lease since they were taken; then somebody else performs them.
        """
        surely = self._surely_held(jobs)
        for job in surely:
            if (held := self._hand.held.get(job.receipt)) is not None:
                held.taker = None
        if len(surely) < len(jobs):
            self.give_back([job for job in jobs if job not in surely])
        return surely

    def _surely_held(self, jobs: Sequence[ConsumerJob]) -> list[ConsumerJob]:
        """Those that are in hand and surely this consumer's, and of which nothing has expired since they were taken."""
        now, surely = monotonic(), list[ConsumerJob]()
        delivery: Delivery | None = None
        is_held = False
        for job in jobs:
            held = self._hand.held.get(job.receipt)
            if held is None:
                continue
            if held.delivery is not delivery:  # mostly it is that of the job before
                delivery = held.delivery
                is_held = held.is_current and delivery.is_held(held.shard.lease, now)
            if is_held and held.delivery.expires.get(held.id, inf) > now:
                surely.append(job)
        return surely

    def give_back(self, jobs: Sequence[ConsumerJob]) -> None:
        """These, which nobody has been given, wait again as soon as Redis answers."""
        self._hand.give_back([job.receipt for job in jobs])

    def _give_back_interrupted(self) -> None:
        with self._hand.lock:
            if os.getpid() != self._hand.pid or self._hand.is_closed:
                return
            ident = threading.get_ident()
            pending = {receipt for receipt, held in self._hand.held.items() if held.taker == ident}
            self._hand.give_back(pending)
            self._ahead = [job for job in self._ahead if job.receipt not in pending]
            if not self._callers:  # otherwise it may be another thread that has claimed it
                for shard in self._hand.broker.shards:
                    if shard.dispatch.claimed_by is not None:
                        self._hand.dispatcher.look_again(shard)
                        self._hand.dispatcher.unclaim(shard)

    def next_batch(
        self, caller: Caller, limit: int, timeout: float | timedelta | None, finished: list[str]
    ) -> list[ConsumerJob]:
        """The next list of `batches`, for somebody who may be cancelled; empty: there is none. ``finished``: the
        receipts of the last one. Those of this one are the caller's to add, once it has received them.
        """
        try:
            return self.take_for(caller, limit, timeout, finished)
        except ConsumerClosed:
            return []

    def take_for(
        self, caller: Caller, limit: int, timeout: float | timedelta | None, finished: list[str]
    ) -> list[ConsumerJob]:
        """`take`, for somebody who may be cancelled. ``finished``: receipts to be acknowledged with it. Those
        without an answer are left in there.
        """
        LIMIT.check("", "limit", limit)
        seconds, now = TIMEOUT.check("", "timeout", timeout), monotonic()
        until = inf if seconds is None else now + seconds
        self._one_by_one = self._one_by_one + 1 if limit == 1 and now - self._acked_at < AHEAD_GAP else 0
        self._callers.add(caller)
        try:
            # Who was cancelled before may have had its nudge taken by another, who did not find it among the callers.
            if caller.is_cancelled:
                return []
            return self._take_until(limit, until, finished, caller)
        finally:
            self._callers.discard(caller)

    def cancel(self, caller: Caller) -> None:
        """Has a `take` return at once, with nothing: what it has got meanwhile waits again."""
        caller.is_cancelled = True
        self._hand.dispatcher.nudge()

    def release_unanswered(self) -> None:
        """Releases what takes without an answer have taken."""
        for shard in self.unanswered:
            for job_id, number, _ in in_flight_of(self._client, shard):
                if f"{shard!r}:{number}:{job_id}" not in self._hand.held:
                    shard.in_flight.write([shard.in_flight.release_report([(job_id, None)], delivery=number)])

    # --- steps of a take ---

    def _take_until(self, limit: int, until: float, finished: list[str], caller: Caller) -> list[ConsumerJob]:
        hand, dispatcher = self._hand, self._hand.dispatcher
        failures = 0
        has_looked = False  # in Redis, whether there is nothing indeed
        shards: Sequence[Shard] = ()
        while True:
            hand.check_open()
            try:
                if has_looked:
                    self._look()
                jobs = self._take_ready(limit, finished, shards)
                failures = 0
            except RedisUnavailable as error:
                hand.broker.outage.begin(error)
                if monotonic() >= until:
                    raise
                # In a cluster a shard rests whose primary does not answer, and others may have jobs.
                failures = 0 if self._client.has_several_primaries else min(failures + 1, 5)
                time.sleep(min(0.05 * 2.0**failures, max(until - monotonic(), 0.0)))
                shards = ()
                continue
            if jobs or has_looked:
                return self._chosen(jobs, caller)
            if monotonic() >= until:
                has_looked, shards = True, ()
                continue
            shards = dispatcher.wait_many(1, until)
            is_for_others = any(one.is_cancelled for one in list(self._callers))
            if is_for_others or dispatcher.closed or hand.failure is not None:
                if is_for_others:
                    time.sleep(0.001)  # that one may be in the middle of something
                dispatcher.nudge()  # who wakes is not always the one that was meant
            if dispatcher.closed or caller.is_cancelled:
                self._unclaim(shards)
                if not (self.is_quiet or hand.is_closed or hand.failure or caller.is_cancelled):
                    # An operator has made it quiet. Who takes in a loop must not spin.
                    self.ended.wait(min(max(until - monotonic(), 0.0), 0.5))
                    if monotonic() < until:
                        continue
                return []

    def _unclaim(self, shards: Sequence[Shard]) -> None:
        for shard in shards:
            self._hand.dispatcher.unclaim(shard)

    def _look(self) -> None:
        """Asks the shards when their next job is due: what was pushed a moment ago may not have woken this yet.

        Raises:
            RedisUnavailable
        """
        leased = [shard for shard in self._hand.broker.shards if shard.lease.current is not None]
        held = self._hand.dispatcher.unclaimed(leased)
        replies = self._client.run_many([shard.in_flight.refresh_call() for shard, _ in held])
        for (shard, version), reply in zip(held, replies, strict=True):
            if isinstance(reply, LeaseLost):
                self._hand.broker.maintenance.check(shard)
            elif isinstance(reply, RedisUnavailable):
                raise reply
            elif not isinstance(reply, Exception):
                state = shard.in_flight.read_state(reply)
                self._hand.dispatcher.note_state(shard, version, state.delay, paused=state.paused, levels=state.levels)

    def _chosen(self, jobs: list[ConsumerJob], caller: Caller) -> list[ConsumerJob]:
        """The jobs that the caller gets. A solo one comes alone."""
        with self._hand.lock:
            if caller.is_cancelled or self._hand.is_closed:
                self.give_back(jobs)
                return []
            self._callers.discard(caller)
            solo = next((job for job in jobs if job._is_solo), None)
            if solo is None or len(jobs) == 1:
                return jobs
            # The others must not be in flight any more when the solo one may end the process: now, not later.
            try:
                self._hand.release_all([job.receipt for job in jobs if job is not solo])
            except RedisUnavailable:  # it is not known whether they are: so nobody gets any
                self.give_back(jobs)
                raise
            return [solo]

    def _take_ready(self, limit: int, finished: list[str], shards: Sequence[Shard]) -> list[ConsumerJob]:
        """Acknowledges, and takes what is ready: of these shards, which are claimed, or what was taken ahead, or of one
        shard, and only if that has not enough of others as well.
        """
        # A waiter may have claimed an empty shard while a job was taken ahead: so these come first.
        jobs = self._taken_ahead(limit)
        if len(jobs) >= limit:
            self._unclaim(shards)
            shards = ()
        elif not shards:
            shards = self._hand.dispatcher.pick_many(1, ())
        while shards or finished:
            try:
                jobs += self._take_with(finished, shards, limit - len(jobs))
            except LowqError:
                if not jobs:
                    raise
                break  # what came before is in hand, and must not be forgotten
            finished[:] = [receipt for receipt in finished if receipt in self._hand.held]  # those without an answer
            if not shards or finished or len(jobs) >= limit:
                break
            shards = self._hand.dispatcher.pick_many(limit - len(jobs), ())
        return jobs

    def _take_with(self, finished: Sequence[str], shards: Sequence[Shard], room: int) -> list[ConsumerJob]:
        with self._hand.lock:
            if self._hand.is_closed:  # meanwhile
                self._unclaim(shards)
                return []
            outage = self._hand.broker.outage
            begun = outage.begun
            jobs, errors, trouble = self._exchange(finished, shards, room)
            trouble = next((error for error in errors if error and not isinstance(error, LeaseLost)), trouble)
            if trouble is None:
                outage.end(begun)
            elif not jobs:
                raise trouble
            return jobs

    def _exchange(
        self, finished: Sequence[str], shards: Sequence[Shard], room: int
    ) -> tuple[list[ConsumerJob], list[Exception | None], BaseException | None]:
        """Acknowledges jobs and takes up to ``room`` from shards, which are claimed, in one write. Returns what has
        come, the errors of the acknowledgements, and that of takes without an answer.

        Should only the replies be lost, the acknowledgements are repeated, and the next take of a shard brings what it
        took again.
        """
        hand, jobs = self._hand, list[ConsumerJob]()

        def received(shard: Shard, delivery: Delivery) -> None:
            self.unanswered.discard(shard)
            jobs.extend(self._received(shard, delivery))

        def lost(shard: Shard) -> None:
            self.unanswered.discard(shard)
            hand.lost(shard)

        try:
            acks = hand.acks(finished)
            share, odd = divmod(room, max(len(shards), 1))
            takes = [(shard, shard.dispatch.wakes) for shard in shards]
            calls: list[Call[Any]] = [sent.report.call for sent in acks]
            calls += [shard.in_flight.take_call(share + (number < odd)) for number, shard in enumerate(shards)]
            self.unanswered.update(shards)
            replies = hand.client.run_many(calls)
            errors = [hand.note(sent, reply) for sent, reply in zip(acks, replies, strict=False)]
            trouble = read_takes(self._client, hand.dispatcher, takes, replies[len(acks) :], received, lost)
            if trouble is not None and not isinstance(trouble, RedisUnavailable):
                raise trouble  # by a signal's handler
            return jobs, errors, trouble
        finally:
            self._unclaim(shards)

    def _received(self, shard: Shard, delivery: Delivery) -> list[ConsumerJob]:
        """Keeps what a take has brought. What can't be decoded of it goes to the morgue as it is."""
        hand, lease = self._hand, delivery.lease
        hand.forget_earlier(shard, lease.token)
        hand.forget_uncertain(delivery.jobs)
        taken, delivery.jobs = delivery.jobs, []  # the caller has them
        receipts = hand.add(shard, delivery, [(job.id, job.retry_count) for job in taken]) if taken else []
        jobs = [
            ConsumerJob(job.id, job.payloads, job.retry_count, receipt, lease.fence, self._consumer, delivery.is_solo)
            for job, receipt in zip(taken, receipts, strict=True)
        ]
        if delivery.undecodable:
            jobs = self._bury_undecodable(shard, delivery, jobs)
        merge = hand.options.merge_function
        return jobs if merge is None else [job for job in jobs if self._merge(merge, job)]

    def _bury_undecodable(self, shard: Shard, delivery: Delivery, jobs: list[ConsumerJob]) -> list[ConsumerJob]:
        async def write(shard: Shard, reports: Sequence[Report]) -> None:
            shard.in_flight.write(reports)

        spoilt = {item.id for item in delivery.undecodable}
        try:
            at_once(bury_undecodable(shard, delivery.undecodable, self._config, write))
        except RedisUnavailable:  # all that was taken of these ids waits again, and comes again
            self.give_back([job for job in jobs if job.id in spoilt])
            return [job for job in jobs if job.id not in spoilt]
        self._hand.forget([job.receipt for job in jobs if not job.payloads])
        return [job for job in jobs if job.payloads]

    def _merge(self, merge: MergeFunction, job: ConsumerJob) -> bool:
        """Whether a merge function leaves any of the job's payloads, which are then those. A job that it can't merge
        fails; one without any left is done.
        """
        try:
            try:
                job.payloads = merged(merge, job.payloads)
            except Exception as error:
                log.exception("queue %r, id %r: its payloads can't be merged, so it fails", self._hand.queue, job.id)
                self._hand.fail(job.receipt, error)
                return False
            if not job.payloads:
                self._hand.ack(job.receipt)
        except RedisUnavailable:  # it waits again, and comes again
            self.give_back([job])
            return False
        except NotTaken:
            return False
        return bool(job.payloads)

    # --- taking ahead ---

    def ack(self, receipt: str) -> None:
        """The job is done. The next job may be taken ahead."""
        hand = self._hand
        hand.check_process()
        with hand.lock:
            held = hand.find(receipt)
            jobs, errors, _ = self._exchange([receipt], self._shard_ahead(), 1)
            if jobs:
                self._ahead += jobs
                self.ahead_until = monotonic() + AHEAD_SECONDS
                hand.watch(self.ahead_until)
                if self._callers:  # since this was sent
                    hand.dispatcher.nudge()
            for error in errors:
                hand.check(held, error)
        self._acked_at = monotonic()

    def _shard_ahead(self) -> Sequence[Shard]:
        """The shard, claimed, of which a job is to be taken ahead; or none."""
        if self._one_by_one < AHEAD_AFTER or self._ahead or self._hand.is_closed:
            return ()
        if self._callers:  # they are woken for a shard, not for a job that was taken ahead
            return ()
        return self._hand.dispatcher.pick_many(1, ())

    def _taken_ahead(self, limit: int) -> list[ConsumerJob]:
        """Up to so many of the jobs that were taken ahead: as if they were taken now."""
        if not self._ahead:
            return []
        with self._hand.lock:
            if self._hand.is_closed or self._hand.dispatcher.closed:
                return []
            some, self._ahead = self._ahead[:limit], self._ahead[limit:]
            jobs = self._surely_held(some)
            if self._hand.ttr < inf:
                deadline = self._hand.new_deadline()
                for job in jobs:
                    self._hand.held[job.receipt].deadline = deadline
            if len(jobs) < len(some):
                self.give_back([job for job in some if job not in jobs])
            return jobs

    def give_ahead_back(self) -> None:
        """Gives back what was taken ahead, as nobody has asked for it."""
        if self._ahead:
            self.give_back(self._ahead)
            self._ahead = []
        self.ahead_until = inf


def in_flight_of(client: Client, shard: Shard) -> list[tuple[str, int, int]]:
    """The jobs of a shard that Redis has in flight: id, delivery, retry_count."""
    raw = client.command("HGETALL", f"{shard.prefix}taken", key=shard.prefix)
    records = ((decode_id(job_id), record.split()) for job_id, record in zip(raw[::2], raw[1::2], strict=True))
    return [(job_id, int(delivery), int(count)) for job_id, (delivery, _, count, *_) in records]
