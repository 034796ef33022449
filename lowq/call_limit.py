"""The limit around a call, as handlers and other code use it: ``with lowq.limit("erp", lowq.Rate(20, per=1)):``.

A time limit may interrupt a handler between any two instructions, also in here: so a batch gives up what is left of its
permits when it ends, see `lowq.shards.call_limits`.
"""

import asyncio
import copy
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from datetime import timedelta
from functools import partial
from math import inf
from typing import Any, ClassVar, Self

from lowq.backend import Backend
from lowq.clock import Waker, duration
from lowq.clock import now as clock_now
from lowq.coroutines import in_own_thread
from lowq.errors import ConfigError, LimitTimeout, RedisUnavailable, TimeLimitExceeded
from lowq.limits import MAX_DEFER, Concurrency, LimitRule, checked_limits, limits_apply, registered_limits
from lowq.operate.explain import LimitState, read_limits
from lowq.operate.nodes import nodes
from lowq.operate.queues import queues
from lowq.options import TIMEOUT
from lowq.shards.call_limits import Caller, CallLimits, CallPermits
from lowq.store import caller_limit
from lowq.store.keys import is_queue_name, limit_key
from lowq.store.registry import defer_limit
from lowq.workers import Worker, limits_of

#: Seconds after which a waiting thread looks for what interrupts it: nothing interrupts the wait for a lock.
LOOK_SECONDS = 0.1
#: Seconds before the end of a node's time to stop at which those who still wait are sent away.
LEAVE_SECONDS = 1.0
#: Seconds that Redis has for its answer to a caller that has a timeout, however short that is.
ANSWER_SECONDS = 5.0
#: Names that an application remembers with what was declared for them: each tenant may have one.
MOST_NAMES = 10_000
#: The blocks that the context is in, the innermost last.
_blocks: ContextVar[tuple[tuple["Limit", Caller], ...]] = ContextVar("lowq_limit_blocks", default=())


