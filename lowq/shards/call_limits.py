"""Limits around a call: ``with lowq.limit("erp", lowq.Rate(20, per=1)):``, over all nodes and processes.

::

    with: a thread waits, async with: a task        CallLimits (a thread)         Redis: take_permits, one key a limit
    ---------------------------------------         ---------------------         ------------------------------------
    takes a place in line                      -->  asks for all in line   --->   granted, or when to ask again
    the block begins                           <--  the first in line gets it <-
    the block ends: the next in line gets it   -->  or, if others wait, it is given back

If the process dies, the permits that it had are free again when a lease would be.

A time limit may interrupt a handler between any two instructions, also in here. So that no permit is lost then, whoever
is in `CallPermits.inside` has one, and nobody else, and the batch gives up what is left there when it ends.
"""

import atexit
import os
import secrets
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf

from lowq.clock import Lock
from lowq.clock import now as clock_now
from lowq.errors import LowqError, RedisUnavailable
from lowq.limits import LimitRule
from lowq.logs import get_log
from lowq.settings import Config
from lowq.shards.limits import TROUBLE_SECONDS, Permits
from lowq.shards.outage import Outage
from lowq.shards.permits import Demand, QueuePermits, Share
from lowq.shards.wakeups import Listener
from lowq.store import Client, caller_deadline

log = get_log("lowq.shards")


#: Limits that a node names in its heartbeat.
MOST_SHOWN = 20


class Caller:
    """A block that waits for a permit, or has one. ``wake``: of the thread or task that waits; False: it is gone.
    ``runner``: the id of that thread or task.
    """

    __slots__ = ("asked_before", "deadline", "has_given", "permits", "runner", "since", "until", "wake")

    def __init__(self, wake: Callable[[], object], timeout: float | None, runner: int) -> None:
        self.wake = wake
        self.runner = runner
        self.since = time.monotonic()
        #: Monotonic time at which its timeout is over, and that at which its batch has to end.
        self.until = inf if timeout is None else self.since + timeout
        self.deadline = caller_deadline()
        #: How often Redis had been asked before.
        self.asked_before = 0
        #: Its permit was given back in place of another one's, so it gives back another one.
        self.has_given = False
        #: Set before there is anything to leave.
        self.permits: CallPermits | None = None

    @property
    def is_inside(self) -> bool:
        """Whether it has a permit."""
        return self.permits is not None and self in self.permits.inside

    def leave(self) -> None:
        """Ends the block, or the wait. May be repeated."""
        if self.permits is not None:
            self.permits.leave(self)

    def end(self) -> None:
        """Ends it where an interrupt may have struck in `leave`."""
        if self.permits is not None:
            self.permits.leave(self)
            self.permits.permits.ask()


