"""A coroutine whose steps run in a context of its own, within the task that awaits it.

A task has one context for all that it performs: what a handler sets of context variables would be there for the next
batch. A task for each batch would cost more, and be another one for `asyncio.current_task`, timeouts and cancelling.
"""

from collections.abc import Coroutine, Generator
from contextvars import Context, copy_context
from typing import Any, TypeVar

T = TypeVar("T")


class OwnContext(Coroutine[Any, Any, T], Generator[Any, Any, T]):
    """The coroutine, to be awaited once. ``context``: a copy of the current one by default."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], context: Context | None = None) -> None:
        #: As of a coroutine that awaits it: who shows where a task waits goes by that.
        self.cr_await = coroutine
        self._run = (context or copy_context()).run

    def __await__(self) -> Generator[Any, Any, T]:
        return self

    def send(self, value: Any) -> Any:
        return self._run(self.cr_await.send, value)

    def throw(self, *error: Any) -> Any:
        return self._run(self.cr_await.throw, *error)

    def close(self) -> None:
        self._run(self.cr_await.close)
