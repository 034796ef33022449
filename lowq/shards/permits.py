"""Limits over all nodes: gets permits of them for the queues of this process, and gives back what is not needed.

::

    dispatcher       permits (a thread)            Redis: take_permits, one key a limit
    ----------       ------------------            ------------------------------------
    could begin  -->  want so many      ----------->  granted, or when to ask again
                 <--  may begin         <-----------
    has ended    -->  kept for the next, unless somebody else waits
                      held, every third of a lease ->  still needed

A `Concurrency` counts batches that run: what this process has is stated anew with each call, so a repeated call changes
nothing, and if the process dies, it is free again when a lease would be. A `Rate` counts jobs that begin, in the moment
in which they were granted: what is not used at once is given back.

A queue without limits has nothing of this, and a process without such queues no thread.
"""

import secrets
import threading
from collections.abc import Callable, Mapping

from lowq.clock import Clock
from lowq.clock import now as clock_now
from lowq.errors import LowqError, RedisUnavailable
from lowq.limits import Concurrency, Rate
from lowq.logs import get_log
from lowq.shards.dispatcher import Dispatcher
from lowq.shards.fairness import Demand, QueuePermits, Share
from lowq.shards.outage import Outage
from lowq.store import Client
from lowq.store.keys import limit_key
from lowq.store.registry import PermitsReply, TakePermits

log = get_log("lowq.shards")

#: Seconds for which permits that were granted wait for a thread to use them.
UNUSED_SECONDS = 0.05
#: The same where threads need longer to wake up, as handlers compute: it doubles each time that they came too late.
MOST_UNUSED_SECONDS = 1.0
#: Seconds after which a queue that has begun nothing, as all threads are busy with others whenever its turn comes,
#: keeps a permit of a concurrency for the next thread that comes back, for `MOST_UNUSED_SECONDS`, while others wait.
STARVED_SECONDS = 5.0
#: Seconds without an answer after which what was granted of a rate is too old to be used, at least.
LATE_SECONDS = 1.0
#: Seconds after which who waits for a permit asks again, should it not be woken.
ASK_AGAIN = 1.0
#: Seconds before the next attempt after one that failed.
TROUBLE_SECONDS = 0.5


class _Held:
    """What one queue of this process has of one limit. Of the thread of `Permits`."""

    def __init__(self, limit: Concurrency | Rate, key: str, position: int) -> None:
        #: Seconds, of a rate; None: it is a concurrency.
        self.per = limit.seconds if isinstance(limit, Rate) else None
        self.most = limit.limit
        self.key = key
        #: Among the limits of its kind of the queue.
        self.position = position
        self.calls = 0
        #: Monotonic time of the last call that was answered.
        self.stated_at = 0.0
        #: What Redis knows that it needs, of a concurrency.
        self.stated = 0
        #: It waits for more, in Redis.
        self.waits = False
        #: Monotonic time before which there is nothing to be had.
        self.ask_at = 0.0
        #: Counts wake-ups: shows whether one came while a call was under way.
        self.wakes = 0
        #: A call that was not answered. It comes first, as it is.
        self.unanswered: TakePermits | None = None
        #: Monotonic time at which that was sent first: Redis may have heard of it then, and not since.
        self.sent_at = 0.0
        #: Of a rate: permits that are to be given back, by slot.
        self.unused: dict[int, int] = {}

    def usable(self, permits: QueuePermits, running: int) -> int:
        """How many of them no batch has that runs."""
        if self.per is None:
            return permits.at_once[self.position] - running
        return sum(permits.starts[self.position].values())


class _Queue:
    """A queue with limits."""

    def __init__(self, name: str, share: Share, dispatcher: Dispatcher, namespace: str, nonce: str) -> None:
        self.name = name
        self.batch_size = share.batch_size
        self.dispatcher = dispatcher
        #: Not the node's nonce alone: after an exec the calls are counted anew.
        self.holder = f"{nonce}-{secrets.token_hex(4)}:{name}"
        self.concurrencies = [
            _Held(limit, limit_key(namespace, limit.name(name)), position)
            for position, limit in enumerate(limit for limit in share.limits if isinstance(limit, Concurrency))
        ]
        # The same order everywhere: nobody has one and waits for another that somebody has who waits for the first.
        self.concurrencies.sort(key=lambda held: held.key)
        self.rates = [
            _Held(limit, limit_key(namespace, limit.name(name)), position)
            for position, limit in enumerate(limit for limit in share.limits if isinstance(limit, Rate))
        ]
        #: Monotonic time at which permits came last.
        self.granted_at = float("-inf")
        #: Seconds for which they are kept unused: of a rate not longer than Redis counts them besides their time.
        self.least_keeps = min([UNUSED_SECONDS, *(max((held.per or 0.0) / 100, 0.02) for held in self.rates)])
        self.keeps = self.least_keeps
        #: Monotonic time at which it gave up one that it had kept for a thread.
        self.lapsed_at = float("-inf")

    @property
    def held(self) -> list[_Held]:
        """In the order in which they are asked: what is asked later is not held while an earlier one is waited for."""
        return [*self.concurrencies, *self.rates]

    def awaits_thread(self, permits: QueuePermits, running: int, now: float) -> bool:
        """Whether it keeps what was granted for a thread that is still busy, as it has begun nothing for long."""
        since = max(permits.begun_at, self.lapsed_at)
        if self.rates or not permits.has_unused(running) or now - since < STARVED_SECONDS:
            return False
        if now - self.granted_at < MOST_UNUSED_SECONDS:
            return True
        self.lapsed_at = now
        return False


