"""A consumer: jobs of a queue out by hand, for code that is no worker.

::

    the caller       this object                Redis                      if the process dies here
    ----------       -----------                -----                      ------------------------
    take         --> claim a shard
                     take -------------------> ids move to `taken`         the lease runs out; the next owner restores
                     unclaim it                                            them, charged with a crash
    ack, fail,   --> report -----------------> one script each             done, or restored
    release, bury
                     the maintenance loop,
                     when ttr has passed -----> release, charged           restored
    close        --> release, surrender -----> everything waits again
    detach       --> detach -----------------> what is in flight stays so for a consumer with the same session

It is a broker and the caller's own code: a member that shares the shards with nodes and other consumers, woken by the
same messages. Unlike a node it may have several deliveries of a shard in hand, so a shard is claimed for the time of a
take alone; one with jobs in hand is *occupied*, and not given up before they are reported.

What is in hand is known here, by receipt, and guarded by one lock. Only what is known here can be reported. So when a
report is repeated after a lost reply, and Redis has nothing in flight under it any more, the first attempt got through.
"""

import atexit
import os
import random
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from types import TracebackType
from typing import Any, Literal, Self

from lowq.backend import Backend, Reading
from lowq.clock import now as monotonic
from lowq.codec import MAX_TIME, decode_id, future_delay
from lowq.codec.error_text import cut_error, dump_text
from lowq.consumer.in_hand import HeldDelivery, InHand
from lowq.consumer.job import ConsumerJob
from lowq.consumer.session import Session, checked_name
from lowq.errors import (
    ConfigError,
    ConsumerClosed,
    LeaseLost,
    LowqError,
    NotTaken,
    RedisUnavailable,
    SessionInUse,
)
from lowq.logs import describe, get_log
from lowq.observe.error_groups import ErrorCounts, ErrorRecorder
from lowq.options import MergeFunction, QueueOptions, merged
from lowq.retry import default_retry_in, is_exhausted
from lowq.settings import Config
from lowq.sharding import Layout, Layouts
from lowq.shards.broker import Broker, WorkerGroup
from lowq.shards.delivery import Delivery, Failure
from lowq.shards.in_flight import Report
from lowq.shards.lease import LeaseDenied
from lowq.shards.leases import log_restored
from lowq.shards.membership import Identity
from lowq.shards.scheduler import LagScheduler
from lowq.shards.shard import Shard, lag_of, shards_of
from lowq.shards.splitter import BalancedSplitter
from lowq.store import Call, Client
from lowq.version import VERSION

log = get_log("lowq.consumer")

#: Those that are open, for the end of the process: otherwise their shards would rest for as long as a lease.
_open: "weakref.WeakSet[Consumer]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for consumer in list(_open):
        try:
            consumer.close()
        except Exception:
            log.exception("consumer %s could not be closed at the end of the process", consumer.name)


#: Jobs that one take may be asked for.
MAX_TAKEN = 10_000
#: Jobs that one call gives back: it must not hold Redis for long.
RELEASED_TOGETHER = 100
#: Connections of a consumer: as many of its callers speak to Redis at the same moment.
CONNECTIONS = 4
#: Seconds until overdue jobs are looked for again when another thread is with them.
BUSY_SECONDS = 0.02
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


