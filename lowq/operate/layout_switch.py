"""The switch of a queue to another layout: a reshard in the registry, its new shards, writes confirmed by replicas.

Redis loses in a failover what no replica has received. So each step of a reshard is confirmed by as many replicas as
its primary has, those included that were lost since it began. It is written again until they have it, and the next step
begins after that.
"""

import random
import time
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from lowq.backend import Backend
from lowq.clock import now as monotonic
from lowq.errors import ConfigError, LeaseLost, RedisRefused, RedisUnavailable, Resharding
from lowq.logs import get_log
from lowq.operate.nodes import nodes
from lowq.operate.queues import (
    announce,
    find_free_epoch,
    find_queue,
    layout_call,
    layouts_of_shards,
    read_metas,
    repair_registry,
    set_layouts,
)
from lowq.operate.walk import read_stats
from lowq.sharding import Layout, Layouts
from lowq.store import Call, Client, NotConfirmed, Wait, slot_of
from lowq.store.calls import time_of
from lowq.store.keys import queues_key
from lowq.store.shard import PrepareReply, ShardScripts
from lowq.store.shard_operations import ShardOperations

log = get_log("lowq.reshard")

#: Short calls in one write.
WRITE = 200
#: Milliseconds of a look for new replicas after each step, where the user may not run INFO.
LOOK_MILLISECONDS = 50
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


def reshard_progress(backend: Backend, queue: str) -> ReshardProgress | None:
    """How far the reshard of a queue is that is under way, whoever does it; None: none is. ``jobs_moved`` is not known.

    Raises:
        UnknownQueueError, RedisUnavailable
    """
    layouts = find_queue(backend, queue).layouts
    if layouts.next is None:
        return None
    stats = read_stats(backend.client, layouts.current.prefixes(backend.config.namespace, queue), None)
    held = tuple(i for i, each in enumerate(stats) if each.sealed and not each.moved and each.taken)
    left = sum(each.length + each.taken + each.morgue_length for each in stats)
    moved = sum(each.moved for each in stats)
    return ReshardProgress(queue, layouts.current, layouts.next, moved, 0, held, jobs_left=left, facts=layouts.facts)


R = TypeVar("R")
#: Yields progress while it is under way, and returns a value.
Steps = Generator[ReshardProgress, None, Any]


def count_replicas(backend: Backend, keys: Iterable[str]) -> dict[int, int]:
    """How many replicas the primary of each of these keys has, by slot. After a failover another primary has the slot,
    and perhaps fewer replicas, which makes nothing safer: so the number is kept by slot.

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
    """The keys that a reshard writes to: the registry, and the prefixes of the shards of these layouts."""
    namespace = backend.config.namespace
    return [queues_key(namespace), *(prefix for each in layouts for prefix in each.prefixes(namespace, queue))]


def runs_of(counts: Mapping[int, int]) -> list[list[int]]:
    """Counts by slot as the registry keeps them: [last slot, count] of each run of slots with the same count; empty:
    all are 0.
    """
    runs: list[list[int]] = []
    for slot, count in sorted(counts.items()):
        if runs and runs[-1][1] == count:
            runs[-1][0] = slot
        else:
            runs.append([slot, count])
    return runs if any(counts.values()) else []


def _read_runs(raw: Any, slots: Iterable[int]) -> dict[int, int]:
    """The counts of these slots, from `runs_of`; empty: it can't be read."""
    runs = raw if isinstance(raw, list) else []
    if not all(isinstance(run, list) and len(run) == 2 and all(type(n) is int for n in run) for run in runs):
        return {}
    places = {slot: bisect_left(runs, slot, key=lambda run: run[0]) for slot in slots}
    return {slot: runs[place][1] if place < len(runs) else 0 for slot, place in places.items()}


