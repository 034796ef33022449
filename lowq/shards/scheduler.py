"""Chooses the next queue of a thread, and the shard of that queue.

Every queue with due work has its share of the threads. Shares are kept twice, as neither is enough alone:

1. By threads. No queue gets another thread while a second one would have less than its share even with one more. So a
   queue of long batches cannot take all threads from a queue of short ones.
2. By time. Threads don't divide by weights: 2 threads at 3:1 are 1.5 and 0.5. Which queue gets the thread in between is
   decided by virtual time: the seconds of threads that a queue has used, divided by its weight. The least is next.

The second is start-time fair queueing (Goyal, Vin and Cheng, "Start-time Fair Queuing: a scheduling algorithm for
integrated services packet switching networks", 1996), with a batch as the packet and a thread as the link. As there, a
queue saves up no credit: while it has nothing that a thread could work, its virtual time follows that of the queue that
is served.

A scheduler chooses the shard of the queue. It is any callable `(shards, now, ready) -> shard or None`. It is given
shards of ONE queue, ordered by index, the monotonic time in seconds, and a function that says whether this thread may
work a shard now: the shard has due work, is leased, not paused, and nobody else works it. It returns a ready shard, or
None: a shard that is not ready counts as None. It never waits and reads no clock. Every thread has an instance of its
own for each queue, so a scheduler may keep state without a lock.

A scheduler is asked about all shards of the queue that the node holds. If it declines them though one is ready, the
next queue has its turn, and it is asked again within 0.1 s. There may be thousands of shards, and all threads wait for
the choice: ask `ready` last.

Nothing here holds a lock: all of it belongs to the lock of the dispatcher.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import inf, nextafter
from operator import attrgetter
from typing import Protocol, TypeAlias, TypeVar

from lowq.clock import Clock
from lowq.shards.permits import QueuePermits, Share
from lowq.shards.shard import NO_JOBS, Begun, Shard, urgent_level

#: Of a heap of shards: when the next job is due, the shard's place among all, a number of its own, and the shard.
Entry = tuple[float, int, int, Shard]

#: Seconds after which a scheduler that declined a shard that is ready is asked again, at the latest.
ASK_AGAIN = 0.1
#: Seconds for which a thread waits for the answer whether a queue whose turn it is may begin a batch, at most: Redis is
#: asked just then. If it went on with another queue at once, permits would come while all threads are busy, each time.
ANSWER_SECONDS = 0.5


# --- the shard of a queue ---


class Due(Protocol):
    """When the oldest waiting job of a shard is due."""

    @property
    def levels(self) -> Mapping[int, float] | None:
        """Of a shard with priorities: priority -> when the oldest waiting job of it is due, as `next_due`."""
        ...

    @property
    def next_due(self) -> float | None:
        """As of `Schedulable`."""
        ...


class Schedulable(Protocol):
    """What a scheduler may ask of a shard."""

    @property
    def queue(self) -> str:
        """The name of its queue."""
        ...

    @property
    def index(self) -> int:
        """Its number in the queue, from 0."""
        ...

    @property
    def dispatch(self) -> "Due":
        """What the dispatcher knows of it."""
        ...

    @property
    def next_due(self) -> float | None:
        """Monotonic time, seconds, at which its oldest waiting job is (or was) due; None: nothing waits."""
        ...

    def priority_at(self, now: float) -> int:
        """The most urgent priority of its jobs that are due at that monotonic time: 0, the most urgent, to 9."""
        ...


T = TypeVar("T")
S = TypeVar("S", bound=Schedulable)

#: What a user's own scheduler has to be: (shards of one queue, monotonic seconds, which of them are ready) -> one of
#: them, or None. Over T, not S: with the bound in the alias, pyright refuses Scheduler[Shard] for every shard.
Scheduler: TypeAlias = Callable[[Sequence[T], float, Callable[[T], bool]], T | None]


class _Turns:
    """Which priority has the next turn, as within a shard: the most urgent, but for two of ten turns. One is the least
    urgent one's, and one that of each in turn, so none of them starves.
    """

    def __init__(self) -> None:
        self._count = 0

    def choose(self, levels: Mapping[int, object]) -> int:
        """One of the levels, of which there is one at least."""
        if len(levels) == 1:
            return next(iter(levels))
        self._count += 1
        if self._count % 10 == 0:
            return max(levels)
        if self._count % 10 == 5:
            return sorted(levels)[self._count // 10 % len(levels)]
        return min(levels)


class LagScheduler:
    """The ready shard whose oldest due job has waited longest; of equals, the first. Keeps the lag low. Of shards with
    priorities one of those with the most urgent jobs; every tenth turn is that of the least urgent ones.
    """

    def __init__(self) -> None:
        self._turns = _Turns()

    def __call__(self, shards: Sequence[S], now: float, ready: Callable[[S], bool]) -> S | None:
        longest: S | None = None
        earliest = nextafter(now, inf)  # what is due at this very moment is due
        for shard in shards:
            due = shard.dispatch.next_due  # not the property: of thousands of shards it would take twice as long
            if due is not None and due < earliest and ready(shard):
                longest, earliest = shard, due
        if longest is None or longest.dispatch.levels is None:
            return longest
        return next(self.in_turn([shard for shard in shards if ready(shard)], now), None)

    def in_turn(self, shards: Sequence[S], now: float) -> Iterator[S]:
        """Shards that are ready, one after the other as they have their turns by their priorities."""
        waiting: dict[int, list[tuple[float, int, S]]] = {}
        for position, shard in enumerate(shards):
            levels = shard.dispatch.levels
            level = urgent_level(levels, now)
            due = shard.dispatch.next_due if levels is None else levels.get(level, now)
            waiting.setdefault(level, []).append((now if due is None else due, position, shard))
        for some in waiting.values():
            heapify(some)
        while waiting:
            level = self._turns.choose(waiting)
            yield heappop(waiting[level])[2]
            if not waiting[level]:
                del waiting[level]


class SeqScheduler:
    """Round robin: the first ready shard after the one returned last, by queue and index; of shards with priorities as
    `LagScheduler` has it.
    """

    def __init__(self) -> None:
        self._last = ("", 0, -1)
        self._turns = _Turns()

    def __call__(self, shards: Sequence[S], now: float, ready: Callable[[S], bool]) -> S | None:
        shard = self._after_last(shards, ready)
        if shard is not None and shard.dispatch.levels is not None:
            levels = {one: urgent_level(one.dispatch.levels, now) for one in shards if ready(one)}
            level = self._turns.choose(dict.fromkeys(levels.values()))
            shard = self._after_last(shards, lambda one: levels.get(one) == level)
        if shard is not None:
            self._last = place(shard)
        return shard

    def _after_last(self, shards: Sequence[S], ready: Callable[[S], bool]) -> S | None:
        count = len(shards)
        start = bisect_right(shards, self._last, key=place)
        for step in range(count):
            shard = shards[(start + step) % count]
            if ready(shard):
                return shard
        return None


def one_by_one(schedule: Scheduler[S], shards: Sequence[S], now: float, ready: Callable[[S], bool]) -> Iterator[S]:
    """The shards of a queue that are ready, as a scheduler chooses them one after the other."""
    chosen: list[S] = []
    while True:
        shard = schedule(shards, now, lambda one: one not in chosen and ready(one))
        # One of the application's own may be wrong: what is not ready, or of another queue, is no choice.
        if shard is None or shard in chosen or shard.queue != shards[0].queue or not ready(shard):
            return
        chosen.append(shard)
        yield shard


def place(shard: Schedulable) -> tuple[str, int, int]:
    """The key by which shards are ordered. While a queue is resharded it has shards of two epochs."""
    return shard.queue, getattr(shard, "epoch", 0), shard.index


# --- the queue ---


class QueueUse:
    """The use of the threads by a queue. Times are monotonic seconds."""

    __slots__ = (
        "_counted_until", "heap", "max_threads", "next_due", "permits", "queue", "running", "virtual_time", "weight",
    )  # fmt: skip

    def __init__(self, queue: str, share: Share, permits: QueuePermits | None = None) -> None:
        self.queue = queue
        self.weight, self.max_threads = share.weight, share.max_threads
        #: None: it has no limits over all nodes.
        self.permits = permits
        #: Threads whose latest shard is of this queue.
        self.running = 0
        #: Seconds of threads used, divided by the weight. A running batch counts while it runs.
        self.virtual_time = 0.0
        self._counted_until = 0.0
        #: An entry of each of its shards that is ready, or will be when its time comes. An entry is void when its time
        #: is no longer that of the shard.
        self.heap: list[Entry] = []
        #: When to look for a ready shard again, unless one becomes ready before. As of the last look.
        self.next_due = -inf

    @property
    def is_full(self) -> bool:
        """Whether it has all the threads that it may have."""
        return self.has_all_threads or (self.permits is not None and not self.permits.may_begin(self.running))

    @property
    def has_all_threads(self) -> bool:
        """Whether it has as many threads as it may have in this process."""
        return self.max_threads is not None and self.running >= self.max_threads

    def awaits_answer(self, now: float) -> bool:
        """Whether Redis is being asked if it may begin another batch."""
        return self.permits is not None and now < self.permits.answer_until and not self.has_all_threads

    def count_until(self, now: float) -> None:
        """Adds what its threads have used since the last time. Before each change of `running`."""
        self.virtual_time += self.running * (now - self._counted_until) / self.weight
        self._counted_until = now

    def begin(self, now: float) -> None:
        """One more thread works it."""
        self.count_until(now)
        self.running += 1

    def end(self, now: float, begun: Begun) -> None:
        """One thread less works it."""
        self.count_until(now)
        self.running -= 1
        if self.permits is not None:
            self.permits.end(begun)

    def ready(self, thread: int, most: int, now: float) -> list[Shard]:
        """Its shards that are ready for the thread and whose jobs have waited longest, up to so many."""
        found: dict[Shard, None] = {}
        kept = []
        heap, self.next_due = self.heap, inf
        while heap and heap[0][0] <= now:
            entry = heap[0]
            shard, state = entry[-1], entry[-1].dispatch
            if state.next_due == entry[0] and shard not in found:  # else another entry says when it is due
                if is_ready(thread, now, shard):
                    found[shard] = None
                    if len(found) == most:
                        break
                    kept.append(entry)
                # Whoever ends one of these enters it again.
                elif not (state.claimed_by is not None or state.paused or state.leaving):
                    kept.append(entry)
                    if state.rests_until > now:
                        self.next_due = min(self.next_due, state.rests_until)
            heappop(heap)
        if found:
            self.next_due = now + ASK_AGAIN  # should the scheduler decline them
        elif heap:
            self.next_due = min(self.next_due, heap[0][0])
        for entry in kept:
            heappush(heap, entry)
        return list(found)


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
        and shard.in_flight.full_under is not shard.lease.current
    )


class Shares:
    """The use of the threads of a dispatcher by its queues."""

    def __init__(self, shares: Mapping[str, Share], permits: Mapping[str, QueuePermits], clock: Clock) -> None:
        self._clock = clock
        self.uses = {queue: QueueUse(queue, share, permits.get(queue)) for queue, share in shares.items()}
        #: The uses that may become full.
        self.bounded = {
            queue: use for queue, use in self.uses.items() if use.max_threads is not None or use.permits is not None
        }
        #: Shards of whose batches another id has begun. Entered without the lock, see `next_id_began`.
        self.began: deque[Shard] = deque()
        #: Shards that count in `running` of their queues.
        self._at_work: set[Shard] = set()

    def share_out(
        self,
        found: Mapping[QueueUse, list[Shard]],
        choose: Callable[[QueueUse], Iterator[Shard]],
        count: int,
        idle: int,
        now: float,
    ) -> list[Shard]:
        """Up to so many shards for threads that begin now. ``found``: of each queue shards that are ready; ``choose``:
        those of a queue as its scheduler chooses them; ``idle``: threads that are asleep.
        """
        for use in self.uses.values():
            if use.running:
                use.count_until(now)
        left = {use: len(shards) for use, shards in found.items()}
        choices: dict[QueueUse, Iterator[Shard]] = {}
        picked: list[Shard] = []
        kept: list[QueueUse] = []  # for which a place is kept until it is known whether they may begin
        try:
            while len(picked) + len(kept) < count:
                waiting = [use for use, ready in left.items() if ready and self._may_wait(use, ready + idle, now)]
                if not waiting:
                    break
                use = next_queue(waiting)
                left[use] -= 1
                if use.is_full:
                    use.running += 1
                    kept.append(use)
                    continue
                if use not in choices:
                    choices[use] = choose(use)
                chosen = next(choices[use], None)
                if chosen is None:
                    left[use] = 0
                    continue
                self._begin(use, chosen, waiting, now)
                picked.append(chosen)
        except BaseException:  # of the application's scheduler: nothing was picked
            for shard in picked:
                self.end(shard, now)
            raise
        finally:
            for use in kept:
                use.running -= 1
        return picked

    def _may_wait(self, use: QueueUse, batches: int, now: float) -> bool:
        """Whether a queue that could begin so many batches may begin one, or perhaps may in a moment."""
        if not use.is_full:
            return True
        self.ask_for_permits(use, batches)
        return use.awaits_answer(now)

    def _begin(self, use: QueueUse, shard: Shard, waiting: Sequence[QueueUse], now: float) -> None:
        for other in self.uses.values():
            # It had no use for a thread now: it cannot claim it later.
            if other.virtual_time < use.virtual_time and other not in waiting:
                other.virtual_time = use.virtual_time
        use.begin(now)
        if use.permits is not None:
            shard.dispatch.allowance = use.permits.begin()
        self._at_work.add(shard)

    def end(self, shard: Shard, now: float) -> bool:
        """Ends the use of a thread by the shard. Returns whether there was one."""
        if shard not in self._at_work:
            return False
        self._at_work.remove(shard)
        self.note_began()
        self.settle(shard, 0)
        begun, shard.dispatch.begun = shard.dispatch.begun, NO_JOBS
        self.uses[shard.queue].end(now, begun)
        return True

    def settle(self, shard: Shard, used: int) -> None:
        """Settles the allowance of the shard: so many of its jobs begin."""
        allowance, shard.dispatch.allowance = shard.dispatch.allowance, None
        permits = self.uses[shard.queue].permits
        if allowance is not None and permits is not None:
            shard.dispatch.begun = permits.settle(allowance, used)

    def next_id_began(self, shard: Shard) -> None:
        """The next id of the caller's batch begins, and the one before it has ended. Without the dispatcher's lock: an
        interrupt of the handler could leave it locked.
        """
        self.began.append(shard)
        permits = self.uses[shard.queue].permits
        if permits is not None:
            permits.ask()

    def note_began(self) -> None:
        """Takes note of the ids that have begun after others of their batches."""
        while self.began:
            shard = self.began.popleft()
            now, later = shard.dispatch.begun
            permits = self.uses[shard.queue].permits
            if later and permits is not None:
                shard.dispatch.begun = Begun(now, later - 1)
                permits.next_began()

    def ask_for_permits(self, use: QueueUse, batches: int) -> None:
        """Asks for permits for so many batches of the queue."""
        if use.permits is not None and not use.permits.wanted and not use.has_all_threads:
            use.permits.wanted = batches
            use.permits.answer_until = self._clock() + ANSWER_SECONDS
            use.permits.ask()


def next_queue(waiting: Sequence[QueueUse]) -> QueueUse:
    """The queue that gets the next thread, of those that could use one. Their use is counted until now."""
    if len(waiting) == 1:
        return waiting[0]
    # A queue with as many threads for its weight as another would have with one more must wait.
    least = min([(use.running + 1) / use.weight for use in waiting])
    return min([use for use in waiting if use.running / use.weight < least], key=attrgetter("virtual_time"))
