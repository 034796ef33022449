"""An examination of servers, registries, nodes, queues, shards and ids (`integrity`), in order, and the repairs."""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lowq.backend import Backend
from lowq.clock import duration
from lowq.errors import RedisUnavailable, ScriptError, ShardsCountError, UnknownQueueError
from lowq.operate.actions import release_shard
from lowq.operate.findings import Finding, Severity, check_channels, check_encoding, check_servers, make_finding
from lowq.operate.integrity import (
    SCAN_KEYS,
    Inventory,
    JobScanner,
    Place,
    ShardSnapshot,
    Suspicion,
    confirm,
    literally,
    read_inventory,
    read_shard_snapshots,
)
from lowq.operate.nodes import STUCK_SECONDS, read_node_entries, seconds_all_busy
from lowq.operate.queues import QueueShards, find_queue, read_registry
from lowq.options import QueueOptions
from lowq.registrations import QueueInfo
from lowq.sharding import Layout
from lowq.shards.lease import LeaseDenied
from lowq.store import registry, untrusted
from lowq.store.keys import MAX_SHARDS, nodes_key, queues_key, shard_prefix
from lowq.store.shard_operations import ShardOperations

#: Milliseconds that an endless lease gets if the lease_ttl of its owner is not known: longer than any, so that a live
#: owner renews it before.
ENDLESS_LEASE = 600_000
#: Shards, nodes or keys that a text names at most.
MOST_NAMED = 10


