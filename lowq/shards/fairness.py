"""Which queue a thread works next: every queue with due work has its share of the threads.

Shares are kept twice, as neither is enough alone:

1. By threads. No queue gets another thread while a second one would have less than its share even with one more. So a
   queue of long batches cannot take all threads from a queue of short ones.
2. By time. Threads don't divide by weights: 2 threads at 3:1 are 1.5 and 0.5. Which queue gets the thread in between is
   decided by virtual time: the seconds of threads that a queue has used, divided by its weight. The least is next.

The second is start-time fair queueing (Goyal, Vin and Cheng, "Start-time Fair Queuing: a scheduling algorithm for
integrated services packet switching networks", 1996), with a batch as the packet and a thread as the link. As there, a
queue saves up no credit: while it has nothing that a thread could work, its virtual time follows that of the queue that
is served.

Nothing here reads a clock or holds a lock: all of it belongs to the lock of the dispatcher.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from math import inf
from operator import attrgetter
from typing import NamedTuple

from lowq.clock import Clock
from lowq.limits import Concurrency, Limit, Rate
from lowq.shards.shard import Allowance, Shard

#: Of a heap of shards: when the next job is due, the shard's place among all, a number of its own, and the shard.
Entry = tuple[float, int, int, Shard]

#: Seconds after which a scheduler that declined a shard that is ready is asked again, at the latest.
ASK_AGAIN = 0.1
#: Seconds for which a thread waits for the answer whether a queue whose turn it is may begin a batch, at most: Redis is
#: asked just then. If it went on with another queue at once, permits would come while all threads are busy, each time.
ANSWER_SECONDS = 0.5


class Share(NamedTuple):
    """What a queue may have of the threads of this process."""

    #: Its part, compared with the weights of the other queues that have due work.
    weight: float = 1
    #: Threads that work it at once, at most; None: all.
    max_threads: int | None = None
    #: Its limits over all nodes.
    limits: tuple[Limit, ...] = ()
    #: Jobs of one batch.
    batch_size: int = 1


class Demand(NamedTuple):
    """What a queue with limits over all nodes could do with more permits."""

    #: Its batches that run.
    running: int
    #: How many could begin besides.
    ready: int
    #: How many threads are asleep. The others look what to work next when they come back.
    idle: int


class QueuePermits:
    """What a queue with limits over all nodes may begin just now. `lowq.shards.permits` gets it and gives it back."""

    __slots__ = (
        "_clock", "answer_until", "ask", "at_once", "batch_size", "begun_at", "contended", "starts", "starts_until",
        "valid_until", "wanted",
    )  # fmt: skip

    def __init__(self, limits: Sequence[Limit], batch_size: int, ask: Callable[[], object], clock: Clock) -> None:
        self._clock = clock
        self.batch_size = batch_size
        #: Called when a batch could begin, or has ended, and `lowq.shards.permits` is to see to it. It does not wait.
        self.ask = ask
        #: Of each `Concurrency`: how many batches may run at once, those that run among them.
        self.at_once = [0 for limit in limits if isinstance(limit, Concurrency)]
        #: Of each of them: somebody else waits for what is not needed.
        self.contended = [False for _ in self.at_once]
        #: Of each of them: monotonic time from which on others may have been given it.
        self.valid_until = [-inf for _ in self.at_once]
        #: Of each `Rate`: slot -> how many jobs may begin that were granted in it.
        self.starts: list[dict[int, int]] = [{} for limit in limits if isinstance(limit, Rate)]
        #: Monotonic time from which on those were granted too long ago.
        self.starts_until = -inf
        #: Monotonic time at which a batch began last; at first, from when on one could.
        self.begun_at = clock()
        #: Batches that could begin, and may not, when that was noticed.
        self.wanted = 0
        #: Monotonic time until which it may be that the answer to `ask` is under way.
        self.answer_until = -inf

    def may_begin(self, running: int) -> bool:
        """Whether one more batch may begin while so many run."""
        if self.at_once and not (running < min(self.at_once) and self._clock() < min(self.valid_until)):
            return False
        return not self.starts or (all(self.starts) and self._clock() < self.starts_until)

    def has_unused(self, running: int) -> bool:
        """Whether it has more than what so many batches need."""
        return any(running < count for count in self.at_once) or any(self.starts)

    def begin(self) -> Allowance | None:
        """A batch begins. None: it may be of any size."""
        self.begun_at = self._clock()
        if not self.starts:
            return None
        jobs = min(self.batch_size, *(sum(slots.values()) for slots in self.starts))
        return Allowance(jobs, [_taken_from(slots, jobs) for slots in self.starts])

    def settle(self, allowance: Allowance, used: int) -> None:
        """Of the batch so many jobs began."""
        unused = allowance.jobs - used
        for slots, parts in zip(self.starts, allowance.parts, strict=True):
            left = unused
            for slot, count in reversed(parts):
                back = min(left, count)
                if back > 0:
                    slots[slot] = slots.get(slot, 0) + back
                    left -= back
        if unused > 0:
            self.ask()  # they are to be given back

    def end(self) -> None:
        """A batch has ended. What it had of a concurrency is there for the next, unless somebody else waits for it."""
        self.at_once = [
            count - 1 if contended else count for count, contended in zip(self.at_once, self.contended, strict=True)
        ]
        if self.wanted or any(self.contended):
            self.ask()


class QueueUse:
    """What a queue has of the threads, and had. Times are monotonic seconds."""

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
        #: Seconds of threads used, divided by the weight. What runs counts while it runs.
        self.virtual_time = 0.0
        self._counted_until = 0.0
        #: An entry of each of its shards that is ready, or will be by the time alone. One whose time is no longer that
        #: of the shard counts for nothing.
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

    def end(self, now: float) -> None:
        """One thread less works it."""
        self.count_until(now)
        self.running -= 1
        if self.permits is not None:
            self.permits.end()

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
    """What all queues of a dispatcher have of its threads."""

    def __init__(self, shares: Mapping[str, Share], ask_for_permits: Callable[[], object], clock: Clock) -> None:
        self._clock = clock
        self.uses = {
            queue: QueueUse(
                queue,
                share,
                QueuePermits(share.limits, share.batch_size, ask_for_permits, clock) if share.limits else None,
            )
            for queue, share in shares.items()
        }
        #: Those of the queues that may have all the threads that they may have.
        self.bounded = {
            queue: use for queue, use in self.uses.items() if use.max_threads is not None or use.permits is not None
        }
        #: Shards that count in `running` of their queues: those that somebody works and has not ended with.
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
        """Nobody works it any more, as its queue's share counts it; whether somebody did."""
        if shard not in self._at_work:
            return False
        self._at_work.remove(shard)
        self.settle(shard, 0)
        self.uses[shard.queue].end(now)
        return True

    def settle(self, shard: Shard, used: int) -> None:
        """Of the jobs that were allowed for the shard so many begin."""
        allowance, shard.dispatch.allowance = shard.dispatch.allowance, None
        permits = self.uses[shard.queue].permits
        if allowance is not None and permits is not None:
            permits.settle(allowance, used)

    def ask_for_permits(self, use: QueueUse, batches: int) -> None:
        """So many batches of the queue could begin."""
        if use.permits is not None and not use.permits.wanted and not use.has_all_threads:
            use.permits.wanted = batches
            use.permits.answer_until = self._clock() + ANSWER_SECONDS
            use.permits.ask()


def next_queue(waiting: Sequence[QueueUse]) -> QueueUse:
    """Of the queues that could use a thread more, the one that gets it. Their use is counted until now."""
    if len(waiting) == 1:
        return waiting[0]
    # A queue with as many threads for its weight as another would have with one more must wait.
    least = min([(use.running + 1) / use.weight for use in waiting])
    return min([use for use in waiting if use.running / use.weight < least], key=attrgetter("virtual_time"))


def _taken_from(slots: dict[int, int], jobs: int) -> list[tuple[int, int]]:
    """So many permits, the oldest first."""
    parts = []
    for slot in sorted(slots):
        count = min(jobs, slots[slot])
        if count < slots[slot]:
            slots[slot] -= count
        else:
            del slots[slot]
        parts.append((slot, count))
        jobs -= count
        if not jobs:
            break
    return parts
