"""The primary that sentinels name, how they are asked, and the connections to it."""

import math
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet, finalize

import redis
from redis import exceptions
from redis.sentinel import MasterNotFoundError

from lowq.clock import Lock, Waker
from lowq.store.calls import Deadline
from lowq.store.connection import TcpConnection, ask, start_thread
from lowq.store.pool import Pool
from lowq.store.topology import Address

#: Seconds between two times that a sentinel is asked, at most; and at most as long as it does not answer.
ASK_PAUSES = (1.0, 8.0)
#: Seconds between two times at which they are asked at once, as a connection is to be made.
WAKE_PAUSE = 0.25
#: Seconds for which the answer of a sentinel counts.
FRESH = 3 * ASK_PAUSES[0]
#: Seconds without any use of the primary after which they are not asked any more.
IDLE = 60.0
#: Seconds that the first answer after such a time is waited for: the known primary may be long out of date.
PATIENCE = 0.25


class Answer(NamedTuple):
    """The answer of a sentinel: the primary."""

    address: Address
    #: Grows with each failover.
    epoch: int


#: Asks a sentinel. None: it knows of no primary just now.
Ask = Callable[[], Answer | None]


class _Sentinel:
    def __init__(self, make_ask: Callable[[], Ask]) -> None:
        self.make_ask = make_ask
        self.ask = make_ask()
        self.answer: Answer | None = None
        self.answered_at = -float("inf")
        self.failure: Exception | None = None
        #: How often it has answered, or failed to.
        self.asked = 0
        #: Has it asked at once.
        self.waker = Waker()
        self.thread: threading.Thread | None = None