def begin_reshard(backend: Backend, queue: str, shards_count: int, by: str, unconfirmed: bool) -> Layouts:
    """Enters the reshard in the registry, unless it is there already. Returns the layouts; without a next one the queue
    has so many shards already.

    Raises:
        As `reshard`.
    """
    while True:
        layouts = repair_registry(backend, queue)
        if layouts.next is not None and (count := layouts.next.shards_count) != shards_count:
            raise Resharding(
                f"queue {queue!r} is being resharded to {count} shards: let that end first, or go on with it: "
                f"lowq reshard {queue} {count}"
            )
        if layouts.next is not None or layouts.current.shards_count == shards_count:
            backend.registrations.note_layouts(queue, layouts)
            return layouts
        for node in nodes(backend):
            if node.strict and queue in node.queues:
                raise ConfigError(
                    f"queue {queue!r} can't be resharded: {node.kind} {node.name} serves it and is strict about the "
                    "number of shards (strict_shards_count), so it would end. Stop it first, or start it without that"
                )
        facts: dict[str, Any] = {"began_at": round(time_of(backend.client.command("TIME")), 3), "by": by[:200]}
        following = Layout(shards_count, find_free_epoch(backend, queue, layouts.current, shards_count))
        if not unconfirmed:
            counts = count_replicas(backend, keys_of(backend, queue, layouts.current, following))
            if replicas := runs_of(counts):
                facts["replicas"] = replicas
        begun = Layouts(layouts.current, following, facts)
        if set_layouts(backend, queue, layouts, begun):
            log.info(
                "queue %r is resharded from %d shards to %d", queue, layouts.current.shards_count, shards_count,
                extra={"event": "reshard", "queue": queue},
            )  # fmt: skip
            return begun


