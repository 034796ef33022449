"""Which thread works which shard next: claims, wake-ups, sleep.

One lock guards what threads share of the shards: ``next_due``, ``paused``, ``claimed_by``, ``leaving``, ``wakes``, and
what each queue has of the threads. A shard is claimed, never waited for, by the thread that takes from it, until the
outcome is written.

A thread's next shard is found in two steps. First the queue, so that each has its share of the threads: `fairness`.
Then a shard of that queue, which the thread's scheduler for it chooses: of the shards that the thread prefers, and if
it chooses none of them, of all. The splitter's map is a preference, and may change at any time. When a thread has been
running one batch for long, all others take turns with its shards, or an hour's job would keep those waiting as long.
Of a queue with priorities a thread's scheduler chooses of all shards at once, or urgent jobs would wait for the thread
that is with less urgent ones.

Idle threads don't poll. One of them, the leader, sleeps until the next known due time, the others until woken. Only
when a scheduler of the application's own has declined a shard that is ready, idle threads ask again every 0.1 s.
"""

import random
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from heapq import nsmallest
from itertools import islice
from math import inf
from typing import NamedTuple, TypeVar

from lowq.clock import Clock
from lowq.clock import now as clock_now
from lowq.duration import LONGEST_WAIT
from lowq.shards.delivery import Delivery, urgent_level
from lowq.shards.fairness import QueueUse, Share, next_queue
from lowq.shards.queue_permits import QueuePermits
from lowq.shards.scheduler import LagScheduler, Scheduler, SeqScheduler, place
from lowq.shards.shard import Shard

#: Seconds that a thread may be with one batch before the others look after its shards, too.
PATIENCE = 1.0
#: Seconds after which a scheduler that declined a shard that is ready is asked again, at the latest.
ASK_AGAIN = 0.1
#: Seconds for which a thread waits for the answer whether a queue whose turn it is may begin a batch, at most: Redis is
#: asked just then. If it went on with another queue at once, permits would come while all threads are busy, each time.
ANSWER_SECONDS = 0.5
#: Who has claimed a shard that no thread may have.
_NOBODY = -1
#: Seconds for which a shard rests whose primary in a cluster did not answer, at least and at most.
SILENT_SECONDS = (0.1, 0.3)

#: Chooses among the shards of threads that have been running one batch for long.
_OLDEST_FIRST = LagScheduler()

T = TypeVar("T")
Schedule = Scheduler[Shard]
#: A thread's schedulers: queue -> the one that chooses among its shards.
Schedules = Mapping[str, Schedule]


class Demand(NamedTuple):
    """What a queue with limits over all nodes could do with more permits."""

    #: Its batches that run.
    running: int
    #: How many could begin besides.
    ready: int
    #: How many threads are asleep. The others look what to work next when they come back.
    idle: int


