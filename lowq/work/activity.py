"""What a node's threads and tasks show to others: what they perform, until when, and how much they did."""

from collections import defaultdict
from dataclasses import dataclass, field

from lowq.observe.counters import Tally
from lowq.shards.activity import Activity
from lowq.work.time_limits import TimeLimits


@dataclass(slots=True)
class BatchActivity(Activity):
    """What one who performs batches, a task of the event loop for one, shows to others."""

    #: Of the batch that it performs, if its worker has a time limit or ttr. A batch that was written off stays here.
    limits: TimeLimits | None = None


@dataclass(slots=True)
class ThreadActivity(BatchActivity):
    """What a thread shows to others. A thread that was written off keeps its own, and its successor has another."""

    #: queue -> what the thread did for it. Made before it starts: the maintenance loop iterates over them.
    tallies: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
