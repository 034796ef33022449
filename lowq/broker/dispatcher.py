"""Which thread works which shard next: claims, wake-ups, sleep.

One lock guards what threads share of the shards: ``next_due``, ``paused``, ``claimed_by``, ``leaving``, ``wakes``. A
shard is claimed, never waited for, by the thread that takes from it, until the outcome is written. The splitter's map
is a preference, and may change at any time: a thread whose own shards rest helps with the others, and when a thread is
long with one batch all others take turns with its shards, or an hour's job would keep those waiting for an hour.

Idle threads don't poll. One of them, the leader, sleeps until the next known due time, the others until woken.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial

from lowq.broker.delivery import Delivery
from lowq.broker.scheduler import LagScheduler, Scheduler, place
from lowq.broker.shard import Shard
from lowq.clock import Clock
from lowq.clock import now as clock_now
from lowq.duration import LONGEST_WAIT

#: Seconds that a thread may be with one batch before the others look after its shards, too.
PATIENCE = 1.0

Schedule = Scheduler[Shard]


class Dispatcher:
    """Hands shards to threads. ``preferred[i]``: the shards of thread i. ``on_left`` is called, outside
    of the lock, with a shard that is to be given up and that no thread works any more.
    """

    def __init__(
        self,
        preferred: Sequence[Sequence[Shard]],
        schedules: Sequence[Schedule],
        on_left: Callable[[Shard], object] = lambda _shard: None,
        *,
        clock: Clock = clock_now,
    ) -> None:
        self._clock = clock
        self._preferred: list[list[Shard]] = []
        self._all: list[Shard] = []
        self._schedules = list(schedules)
        self._on_left = on_left
        self._helping = LagScheduler()
        #: Per thread: when it was given what it is with, monotonic seconds; None: it sleeps.
        self._busy_since: list[float | None] = [None] * len(self._schedules)
        self._helped = [False] * len(self._schedules)
        self._none_stuck_until = 0.0
        self._changed = threading.Condition()
        self._idle = 0
        self._leader: int | None = None
        self._closed = False
        self._nudged = False
        self.assign(preferred)

    # --- for the threads ---

    def pick(self, thread: int) -> Shard | None:
        """What to work next, claimed for the caller: the shard that it has claimed already, or another; or None."""
        with self._changed:
            return self._pick(thread, self._clock())

    def wait(self, thread: int) -> Shard | None:
        """Sleeps until there is a shard to work; claimed for the caller. None: no more is taken."""
        with self._changed:
            while not self._closed:
                now = self._clock()
                shard = self._pick(thread, now)
                if shard is not None:
                    self._hand_on(thread)
                    return shard
                timeout = None
                if self._leader is None or self._leader == thread:
                    self._leader = thread
                    due = self._next_due(now)
                    timeout = None if due is None else min(max(due - now, 0.0), LONGEST_WAIT)
                self._idle += 1
                self._busy_since[thread] = None
                self._changed.wait(timeout)
                self._idle -= 1
            return None

    # --- for an event loop, which works many shards at once, as thread 0 of a dispatcher of its own ---

    def pick_many(self, count: int, ended: Collection[Shard]) -> list[Shard]:
        """Up to so many shards to work next, claimed for the caller. Of those that it has claimed already only the
        ``ended`` ones may be among them: it is not working these any more.
        """
        with self._changed:
            return self._pick_many(count, ended, self._clock())

    def wait_many(self, count: int) -> list[Shard]:
        """As `pick_many`, but sleeps until there is one, or until `nudge`, or until no more is handed out."""
        with self._changed:
            while True:
                now = self._clock()
                shards = self._pick_many(count, (), now)
                if shards or self._nudged:
                    self._nudged = False
                    return shards
                due = self._next_due(now) if count and not self._closed else None
                self._idle += 1
                self._changed.wait(None if due is None else min(max(due - now, 0.0), LONGEST_WAIT))
                self._idle -= 1

    def nudge(self) -> None:
        """Ends `wait_many`, the one under way or else the next."""
        with self._changed:
            self._nudged = True
            if self._idle:
                self._changed.notify_all()

    def _pick_many(self, count: int, ended: Collection[Shard], now: float) -> list[Shard]:
        if self._closed or not count:
            return []

        def ready(shard: Shard) -> bool:
            return is_ready(0, now, shard) and (shard.dispatch.claimed_by is None or shard in ended)

        waiting = [shard for shard in self._all if ready(shard)]
        picked: list[Shard] = []
        schedule = self._schedules[0]
        if type(schedule) is LagScheduler and len(waiting) > 1:
            # What it would choose one after the other.
            picked = sorted(waiting, key=lambda shard: shard.dispatch.next_due or 0.0)[:count]
        else:
            while waiting and len(picked) < count:
                shard = schedule(waiting, now, ready)
                if shard is None or shard not in waiting:
                    break
                waiting.remove(shard)
                picked.append(shard)
        for shard in picked:
            shard.dispatch.claimed_by = 0
        return picked

    def _hand_on(self, thread: int) -> None:
        # Whoever leaves the idle ones wakes another: to look for further work, and to lead if nobody does.
        if self._leader == thread:
            self._leader = None
        if self._idle:
            self._changed.notify()

    def _pick(self, thread: int, now: float) -> Shard | None:
        if self._closed:
            return None
        ready = partial(is_ready, thread, now)
        shard = self._left_alone(thread, now, ready) or self._schedules[thread](self._preferred[thread], now, ready)
        if shard is None or not ready(shard):  # a scheduler of the application's own may be wrong
            shard = self._helping(self._all, now, ready)
        if shard is not None:
            shard.dispatch.claimed_by = thread
            self._busy_since[thread] = now
        return shard

    def _left_alone(self, thread: int, now: float, ready: Callable[[Shard], bool]) -> Shard | None:
        """Every other time: of the shards whose thread is long with one batch, the one that has waited longest."""
        if now < self._none_stuck_until:
            return None
        shards: list[Shard] = []
        for other, (since, preferred) in enumerate(zip(self._busy_since, self._preferred, strict=False)):
            if other != thread and since is not None and now - since > PATIENCE:
                shards += preferred
        if not shards:
            self._none_stuck_until = now + PATIENCE / 10
            return None
        self._helped[thread] = not self._helped[thread]
        return self._helping(shards, now, ready) if self._helped[thread] else None

    def _next_due(self, now: float) -> float | None:
        earliest: float | None = None
        for shard in self._all:
            state = shard.dispatch
            due = state.next_due
            if (
                due is not None
                and (earliest is None or due < earliest)
                and state.claimed_by is None
                and not state.paused
                and not state.leaving
                and shard.lease.deadline > now
            ):
                earliest = due
        return earliest

    def took(self, shard: Shard, wakes: int, delivery: Delivery) -> None:
        """Takes note of what the reply of a take from the caller's shard said. ``wakes``: the shard's count before the
        call was sent; a wake-up that came since may be newer than the reply, so the shard is looked at again.
        """
        now = self._clock()
        with self._changed:
            if shard.dispatch.wakes != wakes:
                shard.dispatch.next_due = now
            else:
                shard.dispatch.next_due = None if delivery.delay is None else now + delivery.delay
            shard.dispatch.paused = delivery.paused and shard.dispatch.wakes == wakes

    def look_again(self, shard: Shard) -> None:
        """What is known of the caller's shard is out of date: jobs went back to it."""
        with self._changed:
            shard.dispatch.next_due = self._clock()

    def rest(self, shard: Shard, seconds: float) -> None:
        """The caller's shard is in trouble of its own: nobody looks at it for a while."""
        with self._changed:
            shard.dispatch.next_due = self._clock() + seconds

    def unclaim(self, shard: Shard) -> None:
        """The caller has finished with the shard."""
        with self._changed:
            shard.dispatch.claimed_by = None
            if self._idle and shard.dispatch.next_due is not None and not shard.dispatch.leaving:
                self._notify(shard.dispatch.next_due)
        if shard.dispatch.leaving:
            self._on_left(shard)

    # --- for the maintenance loop and the listener ---

    def assign(self, preferred: Sequence[Sequence[Shard]]) -> None:
        """From now on these are the shards of the threads. What a thread works just now it goes on with."""
        groups = [sorted(group, key=place) for group in preferred]
        with self._changed:
            self._preferred = groups
            self._all = sorted({shard for group in groups for shard in group}, key=place)
            self._changed.notify_all()  # the alarm may have been set for a shard that is no longer here

    def leave(self, shards: Sequence[Shard]) -> None:
        """These are to be given up: no thread picks them any more, nor begins another batch of theirs."""
        with self._changed:
            for shard in shards:
                shard.dispatch.leaving = True

    def stay(self, shards: Sequence[Shard]) -> None:
        """These are to be worked (again)."""
        with self._changed:
            for shard in shards:
                shard.dispatch.leaving = False
                if self._idle and shard.dispatch.claimed_by is None and shard.dispatch.next_due is not None:
                    self._notify(shard.dispatch.next_due)

    def wake(self, shard: Shard, delay: float = 0.0) -> None:
        """The shard has work that is due in ``delay`` seconds, or earlier than was known."""
        with self._changed:
            shard.dispatch.wakes += 1
            due = self._clock() + delay
            if shard.dispatch.next_due is None or due < shard.dispatch.next_due:
                shard.dispatch.next_due = due
            if delay == 0.0:
                shard.dispatch.paused = False
            if shard.dispatch.claimed_by is None and not shard.dispatch.leaving and self._idle:
                self._notify(shard.dispatch.next_due)

    def refreshed(self, shard: Shard, wakes: int, delay: float | None, *, paused: bool) -> None:
        """What a look at an unclaimed shard gave, unless something happened to it meanwhile."""
        with self._changed:
            if shard.dispatch.claimed_by is None and shard.dispatch.wakes == wakes:
                shard.dispatch.next_due = None if delay is None else self._clock() + delay
                shard.dispatch.paused = paused
                if shard.dispatch.next_due is not None and self._idle and not paused and not shard.dispatch.leaving:
                    self._notify(shard.dispatch.next_due)

    def _notify(self, due: float) -> None:
        # Due now: anyone may take it. Due later: the leader must set its alarm anew.
        if due <= self._clock():
            self._changed.notify()
        else:
            self._changed.notify_all()

    def unclaimed(self, shards: Sequence[Shard]) -> list[tuple[Shard, int]]:
        """Those of the shards that nobody works just now, with their wake-up counts."""
        with self._changed:
            return [(shard, shard.dispatch.wakes) for shard in shards if shard.dispatch.claimed_by is None]

    def close(self) -> None:
        """From now on nothing is taken."""
        with self._changed:
            self._closed = self._nudged = True
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """Whether nothing is handed out any more."""
        return self._closed


def is_ready(thread: int, now: float, shard: Shard) -> bool:
    """Whether the thread may work it: it has due work, is held, not paused, not to be given up, and nobody else has
    claimed it.
    """
    state = shard.dispatch
    return (
        state.next_due is not None
        and state.next_due <= now
        and (state.claimed_by is None or state.claimed_by == thread)
        and not state.paused
        and not state.leaving
        and now < shard.lease.deadline
    )