class Limit:
    """A limit over all nodes around a block: ``with`` in a thread, ``async with`` in a task. May be used again, and by
    several at a time.
    """

    #: The application whose limits are meant where only a name is given: the default one.
    of_names: ClassVar["Limiting"]

    def __init__(self, owner: "Limiting", name: str, rules: tuple[LimitRule, ...], timeout: float | None) -> None:
        self._owner = owner
        self.name = name
        #: What it allows.
        self.rules = rules
        #: Seconds to wait at most; None: as long as its batch may.
        self.timeout = timeout

    def __repr__(self) -> str:
        return f"<lowq.Limit {self.name!r}: {', '.join(map(repr, self.rules))}>"

    def __enter__(self) -> Self:
        if not limits_apply.get():
            return self
        if asyncio._get_running_loop() is not None:
            raise ConfigError(f"lowq.limit({self.name!r}): to wait here would block the event loop; write async with")
        limits, waker, batch = self._owner.call_limits, Waker(), caller_limit.get()
        caller = self._caller(waker.set, threading.get_ident())
        if batch is not None and batch.thread == threading.get_ident():
            batch.at_end[caller] = caller.end
        try:
            permits = limits.enter(self.name, self.rules, caller)
            while caller not in permits.inside:
                waker.wait(min(self._left(limits, permits, caller), LOOK_SECONDS))
            _blocks.set((*_blocks.get(), (self, caller)))
        except BaseException:
            caller.leave()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        blocks = _blocks.get()
        for number in range(len(blocks) - 1, -1, -1):
            limit, caller = blocks[number]
            if limit is self:
                break
        else:  # the block has begun in another context: any permit is as good
            found = self._owner.call_limits.find(self.name, self.rules) if limits_apply.get() else None
            if found is not None:
                found.leave(None)
            return
        try:
            caller.leave()
        except BaseException:  # of a signal's handler: outside of a batch nobody else gives the permit back
            caller.end()
            raise
        finally:
            _blocks.set(blocks[:number] + blocks[number + 1 :])
        batch = caller_limit.get()  # after an interrupt it gives up what is left, should another one have struck
        if batch is not None:
            batch.at_end.pop(caller, None)

    async def __aenter__(self) -> Self:
        if not limits_apply.get():
            return self
        limits, event, loop = self._owner.call_limits, asyncio.Event(), asyncio.get_running_loop()

        def wake() -> bool:
            try:
                loop.call_soon_threadsafe(event.set)
            except RuntimeError:  # the loop was closed: nobody waits any more
                return False
            return True

        caller = self._caller(wake, id(asyncio.current_task()))
        try:
            permits = limits.enter(self.name, self.rules, caller)
            while caller not in permits.inside:
                left = self._left(limits, permits, caller)
                event.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(None if left == inf else left):
                        if caller not in permits.inside:
                            await event.wait()
        except BaseException:
            caller.leave()
            raise
        _blocks.set((*_blocks.get(), (self, caller)))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()

    def _caller(self, wake: Callable[[], object], runner: int) -> Caller:
        """A new caller in the current block. ``runner``: its thread or task.

        Raises:
            ConfigError: the blocks that it is in have all there ever is.
        """
        held = Counter(
            rule.name(limit.name)
            for limit, caller in _blocks.get()
            if limit._owner is self._owner and caller.runner == runner and caller.is_inside
            for rule in limit.rules
        )
        for rule in self.rules:
            is_back_at_end = isinstance(rule, Concurrency) or rule.strict
            if is_back_at_end and held[rule.name(self.name)] >= rule.limit:
                raise ConfigError(
                    f"lowq.limit({self.name!r}): it would wait for itself, as the blocks that this one is in have all "
                    f"permits of {rule!r}; leave them before"
                )
        return Caller(wake, self.timeout, runner)

    def _left(self, limits: CallLimits, permits: CallPermits, caller: Caller) -> float:
        """Seconds that the caller may wait until it looks again.

        Raises:
            LimitTimeout, TimeLimitExceeded: it may not wait any more. RedisUnavailable. What asking ended with.
        """
        now = time.monotonic()
        error, was_answered = permits.error, permits.answered > caller.asked_before
        if error is not None and was_answered and not isinstance(error, RedisUnavailable):
            raise copy.copy(error) from error.__cause__
        unanswered_since = min(permits.unanswered_since, limits.unanswered_since, now)
        retry = max(unanswered_since, caller.since) + limits.patience
        if now >= retry:
            if isinstance(error, RedisUnavailable):
                raise copy.copy(error)
            raise RedisUnavailable(f"Redis was asked for the limit {self.name!r}, and has not answered in time")
        if now >= caller.deadline:
            raise TimeLimitExceeded(f"the deadline of the batch has passed while it waited for the limit {self.name!r}")
        free_in = permits.free_at - clock_now()
        if now >= limits.end_by - LEAVE_SECONDS or now + free_in > limits.end_by:
            raise LimitTimeout(
                f"the node stops, and there is no permit of the limit {self.name!r} before that", node_stops=True
            )
        # What was granted to a thread that stood still may be too old to be used: then Redis is asked once more.
        is_refused = was_answered and (free_in > 0 or permits.waits or error is not None)
        if now >= caller.until and (is_refused or now >= caller.until + ANSWER_SECONDS):
            more = f"; there may be one in {duration(free_in)}" if free_in > 0 else ""
            waited = f"within {caller.until - caller.since:g} s"
            raise LimitTimeout(f"there was no permit of the limit {self.name!r} {waited}{more}")
        until = caller.until if now < caller.until else caller.until + ANSWER_SECONDS
        return max(min(until, caller.deadline, limits.end_by - LEAVE_SECONDS, retry) - now, 0.001)

    def defer(self: "Limit | str", seconds: float | timedelta) -> None:
        """Has nobody begin anything of the limit for so long, as a server asks for by ``Retry-After``: no block, and no
        batch of a worker with a limit of that key. What runs goes on. 0: from now on it may begin again.

        ``lowq.Limit.defer("erp", 30)`` is for the limit of that name of the default application.

        Raises:
            ConfigError: seconds are negative, or more than 31 days. RedisUnavailable
        """
        limit = Limit.of_names.limit(self) if isinstance(self, str) else self
        length: Any = seconds.total_seconds() if isinstance(seconds, timedelta) else seconds
        if isinstance(length, bool) or not isinstance(length, int | float) or not 0 <= length <= MAX_DEFER:
            raise ConfigError(
                f"defer({seconds!r:.100}) of the limit {limit.name!r}: write seconds, or a timedelta, from 0 to 31 days"
            )
        if not limits_apply.get():
            return
        limits = limit._owner.call_limits
        keys = [limit_key(limits.namespace, rule.name(limit.name)) for rule in limit.rules]
        for key in keys:
            limits.wake(key, f"! {length}")  # at once, for this process
        for reply in limits.client.run_many([defer_limit(key, length) for key in keys]):
            if isinstance(reply, Exception):
                raise reply

    async def adefer(self: "Limit | str", seconds: float | timedelta) -> None:
        """`defer` from async code."""
        await in_own_thread(partial(Limit.defer, self, seconds))


