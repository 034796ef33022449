"""The leases of a node: gets the shards that it wants, keeps them, gives up the others.

::

    wanted, somebody else's     stands by: tries when the lease runs out, or was given up
    wanted, held                renewed every lease_ttl / 3
    held, not wanted any more   leaves: no thread picks it; given up as soon as none works it
    neither                     nothing
    to be replaced              given up, wanted or not, and got anew if wanted; no thread picks it meanwhile

The holder counts a lease from *before* its last renewal was sent. After its end the threads begin nothing more of the
shard until it is acquired again. If nobody has it, it is resumed: with the same token, for what is in hand, and a
higher fence for what begins, as a failover may have lost that somebody had the shard meanwhile.

A replica that becomes the primary may lack the last renewals: there a lease ends before its holder stops. So when
another server serves a shard than before, it is left to its holder for a whole lease. By then the holder has stopped,
or it has renewed the lease at the new primary.
"""

import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lowq.clock import Clock
from lowq.clock import now as clock_now
from lowq.codec import decode_id
from lowq.errors import LeaseLost, RedisUnavailable, ShardsCountError
from lowq.logs import get_log
from lowq.shards.dispatcher import Dispatcher
from lowq.shards.lease import Lease, LeaseDenied, seconds_since_outage
from lowq.shards.shard import Shard, log_restored
from lowq.shards.wakeups import Listener, MissedWakeUps
from lowq.store import Address, Call, Client

log = get_log("lowq.shards")

#: Scripts in one write.
_WRITE = 250


