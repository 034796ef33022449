"""What a queue with limits over all nodes may begin just now.

Nothing here reads Redis or holds a lock: all of it belongs to the lock of the dispatcher.
"""

from collections.abc import Callable, Sequence
from math import inf

from lowq.clock import Clock
from lowq.limits import Concurrency, Limit, Rate


class Allowance:
    """How many jobs of a queue with rates may be taken for a batch that is about to begin: those permits were granted
    for it. ``parts``: of each rate, in which slots they count.
    """

    __slots__ = ("jobs", "parts")

    def __init__(self, jobs: int, parts: list[list[tuple[int, int]]]) -> None:
        self.jobs = jobs
        self.parts = parts


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
