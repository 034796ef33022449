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
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context

from lowq.group_commit.loops import LoopPushes, LoopRequest
from lowq.group_commit.overflow import Overflow
from lowq.group_commit.own_thread import run_in_own_thread
from lowq.group_commit.parts import EXTENDED, PLAIN, Part, new_token, width_of
from lowq.group_commit.requests import Outcome, copy_of
from lowq.group_commit.threads import DirectPush, ThreadPushes, ThreadRequest
from lowq.group_commit.writer import (
    GRACE,
    PUSH_BYTES,
    PUSH_JOBS,
    Attempts,
    Writer,
    is_full,
    is_out_of_turn,
    is_sealed,
    limit_of_caller,
    missed_deadline,
    no_answer,
)
from lowq.store import Client, Durability, Wait

__all__ = [
    "EXTENDED", "GRACE", "PLAIN", "PUSH_BYTES", "PUSH_JOBS", "Attempts", "GroupCommit", "Outcome", "Overflow", "Part",
    "copy_of", "is_full", "is_out_of_turn", "is_sealed", "limit_of_caller", "missed_deadline", "new_token", "no_answer",
    "run_in_own_thread", "width_of",
]  # fmt: skip


#: A primary of a cluster, as far as it is known; None elsewhere.
Server = tuple[str, int] | None


class _OfLoop:
    """The pushes of an event loop."""

    def __init__(self) -> None:
        self.by_server: dict[Server, LoopPushes] = {}
        #: Where those for a shard, by its prefix, went last.
        self._servers: dict[str, Server] = {}

    def server_for(self, prefix: str, server: Server) -> Server:
        """Which server's writes take a push to a shard that is served there. When its slot has moved, that is the one
        before for as long as it has some of the shard under way, whether or not their callers still wait: nothing
        overtakes them.
        """
        before = self._servers.get(prefix, server)
        if before != server:
            pushes = self.by_server.get(before)
            if pushes is not None and pushes.has(prefix):
                return before
        self._servers[prefix] = server
        return server


class GroupCommit:
    """The pushes of an application on one client. Safe for threads, several event loops, and forks."""

    def __init__(self, client: Client, push_timeout: float, wait: Wait | None = None) -> None:
        self.client = client
        self.writer = Writer(client, push_timeout, wait)
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
            made = GroupCommit(self.client, self.writer.timeout, Wait(durability, seconds))
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

    def push(self, parts: list[Part], jobs_count: int, size: int) -> list[Outcome]:
        """Pushes with others, from a thread; returns what became of each part."""
        timeout, is_limited_by_batch = limit_of_caller(self.writer.timeout + self.writer.waits_for)
        begun: list[tuple[ThreadPushes, ThreadRequest]] = []
        positions = self._by_server(parts)
        try:
            for server, some in positions.items():
                pushes = self._threads_of(server)
                chosen, jobs, bytes_ = _chosen(parts, some, jobs_count, size)
                begun.append((pushes, ThreadRequest(chosen, jobs, bytes_, timeout, is_limited_by_batch)))
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

    def apush(self, parts: list[Part], jobs_count: int, size: int) -> Awaitable[list[Outcome]]:
        """Pushes with others, from a coroutine, which awaits what became of each part."""
        if self._is_cluster:
            return self._apush_to_servers(parts, jobs_count, size)
        return self.of_loop(asyncio.get_running_loop()).push(parts, jobs_count, size)

    async def _apush_to_servers(self, parts: list[Part], jobs_count: int, size: int) -> list[Outcome]:
        loop = asyncio.get_running_loop()
        found = self._of_loop(loop)
        begun: list[LoopRequest] = []
        positions: dict[Server, list[int]] = {}
        try:
            for i, part in enumerate(parts):
                server = found.server_for(part.prefix, self.client.primary_of(part.prefix))
                positions.setdefault(server, []).append(i)
            for server, some in positions.items():
                begun.append(self.of_loop(loop, server).begin(*_chosen(parts, some, jobs_count, size)))
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
        by_server = self._of_loop(loop).by_server
        pushes = by_server.get(server)
        if pushes is None:
            pushes = by_server[server] = LoopPushes(self.writer, server)
        return pushes

    def _of_loop(self, loop: asyncio.AbstractEventLoop) -> _OfLoop:
        last, found = self._last_loop
        return found if last() is loop else self._find_loop(loop)  # mostly there is only one

    def _find_loop(self, loop: asyncio.AbstractEventLoop) -> _OfLoop:
        with self._lock:
            found = self._loops.get(loop)
            if found is None:
                # A loop that was closed in the middle of a push is referred to by what was under way.
                for other in [other for other in self._loops if other.is_closed()]:
                    for pushes in self._loops.pop(other).by_server.values():
                        pushes.close()
                found = self._loops[loop] = _OfLoop()
        # Forgotten with the loop: it would keep the loop's connection open.
        self._last_loop = weakref.ref(loop, self._forget_last), found
        return found

    def close(self) -> None:
        """Closes the connections of event loops that are not in use."""
        for durable in list(self._durable.values()):
            durable.close()
        with self._lock:
            loops = list(self._loops.items())
        for loop, found in loops:
            for pushes in list(found.by_server.values()):
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
