"""The queues in the registry: their entries, their layouts, and the shards of their jobs.

The registry is one key of one primary, which a failover may set back. The layouts in sealed and opened shards hold for
good: they decide where the two disagree, and no epoch is used twice. So does a shard that is not open while jobs are
still to come to it: the reshard is under way then, whatever the registry or a process says.
"""

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Any

from lowq.backend import Backend
from lowq.errors import ConfigError, LowqError, RedisRefused, RedisUnavailable, UnknownQueueError
from lowq.logs import describe, get_log
from lowq.operate.job_filter import JobFilter
from lowq.operate.walk import COMMANDS_TOGETHER, ask
from lowq.registrations import QueueInfo, queue_info
from lowq.schedules import is_internal
from lowq.sharding import READ_AGAIN, Layout, Layouts
from lowq.store import Call, Client, Command, registry, untrusted
from lowq.store.keys import MAX_SHARDS, nodes_key, queues_key
from lowq.store.shard import ShardScripts

log = get_log("lowq.reshard")

#: Shards of another layout that are read to find out whether it was ever made, and how many it has.
_PROBED = 64


def queues(backend: Backend) -> list[QueueInfo]:
    """All queues that were ever used and not dropped, by name. Entries that can't be read are left out, and so are
    internal queues.

    Raises:
        RedisUnavailable, RedisRefused
    """
    return [info for info in all_queues(backend) if not is_internal(info.name)]


def all_queues(backend: Backend) -> list[QueueInfo]:
    """As `queues`, with the internal ones."""
    known, unreadable = read_registry(backend)
    for name in unreadable:
        _log_unreadable(name)
    return list(known.values())


def read_registry(backend: Backend) -> tuple[dict[str, QueueInfo], dict[str, str]]:
    """The registry of queues, by name, and the entries that can't be read.

    Raises:
        RedisUnavailable, RedisRefused
    """
    key = queues_key(backend.config.namespace)
    raw = backend.client.command("HGETALL", key, key=key)
    known: dict[str, QueueInfo] = {}
    unreadable: dict[str, str] = {}
    for name, data in sorted(zip(raw[::2], raw[1::2], strict=True)):
        info, text = queue_info(name, data), name.decode("utf-8", "replace")
        if info is None:
            unreadable[text] = data.decode("utf-8", "replace")[:100]
        else:
            known[text] = info
    return known, unreadable


def find_queue(backend: Backend, name: str) -> QueueInfo:
    """A queue's entry.

    Raises:
        UnknownQueueError: there is none; the message names similar ones.
    """
    namespace = backend.config.namespace
    info = find_entry(backend.client, namespace, name, backend.config.push_timeout)
    if info is None:
        key = queues_key(namespace)
        names = [item.decode("utf-8", "replace") for item in backend.client.command("HKEYS", key, key=key)]
        if name in names:
            raise UnknownQueueError(
                f"queue {name!r} has an entry in the registry (namespace {namespace!r}) that can't be read: its node "
                "enters it anew once it is removed"
            )
        names = [each for each in names if not is_internal(each)]
        near = get_close_matches(name, names, 3)
        known = ", ".join(map(repr, near or sorted(names)[:10]))
        hint = f"did you mean {known}?" if near else f"known are {known}" if known else "no queue is known"
        raise UnknownQueueError(
            f"queue {name!r} does not exist in Redis (namespace {namespace!r}): no node or producer has used it yet; "
            + hint
        )
    return info


def find_entry(client: Client, namespace: str, name: str, timeout: float | None = None) -> QueueInfo | None:
    """A queue's entry, or None when nobody has used it yet. ``timeout`` is as for `Client.run_many`."""
    key = queues_key(namespace)
    return entry_of(name, client.command("HGET", key, name, key=key, timeout=timeout))


def entry_call(namespace: str, name: str) -> Command:
    """Asks for a queue's entry; see `entry_of`."""
    return Command(queues_key(namespace), "HGET", queues_key(namespace), name)


def entry_of(name: str, data: bytes | None) -> QueueInfo | None:
    """A queue's entry from the reply to `entry_call`; None: there is none, or none that can be read."""
    info = None if data is None else queue_info(name.encode(), data)
    if info is None and data is not None:
        _log_unreadable(name)
    return info


def _log_unreadable(name: str) -> None:
    untrusted.log_skipped("queue", name, "its entry in the registry is none of ours")


