"""The maintenance loop: the thread that keeps a node's membership and leases.

One thread per node, with a connection of its own::

    every lease_ttl / 3     renew all leases: the replies say when the next job of each shard is due; send a
                            heartbeat, whose reply names the other nodes
    when jobs are cancelled renew the lease of their shard, whose reply names them; interrupt what runs of them
    when nodes come or go   send a heartbeat; want other shards, give up some
    when a lease runs out   try for a wanted shard of another node
    when wake-ups get lost  ask the idle shards every poll_interval
    every second            sweep the shards whose payloads or buried jobs may expire
    every 10 ms             acknowledge finished jobs of a delivery while another job of it is being performed
"""

import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any

from lowq.clock import LONGEST_WAIT, Clock
from lowq.clock import now as clock_now
from lowq.errors import ConfigError, RedisUnavailable
from lowq.logs import describe, get_log
from lowq.shards.leases import Leases
from lowq.shards.membership import Membership, details_of
from lowq.shards.outage import Outage
from lowq.shards.shard import Activity, Shard, Sweeper
from lowq.shards.splitter import Members
from lowq.store import Call, Client
from lowq.store.registry import Registration

log = get_log("lowq.shards")

#: Seconds between two looks at deliveries with finished, unacknowledged jobs.
EARLY_ACK_INTERVAL = 0.01
#: Seconds beyond its time after which the loop hangs. A call to a Redis that is away takes a few at most.
HANGS_SECONDS = 60.0
#: Window, in seconds, over which a heartbeat reports the worst lateness of the maintenance loop.
LATE_SECONDS = 600.0

#: Periodic work of a node or a consumer. Called with a client and the monotonic time; returns the monotonic time of the
#: next call, at the latest. It must not wait for other threads.
Chore = Callable[[Client, float], float]


