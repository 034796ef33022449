"""What comes in to a shard, as its holder learns it from the renewals of the lease, for the history of the queue."""

from typing import NamedTuple


class Inflow(NamedTuple):
    """What became of some shards between two moments."""

    #: Payloads that came in, also those that were merged.
    pushed: int
    #: By how many jobs the backlog, those due or in flight, has grown.
    change: int


class ShardInflow:
    """Of one shard. Belongs to the maintenance loop.

    Each renewal says how many payloads have ever come in and how large the backlog is. Only what changed between two
    renewals of the same lease counts: what happened under another lease its holder has counted. When a reply was lost,
    the next one has it all.
    """

    __slots__ = ("_gathered", "_seen")

    def __init__(self) -> None:
        #: Token, payloads and backlog, as of the last renewal.
        self._seen: tuple[str, int, int] | None = None
        #: What has not been taken yet; None: it is not known.
        self._gathered: Inflow | None = None

    def note(self, token: str, pushed: int, backlog: int) -> None:
        """A renewal of the lease with that token says so."""
        seen, self._seen = self._seen, (token, pushed, backlog)
        if seen is not None and seen[0] == token:
            before = self._gathered or Inflow(0, 0)
            self._gathered = Inflow(before.pushed + max(pushed - seen[1], 0), before.change + backlog - seen[2])

    def take(self) -> Inflow | None:
        """What has come in since the last call; None: it was never known."""
        gathered = self._gathered
        if gathered is not None:
            self._gathered = Inflow(0, 0)
        return gathered
