"""The primary that sentinels name, and the connections to it."""

import random
import socket
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from redis import exceptions

#: Seconds between two times that the sentinels are asked, at most; and at most as long as none answers.
ASK_PAUSES = (1.0, 8.0)


class FollowedPrimary:
    """All connections of this process to the primary of a service. They end when another server becomes the primary.

    A primary that only its clients reach knows nothing of that: it goes on to answer, and all that it is told is lost
    when it becomes a replica. So the sentinels are asked once in a while also when all is well. Safe for threads.
    """

    def __init__(self, discover: Callable[[], tuple[str, int]], clock: Callable[[], float] = time.monotonic) -> None:
        self._discover = discover
        self._clock = clock
        self._address: tuple[str, int] | None = None
        self._ask_at = -float("inf")
        self._pause = ASK_PAUSES[0]
        self._connections: WeakSet[Any] = WeakSet()

    def followed(self, connection: Any) -> Any:
        """The connection, which is to end with the primary."""
        self._connections.add(connection)
        return connection

    @property
    def is_due(self) -> bool:
        """Whether it is time to ask the sentinels."""
        return self._clock() >= self._ask_at

    def follow(self) -> None:
        """Asks the sentinels when it is time. Connections to a server that is the primary no more break, as if it had
        died: calls without an answer are repeated on others.
        """
        now = self._clock()
        if now < self._ask_at:
            return
        self._ask_at = now + self._pause * random.uniform(0.5, 1.0)  # before: others need not ask, too
        try:
            address = self._discover()
        except exceptions.RedisError:  # none of them answers, or they know of no primary just now
            self._pause = min(2 * self._pause, ASK_PAUSES[1])
            return
        self._pause = ASK_PAUSES[0]
        before, self._address = self._address, address
        if before is not None and before != address:
            for connection in list(self._connections):
                # What was connected to the new one already, after the sentinels had changed their word, may break, too.
                _break(connection)


def _break(connection: Any) -> None:
    plain = getattr(connection, "_sock", None)  # redis-py has no public way to it
    if isinstance(plain, socket.socket):
        try:
            # Not that of a TLS socket, which only the thread that uses it may call.
            socket.socket.shutdown(plain, socket.SHUT_RDWR)
        except OSError:
            pass  # it was closed
