"""Limits over all nodes: the permits of the queues of this process.

::

    dispatcher       permits (a thread)            Redis: take_permits, one key a limit
    ----------       ------------------            ------------------------------------
    could begin  -->  want so many      ----------->  granted, or when to ask again
                 <--  may begin         <-----------
    has ended    -->  kept for the next, unless somebody else waits
                      held, every third of a lease ->  still needed

A `Concurrency` counts batches that run. Each call states what this process has, so a repeated call changes nothing, and
if the process dies, its permits are free again when a lease would be. A `Rate` counts jobs that begin, in the moment in
which they were granted: what is not used at once is given back.

A queue without limits has nothing of this, and a process without such queues no thread.
"""

import secrets
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from math import inf
from typing import NamedTuple

from lowq.clock import Clock
from lowq.clock import now as clock_now
from lowq.errors import LowqError, RedisUnavailable
from lowq.limits import Limit, Rate
from lowq.logs import get_log
from lowq.shards.outage import Outage
from lowq.shards.shard import Allowance
from lowq.store import Client
from lowq.store.keys import limit_key
from lowq.store.registry import PermitsReply, TakePermits

log = get_log("lowq.shards")

#: Seconds for which permits that were granted wait for a thread to use them.
UNUSED_SECONDS = 0.05
#: The same where threads need longer to wake up, as handlers compute: it doubles each time that they came too late.
MOST_UNUSED_SECONDS = 1.0
#: Seconds without a batch after which a starved queue keeps a permit of a concurrency for the next thread that comes
#: back, for `MOST_UNUSED_SECONDS`, while others wait.
STARVED_SECONDS = 5.0
#: Seconds without an answer after which what was granted of a rate is too old to be used, at least.
LATE_SECONDS = 1.0
#: Seconds after which a queue that waits for a permit asks again, should it not be woken.
ASK_AGAIN = 1.0
#: Seconds before the next attempt after one that failed.
TROUBLE_SECONDS = 0.5


class Share(NamedTuple):
    """The share of a queue in the threads of this process."""

    #: Its part, compared with the weights of the other queues that have due work.
    weight: float = 1
    #: Threads that work it at once, at most; None: all.
    max_threads: int | None = None
    #: Its limits over all nodes.
    limits: tuple[Limit, ...] = ()
    #: Jobs of one batch.
    batch_size: int = 1


class Demand(NamedTuple):
    """How many more permits a queue could use."""

    #: Its batches that run.
    running: int
    #: How many could begin besides.
    ready: int
    #: How many threads are asleep. The others look for work when they come back.
    idle: int


class HeldPermits:
    """The permits that a queue of this process has of one limit."""

    def __init__(self, limit: Limit, key: str) -> None:
        #: Seconds, of a rate; None: it is a concurrency.
        self.per = limit.seconds if isinstance(limit, Rate) else None
        self.most = limit.limit
        self.key = key
        # --- under the lock of the dispatcher ---
        #: Of a concurrency: how many batches may run at once, those that run among them.
        self.count = 0
        #: The same: somebody else waits for what is not needed.
        self.is_contended = False
        #: The same: monotonic time from which on others may have been given it.
        self.valid_until = -inf
        #: Of a rate: slot -> how many jobs may begin that were granted in it.
        self.slots: dict[int, int] = {}
        # --- of the thread of `Permits` ---
        self.calls = 0
        #: Monotonic time of the last call that was answered.
        self.stated_at = 0.0
        #: The need of a concurrency that Redis knows.
        self.stated = 0
        #: It waits for more, in Redis.
        self.waits = False
        #: Monotonic time before which there is nothing to be had.
        self.ask_at = 0.0
        #: Counts wake-ups: shows whether one came while a call was under way.
        self.wakes = 0
        #: A call that was not answered. It is sent first, unchanged.
        self.unanswered: TakePermits | None = None
        #: Monotonic time at which it was sent first: Redis may have executed it then, and not since.
        self.sent_at = 0.0
        #: Of a rate: permits that are to be given back, by slot.
        self.returned: dict[int, int] = {}

    def unused(self, running: int) -> int:
        """How many of them no running batch has."""
        return self.count - running if self.per is None else sum(self.slots.values())


