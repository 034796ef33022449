"""What a reshard writes: the layouts in the registry, and calls from which others go on, confirmed by replicas.

Redis loses in a failover what no replica has received. So each step is confirmed by as many replicas as its primary
has, those included that were lost since the reshard began, before anything goes on from it; otherwise it is written
again, for as long as it takes.
"""

import random
import time
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from lowq.backend import Backend
from lowq.clock import now as monotonic
from lowq.errors import LeaseLost, RedisRefused, RedisUnavailable, Resharding
from lowq.logs import get_log
from lowq.operate.queues import announce, find_queue, layout_call, layouts_of_shards, read_metas, set_layouts
from lowq.sharding import Layout, Layouts
from lowq.store import Call, Client, NotConfirmed, Wait, slot_of
from lowq.store.keys import queues_key

log = get_log("lowq.reshard")

#: Short calls in one write.
WRITE = 200
#: Seconds that a primary waits for its replicas before what they are to confirm is written again.
CONFIRM_SECONDS = 1.0
#: Calls that are written together when they are to be confirmed: some may have a page of jobs each.
_CONFIRMED_WRITE = 12
#: Seconds without any answer of Redis after which the command ends. It may be begun anew.
PATIENCE = 30.0


@dataclass(frozen=True, slots=True)
class ReshardProgress:
    """How far a reshard is."""

    queue: str
    before: Layout
    after: Layout
    #: Shards of the layout before whose jobs were all moved, by whomever.
    shards_moved: int = 0
    #: Jobs, waiting or buried, that this process has moved.
    jobs_moved: int = 0
    #: Shards whose holders have not given them up yet: they finish what is in flight.
    waits_for: tuple[int, ...] = ()
    #: Primaries whose replicas have not confirmed what was written: "host:port" in a cluster, otherwise "". It is
    #: waited for them without an end.
    waits_for_replicas: tuple[str, ...] = ()
    #: The queue has the layout after.
    is_done: bool = False
    #: Jobs in shards of the layout before, as far as they were asked for.
    jobs_left: int | None = None
    #: What the registry says of it: who began it (``by``) and when (``began_at``, Unix time, seconds), as far as asked.
    facts: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def shards_count(self) -> int:
        """How many shards are to be moved in all."""
        return self.before.shards_count


R = TypeVar("R")
#: What yields progress while it is under way, and returns something.
Steps = Generator[ReshardProgress, None, Any]


def count_replicas(backend: Backend, keys: Iterable[str]) -> dict[int, int]:
    """How many replicas the primary of each of these keys has, by slot: after a failover another primary has the slot,
    which may have fewer. That makes nothing safer.

    Raises:
        RedisUnavailable. RedisRefused: the user may not have replicas confirm anything.
    """
    keys = list(keys)
    try:
        counts = dict(zip(map(slot_of, keys), backend.client.replicas_of(keys), strict=True))
        if any(counts.values()):
            backend.client.on_all([("WAIT", 0, 1)])
        return counts
    except RedisRefused as error:
        raise RedisRefused(
            f"{error}. What a reshard moves is confirmed by replicas; if there are none: --unconfirmed"
        ) from error


def keys_of(backend: Backend, queue: str, *layouts: Layout) -> list[str]:
    """The registry, and the shards of these layouts: what a reshard writes to."""
    namespace = backend.config.namespace
    return [queues_key(namespace), *(prefix for each in layouts for prefix in each.prefixes(namespace, queue))]


def runs_of(counts: Mapping[int, int]) -> list[list[int]]:
    """Counts by slot as the registry has them: [last slot, count] of each run of slots with the same count; empty: all
    are 0.
    """
    runs: list[list[int]] = []
    for slot, count in sorted(counts.items()):
        if runs and runs[-1][1] == count:
            runs[-1][0] = slot
        else:
            runs.append([slot, count])
    return runs if any(counts.values()) else []


