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
same messages. Unlike a node it may have several deliveries of a shard in hand (`takes`, `hand`).

It has a session: the name under which the next one comes back to what it had, held by one consumer at a time::

    Redis: the session's key        says which start of a consumer has it, for as long as a lease
           owner of a shard         begins with the session's digest: so the next start knows what the last one had
"""

import atexit
import os
import secrets
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from hashlib import blake2b
from math import inf
from types import TracebackType
from typing import Any, Self

from lowq.backend import Backend
from lowq.consumer.hand import Hand
from lowq.consumer.takes import Caller, Taker, in_flight_of
from lowq.errors import ConfigError, LowqError, RedisUnavailable, SessionInUse
from lowq.job import ConsumerJob
from lowq.logs import describe, get_log
from lowq.observe.error_groups import ErrorCounts, ErrorRecorder
from lowq.observe.health import Reading
from lowq.options import QueueOptions
from lowq.options import seconds as seconds_kind
from lowq.settings import Config
from lowq.sharding import Layout, Layouts
from lowq.shards.broker import Broker, WorkerGroup
from lowq.shards.delivery import Delivery
from lowq.shards.lease import LeaseDenied
from lowq.shards.membership import Identity
from lowq.shards.scheduler import LagScheduler
from lowq.shards.shard import Shard, lag_of, log_restored, shards_of
from lowq.shards.splitter import BalancedSplitter
from lowq.store import Client, Command, registry
from lowq.store.keys import session_key
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


TTR = seconds_kind()
#: Connections of a consumer: as many of its callers speak to Redis at the same moment.
CONNECTIONS = 4
#: Seconds until overdue jobs are looked for again when another thread is with them.
BUSY_SECONDS = 0.02


class Session:
    """The session of a consumer. ``name``: of the one to continue on this queue; None: a random one.

    Raises:
        ConfigError: the name is none.
    """

    def __init__(self, client: Client, config: Config, queue: str, name: object) -> None:
        self.name = checked_name(name)
        #: Whether there may have been a consumer with it before.
        self._is_named = name is not None
        #: Stands for it in what the shards say of their owners.
        self.digest = blake2b(f"{queue}\0{self.name}".encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        self._client = client
        self._queue = queue
        self._seconds = config.lease_ttl
        self._key = session_key(config.namespace, self.digest)
        self._instance = secrets.token_hex(8)

    def acquire(self) -> None:
        """Gets it, for as long as a lease. It raises `SessionInUse`, and what calls raise."""
        got = self._client.call(registry.session(self._key, self._instance, self._seconds))
        if not got.is_own:
            raise SessionInUse(
                f"another consumer of queue {self._queue!r} has the session {self.name!r}: it is free once that one "
                f"has detached or was closed, or {got.seconds:.1f} s after its process has died"
            )

    def keep(self, client: Client) -> bool:
        """Keeps it for as long as a lease from now; whether it was still this consumer's. The call is not repeated."""
        (reply,) = client.run_many([registry.session(self._key, self._instance, self._seconds)], repeats=0)
        if isinstance(reply, Exception):
            raise reply
        return bool(reply.is_own)

    def release(self) -> None:
        """The next consumer with this name need not wait. Should Redis be away, it has to."""
        self._client.run_many([registry.session(self._key, self._instance, None)])

    def shards_left(self, shards: Sequence[Shard]) -> list[Shard]:
        """The shards that the last consumer with this session had; nobody has had them since."""
        if not self._is_named:
            return []
        owners: list[Any] = self._client.run_many(
            [Command(shard.prefix, "HGET", f"{shard.prefix}meta", "owner") for shard in shards]
        )
        if error := next((owner for owner in owners if isinstance(owner, Exception)), None):
            raise error
        is_mine = [bool(owner) and owner.startswith(self.digest.encode()) for owner in owners]
        return [shard for shard, mine in zip(shards, is_mine, strict=True) if mine]


