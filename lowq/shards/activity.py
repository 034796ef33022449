"""What those who work the shards of a process show to its maintenance loop."""

from dataclasses import dataclass

from lowq import clock
from lowq.shards.shard import Shard


@dataclass(slots=True)
class Performing:
    """What one of them performs. Replaced as a whole by who performs it, read by others."""

    shard: Shard
    ids: list[str]
    #: Monotonic.
    since: float

    def __str__(self) -> str:
        ids = ", ".join(self.ids[:3]) + (", ..." if len(self.ids) > 3 else "")
        return f"{self.shard!r} ids {ids} for {clock.now() - self.since:.1f} s"


@dataclass(slots=True)
class PendingAcks:
    """What was acknowledged of a delivery whose later jobs are still being performed."""

    shard: Shard
    delivery: int
    #: How many of its finished jobs were acknowledged.
    count: int = 0

    def is_of(self, shard: Shard) -> bool:
        """Whether it is about the delivery in hand of that shard."""
        return self.shard is shard and self.delivery == shard.in_flight.delivery


@dataclass(slots=True)
class Activity:
    """What one who works shards, a thread for one, shows to others."""

    #: Of a thread; None: it is a task of an event loop.
    number: int | None
    performing: Performing | None = None
    #: What it performed before, and when that ended, monotonic.
    performed: tuple[Performing, float] | None = None
    #: What the watchdog saw here last, and after how many seconds that is to be named again. Only for that.
    seen: tuple[Performing, float] | None = None
    #: The delivery that the maintenance loop saw here last. Only for that.
    early: PendingAcks | None = None
