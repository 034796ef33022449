"""What a node's threads show to others: what they perform."""

import time
from dataclasses import dataclass

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
        return f"{self.shard!r} ids {ids} for {time.monotonic() - self.since:.1f} s"


@dataclass(slots=True)
class Seat:
    """What a thread shows to others."""

    number: int
    performing: Performing | None = None
    #: What it performed before, and when that ended, monotonic.
    performed: tuple[Performing, float] | None = None
    #: How many of the trip's finished jobs were acknowledged early, per delivery.
    early: tuple[int, int] = (0, 0)
