"""What a consumer has in hand: jobs that were taken and neither reported nor lost, by receipt.

A receipt is the queue, the shard, the delivery and the id. So of an id that is taken again the earlier receipt is no
longer one.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from threading import get_ident

from lowq.shards.delivery import Delivery
from lowq.shards.shard import Shard


@dataclass(slots=True, eq=False)
class HeldDelivery:
    """What the jobs of one delivery have in common."""

    shard: Shard
    #: Its lease is the one that they were taken under, or that was got when they were adopted. Without its jobs.
    delivery: Delivery
    #: Monotonic time at which they are released; inf: never. See `InHand.touch`.
    deadline: float
    #: Of those that have failed before: id -> retry_count.
    retry_counts: dict[str, int] = field(default_factory=dict)
    #: What all their receipts begin with; the id follows.
    head: str = field(init=False)

    def __post_init__(self) -> None:
        self.head = f"{self.shard!r}:{self.delivery.number}:"

    @property
    def is_current(self) -> bool:
        """Whether the lease is the one under which jobs of the shard may be reported."""
        return self.delivery.lease.token == self.shard.in_flight.token

    def ids_of(self, receipts: Iterable[str]) -> list[str]:
        """The ids of jobs of this delivery."""
        length = len(self.head)
        return [receipt[length:] for receipt in receipts]


class InHand:
    """See above. The consumer's lock guards it. ``on_occupied``: told of a shard whether jobs of it are in hand."""

    def __init__(self, on_occupied: Callable[[Shard, bool], object]) -> None:
        self._on_occupied = on_occupied
        self._held: dict[str, HeldDelivery] = {}
        #: How many of each shard.
        self._counts: dict[Shard, int] = {}
        #: Of each shard: the lease that was taken under last.
        self._tokens: dict[Shard, str] = {}
        #: The deadlines of those that have one of their own.
        self._touched: dict[str, float] = {}
        #: Those that no caller has received yet, and the thread that has taken them.
        self.pending: dict[str, int] = {}
        #: Those that nobody will be given: they are to be given back.
        self.unwanted: set[str] = set()
        #: Those with a report that got no answer.
        self.uncertain: set[str] = set()

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __contains__(self, receipt: object) -> bool:
        return receipt in self._held

    def get(self, receipt: str) -> HeldDelivery | None:
        """The delivery of a job in hand."""
        return self._held.get(receipt)

    def values(self) -> Collection[HeldDelivery]:
        """The deliveries of all jobs in hand, one for each job."""
        return self._held.values()

    def by_delivery(self, receipts: Iterable[str]) -> list[tuple[HeldDelivery, list[str]]]:
        """Those of the receipts that may be reported."""
        groups: dict[HeldDelivery, list[str]] = {}
        for receipt in receipts:
            held = self._held.get(receipt)
            if held is not None:
                groups.setdefault(held, []).append(receipt)
        return [(held, some) for held, some in groups.items() if held.is_current]

    def of_shard(self, shard: Shard) -> list[str]:
        """The receipts of a shard's jobs."""
        return [receipt for receipt, held in self._held.items() if held.shard is shard]

    # --- what comes and goes ---

    def add(self, held: HeldDelivery, ids: Iterable[str]) -> list[str]:
        """These ids of a delivery are in hand from now on; returns their receipts. What is in hand of an earlier lease
        of the shard is lost with that.
        """
        self.forget_earlier(held.shard, held.delivery.lease.token)
        head = held.head
        receipts = [head + job_id for job_id in ids]
        self._held.update(dict.fromkeys(receipts, held))
        self.pending.update(dict.fromkeys(receipts, get_ident()))
        self._count(held.shard, len(receipts))
        return receipts

    def forget(self, receipts: Sequence[str]) -> None:
        """These are in hand no more."""
        gone: dict[Shard, int] = {}
        for receipt in receipts:
            held = self._held.pop(receipt, None)
            if held is not None:
                gone[held.shard] = gone.get(held.shard, 0) + 1
        if self._touched:
            for receipt in receipts:
                self._touched.pop(receipt, None)
        for receipt in receipts if self.pending else ():
            self.pending.pop(receipt, None)
        self.unwanted.difference_update(receipts)
        self.uncertain.difference_update(receipts)
        for shard, count in gone.items():
            self._count(shard, -count)

    def forget_uncertain(self, ids: Collection[str]) -> None:
        """These ids were taken anew, so what was reported of them without an answer did get there."""
        self.forget([one for one in self.uncertain if one in self._held and self._id_of(one) in ids])

    def forget_earlier(self, shard: Shard, token: str) -> None:
        """What was taken of the shard under another lease than this one is somebody else's."""
        if self._tokens.get(shard) != token:
            self._tokens[shard] = token
            self.forget(
                [receipt for receipt in self.of_shard(shard) if self._held[receipt].delivery.lease.token != token]
            )

    def forget_replaced(self) -> None:
        """`forget_earlier` of each shard that is leased."""
        for shard in list(self._counts):
            lease = shard.lease.current
            if lease is not None:
                self.forget_earlier(shard, lease.token)

    def clear(self) -> None:
        """Nothing is in hand any more, and that is of no consequence to the shards."""
        self._held.clear()
        self.pending.clear()

    def _count(self, shard: Shard, more: int) -> None:
        before = self._counts.get(shard, 0)
        after = self._counts[shard] = before + more
        if (before > 0) != (after > 0):
            self._on_occupied(shard, after > 0)

    def _id_of(self, receipt: str) -> str:
        return receipt[len(self._held[receipt].head) :]

    # --- deadlines ---

    def touch(self, receipt: str, deadline: float) -> None:
        """From now on this job has a deadline of its own."""
        self._touched[receipt] = deadline

    def deadline(self, receipt: str) -> float:
        """The deadline of a job in hand."""
        return self._touched.get(receipt, self._held[receipt].deadline)

    def overdue(self, now: float) -> list[str]:
        """Those whose deadline has passed."""
        return [receipt for receipt in self._held if self.deadline(receipt) <= now]

    def earliest_deadline(self) -> float:
        """When the first of them passes; inf: never."""
        return min(map(self.deadline, self._held), default=inf)
