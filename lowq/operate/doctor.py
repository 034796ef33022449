"""An examination: all that the doctor looks at, in order, and the repairs."""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from lowq.backend import Backend
from lowq.duration import duration
from lowq.errors import RedisUnavailable, ScriptError, ShardsCountError, UnknownQueueError
from lowq.operate.actions import release_shard
from lowq.operate.findings import KINDS, Finding
from lowq.operate.integrity import SCAN_KEYS, JobScanner, Place, ShardSnapshot, literally, read_shard_snapshots
from lowq.operate.nodes import STUCK_SECONDS, read_node_entries, seconds_all_busy
from lowq.operate.queues import QueueInfo, find_queue, read_registry
from lowq.operate.server import SAMPLE, SERVER_CODES, check_channels, check_encoding, check_servers
from lowq.operate.suspicions import Look, Suspicion, confirm, look
from lowq.options import QueueOptions
from lowq.sharding import Layout
from lowq.shards.lease import LeaseDenied
from lowq.store import Refusal, registry, untrusted
from lowq.store.keys import MAX_SHARDS, nodes_key, queues_key, shard_prefix
from lowq.store.shard import ShardScripts

#: Milliseconds that a lease without an end is given when the lease_ttl of its owner is not known: longer than any, so
#: that an owner that lives renews it before.
ENDLESS_LEASE = 600_000
#: Shards, nodes or keys that a text names.
MOST_NAMED = 10
#: The codes that findings have.
CODES = SERVER_CODES | KINDS.keys()

OnProgress = Callable[[int, int], object]


def examine(
    backend: Backend,
    queues: Sequence[str] = (),
    *,
    repair: bool = False,
    on_progress: OnProgress | None = None,
    patience: float | None = None,
) -> list[Finding]:
    """What the doctor finds; see `Lowq.examine`."""
    return _Examination(backend, queues, repair=repair, on_progress=on_progress, patience=patience).findings()