class MaintenanceLoop:
    """Keeps a node's membership and leases, and looks after its idle shards.

    ``divide``: called with the members whenever they change; returns the shards that this node is to hold then.
    ``on_registered``: called with the reply to each registration; returns what the node serves from then on, when that
    has changed. ``more_details``: more fields of its entry. ``on_ready``: called once, when the node is a member and
    has asked for its shards.
    """

    def __init__(
        self, client: Client, membership: Membership, leases: Leases, activities: Callable[[], Sequence[Activity]],
        outage: Outage, *, divide: Callable[[Members], Iterable[Shard]], lease_ttl: float, renewal_interval: float,
        on_registered: Callable[[Registration, Any], Mapping[str, int] | None] = lambda _call, _reply: None,
        more_details: Callable[[], Mapping[str, Any]] = dict, on_ready: Callable[[], object],
        on_fatal: Callable[[BaseException], object], sweeper: Sweeper, chore: Chore = lambda _client, _now: inf,
        clock: Clock = clock_now,
    ) -> None:  # fmt: skip
        self._clock = clock
        self._sweeper = sweeper
        self._chore = chore
        self._thread = threading.Thread(target=self._run, name="lowq-maintenance", daemon=True)
        self._client = client
        self._membership = membership
        self._leases = leases
        self._activities = activities
        self._outage = outage
        self._divide = divide
        self._lease_ttl = lease_ttl
        self._renewal_interval = renewal_interval
        self._on_registered = on_registered
        #: Whether shards were found sealed that may still be wanted.
        self._has_sealed = False
        self._more_details = more_details
        self._on_ready = on_ready
        self._ready = False
        self._on_fatal = on_fatal
        #: Requests of other threads about leases.
        self._requests: deque[Callable[[], object]] = deque()
        self._members_asked = False
        self._divided = False
        self._next_renewal = 0.0
        self._next_look = 0.0
        #: The worst lateness of the maintenance loop lately, and when that was.
        self._late = (0.0, 0.0)
        #: When the loop is to run again, at the latest.
        self._due_at = inf
        self._armed = False
        self._nudge = threading.Event()
        self._closed = threading.Event()
        self._quiet = False

    def start(self) -> None:
        """Starts the thread."""
        self._due_at = self._clock()
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def hang(self) -> float:
        """The seconds since the loop should have run again, if it hangs; 0: it does not. From any thread."""
        late = self._clock() - self._due_at
        return late if late > max(HANGS_SECONDS, 4 * self._lease_ttl) else 0.0

    @property
    def is_ready(self) -> bool:
        """Whether the node is a member, and has asked for its shards."""
        return self._ready

    @property
    def is_quiet(self) -> bool:
        """Whether the node takes no jobs any more."""
        return self._quiet

    # --- from other threads ---

    def lease_released(self, shard: Shard, delay: float) -> None:
        """Has the shard tried for when its holder gives it up, in so many seconds."""
        if shard.lease.current is None:
            # No lease lasts longer than that, whatever a message says.
            self._request(partial(self._leases.try_for, shard, self._clock() + min(delay, self._lease_ttl)))

    def check(self, shard: Shard) -> None:
        """Has the lease tried for at once: a thread knows, or suspects, that it is lost."""
        self._request(partial(self._leases.try_for, shard, 0.0))

    def _request(self, do: Callable[[], object]) -> None:
        self._requests.append(do)
        self._nudge.set()

    def replace_lease(self, shard: Shard, token: str) -> None:
        """Has the lease with that token of a suspended shard given up, and another with a higher fence got. After that
        threads may have the shard again.
        """
        self._request(partial(self._leases.replace_lease, shard, token))

    def sealed(self, shard: Shard) -> None:
        """Has the shard given up once nothing of it is in flight: its jobs belong to another layout."""
        if not shard.is_sealed:
            shard.is_sealed = True
            self._has_sealed = True
            self._nudge.set()

    def jobs_are_to_end(self, shard: Shard) -> None:
        """Has its lease renewed, as the reply names the jobs in flight that are to end."""
        self._request(partial(self._leases.asked.add, shard))

    def members_changed(self) -> None:
        """Has a heartbeat sent: nodes came or went."""
        self._members_asked = True
        self._nudge.set()

    def nudge(self) -> None:
        """Has the loop look now: the chore is due, or a shard that is to be given up is free of threads."""
        self._nudge.set()

    def arm(self) -> None:
        """Has finished jobs acknowledged early: a thread performs another job of their delivery."""
        if not self._armed:
            self._armed = True
            self._nudge.set()

    # --- the loop ---

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            self._on_fatal(error)

    def _loop(self) -> None:
        quiet_ticks = 0
        failures = 0
        said = ""
        while not self._closed.is_set():
            begun = self._clock()
            try:
                wait = self._tick(begun)
                if self._armed:
                    quiet_ticks = 0 if self._acknowledge_early() else quiet_ticks + 1
                    if quiet_ticks > 50:
                        self._armed, quiet_ticks = False, 0
                    wait = min(wait, EARLY_ACK_INTERVAL)
                failures, said = 0, ""
            except RedisUnavailable as error:
                begun = self._clock()  # how long a call waited for a Redis that is away is the outage's to say
                failures, wait = failures + 1, 0.0
                if failures > 1:  # else perhaps only this connection was cut while it rested: a fresh one will show
                    self._outage.begin(error)
                    self._leases.was_away()
                    wait = random.uniform(0.1, 0.5)
            except ConfigError:
                raise
            except Exception as error:
                text = describe(error, str)  # it may be of an application's splitter
                if text != said:  # not once a second for as long as it lasts
                    said = text
                    log.exception("keeping the leases failed; trying again")
                wait = 1.0
            self._due_at = self._clock() + wait
            self._nudge.wait(wait)
            self._nudge.clear()
            # The GIL may be taken while the loop sleeps, or while it waits for a reply: both count.
            self._warn_when_late(self._clock() - begun - wait)

    def _tick(self, now: float) -> float:
        """Does what is due; returns the seconds until something is due again.

        Raises:
            The first error of any shard, after everything else was done.
        """
        leases, begun = self._leases, self._outage.begun
        leases.clear_trouble()
        while self._requests:
            self._requests.popleft()()
        renewing = now >= self._next_renewal
        if renewing:
            leases.renew()
        elif leases.asked:
            leases.renew(only_asked=True)
        if leases.names_stopping:
            leases.names_stopping = False
            for activity in self._activities():
                activity.interrupt_stopping()
        away: RedisUnavailable | None = None
        if renewing or self._members_asked or now >= self._next_look:
            try:
                self._heartbeat()
            except RedisUnavailable as error:
                if not self._client.has_several_primaries or not self._ready:
                    raise
                away = error  # the registry's primary alone may be away: that keeps no shard of another from being got
        if self._has_sealed:
            self._has_sealed = False  # first: more may be found meanwhile
            leases.leave_sealed()
        changed = leases.surrender_replaced()
        leases.acquire(now)
        changed |= leases.give_up()
        if (leases.log_held() or changed) and away is None:
            self._heartbeat()  # the registry says who holds what, and which handlers hang
        if not self._ready:
            self._ready = True
            self._on_ready()
        trouble = leases.clear_trouble() or away
        if renewing:
            self._next_renewal = now + self._renewal_interval
            if trouble is None:
                self._outage.end(begun)
        refresh_due = leases.refresh(now)
        trouble = trouble or leases.clear_trouble()
        sweep_due = self._sweeper.sweep(self._client, now)
        chore_due = self._chore(self._client, now)
        if trouble is not None:
            raise trouble
        due = min(chore_due, sweep_due, self._next_renewal, refresh_due, self._next_look, leases.next_try)
        return min(max(due - self._clock(), 0.0), LONGEST_WAIT)

    # --- membership ---

    def _heartbeat(self) -> None:
        self._members_asked = False  # before it is sent: a change that comes meanwhile asks for another
        try:
            changed, registered = self._membership.beat(self._client, self._details())
        except Exception:
            self._members_asked = True
            raise
        self._leases.trouble = self._leases.trouble or self._membership.trouble
        if changed:
            self._divided = False  # first: should what follows fail, it is not said again
        for call, reply in registered:
            served = self._on_registered(call, reply)
            if served is not None:
                # The shards of another layout: said at once, and shared out as soon as all know it.
                self._membership.serve(served)
                self._members_asked = True
                self._divided = False
                self._nudge.set()
        # A little later than the first could be missed, and not all nodes at once.
        self._next_look = self._membership.first_silent + random.uniform(0.01, 0.05)
        if not self._divided:
            self._divided = True  # first: `quiet` may ask for another division meanwhile
            try:
                self._leases.want([] if self._quiet else self._divide(self._membership.members))
            except BaseException:
                self._divided = False
                raise

    def _details(self) -> dict[str, Any]:
        """The details of the node's entry."""
        late, at = self._late
        return {
            **details_of(self._leases.held, self._activities(), self._clock()),
            "quiet": self._quiet,
            "late": round(late, 3) if self._clock() - at < LATE_SECONDS else 0.0,
            **self._more_details(),
        }

    # --- what the threads leave to it ---

    def _acknowledge_early(self) -> bool:
        """Acknowledges finished jobs of deliveries under way. Returns whether there are any such deliveries."""
        busy = False
        calls: list[Call[Any]] = []
        for activity in self._activities():
            performing = activity.performing
            if performing is None or not performing.shard.in_flight.unacknowledged:
                continue
            busy = True
            shard, delivery = performing.shard, performing.shard.in_flight.delivery
            # A delivery that was there at the last look already takes longer than it was meant to, be it by one slow
            # job or by many of some milliseconds each.
            if activity.early is None or activity.early[:2] != (shard, delivery):
                activity.early = shard, delivery, 0
                continue
            already = activity.early[2]
            call, count = shard.in_flight.early_ack_call(already)
            if count:
                calls.append(call)
                activity.early = shard, delivery, already + count
        if calls:
            self._client.run_many(calls, repeats=0)
        return busy

    def _warn_when_late(self, late: float) -> None:
        now = self._clock()
        worst, at = self._late
        if late > worst or now - at > LATE_SECONDS:
            self._late = max(late, 0.0), now
        if late > self._lease_ttl / 3:
            # Whatever held the GIL may have ended when the maintenance loop gets to look.
            since = now - late
            busy = []
            for activity in self._activities():
                performing, performed = activity.performing, activity.performed
                if performed is not None and performed[1] >= since and performed[0] is not performing:
                    busy.append(f"{performed[0]} (ended)")
                if performing is not None:
                    busy.append(str(performing))
            log.warning(
                "the maintenance loop ran %.1f s late: something holds the GIL, froze the process, or Redis answers "
                "slowly. Being performed: %s", late, "; ".join(busy) or "nothing",
                extra={"event": "maintenance_late", "seconds": late},
            )  # fmt: skip

    # --- the end ---

    def quiet(self) -> None:
        """Leaves the members, so that others share its work, and gives up each shard once nobody works it."""
        self._membership.leave()
        self._quiet = True
        self._divided = False
        self.members_changed()

    def unquiet(self, queues: Mapping[str, int]) -> None:
        """Ends `quiet`, as a member that serves these queues: name of a layout -> shards_count."""
        self._membership.join(queues)
        self._quiet = self._divided = False
        self.members_changed()

    def stop(self) -> None:
        """Renews nothing any more. Waits a moment for the end of the thread."""
        self._closed.set()
        self._nudge.set()
        if self._thread.is_alive():
            self._thread.join(self._lease_ttl / 3)

    def leave(self, seconds: float, *, stays: bool = False) -> None:
        """Gives up all leases, after `stop`. Leases of shards with jobs in flight run out in ``seconds``, and the jobs
        are not charged. Then sends the extras and leaves the registry, unless it ``stays``, as this process is about to
        run other code.

        Raises:
            RedisUnavailable
        """
        self._leases.leave(seconds)
        if not stays:
            self._membership.send_extras(self._client)
            self._say_goodbye()

    def keep(self, nonce: str) -> None:
        """Keeps leases and membership, after `stop`, for the code that this process is about to run; see `Leases.keep`.
        Sends the extras.

        Raises:
            RedisUnavailable
        """
        self._leases.keep(nonce)
        # Until the new code has subscribed nobody hears a command.
        details = {**self._details(), "listens": False}
        self._membership.send_extras(self._client, self._membership.heartbeat_call(details))

    def detach(self) -> None:
        """Leaves all leases, after `stop`, with what is in flight, to a consumer with the same session.

        Raises:
            RedisUnavailable
        """
        self._leases.detach()
        self._say_goodbye()

    def _say_goodbye(self) -> None:
        (reply,) = self._client.run_many([self._membership.goodbye_call()], repeats=1)
        if isinstance(reply, Exception):
            raise reply

    def close(self) -> None:
        """Closes its connection, after `leave`."""
        self._client.close()
