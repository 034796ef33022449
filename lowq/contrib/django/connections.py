"""Connections to databases around a batch, as around a request: those that are obsolete or broken are closed before and
after it.

A worker thread has connections of its own. The async workers of a process share one thread for what they call by
``sync_to_async``, and so its connections: one batch must not close a connection from which another still reads rows.
So as long as others run, only a connection that is broken is closed.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import connections, reset_queries


class CloseConnections:
    """The server middleware, of sync and async workers. Inside a transaction, as in a test, it leaves things alone."""

    def __init__(self) -> None:
        #: Async batches that run, each as an object of its own: to add and to discard one is atomic.
        self._running: set[object] = set()

    def __call__(self, worker: Any, batch: Any, call_next: Callable[[], object]) -> None:  # noqa: ARG002
        _close(is_alone=True)
        try:
            call_next()
        finally:
            _close(is_alone=True)

    async def acall(self, worker: Any, batch: Any, call_next: Callable[[], Awaitable[object]]) -> None:  # noqa: ARG002
        await sync_to_async(self._close_if_quiet)()
        this = object()
        self._running.add(this)
        try:
            await call_next()
        finally:
            self._running.discard(this)
            await sync_to_async(self._close_if_quiet)()

    def _close_if_quiet(self) -> None:
        _close(is_alone=not self._running)


def _close(*, is_alone: bool) -> None:
    for connection in connections.all(initialized_only=True):
        if connection.in_atomic_block:
            continue
        if is_alone:
            connection.close_if_unusable_or_obsolete()
        elif connection.errors_occurred and not connection.is_usable():
            connection.close()
    if settings.DEBUG and is_alone:  # or the statements of all batches pile up
        reset_queries()


#: Of all workers of the project.
close_connections = CloseConnections()
