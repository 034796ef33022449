"""Which thread works which shard next: claims, wake-ups, sleep.

One lock guards what threads share of the shards: ``next_due``, ``paused``, ``claimed_by``, ``leaving``, ``wakes``, and
the share of the threads that each queue has. The thread that takes from a shard claims it until the outcome is written.
No thread waits for a claimed shard.

A thread's next shard is found in two steps (`scheduler`): first the queue, so that each has its share of the threads,
then a shard of that queue. A heap for each queue says which of its shards are due: whatever makes an unclaimed shard
ready enters it there.

Idle threads don't poll. One of them, the leader, sleeps until the next known due time, the others until woken. Only
when a scheduler of the application's own has declined a shard that is ready, idle threads ask again every 0.1 s.
"""

import random
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from heapq import heappush
from itertools import count as count_up
from itertools import islice
from math import inf

from lowq.clock import LONGEST_WAIT, Clock
from lowq.clock import now as clock_now
from lowq.shards.delivery import Delivery
from lowq.shards.permits import Demand, QueuePermits, Share
from lowq.shards.scheduler import (
    Entry,
    LagScheduler,
    QueueUse,
    Scheduler,
    SeqScheduler,
    Shares,
    is_ready,
    one_by_one,
    place,
)
from lowq.shards.shard import Shard, urgent_level
from lowq.store.shard import SentTake

#: The claim on a shard that no thread may pick: an event loop works it, or its lease is being replaced.
_NOBODY = -1
#: No thread: what is ready for it is ready for any.
_ANY = -2
#: Seconds for which a shard rests whose primary in a cluster did not answer, at least and at most.
SILENT_SECONDS = (0.1, 0.3)

Schedule = Scheduler[Shard]
#: A thread's schedulers: queue -> the one that chooses among its shards.
Schedules = Mapping[str, Schedule]


