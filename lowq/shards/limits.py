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
which they were granted: what is not used at once is given back. A strict one states what this process has, too, and
counts a job when that has ended; for ids that ``perform_one`` goes through, any rate counts the later ones when they
begin.

A queue without limits has nothing of this, and a process without such queues no thread.
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import inf

from lowq.clock import Clock, Waker
from lowq.clock import now as clock_now
from lowq.errors import LowqError, RedisUnavailable
from lowq.limits import MAX_DEFER
from lowq.logs import get_log
from lowq.shards.outage import Outage
from lowq.shards.permits import MOST_UNUSED_SECONDS, Demand, HeldPermits, QueuePermits, Share
from lowq.store import Client
from lowq.store.registry import PermitsReply, TakePermits
from lowq.store.untrusted import finite

log = get_log("lowq.shards")

#: Seconds without an answer after which what was granted of a rate is too old to be used, at least.
LATE_SECONDS = 1.0
#: Seconds after which a queue that waits for a permit asks again, should it not be woken.
ASK_AGAIN = 1.0
#: Seconds before the next attempt after one that failed.
TROUBLE_SECONDS = 0.5


def _count_starts(queue: QueuePermits, held: HeldPermits) -> int:
    with queue.changing():
        return sum(held.slots.values())


class Permits:
    """Gets and gives back permits. ``ttl``: seconds after which those of a silent process are free again."""

    def __init__(
        self, client: Client, namespace: str, nonce: str, shares: Mapping[str, Share], ttl: float, outage: Outage, *,
        on_fatal: Callable[[BaseException], object], clock: Clock = clock_now,
    ) -> None:  # fmt: skip
        self._client = client
        self._nonce = nonce
        self._ttl = ttl
        self._outage = outage
        self._on_fatal = on_fatal
        self._clock = clock
        self._nudge = Waker()
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
        if self.queues and self._thread.ident is None:
            self._thread.start()

    def wake(self, channel: str, message: str) -> None:
        """There may be permits for the holders in the message, or "? holder": that one waits, or "! seconds": it was
        put off for so long. "": messages may have been lost.
        """
        kind, *names = message.split() or [""]
        for queue in list(self.queues.values()):
            for held in queue.held:
                if held.key != channel:
                    continue
                if not kind or queue.holder in (kind, *names):
                    held.wakes += 1
                    held.ask_at = 0.0
                if held.per is None and (not kind or (kind == "?" and queue.holder not in names)):
                    with queue.changing():
                        held.is_contended = True
                if kind == "!" and names:
                    held.wakes += 1
                    with queue.changing():
                        held.defer(self._clock() + min(max(finite(names[0], 0.0), 0.0), MAX_DEFER))
                queue.is_nudged = True
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
                for held in queue.stated:
                    held.count = held.used(running)
            calls += [
                self._call(queue, held, 0)
                for held in queue.held
                if held.waits or held.counted or (held.is_stated and held.stated > held.count)
            ]
        with suppress(LowqError):  # they run out
            self._client.run_many(calls, repeats=0)

    # --- its own ---

    def _run(self) -> None:
        try:
            while not self._closed:
                wait = self.turn(only_due=True)
                self._nudge.wait(wait)
        except BaseException as error:
            self._on_fatal(error)

    def turn(self, *, only_due: bool = False) -> float | None:
        """Does what is due; returns the seconds until something may be due again; None: nothing, before a nudge.
        ``only_due``: for the queues that were nudged, or whose time has come.
        """
        for queue in list(self.queues.values()):
            if only_due and not queue.is_nudged and self._clock() < queue.due_at:
                continue
            queue.is_nudged = False
            wait: float | None
            try:
                wait = self._serve(queue)
            except LowqError as error:
                if isinstance(error, RedisUnavailable):
                    self._outage.begin(error)
                    wait = TROUBLE_SECONDS
                else:
                    log.error(
                        "queue %r waits for its limits: %s", queue.queue, error,
                        extra={"event": "trouble", "queue": queue.queue},
                    )  # fmt: skip
                    wait = 10 * TROUBLE_SECONDS
                with queue.changing():
                    queue.answer_until = -inf
            queue.due_at = inf if wait is None else self._clock() + wait
        due_at = min([queue.due_at for queue in list(self.queues.values())], default=inf)
        return None if due_at == inf else max(due_at - self._clock(), 0.0)

    def _serve(self, queue: QueuePermits) -> float | None:
        """Gets and gives back the permits of one queue. Raises what its calls end with; then its permits stay."""
        for held in queue.held:
            if held.unanswered is not None:
                self._send(queue, held, held.unanswered)
        now = self._clock()
        with queue.changing() as demand:
            answers, running = queue.answer_until, demand.running
            # Limits of which nothing is to be had for a while, and nothing is there; or that were put off. Not those of
            # which messages may have been lost: whoever has several would never hear that all were called off.
            blocked = [
                held for held in queue.held
                if now < held.ask_at and (now < held.deferred_until or not held.unused(running))
            ]  # fmt: skip
            ready = self._withdraw(queue, demand, now, is_blocked=bool(blocked))
            counts = {held: (held.count, held.used(running)) for held in queue.stated}
        wanted = ready
        for held, (has, used) in counts.items():
            size = queue.batch_size if held.is_late else 1
            is_free = all(other is held for other in blocked)
            # A call that states anything asks as well: otherwise the holder would wait no longer.
            is_due = has > 0 and now - held.stated_at >= self._ttl / 3
            states = held.stated != has or held.counted or is_due or (held.waits and not (ready and is_free))
            may_ask = is_free and (states or now >= held.ask_at)
            more = max(used + wanted * size - has, 0) if may_ask else 0
            if more or states:
                has = self._send(queue, held, self._call(queue, held, more))
            wanted = max(min(wanted, -(-(has - used) // size)), 0)
        for held in queue.rates:
            is_free = all(other is held for other in blocked)
            # What it gives back is there again, whatever was said before.
            may_ask = is_free and (now >= held.ask_at or bool(held.returned))
            jobs = max(wanted * queue.batch_size - _count_starts(queue, held), 0) if may_ask else 0
            if jobs or held.returned or (held.waits and not (ready and is_free)):
                self._send(queue, held, self._call(queue, held, jobs))
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
        for held in queue.stated:
            used = held.used(running)
            spare = held.count - used
            if is_blocked or now - held.stated_at >= self._ttl or (held.is_contended and not keeps):
                spare = 0  # nothing can begin with it, or others may have it, or wait for it
            elif not keeps:
                spare = ready * (queue.batch_size if held.is_late else 1)
            held.count = min(held.count, used + spare)
        if is_blocked or now >= queue.starts_until:
            for held in queue.rates:
                for slot, number in held.slots.items():
                    held.returned[slot] = held.returned.get(slot, 0) + number
                held.slots.clear()
        if not ready:
            queue.wanted = 0
        return ready

    def _call(self, queue: QueuePermits, held: HeldPermits, more: int) -> TakePermits:
        """States what is needed and asks for more."""
        held.calls += 1
        given: int | str
        counted = None
        if held.is_stated:
            with queue.changing():
                given = held.count
                if held.is_late:
                    counted, held.counted = held.counted, 0
        else:
            given = " ".join(f"{slot} {count}" for slot, count in held.returned.items())
            held.returned = {}
        return TakePermits(held.key, held.most, held.per, queue.holder, held.calls, given, more, self._ttl, counted)

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
            with queue.changing():
                held.counted += call.counted or 0
            raise reply
        self._outage.end(begun)
        got: PermitsReply = reply
        granted, waiting, delay, slot, deferred = got
        more = call.want
        held.stated_at = sent
        held.waits = granted < more
        held.stated = int(call.has) + granted if held.is_stated else granted
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
            if deferred is not None:
                held.defer(received + deferred)
                if held.wakes != wakes:
                    held.ask_at = 0.0  # perhaps it was called off since: ask again
            elif held.wakes == wakes:  # else it was put off since
                held.deferred_until = -inf
            if not held.is_stated:
                if granted:
                    held.slots[slot] = held.slots.get(slot, 0) + granted
                    is_late = received - sent > max(LATE_SECONDS, (held.per or 0.0) / 100)
                    queue.starts_until = received + (0.0 if is_late else queue.keeps)
                return granted
            held.valid_until = sent + self._ttl
            held.count += granted
            held.is_contended = waiting > 0 and held.per is None
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
        waits += [held.stated_at + self._ttl / 3 - now for held in queue.stated if held.stated > 0]
        return max(min(waits), 0.001) if waits else None
