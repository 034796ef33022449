"""The keeper: leases, heartbeats, refreshes, early acknowledgements. Who holds what.

One thread per node, with a connection of its own that waits for nothing else::

    every lease_ttl / 3     renew all leases held, in one write; say that the node lives
    when its time has come  try for a wanted shard that somebody else has, or had
    every poll_interval     ask the idle shards anew, should a wake-up have been lost
    every 10 ms, while jobs of a trip are finished and another of it is being performed: acknowledge the finished

A lease, seen from here, lasts from *before* its last renewal was sent. Past that the threads start nothing more of
the shard. A lease that ran out while Redis was away, and that nobody took, is resumed with the same token.
"""

import json
import logging
import os
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowq.connection import Call, Client, Refusal
from lowq.dispatch import Dispatcher
from lowq.errors import LeaseLost, RedisUnavailable, ShardsCountError
from lowq.keys import nodes_key
from lowq.listener import Listener
from lowq.outage import Outage
from lowq.seat import Seat
from lowq.shard import Held, Lease, Shard

log = logging.getLogger(__name__)

#: Seconds between two looks at trips with finished, unacknowledged jobs.
EARLY_ACK_INTERVAL = 0.01
#: Scripts in one write of the keeper.
_WRITE = 250
#: A node that was silent for this many lease_ttl is forgotten.
SILENT_TTLS = 3


@dataclass(frozen=True, slots=True)
class Identity:
    """What a node says of itself."""

    nonce: str
    queues: list[str]
    threads: int
    version: str
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    started_at: float = field(default_factory=time.time)

    @property
    def name(self) -> str:
        return f"{self.host}:{self.pid}:{self.nonce[:6]}"