class Dispatcher:
    """Hands shards to threads. ``schedules[i]``: the schedulers of thread i. ``shares`` names every queue that there
    may be shards of. ``on_left`` is called, outside of the lock, with a shard that is to be given up and that no thread
    works any more. ``permits``: those of the queues with limits over all nodes.
    """

    def __init__(
        self, shards: Iterable[Shard], schedules: Sequence[Schedules], shares: Mapping[str, Share],
        on_left: Callable[[Shard], object] = lambda _shard: None, *,
        permits: Mapping[str, QueuePermits] | None = None, clock: Clock = clock_now,
    ) -> None:  # fmt: skip
        self._clock = clock
        self._by_queue: dict[str, list[Shard]] = {}
        self._schedules = list(schedules)
        # lowq's own choose one of those that are ready whenever there is one.
        own = (LagScheduler, SeqScheduler)
        self._may_decline = any(type(made) not in own for each in schedules for made in each.values())
        self.shares = Shares(shares, permits or {}, clock)
        self._uses = self.shares.uses
        for use in self.shares.bounded.values():
            if use.permits is not None:
                use.permits.changing = partial(self._changing_permits, use, use.permits)
        #: Of the only queue, when all threads are for it: then nothing is counted.
        self._only_use = next(iter(self._uses.values())) if len(shares) == 1 and not self.shares.bounded else None
        #: Of the shards that there are: their places in order. Of equals in a heap the first one is next.
        self._places: dict[Shard, int] = {}
        self._entries = count_up()  # numbers those of the heaps
        #: The shard that a thread was given last.
        self._latest: dict[int, Shard] = {}
        self._on_left = on_left
        self._changed = threading.Condition()
        #: How many are asleep, and the thread among them that wakes up when the next job is due.
        self._idle = 0
        self._leader: int | None = None
        #: Sends the take of a shard that is claimed for a thread which is being woken, outside of the lock. None: each
        #: thread sends its own. And those shards, until a thread is awake.
        self.send_take: Callable[[Shard, SentTake], object] | None = None
        self._given: list[Shard] = []
        #: Whether nothing is handed out any more.
        self.closed = self._nudged = False
        #: Whether nothing is handed out for now.
        self._is_quiet = False
        self.assign(shards)

    # --- for threads ---

    def pick(self, thread: int) -> Shard | None:
        """What to work next, claimed for the caller: the shard that it has claimed already, or another; or None."""
        with self._changed:
            latest = self._latest.get(thread)
            mine = () if latest is None or latest.dispatch.claimed_by != thread else (latest,)
            return next(iter(self._pick(thread, 1, mine, thread, self._clock())), None)

    def wait(self, thread: int) -> Shard | None:
        """Sleeps until there is a shard to work; claimed for the caller. None: no more is taken."""
        with self._changed:
            while self._given or not self.closed:
                now = self._clock()
                picked = [self._given.pop(0)] if self._given else self._pick(thread, 1, (), thread, now)
                if picked:
                    self._latest[thread], picked[0].dispatch.claimed_by = picked[0], thread
                    # Whoever leaves the idle ones when nobody leads wakes another: to lead, or to work if more is due.
                    if self._leader == thread:
                        self._leader = None
                    if self._idle and self._leader is None:
                        self._changed.notify()
                    return picked[0]
                if self._leader is None:
                    self._leader = thread
                due = inf
                if (self._leader == thread or self._may_decline) and not self._is_quiet:
                    due = min([use.next_due for use in self._uses.values()], default=inf)
                for use in self.shares.bounded.values():
                    if use.permits is not None and use.awaits_answer(now):
                        due = min(due, use.permits.answer_until)
                self._idle += 1
                self._changed.wait(min(max(due - now, 0.0), LONGEST_WAIT))
                self._idle -= 1
            return None

    # --- for an event loop or a consumer, which works many shards at once, with a dispatcher of its own ---

    def pick_many(self, count: int, ended: Collection[Shard]) -> list[Shard]:
        """Up to so many shards to work next, claimed for the caller. Of those that it has claimed already only the
        ``ended`` ones may be among them: it is not working these any more.
        """
        with self._changed:
            for shard in ended:
                shard.dispatch.claimed_by = 0
            return self._pick(0, count, ended, _NOBODY, self._clock())

    def wait_many(self, count: int, until: float = inf) -> list[Shard]:
        """As `pick_many`, but sleeps until there is one, or until `nudge`, or until no more is handed out, or that
        monotonic time has come.
        """
        with self._changed:
            while True:
                now = self._clock()
                picked = self._pick(0, count, (), _NOBODY, now)
                if picked or self._nudged or now >= until:
                    self._nudged = False
                    return picked
                due = until
                if count and not (self.closed or self._is_quiet):
                    due = min([until, *(use.next_due for use in self._uses.values())])
                self._idle += 1
                self._changed.wait(min(max(due - now, 0.0), LONGEST_WAIT))
                self._idle -= 1

    def nudge(self) -> None:
        """Ends `wait_many`, the one under way or else the next."""
        with self._changed:
            self._nudged = True
            if self._idle:
                self._changed.notify_all()

    # --- which shards ---

    def _pick(self, thread: int, count: int, mine: Collection[Shard], claimed_by: int, now: float) -> list[Shard]:
        """Up to so many shards that are ready for the thread, claimed. ``mine``: those of its own that it may have
        again.
        """
        picked: list[Shard] = []
        if self.closed or self._is_quiet or not count:
            return picked
        for shard in mine:
            due = shard.dispatch.next_due
            if due is not None and due <= now and shard in self._places:
                heappush(self._uses[shard.queue].heap, (due, self._places[shard], next(self._entries), shard))
        if self._only_use is not None:
            ready = self._only_use.ready(thread, count, now)
            picked += islice(self._choices(self._only_use.queue, thread, ready, now), count)
        else:
            picked = self._pick_fairly(thread, count, mine, now)
        for shard in picked:
            shard.dispatch.claimed_by = claimed_by
            self._latest[thread] = shard
        return picked

    def _pick_fairly(self, thread: int, count: int, mine: Collection[Shard], now: float) -> list[Shard]:
        """Each of the queue whose turn it is; of another queue if its scheduler declines."""
        # What the caller comes from doesn't count: it may go on with that.
        left = {self._uses[shard.queue] for shard in mine if self.shares.end(shard, now)}
        found: dict[QueueUse, list[Shard]] = {}
        for use in self._uses.values():
            if not use.heap or use.heap[0][0] > now:  # most have nothing due
                use.next_due = use.heap[0][0] if use.heap else inf
            else:
                found[use] = use.ready(thread, count, now)
        picked: list[Shard] = []
        try:
            picked = self.shares.share_out(
                found, lambda use: self._choices(use.queue, thread, found[use], now), count, self._idle, now
            )
            return picked
        finally:
            for use in self.shares.bounded.values():
                if use.is_full:  # for what is due whoever leaves it wakes a thread
                    use.next_due = min((entry[0] for entry in use.heap if entry[0] > now), default=inf)
            for use in left - {self._uses[shard.queue] for shard in picked}:
                self._wake_for_place(use)

    def _choices(self, queue: str, thread: int, found: list[Shard], now: float) -> Iterator[Shard]:
        """The ready shards of a queue, of which some were found, as the thread's scheduler chooses them."""
        schedule = self._schedules[thread][queue]
        if not found:
            return iter(())
        shards, ready = self._by_queue[queue], partial(is_ready, thread, now)
        if type(schedule) is not LagScheduler:
            return one_by_one(schedule, shards, now, ready)
        if all(shard.dispatch.levels is None for shard in found):
            return iter(found)
        return schedule.in_turn(list(filter(ready, shards)), now)

    def _enter(self, shard: Shard, *, gives: bool = False) -> tuple[Shard, SentTake] | None:
        """The shard may be ready when its next job is due, or is by now: has it looked at then. ``gives``: returns one
        that was claimed for a thread which is being woken.
        """
        state = shard.dispatch
        due, at = state.next_due, self._places.get(shard)
        if due is None or at is None or state.claimed_by is not None or state.paused or state.leaving:
            return None
        use = self._uses[shard.queue]
        heappush(use.heap, (due, at, next(self._entries), shard))
        if len(use.heap) > 4 * len(self._by_queue[shard.queue]) + 100:  # most of them say something old
            use.heap = self._all_entries(use.queue)
        if not self._idle:
            return None
        # Due now: anyone may take it; if its queue is full, whoever leaves that wakes a thread. Due later: the leader
        # must set its alarm anew.
        if max(due, state.rests_until) > self._clock() or self._may_decline:
            self._changed.notify_all()
        elif use.queue in self.shares.bounded and use.is_full:
            self.shares.ask_for_permits(use, 1)
        else:
            self._changed.notify()
            if gives and self._leader is not None and self._idle > len(self._given):
                for given in self._pick(self._leader, 1, (), _NOBODY, self._clock()):
                    self._given.append(given)
                    given.in_flight.sent = SentTake()
                    return given, given.in_flight.sent
        return None

    def _all_entries(self, queue: str) -> list[Entry]:
        dues = [(shard.dispatch.next_due, shard) for shard in self._by_queue.get(queue, ())]
        entries = [(due, self._places[shard], next(self._entries), shard) for due, shard in dues if due is not None]
        return sorted(entries)  # which is a heap

    def _leave_queue(self, shard: Shard) -> None:
        """Counts one thread less for the queue of the shard."""
        if self.shares.end(shard, self._clock()):
            self._wake_for_place(self._uses[shard.queue])

    def _wake_for_place(self, use: QueueUse) -> None:
        # If the queue was full, nobody was woken for its shards, and no alarm is set for them: this is what makes up
        # for it. One thread, as there is room for one more; also when the one for the last place is not awake yet.
        if self._idle and (use.max_threads is not None or use.permits is not None) and not use.is_full:
            self._changed.notify()

    # --- limits over all nodes ---

    @contextmanager
    def _changing_permits(self, use: QueueUse, permits: QueuePermits) -> Iterator[Demand]:
        """See `QueuePermits.changing`."""
        with self._changed:
            self.shares.note_began()
            now = self._clock()
            ready = 0
            if permits.wanted and not self.closed:
                ready = len(use.ready(_ANY, max(self._idle, permits.wanted), now))
                if use.max_threads is not None:
                    ready = min(ready, max(use.max_threads - use.running, 0))
            answer_until = permits.answer_until
            yield Demand(use.running, ready, self._idle)
            is_answered = permits.answer_until != answer_until  # who waited for that goes on with other queues
            if self._idle and (is_answered or (ready and not use.is_full)):
                self._changed.notify_all()

    # --- what is known of the shards ---

    def note_delivery(self, shard: Shard, wakes: int, delivery: Delivery) -> None:
        """Takes note of the state that a take from the caller's shard has answered. ``wakes``: the shard's count of
        wake-ups before the call was sent. A later wake-up may be newer than the reply: the shard is looked at again.
        """
        now, state = self._clock(), shard.dispatch
        with self._changed:
            state.takes += 1
            is_older = state.wakes != wakes
            if delivery.levels is not None or state.levels is not None:
                state.level = urgent_level(state.levels, now)
                state.note_levels(delivery.levels, now, is_older=is_older)
            if is_older:
                state.next_due = now
            else:
                state.next_due = None if delivery.delay is None else now + delivery.delay
            state.paused = delivery.paused and not is_older
            if state.allowance is not None:
                self.shares.settle(shard, len(delivery.jobs))

    def look_again(self, shard: Shard) -> None:
        """Has the caller's shard looked at again: jobs went back to it."""
        with self._changed:
            now = self._clock()
            if shard.dispatch.levels is not None:
                shard.dispatch.levels[shard.dispatch.level] = now
            shard.dispatch.next_due = now
            self._enter(shard)

    def rest(self, shard: Shard, seconds: float) -> None:
        """Leaves the caller's shard alone for a while: a script of it failed."""
        with self._changed:
            shard.dispatch.next_due = self._clock() + seconds
            self._enter(shard)

    def rest_for_failover(self, shard: Shard) -> None:
        """The primary of the caller's shard, in a cluster, does not answer: the caller goes on with shards of others.
        What it has finished and could not be acknowledged goes with the next take of the shard.
        """
        now = self._clock()
        with self._changed:
            # Its jobs stay due since when they are: else it would be behind all that became due in the meantime.
            shard.dispatch.rests_until = now + random.uniform(*SILENT_SECONDS)
            if shard.dispatch.next_due is None:
                shard.dispatch.next_due = now
            self._enter(shard)

    def unclaim(self, shard: Shard) -> None:
        """Ends the caller's claim on the shard."""
        with self._changed:
            shard.dispatch.claimed_by = None
            if self._only_use is None:
                self._leave_queue(shard)
            self._enter(shard)
        if shard.dispatch.leaving:
            self._on_left(shard)

    def note_in_hand(self, shard: Shard, *, has_jobs: bool) -> None:
        """Notes whether a consumer has jobs of the shard in hand, claimed or not: then it is not given up."""
        with self._changed:
            shard.dispatch.is_in_hand = has_jobs
        if shard.dispatch.leaving and not has_jobs:
            self._on_left(shard)

    def suspend(self, shard: Shard) -> None:
        """Ends the caller's claim on the shard, and keeps all threads from it until `unclaim` is called."""
        with self._changed:
            shard.dispatch.claimed_by = _NOBODY
            self._leave_queue(shard)  # nobody may come for another shard

    # --- for the maintenance loop and the listener ---

    def assign(self, shards: Iterable[Shard]) -> None:
        """Replaces the shards. A thread goes on with the shard that it works."""
        with self._changed:
            ordered, self._by_queue = sorted(set(shards), key=place), {}
            self._places = {shard: number for number, shard in enumerate(ordered)}
            for shard in ordered:
                self._by_queue.setdefault(shard.queue, []).append(shard)
            for use in self._uses.values():
                use.heap = self._all_entries(use.queue)
            self._changed.notify_all()  # the alarm may have been set for a shard that is no longer here

    def leave(self, shards: Sequence[Shard]) -> None:
        """Marks shards that are to be given up: no thread picks them, nor begins another batch of them."""
        with self._changed:
            for shard in shards:
                shard.dispatch.leaving = True

    def stay(self, shards: Sequence[Shard]) -> None:
        """Has shards worked, again or for the first time."""
        with self._changed:
            for shard in shards:
                shard.dispatch.leaving = False
                self._enter(shard)

    def wake(self, shard: Shard, delay: float = 0.0, level: int = 0, *, sends: bool = False) -> None:
        """Notes work of that priority that is due in ``delay`` seconds, if it is due earlier than was known. ``sends``:
        the caller may wait for a connection, and so sends the take of a shard that a thread is woken for.
        """
        state = shard.dispatch
        with self._changed:
            state.wakes += 1
            due = self._clock() + delay
            if level or state.levels is not None:
                if state.levels is None:
                    state.levels = {} if state.next_due is None else {0: state.next_due}
                state.levels[level] = min(due, state.levels.get(level, inf))
            if state.next_due is None or due < state.next_due:
                state.next_due = due
            if delay == 0.0:
                state.paused = False
            given = self._enter(shard, gives=sends and self.send_take is not None)
        if given is not None and self.send_take is not None:
            self.send_take(*given)

    def note_state(
        self, shard: Shard, version: int, delay: float | None, *, paused: bool,
        levels: Mapping[int, float] | None = None,
    ) -> None:  # fmt: skip
        """Takes note of the state of an unclaimed shard, unless it was worked or woken since `unclaimed` has said that
        ``version``: then what is known may be newer.
        """
        state = shard.dispatch
        with self._changed:
            if state.claimed_by is None and state.wakes + state.takes == version:
                now = self._clock()
                state.next_due = None if delay is None else now + delay
                if levels is not None or state.levels is not None:
                    state.note_levels(levels, now, is_older=False)
                state.paused = paused
                self._enter(shard)

    def unclaimed(self, shards: Sequence[Shard]) -> list[tuple[Shard, int]]:
        """The unclaimed ones among the shards, each with the version of what is known of it, for `note_state`."""
        with self._changed:
            states = [(shard, shard.dispatch) for shard in shards]
            return [(shard, state.wakes + state.takes) for shard, state in states if state.claimed_by is None]

    def resting(self, shards: Sequence[Shard]) -> list[Shard]:
        """The shards that are unclaimed and have no jobs in hand."""
        with self._changed:
            return [shard for shard in shards if shard.dispatch.claimed_by is None and not shard.dispatch.is_in_hand]

    def quiet(self, is_quiet: bool) -> None:
        """Hands out nothing for now, or something again; those who wait go on waiting."""
        with self._changed:
            self._is_quiet, self._nudged = is_quiet, True
            self._changed.notify_all()

    def close(self) -> None:
        """Hands out nothing any more."""
        with self._changed:
            self.closed = self._nudged = True
            self._changed.notify_all()
