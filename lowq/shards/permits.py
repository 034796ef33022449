"""The permits that a queue of this process has of its limits over all nodes, and its share of the threads.

What a limit counts, and when, is said in `lowq.shards.limits`, which gets them and gives them back.
"""

import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager
from math import inf
from typing import NamedTuple

from lowq.clock import Clock
from lowq.limits import LimitRule, Rate
from lowq.shards.shard import NO_JOBS, Allowance, Begun
from lowq.store.keys import limit_key
from lowq.store.registry import TakePermits

#: Seconds for which permits that were granted wait for a thread to use them.
UNUSED_SECONDS = 0.05
#: The same where threads need longer to wake up, as handlers compute: it doubles each time that they came too late.
MOST_UNUSED_SECONDS = 1.0
#: Seconds without a batch after which a starved queue keeps a permit of a concurrency for the next thread that comes
#: back, for `MOST_UNUSED_SECONDS`, while others wait.
STARVED_SECONDS = 5.0


class Share(NamedTuple):
    """The share of a queue in the threads of this process."""

    #: Its part, compared with the weights of the other queues that have due work.
    weight: float = 1
    #: Threads that work it at once, at most; None: all.
    max_threads: int | None = None
    #: Its limits over all nodes.
    limits: tuple[LimitRule, ...] = ()
    #: Jobs of one batch.
    batch_size: int = 1
    #: Whether the jobs of a batch begin one after the other, as in ``perform_one``.
    is_per_id: bool = False


class Demand(NamedTuple):
    """How many more permits a queue could use."""

    #: Its batches that run.
    running: int
    #: How many could begin besides.
    ready: int
    #: How many threads are asleep. The others look for work when they come back.
    idle: int


class HeldPermits:
    """The permits that a queue of this process has of one limit."""

    def __init__(self, limit: LimitRule, key: str, *, is_per_id: bool = False) -> None:
        #: Seconds, of a rate; None: it is a concurrency.
        self.per = limit.seconds if isinstance(limit, Rate) else None
        #: A rate whose jobs count when they have ended.
        self.is_strict = isinstance(limit, Rate) and limit.strict
        #: A rate whose jobs count later than when they were granted: until then this process states them.
        self.is_late = self.is_strict or (self.per is not None and is_per_id)
        #: What it has is stated with each call: of a concurrency, and of a rate that counts late.
        self.is_stated = self.per is None or self.is_late
        self.most = limit.limit
        self.key = key
        # --- under the lock of the dispatcher ---
        #: Of what is stated: how many batches, or jobs of a rate, may run at once, those that run among them.
        self.count = 0
        #: Of a rate that counts late: its jobs that do not count yet and that are performed, or are about to be.
        self.busy = 0
        #: The same: jobs that count from now on, of which Redis does not know yet.
        self.counted = 0
        #: Of a concurrency: somebody else waits for what is not needed.
        self.is_contended = False
        #: Of what is stated: monotonic time from which on others may have been given it.
        self.valid_until = -inf
        #: Monotonic time before which nothing begins, as somebody has put it off for all.
        self.deferred_until = -inf
        #: Of another rate: slot -> how many jobs may begin that were granted in it.
        self.slots: dict[int, int] = {}
        # --- of the thread of `Permits` ---
        self.calls = 0
        #: Monotonic time of the last call that was answered.
        self.stated_at = 0.0
        #: What Redis knows of what is stated.
        self.stated = 0
        #: It waits for more, in Redis.
        self.waits = False
        #: Monotonic time before which there is nothing to be had.
        self.ask_at = 0.0
        #: Counts wake-ups: shows whether one came while a call was under way.
        self.wakes = 0
        #: A call that was not answered. It is sent first, unchanged.
        self.unanswered: TakePermits | None = None
        #: Monotonic time at which it was sent first: Redis may have executed it then, and not since.
        self.sent_at = 0.0
        #: Of a rate that is not stated: permits that are to be given back, by slot.
        self.returned: dict[int, int] = {}

    def used(self, running: int) -> int:
        """How many of those that are stated are in use, while so many batches run."""
        return running if self.per is None else self.busy

    def unused(self, running: int) -> int:
        """How many of them no running batch has."""
        return self.count - self.used(running) if self.is_stated else sum(self.slots.values())

    def note_counted(self, jobs: int) -> None:
        """So many of its jobs count from now on."""
        self.counted += jobs  # first: should an interrupt strike here, they count twice rather than not at all
        self.busy -= jobs
        self.count -= jobs

    def defer(self, until: float) -> None:
        """Nothing begins before that monotonic time."""
        self.deferred_until = self.ask_at = until