class QueueShards:
    """The shards of a queue, by the registry. Safe for threads."""

    def __init__(self, backend: Backend, name: str, shards_count: int | None = None) -> None:
        self.backend = backend
        self.name = name
        self._given_count = shards_count

    @property
    def client(self) -> Client:
        return self.backend.client

    @property
    def namespace(self) -> str:
        return self.backend.config.namespace

    @property
    def layouts(self) -> Layouts:
        """Its layout, and while a reshard is under way the next one; as read from the registry in the last second.

        Raises:
            UnknownQueueError: the number of shards was not given, and nobody has used the queue yet.
        """
        routes = self.backend.registrations.routes_of(self.name)
        return routes.layouts if routes is not None and routes.age < READ_AGAIN else self.read_layouts()

    @property
    def presumed_layouts(self) -> Layouts:
        """The layouts that this process knows, for callers that read the registry along with the shards; see
        `are_confirmed`.
        """
        routes = self.backend.registrations.routes_of(self.name)
        if routes is not None:
            return routes.layouts
        return self.layouts if self._given_count is None else Layouts.plain(self._given_count)

    def are_confirmed(self, presumed: Layouts, entry: QueueInfo | None) -> bool:
        """Whether the registry has these layouts. If not, a reshard has begun or ended: the new layouts are noted, and
        the caller reads again.
        """
        if entry is None or entry.layouts == presumed:
            return True
        self.backend.registrations.note_layouts(self.name, entry.layouts)
        return False

    def read_layouts(self) -> Layouts:
        """Its layouts, as the registry has them now."""
        if self._given_count is None:
            layouts = find_queue(self.backend, self.name).layouts
        else:
            entry = find_entry(self.client, self.namespace, self.name, self.backend.config.push_timeout)
            layouts = Layouts.plain(self._given_count) if entry is None else entry.layouts
        return self.backend.registrations.note_layouts(self.name, layouts).layouts

    @property
    def declared_count(self) -> int:
        """The number of shards in the code; without it, that in the registry."""
        return self.layouts.current.shards_count if self._given_count is None else self._given_count

    def read_entry(self) -> QueueInfo | None:
        """Its entry in the registry.

        Raises:
            RedisUnavailable
        """
        return find_entry(self.client, self.namespace, self.name)

    @property
    def prefixes(self) -> list[str]:
        """The prefixes of its shards, those of the next layout last."""
        return self.prefixes_in(self.layouts)

    def prefixes_in(self, layouts: Layouts) -> list[str]:
        return [prefix for layout in layouts.all for prefix in layout.prefixes(self.namespace, self.name)]

    def prefixes_for(self, wanted: JobFilter) -> list[str]:
        """The shards that a filter admits.

        Raises:
            ConfigError: there is no such shard.
        """
        shard, layouts = wanted.shard, self.layouts
        if shard is None:
            return self.prefixes_in(layouts)
        if shard >= layouts.current.shards_count:
            most = layouts.current.shards_count - 1
            raise ConfigError(f"shard={shard}: queue {self.name!r} has the shards 0 to {most}")
        return [self.prefix(layout, shard) for layout in layouts.all if shard < layout.shards_count]

    def prefix(self, layout: Layout, shard: int) -> str:
        return layout.prefix(self.namespace, self.name, shard)

    def prefixes_of(self, job_id: bytes, layouts: Layouts | None = None) -> list[str]:
        """The shards that may have jobs of an id; during a reshard the old one, and then the new one."""
        return [self.prefix(layout, layout.shard_of(job_id)) for layout in (layouts or self.layouts).all]


# --- layouts ---


