"""Pushes of the coroutines of an event loop: one goes at once, those that come meanwhile go together."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import Context
from functools import partial
from itertools import chain
from typing import Any

from lowq.coroutines import run_in_own_thread, running_loop
from lowq.push.calls import Request
from lowq.push.router import Router
from lowq.push.write import GRACE, Write, Writer
from lowq.store import Deadline, LoopConnection
from lowq.store.calls import conclude

#: Seconds between attempts to make a loop's connection after one has failed: at first, and at most.
CONNECT_PAUSES = (1.0, 60.0)
#: A primary of a cluster, as far as it is known; None elsewhere.
Server = tuple[str, int] | None


class LoopRequest(Request):
    """A request of a coroutine, which waits on a future."""

    __slots__ = ("alarm",)

    #: Ends it when its caller has less time than others.
    alarm: asyncio.TimerHandle | None

    def expect(self) -> None:
        """Says that its caller is going to wait."""
        self.waiter = running_loop().create_future()
        self.alarm = None

    def end(self) -> None:
        """Ends the wait of its caller."""
        self.abandoned = True
        if self.alarm is not None:
            self.alarm.cancel()

    def is_abandoned(self) -> bool:
        # When a task is cancelled its future is at once, and its coroutine runs a little later.
        return self.waiter.done() or super().is_abandoned()

    def wake_caller(self) -> None:
        if not self.waiter.done():
            self.waiter.set_result(None)

    def wake_caller_from_thread(self) -> None:
        try:
            self.waiter.get_loop().call_soon_threadsafe(self.wake_caller, context=Context())
        except RuntimeError:
            pass  # the loop was closed, and its coroutines with it


class EventLoopPushes:
    """The pushes of an event loop. Each server, and each durability, has writes of its own. A push of an id of which
    others have something under way is held until they have not, so that none overtakes another: a slot has moved, or
    pushes of one queue ask for different durabilities.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._by_destination: dict[tuple[Writer, Server], ServerPushes] = {}
        #: The queues and ids that each of them has waiting or under way. Kept while there are several, and read anew
        #: whenever a write has ended.
        self._under_way: dict[ServerPushes, set[tuple[str, bytes]]] = {}
        #: Held requests and where they go, in the order in which they were begun; and their queues and ids.
        self._held: deque[tuple[ServerPushes, LoopRequest]] = deque()
        self._held_keys: set[tuple[str, bytes]] = set()

    async def push(self, writer: Writer, server: Server, request: LoopRequest) -> None:
        """Pushes with others, and waits until the outcome of each part is known."""
        request.expect()
        try:
            self._begin(writer, server, request)
            await request.waiter
        finally:
            request.end()

    async def push_to_several(self, writer: Writer, requests: Mapping[Server, LoopRequest]) -> None:
        """The same for a push to several servers."""
        for request in requests.values():
            request.expect()
        try:
            for server, request in requests.items():
                self._begin(writer, server, request)
            for request in requests.values():
                await request.waiter
        finally:
            for request in requests.values():
                request.end()

    def _begin(self, writer: Writer, server: Server, request: LoopRequest) -> None:
        """Sends the request, behind those that were begun before for the same ids."""
        pushes = self._by_destination.get((writer, server))
        if pushes is None:
            pushes = self._by_destination[writer, server] = ServerPushes(writer, server, self._router, self._release)
            self._under_way = {pushes: pushes.keys() for pushes in self._by_destination.values()}
        if request.is_limited_by_batch:  # `_check` comes too late for one that has less time than the others
            pushes.set_alarm(request)
        if len(self._by_destination) == 1:
            pushes.add(request)
        else:
            self._add_or_hold(pushes, request)

    def _add_or_hold(self, pushes: "ServerPushes", request: LoopRequest) -> None:
        keys = request.keys()
        if self._held_keys.isdisjoint(keys) and all(
            other is pushes or other.is_idle or under_way.isdisjoint(keys)
            for other, under_way in self._under_way.items()
        ):
            self._under_way[pushes] |= keys
            pushes.add(request)
        else:
            pushes.set_alarm(request)
            self._held.append((pushes, request))
            self._held_keys |= keys

    def _release(self, pushes: "ServerPushes") -> None:
        """Sends held requests whose ids are free. Called whenever a write has ended."""
        if len(self._by_destination) == 1:
            return
        self._under_way[pushes] = pushes.keys()
        held, self._held, self._held_keys = self._held, deque(), set()
        try:
            while held:
                others, request = held.popleft()
                if request.waiter.done():  # its time is up, or it was cancelled
                    continue
                try:
                    self._add_or_hold(others, request)
                except BaseException:  # of a signal handler: this is not its caller, which waits
                    others.give_up(request)
                    raise
        finally:
            for others, request in held:  # a signal handler has raised
                self._held.append((others, request))
                self._held_keys |= request.keys()

    def close_idle(self) -> None:
        """Closes the connections that are not in use."""
        for pushes in list(self._by_destination.values()):
            pushes.close_idle()

    def close(self) -> None:
        """Closes the connections of a loop that was closed."""
        for pushes in list(self._by_destination.values()):
            pushes.close()