class QueuePermits:
    """The permits of a queue. Under the lock of its dispatcher. ``ask``: nudges `Permits`; it does not wait."""

    #: Holds the lock while the permits are changed, and says what could begin. Wakes threads that may begin a batch
    #: after that. Set by the dispatcher.
    changing: Callable[[], AbstractContextManager[Demand]]

    def __init__(
        self, queue: str, share: Share, namespace: str, nonce: str, ask: Callable[[], object], clock: Clock
    ) -> None:
        self._clock = clock
        self.queue = queue
        self.batch_size = share.batch_size
        #: Whether the ids of a batch begin one after the other.
        self.is_per_id = share.is_per_id and share.batch_size > 1
        self._nudge = ask
        #: Something has changed since `Permits` looked; and monotonic time at which it is to look anyway.
        self.is_nudged, self.due_at = False, -inf
        #: Not the node's nonce alone: after an exec the calls are counted anew.
        self.holder = f"{nonce}-{secrets.token_hex(4)}:{queue}"
        held = [
            HeldPermits(limit, limit_key(namespace, limit.name(queue)), is_per_id=self.is_per_id)
            for limit in share.limits
        ]
        # The same order everywhere: nobody has one and waits for another that somebody has who waits for the first.
        self.stated = sorted((each for each in held if each.is_stated), key=lambda each: each.key)
        self.late = [each for each in self.stated if each.is_late]
        #: Rates that count when they are granted.
        self.rates = [each for each in held if not each.is_stated]
        #: In the order in which they are asked: none is held while an earlier one is waited for.
        self.held = [*self.stated, *self.rates]
        #: Monotonic time from which on permits of rates were granted too long ago.
        self.starts_until = -inf
        #: Monotonic time at which a batch began last; at first, from when on one could.
        self.begun_at = clock()
        #: Batches that could begin, and may not, when that was noticed.
        self.wanted = 0
        #: Monotonic time until which the answer to `ask` may be under way.
        self.answer_until = -inf
        #: Monotonic time at which permits came last.
        self.granted_at = -inf
        #: Seconds for which they are kept unused: of a rate not longer than Redis counts them besides their time.
        self.least_keeps = min([UNUSED_SECONDS, *(max((each.per or 0.0) / 100, 0.02) for each in self.rates)])
        self.keeps = self.least_keeps
        #: Monotonic time at which it gave up one that it had kept for a thread.
        self.lapsed_at = -inf

    def may_begin(self, running: int) -> bool:
        """Whether one more batch may begin while so many run."""
        now = self._clock()
        if not all(held.unused(running) > 0 and now < held.valid_until for held in self.stated):
            return False
        if any(now < held.deferred_until for held in self.held):
            return False
        return not self.rates or (now < self.starts_until and all(held.slots for held in self.rates))

    def has_unused(self, running: int) -> bool:
        """Whether it has more than so many batches need."""
        return any(held.unused(running) > 0 for held in self.held)

    def begin(self) -> Allowance | None:
        """A batch begins. None: it may be of any size."""
        self.begun_at = self._clock()
        if not self.rates and not self.late:
            return None
        jobs = min(self.batch_size, *(held.unused(0) for held in [*self.rates, *self.late]))
        for held in self.late:
            held.busy += jobs
        return Allowance(jobs, [_taken_from(held.slots, jobs) for held in self.rates])

    def settle(self, allowance: Allowance, used: int) -> Begun:
        """Takes back the permits of a batch of which only so many jobs begin."""
        unused = allowance.jobs - used
        for held, parts in zip(self.rates, allowance.parts, strict=True):
            left = unused
            for slot, count in reversed(parts):
                back = min(left, count)
                if back > 0:
                    held.slots[slot] = held.slots.get(slot, 0) + back
                    left -= back
        for held in self.late:
            held.busy -= unused
            if not held.is_strict:  # the first of its ids begins now
                held.note_counted(min(used, 1))
        if unused > 0 or self.late:
            self.ask()  # for Redis to learn of it
        if not self.late:
            return NO_JOBS
        return Begun(min(used, 1), max(used - 1, 0)) if self.is_per_id else Begun(used, 0)

    def next_began(self) -> None:
        """The next id of a batch begins, and the one before it has ended."""
        for held in self.late:
            held.note_counted(1)

    def end(self, begun: Begun) -> None:
        """A batch has ended. What it had of a concurrency is there for the next, unless somebody else waits for it."""
        for held in self.late:
            held.busy -= begun.later
            if held.is_strict:
                held.note_counted(begun.now)
        contended = [held for held in self.stated if held.is_contended]
        for held in contended:
            held.count -= 1
        if self.wanted or contended or self.late:
            self.ask()

    def ask(self) -> None:
        """Has `Permits` look at it."""
        self.is_nudged = True
        self._nudge()

    def awaits_thread(self, running: int, now: float) -> bool:
        """Whether it is starved and keeps what was granted for a thread that is still busy."""
        since = max(self.begun_at, self.lapsed_at)
        if self.rates or not self.has_unused(running) or now - since < STARVED_SECONDS:
            return False
        if now - self.granted_at < MOST_UNUSED_SECONDS:
            return True
        self.lapsed_at = now
        return False


def _taken_from(slots: dict[int, int], jobs: int) -> list[tuple[int, int]]:
    """Takes so many permits out of the slots, the oldest first."""
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