class QueuePermits:
    """The permits of a queue. Under the lock of its dispatcher. ``ask``: nudges `Permits`; it does not wait."""

    #: Holds the lock while the permits are changed, and says what could begin. Wakes threads that may begin a batch
    #: after that. Set by the dispatcher.
    changing: Callable[[], AbstractContextManager[Demand]]

    def __init__(
        self, queue: str, share: Share, namespace: str, nonce: str, ask: Callable[[], object], clock: Clock
    ) -> None:
        self._clock = clock
        self.queue = queue
        self.batch_size = share.batch_size
        self.ask = ask
        #: Not the node's nonce alone: after an exec the calls are counted anew.
        self.holder = f"{nonce}-{secrets.token_hex(4)}:{queue}"
        held = [HeldPermits(limit, limit_key(namespace, limit.name(queue))) for limit in share.limits]
        # The same order everywhere: nobody has one and waits for another that somebody has who waits for the first.
        self.concurrencies = sorted((each for each in held if each.per is None), key=lambda each: each.key)
        self.rates = [each for each in held if each.per is not None]
        #: In the order in which they are asked: none is held while an earlier one is waited for.
        self.held = [*self.concurrencies, *self.rates]
        #: Monotonic time from which on permits of rates were granted too long ago.
        self.starts_until = -inf
        #: Monotonic time at which a batch began last; at first, from when on one could.
        self.begun_at = clock()
        #: Batches that could begin, and may not, when that was noticed.
        self.wanted = 0
        #: Monotonic time until which the answer to `ask` may be under way.
        self.answer_until = -inf
        #: Monotonic time at which permits came last.
        self.granted_at = -inf
        #: Seconds for which they are kept unused: of a rate not longer than Redis counts them besides their time.
        self.least_keeps = min([UNUSED_SECONDS, *(max((each.per or 0.0) / 100, 0.02) for each in self.rates)])
        self.keeps = self.least_keeps
        #: Monotonic time at which it gave up one that it had kept for a thread.
        self.lapsed_at = -inf

    def may_begin(self, running: int) -> bool:
        """Whether one more batch may begin while so many run."""
        now = self._clock()
        if not all(running < held.count and now < held.valid_until for held in self.concurrencies):
            return False
        return not self.rates or (now < self.starts_until and all(held.slots for held in self.rates))

    def has_unused(self, running: int) -> bool:
        """Whether it has more than so many batches need."""
        return any(held.unused(running) > 0 for held in self.held)

    def begin(self) -> Allowance | None:
        """A batch begins. None: it may be of any size."""
        self.begun_at = self._clock()
        if not self.rates:
            return None
        jobs = min(self.batch_size, *(sum(held.slots.values()) for held in self.rates))
        return Allowance(jobs, [_taken_from(held.slots, jobs) for held in self.rates])

    def settle(self, allowance: Allowance, used: int) -> None:
        """Takes back the permits of a batch of which only so many jobs began."""
        unused = allowance.jobs - used
        for held, parts in zip(self.rates, allowance.parts, strict=True):
            left = unused
            for slot, count in reversed(parts):
                back = min(left, count)
                if back > 0:
                    held.slots[slot] = held.slots.get(slot, 0) + back
                    left -= back
        if unused > 0:
            self.ask()  # they are to be given back

    def end(self) -> None:
        """A batch has ended. What it had of a concurrency is there for the next, unless somebody else waits for it."""
        contended = [held for held in self.concurrencies if held.is_contended]
        for held in contended:
            held.count -= 1
        if self.wanted or contended:
            self.ask()

    def awaits_thread(self, running: int, now: float) -> bool:
        """Whether it is starved and keeps what was granted for a thread that is still busy."""
        since = max(self.begun_at, self.lapsed_at)
        if self.rates or not self.has_unused(running) or now - since < STARVED_SECONDS:
            return False
        if now - self.granted_at < MOST_UNUSED_SECONDS:
            return True
        self.lapsed_at = now
        return False


def _count_starts(queue: QueuePermits, held: HeldPermits) -> int:
    with queue.changing():
        return sum(held.slots.values())


def _taken_from(slots: dict[int, int], jobs: int) -> list[tuple[int, int]]:
    """Takes so many permits out of the slots, the oldest first."""
    parts = []
    for slot in sorted(slots):
        count = min(jobs, slots[slot])
        if count < slots[slot]:
            slots[slot] -= count
        else:
            del slots[slot]
        parts.append((slot, count))
        jobs -= count
        if not jobs:
            break
    return parts


