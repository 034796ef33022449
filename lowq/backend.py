"""What a queue's handle, its reports and its actions need of the application."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from lowq.group_commit import GroupCommit
from lowq.job_events import FLUSH_SECONDS, QueueEvents
from lowq.queue_options import QueueOptions
from lowq.reading import Source
from lowq.settings import Config
from lowq.store import SOCKET_TIMEOUT, Call, Client


class Backend(Protocol):
    """What a queue's handle needs of the application."""

    config: Config

    @property
    def client(self) -> Client:
        """The connections to use; after a fork or a close they may be others than before."""
        ...

    @property
    def group(self) -> GroupCommit:
        """The pushes on these connections."""
        ...

    def connect(self, size: int, *, socket_timeout: float = SOCKET_TIMEOUT) -> Client:
        """A client of its own for up to ``size`` threads."""
        ...

    def group_for(self, name: str, shards_count: int) -> GroupCommit | None:
        """The same without asking Redis for anything: None when the queue is yet to be registered."""
        ...

    def register(
        self,
        name: str,
        shards_count: int,
        worker: Any = None,
        declared: Mapping[str, Any] | None = None,
        *,
        anew: bool = False,
    ) -> QueueOptions:
        """Enters a queue in the registry before anything of it is written; returns its options."""
        ...

    def registration(self, name: str, shards_count: int, worker: Any = None) -> Call:
        """The call that enters a queue in the registry."""
        ...

    def forget_registered(self) -> None:
        """Enters queues anew when they are used next."""
        ...

    def export_metrics(self, source: Source) -> Callable[[], None]:
        """Has the source's figures sent to Graphite and StatsD, if the settings say so; returns what ends that."""
        ...

    def events_of(self, queue: str) -> QueueEvents | None:
        """Where events of the queue's jobs are emitted; None: nobody listens."""
        ...

    def flush_events(self, timeout: float = FLUSH_SECONDS) -> bool:
        """Waits until the callbacks have had all events so far; False: not within so many seconds."""
        ...
