"""Pushes of the coroutines of an event loop: one goes at once, those that come meanwhile go together."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from contextvars import Context
from functools import partial
from itertools import chain
from typing import Any

from lowq.push.own_thread import run_in_own_thread
from lowq.push.parts import Part
from lowq.push.requests import Outcome, Request, SharedCall
from lowq.push.writer import GRACE, Attempts, Behind, Writer, accept, attempts_for, fail, limit_of_caller
from lowq.store import Deadline, LoopConnection
from lowq.store.durability import conclude

#: Seconds between attempts to make a loop's connection after one has failed: at first, and at most.
CONNECT_PAUSES = (1.0, 60.0)


class LoopRequest(Request):
    """A small push of a coroutine."""

    __slots__ = ("alarm", "future")

    #: Done when the outcomes are known.
    future: "asyncio.Future[None]"
    #: Ends it when its caller has less time than others.
    alarm: asyncio.TimerHandle | None

    def is_abandoned(self) -> bool:
        # When a task is cancelled its future is at once, and its coroutine runs a little later.
        return self.future.done() or super().is_abandoned()

    def wake_caller(self) -> None:
        if not self.future.done():
            self.future.set_result(None)

    def wake_caller_from_thread(self) -> None:
        try:
            self.future.get_loop().call_soon_threadsafe(self.wake_caller, context=Context())
        except RuntimeError:
            pass  # the loop was closed: nobody waits any more


class LoopPushes:
    """Pushes of the coroutines of one event loop to one server, in the loop's thread. The loop writes and reads itself,
    on a connection of its own that is made after the second write; while there is none, or something has to be
    repeated, a thread does it. ``server``: a primary of a cluster.

    What the loop calls later is called in an empty context: it serves all callers, and would keep what the context of
    one of them refers to.
    """

    def __init__(
        self, writer: Writer, server: tuple[str, int] | None, on_end: Callable[["LoopPushes"], object]
    ) -> None:
        self._writer = writer
        self._server = server
        #: Called with this whenever a write has ended.
        self._on_end = on_end
        self._waiting: deque[LoopRequest] = deque()
        self._under_way: list[LoopRequest] = []
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
        #: When what was sent on it is given up, monotonic.
        self._attempt_ends = math.inf
        self._sent_writes = 0
        #: When `_check` is to be called next, monotonic, and the number of that call: older ones do nothing. A handle,
        #: which can be cancelled, would keep the loop.
        self._check_due = -math.inf
        self._check_number = 0
        #: Whether the loop can't write and read on its own: TLS, a cluster whose slots are not known yet.
        self._needs_thread = False
        self._scheduled = False

    async def push(self, parts: list[Part], jobs_count: int, size: int, room_until: float) -> list[Outcome]:
        """Pushes with others; returns what became of each part.

        When it is cancelled before it was sent, nothing was written. Otherwise the jobs may be in.
        """
        request = self.begin(parts, jobs_count, size, room_until)
        try:
            await request.future
        except BaseException:
            request.abandoned = True
            raise
        finally:
            if request.alarm is not None:
                request.alarm.cancel()
        return request.outcomes

    def begin(self, parts: list[Part], jobs_count: int, size: int, room_until: float) -> LoopRequest:
        """Has it sent with others. Whoever calls this waits for its future, says when it was abandoned, and cancels its
        alarm.
        """
        request = self.make_request(parts, jobs_count, size, room_until)
        self.add(request)
        return request

    def make_request(self, parts: list[Part], jobs_count: int, size: int, room_until: float) -> LoopRequest:
        """A request that is yet to be added."""
        timeout, is_limited_by_batch = limit_of_caller(self._writer.timeout + self._writer.waits_for)
        request = LoopRequest(parts, jobs_count, size, timeout, is_limited_by_batch, room_until)
        request.future, request.alarm = asyncio.get_running_loop().create_future(), None
        if is_limited_by_batch:  # `_check` comes too late for one that has less time than the others
            self.set_alarm(request)
        return request

    def set_alarm(self, request: LoopRequest) -> None:
        """Has it end in time whether or not it was added."""
        if request.alarm is None:
            seconds = request.give_up_at + GRACE - time.monotonic()
            loop = asyncio.get_running_loop()
            request.alarm = loop.call_later(seconds, self._on_alarm, request, context=Context())

    def add(self, request: LoopRequest) -> None:
        """Has a request sent with others."""
        writer = self._writer
        try:
            self._waiting.append(request)
            # No `_check` is due; or one was long ago, and a signal handler raised before it began.
            if time.monotonic() > self._check_due + writer.timeout:
                self._check_in(writer.timeout / 2)
            if not self._under_way:
                if writer.client.is_embedded:
                    # It answers at once, so pushes would never meet.
                    if not self._scheduled:
                        self._scheduled = True
                        asyncio.get_running_loop().call_soon(self._send_next, context=Context())
                else:
                    self._send_next()
        except BaseException:
            request.abandoned = True
            if request.alarm is not None:
                request.alarm.cancel()
            raise

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or is under way."""
        return not self._waiting and not self._under_way

    def keys(self) -> set[tuple[str, bytes]]:
        """The queues and ids of which something waits or is under way."""
        return set().union(*(request.keys() for request in chain(self._under_way, self._waiting)))

    def close_idle(self) -> None:
        """Closes the connection, when nothing is under way any more."""
        self._connecting = None
        if self._under_way:
            self._closes_when_idle = True
        elif self._connection is not None:
            self._connection.close()

    def close(self) -> None:
        """Closes the connection of a loop that was closed."""
        if self._connection is not None:
            self._connection.close()

    def _send_next(self) -> None:
        """Sends the next write, if there is one. None is under way."""
        writer, write = self._writer, self._under_way
        self._scheduled = False
        try:
            writer.take_next(self._waiting, write)
            if not write:
                return
            self._sent_writes += 1
            if writer.client.is_embedded:
                writer.send(write)
                asyncio.get_running_loop().call_soon(self._end_write, write, context=Context())
                return
            connection = self._connection
            if connection is None or not connection.is_open or not writer.client.allows("push", self._server):
                self._in_thread(write, partial(writer.send, write))
                return
            writer.client.follow()
            calls, behind = writer.share_calls(write)
            if not calls:  # all of it comes behind what was refused
                writer.send_behind(behind)
                asyncio.get_running_loop().call_soon(self._end_write, write, context=Context())
                return
            attempts = attempts_for(write, writer.waits_for)
            packed = writer.client.pack(calls, self._server, writer.wait, attempts.deadline)
            seconds = attempts.deadline.seconds + writer.waits_for
            self._attempt_ends = time.monotonic() + seconds
            if self._attempt_ends < self._check_due:
                self._check_in(seconds)
            expected = len(calls) if writer.wait is None else len(calls) + 1
            connection.send(packed, expected, partial(self._receive, write, calls, behind, attempts))
        except BaseException as error:
            fail(write, error)
            self._end_write(write)
            raise

    def _receive(
        self, write: list[LoopRequest], calls: list[SharedCall], behind: Behind, attempts: Attempts,
        replies: list[Any], error: Exception | None,
    ) -> None:  # fmt: skip
        """The replies to a write, and why there are no more of them."""
        if write is not self._under_way:
            return  # it was given up
        wait = self._writer.wait
        if wait is not None:
            if error is None:
                conclude(replies, range(len(calls)), wait, replies.pop())
            else:
                replies = []  # nothing is confirmed
        if error is None and not any(isinstance(reply, Exception) for reply in replies):
            accept(calls)
            self._writer.send_behind(behind)
            self._end_write(write)
            return
        results = replies + [error] * (len(calls) - len(replies))
        self._in_thread(write, partial(self._repair_in_thread, write, calls, behind, results, attempts))

    def _end_write(self, write: list[LoopRequest]) -> None:
        """The outcome of a write is known: the next one is sent, and the callers are woken."""
        if write is not self._under_way:
            return
        self._ended += write
        self._under_way = []
        self._attempt_ends = math.inf
        try:
            if self._waiting:
                self._send_next()
        finally:
            self._wake_callers()
            self._on_end(self)
            if self._closes_when_idle and not self._under_way:
                self._closes_when_idle = False
                self.close_idle()

    def _wake_callers(self) -> None:
        for request in self._ended:
            if request.is_settled:
                request.wake_caller()
            else:
                self._refused.append(request)
        self._ended.clear()

    # --- what blocks ---

    def _in_thread(self, write: list[LoopRequest], work: Callable[[], object]) -> None:
        self._attempt_ends = math.inf

        def done(_result: object, error: BaseException | None) -> None:
            if error is not None:
                fail(write, error)
            accepted = all(outcome is True for request in write for outcome in request.outcomes)
            closes = self._closes_when_idle
            self._end_write(write)
            # A loop that pushes once, as with asyncio.run around each push, would have it for nothing.
            if accepted and self._sent_writes > 1 and not closes:
                self._connect()

        run_in_own_thread(work, done)

    def _connect(self) -> None:
        """Has a thread make the connection of this loop, unless there is one. Until it is there threads send."""
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

    def _repair_in_thread(
        self, write: list[LoopRequest], calls: list[SharedCall], behind: Behind, results: list[Any], attempts: Attempts
    ) -> None:
        try:
            self._writer.client.repair(calls, results, attempts.deadline, self._writer.wait)
            self._writer.set_outcomes(calls, results, attempts)
            self._writer.send_behind(behind)
        except BaseException as error:
            fail(write, error)

    # --- time ---

    def _check(self, number: int) -> None:
        """Ends what has waited for too long. It comes back as long as there is something to wait for. So it also finds
        what a signal handler has left behind that raised in the middle of one of our callbacks.
        """
        if number != self._check_number:
            return
        # First of all: should a signal handler raise below, this is called again.
        self._check_in(self._writer.timeout / 2)
        now = time.monotonic()
        self._wake_callers()
        self._end_overdue(now)
        self._refused = [request for request in self._refused if not request.future.done()]
        ends = [
            request.give_up_at + GRACE
            for request in [*self._under_way, *self._waiting, *self._refused]
            if not request.future.done()
        ]
        if self._under_way:
            ends += [self._attempt_ends, max(request.give_up_at for request in self._under_way) + GRACE]
        if ends:
            self._check_in(max(min(ends) - now, 0.001))
        else:
            self._check_number += 1
            self._check_due = -math.inf

    def _check_in(self, seconds: float) -> None:
        """Has `_check` called so many seconds from now, and not when it was to be called before that."""
        self._check_number += 1
        asyncio.get_running_loop().call_later(seconds, self._check, self._check_number, context=Context())
        self._check_due = time.monotonic() + seconds

    def _on_alarm(self, request: LoopRequest) -> None:
        if time.monotonic() >= request.give_up_at:  # else it waits for room, which `_check` sees to
            self.give_up(request)

    def give_up(self, request: LoopRequest) -> None:
        """Its time is up, or it will not be sent."""
        if not request.future.done():
            self._writer.give_up(request)
            request.wake_caller()

    def _end_overdue(self, now: float) -> None:
        if now >= self._attempt_ends and self._under_way and self._connection is not None:
            self._attempt_ends = math.inf
            self._connection.time_out()
        for request in [*self._under_way, *self._waiting, *self._refused]:
            if now >= request.give_up_at + GRACE:
                self.give_up(request)
        if self._under_way and all(now >= request.give_up_at + GRACE for request in self._under_way):
            # Nobody waits for it any more, nor is anything of it repeated: the next ones need not wait for it, either.
            self._under_way = []
            self._attempt_ends = math.inf
            if self._connection is not None:
                self._connection.close()  # replies may still come, and belong to no other write
        if not self._under_way:
            self._send_next()
            self._on_end(self)
