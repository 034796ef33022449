"""Group commit: small pushes of many coroutines or threads that meet leave together, in one write.

::

    thread ----- nothing under way -----------------------------> its own connection, as if there were no others
    thread  -+
    thread  -+-> waiting -> one call per shard, in one write ---> by the flusher, a thread, one write at a time
    coroutine -+
    coroutine -+-> waiting -> the same -------------------------> by the event loop itself, one write at a time

While a write is under way the next one gathers, so nobody waits for others to come. Jobs of several callers for one
shard share a script call: each caller has its own outcome, because a script takes all jobs of its call or none, and
when it refuses for a reason that may be one caller's (an id whose keys somebody else has written), the calls are made
again caller by caller.

Each primary of a cluster has writes of its own, side by side with the others', and a flusher. A push whose jobs are for
several of them is a request to each. So have pushes that wait for replicas or the disk: those that meet wait together,
behind their calls in the same write, and nobody else waits for them.

What holds when somebody is interrupted (a signal handler or a cancellation may raise between any two instructions):

- No caller sends for others. The flusher is a thread of its own, in which nothing is raised; a loop's writes are sent
  by its callbacks. So who is interrupted harms only itself.
- Who gives up, at the end of its ``push_timeout`` or because it was interrupted, marks its request as abandoned. An
  abandoned request is not sent any more, nor repeated. If it is under way its jobs may be in.
- A request that its caller could not even mark is dropped when its time is up.
- A thread's right to push directly belongs to an object of its own. It is free again when that object is gone.
"""

import asyncio
import os
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context

from lowq.push.loops import LoopPushes, LoopRequest
from lowq.push.own_thread import run_in_own_thread
from lowq.push.parts import EXTENDED, PLAIN, Part, new_token, width_of
from lowq.push.requests import (
    Outcome,
    Settled,
    copy_of,
    is_full,
    is_misrouted,
    is_misscored,
    is_out_of_turn,
)
from lowq.push.threads import DirectPush, ThreadPushes, ThreadRequest
from lowq.push.writer import (
    GRACE,
    PUSH_BYTES,
    PUSH_JOBS,
    Attempts,
    Writer,
    limit_of_caller,
    missed_deadline,
    no_answer,
)
from lowq.store import Client, Durability, Wait

__all__ = [
    "EXTENDED",
    "GRACE",
    "PLAIN",
    "PUSH_BYTES",
    "PUSH_JOBS",
    "Attempts",
    "GroupCommit",
    "Outcome",
    "Part",
    "Settled",
    "copy_of",
    "is_full",
    "is_misrouted",
    "is_misscored",
    "is_out_of_turn",
    "limit_of_caller",
    "missed_deadline",
    "new_token",
    "no_answer",
    "run_in_own_thread",
    "width_of",
]  # fmt: skip


#: A primary of a cluster, as far as it is known; None elsewhere.
Server = tuple[str, int] | None


class _OfLoop:
    """The pushes of an event loop. Each server, and each durability, has writes of its own. A push of an id of which
    others have something under way is held until they have not, so that none overtakes another: a slot has moved, or
    pushes of one queue ask for different durabilities.
    """

    def __init__(self) -> None:
        self.by_destination: dict[tuple[Writer, Server], LoopPushes] = {}
        #: What each of them has waiting or under way: queues and ids. Kept while there are several, and read anew
        #: whenever a write has ended.
        self._under_way: dict[LoopPushes, set[tuple[str, bytes]]] = {}
        #: Held requests and where they go, in the order in which they were begun; and their queues and ids.
        self._held: deque[tuple[LoopPushes, LoopRequest]] = deque()
        self._held_keys: set[tuple[str, bytes]] = set()

    def pushes(self, writer: Writer, server: Server) -> LoopPushes:
        found = self.by_destination.get((writer, server))
        if found is None:
            found = self.by_destination[writer, server] = LoopPushes(writer, server, self._release)
            self._under_way = {pushes: pushes.keys() for pushes in self.by_destination.values()}
        return found

    def begin(
        self, pushes: LoopPushes, parts: list[Part], jobs_count: int, size: int, room_until: float
    ) -> LoopRequest:
        """As `LoopPushes.begin`, behind what was begun before for the same ids."""
        request = pushes.make_request(parts, jobs_count, size, room_until)
        self._add_or_hold(pushes, request)
        return request

    def _add_or_hold(self, pushes: LoopPushes, request: LoopRequest) -> None:
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

    def _release(self, pushes: LoopPushes) -> None:
        """Sends what is held no longer. It is called whenever a write has ended."""
        if len(self.by_destination) == 1:
            return
        self._under_way[pushes] = pushes.keys()
        held, self._held, self._held_keys = self._held, deque(), set()
        try:
            while held:
                others, request = held.popleft()
                if request.future.done():  # its time is up, or it was cancelled
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


