"""Group commit: small pushes of many coroutines or threads that meet leave together, in one write.

::

    thread ----- nothing under way -----------------------------> its own connection, as if there were no others
    thread  -+
    thread  -+-> waiting -> one call per shard, in one write ---> by the flusher, a thread, one write at a time
    coroutine -+
    coroutine -+-> waiting -> the same -------------------------> by the event loop itself, one write at a time

While a write is under way the next one gathers; no push waits for others to come. Jobs of several callers for one
shard share a script call. A script takes all jobs of its call or none. If it refuses them for a reason that may be one
caller's (an id whose keys another program has written), the calls are made again caller by caller, so each caller has
its own outcome.

Each primary of a cluster has its own writes and flusher, and a push to several primaries is a request to each. Pushes
that wait for replicas or the disk have writes of their own, too: those that meet wait together, behind their calls in
the same write.

A signal handler or a cancellation may raise between any two instructions of a caller. Then this holds:

- No caller sends for others. The flusher is a thread of its own, in which nothing is raised; a loop's writes are sent
  by its callbacks. An interrupted caller harms only its own push.
- A caller that gives up, at the end of its ``push_timeout`` or because it was interrupted, marks its request as
  abandoned. An abandoned request is neither sent nor repeated. If it is under way its jobs may be in.
- A request whose caller could not even mark it is dropped when its time is up.
- A thread's right to push directly belongs to an object of its own. It is free again when that object is gone.
"""

import asyncio
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Any, TypeVar

from lowq.clock import Lock
from lowq.coroutines import running_loop
from lowq.push.calls import Part, Request
from lowq.push.event_loop import EventLoopPushes, LoopRequest, Server
from lowq.push.router import OnDemandThread, Router, release
from lowq.push.write import GRACE, Write, Writer
from lowq.store import Client, Durability, Wait

#: With so many pushes in a write, many threads push at once: then none of them goes directly, and before the next
#: write the flusher waits for ``REST`` seconds, in which those whose push has just ended may push again. Without that
#: it would send about half of them at a time, at the same cost (20 threads: 1.6 instead of 2.5 times the rate of one).
CROWD = 8
REST = 0.00005
R = TypeVar("R", bound=Request)


class DirectPush:
    """The right to push directly. It is held as long as this is referred to."""

    __slots__ = ("__weakref__",)


class ThreadRequest(Request):
    """A request of a thread, which waits on a lock that is held until the outcomes are known."""

    __slots__ = ()

    def expect(self) -> None:
        """Says that its caller is going to wait."""
        self.waiter = threading.Lock()
        self.waiter.acquire()

    def wake_caller(self) -> None:
        release(self.waiter)


class ThreadPushes:
    """Pushes of threads to one server: one goes directly, the others by the flusher."""

    def __init__(self, writer: Writer, router: Router) -> None:
        self._writer = writer
        self._router = router
        self._waiting: deque[ThreadRequest] = deque()
        self._direct: Callable[[], DirectPush | None] = lambda: None
        #: Whether many push at once.
        self._is_crowded = False
        self._flusher = OnDemandThread(self._flush)

    def begin(self, request: ThreadRequest) -> None:
        """Sends the request and waits, if no other thread pushes; otherwise leaves it to the flusher."""
        # A push to several servers goes to all of them at once: its caller would send to one after the other.
        is_busy = request.whole is not None or self._is_crowded or self._waiting or self._direct() is not None
        # Where no thread runs any more but this one, or none can be started, each sends for itself.
        if is_busy and not sys.is_finalizing() and self._flusher.start():
            request.expect()
            self._waiting.append(request)
            self._flusher.wake()
            return
        # Two threads that come at the same moment may both have the right, which does no harm.
        right = DirectPush()
        self._direct = weakref.ref(right)
        request.give_up_at = request.deadline  # not behind others: its time is that of its attempts
        try:
            write = Write(self._writer, [request])
            write.share_calls()
            write.send()
            if request.again:
                request.expect()
                self._router.take(self._writer, request, by_caller=True)
        finally:
            del right  # an exception would keep it as long as somebody keeps the exception

    def wait(self, request: ThreadRequest, extra: float = 0.0) -> None:
        """Waits until the outcome of each part is known. ``extra``: seconds beyond its time, but not beyond its
        batch's, for a call that is under way to end.
        """
        while not request.is_settled:
            ends = min(request.give_up_at + extra, request.deadline) + GRACE
            if request.waiter.acquire(timeout=max(ends - time.monotonic(), 0.0)):
                return
            # Unless it has more time since, as it waits for room.
            if min(request.give_up_at + extra, request.deadline) + GRACE <= time.monotonic():
                self._writer.give_up(request)

    def _flush(self) -> float | None:
        """Sends the next write. Returns as `OnDemandThread` wants it."""
        write = Write(self._writer, list[ThreadRequest]())
        is_crowded = False
        try:
            write.take_next(self._waiting)
            if not write.requests:
                return None
            try:
                write.share_calls()
                write.send()
            except Exception as error:
                write.fail(error)
            finally:
                for request in write.requests:
                    if request.is_settled:
                        request.wake_caller()
                    else:
                        self._router.take(self._writer, request)
            self._is_crowded = len(write.requests) >= CROWD
            if self._is_crowded:
                time.sleep(REST)
                is_crowded = bool(self._waiting)  # none came: the next one is alone
            return 0.0
        finally:
            self._is_crowded = is_crowded


