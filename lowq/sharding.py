"""Which shard an id belongs to, and in which layout of its queue.

`Routes` is what this process knows of where the jobs of a queue go: the layout that the registry says, and which of
its shards have said since that their jobs belong to another one. A producer asks the shard of the layout that it
knows. Once that shard is sealed it answers `SEALED`, with the layout to go to, for good: so that is remembered, and
its ids go there at once from then on. What such a push is given besides, the clock of the sealed shard, keeps default
scores behind those of the payloads that are still to be moved.
"""

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from lowq.clock import now as monotonic
from lowq.store import untrusted
from lowq.store.keys import MAX_SHARDS, shard_prefix


def shard_of(job_id: bytes, shards_count: int) -> int:
    """The shard that an id belongs to, in a layout of so many: ``crc32(id) % shards_count``."""
    return zlib.crc32(job_id) % shards_count


@dataclass(frozen=True, slots=True)
class Layout:
    """How many shards a queue has, and which keys these have: each reshard makes a layout with the next epoch."""

    shards_count: int
    epoch: int = 0

    def shard_of(self, job_id: bytes) -> int:
        """The shard that an id belongs to."""
        return zlib.crc32(job_id) % self.shards_count

    def prefix(self, namespace: str, queue: str, shard: int) -> str:
        """What all keys of a shard begin with."""
        return shard_prefix(namespace, queue, shard, self.epoch)

    def prefixes(self, namespace: str, queue: str) -> list[str]:
        """Those of all shards."""
        return [shard_prefix(namespace, queue, shard, self.epoch) for shard in range(self.shards_count)]

    def name(self, queue: str) -> str:
        """What stands for the shards of this layout where those of two layouts are told apart."""
        return queue if self.epoch == 0 else f"{queue}@{self.epoch}"

    def shown(self) -> dict[str, int]:
        """As the registry keeps it."""
        return {"shards_count": self.shards_count} | ({"epoch": self.epoch} if self.epoch else {})


def queue_of_layout(name: str) -> str:
    """The queue of what `Layout.name` has given."""
    return re.sub(r"@[0-9]+$", "", name)


@dataclass(frozen=True, slots=True)
class Layouts:
    """The layout of a queue, and while a reshard is under way the one that its jobs are being moved to."""

    current: Layout
    #: None: no reshard is under way.
    next: Layout | None = None
    #: What else the registry says of the reshard: who began it and when, and what is to confirm it. Not compared.
    facts: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def all(self) -> tuple[Layout, ...]:
        """Those that may have jobs."""
        return (self.current,) if self.next is None else (self.current, self.next)

    def shown(self) -> dict[str, Any]:
        """As the registry keeps them, before the options of the queue."""
        reshard = {} if self.next is None else {"reshard": {**self.next.shown(), **self.facts}}
        return self.current.shown() | reshard

    @classmethod
    def plain(cls, shards_count: int) -> Self:
        """Those of a queue that was never resharded."""
        return cls(Layout(shards_count))

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Self | None:
        """From an entry of the registry; None: it can't be read."""
        current = _read(entry)
        if current is None:
            return None
        reshard = entry.get("reshard")
        reshard = reshard if isinstance(reshard, dict) else {}
        following = _read(reshard)
        if following is None or following.epoch <= current.epoch:
            return cls(current)
        return cls(current, following, {key: reshard[key] for key in ("began_at", "by", "replicas") if key in reshard})


def _read(entry: Mapping[str, Any]) -> Layout | None:
    shards_count = untrusted.whole(entry.get("shards_count"), 1, MAX_SHARDS)
    epoch = untrusted.whole(entry.get("epoch", 0), 0, 2**31)
    return None if shards_count is None or epoch is None else Layout(shards_count, epoch)


#: Seconds after which the registry is read again while shards of the known layout are sealed, and for which people see
#: a layout that was read.
READ_AGAIN = 1.0


class Routes:
    """Of one queue. Safe for threads: what is written is replaced whole."""

    __slots__ = ("_clock", "layouts", "read_at", "sealed")

    def __init__(self, layouts: Layouts, clock: Callable[[], float] = monotonic) -> None:
        self.layouts = layouts
        self._clock = clock
        #: When the registry was read, monotonic.
        self.read_at = clock()
        #: (epoch, shard) -> the layout that its jobs belong to, and its clock as Redis wrote it.
        self.sealed: dict[tuple[int, int], tuple[Layout, bytes]] = {}

    @property
    def current(self) -> Layout:
        """The layout that is asked first."""
        return self.layouts.current

    @property
    def is_doubtful(self) -> bool:
        """Whether the registry is to be read again: shards have moved on, and it may say now that all have."""
        return bool(self.sealed) and self._clock() - self.read_at >= READ_AGAIN

    @property
    def age(self) -> float:
        """Seconds since the registry was read."""
        return self._clock() - self.read_at

    def note_read(self, layouts: Layouts) -> None:
        """The registry says so now."""
        if layouts.current != self.layouts.current:
            self.sealed = {}
        self.layouts = layouts
        self.read_at = self._clock()

    def note_lost(self, layouts: Layouts) -> None:
        """The registry says so now, and what shards have said before is doubtful: the queue was dropped, or Redis has
        lost data.
        """
        self.sealed = {}
        self.note_read(layouts)

    def note_sealed(self, layout: Layout, shard: int, said: str) -> None:
        """A shard has said "m epoch clock"."""
        count, epoch, *clock = said.split()
        self.sealed = {
            **self.sealed,
            (layout.epoch, shard): (Layout(int(count), int(epoch)), clock[0].encode() if clock else b""),
        }

    def find(self, job_id: bytes) -> tuple[Layout, int, bytes]:
        """Where an id goes: layout, shard, and the latest clock of the sealed shards on the way there, or nothing."""
        layout, latest = self.layouts.current, b""
        shard = layout.shard_of(job_id)
        while (found := self.sealed.get((layout.epoch, shard))) is not None:
            layout, clock = found
            shard = layout.shard_of(job_id)
            if clock and (not latest or float(clock) > float(latest)):
                latest = clock
        return layout, shard, latest