def checked_name(name: object) -> str:
    """The name of a session, a random one for None. It raises `ConfigError`."""
    if name is None:
        return secrets.token_hex(16)
    if not isinstance(name, str) or not 1 <= len(name) <= 512:
        raise ConfigError(f"session={name!r:.100} must be a text of 1 to 512 characters")
    return name


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
        seconds = options.ttr if ttr is None else TTR.check("", "ttr", ttr)
        self.queue = options.queue_name
        self._config, self._client = backend.config, backend.connect(CONNECTIONS)
        self._hand = Hand(options, self._config, self._client, inf if seconds is None else seconds, self.close)
        self._taker = Taker(self._hand, self._config, self)
        #: When the session is to be kept, monotonic.
        self._session_due = 0.0
        with ExitStack() as undo:
            undo.callback(self._client.close)
            self._session = Session(self._client, self._config, self.queue, session)
            self._session.acquire()
            undo.callback(self._session.release)
            maintenance_client = backend.connect(2, socket_timeout=max(self._config.lease_ttl / 4, 0.1))
            undo.callback(maintenance_client.close)
            digest = self._session.digest
            nonce = digest + secrets.token_hex(4)
            failed = ErrorCounts(self._config.load_error)
            events = backend.events_of(self.queue).joined_by(failed)

            def make_shards(_queue: str, layout: Layout) -> list[Shard]:
                return shards_of(
                    self._client, self._config, options, nonce, layout=layout, node=identity.name, session=digest,
                    events=events, payload_type=backend.payload_type_of(self.queue),
                )  # fmt: skip

            routes = backend.registrations.routes_of(self.queue)
            layouts = Layouts.plain(options.shards_count) if routes is None else routes.layouts
            served = {layout.name(self.queue): layout.shards_count for layout in layouts.all}
            identity = Identity(nonce, served, 0, VERSION, session=f"{digest[6:]}:{digest[:6]}")
            shards = [shard for layout in layouts.all for shard in make_shards(self.queue, layout)]
            ready = threading.Event()
            self._broker = Broker(
                identity, shards, self._client, maintenance_client, self._config,
                splitter=BalancedSplitter(1), groups=[WorkerGroup([self.queue], [{self.queue: LagScheduler()}])],
                shares={}, activities=list, queues=[options],
                registrations=lambda: [backend.registrations.call(self.queue, options.shards_count)],
                heartbeat_extras=[ErrorRecorder(self._config.namespace, {self.queue: failed}, backend.events_of)],
                layouts={self.queue: layouts}, make_shards=make_shards, read_layouts=backend.registrations.layouts_in,
                more_details=self._details, chore=self._chore, on_ready=ready.set, on_command=self._on_command,
                on_fatal=self._on_fatal,
            )  # fmt: skip
            (self._dispatcher,) = self._broker.dispatchers
            self._hand.broker, self._hand.dispatcher = self._broker, self._dispatcher
            adopted = self._adopt()
            undo.pop_all()
        self.name = identity.name
        self._flush_events = backend.flush_events
        self._stop_export = backend.export_metrics(self._read_figures)
        self._broker.start()
        for shard in adopted:
            self._broker.maintenance.check(shard)  # for the listener, which hears of what the loop has got
        while not (ready.wait(0.05) or self._hand.failure) and self._broker.maintenance.is_alive():
            pass
        _open.add(self)
        log.info("consumer %s of queue %r starts", self.name, self.queue, extra={"event": "start", "queue": self.queue})
        self._hand.check_open()

    @property
    def session(self) -> str:
        """A consumer made with it after `detach` goes on with what this one has."""
        return self._session.name

    # --- jobs ---

    def take(self, limit: int = 1, timeout: float | timedelta | None = None) -> list[ConsumerJob]:
        """Up to ``limit`` jobs that are due, of different ids; the longest waiting shard first. Waits until there is
        one, and for Redis while it is away, for ``timeout`` seconds at most; None: however long it takes. Returns none
        when nothing came in time.

        Raises:
            ConsumerClosed. RedisUnavailable: there was no answer in time.
        """
        return self._taker.take_here(lambda caller: self._taker.take_for(caller, limit, timeout, []))

    def batches(self, limit: int, timeout: float | timedelta | None = None) -> Iterator[list[ConsumerJob]]:
        """One list of up to ``limit`` jobs after another, until the consumer is closed, or until nothing came for
        ``timeout`` seconds. Asking for the next list acknowledges what was not reported otherwise of the last, which
        stays in hand when the loop is left.

        Raises:
            As `take`.
        """
        finished: list[str] = []

        def take(caller: Caller) -> list[ConsumerJob]:
            return self._taker.next_batch(caller, limit, timeout, finished)

        while jobs := self._taker.take_here(take):
            finished += [job.receipt for job in jobs]
            yield jobs

    def ack(self, receipt: str) -> None:
        """The job is done.

        Raises:
            NotTaken, RedisUnavailable: as of `ConsumerJob`. So of the others.
        """
        self._taker.ack(receipt)

    def release(self, receipt: str, delay: float | timedelta | None = None) -> None:
        """The job waits again, uncharged: for so many seconds, or as it did before."""
        self._hand.release(receipt, delay)

    def bury(self, receipt: str, reason: str = "") -> None:
        """The job goes to the morgue, with all payloads that were taken."""
        self._hand.bury(receipt, reason)

    def fail(self, receipt: str, error: BaseException | str = "", delay: float | timedelta | None = None) -> None:
        """The job is charged a retry. ``delay``: seconds until then; by default they grow from retry to retry. Without
        any left its oldest payload goes to the morgue.
        """
        self._hand.fail(receipt, error, delay)

    def touch(self, receipt: str, seconds: float | timedelta) -> None:
        """From now on the job has so many seconds until ``ttr`` passes. Without ``ttr`` it has for ever, as before."""
        self._hand.touch(receipt, seconds)

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
        if os.getpid() != self._hand.pid:
            return  # it is the parent's
        with self._hand.lock:
            if self._hand.is_closed:
                return
            self._hand.is_closed = True
        self._taker.ended.set()
        self._broker.quiet()
        try:
            with self._hand.lock:
                self._hand.release_all(list(self._hand.held))
            self._broker.stop()
            self._broker.maintenance.leave(0.0)
            self._session.release()
        except LowqError as error:
            log.warning("consumer %s could not give back what it has, its leases run out: %s", self.name, error)
        self._end()

    def quiet(self) -> None:
        """Takes nothing more: each `take` returns with nothing from here on. What was taken may still be reported, and
        the shards of which nothing is in hand are given up, so that others work them.
        """
        self._taker.is_quiet = True
        self._broker.quiet()
        self._taker.ended.set()
        self._dispatcher.nudge()

    def detach(self) -> None:
        """Leaves without giving anything back: what was taken stays so until the lease runs out. A consumer made with
        this `session` before that goes on with it.

        Raises:
            ConsumerClosed. RedisUnavailable: the leases run out by themselves.
        """
        self._hand.check_process()
        with self._hand.lock:
            self._hand.check_open()
            self._hand.is_closed = True
        self._taker.ended.set()
        self._dispatcher.close()
        self._broker.stop()
        try:
            with self._hand.lock:
                self._hand.release_all(self._hand.unreceived())
                self._taker.release_unanswered()
                self._broker.maintenance.detach()
                self._hand.held.clear()
            self._session.release()
        finally:
            self._end()

    def _end(self) -> None:
        self._broker.stop()
        self._broker.close()
        self._client.close()
        self._stop_export()
        self._flush_events()
        _open.discard(self)
        log.info("consumer %s has ended", self.name, extra={"event": "stopped", "queue": self.queue})

    def _on_fatal(self, error: BaseException) -> None:
        self._hand.failure = error
        log.critical("consumer of queue %r ends: %s", self.queue, describe(error), extra={"event": "fatal"})
        self._dispatcher.nudge()

    def _on_command(self, sent: Mapping[str, str]) -> None:
        """As for a node: it takes nothing more, and may still report what it has. Waiting takes go on waiting. Commands
        of a later release are not known here.
        """
        if sent["do"] not in ("quiet", "stop", "reload"):
            return
        log.warning("consumer %s has received a command: %s", self.name, sent["do"], extra={"event": "command"})
        self._broker.quiet()

    def _details(self) -> dict[str, Any]:
        strict = {"strict": True} if self._config.strict_shards_count else {}
        return {"kind": "consumer", "taken": len(self._hand.held), **strict}

    # --- what the last one left ---

    def _adopt(self) -> list[Shard]:
        """Goes on with the shards of the last consumer with this session; what is in flight there is in hand then."""
        try:
            return [shard for shard in self._session.shards_left(list(self._broker.shards)) if self._adopt_shard(shard)]
        except BaseException:
            # They are kept for whoever tries again with this session.
            held = [shard for shard in self._broker.shards if shard.lease.current is not None]
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
        for job_id, delivery, retry_count in in_flight_of(self._client, shard):
            shard.in_flight.adopt_jobs(delivery, [job_id])
            adopted = Delivery(delivery, lease, [], None, paused=False)
            (receipt,) = self._hand.add(shard, adopted, [(job_id, retry_count)])
            self._hand.held[receipt].taker = None  # the last one's caller has it
        return True

    def _read_figures(self) -> dict[str, Reading]:
        """Its figures for Graphite and StatsD, once a second. Does not wait for the lock."""
        reported = self._hand.reported
        counters: dict[str, float] = {
            "processed": reported["acked"], "failed": reported["failed"], "released": reported["released"],
            "buried": reported["buried"] + reported["exhausted"],
        }  # fmt: skip
        held = sum(shard.lease.current is not None for shard in self._broker.shards)
        lag = lag_of(self._broker.shards, self.queue)
        gauges = {"shards": held, "taken": len(self._hand.held)}
        return {self.queue: Reading(counters, gauges | ({} if lag is None else {"lag": lag}))}

    # --- in the maintenance loop ---

    def _chore(self, client: Client, now: float) -> float:
        """Keeps the session, and releases what is overdue; returns when it is to be called again."""
        if now >= self._session_due:
            try:
                is_mine = self._session.keep(client)
            except RedisUnavailable:
                return now + 0.2
            if not is_mine and self._hand.failure is None:
                self._on_fatal(SessionInUse(f"another consumer of queue {self.queue!r} has this session by now"))
            self._session_due = now + self._config.lease_ttl / 3
        # Whoever has the lock may wait for Redis: this loop must not wait with it, or the leases would run out.
        hand, taker = self._hand, self._taker
        if not hand.lock.acquire(blocking=False):
            return now + BUSY_SECONDS
        try:
            deadline = inf
            if not hand.is_closed:
                hand.forget_replaced()
                if now >= taker.ahead_until or self._dispatcher.closed:
                    taker.give_ahead_back()
                deadline = hand.release_due(now, client)
            # What is taken from now on has more time than ttr: it need not call for another look.
            hand.looks_at = min(deadline, now + hand.ttr, taker.ahead_until)
            return min(hand.looks_at, self._session_due)
        except RedisUnavailable:
            return now + 0.2
        finally:
            hand.lock.release()


def check_consumer(ttr: object, session: object) -> None:
    """Checks these for a `Consumer`, before anything is written for it. It raises `ConfigError`."""
    checked_name(session)
    TTR.check("", "ttr", ttr)