class GroupCommit:
    """The pushes of an application on one client. Safe for threads, several event loops, and forks."""

    def __init__(
        self, client: Client, push_timeout: float, wait: Wait | None = None, root: "GroupCommit | None" = None
    ) -> None:
        self.client = client
        #: The group of these durable pushes, which knows the event loops; or this one.
        self._root = root or self
        self.router: Router = Router(client) if root is None else root.router
        self.writer = Writer(client, push_timeout, wait, self.router)
        #: Seconds that a caller waits.
        self.seconds = push_timeout + self.writer.waits_for
        #: Pushes that wait for more than Redis's answer: writes of their own, so that no other push waits for that.
        self._durable: dict[Durability, GroupCommit] = {}
        self._has_several_primaries = client.has_several_primaries
        self.reset()
        _groups.add(self)

    def durable(self, durability: Durability, seconds: float) -> "GroupCommit":
        """The pushes that wait for so much, within so many seconds. The embedded store has nothing to wait for."""
        if durability == "none" or self.client.is_embedded:
            return self
        found = self._durable.get(durability)
        if found is None:
            made = GroupCommit(self.client, self.writer.timeout, Wait(durability, seconds), self)
            found = self._durable.setdefault(durability, made)
        return found

    def reset(self) -> None:
        """Forgets everything that is under way: after a fork it is the parent's."""
        self._lock = Lock()  # reentrant: a signal handler may push
        #: The pushes of threads; those to a primary of a cluster are made when they are needed.
        self._threads: dict[Server, ThreadPushes] = {None: ThreadPushes(self.writer, self.router)}
        # A value must not refer to its key, or the loop would be kept for ever.
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, EventLoopPushes] = weakref.WeakKeyDictionary()
        if self._root is self:
            self.router.clear()

    # --- threads ---

    def push(self, request: ThreadRequest) -> None:
        """Pushes, with others if there are any, and waits until the outcome of each part is known."""
        begun: list[tuple[ThreadPushes, ThreadRequest]] = []
        try:
            for server, some in self._by_server(request).items() if self._has_several_primaries else ((None, request),):
                pushes = self._threads.get(server)
                if pushes is None:
                    pushes = self._threads.setdefault(server, ThreadPushes(self.writer, self.router))
                begun.append((pushes, some))
                pushes.begin(some)
            for pushes, some in begun:
                if some.waiter is not None:
                    pushes.wait(some)
        except BaseException:
            # Before the flusher has taken it nothing was written. Otherwise the jobs may be in.
            for _, some in begun:
                some.abandoned = True
            raise

    def settle(self, write: Write[ThreadRequest], results: list[Any]) -> None:
        """Settles a write of a large push, and waits until the outcome of each part is known."""
        write.settle(results)
        for request in write.requests:
            if not request.is_settled:
                request.expect()
                try:
                    self.router.take(self.writer, request, by_caller=True)
                    self._threads[None].wait(request, self.writer.timeout)
                except BaseException:
                    request.abandoned = True
                    raise

    # --- coroutines ---

    def apush(self, request: LoopRequest) -> Awaitable[None]:
        """As `push`, from a coroutine, which awaits it. When it is cancelled before it was sent, nothing was written.
        Otherwise the jobs may be in.
        """
        of_loop = self._root._find_loop(running_loop())
        if not self._has_several_primaries:
            return of_loop.push(self.writer, None, request)
        return of_loop.push_to_several(self.writer, self._by_server(request))

    def _find_loop(self, loop: asyncio.AbstractEventLoop) -> EventLoopPushes:
        with self._lock:
            found = self._loops.get(loop)
            if found is None:
                # A loop that was closed in the middle of a push is referred to by what was under way.
                for other in [other for other in self._loops if other.is_closed()]:
                    self._loops.pop(other).close()
                found = self._loops[loop] = EventLoopPushes(self.router)
        return found

    def close(self) -> None:
        """Closes the connections of event loops that are not in use."""
        with self._lock:
            loops = list(self._loops.items())
        for loop, found in loops:
            try:
                loop.call_soon_threadsafe(found.close_idle, context=Context())
            except RuntimeError:  # it was closed
                found.close()

    # --- servers ---

    def _by_server(self, request: R) -> dict[Server, R]:
        """Server -> the request for the parts that belong there. Each server has its own writes, so one that hangs
        delays no push to another. If slots have moved, a write reaches another server, and takes longer.
        """
        parts: dict[Server, list[Part]] = {}
        for part in request.parts:
            parts.setdefault(self.client.address_of(part.prefix), []).append(part)
        if len(parts) == 1:
            return dict.fromkeys(parts, request)
        return {server: request.some(some) for server, some in parts.items()}


# --- forks ---

_groups: "weakref.WeakSet[GroupCommit]" = weakref.WeakSet()


def _forget_requests() -> None:
    for group in list(_groups):
        group.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_requests)