class Consumer:
    """Takes jobs of one queue, which the caller reports. Safe for threads. As a context manager it is closed in the
    end: what was not reported waits again.

    ``ttr``: seconds, or a timedelta, after which a job that was not reported is taken away, charged with a crash;
    None: that of the queue, never if it has none. ``session``: a consumer that comes back with it after `detach`,
    before the lease runs out, goes on with the shards and the jobs of the last one; a random one by default.

    Raises:
        ConfigError: ttr or session is none. SessionInUse: another consumer has the session. ShardsCountError,
        RedisUnavailable, RedisRefused
    """

    def __init__(
        self,
        backend: Backend,
        options: QueueOptions,
        *,
        ttr: float | timedelta | None = None,
        session: str | None = None,
    ) -> None:
        self.queue = options.queue_name
        ttr = options.ttr if ttr is None else _seconds("ttr", ttr)
        self._ttr = inf if ttr is None else ttr
        self._options = options
        self._config: Config = backend.config
        #: Guards what follows, and what is in flight of every shard.
        self._lock = threading.RLock()
        self._taken = InHand(lambda shard, is_occupied: self._dispatcher.occupy(shard, is_occupied=is_occupied))
        self._failure: BaseException | None = None
        self._closed = False
        #: `quiet` was called, and set by that and by the end.
        self._is_quiet = False
        self._ended = threading.Event()
        #: The process that it belongs to.
        self._pid = os.getpid()
        #: When the maintenance loop looks for overdue jobs next, and when the session is to be kept; monotonic.
        self._looks_at, self._session_due = inf, 0.0
        #: How many jobs it has reported: `Report.kind` -> number, and those that were buried because of it.
        self._reported = dict.fromkeys(("acked", "failed", "released", "buried", "exhausted"), 0)
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
        self._client = backend.connect(CONNECTIONS)
        maintenance_client = backend.connect(2, socket_timeout=max(self._config.lease_ttl / 4, 0.1))
        has_session = False
        try:
            self._session = Session(self._client, self._config, self.queue, session)
            self._session.acquire()
            has_session = True
            digest = self._session.digest
            nonce = digest + secrets.token_hex(4)
            events = backend.events_of(self.queue)
            failed = ErrorCounts(self._config.load_error)

            def make_shards(_queue: str, layout: Layout) -> list[Shard]:
                made = shards_of(
                    self._client, self._config, options, nonce, layout=layout, session=digest, events=events,
                    payload_type=backend.payload_type_of(self.queue),
                )  # fmt: skip
                for shard in made:
                    shard.in_flight.on_failed = failed.add
                return made

            routes = backend.routes_of(self.queue)
            layouts = Layouts.plain(options.shards_count) if routes is None else routes.layouts
            shards = [shard for layout in layouts.all for shard in make_shards(self.queue, layout)]
            served = {layout.name(self.queue): layout.shards_count for layout in layouts.all}
            ready = threading.Event()
            identity = Identity(nonce, served, 0, VERSION, session=f"{digest[6:]}:{digest[:6]}")
            self._broker = Broker(
                identity, shards, self._client, maintenance_client, self._config,
                splitter=BalancedSplitter(1), groups=[WorkerGroup([self.queue], [{self.queue: LagScheduler()}])],
                shares={}, activities=list, queues=[options],
                registrations=lambda: [backend.registration(self.queue, options.shards_count)],
                heartbeat_extras=[
                    ErrorRecorder(self._config.namespace, {self.queue: failed}, {self.queue: events} if events else {})
                ],
                layouts={self.queue: layouts}, make_shards=make_shards, read_layouts=backend.registered_layouts,
                more_details=self._details, chore=self._chore, on_ready=ready.set, on_command=self._on_command,
                on_fatal=self._on_fatal,
            )  # fmt: skip
            (self._dispatcher,) = self._broker.dispatchers
            adopted = self._adopt()
        except BaseException:
            maintenance_client.close()
            if has_session:
                with suppress(LowqError):
                    self._session.release()
            self._client.close()
            raise
        self.name = identity.name
        self._flush_events = backend.flush_events
        self._stop_export = backend.export_metrics(self._read_figures)
        self._broker.start()
        for shard in adopted:
            self._broker.maintenance.check(shard)  # for the listener, which hears of what the loop has got
        while not ready.wait(0.05) and self._failure is None:
            if not self._broker.maintenance.is_alive():
                break
        _open.add(self)
        log.info("consumer %s of queue %r starts", self.name, self.queue, extra={"event": "start", "queue": self.queue})
        self._check_open()

    @property
    def session(self) -> str:
        """Whoever makes a consumer with it after `detach` goes on with what this one has."""
        return self._session.name

    # --- life ---

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """What was taken and not reported waits again, at once and uncharged, and others get the shards. A `take` that
        waits in another thread returns with nothing. Should Redis be away, the leases run out by themselves.
        """
        if os.getpid() != self._pid:
            return  # it is the parent's
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._ended.set()
        self._broker.quiet()
        try:
            with self._lock:
                self._release(list(self._taken))
            self._broker.stop()
            self._broker.leave(0.0)
            self._session.release()
        except LowqError as error:
            log.warning("consumer %s could not give back what it has, its leases run out: %s", self.name, error)
        self._end()

    def quiet(self) -> None:
        """Takes nothing more: each `take` returns with nothing from here on. What was taken may still be reported, and
        the shards of which nothing is in hand are given up, so that others work them.
        """
        self._is_quiet = True
        self._broker.quiet()
        self._ended.set()
        self._dispatcher.nudge()

    def detach(self) -> None:
        """Leaves without giving anything back: what was taken stays so until the lease runs out. Whoever makes a
        consumer with this `session` before goes on with it.

        Raises:
            ConsumerClosed. RedisUnavailable: the leases run out by themselves.
        """
        with self._lock:
            self._check_open()
            self._closed = True
        self._ended.set()
        self._dispatcher.close()
        self._broker.stop()
        try:
            with self._lock:
                self._release([*self._taken.pending, *self._taken.unwanted])  # of which nobody has the receipts
                self._release_unanswered()
                self._broker.detach()
                self._taken.clear()
            self._session.release()
        finally:
            self._end()

    def _release_unanswered(self) -> None:
        """What takes without an answer have taken waits again."""
        for shard in self._unanswered:
            for job_id, number, _ in self._in_flight_of(shard):
                if f"{shard!r}:{number}:{job_id}" not in self._taken:
                    shard.in_flight.write([shard.in_flight.release_report([(job_id, None)], delivery=number)])

    def _in_flight_of(self, shard: Shard) -> list[tuple[str, int, int]]:
        """What Redis has in flight of a shard: id, delivery, retry_count."""
        raw = self._client.command("HGETALL", f"{shard.prefix}taken", key=shard.prefix)
        records = ((decode_id(job_id), record.split()) for job_id, record in zip(raw[::2], raw[1::2], strict=True))
        return [(job_id, int(delivery), int(count)) for job_id, (delivery, _, count, *_) in records]

    def _end(self) -> None:
        self._broker.stop()
        self._broker.close()
        self._client.close()
        self._stop_export()
        self._flush_events()
        _open.discard(self)
        log.info("consumer %s has ended", self.name, extra={"event": "stopped", "queue": self.queue})

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise ConsumerClosed(
                f"the consumer of queue {self.queue!r} belongs to another process; make one in this one"
            )
        if self._failure is not None:
            failure = self._failure
            if not self._closed:
                self.close()
            raise failure
        if self._closed:
            raise ConsumerClosed(f"the consumer of queue {self.queue!r} is closed; make a new one")

    def _on_fatal(self, error: BaseException) -> None:
        self._failure = error
        log.critical("consumer of queue %r ends: %s", self.queue, describe(error), extra={"event": "fatal"})
        self._dispatcher.nudge()

    def _on_command(self, command: str) -> None:
        """As for a node: it takes nothing more, and what it has it may still report. Who waits goes on waiting. A later
        release may send what is not known here.
        """
        if command not in ("quiet", "stop", "reload"):
            return
        log.warning("consumer %s has received a command: %s", self.name, command, extra={"event": "command"})
        self._broker.quiet()

    def _details(self) -> dict[str, Any]:
        strict = {"strict": True} if self._config.strict_shards_count else {}
        return {"kind": "consumer", "taken": len(self._taken), **strict}

    @property
    def _shards(self) -> list[Shard]:
        """Those of the queue; the maintenance loop changes the list when the queue is resharded."""
        return self._broker.shards

    # --- what the last one left ---

    def _adopt(self) -> list[Shard]:
        """Goes on with the shards of the last consumer with this session; what is in flight there is in hand then."""
        try:
            return [shard for shard in self._session.shards_left(list(self._shards)) if self._adopt_shard(shard)]
        except BaseException:
            # They are kept for whoever tries again with this session.
            held = [shard for shard in self._shards if shard.lease.current is not None]
            with suppress(LowqError):
                self._client.run_many([shard.lease.detach_call(self._config.lease_ttl) for shard in held])
            raise

    def _adopt_shard(self, shard: Shard) -> bool:
        """Whether the shard, and what is in flight there, is this consumer's now."""
        lease = shard.lease.acquire(self._config.lease_ttl)
        log_restored(shard, lease)
        if isinstance(lease, LeaseDenied):
            return False
        if not (lease.adopted or lease.resumed):  # resumed: the first attempt adopted it, and its reply was lost
            return True  # its lease had run out: what was in flight waits again
        for job_id, delivery, retry_count in self._in_flight_of(shard):
            shard.in_flight.adopt(delivery, [job_id])
            held = HeldDelivery(shard, shard.in_flight.token, delivery, self._deadline(), {job_id: retry_count})
            self._taken.add(held, [job_id])
        self._taken.pending.clear()  # the last one's caller has their receipts
        return True

    # --- taking ---

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
        until = inf if timeout is None else now + _seconds("timeout", timeout, least=0.0)
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

    def _give_back_later(self, receipts: Iterable[str]) -> None:
        self._taken.unwanted.update(receipt for receipt in receipts if receipt in self._taken)
        self._looks_at = 0.0
        self._broker.maintenance.nudge()

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
        if held is None or not held.is_current or now >= held.shard.lease.deadline:
            return False
        return not held.has_expired(receipt, now)

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
            held = HeldDelivery(shard, token, delivery.number, self._deadline(), counts, delivery.expires)
            receipts, fence = self._taken.add(held, [job.id for job in delivery.jobs]), delivery.lease.fence
            jobs = [
                ConsumerJob(job.id, job.payloads, job.retry_count, receipt, fence, self, delivery.is_solo)
                for job, receipt in zip(delivery.jobs, receipts, strict=True)
            ]
        if delivery.undecodable:
            jobs = self._bury_undecodable(shard, delivery, jobs)
        merge = self._options.merge_function
        return jobs if merge is None else [job for job in jobs if self._merge(merge, job)]

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

    # --- reporting ---

    def ack(self, receipt: str) -> None:
        """The job is done.

        Raises:
            NotTaken, RedisUnavailable: as of `ConsumerJob`. So of the others.
        """
        self._report(
            receipt, lambda held, job_id: held.shard.in_flight.ack_report([job_id], held.number),
            takes_ahead=True,
        )  # fmt: skip
        self._acked_at = monotonic()

    def release(self, receipt: str, delay: float | timedelta | None = None) -> None:
        """The job waits again, uncharged: for so many seconds, or as it did before."""
        seconds = None if delay is None else float(future_delay(delay))
        self._report(
            receipt,
            lambda held, job_id: held.shard.in_flight.release_report([(job_id, seconds)], delivery=held.number),
            seconds or 0.0,
        )

    def bury(self, receipt: str, reason: str = "") -> None:
        """The job goes to the morgue, with all payloads that were taken."""
        if not isinstance(reason, str):
            raise LowqError(f"bury: reason is a text, not {reason!r:.100}")
        data = self._error_bytes(reason)
        self._report(
            receipt, lambda held, job_id: held.shard.in_flight.bury_report([(job_id, data, ())], delivery=held.number)
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
                receipt, lambda held, _: held.shard.in_flight.fail_report([failure], delivery=held.number), wait
            )

    def touch(self, receipt: str, seconds: float | timedelta) -> None:
        """From now on the job has so many seconds until ``ttr`` passes. Without ``ttr`` it has for ever, as before."""
        more = _seconds("touch: seconds", seconds)
        with self._lock:
            self._find(receipt)
            if self._taken.deadline(receipt) < inf:
                deadline = monotonic() + more
                self._taken.touch(receipt, deadline)
                self._watch(deadline)

    def _report(
        self,
        receipt: str,
        report_of: Callable[[HeldDelivery, str], Report],
        delay: float = 0.0,
        *,
        takes_ahead: bool = False,
    ) -> None:
        """Reports a job in hand, which waits for ``delay`` seconds afterwards, if it does. ``takes_ahead``: it may take
        the next job in the same round trip.
        """
        with self._lock:
            held, job_id = self._find(receipt)
            report = report_of(held, job_id)
            shards = self._shard_ahead() if takes_ahead else ()
            try:
                takes = _takes(shards, 1)
                self._unanswered.update(shards)
                reply, *taken = self._client.run_many([report.call, *(call for *_, call in takes)])
                try:
                    self._note_report(receipt, held, report, reply, delay)
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
            (held.shard, some, held.shard.in_flight.ack_report(held.ids_of(some), held.number))
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

    def _read_figures(self) -> dict[str, Reading]:
        """What it says in figures, once a second. It does not wait for the lock."""
        reported = self._reported
        counters = {
            "processed": reported["acked"],
            "failed": reported["failed"],
            "released": reported["released"],
            "buried": reported["buried"] + reported["exhausted"],
        }
        held = sum(shard.lease.current is not None for shard in self._shards)
        lag = lag_of(self._shards, self.queue)
        gauges = {"shards": held, "taken": len(self._taken)}
        return {self.queue: Reading(counters, gauges | ({} if lag is None else {"lag": lag}))}

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
                report = held.shard.in_flight.release_report(ids, crashed=crashed, delivery=held.number)
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

    # --- in the maintenance loop ---

    def _chore(self, client: Client, now: float) -> float:
        """Keeps the session, and releases what is overdue; returns when it is to be called again."""
        if now >= self._session_due:
            try:
                is_mine = self._session.keep(client)
            except RedisUnavailable:
                return now + 0.2
            if not is_mine and self._failure is None:
                self._on_fatal(SessionInUse(f"another consumer of queue {self.queue!r} has this session by now"))
            self._session_due = now + self._config.lease_ttl / 3
        # Whoever has the lock may wait for Redis: this loop must not wait with it, or the leases would run out.
        if not self._lock.acquire(blocking=False):
            return now + BUSY_SECONDS
        try:
            if not self._closed:
                self._taken.forget_replaced()
                if now >= self._ahead_until or self._dispatcher.closed:
                    self._give_ahead_back()
                    self._ahead_until = inf
                self._release(list(self._taken.unwanted), client)
                self._release(self._taken.overdue(now), client, crashed=True)
            # What is taken from now on has more time than ttr: it need not call for another look.
            self._looks_at = min(self._taken.earliest_deadline(), now + self._ttr, self._ahead_until)
            return min(self._looks_at, self._session_due)
        except RedisUnavailable:
            return now + 0.2
        finally:
            self._lock.release()


def _takes(shards: Sequence[Shard], room: int) -> list[tuple[Shard, int, Call[Any]]]:
    """Calls that take up to ``room`` jobs from shards, with the wake-ups of each before that is sent."""
    share, odd = divmod(room, max(len(shards), 1))
    return [
        (shard, shard.dispatch.wakes, shard.in_flight.take_call(share + (number < odd)))
        for number, shard in enumerate(shards)
    ]


def check_consumer(ttr: object, session: object) -> None:
    """Whether a `Consumer` can be made with these, before anything is written for it.

    Raises:
        ConfigError
    """
    checked_name(session)
    if ttr is not None:
        _seconds("ttr", ttr)


def _seconds(name: str, value: object, least: float | None = None) -> float:
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