class _Examination:
    """One examination. It is done once, by `findings`."""

    def __init__(
        self,
        backend: Backend,
        queues: Sequence[str] = (),
        *,
        repair: bool = False,
        on_progress: OnProgress | None = None,
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
        self._scanner = JobScanner(self._client, self._namespace, repair=repair, on_step=self._step)

    def findings(self) -> list[Finding]:
        """Examines, and repairs if it is to."""
        silent: dict[str, RedisUnavailable] = {}
        found = list(check_servers(self._client, silent))
        if silent:
            return sorted(found, key=_severity)
        for name in self._wanted or ():
            self._check_exists(name)
        found += check_channels(self._client, self._namespace)
        # The ids first: restoring what a dead owner left needs entries that can be read.
        seen = look(self._backend, self._wanted)
        others = self._examine_jobs(seen)
        found += check_encoding(self._client, self._scanner.sample)
        # Twice, as a queue may come or go meanwhile: it is unknown only when its keys are there between two looks at
        # the registry that do not find it.
        known_before, _ = read_registry(self._backend)
        seen, confirmed = confirm(lambda: look(self._backend, self._wanted, others), self._patience)
        found += self._of_nodes(seen, confirmed)
        found += self._of_queues(seen, confirmed, known_before)
        found += self._of_shards(seen)
        found += self._of_ids(seen)
        return sorted(found, key=_severity)

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

    # --- progress ---

    def _step(self, count: int) -> None:
        self._done += count
        self._total = max(self._total, self._done)
        self._on_progress(self._done, self._total)

    # --- ids ---

    def _examine_jobs(self, seen: Look) -> list[Place]:
        """Looks at all ids; returns the shards that the registry doesn't know."""
        shard_snapshots = dict(seen.shard_snapshots)
        sizes = self._client.on_all([("DBSIZE",)])
        self._total = sum(item.entries for item in shard_snapshots.values()) + sum(size for (size,) in sizes.values())
        self._scanner.examine_sets([place for place, item in shard_snapshots.items() if item.entries])
        wanted = None if self._wanted is None else frozenset(self._wanted)
        layouts = {name: info.layouts for name, info in seen.queues.items()}
        self._scanner.examine_keys(wanted, layouts, shard_snapshots, SAMPLE)
        others = sorted(shard_snapshots.keys() - seen.shard_snapshots.keys())
        self._scanner.examine_sets([place for place in others if shard_snapshots[place].entries])
        return others

    def _of_ids(self, seen: Look) -> Iterator[Finding]:
        for (queue, code), tally in sorted(self._scanner.tallies.items()):
            ids = tuple(job_id.decode("utf-8", "backslashreplace") for job_id in tally.ids)
            noun = "entry" if code == "leftovers" else "key" if code == "unknown_keys" else "id"
            finding = self._finding(
                code,
                queue=queue,
                shards=sorted(tally.shards),
                current=seen.epoch(queue),
                count=_count(tally.count, noun),
                detail=_some(ids),
            )
            ids = () if code == "unknown_keys" else ids
            yield replace(finding, ids=ids, count=tally.count, repaired=tally.repaired)

    # --- nodes ---

    def _of_nodes(self, seen: Look, confirmed: dict[Suspicion, Any]) -> Iterator[Finding]:
        ttl = self._backend.config.lease_ttl
        yield from self._of_node_entries(seen)
        without = [suspicion[1] for suspicion in confirmed if suspicion[0] == "node_without_leases"]
        if without:
            yield self._finding("node_without_leases", nodes=without)
        busy = {node.name: seconds_all_busy(node) for node in seen.nodes if seconds_all_busy(node) > STUCK_SECONDS}
        if busy:
            yield self._finding("threads_busy", nodes=list(busy), seconds=duration(min(busy.values())))
        versions: defaultdict[str, list[str]] = defaultdict(list)
        for node in seen.nodes:
            versions[node.version or "unknown"].append(node.name)
        if len(versions) > 1:
            detail = "; ".join(f"{version}: {_some(names)}" for version, names in sorted(versions.items()))
            yield self._finding("version_drift", nodes=[node.name for node in seen.nodes], detail=detail)
        late = {node.name: node.late for node in seen.nodes if node.late > ttl / 3}
        if late:
            longest = max(late.values())
            finding = self._finding("maintenance_late", nodes=list(late), late=duration(longest))
            yield replace(finding, severity="error") if longest > ttl else finding

    def _of_node_entries(self, seen: Look) -> Iterator[Finding]:
        found = []
        if seen.entries.unreadable:
            found.append(self._finding("node_unreadable", nodes=sorted(seen.entries.unreadable)))
        if seen.entries.silent:
            ago = duration(min(seen.entries.silent.values()))
            found.append(self._finding("node_silent", nodes=sorted(seen.entries.silent), ago=ago))
        if found and self._repair:
            # A goodbye of nobody: as every heartbeat, it looks at all entries anew and forgets the nodes that are dead.
            self._client.call(registry.prune_nodes(nodes_key(self._namespace)))
            left = read_node_entries(self._backend).names
            found = [replace(item, repaired=sum(name not in left for name in item.nodes)) for item in found]
        yield from found

    # --- queues ---

    def _of_queues(self, seen: Look, confirmed: dict[Suspicion, Any], known_before: Iterable[str]) -> Iterator[Finding]:
        for queue, text in seen.unreadable_queues.items():
            yield self._finding("queue_unreadable", queue=queue, detail=text)
        for queue in seen.queues:
            shard_snapshots = seen.of_queue(queue)
            if seen.served(queue):
                continue
            jobs = sum(item.length + item.taken for item in shard_snapshots)
            if jobs:
                yield self._finding("queue_unserved", queue=queue, jobs=_count(jobs, "job"))
            elif (
                not any(item.exists for item in shard_snapshots)
                and sum(seen.within(item.place) for item in shard_snapshots) >= seen.queues[queue].shards_count
            ):
                yield self._finding("queue_unused", queue=queue)
        yield from self._unregistered(seen, frozenset(known_before))
        groups: defaultdict[tuple[str, str], list[ShardSnapshot]] = defaultdict(list)
        for suspicion, what in confirmed.items():
            if suspicion[0] in ("paused_in_part", "reshard_left"):
                groups[suspicion[0], suspicion[1]] = what
            elif suspicion[0] != "node_without_leases":
                groups[suspicion[0], suspicion[1]].append(what)
        for (code, queue), items in groups.items():
            yield self._of_group(seen, code, queue, items)

    def _of_group(self, seen: Look, code: str, queue: str, items: list[ShardSnapshot]) -> Finding:
        jobs = sum(item.length + item.taken for item in items)
        if code == "shard_sealed":
            counts = {item.meta["sealed"].partition(" ")[0] for item in items}
        else:
            counts = {item.meta.get("shards_count", "") for item in items}
        layouts = seen.queues[queue].layouts if queue in seen.queues else None
        finding = self._finding(
            code,
            queue=queue,
            shards=[item.place for item in items],
            current=seen.epoch(queue),
            following="" if layouts is None or layouts.next is None else layouts.next.shards_count,
            count=_count(sum(item.taken for item in items), "job"),
            jobs=_count(jobs, "job"),
            owner=_some(sorted({item.owner or "" for item in items})),
            detail=_some(sorted(counts)),
            expected=_count(seen.queues[queue].shards_count, "shard") if queue in seen.queues else "",
        )
        if code == "shard_unserved" and not any(item.due for item in items):
            finding = replace(finding, severity="warning")
        if code == "ownerless" and self._repair:
            repaired = sum(self._restore(item, seen.queues.get(queue)) for item in items)
            finding = replace(finding, repaired=repaired)
        return finding

    def _unregistered(self, seen: Look, known_before: frozenset[str]) -> Iterator[Finding]:
        strangers: defaultdict[str, list[ShardSnapshot]] = defaultdict(list)
        for (queue, *_), item in seen.shard_snapshots.items():
            known = queue in seen.queues or queue in seen.unreadable_queues or queue in known_before
            if not known and self._exists(item):
                strangers[queue].append(item)
        if not strangers:
            return
        known_after, _ = read_registry(self._backend)
        for queue, items in strangers.items():
            if queue in known_after:
                continue
            jobs = sum(item.jobs for item in items)
            finding = self._finding("queue_unregistered", queue=queue, jobs=_count(jobs, "job"))
            layout = _layout_of(items)
            shards = tuple(item.place.shard for item in items)
            finding = replace(finding, shards=shards, repairable=layout is not None)
            if layout is not None and self._repair:
                finding = replace(finding, repaired=int(self._register(queue, layout)))
            yield finding

    def _register(self, queue: str, layout: Layout) -> bool:
        """Enters a queue; False: somebody was quicker, with another number."""
        key = queues_key(self._namespace)
        if layout.epoch:
            entry = json.dumps({**layout.shown(), "options": {}})
            return bool(self._client.command("HSETNX", key, queue, entry, key=key))
        try:
            self._client.call(registry.Registration(key, queue, layout.shards_count))
        except Refusal:
            return False
        return True

    def _restore(self, item: ShardSnapshot, info: QueueInfo | None) -> bool:
        """What a dead owner left in flight waits again, as after any other change of owner: the doctor is the new
        owner for a moment. Whether nothing is without an owner any more.
        """
        queue, shard, _ = item.place
        count = untrusted.count(item.meta.get("shards_count"))
        if not 0 < count <= MAX_SHARDS:
            return False  # that must be put right first
        options = QueueOptions(queue, count)
        if info is not None:
            options = options.registered(info.options)
        # A Redis that was away until lately may be what the owner waits for.
        charge = self._client.server_age() > self._backend.config.lease_ttl
        try:
            got = release_shard(
                self._client, queue, shard, shard_prefix(self._namespace, *item.place), shards_count=count,
                max_crash_count=options.max_crash_count, charge=charge,
            )  # fmt: skip
        except (ShardsCountError, ScriptError):
            return False
        return not isinstance(got, LeaseDenied) or got.seconds < math.inf  # it is not being resharded

    # --- shards ---

    def _of_shards(self, seen: Look) -> Iterator[Finding]:
        beyond: defaultdict[tuple[str, str], list[ShardSnapshot]] = defaultdict(list)
        found: defaultdict[tuple[str, str], list[tuple[ShardSnapshot, str]]] = defaultdict(list)
        for place, item in seen.shard_snapshots.items():
            for code, detail in item.integrity_errors().items():
                found[place.queue, code].append((item, detail))
            if place.queue not in seen.queues or not self._exists(item):
                continue
            if seen.layout(place) is None or (item.is_left and item.jobs):
                # What is left of a shard whose jobs were all moved sends on who comes late.
                if item.jobs or not item.is_left:
                    beyond[place.queue, "layout_unknown"].append(item)
            elif not seen.within(place):
                beyond[place.queue, "shard_beyond"].append(item)
        for (queue, code), items in beyond.items():
            jobs = sum(item.jobs for item in items)
            layouts = " and ".join(_count(layout.shards_count, "shard") for layout in seen.queues[queue].layouts.all)
            finding = self._finding(
                code,
                queue=queue,
                shards=[item.place for item in items],
                current=seen.epoch(queue),
                jobs=_count(jobs, "job"),
                expected=layouts,
                epoch=seen.epoch(queue),
            )
            yield finding if jobs else replace(finding, severity="warning")
        for (queue, code), pairs in found.items():
            sick = [item for item, _ in pairs]
            finding = self._finding(
                code,
                queue=queue,
                shards=[item.place for item in sick],
                current=seen.epoch(queue),
                detail=_some(sorted({part for _, detail in pairs for part in detail.split(", ")})),
                ahead=duration(max((item.seconds_ahead for item in sick if not item.wrong), default=0.0)),
            )
            if finding.repairable and self._repair:
                finding = replace(finding, repaired=self._repair_shards(seen, code, sick))
            yield finding

    def _exists(self, item: ShardSnapshot) -> bool:
        """Whether there is anything of a shard that the registry doesn't know: perhaps only keys that nothing lists."""
        return item.exists or any(item.place in tally.shards for tally in self._scanner.tallies.values())

    def _repair_shards(self, seen: Look, code: str, sick: list[ShardSnapshot]) -> int:
        """How many of them have it no more."""
        for item in sick:
            argument = str(ENDLESS_LEASE)
            if code == "meta_lost":
                if not seen.within(item.place):
                    continue
                argument = str(seen.shards_count(item.place))
            self._client.call(ShardScripts(shard_prefix(self._namespace, *item.place)).repair_shard(code, argument))
        after = read_shard_snapshots(self._client, self._namespace, [item.place for item in sick])
        return sum(code not in item.integrity_errors() for item in after.values())

    # --- texts ---

    def _finding(
        self,
        code: str,
        *,
        queue: str | None = None,
        shards: Sequence[Place] = (),
        current: int = 0,
        nodes: Sequence[str] = (),
        **values: Any,
    ) -> Finding:
        """``current``: the epoch of the layout that shards are named in without saying so."""
        kind = KINDS[code]
        values |= {
            "queue": queue,
            "shards": ("shard " if len(shards) == 1 else "shards ")
            + _some([_name(place, current) for place in sorted(shards, key=lambda place: (place.epoch, place.shard))]),
            "nodes": _some(nodes),
            "queues_key": queues_key(self._namespace),
            "nodes_key": nodes_key(self._namespace),
            "lease_ttl": duration(self._backend.config.lease_ttl),
        }
        return Finding(
            code,
            kind.severity,
            kind.what.format(**values),
            kind.cause.format(**values),
            kind.effect.format(**values),
            kind.advice.format(**values),
            queue=queue,
            shards=tuple(sorted(place.shard for place in shards)),
            nodes=tuple(nodes),
            count=max(len(shards), len(nodes), 1),
            repairable=kind.repairable,
        )


def _severity(finding: Finding) -> int:
    return ("ok", "warning", "error").index(finding.severity)


def _name(place: Place, current: int) -> str:
    return str(place.shard) if place.epoch == current else f"{place.shard} (of layout {place.epoch})"


def _layout_of(items: Sequence[ShardSnapshot]) -> Layout | None:
    """The layout of a queue that the registry has lost, as its shards tell it: that which has shards that were not
    moved on; None: they do not agree.
    """
    epochs = {item.place.epoch for item in items if not item.is_left}
    rest = [item for item in items if item.place.epoch in epochs]
    if len(epochs) != 1 or any("sealed" in item.meta or "fed" in item.meta for item in rest):
        return None
    counts = {item.meta["shards_count"] for item in rest if not item.wrong and "shards_count" in item.meta}
    count = counts.pop() if len(counts) == 1 else ""
    # As everything that Redis says: it may be anything.
    if not count.isdigit() or not 0 < int(count) <= MAX_SHARDS or any(item.place.shard >= int(count) for item in rest):
        return None
    return Layout(int(count), epochs.pop())


def _count(number: int, noun: str) -> str:
    plural = f"{noun[:-1]}ies" if noun.endswith("y") and noun != "key" else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def _some(names: Sequence[str]) -> str:
    """The first few of them."""
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")