class Permits:
    """Gets and gives back the permits of the queues that have limits. ``shares``: of all queues; ``ttl``: seconds after
    which what a silent process has is free again.
    """

    def __init__(
        self,
        client: Client,
        namespace: str,
        nonce: str,
        shares: Mapping[str, Share],
        dispatchers: Mapping[str, Dispatcher],
        ttl: float,
        outage: Outage,
        *,
        on_fatal: Callable[[BaseException], object],
        clock: Clock = clock_now,
    ) -> None:
        self._client = client
        self._ttl = ttl
        self._outage = outage
        self._on_fatal = on_fatal
        self._clock = clock
        self._queues = [
            _Queue(queue, share, dispatchers[queue], namespace, nonce)
            for queue, share in shares.items()
            if share.limits
        ]
        self._nudge = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="lowq-permits", daemon=True)

    @property
    def channels(self) -> list[str]:
        """Where wake-ups for `woken` come from."""
        return list(dict.fromkeys(held.key for queue in self._queues for held in queue.held))

    # --- from other threads ---

    def start(self) -> None:
        """Starts the thread, if there is any limit."""
        if self._queues:
            self._thread.start()

    def nudge(self) -> None:
        """A queue could begin a batch, or has given a permit back."""
        self._nudge.set()

    def woken(self, channel: str, holders: str) -> None:
        """There may be permits for these holders, or "? holder": that one waits. Nothing: it is not known what was said
        before.
        """
        names = holders.split()
        for queue in self._queues:
            for held in queue.held:
                if held.key != channel:
                    continue
                if not names or (names[0] != "?" and queue.holder in names):
                    held.wakes += 1
                    held.ask_at = 0.0
                if held.per is None and (not names or (names[0] == "?" and queue.holder not in names)):
                    with queue.dispatcher.changing_permits(queue.name) as (permits, _):
                        permits.contended[held.position] = True
        self._nudge.set()

    def close(self) -> None:
        """Ends the thread, and gives back what no batch needs that still runs."""
        self._closed = True
        self._nudge.set()
        if self._thread.ident is None:  # never started
            return
        self._thread.join(1.0)
        calls: list[TakePermits] = []
        for queue in self._queues:
            with queue.dispatcher.changing_permits(queue.name) as (_, demand):
                running = demand.running
            calls += [self._call(queue, held, running, 0) for held in queue.held if held.stated > running or held.waits]
        try:
            self._client.run_many(calls, repeats=0)
        except LowqError:
            pass  # they run out

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
        waits: list[float] = []
        for queue in self._queues:
            try:
                wait = self._serve(queue)
            except RedisUnavailable as error:
                self._outage.begin(error)
                self._answer_nothing(queue)
                wait = TROUBLE_SECONDS
            except LowqError as error:
                log.error(
                    "queue %r waits for its limits: %s", queue.name, error,
                    extra={"event": "trouble", "queue": queue.name},
                )  # fmt: skip
                self._answer_nothing(queue)
                wait = 10 * TROUBLE_SECONDS
            if wait is not None:
                waits.append(wait)
        return min(waits, default=None)

    def _answer_nothing(self, queue: _Queue) -> None:
        with queue.dispatcher.changing_permits(queue.name) as (permits, _):
            permits.answer_until = float("-inf")

    def _serve(self, queue: _Queue) -> float | None:
        """One queue's. Raises what its calls end with; then what it has stays as it is."""
        for held in queue.held:
            if held.unanswered is not None:
                self._send(queue, held, held.unanswered)
        now = self._clock()
        with queue.dispatcher.changing_permits(queue.name) as (permits, demand):
            answers, running = permits.answer_until, demand.running
            # Limits of which nothing is to be had for a while, and nothing is there.
            blocked = [held for held in queue.held if now < held.ask_at and not held.usable(permits, running)]
            ready = self._withdraw(queue, permits, demand, now, is_blocked=bool(blocked))
            at_once = list(permits.at_once)
        wanted = ready
        for held in queue.concurrencies:
            has = at_once[held.position]
            is_free = all(other is held for other in blocked)
            # Who states anything asks as well: it would wait no longer otherwise.
            states = held.stated != has or self._is_due(held, has, now) or (held.waits and not (ready and is_free))
            may_ask = is_free and (states or now >= held.ask_at)
            more = max(running + wanted - has, 0) if may_ask else 0
            if more or states:
                has = self._state(queue, held, has, more)
            wanted = max(min(wanted, has - running), 0)
        for held in queue.rates:
            is_free = all(other is held for other in blocked)
            # What it gives back is there again, whatever was said before.
            may_ask = is_free and (now >= held.ask_at or bool(held.unused))
            jobs = max(wanted * queue.batch_size - self._starts(queue, held), 0) if may_ask else 0
            if jobs or held.unused or (held.waits and not (ready and is_free)):
                self._state(queue, held, 0, jobs)
            wanted = min(wanted, -(-self._starts(queue, held) // queue.batch_size))
        return self._next(queue, ready, answers, self._clock())

    def _withdraw(self, queue: _Queue, permits: QueuePermits, demand: Demand, now: float, *, is_blocked: bool) -> int:
        """Takes from the queue what it can't use, or not any more; returns how many batches could begin."""
        running, ready = demand.running, demand.ready
        keeps = now - queue.granted_at < queue.keeps or queue.awaits_thread(permits, running, now)
        if not keeps and not is_blocked and permits.has_unused(running):
            if not demand.idle:
                ready = 0  # those that could use it are busy: they ask again
            elif ready and queue.granted_at > float("-inf"):
                queue.granted_at = float("-inf")  # counts once
                queue.keeps = min(2 * queue.keeps, MOST_UNUSED_SECONDS)
        for held in queue.concurrencies:
            count, contended = permits.at_once[held.position], permits.contended[held.position]
            spare = count - running
            if is_blocked or now - held.stated_at >= self._ttl:
                spare = 0  # nothing can begin with it, or others may have it
            elif not keeps:
                spare = 0 if contended else ready
            permits.at_once[held.position] = min(count, running + spare)
        if is_blocked or now >= permits.starts_until:
            for held, slots in zip(queue.rates, permits.starts, strict=True):
                for slot, number in slots.items():
                    held.unused[slot] = held.unused.get(slot, 0) + number
                slots.clear()
        if not ready:
            permits.wanted = 0
        return ready

    def _starts(self, queue: _Queue, held: _Held) -> int:
        with queue.dispatcher.changing_permits(queue.name) as (permits, _):
            return sum(permits.starts[held.position].values())

    def _is_due(self, held: _Held, has: int, now: float) -> bool:
        """Whether Redis is to hear that what it has is still needed."""
        return has > 0 and now - held.stated_at >= self._ttl / 3

    def _state(self, queue: _Queue, held: _Held, has: int, more: int) -> int:
        """States what is needed and asks for more; returns how many it has then, of a rate how many it got."""
        return self._send(queue, held, self._call(queue, held, has, more))

    def _call(self, queue: _Queue, held: _Held, has: int, more: int) -> TakePermits:
        held.calls += 1
        given: int | str = has
        if held.per is not None:
            given = " ".join(f"{slot} {count}" for slot, count in held.unused.items())
            held.unused = {}
        return TakePermits(held.key, held.most, held.per, queue.holder, held.calls, given, more, self._ttl)

    def _send(self, queue: _Queue, held: _Held, call: TakePermits) -> int:
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
        position = held.position
        is_rate, more = held.per is not None, call.want
        held.stated_at = sent
        held.waits = granted < more
        held.stated = granted if is_rate else int(call.has) + granted
        received = self._clock()
        if granted:
            # The reply's time: where Redis is far away, they would be given back before anybody could use them.
            queue.granted_at = received
            queue.keeps = max(0.9 * queue.keeps, queue.least_keeps)
        if not more:
            held.ask_at = 0.0  # it does not wait there, so nothing would wake it; and it may have given some back
        elif granted < more:
            held.ask_at = sent + (ASK_AGAIN if delay is None else delay)
            if held.wakes != wakes:  # by another thread, perhaps just now
                held.ask_at = 0.0

        with queue.dispatcher.changing_permits(queue.name) as (permits, _):
            if is_rate:
                slots = permits.starts[position]
                if granted:
                    slots[slot] = slots.get(slot, 0) + granted
                    is_late = received - sent > max(LATE_SECONDS, (held.per or 0.0) / 100)
                    permits.starts_until = received + (0.0 if is_late else queue.keeps)
                return granted
            permits.valid_until[position] = sent + self._ttl
            permits.at_once[position] += granted
            permits.contended[position] = waiting > 0
            return permits.at_once[position]

    def _next(self, queue: _Queue, ready: int, answers: float, now: float) -> float | None:
        """``answers``: until when threads wait for what was asked."""
        waits: list[float] = []

        with queue.dispatcher.changing_permits(queue.name) as (permits, demand):
            is_served = permits.may_begin(demand.running)
            has_unused = permits.has_unused(demand.running)
            if is_served:
                permits.wanted = 0
            if permits.answer_until == answers:  # else somebody has asked since
                permits.answer_until = float("-inf")
        if ready and not is_served:
            # What is there and can't be used is given back at once.
            waits.append(0.0 if has_unused else max(held.ask_at for held in queue.held) - now)
        if has_unused:
            ends = [queue.granted_at + seconds for seconds in (queue.keeps, MOST_UNUSED_SECONDS)]
            waits += [min(end for end in ends if end > now) - now] if now < max(ends) else []
        waits += [held.stated_at + self._ttl / 3 - now for held in queue.concurrencies if held.stated > 0]
        return max(min(waits), 0.001) if waits else None
