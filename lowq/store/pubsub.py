"""Channels and their messages, by sharded pub/sub: on a cluster a message goes to the primary and the replicas of its
channel's slot, and not to all servers. On a server that is in no cluster it is the same as any other pub/sub.

::

    wanted ---- is its primary known, and connected? --- no ---> a thread asks the nodes, or connects, and ends
       ^                         |                                              |
       |                        yes: SSUBSCRIBE                                 |
       |                         v                                              |
       +--- its slot moved, the connection broke, an error ---- subscribed <----+

There is one connection to each primary that has some of the channels. Only the thread that reads touches them, and it
never waits for a single primary: one that hangs delays no message of another. Messages may be missed while a channel
has no connection. Every confirmation is an event, upon which the reader looks for itself.
"""

import random
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from redis import exceptions

from lowq.errors import LowqError
from lowq.store.connection import (
    READ_SIZE,
    TcpConnection,
    encode,
    fits_loop,
    pack,
    reader_of,
    speaks_resp3,
    start_thread,
)
from lowq.store.keys import slot_of
from lowq.store.pool import Pool
from lowq.store.topology import Topology

#: Seconds of silence after which a connection is asked whether it still lives, and of further silence after which it
#: is taken for dead: one that was cut without a word looks like one on which nothing happens.
SILENCE, GRACE = 10.0, 5.0
#: The names of events: as of any pub/sub.
KINDS = {"ssubscribe": "subscribe", "sunsubscribe": "unsubscribe", "smessage": "message"}
#: Seconds, and as many again at random at most, before the next attempt after one has failed.
PAUSE = 0.1
#: Seconds after which is looked, without asking anybody, whether a primary that is silent has been replaced.
LOOK_AGAIN = 1.0
#: The same for changes of the channels, where there is no socket to wait for: the embedded store.
LOOK_AT_CHANGES = 0.05
#: Events that are read before the first of them is handled, where redis-py reads.
MOST_EVENTS = 1000
#: Windows has no other.
_Selector: Any = getattr(selectors, "PollSelector", selectors.SelectSelector)

#: Its kind, channel and data.
Event = tuple[str, str, bytes]


class _Link:
    """The connection to a primary. Belongs to the thread that reads."""

    def __init__(self, pool: Pool, connection: Any) -> None:
        self.pool = pool
        self.connection = connection
        #: Reads the next event. Of RESP3, redis-py hands a push to its own callback unless it is told that one is read.
        self._read: Callable[[], Any] = (
            partial(connection.read_response, push_request=True)
            if speaks_resp3(connection)
            else connection.read_response
        )
        #: None: the embedded store has none.
        self.socket: Any = getattr(connection, "_sock", None)  # redis-py has no public way to it
        if not isinstance(self.socket, socket.socket):
            self.socket = None
        #: Parses what the socket has. None: redis-py reads, and asks the system five times for each event.
        self._reader: Any = None
        if fits_loop(connection):
            self._reader = reader_of(connection)
            self.socket.settimeout(0)
        elif isinstance(connection, TcpConnection):
            connection._reader = None  # TLS: `can_read` knows nothing of what that has read
        self.channels: set[str] = set()
        #: The channels of each command that is not answered yet, and whether it was to subscribe to them.
        self.pending: deque[tuple[bool, set[str]]] = deque()
        self.made = self.heard = time.monotonic()
        self.asked = False

    def replies(self) -> Iterator[Any]:
        """What has come, error replies as exceptions. It does not wait.

        Raises:
            redis-py's errors, OSError: the connection broke.
        """
        if self._reader is None:
            for _ in range(MOST_EVENTS):
                if not self.connection.can_read(0):
                    return
                try:
                    yield self._read()
                except exceptions.ResponseError as error:
                    yield error
            return
        try:
            data = self.socket.recv(READ_SIZE)
        except BlockingIOError:
            return
        if not data:
            raise exceptions.ConnectionError("Connection closed by server.")
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not False:  # there is none yet
            yield reply

    def send(self, command: bytes, channels: Iterable[str]) -> None:
        """One command for each slot: the server takes no more at once."""
        by_slot: dict[int, set[str]] = {}
        for name in channels:
            by_slot.setdefault(slot_of(name), set()).add(name)
        self.pending.extend((command == b"SSUBSCRIBE", group) for group in by_slot.values())
        self._write(b"".join([pack((command, *encode(group))) for group in by_slot.values()]))

    def _write(self, packed: bytes) -> None:
        if self._reader is not None:
            self.socket.settimeout(self.connection.socket_timeout)
        self.connection.send_packed_command([packed], check_health=False)
        if self._reader is not None:
            self.socket.settimeout(0)

    def answered(self, channel: str) -> None:
        if self.pending:
            self.pending[0][1].discard(channel)
            if not self.pending[0][1]:
                self.pending.popleft()

    def check(self) -> None:
        """Asks a connection that has been silent for ``SILENCE`` whether it still lives."""
        if not self.asked:
            self.asked = True
            self._write(pack((b"PING",)))
        elif time.monotonic() - self.heard > SILENCE + GRACE:
            raise exceptions.ConnectionError("no answer on the connection for wake-ups")