class CallPermits:
    """The permits of one limit around calls, in this process. Safe for threads."""

    def __init__(self, permits: QueuePermits) -> None:
        permits.changing = self._changing
        self.permits = permits
        # Of C: an interrupt between its acquisition and the block would leave another one locked.
        self._lock = Lock()
        # --- under the lock ---
        #: The blocks that run.
        self.inside: set[Caller] = set()
        #: Those who wait, in their order: any of thousands may leave it at any time.
        self.line = OrderedDict[Caller, None]()
        #: How often Redis was asked, and how many of these calls are over.
        self.asked = self.answered = 0
        #: What asking has ended with last.
        self.error: LowqError | None = None
        #: Monotonic time since when Redis has been asked and has not answered.
        self.unanswered_since = inf
        self.used_at = time.monotonic()
        #: Another one has taken its place.
        self.is_closed = False

    def enter(self, caller: Caller) -> bool:
        """Takes a place in line, or a permit if one is there. False: it is closed."""
        with self._lock:
            if self.is_closed:
                return False
            caller.asked_before = self.asked
            self.line[caller] = None
            self._hand_out()
            if caller not in self.inside:
                self.permits.ask()
        return True

    def leave(self, caller: Caller | None) -> None:
        """Ends the block, or the wait. May be repeated. None: a block whose caller is not known any more."""
        with self._lock:
            if caller is None or caller.has_given:
                if caller is not None:
                    caller.has_given = False
                caller = next(iter(self.inside), None)
                if caller is None:
                    return
                caller.has_given = True
            self._remove(caller)
            self._hand_out()

    def _remove(self, caller: Caller) -> None:
        """Takes it out, and what it had is free."""
        permits = self.permits
        self.used_at = time.monotonic()
        if caller in self.line:  # it waits, or an interrupt has struck in `_hand_out`
            del self.line[caller]
            permits.ask()
        if caller in self.inside:
            for held in permits.late:
                held.counted += 1  # first: should an interrupt strike here, it counts twice rather than not at all
            self.inside.discard(caller)
            for held in permits.late:
                held.count -= 1
            contended = [held for held in permits.stated if held.is_contended]
            for held in contended:
                held.count = min(held.count, len(self.inside))
            if contended or permits.late or (permits.stated and not self.line):
                permits.ask()  # what is not used again is given back

    @contextmanager
    def _changing(self) -> Iterator[Demand]:
        """See `QueuePermits.changing`."""
        with self._lock:
            self._note_busy()
            yield Demand(len(self.inside), len(self.line), len(self.line))
            self._hand_out()

    def _hand_out(self) -> None:
        """Gives the first in line what permits there are."""
        self._note_busy()
        while self.line:
            first = next(iter(self.line))
            if first not in self.inside:  # else an interrupt has struck before the next line
                if not self.permits.may_begin(len(self.inside)):
                    return
                self.permits.begin()
                self.inside.add(first)
            self.line.popitem(last=False)
            self._note_busy()
            if first.wake() is False:  # not by `leave`, which would come back here: there may be thousands
                self._remove(first)

    def _note_busy(self) -> None:
        for held in self.permits.late:
            held.busy = len(self.inside)

    def note_answer(self, error: LowqError | None) -> None:
        """Redis was asked: wakes those who have waited for that alone."""
        with self._lock:
            self.answered, self.error = self.asked, error
            now = time.monotonic()
            if not isinstance(error, RedisUnavailable):
                self.unanswered_since = inf
            waiting = [caller for caller in self.line if error is not None or caller.until <= now]
        for caller in waiting:
            caller.wake()

    def fail(self, error: LowqError) -> None:
        """Whoever waits gets the error, also those who have come since."""
        self.asked += 1
        self.note_answer(error)

    def wake_all(self) -> None:
        """Has all who wait look again."""
        with self._lock:
            waiting = list(self.line)
        for caller in waiting:
            caller.wake()

    def close_if(self, is_over: Callable[["CallPermits"], bool]) -> bool:
        """Closes it, if nothing of it is here or in Redis, and it ``is_over``."""
        with self._lock:
            self.is_closed = (
                not (self.line or self.inside)
                and is_over(self)
                and not any(
                    held.waits or held.unanswered or held.counted or held.unused(0) or (held.is_stated and held.stated)
                    for held in self.permits.held
                )
            )
            return self.is_closed

    @property
    def waits(self) -> bool:
        """Whether it got less of a limit than it asked for."""
        return any(held.waits for held in self.permits.held)

    @property
    def free_at(self) -> float:
        """When there may be a permit, as far as is known, by the clock of the permits."""
        return max(max(held.ask_at, held.deferred_until) for held in self.permits.held)


