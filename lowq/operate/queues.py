"""The queues in the registry: their entries, and where their jobs are."""

from difflib import get_close_matches

from lowq.backend import Backend
from lowq.errors import ConfigError, UnknownQueueError
from lowq.operate.job_filter import JobFilter
from lowq.registrations import QueueInfo, queue_info
from lowq.schedules import is_internal
from lowq.sharding import READ_AGAIN, Layout, Layouts
from lowq.store import Client, Command, untrusted
from lowq.store.keys import queues_key


def queues(backend: Backend) -> list[QueueInfo]:
    """All queues that were ever used and not dropped, by name. Entries that can't be read are left out, and so are the
    internal queues in which schedules wait.

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
    """The registry of queues, by name, and what the entries say that can't be read.

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
    """The shards of a queue: where its jobs are, as the registry says. Safe for threads."""

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
        """Its layout, and while a reshard is under way the one that its jobs are being moved to; as the registry has
        said in the last second.

        Raises:
            UnknownQueueError: the number of shards was not given, and nobody has used the queue yet.
        """
        routes = self.backend.registrations.routes_of(self.name)
        return routes.layouts if routes is not None and routes.age < READ_AGAIN else self.read_layouts()

    @property
    def presumed_layouts(self) -> Layouts:
        """For callers that ask the registry along with the shards; see `are_confirmed`."""
        routes = self.backend.registrations.routes_of(self.name)
        if routes is not None:
            return routes.layouts
        return self.layouts if self._given_count is None else Layouts.plain(self._given_count)

    def are_confirmed(self, presumed: Layouts, entry: QueueInfo | None) -> bool:
        """Whether the registry has these layouts. If not, a reshard has begun or ended: the new layouts are noted, and
        the caller asks again.
        """
        if entry is None or entry.layouts == presumed:
            return True
        self.backend.registrations.note_layouts(self.name, entry.layouts)
        return False

    def read_layouts(self) -> Layouts:
        """As the registry says now."""
        if self._given_count is None:
            layouts = find_queue(self.backend, self.name).layouts
        else:
            entry = find_entry(self.client, self.namespace, self.name, self.backend.config.push_timeout)
            layouts = Layouts.plain(self._given_count) if entry is None else entry.layouts
        return self.backend.registrations.note_layouts(self.name, layouts).layouts

    @property
    def declared_count(self) -> int:
        """How many shards the code says that the queue has; without such code the registry."""
        return self.layouts.current.shards_count if self._given_count is None else self._given_count

    def read_entry(self) -> QueueInfo | None:
        """Its entry in the registry.

        Raises:
            RedisUnavailable
        """
        return find_entry(self.client, self.namespace, self.name)

    @property
    def prefixes(self) -> list[str]:
        """Those of the layout that its jobs are being moved to come last."""
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
        """The shards that may have jobs of an id: while a reshard is under way two, first the one that it leaves."""
        return [self.prefix(layout, layout.shard_of(job_id)) for layout in (layouts or self.layouts).all]
