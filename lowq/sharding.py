"""The shard of an id, the layouts of a queue, and the routes of its jobs.

A producer asks the shard of the layout that it knows. A shard that a reshard has sealed answers `SEALED`, for good,
with the layout to go to. `Routes` remembers that, and from then on the ids of that shard go there at once, with the
clock of the sealed shard, which keeps default scores behind those of the payloads that are still to be moved.
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
    """The number of shards of a queue, and the epoch in their keys. Each reshard makes a layout with the next epoch."""

    shards_count: int
    epoch: int = 0

    def shard_of(self, job_id: bytes) -> int:
        """The shard that an id belongs to."""
        return zlib.crc32(job_id) % self.shards_count

    def prefix(self, namespace: str, queue: str, shard: int) -> str:
        """The prefix of all keys of a shard."""
        return shard_prefix(namespace, queue, shard, self.epoch)

    def prefixes(self, namespace: str, queue: str) -> list[str]:
        """The prefixes of all shards."""
        return [shard_prefix(namespace, queue, shard, self.epoch) for shard in range(self.shards_count)]

    def name(self, queue: str) -> str:
        """The queue's name, with the epoch where layouts must be told apart."""
        return queue if self.epoch == 0 else f"{queue}@{self.epoch}"

    def shown(self) -> dict[str, int]:
        """As the registry keeps it."""
        return {"shards_count": self.shards_count} | ({"epoch": self.epoch} if self.epoch else {})


def queue_of_layout(name: str) -> str:
    """The queue of a `Layout.name`."""
    return re.sub(r"@[0-9]+$", "", name)


@dataclass(frozen=True, slots=True)
class Layouts:
    """The layout of a queue, and during a reshard the next one."""

    current: Layout
    #: None: no reshard is under way.
    next: Layout | None = None
    #: The other fields of the reshard in the registry: ``by``, ``began_at``, ``replicas``. Not compared.
    facts: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def all(self) -> tuple[Layout, ...]:
        """The layouts that may have jobs."""
        return (self.current,) if self.next is None else (self.current, self.next)

    def shown(self) -> dict[str, Any]:
        """The fields of the registry's entry before the options."""
        reshard = {} if self.next is None else {"reshard": {**self.next.shown(), **self.facts}}
        return self.current.shown() | reshard

    @classmethod
    def plain(cls, shards_count: int) -> Self:
        """The layouts of a queue that was never resharded."""
        return cls(Layout(shards_count))

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Self | None:
        """Decodes an entry of the registry; None: it can't be read."""
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


#: Seconds that a layout from the registry is shown to people, and that it is trusted while some of its shards are
#: sealed.
READ_AGAIN = 1.0


class Routes:
    """Where the jobs of a queue go. Safe for threads: attributes are replaced whole."""

    __slots__ = ("_clock", "layouts", "read_at", "sealed")

    def __init__(self, layouts: Layouts, clock: Callable[[], float] = monotonic) -> None:
        self.layouts = layouts
        self._clock = clock
        #: When the registry was read, monotonic.
        self.read_at = clock()
        #: (epoch, shard) of a sealed shard -> the layout that its jobs belong to, and its clock as Redis wrote it.
        self.sealed: dict[tuple[int, int], tuple[Layout, bytes]] = {}

    @property
    def is_doubtful(self) -> bool:
        """Whether the registry must be read again, as some shards are sealed, and the reshard may have ended."""
        return bool(self.sealed) and self._clock() - self.read_at >= READ_AGAIN

    @property
    def age(self) -> float:
        """Seconds since the registry was read."""
        return self._clock() - self.read_at

    def note_read(self, layouts: Layouts) -> None:
        """Notes the layouts that the registry has now."""
        if layouts.current != self.layouts.current:
            self.sealed = {}
        self.layouts = layouts
        self.read_at = self._clock()

    def note_lost(self, layouts: Layouts) -> None:
        """As `note_read`, after the queue was dropped or Redis has lost data: earlier answers of shards are
        forgotten."""
        self.sealed = {}
        self.note_read(layouts)

    def note_sealed(self, layout: Layout, shard: int, said: str) -> None:
        """Notes the answer of a sealed shard, "shards_count epoch clock"."""
        count, epoch, *clock = said.split()
        self.sealed = {
            **self.sealed,
            (layout.epoch, shard): (Layout(int(count), int(epoch)), clock[0].encode() if clock else b""),
        }

    def find(self, job_id: bytes) -> tuple[Layout, int, bytes]:
        """Where an id goes: layout, shard, and the latest clock of the sealed shards on the way there, or b""."""
        layout, latest = self.layouts.current, b""
        shard = layout.shard_of(job_id)
        while (found := self.sealed.get((layout.epoch, shard))) is not None:
            layout, clock = found
            shard = layout.shard_of(job_id)
            if clock and (not latest or float(clock) > float(latest)):
                latest = clock
        return layout, shard, latest