class GroupCommit:
    """The pushes of an application on one client. Safe for threads, several event loops, and forks."""

    def __init__(
        self, client: Client, push_timeout: float, wait: Wait | None = None, root: "GroupCommit | None" = None
    ) -> None:
        self.client = client
        #: Whose durable pushes these are, and which knows what is under way in event loops, or this.
        self._root = root or self
        self.writer: Writer = Writer(client, push_timeout, wait, None if root is None else root.writer.resenders)
        #: Those that wait for more than Redis's answer, by what that is: writes of their own, so that nobody waits for
        #: what others have asked for.
        self._durable: dict[Durability, GroupCommit] = {}
        self._is_cluster = client.is_cluster
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
        self._lock = threading.RLock()  # reentrant: a signal handler may push
        #: The pushes of threads where there is one server.
        self.threads = ThreadPushes(self.writer)
        self._threads: dict[Server, ThreadPushes] = {None: self.threads}
        # A value must not refer to its key, or the loop would be kept for ever.
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _OfLoop] = weakref.WeakKeyDictionary()
        self._forget_last()
        if self._root is self:
            self.writer.resenders.clear()

    def _forget_last(self, _loop: object = None) -> None:
        #: The loop that pushed last, by a weak reference, and its pushes.
        self._last_loop: tuple[Callable[[], asyncio.AbstractEventLoop | None], _OfLoop]
        self._last_loop = lambda: None, _OfLoop()

    # --- threads ---

    @property
    def is_busy(self) -> bool:
        """Whether other threads push."""
        if not self._is_cluster:
            return self.threads.is_busy
        return any(pushes.is_busy for pushes in list(self._threads.values()))  # a first push to a primary adds one

    def direct(self, parts: list[Part]) -> list[DirectPush] | None:
        """The right to push these directly, for as long as the list is referred to; None: others push."""
        rights: list[DirectPush] = []
        for server in self._by_server(parts) if self._is_cluster else (None,):
            right = self._threads_of(server).direct()
            if right is None:
                return None
            rights.append(right)
        return rights

    def push(self, parts: list[Part], jobs_count: int, size: int, room_until: float) -> list[Outcome]:
        """Pushes with others, from a thread; returns what became of each part. ``room_until``: monotonic time until
        which it waits for room.
        """
        timeout, is_limited_by_batch = limit_of_caller(self.writer.timeout + self.writer.waits_for)
        begun: list[tuple[ThreadPushes, ThreadRequest]] = []
        positions = self._by_server(parts)
        try:
            for server, some in positions.items():
                pushes = self._threads_of(server)
                chosen, jobs, bytes_ = _chosen(parts, some, jobs_count, size)
                begun.append((pushes, ThreadRequest(chosen, jobs, bytes_, timeout, is_limited_by_batch, room_until)))
                pushes.begin(begun[-1][1])
            return _in_order(parts, positions, [pushes.wait(request) for pushes, request in begun])
        except BaseException:
            # Before the flusher has taken it nothing was written. Otherwise the jobs may be in.
            for _, request in begun:
                request.abandoned = True
            raise

    def _threads_of(self, server: Server) -> ThreadPushes:
        return self._threads.get(server) or self._threads.setdefault(server, ThreadPushes(self.writer))

    # --- coroutines ---

    def apush(self, parts: list[Part], jobs_count: int, size: int, room_until: float) -> Awaitable[list[Outcome]]:
        """Pushes with others, from a coroutine, which awaits what became of each part."""
        found = self._root._of_loop(asyncio.get_running_loop())
        if not self._is_cluster:
            pushes = found.pushes(self.writer, None)
            if len(found.by_destination) == 1:
                return pushes.push(parts, jobs_count, size, room_until)
        return self._apush_held(found, parts, jobs_count, size, room_until)

    async def _apush_held(
        self, found: _OfLoop, parts: list[Part], jobs_count: int, size: int, room_until: float
    ) -> list[Outcome]:
        begun: list[LoopRequest] = []
        positions = self._by_server(parts)
        try:
            for server, some in positions.items():
                chosen = _chosen(parts, some, jobs_count, size)
                begun.append(found.begin(found.pushes(self.writer, server), *chosen, room_until))
            for request in begun:
                await request.future
        except BaseException:
            for request in begun:
                request.abandoned = True
            raise
        finally:
            for request in begun:
                if request.alarm is not None:
                    request.alarm.cancel()
        return _in_order(parts, positions, [request.outcomes for request in begun])

    def of_loop(self, loop: asyncio.AbstractEventLoop, server: Server = None) -> LoopPushes:
        """The pushes of the running loop to a server."""
        return self._root._of_loop(loop).pushes(self.writer, server)

    def _of_loop(self, loop: asyncio.AbstractEventLoop) -> _OfLoop:
        last, found = self._last_loop
        return found if last() is loop else self._find_loop(loop)  # mostly there is only one

    def _find_loop(self, loop: asyncio.AbstractEventLoop) -> _OfLoop:
        with self._lock:
            found = self._loops.get(loop)
            if found is None:
                # A loop that was closed in the middle of a push is referred to by what was under way.
                for other in [other for other in self._loops if other.is_closed()]:
                    for pushes in self._loops.pop(other).by_destination.values():
                        pushes.close()
                found = self._loops[loop] = _OfLoop()
        # Forgotten with the loop: it would keep the loop's connection open.
        self._last_loop = weakref.ref(loop, self._forget_last), found
        return found

    def close(self) -> None:
        """Closes the connections of event loops that are not in use."""
        with self._lock:
            loops = list(self._loops.items())
        for loop, found in loops:
            for pushes in list(found.by_destination.values()):
                try:
                    loop.call_soon_threadsafe(pushes.close_idle, context=Context())
                except RuntimeError:  # it was closed
                    pushes.close()

    # --- servers ---

    def _by_server(self, parts: list[Part]) -> dict[Server, list[int]]:
        """The positions of the parts for each server. Each server has writes of its own, so that one that hangs keeps
        nobody else waiting. When slots have moved, a write may be for another server: then it takes longer.
        """
        if not self._is_cluster:
            return {None: list(range(len(parts)))}
        positions: dict[Server, list[int]] = {}
        for i, part in enumerate(parts):
            positions.setdefault(self.client.primary_of(part.prefix), []).append(i)
        return positions


def _chosen(parts: list[Part], positions: list[int], jobs_count: int, size: int) -> tuple[list[Part], int, int]:
    """Some of the parts, and how many jobs and bytes of payloads they are."""
    if len(positions) == len(parts):
        return parts, jobs_count, size
    chosen = [parts[i] for i in positions]
    return chosen, sum(len(part.items) for part in chosen), sum(len(item[1]) for part in chosen for item in part.items)


def _in_order(
    parts: list[Part], positions: dict[Server, list[int]], outcomes: Sequence[list[Outcome]]
) -> list[Outcome]:
    """The outcomes of all servers as those of the parts."""
    if len(outcomes) == 1:
        return outcomes[0]
    ordered: list[Outcome] = [None] * len(parts)
    for some, of_server in zip(positions.values(), outcomes, strict=True):
        for i, outcome in zip(some, of_server, strict=True):
            ordered[i] = outcome
    return ordered


# --- forks ---

_groups: "weakref.WeakSet[GroupCommit]" = weakref.WeakSet()


def _forget_requests() -> None:
    for group in list(_groups):
        group.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_requests)