class FollowedPrimary:
    """All connections of this process to the primary of a service. They end when another server becomes the primary.

    Each sentinel is asked by a thread of its own, also when all is well: a primary that is cut off from the others goes
    on to answer its clients, and loses their writes when it becomes a replica. A call waits for no sentinel, unless
    none has named the primary yet. While none answers, the known primary stays. Safe for threads.

    Sentinels may disagree: one that is cut off names the old primary. The majority of all counts. Without one, the
    answer with the highest epoch counts, unless it is older than the one that was followed last.
    """

    def __init__(
        self, service: str, make_asks: Sequence[Callable[[], Ask]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``make_asks``: for each sentinel a function that makes the one that asks it."""
        self._service = service
        self._clock = clock
        self._make_asks = make_asks
        self.address: Address | None = None
        self._epoch = -1
        self._connections: WeakSet[Any] = WeakSet()
        #: Pools that have used it and were not closed since.
        self._users: WeakSet[Pool] = WeakSet()
        self.reset()
        _all.add(self)

    def reset(self) -> None:
        """Forgets the threads: after a fork they are the parent's."""
        self._sentinels = [_Sentinel(make_ask) for make_ask in self._make_asks]
        self._used_at = self._woken_at = -float("inf")
        #: Held while threads are started; reentrant, as a signal handler may push.
        self._starting = Lock()
        #: Held by the threads that ask, which no signal interrupts.
        self._deciding = Lock()

    def followed(self, connection: Any) -> Any:
        """The connection, which is to end with the primary."""
        self._connections.add(connection)
        return connection

    def follow(self, user: Pool | None = None, *, patient: bool = True) -> None:
        """Has the sentinels asked for a while, as the primary is about to be used. ``patient``: whether there is a
        moment to hear them if they have not been asked for long.
        """
        if user is not None and user not in self._users:
            self._users.add(user)
        now = self._clock()
        was_idle = now - self._used_at > IDLE
        self._used_at = now
        for sentinel in self._sentinels:
            if sentinel.thread is None or not sentinel.thread.is_alive():
                self._start(sentinel)
        if was_idle and patient and self.address is not None:
            self._wait(PATIENCE, any)

    def find(self, seconds: float | None) -> Address:
        """The primary to connect to. ``seconds``: how long to wait for it; None: as long as the sentinels may take.

        Raises:
            MasterNotFoundError: no sentinel has named it yet, and none does in so many seconds.
            AuthenticationError: one refuses the user or password, and no other names it.
        """
        self.follow()
        now = self._clock()
        if now - self._woken_at >= WAKE_PAUSE or self.address is None:
            self._woken_at = now
            for sentinel in self._sentinels:
                sentinel.waker.set()
        if self.address is None:
            self._wait(math.inf if seconds is None else seconds, all)
        if self.address is not None:
            return self.address
        raise self._failure()

    def _wait(self, seconds: float, is_enough: Callable[[list[bool]], bool]) -> None:
        """Waits until another primary is known, or enough of the sentinels have answered, or failed to."""
        before, address = [sentinel.asked for sentinel in self._sentinels], self.address
        ends = time.monotonic() + seconds
        while self.address == address and time.monotonic() < ends:
            if is_enough([s.asked > count for s, count in zip(self._sentinels, before, strict=True)]):
                return
            time.sleep(0.002)

    def _failure(self) -> Exception:
        failures = [sentinel.failure for sentinel in self._sentinels]
        for failure in failures:
            if isinstance(failure, exceptions.AuthenticationError | exceptions.NoPermissionError):
                return type(failure)(f"{failure} (said a sentinel)")
        reasons = [
            str(sentinel.failure or "it did not answer in time")
            for sentinel in self._sentinels
            if sentinel.failure is not None or not sentinel.asked
        ]
        reason = f" : {reasons[-1]}" if len(reasons) == len(self._sentinels) else ""
        return MasterNotFoundError(f"No master found for {self._service!r}{reason}")

    def leave(self, user: Pool) -> None:
        """Ends the threads with the last user, until the primary is used again."""
        self._users.discard(user)
        if self._users:
            return
        self._used_at = -math.inf
        for sentinel in self._sentinels:
            sentinel.waker.set()

    # --- the threads ---

    def _start(self, sentinel: _Sentinel) -> None:
        with self._starting:
            if sentinel.thread is None or not sentinel.thread.is_alive():
                # None, as the interpreter ends: the known primary is used.
                sentinel.thread = start_thread(partial(self._watch, sentinel), "lowq-sentinel")

    def _watch(self, sentinel: _Sentinel) -> None:
        pause = ASK_PAUSES[0]
        while not self._ends(sentinel):
            answer, failure = None, None
            try:
                answer = sentinel.ask()
                pause = ASK_PAUSES[0]
            except Exception as error:
                failure = error
                pause = min(2 * pause, ASK_PAUSES[1])
            self._note_answer(sentinel, answer, failure)
            sentinel.waker.wait(pause * random.uniform(0.5, 1.0))

    def _ends(self, sentinel: _Sentinel) -> bool:
        """Whether its thread ends, as the primary is not used any more."""
        if self._clock() - self._used_at <= IDLE:
            return False
        with self._starting:
            sentinel.thread = None  # first: a use of the primary from here on is seen below, or starts another one
            if self._clock() - self._used_at <= IDLE:
                sentinel.thread = threading.current_thread()
                return False
            sentinel.ask = sentinel.make_ask()  # with the last one its connection ends
            return True

    def _note_answer(self, sentinel: _Sentinel, answer: Answer | None, failure: Exception | None) -> None:
        with self._deciding:
            sentinel.failure = failure
            if failure is None:  # the last answer of one that fails now counts for a while
                sentinel.answer, sentinel.answered_at = answer, self._clock()
            chosen = self._choose()
            before = self.address
            if chosen is not None:
                self.address, self._epoch = chosen
            if before is not None and before != self.address:
                for connection in self._list_connections():
                    # As if it had died: calls without an answer are repeated on others.
                    _break(connection)
            sentinel.asked += 1  # last: a caller that waits for it looks for an address then

    def _choose(self) -> Answer | None:
        since = self._clock() - FRESH
        answers = [sentinel.answer for sentinel in self._sentinels if sentinel.answer and sentinel.answered_at >= since]
        if not answers:
            return None
        (address, votes), *_ = Counter(answer.address for answer in answers).most_common()
        if 2 * votes > len(self._sentinels):
            return max(answer for answer in answers if answer.address == address)
        latest = max(answers, key=lambda answer: (answer.epoch, answer.address == self.address))
        return latest if latest.epoch >= self._epoch else None

    def _list_connections(self) -> list[Any]:
        while True:
            try:
                return list(self._connections)
            except RuntimeError:
                pass  # another thread has just made one


#: Also those that no client uses just now: the next one does.
_all: WeakSet[FollowedPrimary] = WeakSet()


def _forget_threads() -> None:
    for primary in list(_all):
        primary.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


class PrimaryConnection(TcpConnection):
    """A connection to the primary as it is known when it connects."""

    def __init__(self, *, primary: FollowedPrimary, **options: Any) -> None:
        super().__init__(**options)  # type: ignore[no-untyped-call]
        self._primary = primary

    def _connect(self) -> socket.socket:
        timeout, began = self.socket_connect_timeout, time.monotonic()
        self.host, self.port = self._primary.find(timeout)
        if timeout is None:
            return super()._connect()
        try:
            self.socket_connect_timeout = max(timeout - (time.monotonic() - began), 0.001)
            return super()._connect()
        finally:
            self.socket_connect_timeout = timeout

    def connect(self) -> None:
        super().connect()  # type: ignore[no-untyped-call]
        # Another one may have become the primary before this one could be broken.
        if (self.host, self.port) != self._primary.address:
            self.disconnect()  # type: ignore[no-untyped-call]
            raise exceptions.ConnectionError(f"{self.host}:{self.port} is the primary no more")


class TlsPrimaryConnection(redis.SSLConnection, PrimaryConnection):
    """The same, with TLS on top."""


def _break(connection: Any) -> None:
    plain = getattr(connection, "_sock", None)  # redis-py has no public way to it
    if isinstance(plain, socket.socket):
        try:
            # Not that of a TLS socket, which only the thread that uses it may call.
            socket.socket.shutdown(plain, socket.SHUT_RDWR)
        except OSError:
            pass  # it was closed


def make_ask(connect: Callable[[], Any], service: str) -> Callable[[], Answer | None]:
    """Makes the function that asks a sentinel, on a connection that it keeps. For one thread."""
    opened: list[Any] = []

    def ask_it() -> Answer | None:
        if not opened:
            opened.append(connect())
        (connection,) = opened
        try:
            connection.connect()
            said = ask(connection, b"SENTINEL", b"MASTER", service.encode())
        except BaseException:
            connection.disconnect()
            raise
        if isinstance(said, exceptions.AuthenticationError | exceptions.NoPermissionError):
            raise said
        if isinstance(said, Exception):
            return None  # it does not know the service
        state = dict(zip(said[::2], said[1::2], strict=True))
        flags = state[b"flags"].split(b",")
        if b"master" not in flags or b"s_down" in flags or b"o_down" in flags:
            return None
        return Answer((state[b"ip"].decode(), int(state[b"port"])), int(state.get(b"config-epoch", 0)))

    # Nothing else refers to the connection, and the thread that asks ends by itself.
    finalize(ask_it, lambda: [connection.disconnect() for connection in opened]).atexit = False
    return ask_it


class SentinelPool(Pool):
    """Connections to the primary that the sentinels name."""

    def __init__(self, primary: FollowedPrimary, connect: Callable[[], Any], size: int, timeout: float) -> None:
        super().__init__(lambda: primary.followed(connect()), size, timeout, shebang=True)
        self._primary = primary

    def checkout(self, deadline: Deadline | None = None) -> Any:
        self._primary.follow(self)
        return super().checkout(deadline)

    @property
    def address(self) -> Address | None:
        return self._primary.address

    def follow(self) -> None:
        self._primary.follow(patient=False)

    def close(self) -> None:
        super().close()
        self._primary.leave(self)
