"""What a queue's handle, its reports and its actions need of the application."""

from typing import Any, Protocol

from lowq.settings import Config
from lowq.store import Client


class Backend(Protocol):
    """What a queue's handle needs of the application."""

    config: Config

    @property
    def client(self) -> Client:
        """The connections to use; after a fork or a close they may be others than before."""
        ...

    def register(self, name: str, shards_count: int, worker: Any = None) -> None:
        """Enters a queue in the registry before anything of it is written."""
        ...

    def forget_registered(self) -> None:
        """Enters queues anew when they are used next."""
        ...
