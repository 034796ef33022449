"""The layouts of a queue: in the registry, and as its shards tell them.

The registry is one key of one primary, which a failover may set back. What sealed and opened shards say holds for good:
so they decide where the two disagree, and no epoch is used twice.
"""

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from lowq.backend import Backend
from lowq.errors import LowqError, RedisRefused, RedisUnavailable, UnknownQueueError
from lowq.logs import describe, get_log
from lowq.operate.queues import entry_of, find_queue
from lowq.operate.walk import COMMANDS_TOGETHER, ask
from lowq.sharding import Layout, Layouts
from lowq.store import Call, Command, registry, untrusted
from lowq.store.keys import MAX_SHARDS, nodes_key, queues_key

log = get_log("lowq.reshard")

#: Shards of another layout that are looked at to find out whether it was ever made, and how many it has.
_PROBED = 64


class RegistryCheck:
    """Has the registry repaired where it says less of a queue than this process knows, or than the queue's shards said.
    Other threads than the caller's ask the shards: primaries may be away, and the caller has leases to keep.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        #: Queue -> whoever looks at its shards just now, or was the last to do so.
        self._threads: dict[str, threading.Thread] = {}
        #: Queue -> layouts of the registry that its shards bear out, and those that had been served.
        self._confirmed: dict[str, tuple[Layouts, Layouts | None]] = {}
        #: The last error that was told.
        self._told = ""

    def accepts(self, queue: str, found: Layouts, served: Layouts | None, doubted: Collection[int]) -> bool:
        """Whether the layouts that were ``found`` in the registry are to be followed, by a process that has ``served``
        others. Not earlier ones, nor another number of shards of the same epoch, unless the shards bear them out, as
        when the queue was dropped and made anew. ``doubted``: epochs of which shards have said that they are sealed, or
        were made for another number.
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
            thread = threading.Thread(target=self._look, args=(queue, served), name="lowq-registry", daemon=True)
            self._threads[queue] = thread
            thread.start()
        return not is_earlier

    def _look(self, queue: str, served: Layouts | None) -> None:
        try:
            layouts = repair_registry(self._backend, queue, None if served is None else served.current)
            self._confirmed[queue] = layouts, served
            if served is not None and layouts != served:
                announce(self._backend, queue, layouts)  # who has refused them meanwhile reads the registry again
        except (RedisUnavailable, UnknownQueueError):
            pass  # the next heartbeat asks again
        except LowqError as error:
            text = describe(error, str)
            if text != self._told:  # not with every heartbeat
                self._told = text
                log.warning(
                    "queue %r: the registry and the shards disagree, and the registry could not be put right: %s",
                    queue, text, extra={"event": "registry_not_repaired", "queue": queue},
                )  # fmt: skip


def repair_registry(backend: Backend, queue: str, served: Layout | None = None) -> Layouts:
    """The layouts of a queue. If its shards say others than the registry, as that has lost them in a failover or comes
    from an older copy, the registry is written anew. ``served``: the layout that this process knows; a later one than
    the registry's counts while shards of it are there.

    Raises:
        UnknownQueueError, RedisUnavailable, RedisRefused
    """
    while True:
        layouts = known = find_queue(backend, queue).layouts
        if served is not None and served.epoch > layouts.current.epoch and _is_there(backend, queue, served):
            known = Layouts(served)
        said = layouts_of_shards(backend, queue, known)
        if said == layouts:
            return layouts
        if set_layouts(backend, queue, layouts, said):
            log.warning(
                "queue %r: the registry said that it has %s, and its shards that it has %s: the registry was put right",
                queue, _shown(layouts), _shown(said), extra={"event": "registry_repaired", "queue": queue},
            )  # fmt: skip


def _is_there(backend: Backend, queue: str, layout: Layout) -> bool:
    """Whether Redis has shards of it: dropping a queue removes them all."""
    metas = _read_metas(backend, layout.prefixes(backend.config.namespace, queue), "shards_count")
    return any(count is not None for (count,) in metas)


def _shown(layouts: Layouts) -> str:
    counts = [f"{layout.shards_count} shards (epoch {layout.epoch})" for layout in layouts.all]
    return " and is being resharded to ".join(counts)


