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
same messages. Unlike a node it may have several deliveries of a shard in hand (`takes`, `reports`).
"""

import atexit
import os
import secrets
import threading
import weakref
from contextlib import suppress
from datetime import timedelta
from math import inf
from types import TracebackType
from typing import Any, Self

from lowq.backend import Backend, Reading
from lowq.codec import decode_id
from lowq.consumer.in_hand import HeldDelivery
from lowq.consumer.reports import seconds_of
from lowq.consumer.session import Session, checked_name
from lowq.consumer.takes import Takes
from lowq.errors import (
    ConsumerClosed,
    LowqError,
    RedisUnavailable,
    SessionInUse,
)
from lowq.logs import describe, get_log
from lowq.observe.error_groups import ErrorCounts, ErrorRecorder
from lowq.options import QueueOptions
from lowq.sharding import Layout, Layouts
from lowq.shards.broker import Broker, WorkerGroup
from lowq.shards.delivery import Delivery
from lowq.shards.lease import LeaseDenied
from lowq.shards.leases import log_restored
from lowq.shards.membership import Identity
from lowq.shards.scheduler import LagScheduler
from lowq.shards.shard import Shard, lag_of, shards_of
from lowq.shards.splitter import BalancedSplitter
from lowq.store import Client
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


#: Connections of a consumer: as many of its callers speak to Redis at the same moment.
CONNECTIONS = 4
#: Seconds until overdue jobs are looked for again when another thread is with them.
BUSY_SECONDS = 0.02


class Consumer(Takes):
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
        ttr = options.ttr if ttr is None else seconds_of("ttr", ttr)
        super().__init__(options, backend.config, backend.connect(CONNECTIONS), inf if ttr is None else ttr)
        #: When the session is to be kept, monotonic.
        self._session_due = 0.0
        maintenance_client = backend.connect(2, socket_timeout=max(self._config.lease_ttl / 4, 0.1))
        has_session = False
        try:
            self._session = Session(self._client, self._config, self.queue, session)
            self._session.acquire()
            has_session = True
            digest = self._session.digest
            nonce = digest + secrets.token_hex(4)
            failed = ErrorCounts(self._config.load_error)
            events = backend.events_of(self.queue).joined_by(failed)

            def make_shards(_queue: str, layout: Layout) -> list[Shard]:
                return shards_of(
                    self._client, self._config, options, nonce, layout=layout, session=digest, events=events,
                    payload_type=backend.payload_type_of(self.queue),
                )  # fmt: skip

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
                    ErrorRecorder(self._config.namespace, {self.queue: failed}, backend.events_of)
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
            adopted = Delivery(delivery, lease, [], None, paused=False)
            held = HeldDelivery(shard, adopted, self._deadline(), {job_id: retry_count})
            self._taken.add(held, [job_id])
        self._taken.pending.clear()  # the last one's caller has their receipts
        return True

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


def check_consumer(ttr: object, session: object) -> None:
    """Whether a `Consumer` can be made with these, before anything is written for it.

    Raises:
        ConfigError
    """
    checked_name(session)
    if ttr is not None:
        seconds_of("ttr", ttr)