class Permits:
    """Gets and gives back permits. ``ttl``: seconds after which those of a silent process are free again."""

    def __init__(
        self, client: Client, namespace: str, nonce: str, shares: Mapping[str, Share], ttl: float, outage: Outage, *,
        on_fatal: Callable[[BaseException], object], clock: Clock = clock_now,
    ) -> None:  # fmt: skip
        self._client = client
        self._ttl = ttl
        self._outage = outage
        self._on_fatal = on_fatal
        self._clock = clock
        self._nudge = threading.Event()
        #: Those of the queues with limits, by name, for their dispatchers.
        self.queues = {
            name: QueuePermits(name, share, namespace, nonce, self._nudge.set, clock)
            for name, share in shares.items()
            if share.limits
        }
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="lowq-permits", daemon=True)

    @property
    def channels(self) -> list[str]:
        """The channels of wake-ups for `wake`."""
        return list(dict.fromkeys(held.key for queue in self.queues.values() for held in queue.held))

    # --- from other threads ---

    def start(self) -> None:
        """Starts the thread, if there is any limit."""
        if self.queues:
            self._thread.start()

    def wake(self, channel: str, holders: str) -> None:
        """There may be permits for these holders, or "? holder": that one waits. "": messages may have been lost."""
        names = holders.split()
        for queue in self.queues.values():
            for held in queue.held:
                if held.key != channel:
                    continue
                if not names or (names[0] != "?" and queue.holder in names):
                    held.wakes += 1
                    held.ask_at = 0.0
                if held.per is None and (not names or (names[0] == "?" and queue.holder not in names)):
                    with queue.changing():
                        held.is_contended = True
        self._nudge.set()

    def close(self) -> None:
        """Ends the thread, and gives back what no running batch needs."""
        self._closed = True
        self._nudge.set()
        if self._thread.ident is None:  # never started
            return
        self._thread.join(1.0)
        calls: list[TakePermits] = []
        for queue in self.queues.values():
            with queue.changing() as demand:
                running = demand.running
            calls += [self._call(queue, held, running, 0) for held in queue.held if held.stated > running or held.waits]
        with suppress(LowqError):  # they run out
            self._client.run_many(calls, repeats=0)

    # --- its own ---

    def _run(self) -> None:
        try:
            while not self._closed:
                wait = self.turn()
                self._nudge.wait(wait)
                self._nudge.clear()
        except BaseException as error:
            self._on_fatal(error)

    def turn(self) -> float | None:
        """Does what is due; returns the seconds until something may be due again; None: nothing, before a nudge."""
        waits: list[float | None] = []
        for queue in self.queues.values():
            try:
                waits.append(self._serve(queue))
            except LowqError as error:
                if isinstance(error, RedisUnavailable):
                    self._outage.begin(error)
                    waits.append(TROUBLE_SECONDS)
                else:
                    log.error(
                        "queue %r waits for its limits: %s", queue.queue, error,
                        extra={"event": "trouble", "queue": queue.queue},
                    )  # fmt: skip
                    waits.append(10 * TROUBLE_SECONDS)
                with queue.changing():
                    queue.answer_until = -inf
        return min((wait for wait in waits if wait is not None), default=None)

    def _serve(self, queue: QueuePermits) -> float | None:
        """Gets and gives back the permits of one queue. Raises what its calls end with; then its permits stay."""
        for held in queue.held:
            if held.unanswered is not None:
                self._send(queue, held, held.unanswered)
        now = self._clock()
        with queue.changing() as demand:
            answers, running = queue.answer_until, demand.running
            # Limits of which nothing is to be had for a while, and nothing is there.
            blocked = [held for held in queue.held if now < held.ask_at and not held.unused(running)]
            ready = self._withdraw(queue, demand, now, is_blocked=bool(blocked))
            counts = {held: held.count for held in queue.concurrencies}
        wanted = ready
        for held, has in counts.items():
            is_free = all(other is held for other in blocked)
            # A call that states anything asks as well: otherwise the holder would wait no longer.
            is_due = has > 0 and now - held.stated_at >= self._ttl / 3
            states = held.stated != has or is_due or (held.waits and not (ready and is_free))
            may_ask = is_free and (states or now >= held.ask_at)
            more = max(running + wanted - has, 0) if may_ask else 0
            if more or states:
                has = self._send(queue, held, self._call(queue, held, has, more))
            wanted = max(min(wanted, has - running), 0)
        for held in queue.rates:
            is_free = all(other is held for other in blocked)
            # What it gives back is there again, whatever was said before.
            may_ask = is_free and (now >= held.ask_at or bool(held.returned))
            jobs = max(wanted * queue.batch_size - _count_starts(queue, held), 0) if may_ask else 0
            if jobs or held.returned or (held.waits and not (ready and is_free)):
                self._send(queue, held, self._call(queue, held, 0, jobs))
            wanted = min(wanted, -(-_count_starts(queue, held) // queue.batch_size))
        return self._next(queue, ready, answers, self._clock())

    def _withdraw(self, queue: QueuePermits, demand: Demand, now: float, *, is_blocked: bool) -> int:
        """Takes permits that it can't use from the queue; returns how many batches could begin."""
        running, ready = demand.running, demand.ready
        keeps = now - queue.granted_at < queue.keeps or queue.awaits_thread(running, now)
        if not keeps and not is_blocked and queue.has_unused(running):
            if not demand.idle:
                ready = 0  # those that could use it are busy: they ask again
            elif ready and queue.granted_at > -inf:
                queue.granted_at = -inf  # counts once
                queue.keeps = min(2 * queue.keeps, MOST_UNUSED_SECONDS)
        for held in queue.concurrencies:
            spare = held.count - running
            if is_blocked or now - held.stated_at >= self._ttl or (held.is_contended and not keeps):
                spare = 0  # nothing can begin with it, or others may have it, or wait for it
            elif not keeps:
                spare = ready
            held.count = min(held.count, running + spare)
        if is_blocked or now >= queue.starts_until:
            for held in queue.rates:
                for slot, number in held.slots.items():
                    held.returned[slot] = held.returned.get(slot, 0) + number
                held.slots.clear()
        if not ready:
            queue.wanted = 0
        return ready

    def _call(self, queue: QueuePermits, held: HeldPermits, has: int, more: int) -> TakePermits:
        """States what is needed and asks for more."""
        held.calls += 1
        given: int | str = has
        if held.per is not None:
            given = " ".join(f"{slot} {count}" for slot, count in held.returned.items())
            held.returned = {}
        return TakePermits(held.key, held.most, held.per, queue.holder, held.calls, given, more, self._ttl)

    def _send(self, queue: QueuePermits, held: HeldPermits, call: TakePermits) -> int:
        """Returns how many it has then, of a rate how many it got."""
        if held.unanswered is not call:
            held.unanswered, held.sent_at = call, self._clock()
        begun, sent, wakes = self._outage.begun, held.sent_at, held.wakes
        (reply,) = self._client.run_many([call])
        if isinstance(reply, RedisUnavailable):
            raise reply
        held.unanswered = None
        if isinstance(reply, Exception):
            raise reply
        self._outage.end(begun)
        got: PermitsReply = reply
        granted, waiting, delay, slot = got
        more = call.want
        held.stated_at = sent
        held.waits = granted < more
        held.stated = granted if held.per is not None else int(call.has) + granted
        received = self._clock()
        if granted:
            # The reply's time: where Redis is far away, they would be given back before anybody could use them.
            queue.granted_at = received
            queue.keeps = max(0.9 * queue.keeps, queue.least_keeps)
        if not more or (granted < more and held.wakes != wakes):
            # It does not wait there, so nothing would wake it, and it may have given some back. Or it was woken by
            # another thread, perhaps just now.
            held.ask_at = 0.0
        elif granted < more:
            held.ask_at = sent + (ASK_AGAIN if delay is None else delay)
        with queue.changing():
            if held.per is not None:
                if granted:
                    held.slots[slot] = held.slots.get(slot, 0) + granted
                    is_late = received - sent > max(LATE_SECONDS, held.per / 100)
                    queue.starts_until = received + (0.0 if is_late else queue.keeps)
                return granted
            held.valid_until = sent + self._ttl
            held.count += granted
            held.is_contended = waiting > 0
            return held.count

    def _next(self, queue: QueuePermits, ready: int, answers: float, now: float) -> float | None:
        """``answers``: until when threads wait for what was asked."""
        waits: list[float] = []
        with queue.changing() as demand:
            is_served = queue.may_begin(demand.running)
            has_unused = queue.has_unused(demand.running)
            if is_served:
                queue.wanted = 0
            if queue.answer_until == answers:  # else somebody has asked since
                queue.answer_until = -inf
        if ready and not is_served:
            # What is there and can't be used is given back at once.
            waits.append(0.0 if has_unused else max(held.ask_at for held in queue.held) - now)
        if has_unused:
            ends = [queue.granted_at + seconds for seconds in (queue.keeps, MOST_UNUSED_SECONDS)]
            waits += [min(end for end in ends if end > now) - now] if now < max(ends) else []
        waits += [held.stated_at + self._ttl / 3 - now for held in queue.concurrencies if held.stated > 0]
        return max(min(waits), 0.001) if waits else None
