"""How much work one delivery takes in advance (prefetch): more while batches are quick."""

from collections.abc import Mapping

from lowq.shards.in_flight import MAX_DELIVERY_JOBS
from lowq.shards.shard import Shard
from lowq.work.handler import WorkerRuntime

#: Seconds of work that one delivery may take in advance of its acknowledgement: a crash repeats about that much.
PREFETCH_SECONDS = 0.005


class Pace:
    """How long batches take lately, by queue, as one thread or an event loop has seen it."""

    def __init__(self, runtimes: Mapping[str, WorkerRuntime], *, prefetch: bool) -> None:
        self._runtimes = runtimes
        self._prefetch = prefetch
        #: queue -> seconds that one of its batches took lately.
        self._seconds: dict[str, float] = {}

    def limit(self, shard: Shard) -> int:
        """How many jobs the next delivery of the shard, which is claimed, may bring."""
        allowance = shard.dispatch.allowance
        if allowance is not None:  # of one batch, which begins at once
            return allowance.jobs
        size = self._runtimes[shard.queue].batch_size
        if not self._prefetch:
            return size
        pace = self._seconds.get(shard.queue)
        batches = 1 if pace is None else int(PREFETCH_SECONDS / max(pace, 1e-6))
        return max(min(batches * size, MAX_DELIVERY_JOBS // size * size), size)

    def note(self, queue: str, seconds: float, batches: int) -> None:
        """Notes that so many batches took so many seconds. Slow ones count at once, quick ones bit by bit, at most
        doubling what the next delivery takes.
        """
        if not batches:  # everything of the delivery had expired, or the lease is not surely held
            return
        pace = seconds / batches
        known = self._seconds.get(queue)
        self._seconds[queue] = (
            pace if known is not None and pace > known else max(pace, (known or PREFETCH_SECONDS) / 2)
        )