class ServerPushes:
    """Pushes of the coroutines of one event loop to one server, in the loop's thread. The loop writes and reads itself,
    on a connection of its own that is made after the second write; while there is none, or something has to be
    repeated, a thread does it. ``server``: a primary of a cluster.

    Callbacks of the loop run in an empty context: they serve all callers, and would keep the context of one of them
    alive.
    """

    def __init__(
        self, writer: Writer, server: Server, router: Router, on_end: Callable[["ServerPushes"], object]
    ) -> None:
        self._writer = writer
        self._server = server
        self._router = router
        #: Called with this whenever a write has ended.
        self._on_end = on_end
        self._waiting: deque[LoopRequest] = deque()
        self._under_way: Write[LoopRequest] | None = None
        #: Those of which Redis has refused something for now.
        self._refused: list[LoopRequest] = []
        #: Those whose outcome is known, and whose callers are being woken.
        self._ended: list[LoopRequest] = []
        self._connection: LoopConnection | None = None
        self._closes_when_idle = False
        #: Stands for the attempt to connect that is under way.
        self._connecting: object = None
        #: Not before then another one is made, monotonic; and seconds until then, should it fail, too.
        self._connect_at = -math.inf
        self._connect_pause = CONNECT_PAUSES[0]
        #: When the attempt on it is given up, monotonic.
        self._attempt_ends = math.inf
        self._sent_writes = 0
        #: When `_check` is to be called next, monotonic, and the number of that call: older ones do nothing. A handle,
        #: which can be cancelled, would keep the loop.
        self._check_due = -math.inf
        self._check_number = 0
        #: Whether the loop can't write and read on its own: TLS, a cluster whose slots are not known yet.
        self._needs_thread = False
        self._scheduled = False

    def set_alarm(self, request: LoopRequest) -> None:
        """Ends the request in time, whether or not it was added."""
        if request.alarm is None:
            seconds = request.give_up_at + GRACE - time.monotonic()
            loop = asyncio.get_running_loop()
            request.alarm = loop.call_later(seconds, self._on_alarm, request, context=Context())

    def add(self, request: LoopRequest) -> None:
        """Sends it, with others when something is under way."""
        self._waiting.append(request)
        # No `_check` is due; or one was long ago, and a signal handler raised before it began.
        if time.monotonic() > self._check_due + self._writer.timeout:
            self._check_in(self._writer.timeout / 2)
        if self._under_way is None and not self._scheduled:
            if self._writer.client.is_embedded:
                # It answers at once, so pushes would never meet.
                self._scheduled = True
                asyncio.get_running_loop().call_soon(self._send_next, context=Context())
            else:
                self._send_next()

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or is under way."""
        return not self._waiting and self._under_way is None

    @property
    def _sent(self) -> list[LoopRequest]:
        return [] if self._under_way is None else self._under_way.requests

    def keys(self) -> set[tuple[str, bytes]]:
        """The queues and ids of which something waits or is under way."""
        return set().union(*(request.keys() for request in chain(self._sent, self._waiting)))

    def close_idle(self) -> None:
        """Closes the connection, when nothing is under way any more."""
        self._connecting = None
        if self._under_way is not None:
            self._closes_when_idle = True
        else:
            self.close()

    def close(self) -> None:
        """Closes the connection."""
        if self._connection is not None:
            self._connection.close()

    def _send_next(self) -> None:
        """Sends the next write, if there is one. None is under way."""
        self._scheduled = False
        if not self._waiting:
            return
        client = self._writer.client
        write = self._under_way = Write(self._writer, list[LoopRequest]())
        try:
            write.take_next(self._waiting)
            if not write.requests:
                self._under_way = None
                return
            write.share_calls()
            self._sent_writes += 1
            connection = self._connection
            if client.is_embedded or not write.calls:  # all may come behind refused ones
                with suppress(Exception):  # the callers are told
                    write.send()
                asyncio.get_running_loop().call_soon(self._end_write, write, context=Context())
            elif connection is None or not connection.is_open or not client.allows("push", self._server):
                self._in_thread(write, write.send)
            else:
                client.follow()
                deadline, wait = write.begin(), self._writer.wait
                packed = client.pack(write.calls, self._server, wait, deadline)
                seconds = deadline.seconds + self._writer.waits_for
                self._attempt_ends = time.monotonic() + seconds
                if self._attempt_ends < self._check_due:
                    self._check_in(seconds)
                expected = len(write.calls) if wait is None else len(write.calls) + 1
                connection.send(packed, expected, partial(self._receive, write))
        except BaseException as error:
            write.fail(error)
            self._end_write(write)
            raise

    def _receive(self, write: Write[LoopRequest], replies: list[Any], error: Exception | None) -> None:
        """The replies to a write, and why there are no more of them."""
        if write is not self._under_way:
            return  # it was given up
        calls, wait = write.calls, self._writer.wait
        if wait is not None:
            if error is None:
                conclude(replies, range(len(calls)), wait, replies.pop())
            else:
                replies = []  # nothing is confirmed
        if error is None and not any(isinstance(reply, Exception) for reply in replies):
            write.settle(replies)
            self._end_write(write)
            return
        results = replies + [error] * (len(calls) - len(replies))

        def repair() -> None:
            self._writer.client.repair(calls, results, write.deadline, wait)
            write.settle(results)

        self._in_thread(write, repair)

    def _end_write(self, write: Write[LoopRequest]) -> None:
        """The outcome of a write is known: the next one is sent, and the callers are woken."""
        if write is not self._under_way:
            return
        self._ended += write.requests
        self._under_way = None
        self._attempt_ends = math.inf
        try:
            for request in write.requests:  # before the next one is sent, which must not overtake it
                if request.again and not request.is_settled:
                    self._router.take(self._writer, request)
            self._send_next()
        finally:
            self._wake_callers()
            self._on_end(self)
            if self._closes_when_idle and self._under_way is None:
                self._closes_when_idle = False
                self.close_idle()

    def _wake_callers(self) -> None:
        for request in self._ended:
            if request.is_settled:
                request.wake_caller()
            else:
                self._refused.append(request)
        self._ended.clear()

    # --- blocking work ---

    def _in_thread(self, write: Write[LoopRequest], work: Callable[[], object]) -> None:
        self._attempt_ends = math.inf

        def done(_result: object, error: BaseException | None) -> None:
            if error is not None:
                write.fail(error)
            accepted = all(request.outcomes.get(part) is True for request in write.requests for part in request.parts)
            closes = self._closes_when_idle
            self._end_write(write)
            # A loop that pushes once, as with asyncio.run around each push, would have it for nothing.
            if accepted and self._sent_writes > 1 and not closes:
                self._connect()

        run_in_own_thread(work, done)

    def _connect(self) -> None:
        """Makes the connection of this loop in a thread, unless there is one. Until it is there threads send."""
        is_open = self._connection is not None and self._connection.is_open
        if is_open or self._needs_thread or self._connecting is not None or time.monotonic() < self._connect_at:
            return
        attempt = object()

        def done(connection: LoopConnection | None, error: BaseException | None) -> None:
            if attempt is not self._connecting:  # all connections were closed meanwhile
                if connection is not None:
                    connection.close()
                return
            self._connecting = None
            if error is not None:
                self._connect_at = time.monotonic() + self._connect_pause
                self._connect_pause = min(self._connect_pause * 2, CONNECT_PAUSES[1])
                return
            self._connect_pause = CONNECT_PAUSES[0]
            self._connection = connection
            self._needs_thread = connection is None

        client, timeout, server = self._writer.client, self._writer.timeout, self._server
        run_in_own_thread(lambda: client.connect_for_loop(Deadline(timeout), server), done)
        self._connecting = attempt  # not before: a signal handler may raise while the thread is started

    # --- time ---

    def _check(self, number: int) -> None:
        """Ends requests that have waited for too long. Comes back while there are any, so it also ends those that a
        callback has left behind in which a signal handler raised.
        """
        if number != self._check_number:
            return
        # First of all: should a signal handler raise below, this is called again.
        self._check_in(self._writer.timeout / 2)
        now = time.monotonic()
        self._wake_callers()
        self._end_overdue(now)
        self._refused = [request for request in self._refused if not request.waiter.done()]
        ends = [
            request.give_up_at + GRACE
            for request in [*self._sent, *self._waiting, *self._refused]
            if not request.waiter.done()
        ]
        if self._sent:
            ends += [self._attempt_ends, max(request.give_up_at for request in self._sent) + GRACE]
        if ends:
            self._check_in(max(min(ends) - now, 0.001))
        else:
            self._check_number += 1
            self._check_due = -math.inf

    def _check_in(self, seconds: float) -> None:
        """Schedules `_check` in so many seconds, in place of the call that was scheduled before."""
        self._check_number += 1
        asyncio.get_running_loop().call_later(seconds, self._check, self._check_number, context=Context())
        self._check_due = time.monotonic() + seconds

    def _on_alarm(self, request: LoopRequest) -> None:
        if time.monotonic() >= request.give_up_at:  # else it waits for room, which `_check` sees to
            self.give_up(request)

    def give_up(self, request: LoopRequest) -> None:
        """Ends a request whose time is up, or that will not be sent."""
        if not request.waiter.done():
            self._writer.give_up(request)
            request.wake_caller()

    def _end_overdue(self, now: float) -> None:
        if now >= self._attempt_ends and self._under_way is not None and self._connection is not None:
            self._attempt_ends = math.inf
            self._connection.time_out()
        for request in [*self._sent, *self._waiting, *self._refused]:
            if now >= request.give_up_at + GRACE:
                self.give_up(request)
        if self._under_way is not None and all(now >= request.give_up_at + GRACE for request in self._sent):
            # It has no caller left and nothing of it is repeated, so the next write need not wait for it.
            self._under_way = None
            self._attempt_ends = math.inf
            if self._connection is not None:
                self._connection.close()  # replies may still come, and belong to no other write
        if self._under_way is None:
            self._send_next()
            self._on_end(self)
