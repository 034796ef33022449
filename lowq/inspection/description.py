"""Everything that is known of an id."""

from dataclasses import dataclass

from lowq.inspection.explain import Why
from lowq.inspection.figures import ShardInfo
from lowq.inspection.registry import NodeInfo
from lowq.job import Job, State


@dataclass(frozen=True, slots=True)
class Description:
    """Everything that is known of an id. Not a consistent snapshot: it was read in a few steps, and may have changed
    since.
    """

    queue: str
    id: str
    #: Unix time, seconds, by the server's clock: when it was read.
    at: float
    #: Where the id is, and what keeps it: its position, who paused the queue, what else is in flight.
    why: Why
    #: Its jobs with their payloads: in flight, waiting, in the morgue, at most one each. Empty: the id is nowhere.
    jobs: tuple[Job, ...]
    #: Its shard: index, owner, fence, seconds that the lease still runs, length, lag.
    shard: ShardInfo
    #: The node that holds the shard, as its last heartbeat described it; None: nobody, or none that is known.
    node: NodeInfo | None
    #: How often its worker tries again.
    max_retry_count: int

    @property
    def state(self) -> State | None:
        """In flight before waiting before in the morgue; None: the id is nowhere."""
        return self.why.state

    @property
    def taken(self) -> Job | None:
        """What is in flight."""
        return next((job for job in self.jobs if job.state == "taken"), None)

    @property
    def waiting(self) -> Job | None:
        """What waits, also while older payloads are in flight."""
        return next((job for job in self.jobs if job.state not in ("taken", "morgue")), None)

    @property
    def buried(self) -> Job | None:
        """What is in the morgue."""
        return next((job for job in self.jobs if job.state == "morgue"), None)
