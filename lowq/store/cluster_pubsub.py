"""Channels and their messages on a cluster: one connection to each primary that has some of them.

::

    wanted ---- is its primary known, and connected? --- no ---> a thread asks the nodes, or connects, and ends
       ^                         |                                              |
       |                        yes: SSUBSCRIBE                                 |
       |                         v                                              |
       +--- its slot moved, the connection broke, an error ---- subscribed <----+

Only the thread that reads touches connections that are open, and it never waits for a single primary: one that hangs
delays no message of another. What may have been missed while a channel had no connection is made up for by whoever
reads: every confirmation is an event.
"""

import random
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from redis import exceptions

from lowq.errors import LowqError
from lowq.store.pool import encode, pack
from lowq.store.pubsub import KINDS, SILENCE, Event, is_dead
from lowq.store.replies import read_event
from lowq.store.tags import slot_of_key

#: Seconds, and as many again at random at most, before the next attempt after one has failed.
PAUSE = 0.1
#: Seconds after which is looked, without asking anybody, whether a primary that is silent has been replaced.
LOOK_AGAIN = 1.0
#: Windows has no other.
_Selector: Any = getattr(selectors, "PollSelector", selectors.SelectSelector)

Address = tuple[str, int]


class _Link:
    """The connection to a primary. Belongs to the thread that reads."""

    def __init__(self, address: Address, connection: Any) -> None:
        self.address = address
        self.connection = connection
        self.socket: socket.socket = connection._sock  # redis-py has no public way to it
        self.channels: set[str] = set()
        #: The channels of each command that is not answered yet, and whether it was to subscribe to them.
        self.pending: deque[tuple[bool, set[str]]] = deque()
        self.made = self.heard = time.monotonic()
        self.asked = False

    def send(self, command: bytes, channels: Iterable[str]) -> None:
        """One command for each slot: the server takes no more at once."""
        by_slot: dict[int, set[str]] = {}
        for name in channels:
            by_slot.setdefault(slot_of_key(name), set()).add(name)
        self.pending.extend((command == b"SSUBSCRIBE", group) for group in by_slot.values())
        packed = b"".join([pack((command, *encode(group))) for group in by_slot.values()])
        self.connection.send_packed_command([packed], check_health=False)

    def answered(self, channel: str) -> None:
        if self.pending:
            self.pending[0][1].discard(channel)
            if not self.pending[0][1]:
                self.pending.popleft()

    def check(self) -> None:
        if is_dead(self.heard, asked=self.asked):
            raise exceptions.ConnectionError("no answer on the connection for wake-ups")
        if time.monotonic() - self.heard > SILENCE and not self.asked:
            self.asked = True
            self.connection.send_packed_command([pack((b"PING",))], check_health=False)


class Nodes:
    """What a subscription asks of a cluster; the client's."""

    def __init__(
        self,
        primary_of: Callable[[str], Address | None],
        ask: Callable[[str, bool], object],
        connect: Callable[[Address], Any],
        doubt: Callable[[Address, Exception], object],
        fail: Callable[[Exception], Exception],
    ) -> None:
        #: The primary of a key, as far as it is known.
        self.primary_of = primary_of
        #: Finds it out; at once if the second argument says that what is known is wrong. It blocks.
        self.ask = ask
        #: Another connection, connected. It blocks.
        self.connect = connect
        #: This primary did not answer.
        self.doubt = doubt
        #: redis-py's error as one of ours.
        self.fail = fail