def layouts_of_shards(backend: Backend, queue: str, layouts: Layouts) -> Layouts:
    """The layouts as the shards tell them: each says for how many it was made, and a sealed one names the layout that
    its jobs belong to; when all of them were moved and all of that layout are open, it has ended.
    """

    def read(layout: Layout, *fields: str) -> list[list[bytes | None]]:
        return _read_metas(backend, layout.prefixes(backend.config.namespace, queue), *fields)

    current, following = _as_made(backend, queue, layouts.current), layouts.next
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


def _as_made(backend: Backend, queue: str, layout: Layout) -> Layout:
    """The layout with the number of shards for which those were made that something was ever pushed to, if all of them
    say the same. Others may just have been leased by who believes the registry.
    """
    probed = Layout(max(layout.shards_count, _PROBED), layout.epoch).prefixes(backend.config.namespace, queue)
    metas = _read_metas(backend, probed, "shards_count", "clock", "pushed")
    counts = {untrusted.count(count) for count, clock, pushed in metas if count and (clock or pushed)}
    count = counts.pop() if len(counts) == 1 else 0
    return Layout(count, layout.epoch) if 0 < count <= MAX_SHARDS else layout


def _sealed_for(text: bytes) -> Layout | None:
    """The layout that the seal of a shard names; None: it can't be read."""
    count, _, epoch = text.partition(b" ")
    layouts = Layouts.read({"shards_count": untrusted.count(count), "epoch": untrusted.count(epoch)})
    return None if layouts is None else layouts.current


def _read_metas(backend: Backend, prefixes: Sequence[str], *fields: str) -> list[list[bytes | None]]:
    calls = [Command(prefix, "HMGET", f"{prefix}meta", *fields) for prefix in prefixes]
    return list(ask(backend.client, calls, COMMANDS_TOGETHER))


def find_free_epoch(backend: Backend, queue: str, current: Layout, shards_count: int) -> int:
    """The next epoch that no shard is of: the registry may have lost a reshard that made some, and what these say of
    their jobs holds for good.
    """
    epoch = current.epoch + 1
    probed = max(shards_count, current.shards_count, _PROBED)
    while True:
        prefixes = Layout(probed, epoch).prefixes(backend.config.namespace, queue)
        if not any(count for (count,) in _read_metas(backend, prefixes, "shards_count")):
            return epoch
        epoch += 1


def find_layout_before(backend: Backend, queue: str, current: Layout) -> Layout | None:
    """The layout that a queue had before, as what is left of its shards says; None: it was never resharded, or nothing
    is left. The registry need not remember it, and one that it has lost is found, too.
    """
    for epoch in range(current.epoch - 1, -1, -1):
        prefixes = Layout(_PROBED, epoch).prefixes(backend.config.namespace, queue)
        counts = [untrusted.count(count) for (count,) in _read_metas(backend, prefixes, "shards_count") if count]
        count = max(counts, default=0)
        if 0 < count <= MAX_SHARDS:
            return Layout(count, epoch)
    return None


def layout_call(backend: Backend, queue: str, before: Layouts, after: Layouts) -> Call[Any] | None:
    """Changes the layouts in the registry, or writes them again; None: they are neither of the two."""
    key = queues_key(backend.config.namespace)
    raw = backend.client.command("HGET", key, queue, key=key)
    info = entry_of(queue, raw)
    if info is None or info.layouts not in (before, after):
        return None
    entry = json.dumps({**after.shown(), "options": json.loads(raw).get("options", {})})
    return registry.set_layout(key, queue, raw, entry)


def set_layouts(backend: Backend, queue: str, before: Layouts, after: Layouts) -> bool:
    """Changes the layouts in the registry; False: they are others than before."""
    while (call := layout_call(backend, queue, before, after)) is not None:
        if backend.client.call(call) == 1:
            announce(backend, queue, after)
            return True
        # Somebody else has changed its options just now, or its layouts.
    return False


def announce(backend: Backend, queue: str, layouts: Layouts) -> None:
    backend.registrations.note_layouts(queue, layouts)
    # As a node that has noticed something: all others look, and read the registry with that.
    key = nodes_key(backend.config.namespace)
    with contextlib.suppress(RedisRefused):  # without channels they read it with their heartbeats
        backend.client.command("SPUBLISH", key, "reshard", key=key)