class Subscription:
    """Channels and their messages. One thread reads; any thread, and any signal handler, may change the channels."""

    def __init__(self, topology: Topology, fail: Callable[[Exception], Exception]) -> None:
        """``fail``: redis-py's error as one of ours."""
        self._topology = topology
        self._fail = fail
        #: Changes to be made: whether these channels are wanted.
        self._changes: deque[tuple[bool, list[str]]] = deque()
        self._closed = threading.Event()
        #: Held by the thread that reads, and for good once the connections are closed.
        self._reading = threading.Lock()
        #: A byte in it wakes the thread that reads.
        self._waker, self._woken = socket.socketpair()
        # Also those of a subscription that was not closed.
        weakref.finalize(self, _close_sockets, self._waker, self._woken).atexit = False
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        #: The results of threads: a pool and a connection of it, or why there is none. Without a pool: the nodes were
        #: asked.
        self._done: deque[tuple[Pool | None, Any, Exception | None]] = deque()
        # Of the thread that reads, from here on. Channels, and those of them that no connection has.
        self._channels: set[str] = set()
        self._homeless: set[str] = set()
        self._links: dict[Pool, _Link] = {}
        self._connecting: set[Pool] = set()
        self._is_asking = False
        self._is_outdated = False
        #: When the next attempt may be made, and when the nodes may be asked again, monotonic.
        self._attempt_at = self._ask_at = -float("inf")
        self._moved_at = -float("inf")
        self._events: deque[Event] = deque()
        self._error: Exception | None = None

    def add(self, channels: Iterable[str]) -> None:
        """Subscribes; each channel is confirmed by an event ``subscribe``, anew after every reconnection and whenever
        its slot has moved.
        """
        self._changes.append((True, list(channels)))
        self._wake()

    def remove(self, channels: Iterable[str]) -> None:
        """Unsubscribes."""
        self._changes.append((False, list(channels)))
        self._wake()

    def get(self, timeout: float) -> Event | None:
        """The next event, ``(kind, channel, data)``, or None after ``timeout`` seconds. Connects when needed.

        Raises:
            RedisUnavailable: there is no connection at all. RedisRefused. The next call tries again.
        """
        if not self._reading.acquire(blocking=False):
            return None  # it was closed
        try:
            until = time.monotonic() + timeout
            while not self._closed.is_set():
                if self._events:
                    return self._events.popleft()
                if self._changes or self._done or self._homeless or self._topology.only_pool is None:
                    self._settle()
                for link in list(self._links.values()):
                    self._read(link)
                if self._events:
                    continue
                error, self._error = self._error, None
                # While one primary is away, other calls to it report that.
                if error is not None and (not self._links or isinstance(error, exceptions.ResponseError)):
                    raise self._fail(error) from error
                if (left := until - time.monotonic()) <= 0:
                    break
                # A thread that connects may hang, while other calls have found another primary.
                seconds, links = min(left, PAUSE if self._homeless else LOOK_AGAIN), list(self._links.values())
                if links and links[0].socket is None:
                    links[0].connection.can_read(min(seconds, LOOK_AT_CHANGES))
                    continue
                with _Selector() as selector:
                    for readable in (self._woken, *[link.socket for link in links]):
                        selector.register(readable, selectors.EVENT_READ)
                    if any(key.fileobj is self._woken for key, _ in selector.select(seconds)):
                        self._woken.recv(4096)
            return None
        finally:
            self._reading.release()
            if self._closed.is_set():
                self._close()

    # --- reading ---

    def _read(self, link: _Link) -> None:
        try:
            for reply in link.replies():
                link.heard, link.asked = time.monotonic(), False
                if isinstance(reply, exceptions.ResponseError):
                    self._refused(link, reply)
                    continue
                if isinstance(reply, Exception):
                    raise reply
                if not isinstance(reply, list) or len(reply) != 3:
                    continue  # the answer to a PING
                name, channel, data = reply[0].decode(), reply[1].decode(), reply[2]
                if name != "smessage":
                    self._confirmed(link, name, channel)
                self._events.append((KINDS.get(name, name), channel, data if isinstance(data, bytes) else b""))
            if time.monotonic() - link.heard > SILENCE:
                link.check()
        except (exceptions.RedisError, OSError):
            self._lose(link)

    def _confirmed(self, link: _Link, kind: str, channel: str) -> None:
        """Notes that a channel is subscribed to, or is no more."""
        if kind == "ssubscribe":
            link.answered(channel)
        elif kind == "sunsubscribe":
            if link.pending and not link.pending[0][0] and channel in link.pending[0][1]:
                link.answered(channel)
            elif channel in link.channels:  # unasked: its slot has moved
                self._is_outdated = True
                link.channels.discard(channel)
                self._look_for([channel])

    def _refused(self, link: _Link, error: Exception) -> None:
        """A command ended with an error."""
        is_to_subscribe, channels = link.pending.popleft() if link.pending else (False, set[str]())
        link.channels -= channels
        if not is_to_subscribe:
            return
        self._look_for(channels)
        now = time.monotonic()
        if isinstance(error, exceptions.MovedError):
            self._is_outdated = True
            if now - self._moved_at > 1.0:  # else the nodes do not agree yet
                self._moved_at = now
                return
        elif not isinstance(error, exceptions.ClusterDownError):
            self._error = error
        self._attempt_at = now + _pause()

    def _lose(self, link: _Link) -> None:
        self._links.pop(link.pool, None)
        link.connection.disconnect()
        self._look_for(link.channels)
        if time.monotonic() - link.made < 1.0:
            self._attempt_at = time.monotonic() + _pause()

    def _look_for(self, channels: Iterable[str]) -> None:
        self._homeless |= self._channels.intersection(channels)

    # --- connections ---

    def _settle(self) -> None:
        """Brings the subscriptions closer to the wanted ones."""
        while self._done:
            self._take_done(*self._done.popleft())
        while self._changes:
            self._change(*self._changes.popleft())
        self._leave_replaced()
        if self._homeless and time.monotonic() >= self._attempt_at:
            self._find()

    def _change(self, wanted: bool, channels: list[str]) -> None:
        if wanted:
            added = set(channels) - self._channels
            self._channels |= added
            self._homeless |= added
            return
        self._channels.difference_update(channels)
        self._homeless.difference_update(channels)
        for link in list(self._links.values()):
            names = link.channels.intersection(channels)
            link.channels -= names
            self._send(link, b"SUNSUBSCRIBE", names)

    def _leave_replaced(self) -> None:
        """A primary whose slots have become another one's may be frozen, and say nothing of it."""
        for link in list(self._links.values()):
            if link.channels and self._topology.known_pool(next(iter(link.channels))) not in (link.pool, None):
                moved = {name for name in link.channels if self._topology.known_pool(name) is not link.pool}
                link.channels -= moved
                self._look_for(moved)
                if not link.channels:
                    self._lose(link)

    def _find(self) -> None:
        by_pool: dict[Pool, set[str]] = {}
        unknown = ""
        for name in self._homeless:
            pool = self._topology.known_pool(name)
            if pool is None:
                unknown = name
            else:
                by_pool.setdefault(pool, set()).add(name)
        if self._is_outdated or unknown:
            self._ask(unknown or min(self._homeless))
        if self._is_outdated:
            return
        for pool, names in by_pool.items():
            link = self._links.get(pool)
            if link is not None:
                self._homeless -= names
                link.channels |= names
                self._send(link, b"SSUBSCRIBE", names)
            elif pool not in self._connecting:
                self._connecting.add(pool)
                self._in_thread(pool, partial(_connect, pool))

    def _send(self, link: _Link, command: bytes, channels: set[str]) -> None:
        if channels:
            try:
                link.send(command, channels)
            except (exceptions.RedisError, OSError):
                self._lose(link)

    def _in_thread(self, pool: Pool | None, work: Callable[[], Any]) -> None:
        """Does blocking work in a thread of its own. ``pool``: the one that it connects to."""

        def run() -> None:
            result, failure = None, None
            try:
                result = work()
            except (exceptions.RedisError, LowqError, OSError) as error:
                failure = error
            self._done.append((pool, result if pool is not None else None, failure))
            if self._closed.is_set():
                self._forget_done()
            self._wake()

        if start_thread(run, "lowq-subscriber") is None:
            self._done.append((pool, None, exceptions.ConnectionError("the interpreter ends")))

    def _take_done(self, pool: Pool | None, connection: Any, error: Exception | None) -> None:
        now = time.monotonic()
        if error is not None:
            self._error = error
            self._attempt_at = now + _pause()
        if pool is None:
            self._is_asking, self._ask_at = False, now + _pause()
            self._is_outdated = self._is_outdated and error is not None
            return
        self._connecting.discard(pool)
        if error is None:
            self._links[pool] = _Link(pool, connection)
        elif names := [name for name in self._homeless if self._topology.known_pool(name) is pool]:
            self._topology.failed(pool, error, None)
            if self._topology.is_partial:  # another primary may have the slots
                self._ask(names[0])

    def _ask(self, name: str) -> None:
        """Starts a thread that finds out which primary has a channel."""
        if not self._is_asking and time.monotonic() >= self._ask_at:
            self._is_asking = True
            ask = self._topology.find_again if self._is_outdated else self._topology.pool_for
            self._in_thread(None, lambda: ask(name))

    # --- the end ---

    def _wake(self) -> None:
        try:
            self._waker.send(b"\0")
        except OSError:
            pass  # there is something in it, or it was closed

    def close(self) -> None:
        """Closes all connections, for good."""
        self._closed.set()
        self._wake()
        self._close()

    def _close(self) -> None:
        """Closes the connections, unless a thread reads, which does it when it ends."""
        if self._reading.acquire(blocking=False):
            for link in self._links.values():
                link.connection.disconnect()
            self._links.clear()
            self._forget_done()
            _close_sockets(self._waker, self._woken)

    def _forget_done(self) -> None:
        while self._done:
            try:
                _, connection, _ = self._done.popleft()
            except IndexError:
                return  # another thread does the same
            if connection is not None:
                connection.disconnect()


def _close_sockets(*sockets: socket.socket) -> None:
    for each in sockets:
        each.close()


def _connect(pool: Pool) -> Any:
    connection = pool.connect()
    connection.connect()
    return connection


def _pause() -> float:
    return PAUSE * (1 + random.random())
