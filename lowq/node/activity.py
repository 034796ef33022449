"""What a node's threads show to others: what they perform, and how much they did."""

from collections import defaultdict
from dataclasses import dataclass, field

from lowq.broker.activity import Activity
from lowq.metrics.counters import Tally


@dataclass(slots=True)
class ThreadActivity(Activity):
    """What a thread shows to others."""

    #: queue -> what the thread did for it. Made before it starts: the maintenance loop iterates over them.
    tallies: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