class ClusterSubscription:
    """One thread reads; any thread may change the channels."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        #: Reentrant: a push that waits for room subscribes, also one in a signal handler that meets another.
        self._lock = threading.RLock()
        # Under the lock: the channels; those that no connection has; those to be unsubscribed from.
        self._channels: set[str] = set()
        self._homeless: set[str] = set()
        self._dropped: set[str] = set()
        self._reading = False
        self._closed = threading.Event()
        #: A byte in it wakes the thread that reads.
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        #: What threads have done: an address and the connection to it, or why there is none. Without an address: the
        #: nodes were asked.
        self._done: deque[tuple[Address | None, Any, Exception | None]] = deque()
        # Of the thread that reads, from here on.
        self._links: dict[Address, _Link] = {}
        self._connecting: set[Address] = set()
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
        with self._lock:
            added = set(channels) - self._channels
            self._channels |= added
            self._homeless |= added
            self._dropped -= added
        self._wake()

    def remove(self, channels: Iterable[str]) -> None:
        with self._lock:
            removed = self._channels.intersection(channels)
            self._channels -= removed
            self._homeless -= removed
            self._dropped |= removed
        self._wake()

    def get(self, timeout: float) -> Event | None:
        """The next event, ``(kind, channel, data)``, or None after ``timeout`` seconds. Connects when needed.

        Raises:
            RedisUnavailable: there is no connection at all. RedisRefused. The next call tries again.
        """
        with self._lock:
            if self._closed.is_set():
                return None
            self._reading = True
        try:
            return self._next(time.monotonic() + timeout)
        finally:
            with self._lock:
                self._reading = False
                closed = self._closed.is_set()
            if closed:
                self._close()

    def _next(self, until: float) -> Event | None:
        while not self._closed.is_set():
            self._settle()
            for link in list(self._links.values()):
                self._read(link)
            if self._events:
                return self._events.popleft()
            error, self._error = self._error, None
            # While one primary is away those who ask it for something else report it.
            if error is not None and not (self._links and _is_lost(error)):
                raise self._nodes.fail(error) from error
            now = time.monotonic()
            if now >= until:
                break
            # A thread that connects may hang, while somebody else has learnt of another primary.
            self._wait(min(until - now, PAUSE if self._homeless else LOOK_AGAIN))
        return None

    # --- reading ---

    def _wait(self, seconds: float) -> None:
        with _Selector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for link in self._links.values():
                selector.register(link.socket, selectors.EVENT_READ)
            selector.select(seconds)

    def _read(self, link: _Link) -> None:
        try:
            while link.connection.can_read(0):
                link.heard, link.asked = time.monotonic(), False
                try:
                    reply = read_event(link.connection)
                except exceptions.ResponseError as error:
                    self._refused(link, error)
                    continue
                if isinstance(reply, list) and len(reply) == 3:  # else it is the answer to a PING
                    kind, channel, data = reply
                    self._take(link, kind.decode(), channel.decode(), data if isinstance(data, bytes) else b"")
            link.check()
        except (exceptions.RedisError, OSError):
            self._lose(link)

    def _take(self, link: _Link, kind: str, channel: str, data: bytes) -> None:
        if kind == "ssubscribe":
            link.answered(channel)
        elif kind == "sunsubscribe":
            if link.pending and not link.pending[0][0] and channel in link.pending[0][1]:
                link.answered(channel)
            elif channel in link.channels:  # nobody asked for that: its slot has moved
                self._is_outdated = True
                link.channels.discard(channel)
                self._look_for([channel])
        self._events.append((KINDS.get(kind, kind), channel, data))

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
        self._links.pop(link.address, None)
        link.connection.disconnect()
        self._look_for(link.channels)
        if time.monotonic() - link.made < 1.0:
            self._attempt_at = time.monotonic() + _pause()

    def _look_for(self, channels: Iterable[str]) -> None:
        with self._lock:
            self._homeless |= self._channels.intersection(channels)

    # --- connections ---

    def _settle(self) -> None:
        """Brings what is subscribed to closer to what is wanted."""
        try:
            while self._woken.recv(4096):
                pass
        except BlockingIOError:
            pass
        while self._done:
            self._take_done(*self._done.popleft())
        self._leave_replaced()
        with self._lock:
            homeless, dropped = set(self._homeless), self._dropped
            self._dropped = set()
        for link in list(self._links.values()) if dropped else ():
            names = link.channels & dropped
            link.channels -= names
            self._send(link, b"SUNSUBSCRIBE", names)
        if homeless and time.monotonic() >= self._attempt_at:
            self._find(homeless)

    def _leave_replaced(self) -> None:
        """A primary whose slots have become another one's may be frozen, and say nothing of it."""
        for link in list(self._links.values()):
            if link.channels and self._nodes.primary_of(next(iter(link.channels))) not in (link.address, None):
                moved = {name for name in link.channels if self._nodes.primary_of(name) != link.address}
                link.channels -= moved
                self._look_for(moved)
                if not link.channels:
                    self._lose(link)

    def _find(self, homeless: set[str]) -> None:
        by_primary: dict[Address, set[str]] = {}
        unknown = ""
        for name in homeless:
            address = self._nodes.primary_of(name)
            if address is None:
                unknown = name
            else:
                by_primary.setdefault(address, set()).add(name)
        if self._is_outdated or unknown:
            self._ask(unknown or min(homeless), at_once=self._is_outdated)
        if self._is_outdated:
            return
        for address, names in by_primary.items():
            link = self._links.get(address)
            if link is not None:
                with self._lock:
                    self._homeless -= names
                link.channels |= names
                self._send(link, b"SSUBSCRIBE", names)
            elif address not in self._connecting:
                self._connecting.add(address)
                self._in_thread(address, lambda address=address: self._nodes.connect(address))  # type: ignore[misc]  # mypy does not know the default

    def _send(self, link: _Link, command: bytes, channels: set[str]) -> None:
        if channels:
            try:
                link.send(command, channels)
            except (exceptions.RedisError, OSError):
                self._lose(link)

    def _in_thread(self, address: Address | None, work: Callable[[], Any]) -> None:
        def run() -> None:
            result, failure = None, None
            try:
                result = work()
            except (exceptions.RedisError, LowqError, OSError) as error:
                failure = error
            self._done.append((address, result if address is not None else None, failure))
            with self._lock:
                closed = self._closed.is_set() and not self._reading
            if closed:
                self._close()
            else:
                self._wake()

        threading.Thread(target=run, name="lowq-subscriber", daemon=True).start()

    def _take_done(self, address: Address | None, connection: Any, error: Exception | None) -> None:
        now = time.monotonic()
        if error is not None:
            self._error = error
            self._attempt_at = now + _pause()
        if address is None:
            self._is_asking, self._ask_at = False, now + _pause()
            if error is None:
                self._is_outdated = False
            return
        self._connecting.discard(address)
        if error is None:
            self._links[address] = _Link(address, connection)
            return
        with self._lock:
            names = [name for name in self._homeless if self._nodes.primary_of(name) == address]
        if names:
            # Another primary may have the slots.
            self._nodes.doubt(address, error)
            self._ask(names[0], at_once=False)

    def _ask(self, name: str, *, at_once: bool) -> None:
        if not self._is_asking and time.monotonic() >= self._ask_at:
            self._is_asking = True
            self._in_thread(None, lambda: self._nodes.ask(name, at_once))

    # --- the end ---

    def _wake(self) -> None:
        try:
            self._waker.send(b"\0")
        except OSError:
            pass  # there is something in it, or it was closed

    def close(self) -> None:
        """Closes all connections, for good."""
        with self._lock:
            self._closed.set()
            reading = self._reading
        if reading:
            self._wake()  # the thread that reads does it
        else:
            self._close()

    def _close(self) -> None:
        with self._lock:
            connections = [link.connection for link in self._links.values()]
            connections += [connection for _, connection, _ in self._done if connection is not None]
            self._links.clear()
            self._done.clear()
            self._waker.close()
            self._woken.close()
        for connection in connections:
            connection.disconnect()


def _is_lost(error: Exception) -> bool:
    return not isinstance(error, exceptions.ResponseError)


def _pause() -> float:
    return PAUSE * (1 + random.random())
