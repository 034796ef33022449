"""Who works what: the registries, the leases, and what both together should be.

These are read one after the other, so what does not fit may only be in motion: a shard between two owners, a node that
has just started or died. Such a *suspicion* is reported when it was there at every look for longer than anything in
order takes: a heartbeat or a head start is never later than lease_ttl / 3.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowq.backend import Backend
from lowq.operate.integrity import Place, ShardSnapshot, read_shard_snapshots
from lowq.operate.nodes import NodeEntries, NodeInfo, nodes, read_node_entries
from lowq.operate.queues import QueueInfo, read_registry
from lowq.sharding import Layout

#: Seconds between two looks at what is suspicious.
LOOK_INTERVAL = 0.5
#: A suspicion: its code, and what distinguishes it from others of the same code. It may go on under the same name only.
Suspicion = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Look:
    """All of it, as one look found it."""

    queues: Mapping[str, QueueInfo]
    #: queue -> what can't be read of its entry.
    unreadable_queues: Mapping[str, str]
    nodes: Sequence[NodeInfo]
    entries: NodeEntries
    shard_snapshots: Mapping[Place, ShardSnapshot]

    def of_queue(self, queue: str) -> list[ShardSnapshot]:
        """Snapshots of its shards, as far as they can be read."""
        return [item for place, item in self.shard_snapshots.items() if place.queue == queue and not item.wrong]

    def served(self, queue: str) -> bool:
        """Whether a node lives that takes jobs of it."""
        return any(queue in node.queues and not node.quiet for node in self.nodes)

    def within(self, place: Place) -> bool:
        """Whether it is a shard of a layout that the registry knows."""
        return place.shard < self.shards_count(place)

    def shards_count(self, place: Place) -> int:
        """How many shards its layout has; 0: the registry doesn't know that."""
        layout = self.layout(place)
        return 0 if layout is None else layout.shards_count

    def layout(self, place: Place) -> Layout | None:
        """The layout that it belongs to, of those that may have jobs."""
        if place.queue not in self.queues:
            return None
        return next((each for each in self.queues[place.queue].layouts.all if each.epoch == place.epoch), None)

    def epoch(self, queue: str) -> int:
        """That of its layout; 0 where the registry doesn't know it."""
        return self.queues[queue].epoch if queue in self.queues else 0

    def following(self, place: Place) -> Layout | None:
        """The layout that its jobs are being moved to, as the registry says."""
        layouts = self.queues[place.queue].layouts if place.queue in self.queues else None
        return layouts.next if layouts is not None and layouts.current.epoch == place.epoch else None


def look(backend: Backend, wanted: Sequence[str] | None, others: Sequence[Place] = ()) -> Look:
    """Looks at the registries and at the shards of the queues wanted (None: all), and at some others.

    Raises:
        RedisUnavailable, RedisRefused, ScriptError
    """
    # The nodes last: one that comes meanwhile is seen, while its leases may not be.
    queues, unreadable = read_registry(backend)
    if wanted is not None:
        queues = {name: info for name, info in queues.items() if name in wanted}
        unreadable = {name: text for name, text in unreadable.items() if name in wanted}
    places = [
        Place(name, shard, layout.epoch)
        for name, info in queues.items()
        for layout in info.layouts.all
        for shard in range(layout.shards_count)
    ]
    shard_snapshots = read_shard_snapshots(backend.client, backend.config.namespace, dict.fromkeys([*places, *others]))
    entries = read_node_entries(backend)
    live = [node for node in nodes(backend) if node.name not in entries.unreadable]
    return Look(queues, unreadable, live, entries, shard_snapshots)


# --- suspicions ----------------------------------------------------------------------------------------------


def suspicions(seen: Look) -> dict[Suspicion, Any]:
    """What does not fit at one look: the suspicion, and what it is about."""
    return dict(
        [
            *_shards_nobody_holds(seen),
            *_strange_leases(seen),
            *_nodes_without_leases(seen),
            *_other_counts(seen),
            *_sealed_for_nothing(seen),
            *_reshards_left(seen),
            *_paused_in_part(seen),
        ]
    )


def _shards_nobody_holds(seen: Look) -> Iterator[tuple[Suspicion, Any]]:
    for place, item in seen.shard_snapshots.items():
        # Nodes take nothing of a shard whose jobs are being moved, or are still to come: see `_reshards_left`.
        if item.wrong or item.token is not None or "sealed" in item.meta or "fed" in item.meta:
            continue
        # Each change of owner has a fence of its own: with the same one, nobody was there between two looks.
        fence = item.meta.get("fence", "")
        if item.taken:
            yield ("ownerless", place.queue, str(place.shard), str(place.epoch), fence), item
        elif seen.served(place.queue) and seen.within(place) and _is_prepared(seen, place, item):
            yield ("shard_unserved", place.queue, str(place.shard), str(place.epoch), fence), item