class Keeper(threading.Thread):
    """Keeps the leases of the wanted shards. Only it gets and lengthens them; a worker thread that is told that a lease
    is lost takes note of that (`Shard.lose`), and asks for a `check`.
    """

    def __init__(
        self,
        client: Client,
        namespace: str,
        identity: Identity,
        shards: Sequence[Shard],
        dispatcher: Dispatcher,
        listener: Listener,
        seats: Sequence[Seat],
        outage: Outage,
        *,
        lease_ttl: float,
        poll_interval: float,
        registrations: Sequence[Call],
        on_fatal: Callable[[BaseException], object],
    ) -> None:
        super().__init__(name="lowq-keeper", daemon=True)
        self._client = client
        self._namespace = namespace
        self._identity = identity
        self._shards = list(shards)
        self._dispatcher = dispatcher
        self._listener = listener
        self._seats = seats
        self._outage = outage
        self._lease_ttl = lease_ttl
        self._poll_interval = poll_interval
        self._registrations = list(registrations)
        self._on_fatal = on_fatal
        #: When to try for a shard, monotonic. Only for the keeper's own thread; others ask through `_asked`.
        self._tries = dict.fromkeys(self._shards, 0.0)
        self._asked: deque[tuple[Shard, float]] = deque()
        #: When Redis was last known to be away, monotonic.
        self._troubled = -float("inf")
        self._next_renewal = 0.0
        self._next_refresh = 0.0
        self._held = -1
        #: Shards that this node held last, and those that others were seen to hold.
        self._mine: set[Shard] = set()
        self._theirs: set[Shard] = set()
        #: The first error of a tick that concerned only some shards.
        self._trouble: Exception | None = None
        self._armed = False
        self._nudge = threading.Event()
        self._closed = threading.Event()
        self._quiet = False

    # --- from other threads ---

    def free(self, shard: Shard, delay: float) -> None:
        """Somebody gives up the shard, in so many seconds: try for it then."""
        if shard.lease is None:
            self._ask(shard, time.monotonic() + delay)

    def check(self, shard: Shard) -> None:
        """A thread was told that the lease is lost, or doubts it: find out whose it is."""
        self._ask(shard, 0.0)

    def _ask(self, shard: Shard, at: float) -> None:
        self._asked.append((shard, at))
        self._nudge.set()

    def arm(self) -> None:
        """A thread performs while finished jobs of its trip are not acknowledged yet."""
        if not self._armed:
            self._armed = True
            self._nudge.set()

    # --- the loop ---

    def run(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._on_fatal(error)

    def _run(self) -> None:
        quiet_ticks = 0
        failures = 0
        said = ""
        while not self._closed.is_set():
            try:
                wait = self._tick(time.monotonic())
                if self._armed:
                    quiet_ticks = 0 if self._acknowledge_early() else quiet_ticks + 1
                    if quiet_ticks > 50:
                        self._armed, quiet_ticks = False, 0
                    wait = min(wait, EARLY_ACK_INTERVAL)
                failures, said = 0, ""
            except RedisUnavailable as error:
                failures += 1
                if failures == 1:
                    # Perhaps only this connection was cut while it rested: on a fresh one that is soon known.
                    wait = 0.0
                else:
                    self._outage.begin(error)
                    self._troubled = time.monotonic()
                    wait = random.uniform(0.1, 0.5)
            except ShardsCountError:
                raise
            except Exception as error:
                if str(error) != said:  # not once a second for as long as it lasts
                    said = str(error)
                    log.exception("keeping the leases failed; trying again")
                wait = 1.0
            expected = time.monotonic() + wait
            if self._nudge.wait(wait):
                self._nudge.clear()
            else:
                self._warn_when_late(time.monotonic() - expected)

    def _tick(self, now: float) -> float:
        """Does what is due; returns the seconds until something is due again.

        Raises:
            The first error of any shard, after everything else was done.
        """
        self._trouble = None
        while self._asked:
            shard, at = self._asked.popleft()
            self._tries[shard] = at
        if self._quiet:
            self._give_up_resting()
        renewing = now >= self._next_renewal
        if renewing:
            self._renew()
        self._acquire([shard for shard, at in self._tries.items() if at <= now], now)
        if self._say_what_is_held() or renewing:
            self._heartbeat()
        if renewing:
            self._next_renewal = now + self._lease_ttl / 3
            if self._trouble is None:
                self._outage.end()
        if now >= self._next_refresh:
            self._refresh()
            self._next_refresh = now + self._poll_interval
        if self._trouble is not None:
            raise self._trouble
        tries = min(self._tries.values(), default=float("inf"))
        return max(min(self._next_renewal, self._next_refresh, tries) - time.monotonic(), 0.0)

    def _say_what_is_held(self) -> bool:
        """Whether that has changed."""
        held = sum(shard.lease is not None for shard in self._shards)
        if held == self._held:
            return False
        self._held = held
        others = "" if self._quiet or not self._theirs else f"; standing by for {len(self._theirs)} of other nodes"
        log.info(
            "holding %d of %d shards%s", held, len(self._shards), others,
            extra={"event": "shards", "held": held, "shards": len(self._shards)},
        )  # fmt: skip
        return True

    def _ask_all(
        self, shards: list[Shard], call: Callable[[Shard], Call], note: Callable[[Shard, Any, float], None]
    ) -> None:
        """Runs one call per shard, in few writes. ``note`` gets the shard, its reply, and the monotonic time before it
        was sent; an error of one shard keeps no other from being heard.

        Raises:
            RedisUnavailable: there was no answer for any shard. ShardsCountError
        """
        for start in range(0, len(shards), _WRITE):
            part = shards[start : start + _WRITE]
            sent = time.monotonic()
            replies = self._client.run_many([call(shard) for shard in part], repeats=0)
            if all(isinstance(reply, RedisUnavailable) for reply in replies):
                raise replies[0]
            for shard, reply in zip(part, replies, strict=True):
                try:
                    note(shard, reply, sent)
                except ShardsCountError:
                    raise
                except Exception as error:
                    self._trouble = self._trouble or error

    def _renew(self) -> None:
        # Shards whose lease ran out, or was lost, go to `_acquire`: it tells which, and resumes when nobody came
        # between.
        for shard in self._shards:
            if shard.lease is None and shard not in self._tries and not self._quiet:
                self._tries[shard] = 0.0
        held = [shard for shard in self._shards if shard.lease is not None]
        self._ask_all(held, lambda shard: shard.renew_call(self._lease_ttl), self._renewed)

    def _renewed(self, shard: Shard, reply: Any, sent: float) -> None:
        if isinstance(reply, LeaseLost):
            self._tries[shard] = 0.0
            return
        if isinstance(reply, Exception):
            raise reply
        late = shard.deadline <= time.monotonic()
        shard.deadline = sent + self._lease_ttl
        if late:  # the threads have left it alone since
            self._dispatcher.wake(shard)

    def _acquire(self, shards: list[Shard], now: float) -> None:
        # When Redis was away for longer than a lease, all leases have run out though their owners live. They get a
        # head start, and whoever comes first doesn't charge the others' jobs with a crash.
        troubled = now - self._troubled
        if troubled < self._lease_ttl / 3:
            for shard in shards:
                if shard not in self._mine:
                    self._tries[shard] = self._troubled + self._lease_ttl / 3
            shards = [shard for shard in shards if shard in self._mine]
        charge = troubled > self._lease_ttl and self._client.server_age() > self._lease_ttl
        gained: list[Shard] = []
        waiting: list[Shard] = []

        def note(shard: Shard, reply: Any, sent: float) -> None:
            self._tries[shard] = time.monotonic() + 1.0  # should the reply be an error
            had = shard.lease
            lease = shard.acquired(reply, sent + self._lease_ttl)
            if isinstance(lease, Held):
                self._stand_by(shard, lease, had)
                waiting.append(shard)
                return
            del self._tries[shard]
            self._mine.add(shard)
            self._theirs.discard(shard)
            gained.append(shard)
            _tell_of_restored(shard, lease)

        try:
            self._ask_all(shards, lambda shard: shard.acquire_call(self._lease_ttl, charge=charge), note)
        finally:
            self._listener.holds(gained)
            self._listener.waits(waiting)
            for shard in gained:
                self._dispatcher.wake(shard)

    def _stand_by(self, shard: Shard, lease: Held, had: Lease | None) -> None:
        if had is not None:
            log.warning(
                "%r: the lease was lost to another node", shard, extra={"event": "lease_lost", **_of(shard)}
            )  # fmt: skip
        self._mine.discard(shard)
        self._theirs.add(shard)
        # No longer than a lease, whatever Redis says: its clock may have stepped back.
        seconds = min(lease.seconds, self._lease_ttl)
        self._tries[shard] = time.monotonic() + seconds + random.uniform(0.01, 0.05)

    def _give_up_resting(self) -> None:
        """A quiet node keeps only the shards that it still performs something of."""
        self._tries.clear()
        resting = [shard for shard, _ in self._dispatcher.unclaimed()]

        def note(shard: Shard, reply: Any, _sent: float) -> None:
            if isinstance(reply, Exception) and not isinstance(reply, LeaseLost):
                raise reply
            shard.lose()

        self._ask_all(resting, lambda shard: shard.surrender_call(0.0), note)

    def _refresh(self) -> None:
        wakes = dict(self._dispatcher.unclaimed())

        def note(shard: Shard, reply: Any, _sent: float) -> None:
            if isinstance(reply, LeaseLost):
                self._tries[shard] = 0.0
                return
            if isinstance(reply, Exception):
                raise reply
            delay = None if reply[1] is None else reply[1] / 1e6
            self._dispatcher.refreshed(shard, wakes[shard], delay, paused=bool(reply[2]))

        self._ask_all(list(wakes), Shard.refresh_call, note)

    def _acknowledge_early(self) -> bool:
        """Whether any thread performs with finished jobs behind it."""
        busy = False
        calls: list[Call] = []
        now = time.monotonic()
        for seat in self._seats:
            performing = seat.performing
            if performing is None or not performing.shard.unacknowledged:
                continue
            busy = True
            if now - performing.since >= EARLY_ACK_INTERVAL:
                delivery, already = seat.early
                if delivery != performing.shard.delivery:
                    delivery, already = performing.shard.delivery, 0
                call, count = performing.shard.early_ack_call(already)
                if count:
                    calls.append(call)
                    seat.early = (delivery, already + count)
        if calls:
            self._client.run_many(calls, repeats=0)
        return busy

    def _heartbeat(self, *, goodbye: bool = False) -> None:
        me = self._identity
        now = time.monotonic()
        held: dict[str, list[int]] = {}
        for shard in self._shards:
            if shard.lease is not None:
                held.setdefault(shard.queue, []).append(shard.index)
        seats = [
            None
            if seat.performing is None
            else {
                "queue": seat.performing.shard.queue,
                "shard": seat.performing.shard.index,
                "ids": seat.performing.ids[:3],
                "seconds": round(now - seat.performing.since, 3),
            }
            for seat in self._seats
        ]
        says = {
            "host": me.host,
            "pid": me.pid,
            "version": me.version,
            "started_at": me.started_at,
            "queues": me.queues,
            "threads": me.threads,
            "shards": held,
            "performing": seats,
            "quiet": self._quiet,
        }
        text = "" if goodbye else json.dumps(says)
        silent = self._lease_ttl * SILENT_TTLS
        call = Call("heartbeat", nodes_key(self._namespace), ["", me.name, text, silent])
        # The queues with it: Redis may have lost its data since they were registered.
        replies = self._client.run_many([call, *self._registrations], repeats=0)
        for said, reply in zip([call, *self._registrations], replies, strict=True):
            if isinstance(reply, Refusal):
                raise ShardsCountError(str(said.args[1]), int(reply.detail), int(said.args[2]))
            if isinstance(reply, Exception):
                self._trouble = self._trouble or reply

    def _warn_when_late(self, late: float) -> None:
        if late > self._lease_ttl / 3:
            # Whatever held the GIL may have ended when the keeper gets to look.
            since = time.monotonic() - late
            busy = []
            for seat in self._seats:
                performing, performed = seat.performing, seat.performed
                if performed is not None and performed[1] >= since and performed[0] is not performing:
                    busy.append(f"{performed[0]} (ended)")
                if performing is not None:
                    busy.append(str(performing))
            log.warning(
                "the keeper ran %.1f s late: something holds the GIL or froze the process. Being performed: %s",
                late,
                "; ".join(busy) or "nothing",
                extra={"event": "keeper_late", "seconds": late},
            )

    # --- the end ---

    def quiet(self) -> None:
        """Gives up the shards that rest, and says in the heartbeats that the node takes nothing more."""
        self._quiet = True
        self._nudge.set()

    def stop(self) -> None:
        """Renews nothing any more. Joins the thread when it can."""
        self._closed.set()
        self._nudge.set()
        if self.is_alive():
            self.join(self._lease_ttl / 3)

    def leave(self, seconds: float) -> None:
        """Gives up all leases, after `stop`, and says goodbye. Shards with jobs in flight are left to run out in
        ``seconds``, and their jobs are not charged.

        Raises:
            RedisUnavailable
        """
        held = [shard for shard in self._shards if shard.lease is not None]
        for start in range(0, len(held), _WRITE):
            part = held[start : start + _WRITE]
            self._client.run_many([shard.surrender_call(seconds) for shard in part])
            for shard in part:
                shard.lose()
        self._heartbeat(goodbye=True)

    def close(self) -> None:
        """Closes the keeper's connection, after `leave`."""
        self._client.close()


def _tell_of_restored(shard: Shard, lease: Lease) -> None:
    if lease.restored:
        log.warning(
            "%r: %d jobs that an owner left in flight wait again", shard, lease.restored,
            extra={"event": "restored", "jobs": lease.restored, **_of(shard)},
        )  # fmt: skip
    for job_id in lease.poisoned:
        log.error(
            "%r: id %r is buried as poison: its process died too often with it in flight", shard, job_id,
            extra={"event": "poison", "id": job_id, **_of(shard)},
        )  # fmt: skip


def _of(shard: Shard) -> dict[str, Any]:
    return {"queue": shard.queue, "shard": shard.index}