class Limiting(Backend):
    """The part of an application that makes limits around calls."""

    workers: dict[str, type[Worker[Any]]]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        #: Those that were declared, by name.
        self._limits: dict[str, tuple[LimitRule, ...]] = {}
        self._call_limits: CallLimits | None = None
        #: See `CallLimits.end_by`.
        self._end_waits_by = inf

    def limit(self, name: str, *rules: LimitRule, timeout: float | timedelta | None = None) -> Limit:
        """A limit over all nodes around calls, for ``with`` or ``async with``::

            with lowq.limit("erp", lowq.Rate(20, per=1)):
                ...

        ``rules``: what it allows; without them what was declared last for that name in this process, or is the
        ``limit`` with that key of a worker. A rule without a key has the name for its key. ``timeout``: seconds, or a
        timedelta, to wait at most, then `LimitTimeout` is raised; by default it waits as long as the batch may run.

        Raises:
            ConfigError: a wrong name, rule or timeout, or nothing was declared for that name.
        """
        if not is_queue_name(name):
            raise ConfigError(
                f"lowq.limit({name!r:.150}): a name is a text of 1 to 128 characters, without braces, spaces and "
                "control characters"
            )
        prefix = f"lowq.limit({name!r}): "
        with self._lock:
            found = checked_limits(prefix, "rules", rules, name) if rules else self._rules_of(name)
            if rules or name in self._limits:  # the last: the names that were not asked for lately are forgotten
                self._limits.pop(name, None)
                self._limits[name] = found
                if len(self._limits) > MOST_NAMES:
                    del self._limits[next(iter(self._limits))]
        if not found:
            known = ", ".join(map(repr, sorted(self._limits)[:5])) or "none"
            raise ConfigError(
                f"{prefix}no limit of that name was declared in this process (those that were: {known}); say what it "
                f"allows, as in lowq.limit({name!r}, lowq.Rate(20, per=1))"
            )
        return Limit(self, name, found, None if timeout is None else TIMEOUT.check(prefix, "timeout", timeout))

    def _rules_of(self, name: str) -> tuple[LimitRule, ...]:
        if name in self._limits:
            return self._limits[name]
        of_workers = [rule for worker in list(self.workers.values()) for rule in limits_of(worker) if rule.key == name]
        of_workers.sort(key=lambda rule: -rule.limit)  # where they have different numbers, the least holds
        return tuple({rule.name(name): rule for rule in of_workers}.values())

    @property
    def call_limits(self) -> CallLimits:
        """The limits around calls in this process. In a child of a fork, and in another store, they are others."""
        client, limits = self.client, self._call_limits
        if limits is None or limits.client is not client or limits.pid != os.getpid():
            with self._lock:
                limits = self._call_limits
                if limits is None or limits.client is not client or limits.pid != os.getpid():
                    limits = CallLimits(client, self.config)
                    limits.end_by = self._end_waits_by
                    self._call_limits = limits
        return limits

    def limits(self) -> list[LimitState]:
        """All limits, and how far they are used: those of workers, and those around calls that this process has
        declared, or that live nodes have used lately. Each has a key.

        Raises:
            RedisUnavailable, RedisRefused
        """
        found: dict[str, LimitRule] = {}
        of_queues = [(info.name, registered_limits(info.options.get("limit"))) for info in queues(self)]
        of_nodes = [("", registered_limits(node.limits)) for node in nodes(self)]
        for name, rules in [*of_queues, *of_nodes, *list(self._limits.items())]:
            for rule in rules:
                found.setdefault(rule.name(name), rule if rule.key else replace(rule, key=name))
        options = {"limit": [found[name].shown() for name in sorted(found)]}
        return read_limits(self.client, self.config.namespace, "", options)

    def shown_call_limits(self) -> list[dict[str, object]]:
        """See `CallLimits.shown`."""
        return [] if self._call_limits is None else self._call_limits.shown()

    def end_waits_by(self, moment: float) -> None:
        """See `CallLimits.end_waits_by`."""
        with self._lock:  # or those that another thread is making would not know
            self._end_waits_by, limits = moment, self._call_limits
        if limits is not None:
            limits.end_waits_by(moment)

    def close_call_limits(self) -> None:
        """Gives back what no block has, and ends the threads. Whoever waits gets an error."""
        limits, self._call_limits = self._call_limits, None
        if limits is not None:
            limits.close()

    def close(self) -> None:
        self.close_call_limits()
        super().close()