class Examination:
    """One examination; see `Lowq.examine`."""

    def __init__(
        self,
        backend: Backend,
        queues: Sequence[str] = (),
        *,
        repair: bool = False,
        on_progress: Callable[[int, int], object] | None = None,
        patience: float | None = None,
    ) -> None:
        self._backend = backend
        self._client = backend.client
        self._namespace = backend.config.namespace
        self._wanted = list(dict.fromkeys(queues)) or None
        self._repair = repair
        self._on_progress = on_progress or (lambda _done, _total: None)
        self._patience = backend.config.lease_ttl / 3 + 1.0 if patience is None else patience
        self._done = self._total = 0
        #: The last look.
        self._seen: Inventory
        self._scanner = JobScanner(self._client, self._namespace, repair=repair, on_step=self._step)

    def findings(self) -> list[Finding]:
        """Examines once, and repairs if it is to."""
        silent: dict[str, RedisUnavailable] = {}
        found = list(check_servers(self._client, silent))
        if not silent:
            for name in self._wanted or ():
                self._check_exists(name)
            found += check_channels(self._client, self._namespace)
            # The ids first: jobs of a dead owner can be restored only if their entries can be read.
            others = self._examine_jobs(read_inventory(self._backend, self._wanted))
            found += check_encoding(self._client, self._scanner.sample)
            # Twice, as a queue may come or go meanwhile: it is unknown only if its keys were there between two reads of
            # the registry without it.
            known_before, _ = read_registry(self._backend)
            self._seen, confirmed = confirm(lambda: read_inventory(self._backend, self._wanted, others), self._patience)
            found += self._of_nodes([suspicion[1] for suspicion in confirmed if suspicion[0] == "node_without_leases"])
            found += self._of_queues(known_before)
            found += self._of_suspicions(confirmed)
            found += self._of_shards()
            found += self._of_ids()
        return sorted(found, key=lambda finding: ("ok", "warning", "error").index(finding.severity))

    def _check_exists(self, name: str) -> None:
        try:
            find_queue(self._backend, name)
        except UnknownQueueError:
            if name in read_registry(self._backend)[1]:
                return
            # Perhaps only the registry has lost it.
            begin = shard_prefix(self._namespace, name, 0).rpartition(":0")[0]
            for layout in (f"{begin}:", f"{begin}@"):
                if any(self._client.scan(literally(layout) + "*", SCAN_KEYS)):
                    return
            raise

    def _step(self, count: int) -> None:
        self._done += count
        self._total = max(self._total, self._done)
        self._on_progress(self._done, self._total)

    # --- ids ---

    def _examine_jobs(self, seen: Inventory) -> list[Place]:
        """Examines all ids; returns the shards that the registry doesn't know."""
        shard_snapshots = dict(seen.shard_snapshots)
        sizes = self._client.on_all([("DBSIZE",)])
        self._total = sum(item.entries for item in shard_snapshots.values()) + sum(size for (size,) in sizes.values())
        self._scanner.examine_sets(
            [place for place, item in shard_snapshots.items() if item.entries], seen.shards_count
        )
        self._scanner.examine_keys(self._wanted, seen.shards_count, shard_snapshots)
        others = sorted(shard_snapshots.keys() - seen.shard_snapshots.keys())
        self._scanner.examine_sets([place for place in others if shard_snapshots[place].entries], seen.shards_count)
        return others

    def _of_ids(self) -> Iterator[Finding]:
        for (queue, code), tally in sorted(self._scanner.tallies.items()):
            ids = tuple(job_id.decode("utf-8", "backslashreplace") for job_id in tally.ids)
            noun = {"leftovers": "entry", "unknown_keys": "key"}.get(code, "id")
            count = _count(tally.count, noun)
            finding = self._finding(code, queue, places=tally.shards, count=count, detail=_some(ids))
            ids = () if code == "unknown_keys" else ids
            yield replace(finding, ids=ids, count=tally.count, repaired=tally.repaired)

    # --- nodes ---

    def _of_nodes(self, without_leases: Sequence[str]) -> Iterator[Finding]:
        nodes, ttl = self._seen.nodes, self._backend.config.lease_ttl
        dead = []
        if nodes.unreadable:
            dead.append(self._finding("node_unreadable", nodes=sorted(nodes.unreadable)))
        if nodes.silent:
            ago = duration(min(nodes.silent.values()))
            dead.append(self._finding("node_silent", nodes=sorted(nodes.silent), ago=ago))
        if dead and self._repair:
            # An anonymous deregistration: as every heartbeat, it looks at all entries anew.
            self._client.call(registry.prune_nodes(nodes_key(self._namespace)))
            left = read_node_entries(self._backend)
            wrong = left.unreadable | left.silent.keys()
            dead = [replace(item, repaired=sum(name not in wrong for name in item.nodes)) for item in dead]
        yield from dead
        if without_leases:
            yield self._finding("node_without_leases", nodes=without_leases)
        busy = {node.name: seconds_all_busy(node) for node in nodes.live if seconds_all_busy(node) > STUCK_SECONDS}
        if busy:
            yield self._finding("threads_busy", nodes=list(busy), seconds=duration(min(busy.values())))
        versions: defaultdict[str, list[str]] = defaultdict(list)
        for node in nodes.live:
            versions[node.version or "unknown"].append(node.name)
        if len(versions) > 1:
            detail = "; ".join(f"{version}: {_some(names)}" for version, names in sorted(versions.items()))
            yield self._finding("version_drift", nodes=[node.name for node in nodes.live], detail=detail)
        late = {node.name: node.late for node in nodes.live if node.late > ttl / 3}
        if late:
            longest = max(late.values())
            severity: Severity = "error" if longest > ttl else "warning"
            yield self._finding("maintenance_late", nodes=list(late), severity=severity, late=duration(longest))

    # --- queues ---

    def _of_queues(self, known_before: Collection[str]) -> Iterator[Finding]:
        seen = self._seen
        for queue, text in seen.unreadable_queues.items():
            yield self._finding("queue_unreadable", queue, detail=text)
        for queue, info in seen.queues.items():
            items = seen.of_queue(queue)
            if not seen.served(queue):
                if any(item.length + item.taken for item in items):
                    yield replace(self._finding("queue_unserved", queue, items), shards=(), count=1)
                elif (
                    not any(item.exists for item in items)
                    and sum(seen.within(item.place) for item in items) >= info.shards_count
                ):
                    yield self._finding("queue_unused", queue)
        strangers: defaultdict[str, list[ShardSnapshot]] = defaultdict(list)
        for (queue, *_), item in seen.shard_snapshots.items():
            if queue not in {*seen.queues, *seen.unreadable_queues, *known_before} and self._exists(item):
                strangers[queue].append(item)
        known_after = read_registry(self._backend)[0] if strangers else {}
        for queue in strangers.keys() - known_after.keys():
            layout = _layout_of(strangers[queue])
            finding = replace(self._finding("queue_unregistered", queue, strangers[queue]), count=1)
            repaired = layout is not None and self._repair and self._register(queue, layout)
            yield replace(finding, repairable=layout is not None, repaired=int(repaired))

    def _register(self, queue: str, layout: Layout) -> bool:
        """Enters a queue in the registry; False: another process was quicker."""
        key = queues_key(self._namespace)
        entry = json.dumps({**layout.shown(), "options": {}})
        return bool(self._client.command("HSETNX", key, queue, entry, key=key))

    def _of_suspicions(self, confirmed: Mapping[Suspicion, list[ShardSnapshot]]) -> Iterator[Finding]:
        groups: defaultdict[tuple[str, str], list[ShardSnapshot]] = defaultdict(list)
        for (code, queue, *_), items in confirmed.items():
            if code != "node_without_leases":
                groups[code, queue] += items
        for (code, queue), items in groups.items():
            if code == "shard_sealed":
                counts = {item.meta["sealed"].partition(" ")[0] for item in items}
            else:
                counts = {item.meta.get("shards_count", "") for item in items}
            is_idle = code == "shard_unserved" and not any(item.due for item in items)
            finding = self._finding(
                code, queue, items, severity="warning" if is_idle else None, detail=_some(sorted(counts)),
                owner=_some(sorted({item.owner or "" for item in items})),
            )  # fmt: skip
            if code == "ownerless" and self._repair:
                repaired = sum(self._restore(item, self._seen.queues.get(queue)) for item in items)
                finding = replace(finding, repaired=repaired)
            yield finding

    def _restore(self, item: ShardSnapshot, info: QueueInfo | None) -> bool:
        """Restores jobs that a dead owner left in flight, as after any change of owner: the doctor is the new owner for
        a moment. Returns whether none is left.
        """
        queue, shard, epoch = item.place
        count = untrusted.count(item.meta.get("shards_count"))
        if not 0 < count <= MAX_SHARDS:
            return False  # that must be repaired first
        options = QueueOptions(queue, count)
        if info is not None:
            options = options.registered(info.options)
        try:
            shards = QueueShards(self._backend, queue)
            got = release_shard(shards, Layout(count, epoch), shard, options.max_crash_count)
        except (ShardsCountError, ScriptError):
            return False
        return not isinstance(got, LeaseDenied) or got.seconds < math.inf  # it is not being resharded

    # --- shards ---

    def _of_shards(self) -> Iterator[Finding]:
        seen = self._seen
        beyond: defaultdict[tuple[str, str], list[ShardSnapshot]] = defaultdict(list)
        sick: defaultdict[tuple[str, str], dict[Place, str]] = defaultdict(dict)
        for place, item in seen.shard_snapshots.items():
            for code, detail in item.integrity_errors().items():
                sick[place.queue, code][place] = detail
            if place.queue not in seen.queues or not self._exists(item):
                continue
            if seen.layout(place) is None or (item.is_left and item.jobs):
                # A shard whose jobs were all moved sends late pushes on.
                if item.jobs or not item.is_left:
                    beyond[place.queue, "layout_unknown"].append(item)
            elif not seen.within(place):
                beyond[place.queue, "shard_beyond"].append(item)
        for (queue, code), items in beyond.items():
            has_jobs = any(item.jobs for item in items)
            yield self._finding(code, queue, items, severity=None if has_jobs else "warning")
        for (queue, code), details in sick.items():
            items = [seen.shard_snapshots[place] for place in details]
            ahead = duration(max((item.seconds_ahead for item in items if not item.wrong), default=0.0))
            words = sorted({part for detail in details.values() for part in detail.split(", ")})
            finding = self._finding(code, queue, items, detail=_some(words), ahead=ahead)
            if finding.repairable and self._repair:
                finding = replace(finding, repaired=self._repair_shards(code, items))
            yield finding

    def _exists(self, item: ShardSnapshot) -> bool:
        """Whether a shard that the registry doesn't know has keys, perhaps only some that nothing lists."""
        return item.exists or any(item.place in tally.shards for tally in self._scanner.tallies.values())

    def _repair_shards(self, code: str, sick: list[ShardSnapshot]) -> int:
        """Repairs these shards; returns how many are in order now."""
        for item in sick:
            argument = self._seen.shards_count(item.place) if code == "meta_lost" else ENDLESS_LEASE
            if code != "meta_lost" or self._seen.within(item.place):
                scripts = ShardOperations(item.place.prefix(self._namespace))
                self._client.call(scripts.repair_shard(code, str(argument)))
        after = read_shard_snapshots(self._client, self._namespace, [item.place for item in sick])
        return sum(code not in item.integrity_errors() for item in after.values())

    # --- texts ---

    def _finding(
        self,
        code: str,
        queue: str | None = None,
        items: Collection[ShardSnapshot] = (),
        *,
        places: Collection[Place] = (),
        nodes: Sequence[str] = (),
        severity: Severity | None = None,
        **fields: Any,
    ) -> Finding:
        """A finding about these shards, given as ``items`` or as ``places``, or about these nodes."""
        info = self._seen.queues.get(queue or "")
        layouts = () if info is None else info.layouts.all
        shards = sorted(places or [item.place for item in items], key=lambda place: (place.epoch, place.shard))
        # Shards of the present layout are named without saying so.
        epoch = 0 if info is None else info.epoch
        names = [f"{each.shard}{'' if each.epoch == epoch else f' (of layout {each.epoch})'}" for each in shards]
        fields = {
            "shards": f"{'shard' if len(shards) == 1 else 'shards'} {_some(names)}",
            "nodes": _some(nodes),
            "count": _count(sum(item.taken for item in items), "job"),
            "unfinished": _count(sum(item.length + item.taken for item in items), "job"),
            "jobs": _count(sum(item.jobs for item in items), "job"),
            "expected": " and ".join(_count(layout.shards_count, "shard") for layout in layouts),
            "epoch": epoch,
            "following": layouts[-1].shards_count if layouts else "",
            "queues_key": queues_key(self._namespace),
            "nodes_key": nodes_key(self._namespace),
            "lease_ttl": duration(self._backend.config.lease_ttl),
        } | fields
        return make_finding(
            code, fields, severity=severity, queue=queue, shards=sorted(place.shard for place in shards), nodes=nodes,
            count=max(len(shards), len(nodes), 1),
        )  # fmt: skip


def _layout_of(items: Sequence[ShardSnapshot]) -> Layout | None:
    """The layout of a queue that the registry has lost, by its shards that were not moved; None: they do not agree."""
    epochs = {item.place.epoch for item in items if not item.is_left}
    rest = [item for item in items if item.place.epoch in epochs]
    if len(epochs) != 1 or any("sealed" in item.meta or "fed" in item.meta for item in rest):
        return None
    counts = {item.meta["shards_count"] for item in rest if not item.wrong and "shards_count" in item.meta}
    count = counts.pop() if len(counts) == 1 else ""
    # Redis may hold anything.
    if not count.isdigit() or not 0 < int(count) <= MAX_SHARDS or any(item.place.shard >= int(count) for item in rest):
        return None
    return Layout(int(count), epochs.pop())


def _count(number: int, noun: str) -> str:
    plural = "entries" if noun == "entry" else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def _some(names: Sequence[str]) -> str:
    """The first few names, and the number of the others."""
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")
