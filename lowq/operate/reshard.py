"""Changes the number of shards of a queue while it is used: its jobs are moved to the shards of another layout.

::

    begin     the registry says that a reshard is under way: nodes and producers learn of the next layout. Its epoch is
              one that no shard was ever made for
    prepare   all shards of it: they accept pushes, and nothing is taken of them
    class by class (the shards that are congruent modulo gcd(N, M): only among these do jobs move)
      seal    its old shards: pushes are sent on, the holder finishes what is in flight and gives the lease up
      move    with the lease of the old shard, page by page: move_out (read a page, when the last one has come)
              -> move_in (to each new shard that jobs of it belong to) -> move_out ...
      open    its new shards: nodes take them
    check     every old shard once more: sealed and moved; every new one: open. Otherwise its class again
    end       the registry says the next layout; what is left of an old shard sends on who comes late

Redis loses in a failover what no replica has received. So each step is confirmed by as many replicas as its primary had
when the reshard began, before anything goes on from it; otherwise it is written again, for as long as it takes. That
includes the state of an old shard when its first page is read: from then on only `move_out` changes it, so that the
next primary has the same pages.

Everything may end anywhere: whoever begins anew with the same number of shards goes on. A page is the same whenever it
is read, and comes to a new shard once, as that remembers the step. Several may be at it at once: the lease of an old
shard is one's at a time, and what one does late changes nothing. No step touches two shards.
"""

from collections.abc import Iterator
from typing import Any

from lowq.backend import Backend
from lowq.errors import ConfigError, Resharding
from lowq.logs import get_log
from lowq.operate.layout_switch import LayoutSwitch, ReshardProgress, count_replicas
from lowq.operate.layouts import (
    find_free_epoch,
    find_layout_before,
    repair_registry,
    set_layouts,
)
from lowq.operate.mover import Mover
from lowq.operate.nodes import nodes
from lowq.operate.queues import find_queue
from lowq.operate.walk import read_stats
from lowq.options import QUEUE_OPTIONS
from lowq.schedules import is_internal
from lowq.sharding import Layout, Layouts
from lowq.store.scripts import time_of

log = get_log("lowq.reshard")


def reshard(
    backend: Backend, queue: str, shards_count: int, *, by: str = "", unconfirmed: bool = False
) -> Iterator[ReshardProgress]:
    """Gives a queue so many shards, or goes on with that; see above. It goes step by step as it is iterated over. Who
    stops iterating leaves it to be gone on with. ``by``: who does it, for people. ``unconfirmed``: replicas are not
    waited for, and a failover may lose jobs.

    Where the queue has so many shards already, these and those of the layout before are checked. If all is well nothing
    is yielded, unless replicas are waited for.

    Raises:
        ConfigError: shards_count is out of range; the queue is one of lowq's own; or a node is strict about it.
        Resharding: another number of shards is under way. UnknownQueueError. RedisUnavailable, RedisRefused: what was
        done stays done.
    """
    QUEUE_OPTIONS["shards_count"].kind.check(f"queue {queue!r}: ", "shards_count", shards_count)
    if is_internal(queue):
        raise ConfigError(f"queue {queue!r} is one of lowq's own: it has one shard for good")
    layouts = _begin(backend, queue, shards_count, by, unconfirmed)
    if layouts.next is not None:
        return Mover(LayoutSwitch(backend, queue, layouts.current, layouts, unconfirmed)).run()
    before = find_layout_before(backend, queue, layouts.current)
    return iter(()) if before is None else Mover(LayoutSwitch(backend, queue, before, layouts, unconfirmed)).run()


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


def _begin(backend: Backend, queue: str, shards_count: int, by: str, unconfirmed: bool) -> Layouts:
    """Enters the reshard in the registry, unless it is there already. Returns the layouts; without a next one the queue
    has so many shards.
    """
    while True:
        layouts = repair_registry(backend, queue)
        if layouts.next is not None and layouts.next.shards_count != shards_count:
            count = layouts.next.shards_count
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
        if not unconfirmed and (replicas := count_replicas(backend, queue, (layouts.current, following))):
            facts["replicas"] = replicas
        begun = Layouts(layouts.current, following, facts)
        if set_layouts(backend, queue, layouts, begun):
            log.info(
                "queue %r is resharded from %d shards to %d", queue, layouts.current.shards_count, shards_count,
                extra={"event": "reshard", "queue": queue},
            )  # fmt: skip
            return begun
