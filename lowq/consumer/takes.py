"""How a consumer takes jobs: from one shard after another, as its callers ask for them.

A shard is claimed for the time of a take alone; one with jobs in hand is *occupied*, and not given up before they are
reported. What a caller gets is surely its own: the same is asked of a delivery as before a worker's handler is called.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from typing import Any

from lowq.clock import now as monotonic
from lowq.consumer.in_hand import HeldDelivery
from lowq.consumer.job import ConsumerJob
from lowq.consumer.reports import Reports, seconds_of
from lowq.errors import ConfigError, ConsumerClosed, LeaseLost, LowqError, RedisUnavailable
from lowq.logs import get_log
from lowq.options import QueueOptions
from lowq.settings import Config
from lowq.shards.delivery import Delivery
from lowq.shards.shard import Shard
from lowq.store import Call, Client

log = get_log("lowq.consumer")

#: Jobs that one take may be asked for.
MAX_TAKEN = 10_000
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


class Takes(Reports):
    """The takes of a consumer."""

    def __init__(self, options: QueueOptions, config: Config, client: Client, ttr: float) -> None:
        super().__init__(options, config, client, ttr)
        self._failure: BaseException | None = None
        self._closed = False
        #: `quiet` was called, and set by that and by the end.
        self._is_quiet = False
        self._ended = threading.Event()
        #: Jobs that were taken with an acknowledgement, for the next `take`; and until when they are kept, monotonic.
        self._ahead: list[ConsumerJob] = []
        self._ahead_until = inf
        self._is_taking_ahead = False
        #: So many were taken one by one, each at once after an acknowledgement; and when the last of these was.
        self._one_by_one, self._acked_at = 0, -inf
        #: Those who are in `take` now.
        self._callers: set[Caller] = set()
        #: Shards of which a take got no answer, and none has since: something may be in flight that nobody knows of.
        self._unanswered: set[Shard] = set()

    @property
    def _shards(self) -> list[Shard]:
        """Those of the queue; the maintenance loop changes the list when the queue is resharded."""
        return self._broker.shards

    def take(self, limit: int = 1, timeout: float | timedelta | None = None) -> list[ConsumerJob]:
        """Up to ``limit`` jobs that are due, of different ids; the longest waiting shard first. Waits until there is
        one, for ``timeout`` seconds at most; None: however long it takes. Returns none when nothing came in time.

        While Redis is away it is waited for as well.

        Raises:
            ConsumerClosed. RedisUnavailable: there was no answer in time.
        """
        return self._take_here(lambda caller: self.take_for(caller, limit, timeout, []))

    def batches(self, limit: int, timeout: float | timedelta | None = None) -> Iterator[list[ConsumerJob]]:
        """One list of up to ``limit`` jobs after another, until the consumer is closed, or until nothing came for
        ``timeout`` seconds. Asking for the next acknowledges what was not reported otherwise of the last. Who leaves
        the loop has the last list in hand.

        Raises:
            As `take`.
        """
        finished: list[str] = []

        def take(caller: Caller) -> list[ConsumerJob]:
            return self.next_batch(caller, limit, timeout, finished)

        while jobs := self._take_here(take):
            finished += [job.receipt for job in jobs]
            yield jobs

    def _take_here(self, take: Callable[[Caller], list[ConsumerJob]]) -> list[ConsumerJob]:
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
        held = [job for job in jobs if self._is_held(job.receipt)]
        for job in held:
            self._taken.pending.pop(job.receipt, None)
        if len(held) < len(jobs):
            self.give_back(job for job in jobs if job not in held)
        return held

    def _give_back_interrupted(self) -> None:
        with self._lock:
            if os.getpid() != self._pid or self._closed:
                return
            ident = threading.get_ident()
            self._give_back_later([receipt for receipt, taker in self._taken.pending.items() if taker == ident])
            self._ahead = [job for job in self._ahead if job.receipt not in self._taken.unwanted]
            if not self._callers:  # otherwise it may be another thread that has claimed it
                for shard in self._shards:
                    if shard.dispatch.claimed_by is not None:
                        self._dispatcher.look_again(shard)
                        self._dispatcher.unclaim(shard)

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
        given: object = limit
        if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= MAX_TAKEN:
            raise ConfigError(f"limit={limit!r:.100} must be a whole number from 1 to {MAX_TAKEN:,}")
        now = monotonic()
        until = inf if timeout is None else now + seconds_of("timeout", timeout, least=0.0)
        self._one_by_one = self._one_by_one + 1 if limit == 1 and now - self._acked_at < AHEAD_GAP else 0
        self._callers.add(caller)
        try:
            # Who was cancelled before may have had its nudge taken by another, who did not find it among the callers.
            if caller.is_cancelled:
                return []
            return self._take_until(limit, until, finished, caller)
        finally:
            self._callers.discard(caller)

    def _pause(self, failures: int) -> float:
        """Seconds after so many failures in a row. In a cluster a shard rests whose primary does not answer, and others
        may have jobs.
        """
        return 0.05 if self._client.is_cluster else 0.05 * 2.0 ** min(failures, 5)

    def _take_until(self, limit: int, until: float, receipts: list[str], caller: Caller) -> list[ConsumerJob]:
        failures = 0
        has_looked = False  # in Redis, whether there is nothing indeed
        shards: Sequence[Shard] = ()
        while True:
            self._check_open()
            try:
                if has_looked:
                    self._look()
                jobs = self._take_ready(limit, receipts, shards)
                failures = 0
            except RedisUnavailable as error:
                self._broker.outage.begin(error)
                failures += 1
                if monotonic() >= until:
                    raise
                time.sleep(min(self._pause(failures), max(until - monotonic(), 0.0)))
                shards = ()
                continue
            if jobs or has_looked:
                return self._chosen(jobs, caller)
            if monotonic() >= until:
                has_looked, shards = True, ()
                continue
            shards = self._dispatcher.wait_many(1, until)
            is_for_others = any(one.is_cancelled for one in list(self._callers))
            if is_for_others or self._dispatcher.closed or self._failure is not None:
                if is_for_others:
                    time.sleep(0.001)  # that one may be in the middle of something
                self._dispatcher.nudge()  # who wakes is not always the one that was meant
            if self._dispatcher.closed or caller.is_cancelled:
                for shard in shards:
                    self._dispatcher.unclaim(shard)
                if not (self._is_quiet or self._closed or self._failure or caller.is_cancelled):
                    # An operator has made it quiet. Who takes in a loop must not spin.
                    self._ended.wait(min(max(until - monotonic(), 0.0), 0.5))
                    if monotonic() < until:
                        continue
                return []

    def _look(self) -> None:
        """Asks the shards when their next job is due: what was pushed a moment ago may not have woken this yet.

        Raises:
            RedisUnavailable
        """
        held = self._dispatcher.unclaimed([shard for shard in self._shards if shard.lease.current is not None])
        replies = self._client.run_many([shard.in_flight.refresh_call() for shard, _ in held])
        for (shard, wakes), reply in zip(held, replies, strict=True):
            if isinstance(reply, LeaseLost):
                self._broker.maintenance.check(shard)
            elif isinstance(reply, RedisUnavailable):
                raise reply
            elif not isinstance(reply, Exception):
                state = shard.in_flight.read_state(reply)
                self._dispatcher.refreshed(shard, wakes, state.delay, paused=state.paused, levels=state.levels)

    def cancel(self, caller: Caller) -> None:
        """Has a `take` return at once, with nothing: what it has got meanwhile waits again."""
        caller.is_cancelled = True
        self._dispatcher.nudge()

    def _chosen(self, jobs: list[ConsumerJob], caller: Caller) -> list[ConsumerJob]:
        """Those of the jobs that the caller gets, of which a solo one comes alone."""
        with self._lock:
            if caller.is_cancelled or self._closed:
                self.give_back(jobs)
                return []
            self._callers.discard(caller)
            solo = next((job for job in jobs if job._is_solo), None)
            if solo is None or len(jobs) == 1:
                return jobs
            # The others must not be in flight any more when the solo one may end the process: now, not later.
            others = [job.receipt for job in jobs if job is not solo]
            try:
                self._release(others)
            except RedisUnavailable:  # it is not known whether they are: so nobody gets any
                self.give_back(jobs)
                raise
            return [solo]

    def give_back(self, jobs: Iterable[ConsumerJob]) -> None:
        """These, which nobody has been given, wait again as soon as Redis answers."""
        with self._lock:
            self._give_back_later([job.receipt for job in jobs])

    def _take_ready(self, limit: int, finished: list[str], shards: Sequence[Shard]) -> list[ConsumerJob]:
        """Acknowledges, and takes what is ready: of these shards, which are claimed, or what was taken ahead, or of one
        shard, and only if that has not enough of others as well.
        """
        # Also with shards: who is told of what was taken ahead while it claims one, which then has nothing, is not told
        # again.
        jobs = self._taken_ahead(limit)
        if len(jobs) >= limit:
            for shard in shards:
                self._dispatcher.unclaim(shard)
            shards = ()
        elif not shards:
            shards = self._dispatcher.pick_many(1, ())
        while shards or finished:
            try:
                jobs += self._exchange(finished, shards, limit - len(jobs))
            except RedisUnavailable:
                if not jobs:
                    raise
                break  # what came before is in hand, and must not be forgotten
            finished[:] = [receipt for receipt in finished if receipt in self._taken]  # those without an answer
            if not shards or finished or len(jobs) >= limit:
                break
            shards = self._dispatcher.pick_many(limit - len(jobs), ())
        return jobs

    def _exchange(self, finished: Sequence[str], shards: Sequence[Shard], room: int) -> list[ConsumerJob]:
        """Acknowledges jobs and takes up to ``room`` from shards, which are claimed, in one write.

        Should only the replies be lost, the acknowledgements are repeated, and the next take of a shard brings what it
        took again.
        """
        with self._lock:
            try:
                if self._closed:  # meanwhile
                    return []
                acks = self._acks(finished)
                takes = _takes(shards, room)
                begun = self._broker.outage.begun
                self._unanswered.update(shards)
                replies = self._client.run_many([*(report.call for *_, report in acks), *(call for *_, call in takes)])
                trouble = self._note_acks(acks, replies[: len(acks)])
                jobs, taking_trouble = self._took(takes, replies[len(acks) :])
                trouble = trouble or taking_trouble
            finally:
                for shard in shards:
                    self._dispatcher.unclaim(shard)
            if trouble is not None and not jobs:
                raise trouble
            if trouble is None:
                self._broker.outage.end(begun)
        return jobs

    def _took(
        self, takes: Sequence[tuple[Shard, int, Call[Any]]], replies: Sequence[Any]
    ) -> tuple[list[ConsumerJob], RedisUnavailable | None]:
        """What takes have brought, and the error of those without an answer."""
        jobs: list[ConsumerJob] = []
        trouble: RedisUnavailable | None = None
        for (shard, wakes, _), reply in zip(takes, replies, strict=True):
            try:
                delivery = shard.in_flight.took(reply)
                self._unanswered.discard(shard)
                self._dispatcher.took(shard, wakes, delivery)
                jobs += self._received(shard, delivery)
            except LeaseLost:
                self._unanswered.discard(shard)
                self._lost(shard)
            except RedisUnavailable as error:
                trouble = trouble or error
                if self._client.is_cluster:
                    self._dispatcher.rest_for_failover(shard)
            except Exception as error:
                if error is not reply and not isinstance(error, ValueError | TypeError | LookupError):
                    raise  # by a signal's handler, and nothing that is wrong with the shard
                self._dispatcher.rest(shard, TROUBLE_SECONDS)
                log.error("%r rests for %g s: %s", shard, TROUBLE_SECONDS, error, extra={"event": "trouble"})
        return jobs, trouble

    # Who takes one job after the other would make two round trips for each: a take and an acknowledgement. So once
    # that has gone on for a while the acknowledgement takes the next job as well. Nobody else could have it: the shard
    # is this consumer's. Should the process die before that is asked for, it is charged as if it had been. Should
    # nobody ask for it, it waits again after AHEAD_SECONDS.

    def _shard_ahead(self) -> Sequence[Shard]:
        """The shard, claimed, of which a job is to be taken with an acknowledgement; or none."""
        if self._one_by_one < AHEAD_AFTER or self._ahead or self._closed or self._is_taking_ahead:
            return ()
        if self._callers:  # they are woken for a shard, not for a job that was taken ahead
            return ()
        return self._dispatcher.pick_many(1, ())

    def _keep_ahead(self, jobs: list[ConsumerJob]) -> None:
        self._ahead += jobs
        if jobs:
            self._ahead_until = monotonic() + AHEAD_SECONDS
            self._watch(self._ahead_until)
            if self._callers:  # since this was sent
                self._dispatcher.nudge()

    def _taken_ahead(self, limit: int) -> list[ConsumerJob]:
        """Up to so many of the jobs that were taken with acknowledgements: as if they were taken now."""
        if not self._ahead:
            return []
        with self._lock:
            if self._closed or self._dispatcher.closed:
                return []
            some, self._ahead = self._ahead[:limit], self._ahead[limit:]
            jobs = [job for job in some if self._is_held(job.receipt)]
            if self._ttr < inf:
                deadline = self._deadline()
                for job in jobs:
                    self._taken.touch(job.receipt, deadline)
            if len(jobs) < len(some):
                self._give_back_later([job.receipt for job in some if job not in jobs])
            return jobs

    def _is_held(self, receipt: str) -> bool:
        """Whether the job is surely this consumer's, and nothing of it has expired since it was taken."""
        held, now = self._taken.get(receipt), monotonic()
        if held is None or not held.is_current:
            return False
        delivery = held.delivery
        return delivery.is_held(held.shard.lease, now) and not delivery.has_expired(receipt[len(held.head) :], now)

    def _give_ahead_back(self) -> None:
        self._taken.unwanted.update(job.receipt for job in self._ahead)
        self._ahead.clear()

    def _received(self, shard: Shard, delivery: Delivery) -> list[ConsumerJob]:
        """Keeps what a take has brought. What can't be decoded of it goes to the morgue as it is."""
        token = delivery.lease.token
        self._taken.forget_earlier(shard, token)
        if self._taken.uncertain:  # an id that comes again is not in hand under an earlier receipt any more
            self._taken.forget_uncertain({job.id for job in delivery.jobs})
        jobs: list[ConsumerJob] = []
        if delivery.jobs:
            counts = {job.id: job.retry_count for job in delivery.jobs if job.retry_count != -1}
            held = HeldDelivery(shard, delivery, self._deadline(), counts)
            receipts, fence = self._taken.add(held, [job.id for job in delivery.jobs]), delivery.lease.fence
            jobs = [
                ConsumerJob(job.id, job.payloads, job.retry_count, receipt, fence, self, delivery.is_solo)
                for job, receipt in zip(delivery.jobs, receipts, strict=True)
            ]
            delivery.jobs = []  # the caller has them
        if delivery.undecodable:
            jobs = self._bury_undecodable(shard, delivery, jobs)
        merge = self._options.merge_function
        return jobs if merge is None else [job for job in jobs if self._merge(merge, job)]

    def ack(self, receipt: str) -> None:
        # It may take the next job in the same round trip.
        with self._lock:
            held, job_id = self._find(receipt)
            report = held.shard.in_flight.ack_report([job_id], held.delivery.number)
            shards = self._shard_ahead()
            try:
                takes = _takes(shards, 1)
                self._unanswered.update(shards)
                reply, *taken = self._client.run_many([report.call, *(call for *_, call in takes)])
                try:
                    self._note_report(receipt, held, report, reply, 0.0)
                finally:
                    if takes:
                        # What it brings may have to be acknowledged on the spot: that must not take ahead in its turn.
                        self._is_taking_ahead = True
                        try:
                            self._keep_ahead(self._took(takes, taken)[0])
                        finally:
                            self._is_taking_ahead = False
            finally:
                for shard in shards:
                    self._dispatcher.unclaim(shard)
        self._acked_at = monotonic()


def _takes(shards: Sequence[Shard], room: int) -> list[tuple[Shard, int, Call[Any]]]:
    """Calls that take up to ``room`` jobs from shards, with the wake-ups of each before that is sent."""
    share, odd = divmod(room, max(len(shards), 1))
    return [
        (shard, shard.dispatch.wakes, shard.in_flight.take_call(share + (number < odd)))
        for number, shard in enumerate(shards)
    ]