def _read_runs(said: Any, slots: Iterable[int]) -> dict[int, int]:
    """The counts of these slots, from `runs_of`; empty: it can't be read."""
    runs = said if isinstance(said, list) else []
    if not all(isinstance(run, list) and len(run) == 2 and all(type(n) is int for n in run) for run in runs):
        return {}
    places = {slot: bisect_left(runs, slot, key=lambda run: run[0]) for slot in slots}
    return {slot: runs[place][1] if place < len(runs) else 0 for slot, place in places.items()}


class LayoutSwitch:
    """A reshard from a layout to another, as this process goes on with it: how far it is, and what it writes.
    ``layouts``: as the registry has them; without a next one the reshard has ended, and is checked.
    """

    def __init__(self, backend: Backend, queue: str, before: Layout, layouts: Layouts, unconfirmed: bool) -> None:
        self.backend = backend
        self.queue = queue
        self.before, self.after = before, layouts.next or layouts.current
        self.layouts = layouts
        self.progress = ReshardProgress(queue, before, self.after)
        self._unconfirmed = unconfirmed
        self._keys = keys_of(backend, queue, before, self.after)
        #: Slot -> how many replicas are to confirm what is written.
        self._replicas: dict[int, int] = {}
        #: How many replicas each primary had when they were last counted, by its address.
        self._counted: dict[str, int] = {}
        if not unconfirmed:
            self._replicas = _read_runs(layouts.facts.get("replicas"), map(slot_of, self._keys))

    @property
    def client(self) -> Client:
        return self.backend.client

    def prefix(self, layout: Layout, shard: int) -> str:
        return layout.prefix(self.backend.config.namespace, self.queue, shard)

    def prefixes(self, layout: Layout) -> list[str]:
        return layout.prefixes(self.backend.config.namespace, self.queue)

    def note(self, **changes: Any) -> ReshardProgress:
        """Changes fields of the progress."""
        self.progress = replace(self.progress, **changes)
        return self.progress

    # --- calls ---

    def patiently(self, do: Callable[[], R]) -> R:
        """Does it, again and again while Redis does not answer, for a while."""
        give_up_at = monotonic() + PATIENCE
        while True:
            try:
                return do()
            except RedisUnavailable:
                if monotonic() >= give_up_at:
                    raise
                time.sleep(random.uniform(0.1, 0.3))

    def run_all(self, calls: Sequence[Call[Any]]) -> list[Any]:
        def run(some: Sequence[Call[Any]]) -> list[Any]:
            replies = self.client.run_many(some)
            for reply in replies:
                if isinstance(reply, Exception) and not isinstance(reply, LeaseLost):
                    raise reply
            return replies

        replies: list[Any] = []
        for start in range(0, len(calls), WRITE):
            replies += self.patiently(partial(run, calls[start : start + WRITE]))
        return replies

    def read_metas(self, prefixes: Sequence[str], *fields: str) -> list[list[bytes | None]]:
        """These fields of ``meta`` of each shard."""
        return self.patiently(lambda: read_metas(self.backend, prefixes, *fields))

    def run_confirmed(self, calls: Sequence[Call[Any]], *, is_of_shards: bool = True) -> Steps:
        """Runs calls from which others go on, until as many replicas have confirmed each as its primary has. The calls
        are repeated with that: they go to another primary when that has taken over, and if they have changed nothing
        they have written something all the same, which is what replicas confirm. Returns their replies, the last ones;
        `LeaseLost` is one, other errors are raised.

        Raises:
            RedisUnavailable: no answer for a while. UnknownQueueError, Resharding: as of `is_wanted`.
        """
        replies: list[Any] = [None] * len(calls)
        left = list(range(len(calls)))
        while left:
            groups: dict[int, list[int]] = {}
            for position in left:
                groups.setdefault(self._replicas.get(slot_of(calls[position].key), 0), []).append(position)
            for count, positions in groups.items():
                size = _CONFIRMED_WRITE if count else len(positions)
                for start in range(0, len(positions), size):
                    some = positions[start : start + size]
                    written = [calls[position] for position in some]
                    if count:
                        wait = Wait("replicated", CONFIRM_SECONDS, count)
                        found = yield from self._wait_for_replicas(written, wait, is_of_shards)
                    else:
                        found = self.run_all(written)
                    for position, reply in zip(some, found, strict=True):
                        replies[position] = reply
            joined = self._find_joined()
            left = [position for position in left if slot_of(calls[position].key) in joined]
        return replies

    def _find_joined(self) -> set[int]:
        """The slots whose primaries have got more replicas than confirm what is written to them; these do so from now
        on. A primary that has just taken over has none: one that joins it and is lost soon after may become the primary
        in the end, with the data of that moment. One that joins after this look has all that was written before it.
        """
        if self._unconfirmed or (counted := self.patiently(self.client.count_replicas)) == self._counted:
            return set()
        self._counted = counted
        found = self.patiently(lambda: count_replicas(self.backend, self._keys))
        joined = {slot for slot, count in found.items() if count > self._replicas.get(slot, 0)}
        self._replicas.update((slot, found[slot]) for slot in joined)
        return joined

    def _wait_for_replicas(self, calls: Sequence[Call[Any]], wait: Wait, is_of_shards: bool) -> Steps:
        replies: list[Any] = [None] * len(calls)
        left = list(range(len(calls)))
        answered_at = monotonic()
        is_told = False
        while True:
            behind: set[str] = set()
            again: list[int] = []
            for position, reply in zip(left, self.client.start([calls[i] for i in left], wait=wait)(), strict=True):
                if isinstance(reply, RedisUnavailable):
                    if monotonic() - answered_at >= PATIENCE:
                        raise reply
                    again.append(position)
                    continue
                if isinstance(reply, NotConfirmed):
                    answered_at = monotonic()
                    again.append(position)
                    primary = self.client.address_of(calls[position].key)
                    behind.add("" if primary is None else f"{primary[0]}:{primary[1]}")
                elif isinstance(reply, Exception) and not isinstance(reply, LeaseLost):
                    raise reply
                replies[position] = reply
            left = again
            if behind and not is_told:
                is_told = True
                self._tell_of_replicas(behind)
            if behind or self.progress.waits_for_replicas:
                yield self.note(waits_for_replicas=tuple(sorted(behind)))
            if not left:
                return replies
            if not behind:
                time.sleep(random.uniform(0.1, 0.3))
            elif is_of_shards and not self.patiently(self.is_wanted):
                # Another one has ended it, who knows what was confirmed.
                return [reply.reply if isinstance(reply, NotConfirmed) else reply for reply in replies]

    def _tell_of_replicas(self, behind: set[str]) -> None:
        log.warning(
            "queue %r: waiting until replicas have what this reshard wrote (%s); to go on without, so that a "
            "failover may lose jobs: lowq reshard %s %d --unconfirmed", self.queue,
            ", ".join(sorted(behind)) or "on the primary", self.queue, self.after.shards_count,
            extra={"event": "reshard_unconfirmed", "queue": self.queue},
        )  # fmt: skip

    # --- the registry ---

    def write_layouts(self, before: Layouts, after: Layouts) -> Steps:
        """Writes the layouts into the registry; False: they are neither those before nor those after."""
        while (call := self.patiently(lambda: layout_call(self.backend, self.queue, before, after))) is not None:
            (reply,) = yield from self.run_confirmed([call], is_of_shards=False)
            if reply == 1:
                self.patiently(lambda: announce(self.backend, self.queue, after))
                return True
        return False

    def is_wanted(self) -> bool:
        """Whether the registry still says that the reshard is under way, or, when it is checked, that it was the last.
        It does not if another one has ended it, or begun the next. What it has lost meanwhile is written anew.

        Raises:
            UnknownQueueError, Resharding: the queue was dropped meanwhile. One that has its name now must not be sealed
            for a layout that nobody serves.
        """
        layouts = find_queue(self.backend, self.queue).layouts
        if layouts == self.layouts:
            return True
        if layouts.current.epoch >= self.after.epoch:
            return False
        said = layouts_of_shards(self.backend, self.queue, layouts)
        if said == self.layouts:  # so old shards say that they are sealed for it
            return set_layouts(self.backend, self.queue, layouts, self.layouts)
        if said.current.epoch >= self.after.epoch:
            return False
        raise Resharding(
            f"queue {self.queue!r} was dropped while it was resharded, and made anew: this reshard ends here"
        )