class RegistryCheck:
    """Repairs the registry where it has lost layouts that this process knows, or that shards have named. It reads the
    shards in threads of its own: primaries may be away, and the caller has leases to keep.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        #: Queue -> the thread that reads its shards, or the last one that did.
        self._threads: dict[str, threading.Thread] = {}
        #: Queue -> layouts of the registry that its shards confirm, and those that had been served.
        self._confirmed: dict[str, tuple[Layouts, Layouts | None]] = {}
        #: The last error that was logged.
        self._logged = ""

    def accepts(self, queue: str, found: Layouts, served: Layouts | None, doubted: Collection[int]) -> bool:
        """Whether a process that has ``served`` other layouts is to follow those ``found`` in the registry. Not so
        earlier ones, nor another number of shards of the same epoch, unless the shards confirm them, as when the queue
        was dropped and made anew. ``doubted``: epochs whose shards are sealed, or not open, or were made for another
        number.
        """
        is_earlier = served is not None and (
            found.current.epoch < served.current.epoch
            or found.all[-1].epoch < served.all[-1].epoch
            or any(layout.epoch == other.epoch and layout != other for layout in found.all for other in served.all)
        )
        if is_earlier and self._confirmed.pop(queue, None) == (found, served):
            return True
        thread = self._threads.get(queue)
        # A mover enters its reshard before it seals a shard, so the registry has lost the one that has sealed these.
        is_doubtful = is_earlier or (found.next is None and found.current.epoch in doubted)
        if is_doubtful and (thread is None or not thread.is_alive()):
            thread = threading.Thread(target=self._repair, args=(queue, served), name="lowq-registry", daemon=True)
            self._threads[queue] = thread
            thread.start()
        return not is_earlier

    def _repair(self, queue: str, served: Layouts | None) -> None:
        try:
            layouts = repair_registry(self._backend, queue, None if served is None else served.current)
            self._confirmed[queue] = layouts, served
            if layouts.next is None:
                open_shards(self._backend, queue, layouts.current)
            if served is not None and layouts != served:
                announce(self._backend, queue, layouts)  # nodes that refused them meanwhile read the registry again
        except (RedisUnavailable, UnknownQueueError):
            pass  # the next heartbeat asks again
        except LowqError as error:
            text = describe(error, str)
            if text != self._logged:  # not with every heartbeat
                self._logged = text
                log.warning(
                    "queue %r: the registry and the shards disagree, and the registry could not be put right: %s",
                    queue, text, extra={"event": "registry_not_repaired", "queue": queue},
                )  # fmt: skip


def repair_registry(backend: Backend, queue: str, served: Layout | None = None) -> Layouts:
    """The layouts of a queue. If its shards have others than the registry, as after a failover or from an older copy,
    the registry is written anew. ``served``: the layout that this process knows. A later one than all of these counts
    while shards of it exist, and one that a reshard is under way to when the shards say that it is over.

    Raises:
        UnknownQueueError, RedisUnavailable, RedisRefused
    """
    while True:
        layouts = find_queue(backend, queue).layouts
        said = layouts_of_shards(backend, queue, layouts)
        if served is not None and served.epoch > said.current.epoch and _counts_in(backend, queue, served):
            # Where the registry has a reshard that was over, the shards decide alone whether it still is.
            begin = said.current if said.next is not None and said.next.epoch >= served.epoch else served
            found = layouts_of_shards(backend, queue, Layouts(begin, None, said.facts))
            said = found if found.all[-1].epoch >= served.epoch else said
        if said == layouts:
            return layouts
        if set_layouts(backend, queue, layouts, said):
            log.warning(
                "queue %r: the registry said that it has %s, and its shards that it has %s: the registry was put right",
                queue, _shown(layouts), _shown(said), extra={"event": "registry_repaired", "queue": queue},
            )  # fmt: skip


def _counts_in(backend: Backend, queue: str, layout: Layout) -> list[int]:
    """The numbers of shards in the shards of this layout that exist: dropping a queue removes them all."""
    metas = read_metas(backend, layout.prefixes(backend.config.namespace, queue), "shards_count")
    return [untrusted.count(count) for (count,) in metas if count is not None]


def _shown(layouts: Layouts) -> str:
    counts = [f"{layout.shards_count} shards (epoch {layout.epoch})" for layout in layouts.all]
    return " and is being resharded to ".join(counts)


def layouts_of_shards(backend: Backend, queue: str, layouts: Layouts) -> Layouts:
    """The layouts by the shards: each has the number of shards of its layout, and a sealed one names the next layout.
    When all were moved, and all of the next layout are open, the reshard has ended; not so while some are not open, and
    jobs are still to come to them.
    """

    def read(layout: Layout, *fields: str) -> list[list[bytes | None]]:
        return read_metas(backend, layout.prefixes(backend.config.namespace, queue), *fields)

    current, following = _as_made(backend, queue, layouts.current), layouts.next
    if (earlier := _find_unmoved(backend, queue, current)) is not None:
        return Layouts(earlier, current, layouts.facts)
    while True:
        olds = read(current, "sealed", "moved")
        seals = Counter(sealed for sealed, _ in olds if sealed is not None)
        targets = {layout: number for text, number in seals.items() if (layout := _sealed_for(text)) is not None}
        target = max(
            (layout for layout in targets if layout.epoch > current.epoch),
            key=lambda layout: (layout.epoch, targets[layout]), default=None,
        )  # fmt: skip
        if target is None:
            if following is not None and following.epoch <= current.epoch:
                following = None
            return Layouts(current, following, layouts.facts)
        news = read(target, "shards_count", "fed", "sealed")
        is_over = all(moved for _, moved in olds) and all(count and not fed for count, fed, _ in news)
        is_known = (current, target) == (layouts.current, layouts.next)
        if not is_over or (is_known and not any(sealed for *_, sealed in news)):
            return Layouts(current, target, layouts.facts)
        current = target


def _find_unmoved(backend: Backend, queue: str, layout: Layout) -> Layout | None:
    """The layout before, if jobs of it are still to come to shards of this one that are not open; None: none are."""
    before = find_layout_before(backend, queue, layout) if _find_fed(backend, queue, layout) else None
    while before is not None:
        states = read_metas(backend, before.prefixes(backend.config.namespace, queue), "shards_count", "fed", "moved")
        if opened := [moved for count, fed, moved in states if count and not fed]:
            return None if all(opened) else before
        before = find_layout_before(backend, queue, before)  # that one was prepared, and its reshard lost
    return None


def _find_fed(backend: Backend, queue: str, layout: Layout) -> list[str]:
    """The prefixes of the shards of a layout that are not open."""
    prefixes = layout.prefixes(backend.config.namespace, queue)
    return [prefix for prefix, (fed,) in zip(prefixes, read_metas(backend, prefixes, "fed"), strict=True) if fed]


def open_shards(backend: Backend, queue: str, layout: Layout) -> None:
    """Opens shards of a layout of which Redis has lost that they were. Only where `layouts_of_shards` says that no jobs
    are still to come to them.
    """
    opens = [ShardScripts(prefix).open() for prefix in _find_fed(backend, queue, layout)]
    list(ask(backend.client, opens, COMMANDS_TOGETHER))


def _as_made(backend: Backend, queue: str, layout: Layout) -> Layout:
    """The layout with the number of shards in those that were ever pushed to, if they agree. Others may just have been
    leased by a node that believes the registry.
    """
    probed = Layout(max(layout.shards_count, _PROBED), layout.epoch).prefixes(backend.config.namespace, queue)
    metas = read_metas(backend, probed, "shards_count", "clock", "pushed")
    counts = {untrusted.count(count) for count, clock, pushed in metas if count and (clock or pushed)}
    count = counts.pop() if len(counts) == 1 else 0
    return Layout(count, layout.epoch) if 0 < count <= MAX_SHARDS else layout


def _sealed_for(text: bytes) -> Layout | None:
    """The layout that the seal of a shard names; None: it can't be read."""
    count, _, epoch = text.partition(b" ")
    layouts = Layouts.read({"shards_count": untrusted.count(count), "epoch": untrusted.count(epoch)})
    return None if layouts is None else layouts.current