class CallLimits(Permits):
    """The limits around calls of an application, in this process. Safe for threads."""

    def __init__(self, client: Client, config: Config) -> None:
        outage = Outage(lambda: client.is_partial)
        super().__init__(
            client, config.namespace, secrets.token_hex(8), {}, config.lease_ttl, outage, on_fatal=self._fail
        )
        self.client = client
        #: Another process than this one, after a fork, has nothing of it.
        self.pid = os.getpid()
        #: Seconds without an answer after which a caller gets that error.
        self.patience = config.push_timeout
        #: Monotonic time by which whoever waits is to be gone, as the node stops.
        self.end_by = inf
        #: As of `CallPermits`, of any limit: they are asked one after the other, so one that hangs holds the others up.
        self.unanswered_since = inf
        self.namespace = config.namespace
        self._lock = Lock()
        self._by_rules: dict[tuple[str, tuple[LimitRule, ...]], CallPermits] = {}
        self._of: dict[QueuePermits, CallPermits] = {}
        self._listener: Listener | None = None
        self._swept_at = time.monotonic()
        atexit.register(_close, weakref.ref(self))

    def enter(self, name: str, rules: tuple[LimitRule, ...], caller: Caller) -> CallPermits:
        """Puts the caller in line for the limit of that name that allows this."""
        while True:
            found = caller.permits = self._by_rules.get((name, rules)) or self._add(name, rules)
            if found.enter(caller):
                return found

    def find(self, name: str, rules: tuple[LimitRule, ...]) -> CallPermits | None:
        """The permits of a limit that is in use."""
        return self._by_rules.get((name, rules))

    def _add(self, name: str, rules: tuple[LimitRule, ...]) -> CallPermits:
        with self._lock:
            found = self._by_rules.get((name, rules))
            if found is None or found.is_closed:
                queue = QueuePermits(name, Share(limits=rules), self.namespace, self._nonce, self._nudge.set, clock_now)
                found = self._by_rules[name, rules] = self._of[queue] = CallPermits(queue)
                self._listen(queue)
                self.queues[queue.holder] = queue
                self.start()
            return found

    def _listen(self, queue: QueuePermits) -> None:
        if self._listener is None:
            self._listener = Listener(
                self.client, (), "", on_wake=_ignore, on_lease_released=_ignore, on_nodes=_ignore,
                on_trouble=self._outage.begin, on_permits=self.wake,
            )  # fmt: skip
            self._listener.start()
        self._listener.listen_for_permits([held.key for held in queue.held])

    def _serve(self, queue: QueuePermits) -> float | None:
        calls, error, now = self._of[queue], None, time.monotonic()
        calls.asked += 1
        calls.unanswered_since = min(calls.unanswered_since, now)
        self.unanswered_since = min(self.unanswered_since, now)
        try:
            return super()._serve(queue)
        except LowqError as raised:
            error = raised
            raise
        except Exception as raised:  # the other limits are not affected, and this one is tried again
            log.exception("limit %r: unforeseen error", queue.queue)
            error = _as_lowq_error(raised)
            raise error from raised
        finally:
            if not isinstance(error, RedisUnavailable):
                self.unanswered_since = inf
            calls.note_answer(error)

    def _run(self) -> None:
        """As of `Permits`. It goes on after an error."""
        while not self._closed:
            super()._run()

    def _fail(self, error: BaseException) -> None:
        log.critical("the thread of limits around calls has failed, and goes on: %r", error, exc_info=error)
        for calls in list(self._of.values()):
            calls.fail(_as_lowq_error(error))
        time.sleep(TROUBLE_SECONDS)

    def turn(self, *, only_due: bool = False) -> float | None:
        """As of `Permits`. Forgets limits that have not been used for a while: each tenant may have one."""
        wait = super().turn(only_due=only_due)
        now = time.monotonic()
        if now - self._swept_at >= self._ttl:
            self._swept_at = now
            with self._lock:
                forgotten = set[str]()
                for key, calls in list(self._by_rules.items()):
                    if calls.close_if(lambda calls: now - calls.used_at >= self._ttl):
                        del self._by_rules[key], self._of[calls.permits], self.queues[calls.permits.holder]
                        forgotten.update(held.key for held in calls.permits.held)
                if forgotten and self._listener is not None:
                    self._listener.ignore_permits(forgotten.difference(self.channels))
        return wait

    def shown(self) -> list[dict[str, object]]:
        """The limits that were used lately, for the registry; of very many the first."""
        rules = [(rule, name) for name, rules in list(self._by_rules) for rule in rules]
        return [rule.shown() | {"key": rule.key or name} for rule, name in rules[:MOST_SHOWN]]

    def end_waits_by(self, moment: float) -> None:
        """Sends away whoever would wait for longer than until then, ``time.monotonic``; infinite: nobody."""
        self.end_by = moment
        for calls in list(self._of.values()):
            calls.wake_all()

    def close(self) -> None:
        """Gives back what no block has. Whoever waits gets an error."""
        if self.pid != os.getpid():
            return
        super().close()
        if self._listener is not None:
            self._listener.close()
        for calls in list(self._of.values()):
            calls.fail(LowqError("the application was closed while a call waited for its limit"))


def _ignore(*_: object) -> None:
    pass


def _as_lowq_error(error: BaseException) -> LowqError:
    found = LowqError(f"limits around calls have failed: {error!r:.500}")
    found.__cause__ = error
    return found


def _close(limits: "weakref.ref[CallLimits]") -> None:
    found = limits()
    if found is not None:
        with suppress(LowqError):
            found.close()
