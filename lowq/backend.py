"""What a queue's handle, its reports and its actions need of the application, and what it is told of figures."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from lowq.codec.types import PayloadType
from lowq.observe.callbacks import FLUSH_SECONDS
from lowq.observe.emit import QueueEvents
from lowq.push.batcher import GroupCommit
from lowq.registrations import Registrations
from lowq.settings import Config
from lowq.store import SOCKET_TIMEOUT, Client


@dataclass(frozen=True, slots=True)
class Reading:
    """What a source knows of a queue, or of its process, at a moment."""

    #: What has happened since the source began: name -> how often, or how many seconds.
    counters: Mapping[str, float] = field(default_factory=dict)
    #: How it is now: name -> value.
    gauges: Mapping[str, float] = field(default_factory=dict)


#: queue -> its reading; "" stands for the process. It waits for nobody, as it is called each second.
Source = Callable[[], Mapping[str, Reading]]


class Backend(Protocol):
    """What a queue's handle needs of the application."""

    config: Config
    #: The queues that were entered in the registry.
    registrations: Registrations

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

    def export_metrics(self, source: Source) -> Callable[[], None]:
        """Has the source's figures sent to Graphite and StatsD, if the settings say so; returns what ends that."""
        ...

    def events_of(self, queue: str) -> QueueEvents:
        """What emits the events of the queue."""
        ...

    def payload_type_of(self, queue: str) -> PayloadType | None:
        """How payloads of the queue are encoded, as far as it is known here; None: as the settings say."""
        ...

    def flush_events(self, timeout: float = FLUSH_SECONDS) -> bool:
        """Waits until the callbacks have had all events so far; False: not within so many seconds."""
        ...
