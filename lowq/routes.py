"""Where the jobs of a queue go, as far as this process knows: the layout that the registry says, and which of its
shards have said since that their jobs belong to another one.

A producer asks the shard of the layout that it knows. Once that shard is sealed it answers `SEALED`, with the layout to
go to, for good: so that is remembered, and its ids go there at once from then on. What such a push is given besides,
the clock of the sealed shard, keeps default scores behind those of the payloads that are still to be moved.
"""

from collections.abc import Callable

from lowq.clock import now as monotonic
from lowq.sharding import Layout, Layouts

#: Seconds after which the registry is read again while shards of the known layout are sealed, and for which people see
#: a layout that was read.
READ_AGAIN = 1.0


class Routes:
    """Of one queue. Safe for threads: what is written is replaced whole."""

    __slots__ = ("_clock", "_sealed", "layouts", "read_at")

    def __init__(self, layouts: Layouts, clock: Callable[[], float] = monotonic) -> None:
        self.layouts = layouts
        self._clock = clock
        #: When the registry was read, monotonic.
        self.read_at = clock()
        #: (epoch, shard) -> the layout that its jobs belong to, and its clock as Redis wrote it.
        self._sealed: dict[tuple[int, int], tuple[Layout, bytes]] = {}

    @property
    def current(self) -> Layout:
        """The layout that is asked first."""
        return self.layouts.current

    @property
    def has_sealed(self) -> bool:
        """Whether some shards of it are known to be sealed."""
        return bool(self._sealed)

    @property
    def is_doubtful(self) -> bool:
        """Whether the registry is to be read again: shards have moved on, and it may say now that all have."""
        return bool(self._sealed) and self._clock() - self.read_at >= READ_AGAIN

    @property
    def age(self) -> float:
        """Seconds since the registry was read."""
        return self._clock() - self.read_at

    def note_read(self, layouts: Layouts) -> None:
        """The registry says so now."""
        if layouts.current != self.layouts.current:
            self._sealed = {}
        self.layouts = layouts
        self.read_at = self._clock()

    def note_lost(self, layouts: Layouts) -> None:
        """The registry says so now, and what shards have said before is doubtful: the queue was dropped, or Redis has
        lost data.
        """
        self._sealed = {}
        self.note_read(layouts)

    def note_sealed(self, layout: Layout, shard: int, said: str) -> None:
        """A shard has said "m epoch clock"."""
        count, epoch, *clock = said.split()
        self._sealed = {
            **self._sealed,
            (layout.epoch, shard): (Layout(int(count), int(epoch)), clock[0].encode() if clock else b""),
        }

    def find(self, job_id: bytes) -> tuple[Layout, int, bytes]:
        """Where an id goes: layout, shard, and the latest clock of the sealed shards on the way there, or nothing."""
        layout, latest = self.layouts.current, b""
        shard = layout.shard_of(job_id)
        while (found := self._sealed.get((layout.epoch, shard))) is not None:
            layout, clock = found
            shard = layout.shard_of(job_id)
            if clock and (not latest or float(clock) > float(latest)):
                latest = clock
        return layout, shard, latest