def _is_prepared(seen: Look, place: Place, item: ShardSnapshot) -> bool:
    """Whether nodes may hold it: a shard that a reshard is only about to make has nothing yet."""
    return place.epoch == seen.queues[place.queue].epoch or "shards_count" in item.meta


def _strange_leases(seen: Look) -> Iterator[tuple[Suspicion, Any]]:
    known = {name.rpartition(":")[2] for name in seen.entries.names}
    for place, item in seen.shard_snapshots.items():
        if item.is_moving and seen.following(place) is not None:
            continue  # whoever moves its jobs is no node
        if item.owner is not None and item.owner[:6] not in known:
            yield ("lease_unknown", place.queue, str(place.shard), str(place.epoch), item.token or ""), item


def _nodes_without_leases(seen: Look) -> Iterator[tuple[Suspicion, Any]]:
    for node in seen.nodes:
        # It names shards by number: those of two layouts while a reshard is under way.
        says = [
            Place(queue, shard, layout.epoch)
            for queue, shards in node.shards.items()
            if queue in seen.queues
            for layout in seen.queues[queue].layouts.all
            for shard in shards
        ]
        looked_at = [
            seen.shard_snapshots[place]
            for place in says
            if place in seen.shard_snapshots and not seen.shard_snapshots[place].wrong
        ]
        nonce = node.name.rpartition(":")[2]
        if looked_at and not any((item.owner or "").startswith(nonce) for item in looked_at):
            yield ("node_without_leases", node.name), node


def _other_counts(seen: Look) -> Iterator[tuple[Suspicion, Any]]:
    for place, item in seen.shard_snapshots.items():
        count = None if item.wrong else item.meta.get("shards_count")
        if count is not None and seen.within(place) and count != str(seen.shards_count(place)):
            yield ("shards_count", place.queue, str(place.shard), str(place.epoch), count), item


def _paused_in_part(seen: Look) -> Iterator[tuple[Suspicion, Any]]:
    paused: defaultdict[str, set[bool]] = defaultdict(set)
    for place, item in seen.shard_snapshots.items():
        if seen.within(place) and not item.wrong and not item.is_left and _is_prepared(seen, place, item):
            paused[place.queue].add("paused" in item.meta)
    for queue, states in paused.items():
        if len(states) == 2:
            items = [item for item in seen.of_queue(queue) if "paused" in item.meta and not item.is_left]
            yield ("paused_in_part", queue), items


def _sealed_for_nothing(seen: Look) -> Iterator[tuple[Suspicion, Any]]:
    """Shards that say that their jobs belong to another layout, and the registry says nothing of that."""
    for place, item in seen.shard_snapshots.items():
        said = item.meta.get("sealed")
        if said is None or seen.layout(place) is None:
            continue
        following = seen.following(place)
        if following is None or said != f"{following.shards_count} {following.epoch}":
            yield ("shard_sealed", place.queue, str(place.shard), str(place.epoch), said), item


def _reshards_left(seen: Look) -> Iterator[tuple[Suspicion, Any]]:
    """Reshards that nobody goes on with: nothing of them changes. Whoever moves jobs holds a lease, and while a node
    finishes what is in flight of a sealed shard it does.
    """
    for queue, info in seen.queues.items():
        if info.reshard is None:
            continue
        items = [item for item in seen.of_queue(queue) if seen.within(item.place)]
        if any(item.is_moving and item.token is not None for item in items):
            continue
        state = [
            f"{item.place.epoch}:{item.place.shard}:"
            + " ".join(item.meta.get(name, "") for name in ("sealed", "moved", "fed", "step"))
            + (item.meta.get("fence", "") if item.is_moving else "")
            for item in items
        ]
        yield ("reshard_left", queue, *state), [item for item in items if item.is_moving or "fed" in item.meta]


def confirm(look_again: Callable[[], Look], patience: float) -> tuple[Look, dict[Suspicion, Any]]:
    """The last look, and the suspicions that were there at every look for so many seconds. Ends early without any.

    Raises:
        RedisUnavailable, RedisRefused, ScriptError
    """
    deadline = time.monotonic() + patience
    seen = look_again()
    found = suspicions(seen)
    while found and time.monotonic() < deadline:
        time.sleep(max(min(LOOK_INTERVAL, deadline - time.monotonic()), 0.0))
        seen = look_again()
        found = {suspicion: what for suspicion, what in suspicions(seen).items() if suspicion in found}
    return seen, found
