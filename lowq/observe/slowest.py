"""The slowest batches of the last hour: a few of each queue, so that somebody can look at their ids.

The slowest of each ten minutes are kept, as those of an hour would hide the others when they are older than that.

::

    SlowestOfThread   what one thread performed since the last heartbeat; nothing faster than its floor
          |  take: with each heartbeat
    SlowestOfNode     what this node performed in the last ten minutes, which says how high the floors are
          |  what Redis has not got yet
    count.lua         what all nodes performed, in each ten minutes
          |  of those the slowest
    read_slowest      the last hour

So a batch that is not among the slowest costs a comparison, and a heartbeat tells only what may be among those of all.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from lowq.backend import Backend
from lowq.codec import decode_id
from lowq.store import untrusted
from lowq.store.keys import history_key
from lowq.store.scripts import time_of

#: Batches of a queue that are shown, each of another id. So many are kept of each stretch of time.
MOST = 20
#: Seconds that are looked back, and seconds of a stretch.
WINDOW, STRETCH = 3600, 600
#: Stretches in Redis. When one begins, its slot's batches have all left the window.
SLOTS = WINDOW // STRETCH + 1
#: What took no longer is not slow, whatever the others took. Seconds.
FLOOR = 0.01


class EndedBatch(NamedTuple):
    """A batch that a thread has performed."""

    #: The first of its ids, and how many it had.
    id: str
    ids_count: int
    shard: int
    seconds: float
    #: When it ended, by `lowq.clock`.
    ended: float


def _keep(kept: dict[str, EndedBatch], batch: EndedBatch) -> None:
    """Adds it, unless `MOST` others took longer. Of an id the slowest batch is kept."""
    before = kept.get(batch.id)
    if before is None or before.seconds < batch.seconds:
        kept[batch.id] = batch
    if len(kept) > MOST:
        del kept[min(kept, key=lambda job_id: kept[job_id].seconds)]


def _floor(kept: dict[str, EndedBatch]) -> float:
    """What took no longer than that is not among the slowest."""
    return FLOOR if len(kept) < MOST else min(batch.seconds for batch in kept.values())


class SlowestOfThread:
    """Of one queue. The thread reads `floor` for each batch, and adds what took longer."""

    __slots__ = ("_kept", "_least", "_lock", "floor")

    def __init__(self) -> None:
        self.floor = FLOOR
        #: Guards what follows, and changes of `floor`: the maintenance loop takes what the thread adds.
        self._lock = threading.Lock()
        self._least = FLOOR
        self._kept: dict[str, EndedBatch] = {}

    def add(self, batch: EndedBatch) -> None:
        """A batch that took longer than `floor`."""
        with self._lock:
            _keep(self._kept, batch)
            self.floor = max(self._least, _floor(self._kept))

    def take(self) -> list[EndedBatch]:
        """What was added since the last call."""
        with self._lock:
            kept, self._kept = self._kept, {}
            self.floor = self._least
        return list(kept.values())

    def set_floor(self, seconds: float) -> None:
        """What takes no longer is not among the slowest of the node."""
        with self._lock:
            self._least = seconds
            self.floor = max(seconds, _floor(self._kept))


class SlowestOfNode:
    """Of one queue. Belongs to the maintenance loop."""

    def __init__(self) -> None:
        self._kept: dict[str, EndedBatch] = {}
        #: Of these: what Redis has, and what it was told last.
        self._recorded: dict[str, EndedBatch] = {}
        self._sent: dict[str, EndedBatch] = {}

    def update(self, threads: Iterable[SlowestOfThread], now: float) -> list[EndedBatch]:
        """Takes what the threads have, and tells them what is slow from now on. Returns what is to be told to Redis,
        again until it has it: it keeps a batch once. ``now``: by `lowq.clock`.
        """
        some = list(threads)
        self._kept = {job_id: batch for job_id, batch in self._kept.items() if now - batch.ended < STRETCH}
        for thread in some:
            for batch in thread.take():
                _keep(self._kept, batch)
        for thread in some:
            thread.set_floor(_floor(self._kept))
        self._recorded = {job_id: batch for job_id, batch in self._recorded.items() if job_id in self._kept}
        self._sent = {job_id: item for job_id, item in self._kept.items() if self._recorded.get(job_id) is not item}
        return list(self._sent.values())

    def recorded(self) -> None:
        """Redis has what `update` returned last."""
        self._recorded |= self._sent


@dataclass(frozen=True, slots=True)
class SlowBatch:
    """One of the slowest batches of the last hour."""

    #: The first of its ids.
    id: str
    #: How many ids it had.
    ids_count: int
    shard: int
    #: How long it was performed.
    seconds: float
    #: When it ended: Unix time, seconds.
    at: float


def read_slowest(backend: Backend, queue: str, now: float | None = None) -> list[SlowBatch]:
    """The slowest batches of the last hour, the slowest first, as nodes have recorded them. What ended in its first
    ten minutes may be missing.

    Raises:
        RedisUnavailable, RedisRefused
    """
    key = history_key(backend.config.namespace, queue)
    fields = [f"slow:{slot}:{n}" for slot in range(SLOTS) for n in range(MOST)]
    found, time = backend.client.commands([("HMGET", key, *fields), ("TIME",)], key=key)
    until = time_of(time) if now is None else now
    slowest: dict[str, SlowBatch] = {}
    for raw in found:
        batch = None if raw is None else _slow(key, raw)
        if batch is None or abs(batch.at - until) >= WINDOW:  # from the future: by a clock that was set since
            continue
        before = slowest.get(batch.id)
        if before is None or before.seconds < batch.seconds:
            slowest[batch.id] = batch
    return sorted(slowest.values(), key=lambda batch: -batch.seconds)[:MOST]


def _slow(key: str, raw: bytes) -> SlowBatch | None:
    """A field: "at seconds count shard id"."""
    parts = raw.split(b" ", 4)
    if len(parts) == 5:
        at, seconds = untrusted.finite(parts[0]), untrusted.finite(parts[1])
        count, shard = untrusted.count(parts[2]), untrusted.count(parts[3])
        if at is not None and seconds is not None and seconds >= 0 and count:
            return SlowBatch(decode_id(parts[4]), count, shard, seconds, at)
    untrusted.log_skipped("history", key, f"{raw!r:.60} is no slow batch")
    return None
