"""Channels and their messages, by sharded pub/sub: on a cluster a message goes to the primary and the replicas of its
channel's slot, and not to all servers. On a server that is in no cluster it is the same as any other pub/sub.
"""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from redis import exceptions

from lowq.errors import RedisUnavailable
from lowq.store.pool import Pool, encode, pack
from lowq.store.replies import read_event

#: Seconds of silence after which the connection is asked whether it still lives.
SILENCE = 10.0
#: What events are called here: as of any pub/sub.
KINDS = {"ssubscribe": "subscribe", "sunsubscribe": "unsubscribe", "smessage": "message"}

#: Its kind, channel and data.
Event = tuple[str, str, bytes]


class Subscription(Protocol):
    """Channels and their messages. One thread reads; any thread may change the channels."""

    def add(self, channels: Iterable[str]) -> None:
        """Subscribes; each channel is confirmed by an event ``subscribe``, anew after every reconnection."""

    def remove(self, channels: Iterable[str]) -> None:
        """Unsubscribes."""

    def get(self, timeout: float) -> Event | None:
        """The next event, ``(kind, channel, data)``, or None after ``timeout`` seconds. Connects when needed.

        Raises:
            RedisUnavailable, RedisRefused: the connection is gone; the next call connects anew.
        """

    def close(self) -> None:
        """Closes what is connected."""


def is_dead(heard: float, *, asked: bool) -> bool:
    """Whether a connection was silent since that monotonic time, though it was asked for a sign of life."""
    return asked and time.monotonic() - heard > SILENCE + 5.0


class ServerSubscription:
    """A `Subscription` over one connection, where there is one server."""

    def __init__(self, any_pool: Callable[[], Pool], fail: Callable[[Exception], Exception]) -> None:
        self._any_pool = any_pool
        self._fail = fail
        #: Reentrant: a push that waits for room subscribes, also one in a signal handler that meets another.
        self._lock = threading.RLock()
        self._connection: Any = None
        self._channels: set[str] = set()
        # For the reading thread: when something was heard last (monotonic), and whether a PING is out.
        self._heard = 0.0
        self._asked = False

    def add(self, channels: Iterable[str]) -> None:
        self._change(b"SSUBSCRIBE", [name for name in channels if name not in self._channels])

    def remove(self, channels: Iterable[str]) -> None:
        self._change(b"SUNSUBSCRIBE", [name for name in channels if name in self._channels])

    def _change(self, command: bytes, channels: list[str]) -> None:
        if not channels:
            return
        with self._lock:
            if command == b"SSUBSCRIBE":
                self._channels.update(channels)
            else:
                self._channels.difference_update(channels)
            if self._connection is not None:
                try:
                    self._connection.send_packed_command([pack((command, *encode(channels)))], check_health=False)
                except (exceptions.RedisError, OSError, AttributeError):
                    # redis-py has closed it, perhaps just now in the reading thread, and would connect it anew by
                    # itself, without a subscription. The reading thread opens another one, with all channels.
                    self._connection = None

    def get(self, timeout: float) -> Event | None:
        try:
            connection = self._connection or self._open()
            event = read_event(connection) if connection.can_read(timeout) else None
            if self._connection is not connection:  # given up by another thread meanwhile
                connection.disconnect()
                return None
            if event is None:
                self._check(connection)
                return None
            self._heard = time.monotonic()
            self._asked = False
        except (exceptions.RedisError, RedisUnavailable) as error:
            self.close()
            raise self._fail(error) from error
        except (OSError, TypeError, ValueError, AttributeError) as error:
            # The last three: another thread has closed the connection in the middle of this one's reading.
            self.close()
            raise self._fail(exceptions.ConnectionError(str(error))) from error
        if not isinstance(event, list) or len(event) != 3:
            return None  # the answer to a PING
        kind, channel, data = event
        name = kind.decode()
        return KINDS.get(name, name), channel.decode(), data if isinstance(data, bytes) else b""

    def _check(self, connection: Any) -> None:
        # A connection that was cut without a word looks like one on which nothing happens.
        if is_dead(self._heard, asked=self._asked):
            raise exceptions.ConnectionError("no answer on the connection for wake-ups")
        if time.monotonic() - self._heard > SILENCE and not self._asked:
            self._asked = True
            with self._lock:
                connection.send_packed_command([pack((b"PING",))], check_health=False)

    def _open(self) -> Any:
        connection = self._any_pool().connect()
        connection.connect()
        self._heard, self._asked = time.monotonic(), False
        with self._lock:
            self._connection = connection
            if self._channels:
                connection.send_packed_command([pack((b"SSUBSCRIBE", *encode(self._channels)))], check_health=False)
        return connection

    def close(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()