class Leases:
    """Who holds what, of the shards that this node serves. Belongs to the maintenance loop."""

    def __init__(
        self, client: Client, shards: Sequence[Shard], dispatchers: Mapping[str, Dispatcher], listener: Listener,
        lease_ttl: float, *, poll_interval: float, resumes: bool = False, clock: Clock = clock_now,
    ) -> None:  # fmt: skip
        """``resumes``: the process has leases from before an exec: they are resumed, or given up if not wanted."""
        self._clock = clock
        #: The first error that concerned only some shards, since `clear_trouble`.
        self.trouble: Exception | None = None
        self._client = client
        #: More may come to it, see `Broker`.
        self._shards = shards
        #: By queue.
        self._dispatchers = dispatchers
        self._listener = listener
        self._lease_ttl = lease_ttl
        self._missed = MissedWakeUps(poll_interval, clock)
        self._wanted: set[Shard] = set()
        #: Monotonic time at which to try for a wanted shard that is not held, or whose lease is in doubt.
        self._tries: dict[Shard, float] = dict.fromkeys(shards, 0.0) if resumes else {}
        #: When Redis was last known to be away, monotonic.
        self._away_at = -float("inf")
        #: Shards that this node held last, and those that others were seen to hold.
        self._mine, self._theirs = set[Shard](), set[Shard]()
        #: Shards whose lease is to be renewed now, for what that says of jobs that are to end.
        self.asked: set[Shard] = set()
        #: Whether a renewal has named such jobs, since `MaintenanceLoop` has looked.
        self.names_stopping = False
        #: Shards to be surrendered, with the tokens of the leases that it is about.
        self._to_replace: dict[Shard, str] = {}
        #: Which server serves the shards, where that may change, and since when it is known to.
        self._primaries: dict[Shard, tuple[Address, float]] = {}
        self._logged = (-1, -1)
        self._began = self._clock()

    @property
    def held(self) -> list[Shard]:
        """The shards that this node holds, as far as it knows."""
        return [shard for shard in self._shards if shard.lease.current is not None]

    @property
    def next_try(self) -> float:
        """Monotonic time at which a lease is to be tried for."""
        return min(self._tries.values(), default=float("inf"))

    def clear_trouble(self) -> Exception | None:
        """The first error that concerned only some shards, if there was one."""
        trouble, self.trouble = self.trouble, None
        return trouble

    def was_away(self) -> None:
        """Redis doesn't answer."""
        self._away_at = self._clock()

    def _dispatched(self, shards: Iterable[Shard]) -> list[tuple[Dispatcher, list[Shard]]]:
        """The shards by the dispatcher that hands them out."""
        groups: dict[Dispatcher, list[Shard]] = {}
        for shard in shards:
            groups.setdefault(self._dispatchers[shard.queue], []).append(shard)
        return list(groups.items())

    # --- wishes ---

    def want(self, shards: Iterable[Shard]) -> None:
        """Has the node hold these shards and no others."""
        wanted = set(shards)
        dropped, added = self._wanted - wanted, wanted - self._wanted
        self._wanted = wanted
        for shard in dropped:
            self._tries.pop(shard, None)
            self._theirs.discard(shard)
        for dispatcher, some in self._dispatched(shard for shard in dropped if shard.lease.current is not None):
            dispatcher.leave(some)
        for dispatcher, some in self._dispatched(shard for shard in added if shard.lease.current is not None):
            dispatcher.stay(some)
        self._tries |= {shard: 0.0 for shard in added if shard.lease.current is None}
        self._listener.ignore([shard for shard in dropped if shard.lease.current is None])

    def leave_sealed(self) -> None:
        """Gives up the shards that are sealed."""
        self.want(shard for shard in self._wanted if not shard.is_sealed)

    def try_for(self, shard: Shard, at: float) -> None:
        """Tries for its lease at that monotonic time: it may be free then, or it is in doubt whether it is held."""
        if shard in self._wanted or shard.lease.current is not None:
            self._tries[shard] = at

    def replace_lease(self, shard: Shard, token: str) -> None:
        """Gives its lease up and gets another, if its token is still that one. The shard must be suspended."""
        self._to_replace[shard] = token

    # --- what is sent to Redis ---

    def _ask_all(
        self, shards: list[Shard], call: Callable[[Shard], Call[Any]], note: Callable[[Shard, Any, float], object], *,
        repeats: int = 0,
    ) -> None:  # fmt: skip
        """Runs one call per shard, in few writes. ``note`` gets the shard, its reply, and the monotonic time before it
        was sent; an error of one shard keeps no other from being heard.

        Raises:
            RedisUnavailable: there was no answer for any shard.
        """
        for start in range(0, len(shards), _WRITE):
            part = shards[start : start + _WRITE]
            sent = self._clock()
            replies = self._client.run_many([call(shard) for shard in part], repeats=repeats)
            if all(isinstance(reply, RedisUnavailable) for reply in replies):
                raise replies[0]
            for shard, reply in zip(part, replies, strict=True):
                try:
                    note(shard, reply, sent)
                except ShardsCountError as error:
                    # The registry is read with each heartbeat, and followed, or put right.
                    if not shard.is_miscounted:
                        shard.is_miscounted = True
                        log.error(
                            "%r was made for %d shards, and the registry says %d: it is tried again", shard,
                            error.existing, error.wanted, extra={"event": "shards_count", **_of(shard)},
                        )  # fmt: skip
                except Exception as error:
                    self.trouble = self.trouble or error

    def renew(self, *, only_asked: bool = False) -> None:
        """Lengthens all leases held, or those that were asked for.

        Raises:
            RedisUnavailable: the next renewal of all does it.
        """
        # The set stays the same one: what another thread asks for meanwhile is added to it.
        asked = set(self.asked)
        self.asked.clear()
        if not only_asked:
            # Those whose lease ran out, or was lost, go to `acquire`, which resumes it when nobody came between.
            for shard in self._wanted:
                if shard.lease.current is None and shard not in self._tries:
                    self._tries[shard] = 0.0
            # Of all: a shard may be wanted only when its holder is gone, with the primary.
            for shard in self._shards:
                self._free_at(shard)
        shards = [shard for shard in self.held if not only_asked or shard in asked]
        self._ask_all(shards, lambda shard: shard.lease.renew_call(self._lease_ttl), self._renewed)

    def _renewed(self, shard: Shard, reply: Any, sent: float) -> None:
        if self._is_lost(shard, reply):
            return
        if shard.lease.deadline > self._clock():
            shard.lease.deadline = sent + self._lease_ttl
        else:
            self._tries[shard] = 0.0  # as if it had run out
        if shard.stopping or (reply is not None and reply.stopping):
            named = {} if reply is None else reply.stopping
            shard.stopping = {decode_id(job_id): mark for job_id, mark in named.items()}
            self.names_stopping = True
        if reply is not None:
            shard.inflow.note(shard.lease.token, reply.pushed, reply.backlog)
            if reply.sealed and not shard.is_sealed:
                shard.in_flight.on_sealed()
            self._missed.note_renewal(shard, reply)

    def _is_lost(self, shard: Shard, reply: Any) -> bool:
        """Whether the reply says that the lease is lost. Then it is tried for at once."""
        if isinstance(reply, LeaseLost):
            self._tries[shard] = 0.0
            # Until `acquire` says whether it is resumed, nothing of it is begun, or handed to a consumer's caller.
            shard.lease.deadline = 0.0
            return True
        if isinstance(reply, Exception):
            raise reply
        return False

    def acquire(self, now: float) -> None:
        """Tries for the shards whose time has come.

        Raises:
            RedisUnavailable
        """
        shards = [shard for shard, at in self._tries.items() if at <= now]
        if not shards:
            return
        age = self._client.server_age()
        back = seconds_since_outage(now, self._away_at, self._began, age)
        if back < self._lease_ttl / 3:
            for shard in shards:
                if shard not in self._mine:
                    self._tries[shard] = now - back + self._lease_ttl / 3
            shards = [shard for shard in shards if shard in self._mine]
        for shard in shards:
            if shard not in self._mine and (free_at := self._free_at(shard)) > now:
                self._tries[shard] = free_at
        shards = [shard for shard in shards if self._tries[shard] <= now]
        charge = back > self._lease_ttl and age > self._lease_ttl
        gained, waiting = list[Shard](), list[Shard]()

        def note(shard: Shard, reply: Any, sent: float) -> None:
            self._tries[shard] = self._clock() + 1.0  # should the reply be an error
            had = shard.lease.current
            lease = shard.lease.acquired(reply, sent + self._lease_ttl)
            shard.is_miscounted = False
            shard.is_fed = isinstance(lease, LeaseDenied) and lease.is_fed
            log_restored(shard, lease)
            if isinstance(lease, LeaseDenied):
                if lease.is_restoring:
                    self._tries[shard] = 0.0  # in the next round: renewals come first
                    return
                self._stand_by(shard, lease, had)
                if shard in self._wanted:
                    waiting.append(shard)
                return
            del self._tries[shard]
            self._mine.add(shard)
            self._theirs.discard(shard)
            gained.append(shard)

        def call_for(shard: Shard) -> Call[Any]:
            call = shard.lease.acquire_call(self._lease_ttl, charge=charge)
            if shard not in self._mine:  # when it is sent it may be known that another server serves the shard
                call.only_if = lambda _: self._free_at(shard) <= now
            return call

        try:
            self._ask_all(shards, call_for, note)
        finally:
            # The threads first: whatever goes wrong with the listener, a refresh finds what it would have received.
            for dispatcher, some in self._dispatched(shard for shard in gained if shard in self._wanted):
                dispatcher.stay(some)
            for shard in gained:
                self._dispatchers[shard.queue].wake(shard)
            self._listener.listen_for_wakes(gained)
            self._listener.listen_for_releases(waiting)

    def _free_at(self, shard: Shard) -> float:
        """Monotonic time until which the shard is left to its holder on another server."""
        primary = self._client.address_of(shard.prefix)
        known = self._primaries.get(shard)
        if primary is not None and (known is None or known[0] != primary):
            # A process that knew no other one knows nothing of a failover, either.
            known = self._primaries[shard] = primary, -float("inf") if known is None else self._clock()
        return -float("inf") if known is None else known[1] + self._lease_ttl

    def _stand_by(self, shard: Shard, lease: LeaseDenied, had: Lease | None) -> None:
        if had is not None:
            log.warning("%r: the lease was lost to another node", shard, extra={"event": "lease_lost", **_of(shard)})
        self._mine.discard(shard)
        if lease.is_sealed:
            shard.is_sealed = True
            self._wanted.discard(shard)
        if shard not in self._wanted:
            del self._tries[shard]
            return
        self._theirs.add(shard)
        # No longer than a lease, whatever Redis says: its clock may have stepped back.
        seconds = min(lease.seconds, self._lease_ttl)
        self._tries[shard] = self._clock() + seconds + random.uniform(0.01, 0.05)

    def give_up(self) -> bool:
        """Surrenders the unwanted shards that no thread works. Returns whether there were any.

        Raises:
            RedisUnavailable
        """
        unwanted = [shard for shard in self.held if shard not in self._wanted]
        if not unwanted:
            return False
        # Again, as a shard may have been got by a call whose reply came late.
        for dispatcher, some in self._dispatched(unwanted):
            dispatcher.leave(some)
        # No thread can claim them any more, so nobody here performs anything of them. Jobs in flight there may be
        # all the same, after an outage: they are left to the next owner, and not charged.
        resting = [shard for dispatcher, some in self._dispatched(unwanted) for shard in dispatcher.resting(some)]
        self._end(resting, self._forget)
        return bool(resting)

    def _end(
        self, shards: list[Shard], then: Callable[[Shard], object] = lambda _shard: None, *, repeats: int = 0,
        call: Callable[[Shard], Call[Any]] = lambda shard: shard.lease.surrender_call(0.0),
    ) -> None:  # fmt: skip
        """Ends their leases by such a call; an error of Redis ends none. ``then``: called with each that has ended."""

        def note(shard: Shard, reply: Any, _sent: float) -> None:
            _raise_error(shard, reply)
            shard.lease.lose()
            then(shard)

        self._ask_all(shards, call, note, repeats=repeats)

    def surrender_replaced(self) -> bool:
        """Surrenders the leases that are to be replaced, and lets threads have their shards when they come back.
        Returns whether there were any.

        What is in flight there, as could not be reported, is left to run out. Whatever becomes of the call, the next
        lease has a higher fence: either somebody else had the shard meanwhile, or this process asks for it by another
        nonce, as if it were another.

        Raises:
            RedisUnavailable
        """
        if not self._to_replace:
            return False
        for shard, token in list(self._to_replace.items()):
            if shard.lease.token != token:  # lost meanwhile, and perhaps got again
                self._surrendered(shard)
        self._end(list(self._to_replace), self._surrendered)
        return True

    def _surrendered(self, shard: Shard) -> None:
        del self._to_replace[shard]
        if shard.lease.current is None:
            shard.lease.renew_nonce()
            if shard in self._wanted:
                self._tries[shard] = 0.0
            else:
                self._forget(shard)
        self._dispatchers[shard.queue].unclaim(shard)

    def _forget(self, shard: Shard) -> None:
        self._tries.pop(shard, None)
        self._mine.discard(shard)
        self._listener.ignore([shard])

    def refresh(self, now: float) -> float:
        """Asks idle shards when their next job is due, where wake-ups may have been missed. Returns the monotonic time
        at which it is to be called again.

        Raises:
            RedisUnavailable
        """
        asked = self._dispatched(self._missed.to_be_asked(now, lambda: self.held))
        versions = {shard: version for dispatcher, some in asked for shard, version in dispatcher.unclaimed(some)}

        def note(shard: Shard, reply: Any, _sent: float) -> None:
            if not self._is_lost(shard, reply):
                state = shard.in_flight.read_state(reply)
                self._missed.note(shard, state.delay, paused=state.paused)
                # As of `Dispatcher.rest_for_failover`.
                delay = 0.0 if shard.in_flight.unacknowledged else state.delay
                dispatcher = self._dispatchers[shard.queue]
                dispatcher.note_state(shard, versions[shard], delay, paused=state.paused, levels=state.levels)

        self._ask_all(list(versions), lambda shard: shard.in_flight.refresh_call(), note)
        return self._missed.next_look(now)

    def leave(self, seconds: float) -> None:
        """Gives up all leases. Shards with jobs in flight are left to run out in ``seconds``, and their jobs are not
        charged. Only once the maintenance loop has ended.

        Raises:
            RedisUnavailable
        """
        # A shard without an answer runs out: a process that is about to end does not wait for it.
        call = lambda shard: shard.lease.surrender_call(seconds)  # noqa: E731
        self._ask_all(self.held, call, lambda shard, _reply, _sent: shard.lease.lose(), repeats=1)

    def detach(self) -> None:
        """Leaves all leases, with what is in flight, to a consumer with the same session. As `leave`.

        Raises:
            RedisUnavailable
        """
        self.clear_trouble()
        self._end(self.held, repeats=1, call=lambda shard: shard.lease.detach_call(self._lease_ttl))
        if self.trouble is not None:
            raise self.trouble

    def keep(self, nonce: str) -> None:
        """Leaves the leases to this process, which is about to run other code and will ask for them with that nonce:
        they get their whole time. Those that it couldn't resume, and those that are not wanted, are given up. Nothing
        may be in flight. Only once the maintenance loop has ended.

        Raises:
            RedisUnavailable
        """
        kept = [shard for shard in self.held if shard in self._wanted and shard.lease.has_nonce(nonce)]
        self._ask_all(kept, lambda shard: shard.lease.renew_call(self._lease_ttl), _raise_error)
        self._end([shard for shard in self.held if shard not in set(kept)])

    # --- the log ---

    def log_held(self) -> bool:
        """Logs how many shards are held when that has changed; whether it has."""
        held, wanted = len(self.held), len(self._wanted)
        if (held, wanted) == self._logged:
            return False
        changed = held != self._logged[0]
        # INFO when it begins to change and when it is complete; the steps between, shard by shard, are DEBUG.
        level = logging.INFO if held == wanted or wanted != self._logged[1] else logging.DEBUG
        self._logged = held, wanted
        others = f"; standing by for {len(self._theirs)} of other nodes" if self._theirs else ""
        log.log(
            level, "shards held: %d, wanted: %d of %d%s", held, wanted, len(self._shards), others,
            extra={"event": "shards", "held": held, "wanted": wanted, "shards": len(self._shards)},
        )  # fmt: skip
        return changed


def _raise_error(_shard: Shard, reply: Any, _sent: float = 0.0) -> None:
    """Raises the error of a reply to the end of a lease, but for `LeaseLost`: then it has ended, too."""
    if isinstance(reply, Exception) and not isinstance(reply, LeaseLost):
        raise reply


def _of(shard: Shard) -> dict[str, Any]:
    return {"queue": shard.queue, "shard": shard.index}