class Dispatcher:
    """Hands shards to threads. ``preferred[i]``: the shards of thread i; ``schedules[i]``: its schedulers. ``shares``
    names every queue that there may be shards of. ``on_left`` is called, outside of the lock, with a shard that is to
    be given up and that no thread works any more. ``ask_for_permits``: called, under the lock, when a queue with limits
    over all nodes could begin a batch and may not, see `permits`.
    """

    def __init__(
        self,
        preferred: Sequence[Sequence[Shard]],
        schedules: Sequence[Schedules],
        shares: Mapping[str, Share],
        on_left: Callable[[Shard], object] = lambda _shard: None,
        *,
        ask_for_permits: Callable[[], object] = lambda: None,
        clock: Clock = clock_now,
    ) -> None:
        self._clock = clock
        #: Per thread, by queue.
        self._preferred: list[dict[str, list[Shard]]] = []
        self._all: list[Shard] = []
        self._by_queue: dict[str, list[Shard]] = {}
        self._schedules = list(schedules)
        # lowq's own choose one of those that are ready whenever there is one.
        own = (LagScheduler, SeqScheduler)
        self._may_decline = any(type(made) not in own for each in schedules for made in each.values())
        self._all_asked_at = -inf
        self._uses = {
            queue: QueueUse(
                queue,
                share,
                QueuePermits(share.limits, share.batch_size, ask_for_permits, clock) if share.limits else None,
            )
            for queue, share in shares.items()
        }
        #: The only queue, when all threads are for it: then nothing is counted. None: see `_uses`.
        self._only_queue: str | None = None
        if len(self._uses) == 1 and all(use.max_threads is None and use.permits is None for use in self._uses.values()):
            self._only_queue = next(iter(self._uses))
        #: Per thread: the shard that it was given last, if it is still with that. Counted in `running` of its queue.
        self._latest: list[Shard | None] = [None] * len(self._schedules)
        #: Virtual time of the queue that got a thread last, when it got it.
        self._served_at = 0.0
        self._on_left = on_left
        #: Per thread: when it was given what it is with, monotonic seconds; None: it sleeps.
        self._busy_since: list[float | None] = [None] * len(self._schedules)
        self._helped = [False] * len(self._schedules)
        self._none_stuck_until = 0.0
        self._changed = threading.Condition()
        self._idle = 0
        self._leader: int | None = None
        self._closed = False
        self._nudged = False
        #: The queues some of whose shards have priorities.
        self._with_levels: set[str] = set()
        #: Shards that an event loop works, and that count in `running` of their queues.
        self._at_work: set[Shard] = set()
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
                timeout = self._timeout(thread, now)
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

    def wait_many(self, count: int, until: float = inf) -> list[Shard]:
        """As `pick_many`, but sleeps until there is one, or until `nudge`, or until no more is handed out, or that
        monotonic time has come.
        """
        with self._changed:
            while True:
                now = self._clock()
                shards = self._pick_many(count, (), now)
                if shards or self._nudged or now >= until:
                    self._nudged = False
                    return shards
                due = self._next_due(now) if count and not self._closed else None
                if until < inf:
                    due = until if due is None else min(due, until)
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
            # Most shards of a busy loop are claimed: what costs less is asked first.
            return (shard.dispatch.claimed_by is None or shard in ended) and is_ready(0, now, shard)

        for shard in ended:
            self._end_work(shard, now)
        waiting = {queue: [shard for shard in shards if ready(shard)] for queue, shards in self._by_queue.items()}
        if self._only_queue is not None:
            shards = waiting.get(self._only_queue, [])
            picked = list(islice(self._choices(self._only_queue, shards, count, now, ready), count))
        else:
            picked = self._fair_shards(
                {queue: shards for queue, shards in waiting.items() if shards}, count, now, ready
            )
        for shard in picked:
            shard.dispatch.claimed_by = 0
        return picked

    def _fair_shards(
        self, waiting: dict[str, list[Shard]], count: int, now: float, ready: Callable[[Shard], bool]
    ) -> list[Shard]:
        """Of the shards that are ready, by queue, up to so many: each of the queue whose turn it is."""
        choices = {queue: self._choices(queue, shards, count, now, ready) for queue, shards in waiting.items()}
        left = {queue: len(shards) for queue, shards in waiting.items()}
        for queue in left:
            self._uses[queue].count_until(now)
        picked: list[Shard] = []
        kept: list[QueueUse] = []  # for which a place is kept until it is known whether they may begin
        try:
            while len(picked) + len(kept) < count:
                uses = self._candidates(left, count - len(picked), now)
                if not uses:
                    break
                use = next_queue(uses)
                if use.is_full:
                    use.running += 1
                    kept.append(use)
                else:
                    shard = next(choices[use.queue], None)
                    if shard is None:
                        del left[use.queue]
                        continue
                    self._begin_work(use, shard, left, now)
                    picked.append(shard)
                left[use.queue] -= 1
                if not left[use.queue]:
                    del left[use.queue]
        except BaseException:  # of the application's scheduler: nothing was picked
            for shard in picked:
                self._end_work(shard, now)
            raise
        finally:
            for use in kept:
                use.running -= 1
        return picked

    def _candidates(self, queues: Mapping[str, int], count: int, now: float) -> list[QueueUse]:
        """Of these queues, each with how many of its shards are ready, those that may begin a batch, or perhaps may in
        a moment.
        """
        found = []
        for queue, ready_count in queues.items():
            use = self._uses[queue]
            if not use.is_full:
                found.append(use)
                continue
            self._ask_for_permits(use, min(ready_count, count))
            if use.awaits_answer(now):
                found.append(use)
        return found

    def _choices(
        self, queue: str, shards: list[Shard], most: int, now: float, ready: Callable[[Shard], bool]
    ) -> Iterator[Shard]:
        """Up to so many of the shards of a queue that are ready, as its scheduler chooses them one after the other."""
        schedule = self._schedules[0][queue]
        if type(schedule) is LagScheduler and queue in self._with_levels:
            yield from schedule.in_turn(shards, now)
            return
        if type(schedule) is LagScheduler:  # asked one by one it would look at all of them each time
            yield from nsmallest(most, shards, key=lambda shard: shard.dispatch.next_due or 0.0)
            return
        left = list(shards)
        while left:
            shard = schedule(left, now, ready)
            if shard is None or shard not in left:
                return
            left.remove(shard)
            yield shard

    def _begin_work(self, use: QueueUse, shard: Shard, waiting: Collection[str], now: float) -> None:
        for other in self._uses.values():
            if other.queue not in waiting:
                other.catch_up(use.virtual_time)
        use.begin(now)
        self._allow(use, shard)
        self._at_work.add(shard)

    def _end_work(self, shard: Shard, now: float) -> None:
        if shard in self._at_work:
            self._at_work.remove(shard)
            self._settle(shard, 0)
            self._uses[shard.queue].end(now)

    def _hand_on(self, thread: int) -> None:
        # Whoever leaves the idle ones wakes another: to look for further work, and to lead if nobody does.
        if self._leader == thread:
            self._leader = None
        if self._idle:
            self._changed.notify()

    def _timeout(self, thread: int, now: float) -> float | None:
        """Seconds for which a thread that found nothing sleeps, unless it is woken; None: until then."""
        due: float | None = None
        if self._leader is None or self._leader == thread:
            self._leader = thread
            due = self._next_due(now)
        for use in self._uses.values():
            if use.awaits_answer(now) and use.permits is not None:
                due = use.permits.answer_until if due is None else min(due, use.permits.answer_until)
        if self._may_decline and any(self._is_waiting(use, thread, now) for use in self._uses.values()):
            # This thread's scheduler declined what is ready. Another's may want it, and each may want it later.
            due = now + ASK_AGAIN if due is None else min(due, now + ASK_AGAIN)
            if now - self._all_asked_at >= ASK_AGAIN:
                self._all_asked_at = now
                self._changed.notify_all()
        return None if due is None else min(max(due - now, 0.0), LONGEST_WAIT)

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
                and not shard.in_flight.is_full
            ):
                if due > now:
                    earliest = due
                elif not self._uses[shard.queue].is_full:  # else whoever leaves the queue wakes a thread
                    earliest = now + ASK_AGAIN if earliest is None else min(earliest, now + ASK_AGAIN)
        return earliest

    # --- which shard ---

    def _pick(self, thread: int, now: float) -> Shard | None:
        if self._closed:
            return None
        stuck = () if now < self._none_stuck_until else self._stuck(thread, now)
        if self._only_queue is not None:
            shard = self._shard_of(self._only_queue, thread, now, stuck)
        else:
            shard = self._fair_shard(thread, now, stuck)
        if shard is not None:
            shard.dispatch.claimed_by = thread
            self._busy_since[thread] = now
        return shard

    def _fair_shard(self, thread: int, now: float, stuck: Sequence[int]) -> Shard | None:
        """A shard of the queue whose turn it is; of another queue if the scheduler declines."""
        left = self._end_latest(thread, now)  # what it comes from doesn't count: it may go on with that
        shard: Shard | None = None
        try:
            waiting: list[QueueUse] = []
            others: list[QueueUse] = []
            for use in self._uses.values():
                if now < use.rests_until:
                    continue
                if use.running:
                    use.count_until(now)
                if use.rests_until > -inf:
                    use.rests_until = -inf
                    use.catch_up(self._served_at)
                if self._is_waiting(use, thread, now):
                    waiting.append(use)
                else:
                    others.append(use)
            asking = [use for use in others if use.awaits_answer(now)]
            while waiting and shard is None:
                use = next_queue([*waiting, *asking])
                if use.is_full:
                    break  # the thread waits for the answer
                shard = self._shard_of(use.queue, thread, now, stuck)
                if shard is None:
                    waiting.remove(use)
                    others.append(use)
            if shard is not None:
                self._served_at = use.virtual_time
                for other in others:
                    other.catch_up(use.virtual_time)
                use.begin(now)
                self._allow(use, shard)
                self._latest[thread] = shard
        finally:
            if left is not None and (shard is None or shard.queue != left.queue):
                self._wake_for_place(left)
        return shard

    def _shard_of(self, queue: str, thread: int, now: float, stuck: Sequence[int]) -> Shard | None:
        """What the thread's scheduler chooses of a queue; None: nothing is ready, or it declines."""
        schedule, ready = self._schedules[thread][queue], partial(is_ready, thread, now)
        shard: Shard | None = None
        if stuck and queue not in self._with_levels:
            theirs = {shard for other in stuck for shard in self._preferred[other].get(queue, ())}
            # One that goes round its shards would lose its place by this: with 1 and 3 here and 2 there it would take 3
            # after 2 and 2 after 3, and never 1. An application's own is asked, as it may decline.
            help_by = schedule if self._may_decline else _OLDEST_FIRST
            shard = help_by(sorted(theirs, key=place), now, ready)
        # A scheduler of the application's own may be wrong: what is not ready, or of another queue, is no choice.
        if shard is None or shard.queue != queue or not ready(shard):
            if queue not in self._with_levels:  # else the most urgent shard of the node comes before those preferred
                shard = schedule(self._preferred[thread].get(queue, ()), now, ready)
            if shard is None or shard.queue != queue or not ready(shard):
                shard = schedule(self._by_queue.get(queue, ()), now, ready)
                if shard is None or shard.queue != queue or not ready(shard):
                    return None
        return shard

    def _stuck(self, thread: int, now: float) -> list[int]:
        """Every other time: the threads that have been running one batch for long. Others work their shards then."""
        stuck = [
            other
            for other, since in enumerate(self._busy_since)
            if other != thread and since is not None and now - since > PATIENCE
        ]
        if not stuck:
            self._none_stuck_until = now + PATIENCE / 10
            return []
        self._helped[thread] = not self._helped[thread]
        return stuck if self._helped[thread] else []

    def _is_waiting(self, use: QueueUse, thread: int, now: float) -> bool:
        """Whether the queue may have the thread and has a shard that is ready for it. If none is even due, it rests."""
        if use.is_full:
            if use.permits is not None and not use.permits.wanted and self._ready_count(use.queue, now):
                self._ask_for_permits(use, 1 + self._idle)
            return False
        earliest = inf
        for shard in self._by_queue.get(use.queue, ()):
            due = shard.dispatch.next_due
            if due is not None:
                if due <= now and is_ready(thread, now, shard):
                    return True
                earliest = min(earliest, due)
        if earliest > now:
            use.rests_until = earliest
        return False

    def _expect(self, shard: Shard, due: float | None) -> None:
        """From now on the shard's next job is known to be due then; None: it has none."""
        shard.dispatch.next_due = due
        if due is not None and self._only_queue is None:
            use = self._uses[shard.queue]
            if due < use.rests_until:
                use.rests_until = due

    def _end_latest(self, thread: int, now: float) -> QueueUse | None:
        """The thread is not with the shard any more that it was given last; returns what that shard's queue uses."""
        shard, self._latest[thread] = self._latest[thread], None
        if shard is None:
            return None
        self._settle(shard, 0)
        use = self._uses[shard.queue]
        use.end(now)
        return use

    def _wake_for_place(self, use: QueueUse) -> None:
        # A thread has left the queue. If that one was full, nobody was woken for its shards, and no alarm is set for
        # them: this is what makes up for it. One thread, as there is room for one.
        if self._idle and (use.running + 1 == use.max_threads or (use.permits is not None and not use.is_full)):
            self._changed.notify()

    # --- limits over all nodes ---

    def _ask_for_permits(self, use: QueueUse, batches: int) -> None:
        """So many batches of the queue could begin."""
        if use.permits is not None and not use.permits.wanted and not use.has_all_threads:
            use.permits.wanted = batches
            use.permits.answer_until = self._clock() + ANSWER_SECONDS
            use.permits.ask()

    def _allow(self, use: QueueUse, shard: Shard) -> None:
        if use.permits is not None:
            shard.dispatch.allowance = use.permits.begin()

    def _settle(self, shard: Shard, used: int) -> None:
        allowance, shard.dispatch.allowance = shard.dispatch.allowance, None
        permits = self._uses[shard.queue].permits
        if allowance is not None and permits is not None:
            permits.settle(allowance, used)

    def _ready_count(self, queue: str, now: float) -> int:
        """How many of its shards anybody could begin with."""
        return sum(
            shard.dispatch.claimed_by is None and is_ready(0, now, shard) for shard in self._by_queue.get(queue, ())
        )

    def change_permits(self, queue: str, change: Callable[[QueuePermits, Demand], T]) -> T:
        """For `permits`: calls ``change`` under the lock with what the queue may begin and what it could. Wakes whoever
        may begin a batch after that.
        """
        with self._changed:
            use, now = self._uses[queue], self._clock()
            permits = use.permits
            assert permits is not None
            ready = 0
            if permits.wanted and not self._closed:
                ready = min(self._ready_count(queue, now), max(self._idle, permits.wanted))
                if use.max_threads is not None:
                    ready = min(ready, max(use.max_threads - use.running, 0))
            answer_until = permits.answer_until
            result = change(permits, Demand(use.running, ready, self._idle))
            is_answered = permits.answer_until != answer_until  # who waited for that goes on with other queues
            if self._idle and (is_answered or (ready and not use.is_full)):
                self._changed.notify_all()
            return result

    # --- what is known of the shards ---

    def took(self, shard: Shard, wakes: int, delivery: Delivery) -> None:
        """Takes note of what the reply of a take from the caller's shard said. ``wakes``: the shard's count before the
        call was sent; a wake-up that came since may be newer than the reply, so the shard is looked at again.
        """
        now = self._clock()
        with self._changed:
            if delivery.levels is not None or shard.dispatch.levels is not None:
                shard.dispatch.level = urgent_level(shard.dispatch.levels, now)
                self._note_levels(shard, wakes, delivery.levels, now)
            if shard.dispatch.wakes != wakes:
                self._expect(shard, now)
            else:
                self._expect(shard, None if delivery.delay is None else now + delivery.delay)
            shard.dispatch.paused = delivery.paused and shard.dispatch.wakes == wakes
            if shard.dispatch.allowance is not None:
                self._settle(shard, len(delivery.jobs))

    def _note_levels(self, shard: Shard, wakes: int, levels: Mapping[int, float] | None, now: float) -> None:
        known = {level: now + delay for level, delay in (levels or {}).items()}
        if shard.dispatch.wakes != wakes:  # what a wake-up has said since may be newer than the reply
            for level, due in (shard.dispatch.levels or {}).items():
                known[level] = min(due, known.get(level, inf))
        shard.dispatch.levels = known or None
        self._with_levels.add(shard.queue)

    def look_again(self, shard: Shard) -> None:
        """What is known of the caller's shard is out of date: jobs went back to it."""
        with self._changed:
            now = self._clock()
            if shard.dispatch.levels is not None:
                shard.dispatch.levels[shard.dispatch.level] = now
            self._expect(shard, now)

    def rest(self, shard: Shard, seconds: float) -> None:
        """The caller's shard is in trouble of its own: nobody looks at it for a while."""
        with self._changed:
            self._expect(shard, self._clock() + seconds)

    def rest_for_failover(self, shard: Shard) -> None:
        """The primary of the caller's shard, in a cluster, does not answer: the caller goes on with shards of others.
        What it has finished and could not be acknowledged goes with the next take of the shard.
        """
        now = self._clock()
        with self._changed:
            # Its jobs stay due since when they are: else it would be behind all that became due in the meantime.
            shard.dispatch.rests_until = now + random.uniform(*SILENT_SECONDS)
            if shard.dispatch.next_due is None:
                self._expect(shard, now)

    def unclaim(self, shard: Shard) -> None:
        """The caller has finished with the shard."""
        with self._changed:
            self._end_claim(shard, None)
            if self._idle and shard.dispatch.next_due is not None and not shard.dispatch.leaving:
                self._notify(shard)
        if shard.dispatch.leaving:
            self._on_left(shard)

    def occupy(self, shard: Shard, *, is_occupied: bool) -> None:
        """Whether a consumer has jobs of it in hand, though it need not have claimed it: then it is not given up."""
        with self._changed:
            shard.dispatch.is_occupied = is_occupied
        if shard.dispatch.leaving and not is_occupied:
            self._on_left(shard)

    def withhold(self, shard: Shard) -> None:
        """The caller has finished with the shard, and no thread may have it before somebody calls `unclaim`."""
        with self._changed:
            self._end_claim(shard, _NOBODY)  # what it counts for ends here: nobody may come for another shard

    def _end_claim(self, shard: Shard, claimed_by: int | None) -> None:
        thread, shard.dispatch.claimed_by = shard.dispatch.claimed_by, claimed_by
        if shard in self._at_work:
            self._end_work(shard, self._clock())
        if thread is not None and self._latest[thread] is shard:  # it goes on without another shard
            left = self._end_latest(thread, self._clock())
            if left is not None:
                self._wake_for_place(left)

    # --- for the maintenance loop and the listener ---

    def assign(self, preferred: Sequence[Sequence[Shard]]) -> None:
        """From now on these are the shards of the threads. What a thread works just now it goes on with."""
        groups = [_by_queue(group) for group in preferred]
        shards = sorted({shard for group in preferred for shard in group}, key=place)
        with self._changed:
            self._preferred = groups
            self._all, self._by_queue = shards, _by_queue(shards)
            now = self._clock()
            for use in self._uses.values():
                use.rests_until = min(use.rests_until, now)
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
                    self._notify(shard)

    def wake(self, shard: Shard, delay: float = 0.0, level: int = 0) -> None:
        """The shard has work of that priority that is due in ``delay`` seconds, or earlier than was known."""
        with self._changed:
            shard.dispatch.wakes += 1
            due = self._clock() + delay
            if level or shard.dispatch.levels is not None:
                if shard.dispatch.levels is None:
                    shard.dispatch.levels = {} if shard.dispatch.next_due is None else {0: shard.dispatch.next_due}
                    self._with_levels.add(shard.queue)
                shard.dispatch.levels[level] = min(due, shard.dispatch.levels.get(level, inf))
            if shard.dispatch.next_due is None or due < shard.dispatch.next_due:
                self._expect(shard, due)
            if delay == 0.0:
                shard.dispatch.paused = False
            if shard.dispatch.claimed_by is None and not shard.dispatch.leaving and self._idle:
                self._notify(shard)

    def refreshed(
        self,
        shard: Shard,
        wakes: int,
        delay: float | None,
        *,
        paused: bool,
        levels: Mapping[int, float] | None = None,
    ) -> None:
        """What a look at an unclaimed shard gave, unless something happened to it meanwhile."""
        with self._changed:
            if shard.dispatch.claimed_by is None and shard.dispatch.wakes == wakes:
                now = self._clock()
                self._expect(shard, None if delay is None else now + delay)
                if levels is not None or shard.dispatch.levels is not None:
                    self._note_levels(shard, wakes, levels, now)
                shard.dispatch.paused = paused
                if shard.dispatch.next_due is not None and self._idle and not paused and not shard.dispatch.leaving:
                    self._notify(shard)

    def _notify(self, shard: Shard) -> None:
        # Due now: anyone may take it; if its queue is full, whoever leaves that wakes a thread. Due later: the leader
        # must set its alarm anew.
        due = shard.dispatch.next_due
        if due is not None and due > self._clock():
            self._changed.notify_all()
        elif not self._uses[shard.queue].is_full:
            self._changed.notify()
        else:
            self._ask_for_permits(self._uses[shard.queue], 1)

    def unclaimed(self, shards: Sequence[Shard]) -> list[tuple[Shard, int]]:
        """Those of the shards that nobody works just now, with their wake-up counts."""
        with self._changed:
            return [(shard, shard.dispatch.wakes) for shard in shards if shard.dispatch.claimed_by is None]

    def resting(self, shards: Sequence[Shard]) -> list[Shard]:
        """Those of the shards of which nobody has anything in hand."""
        with self._changed:
            return [shard for shard in shards if shard.dispatch.claimed_by is None and not shard.dispatch.is_occupied]

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
    """Whether the thread may work it: it has due work, is held, not paused, not to be given up, not full, and nobody
    else has claimed it.
    """
    state = shard.dispatch
    return (
        state.next_due is not None
        and state.next_due <= now
        and (state.claimed_by is None or state.claimed_by == thread)
        and not state.paused
        and not state.leaving
        and state.rests_until <= now < shard.lease.deadline
        and not shard.in_flight.is_full
    )


def _by_queue(shards: Iterable[Shard]) -> dict[str, list[Shard]]:
    """The shards of each queue, in order."""
    groups: dict[str, list[Shard]] = {}
    for shard in sorted(shards, key=place):
        groups.setdefault(shard.queue, []).append(shard)
    return groups