class LayoutSwitch:
    """A reshard from one layout to another, as this process goes on with it: its progress and its writes. ``layouts``:
    as the registry has them; without a next one the reshard has ended, and is checked.
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
        """Calls the function until Redis answers, for `PATIENCE` seconds."""
        give_up_at = monotonic() + PATIENCE
        while True:
            try:
                return do()
            except RedisUnavailable:
                if monotonic() >= give_up_at:
                    raise
                time.sleep(random.uniform(0.1, 0.3))

    def read_metas(self, prefixes: Sequence[str], *fields: str) -> list[list[bytes | None]]:
        """These fields of ``meta`` of each shard."""
        return self.patiently(lambda: read_metas(self.backend, prefixes, *fields))

    def run_confirmed(self, calls: Sequence[Call[Any]], *, is_of_shards: bool = True) -> Steps:
        """Runs calls from which others go on, until as many replicas have confirmed each as its primary has. The calls
        are repeated with that: they go to another primary when that has taken over, and if they have changed nothing
        they have written something all the same, which is what replicas confirm. Returns their last replies;
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
                size = _CONFIRMED_WRITE if count else WRITE
                for start in range(0, len(positions), size):
                    some = positions[start : start + size]
                    found = yield from self._run_some([calls[position] for position in some], count, is_of_shards)
                    for position, reply in zip(some, found, strict=True):
                        replies[position] = reply
            joined = self._find_joined()
            left = [position for position in left if slot_of(calls[position].key) in joined]
        return replies

    def _find_joined(self) -> set[int]:
        """The slots whose primaries have got more replicas than confirm what is written to them; these do so from now
        on. A primary that has just taken over has no replica. One that joins it, and is lost soon after, may become the
        primary in the end, with the data of that moment. One that joins after this look has all that was written.
        """
        if self._unconfirmed:
            return set()
        counted = self.patiently(lambda: self.client.count_replicas(LOOK_MILLISECONDS))
        if counted == self._counted:
            return set()
        self._counted = counted
        found = self.patiently(lambda: count_replicas(self.backend, self._keys))
        joined = {slot for slot, count in found.items() if count > self._replicas.get(slot, 0)}
        self._replicas.update((slot, found[slot]) for slot in joined)
        return joined

    def _run_some(self, calls: Sequence[Call[Any]], replicas: int, is_of_shards: bool) -> Steps:
        """Runs calls in one write, again and again until so many replicas have confirmed each."""
        wait = Wait("replicated", CONFIRM_SECONDS, replicas) if replicas else None
        replies: list[Any] = [None] * len(calls)
        left = list(range(len(calls)))
        answered_at = monotonic()
        is_told = False
        while True:
            behind: set[str] = set()
            again: list[int] = []
            some = [calls[position] for position in left]
            found = self.client.run_many(some) if wait is None else self.client.start(some, wait=wait)()
            for position, reply in zip(left, found, strict=True):
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
                self._log_waiting(behind)
            if behind or self.progress.waits_for_replicas:
                yield self.note(waits_for_replicas=tuple(sorted(behind)))
            if not left:
                return replies
            if not behind:
                time.sleep(random.uniform(0.1, 0.3))
            elif is_of_shards and not self.patiently(self.is_wanted):
                # Another process has ended it, and knows what was confirmed.
                return [reply.reply if isinstance(reply, NotConfirmed) else reply for reply in replies]

    def _log_waiting(self, behind: set[str]) -> None:
        log.warning(
            "queue %r: waiting until replicas have what this reshard wrote (%s); to go on without, so that a "
            "failover may lose jobs: lowq reshard %s %d --unconfirmed", self.queue,
            ", ".join(sorted(behind)) or "on the primary", self.queue, self.after.shards_count,
            extra={"event": "reshard_unconfirmed", "queue": self.queue},
        )  # fmt: skip

    # --- the registry ---

    def write_layouts(self, before: Layouts, after: Layouts) -> Steps:
        """Writes the layouts into the registry; False: it has neither those before nor those after."""
        while (call := self.patiently(lambda: layout_call(self.backend, self.queue, before, after))) is not None:
            (reply,) = yield from self.run_confirmed([call], is_of_shards=False)
            if reply == 1:
                self.patiently(lambda: announce(self.backend, self.queue, after))
                return True
        return False

    def is_wanted(self) -> bool:
        """Whether the registry still says that the reshard is under way; in a check, that it was the last one. Not so
        when another process has ended it, or begun the next. If the registry has lost it, it is entered anew.

        Raises:
            UnknownQueueError, Resharding: the queue was dropped meanwhile. A new one of its name must not be sealed for
            a layout that nobody serves.
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

    # --- new shards ---

    def prepare_shards(self, prefixes: Sequence[str]) -> Steps:
        """Prepares shards of the next layout, paused if the queue is. Returns the replies of `prepare_shard`."""
        paused = self._find_pause()
        replies: list[int] = yield from self.run_confirmed(
            [ShardScripts(prefix).prepare(self.after.shards_count, *paused) for prefix in prefixes]
        )
        # A producer prepares what Redis has lost without knowing of a pause.
        written = paused if PrepareReply.WAS_FED not in replies else (b"", b"")
        fed = [prefix for prefix, reply in zip(prefixes, replies, strict=True) if reply]
        # A pause since the reshard was entered is written to the old shards first, then to the new ones. One that was
        # overwritten here just now is found in the old shards, and written again.
        while True:
            if paused != written:
                at, by = written = paused
                yield from self.run_confirmed([ShardOperations(prefix).pause(bool(at), by, now=at) for prefix in fed])
            paused = self._find_pause()
            if paused == written:
                return replies

    def _find_pause(self) -> tuple[bytes, bytes]:
        """Since when the queue is paused, and who did that; empty: it is not."""
        prefixes = self.prefixes(self.layouts.current)
        found = self.read_metas(prefixes, "paused", "paused_by")
        return min(((at, by or b"") for at, by in found if at is not None), default=(b"", b""))

    def prepare_lost_shards(self, prefixes: Sequence[str]) -> Steps:
        """Prepares shards of the next layout anew that Redis has lost, as in a failover to a replica that was behind.
        Returns whether none of them was opened meanwhile: that one stays open.

        Raises:
            UnknownQueueError, Resharding: the queue was dropped meanwhile.
        """
        if not self.patiently(self.is_wanted):
            return False
        replies = yield from self.prepare_shards(prefixes)
        lost = [prefix for prefix, reply in zip(prefixes, replies, strict=True) if reply is PrepareReply.FED]
        if lost:
            log.warning(
                "queue %r: Redis has lost shards of the next layout, as in a failover, with what no replica had of "
                "them; they are prepared anew: %s", self.queue, ", ".join(lost),
                extra={"event": "reshard_prepared_anew", "queue": self.queue},
            )  # fmt: skip
        return all(replies)
