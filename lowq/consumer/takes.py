"""How a consumer takes jobs: from one shard after another, as its callers ask for them.

A shard is claimed for the time of a take alone; one with jobs in hand is *occupied*, and not given up before they are
reported. What a caller gets is surely its own: the same is asked of a delivery as before a worker's handler is called.
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
from lowq.consumer.hand import ConsumerJob, Hand
from lowq.coroutines import at_once
from lowq.errors import ConsumerClosed, LeaseLost, LowqError, NotTaken, RedisUnavailable
from lowq.logs import get_log
from lowq.options import MergeFunction, merged, whole
from lowq.options import seconds as seconds_kind
from lowq.settings import Config
from lowq.shards.delivery import Delivery, Report
from lowq.shards.shard import Shard
from lowq.store import Call
from lowq.verdicts import bury_undecodable

log = get_log("lowq.consumer")

#: Jobs that one take may be asked for.
LIMIT = whole(1, 10_000)
TIMEOUT = seconds_kind(zero=True)
#: Seconds for which a shard is left alone when its script fails.
TROUBLE_SECONDS = 1.0
#: So many jobs taken one by one, each at once after the last was acknowledged: then the next one is taken with the
#: acknowledgement.
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
        #: Jobs that were taken with an acknowledgement, for the next `take`; and until when they are kept, monotonic.
        self._ahead: list[ConsumerJob] = []
        self.ahead_until = inf
        #: So many were taken one by one, each at once after an acknowledgement; and when the last of these was.
        self._one_by_one, self._acked_at = 0, -inf
        #: Those who are in `take` now.
        self._callers: set[Caller] = set()
        #: Shards of which a take got no answer, and none has since: something may be in flight that nobody knows of.
        self.unanswered: set[Shard] = set()

    @property
    def _shards(self) -> list[Shard]:
        """Those of the queue; the maintenance loop changes the list when the queue is resharded."""
        return self._hand.broker.shards

    def take_here(self, take: Callable[[Caller], list[ConsumerJob]]) -> list[ConsumerJob]:
        """Takes for whoever is in this thread. What an exception in the middle (Ctrl-C) leaves in nobody's hand waits
        again.
        """
        try:
            while True:
                jobs = take(Caller())
                held = self.receive(jobs)
                if held or not jobs:
                    return held
        except (LowqError, GeneratorExit):
            raise
        except BaseException:
            self._give_back_interrupted()
            raise

    def receive(self, jobs: list[ConsumerJob]) -> list[ConsumerJob]:
        """The caller gets these jobs: those that are surely this consumer's still. Its thread may have been frozen for
        longer than the lease since they were taken; then somebody else performs them.
        """
        surely = [job for job in jobs if self._is_held(job.receipt)]
        for job in surely:
            if (held := self._hand.held.get(job.receipt)) is not None:
                held.taker = None
        if len(surely) < len(jobs):
            self.give_back([job for job in jobs if job not in surely])
        return surely

    def _give_back_interrupted(self) -> None:
        with self._hand.lock:
            if os.getpid() != self._hand.pid or self._hand.is_closed:
                return
            ident = threading.get_ident()
            pending = {receipt for receipt, held in self._hand.held.items() if held.taker == ident}
            self._hand.give_back(pending)
            self._ahead = [job for job in self._ahead if job.receipt not in pending]
            if not self._callers:  # otherwise it may be another thread that has claimed it
                for shard in self._shards:
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

    def _take_until(self, limit: int, until: float, receipts: list[str], caller: Caller) -> list[ConsumerJob]:
        failures = 0
        has_looked = False  # in Redis, whether there is nothing indeed
        shards: Sequence[Shard] = ()
        while True:
            self._hand.check_open()
            try:
                if has_looked:
                    self._look()
                jobs = self._take_ready(limit, receipts, shards)
                failures = 0
            except RedisUnavailable as error:
                self._hand.broker.outage.begin(error)
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
            shards = self._hand.dispatcher.wait_many(1, until)
            is_for_others = any(one.is_cancelled for one in list(self._callers))
            if is_for_others or self._hand.dispatcher.closed or self._hand.failure is not None:
                if is_for_others:
                    time.sleep(0.001)  # that one may be in the middle of something
                self._hand.dispatcher.nudge()  # who wakes is not always the one that was meant
            if self._hand.dispatcher.closed or caller.is_cancelled:
                for shard in shards:
                    self._hand.dispatcher.unclaim(shard)
                if not (self.is_quiet or self._hand.is_closed or self._hand.failure or caller.is_cancelled):
                    # An operator has made it quiet. Who takes in a loop must not spin.
                    self.ended.wait(min(max(until - monotonic(), 0.0), 0.5))
                    if monotonic() < until:
                        continue
                return []

    def _look(self) -> None:
        """Asks the shards when their next job is due: what was pushed a moment ago may not have woken this yet.

        Raises:
            RedisUnavailable
        """
        held = self._hand.dispatcher.unclaimed([shard for shard in self._shards if shard.lease.current is not None])
        replies = self._client.run_many([shard.in_flight.refresh_call() for shard, _ in held])
        for (shard, wakes), reply in zip(held, replies, strict=True):
            if isinstance(reply, LeaseLost):
                self._hand.broker.maintenance.check(shard)
            elif isinstance(reply, RedisUnavailable):
                raise reply
            elif not isinstance(reply, Exception):
                state = shard.in_flight.read_state(reply)
                self._hand.dispatcher.note_state(shard, wakes, state.delay, paused=state.paused, levels=state.levels)

    def cancel(self, caller: Caller) -> None:
        """Has a `take` return at once, with nothing: what it has got meanwhile waits again."""
        caller.is_cancelled = True
        self._hand.dispatcher.nudge()

    def _chosen(self, jobs: list[ConsumerJob], caller: Caller) -> list[ConsumerJob]:
        """Those of the jobs that the caller gets, of which a solo one comes alone."""
        with self._hand.lock:
            if caller.is_cancelled or self._hand.is_closed:
                self.give_back(jobs)
                return []
            self._callers.discard(caller)
            solo = next((job for job in jobs if job._is_solo), None)
            if solo is None or len(jobs) == 1:
                return jobs
            # The others must not be in flight any more when the solo one may end the process: now, not later.
            others = [job.receipt for job in jobs if job is not solo]
            try:
                self._hand.release_all(others)
            except RedisUnavailable:  # it is not known whether they are: so nobody gets any
                self.give_back(jobs)
                raise
            return [solo]

    def give_back(self, jobs: Sequence[ConsumerJob]) -> None:
        """These, which nobody has been given, wait again as soon as Redis answers."""
        self._hand.give_back([job.receipt for job in jobs])

    def _take_ready(self, limit: int, finished: list[str], shards: Sequence[Shard]) -> list[ConsumerJob]:
        """Acknowledges, and takes what is ready: of these shards, which are claimed, or what was taken ahead, or of one
        shard, and only if that has not enough of others as well.
        """
        # Also with shards: who is told of what was taken ahead while it claims one, which then has nothing, is not told
        # again.
        jobs = self._taken_ahead(limit)
        if len(jobs) >= limit:
            for shard in shards:
                self._hand.dispatcher.unclaim(shard)
            shards = ()
        elif not shards:
            shards = self._hand.dispatcher.pick_many(1, ())
        while shards or finished:
            try:
                jobs += self._take_with(finished, shards, limit - len(jobs))
            except RedisUnavailable:
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
                for shard in shards:
                    self._hand.dispatcher.unclaim(shard)
                return []
            begun = self._hand.broker.outage.begun
            jobs, errors, trouble = self._exchange(finished, shards, room)
            trouble = next((error for error in errors if isinstance(error, RedisUnavailable)), trouble)
            if trouble is not None and not jobs:
                raise trouble
            if trouble is None:
                self._hand.broker.outage.end(begun)
            return jobs

    def _exchange(
        self, finished: Sequence[str], shards: Sequence[Shard], room: int
    ) -> tuple[list[ConsumerJob], list[LowqError | None], RedisUnavailable | None]:
        """Acknowledges jobs and takes up to ``room`` from shards, which are claimed, in one write. Returns what has
        come, the errors of the acknowledgements, and that of takes without an answer.

        Should only the replies be lost, the acknowledgements are repeated, and the next take of a shard brings what it
        took again.
        """
        hand = self._hand
        try:
            acks = hand.acks(finished)
            share, odd = divmod(room, max(len(shards), 1))
            takes = [
                (shard, shard.dispatch.wakes, shard.in_flight.take_call(share + (number < odd)))
                for number, shard in enumerate(shards)
            ]
            self.unanswered.update(shards)
            calls: list[Call[Any]] = [*(sent.report.call for sent in acks), *(call for *_, call in takes)]
            replies = hand.client.run_many(calls)
            errors = [hand.note(sent, reply) for sent, reply in zip(acks, replies, strict=False)]
            jobs, trouble = self._took(takes, replies[len(acks) :])
            return jobs, errors, trouble
        finally:
            for shard in shards:
                hand.dispatcher.unclaim(shard)

    def _took(
        self, takes: Sequence[tuple[Shard, int, Call[Any]]], replies: Sequence[Any]
    ) -> tuple[list[ConsumerJob], RedisUnavailable | None]:
        """What takes have brought, and the error of those without an answer."""
        jobs: list[ConsumerJob] = []
        trouble: RedisUnavailable | None = None
        for (shard, wakes, _), reply in zip(takes, replies, strict=True):
            try:
                delivery = shard.in_flight.read_delivery(reply)
                self.unanswered.discard(shard)
                self._hand.dispatcher.note_delivery(shard, wakes, delivery)
                jobs += self._received(shard, delivery)
            except LeaseLost:
                self.unanswered.discard(shard)
                self._hand.lost(shard)
            except RedisUnavailable as error:
                trouble = trouble or error
                if self._client.has_several_primaries:
                    self._hand.dispatcher.rest_for_failover(shard)
            except Exception as error:
                if error is not reply and not isinstance(error, ValueError | TypeError | LookupError):
                    raise  # by a signal's handler, and nothing that is wrong with the shard
                self._hand.dispatcher.rest(shard, TROUBLE_SECONDS)
                log.error("%r rests for %g s: %s", shard, TROUBLE_SECONDS, error, extra={"event": "trouble"})
        return jobs, trouble

    # Who takes one job after the other would make two round trips for each: a take and an acknowledgement. So once
    # that has gone on for a while the acknowledgement takes the next job as well. Nobody else could have it: the shard
    # is this consumer's. Should the process die before that is asked for, it is charged as if it had been. Should
    # nobody ask for it, it waits again after AHEAD_SECONDS.

    def _shard_ahead(self) -> Sequence[Shard]:
        """The shard, claimed, of which a job is to be taken with an acknowledgement; or none."""
        if self._one_by_one < AHEAD_AFTER or self._ahead or self._hand.is_closed:
            return ()
        if self._callers:  # they are woken for a shard, not for a job that was taken ahead
            return ()
        return self._hand.dispatcher.pick_many(1, ())

    def _keep_ahead(self, jobs: list[ConsumerJob]) -> None:
        self._ahead += jobs
        if jobs:
            self.ahead_until = monotonic() + AHEAD_SECONDS
            self._hand.watch(self.ahead_until)
            if self._callers:  # since this was sent
                self._hand.dispatcher.nudge()

    def _taken_ahead(self, limit: int) -> list[ConsumerJob]:
        """Up to so many of the jobs that were taken with acknowledgements: as if they were taken now."""
        if not self._ahead:
            return []
        with self._hand.lock:
            if self._hand.is_closed or self._hand.dispatcher.closed:
                return []
            some, self._ahead = self._ahead[:limit], self._ahead[limit:]
            jobs = [job for job in some if self._is_held(job.receipt)]
            if self._hand.ttr < inf:
                deadline = self._hand.new_deadline()
                for job in jobs:
                    self._hand.held[job.receipt].deadline = deadline
            if len(jobs) < len(some):
                self._hand.give_back([job.receipt for job in some if job not in jobs])
            return jobs

    def _is_held(self, receipt: str) -> bool:
        """Whether the job is in hand, and surely this consumer's."""
        held = self._hand.held.get(receipt)
        return held is not None and held.is_sure()

    def give_ahead_back(self) -> None:
        """What was taken ahead waits again, as nobody has asked for it."""
        if self._ahead:
            self.give_back(self._ahead)
            self._ahead = []
        self.ahead_until = inf

    def _received(self, shard: Shard, delivery: Delivery) -> list[ConsumerJob]:
        """Keeps what a take has brought. What can't be decoded of it goes to the morgue as it is."""
        hand, lease = self._hand, delivery.lease
        hand.forget_earlier(shard, lease.token)
        hand.forget_uncertain({job.id for job in delivery.jobs})
        jobs: list[ConsumerJob] = []
        if delivery.jobs:
            receipts = hand.add(shard, delivery, [(job.id, job.retry_count) for job in delivery.jobs])
            jobs = [
                ConsumerJob(
                    job.id, job.payloads, job.retry_count, receipt, lease.fence, self._consumer, delivery.is_solo
                )
                for job, receipt in zip(delivery.jobs, receipts, strict=True)
            ]
            delivery.jobs = []  # the caller has them
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

    def ack(self, receipt: str) -> None:
        """The job is done. It may take the next job in the same round trip."""
        hand = self._hand
        with hand.lock:
            held = hand.find(receipt)
            jobs, errors, _ = self._exchange([receipt], self._shard_ahead(), 1)
            self._keep_ahead(jobs)
            for error in errors:
                hand.check(held, error)
        self._acked_at = monotonic()
