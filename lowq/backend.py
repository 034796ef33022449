"""The part of an application that handles of queues, consumers and nodes use: settings, connections, registrations, and
where events and figures go.
"""

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from lowq.clock import Lock
from lowq.codec.types import PayloadType
from lowq.observe.callbacks import FLUSH_SECONDS, Callbacks
from lowq.observe.events import Observer, QueueEvents
from lowq.observe.graphite_statsd import MetricsExporter, Source
from lowq.push.batcher import GroupCommit
from lowq.registrations import Registrations
from lowq.schedules import is_internal
from lowq.settings import Config
from lowq.sharding import Layouts
from lowq.store import SOCKET_TIMEOUT, Client, memory_store, new_store
from lowq.store.translate import without_password


class Backend:
    """Connects when first needed. Safe for threads. A child of a fork makes connections of its own.

    ``accepts``: see `RegistryCheck.accepts`.
    """

    def __init__(
        self, config: Config, accepts: Callable[[str, Layouts, Layouts | None, Collection[int]], bool]
    ) -> None:
        self.config = config
        self._accepts = accepts
        #: queue name -> worker.
        self.workers: dict[str, Any] = {}
        self._client: Client | None = None
        self._group: GroupCommit | None = None
        #: The embedded store; None: there is a server, or nothing has connected yet.
        self._store: Any = None
        self._new_client: Callable[..., Client] = Client
        #: The queues that this process has entered in the registry: others in each embedded store.
        self.registrations = self._new_registrations()
        self._exporter = MetricsExporter(config)
        self._callbacks = Callbacks()
        #: Observers of pushes and batches: `lowq.contrib` adds them, at any time.
        self.observers: list[Observer] = []
        self._lock = Lock()
        #: The same application with clients of their own; see `Lowq.with_own_pool`.
        self._with_own_pools: weakref.WeakSet[Backend] = weakref.WeakSet()

    def _new_registrations(self) -> Registrations:
        return Registrations(self.config, lambda: self.client, self._accepts)

    # --- connections ---

    @property
    def client(self) -> Client:
        """The connections of producers; after a fork or a close they are others. Made when first asked for, which
        freezes the settings.
        """
        client = self._client
        if client is None:
            with self._lock:
                if self._client is None:
                    self._client = self.connect(self.config.client_pool_size)
                client = self._client
        return client

    @property
    def group(self) -> GroupCommit:
        """The pushes on these connections: those that meet leave together."""
        client, group = self.client, self._group
        if group is None or group.client is not client:
            with self._lock:
                group = self._group
                if group is None or group.client is not client:
                    group = self._group = GroupCommit(client, self.config.push_timeout)
        return group

    def connect(self, size: int, *, socket_timeout: float = SOCKET_TIMEOUT) -> Client:
        """A client of its own for up to ``size`` threads, on the same server or store."""
        with self._lock:
            url = self.config.redis_url
            if self._store is None:
                self.config.freeze()
                if url.startswith("memory://"):
                    self._store = memory_store(url)
            elif not url.startswith("memory://"):
                url = "memory://"
        return self._new_client(
            url, size=size, timeout=self.config.pool_timeout, socket_timeout=socket_timeout, store=self._store
        )

    @property
    def store_name(self) -> str:
        """Where the jobs are, for people: the URL without its password."""
        url = self.config.redis_url
        if self._store is not None and not url.startswith("memory://"):
            return "a store in its own process"
        return without_password(url)

    @contextmanager
    def embedded(self, store: Any = None, new_client: Callable[..., Client] | None = None) -> Iterator[None]:
        """Uses an embedded store for the time of the block; an empty one by default. ``new_client`` makes the clients
        of it, with the arguments of `Client`.
        """
        with self._lock:
            before = self._client, self._group, self._store, self._new_client, self.registrations
            self._use(None, None, store or new_store(), new_client or self._new_client, self._new_registrations())
        try:
            yield
        finally:
            with self._lock:
                self.close()
                self._use(*before)

    def _use(
        self, client: Client | None, group: GroupCommit | None, store: Any, new_client: Callable[..., Client],
        registrations: Registrations,
    ) -> None:  # fmt: skip
        self._client, self._group, self._store, self._new_client = client, group, store, new_client
        self.registrations = registrations
        for other in list(self._with_own_pools):
            other.registrations = other._new_registrations()

    def close(self) -> None:
        """Closes the connections of producers that are not in use; the next call makes new ones. Waits a moment for
        callbacks that have not had all events yet.
        """
        self.flush_events()
        self._exporter.close()
        self._close_connections()
        with self._lock:
            others = list(self._with_own_pools)
        for other in others:
            other.close()

    def _close_connections(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._group is not None:
            self._group.close()

    # --- events and figures ---

    def events_of(self, queue: str) -> QueueEvents:
        """The emitter of the queue's events."""
        if is_internal(queue):
            return QueueEvents(queue)
        worker = self.workers.get(queue)
        callbacks = self._callbacks.of(queue, self.config.on_job_event, None if worker is None else worker.on_event)
        return QueueEvents(queue, self.observers, callbacks)

    def flush_events(self, timeout: float = FLUSH_SECONDS) -> bool:
        """Waits until the callbacks have had all events so far; False: not within so many seconds."""
        return self._callbacks.flush(timeout)

    def export_metrics(self, source: Source) -> Callable[[], None]:
        """Sends the source's figures to Graphite and StatsD, if the settings say so. Returns a function that ends
        it."""
        return self._exporter.add(source)

    def payload_type_of(self, queue: str) -> PayloadType | None:
        """How payloads of the queue are encoded; None: as the settings say, also when its worker is not known here."""
        worker = self.workers.get(queue)
        found: PayloadType | None = getattr(worker, "_payload_type", None)
        return found
