"""What a node's threads show to others: what they perform, and how much they did."""

from collections import defaultdict
from dataclasses import dataclass, field

from lowq import clock
from lowq.rates import Tally
from lowq.shard import Shard


@dataclass(slots=True)
class Performing:
    """What one thread performs. Replaced as a whole by that thread, read by others."""

    shard: Shard
    ids: list[str]
    #: Monotonic.
    since: float

    def __str__(self) -> str:
        ids = ", ".join(self.ids[:3]) + (", ..." if len(self.ids) > 3 else "")
        return f"{self.shard!r} ids {ids} for {clock.now() - self.since:.1f} s"


@dataclass(slots=True)
class EarlyAcks:
    """What the keeper has acknowledged of a trip whose later jobs are still being performed."""

    shard: Shard
    delivery: int
    #: How many of its finished jobs were acknowledged.
    count: int = 0

    def is_of(self, shard: Shard) -> bool:
        """Whether it is about the trip in hand of that shard."""
        return self.shard is shard and self.delivery == shard.delivery


@dataclass(slots=True)
class Seat:
    """What a thread shows to others."""

    number: int
    performing: Performing | None = None
    #: What it performed before, and when that ended, monotonic.
    performed: tuple[Performing, float] | None = None
    #: The trip that the keeper saw here last. Only for the keeper.
    early: "EarlyAcks | None" = None
    #: queue -> what the thread did for it. Made before it starts: the keeper iterates over them.
    tallies: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
