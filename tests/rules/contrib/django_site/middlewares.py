"""What settings.LOWQ names by its path."""

from collections.abc import Callable
from typing import Any

#: The queues whose batches it has seen.
queues: list[str] = []


class _Seen:
    def __call__(self, worker: Any, batch: Any, call_next: Callable[[], object]) -> None:
        queues.append(worker.queue_name)
        call_next()

    async def acall(self, worker: Any, batch: Any, call_next: Any) -> None:
        queues.append(worker.queue_name)
        await call_next()


seen = _Seen()