def read_metas(backend: Backend, prefixes: Iterable[str], *fields: str) -> list[list[bytes | None]]:
    """These fields of ``meta`` of each shard."""
    calls = [Command(prefix, "HMGET", f"{prefix}meta", *fields) for prefix in prefixes]
    return list(ask(backend.client, calls, COMMANDS_TOGETHER))


def find_free_epoch(backend: Backend, queue: str, current: Layout, shards_count: int) -> int:
    """The next epoch without any shard: the registry may have lost a reshard that made some."""
    epoch = current.epoch + 1
    while _counts_in(backend, queue, Layout(max(shards_count, current.shards_count, _PROBED), epoch)):
        epoch += 1
    return epoch


def find_layout_before(backend: Backend, queue: str, current: Layout) -> Layout | None:
    """The layout before, by what is left of its shards; None: the queue was never resharded, or nothing is left. It is
    found without the registry, which may have lost it.
    """
    for epoch in range(current.epoch - 1, -1, -1):
        count = max(_counts_in(backend, queue, Layout(_PROBED, epoch)), default=0)
        if 0 < count <= MAX_SHARDS:
            return Layout(count, epoch)
    return None


def layout_call(backend: Backend, queue: str, before: Layouts, after: Layouts) -> Call[Any] | None:
    """Changes the layouts in the registry, or writes them again; None: it has neither of the two."""
    key = queues_key(backend.config.namespace)
    raw = backend.client.command("HGET", key, queue, key=key)
    info = entry_of(queue, raw)
    if info is None or info.layouts not in (before, after):
        return None
    entry = json.dumps({**after.shown(), "options": json.loads(raw).get("options", {})})
    return registry.set_layout(key, queue, raw, entry)


def set_layouts(backend: Backend, queue: str, before: Layouts, after: Layouts) -> bool:
    """Changes the layouts in the registry; False: it has others than ``before``."""
    while (call := layout_call(backend, queue, before, after)) is not None:
        if backend.client.call(call) == 1:
            announce(backend, queue, after)
            return True
        # Somebody else has changed its options just now, or its layouts.
    return False


def announce(backend: Backend, queue: str, layouts: Layouts) -> None:
    """Has all nodes read the registry."""
    backend.registrations.note_layouts(queue, layouts)
    # All nodes send a heartbeat on such a message, and read the registry with that.
    key = nodes_key(backend.config.namespace)
    with contextlib.suppress(RedisRefused):  # without channels they read it with their heartbeats
        backend.client.command("SPUBLISH", key, "reshard", key=key)
