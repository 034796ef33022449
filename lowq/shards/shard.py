"""A shard of a queue that this process works, or waits to work: its name, and its state by owner. And the sweeper of
what has expired in the shards that are held.

::

    lease       ShardLease     the maintenance loop's; others read it
    inflow      ShardInflow    the maintenance loop's
    dispatch    DispatchState  the dispatcher's, which guards it by its lock
    in_flight   InFlight       belongs to whoever has claimed the shard, one at a time
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from lowq.clock import Clock
from lowq.clock import now as clock_now
from lowq.codec import decode_id
from lowq.codec.payloads import dump_error
from lowq.codec.types import PayloadType
from lowq.errors import RedisUnavailable
from lowq.logs import get_log
from lowq.observe.events import QueueEvents
from lowq.options import QueueOptions
from lowq.settings import Config
from lowq.sharding import Layout
from lowq.shards.delivery import InFlight
from lowq.shards.lease import Lease, LeaseDenied, ShardLease
from lowq.store import Client
from lowq.store.shard import SweepReply

log = get_log("lowq.shards")

#: Bounds the time that a script may take, and Lua's arguments.
MAX_SCAN_SIZE = 2000
#: Seconds between two sweeps of a shard.
SWEEP_INTERVAL = 1.0
#: Shards that are swept in one write: between two writes Redis serves others.
_WRITE = 10
#: Writes after which the maintenance loop does what else is due.
_ROUNDS = 20


class Inflow(NamedTuple):
    """Payloads and jobs that came in to some shards between two moments, for the history of their queue."""

    #: Payloads that came in, also those that were merged.
    pushed: int
    #: By how many jobs the backlog, those due or in flight, has grown.
    change: int


class ShardInflow:
    """The inflow of one shard, from the renewals of its lease. Belongs to the maintenance loop.

    Each renewal says how many payloads have ever come in and how large the backlog is. Only the difference between two
    renewals of the same lease counts: other holders count what comes in under their leases. When a reply is lost, the
    next one includes its difference.
    """

    __slots__ = ("_gathered", "_seen")

    def __init__(self) -> None:
        #: Token, payloads and backlog, as of the last renewal.
        self._seen: tuple[str, int, int] | None = None
        #: Inflow since the last `take`; None: it is not known.
        self._gathered: Inflow | None = None

    def note(self, token: str, pushed: int, backlog: int) -> None:
        """Notes the figures of a renewal of the lease with that token."""
        seen, self._seen = self._seen, (token, pushed, backlog)
        if seen is not None and seen[0] == token:
            before = self._gathered or Inflow(0, 0)
            self._gathered = Inflow(before.pushed + max(pushed - seen[1], 0), before.change + backlog - seen[2])

    def take(self) -> Inflow | None:
        """The inflow since the last call; None: it was never known."""
        gathered = self._gathered
        if gathered is not None:
            self._gathered = Inflow(0, 0)
        return gathered


class Allowance(NamedTuple):
    """The jobs that a batch of a queue with rates may take, as permits were granted for them. ``parts``: of each rate,
    the slots in which they count.
    """

    jobs: int
    parts: list[list[tuple[int, int]]]


class Begun(NamedTuple):
    """The jobs of a running batch that don't count yet in rates that count them later than when they were granted:
    those that are performed, and those that begin later, one after the other.
    """

    now: int
    later: int


NO_JOBS = Begun(0, 0)


class DispatchState:
    """The state of a shard for its dispatcher. Read and written under the dispatcher's lock."""

    __slots__ = (
        "allowance", "begun", "claimed_by", "is_in_hand", "leaving", "level", "levels", "next_due", "paused",
        "rests_until", "takes", "wakes",
    )  # fmt: skip

    def __init__(self) -> None:
        #: Monotonic time at which the oldest waiting job is due, as far as known; None: nothing waits.
        self.next_due: float | None = None
        self.paused = False
        #: Of a shard with priorities: level -> when the oldest waiting job of it is due, as `next_due`. None: it has
        #: none, or nothing is known of them.
        self.levels: dict[int, float] | None = None
        #: The level that was the most urgent one when jobs were taken last.
        self.level = 0
        #: Monotonic time before which no thread picks it: its primary did not answer.
        self.rests_until = 0.0
        #: Number of the thread that works it, until the outcome is written. None: it is free; negative: no thread may
        #: pick it.
        self.claimed_by: int | None = None
        #: It is to be given up: no thread begins anything of it any more.
        self.leaving = False
        #: A consumer has jobs of it in hand, though nobody has claimed it: it is not given up before they are reported.
        self.is_in_hand = False
        #: Number of wake-ups: shows whether one came while a take was under way.
        self.wakes = 0
        #: Number of takes: with `wakes` it shows whether a reply about the shard is older than what is known.
        self.takes = 0
        #: Jobs that the next take may bring, of a queue with rates over all nodes; None: any number.
        self.allowance: Allowance | None = None
        #: The jobs of the batch that runs.
        self.begun = NO_JOBS

    def note_levels(self, delays: Mapping[int, float] | None, now: float, *, is_older: bool) -> None:
        """Notes in how many seconds the oldest job of each level is due, as a reply says. ``is_older``: a wake-up has
        come since it was asked for, and may know more.
        """
        known = {level: now + delay for level, delay in (delays or {}).items()}
        if is_older:
            for level, due in (self.levels or {}).items():
                known[level] = min(due, known.get(level, inf))
        self.levels = known or None


class Shard:
    """A shard of a queue. Its name and layout never change."""

    def __init__(
        self,
        client: Client,
        namespace: str,
        queue: str,
        index: int,
        *,
        shards_count: int,
        nonce: str,
        epoch: int = 0,
        load_payload: Callable[[bytes], Any],
        max_payloads: int = 1000,
        max_crash_count: int = 3,
        keeps: str = "",
        session: str = "",
        events: QueueEvents | None = None,
        clock: Clock = clock_now,
    ) -> None:
        self.queue = queue
        self.index = index
        self.epoch = epoch
        self.layout = layout = Layout(shards_count, epoch)
        #: Its queue, and if that was resharded its layout: "Orders", "Orders@1".
        self.layout_name = layout.name(queue)
        self.name = f"{self.layout_name}:{index}"
        self.prefix = layout.prefix(namespace, queue, index)
        #: Its jobs belong to another layout: it is given up once nothing of it is in flight, and never held again.
        self.is_sealed = False
        #: Nobody gets it, as not all jobs have come that belong to it, or Redis has lost that they have.
        self.is_fed = False
        #: It was made for another number of shards than the registry says, which was logged once.
        self.is_miscounted = False
        self.lease = ShardLease(
            client,
            queue,
            self.prefix,
            shards_count=shards_count,
            nonce=nonce,
            max_crash_count=max_crash_count,
            session=session,
            events=events,
            reshard="prepared" if epoch else "",
            clock=clock,
        )
        #: Jobs in flight that are to end: id -> the delivery that they were taken under, and whether they are removed
        #: then; otherwise they wait again. As of the last renewal of the lease; the maintenance loop replaces it whole.
        self.stopping: Mapping[str, tuple[int, bool]] = {}
        self.inflow = ShardInflow()
        self.dispatch = DispatchState()
        self.in_flight = InFlight(self.lease, index, load_payload=load_payload, max_payloads=max_payloads, keeps=keeps)

    def __repr__(self) -> str:
        return self.name

    @property
    def next_due(self) -> float | None:
        """Monotonic time, seconds, at which the oldest waiting job is due; None: nothing waits. For schedulers."""
        return self.dispatch.next_due

    def priority_at(self, now: float) -> int:
        """The most urgent priority of its jobs that are due at that monotonic time. For schedulers."""
        return urgent_level(self.dispatch.levels, now)


@dataclass(slots=True)
class Performing:
    """A batch that is being performed. Replaced as a whole by its performer, read by other threads."""

    shard: Shard
    ids: list[str]
    #: Monotonic.
    since: float

    def __str__(self) -> str:
        ids = ", ".join(self.ids[:3]) + (", ..." if len(self.ids) > 3 else "")
        return f"{self.shard!r} ids {ids} for {clock_now() - self.since:.1f} s"


@dataclass(slots=True)
class Activity:
    """The batches of a performer, a thread or a task, as other threads see them."""

    #: Number of the thread; None: it is a task of an event loop.
    number: int | None
    performing: Performing | None = None
    #: The batch before, and the monotonic time at which it ended.
    performed: tuple[Performing, float] | None = None
    #: For the watchdog alone: the batch that it saw last, and seconds after which it warns of that again.
    seen: tuple[Performing, float] | None = None
    #: For the maintenance loop alone: shard and number of the delivery that it saw last, and how many of its finished
    #: jobs it has acknowledged.
    early: tuple[Shard, int, int] | None = None

    def interrupt_stopping(self) -> None:
        """Interrupts the batch if a job of it is to end. Called by the maintenance loop."""


class Sweeper:
    """Removes what has expired from Redis, also of shards that nobody takes from. ``queues``: options of the queues.

    The holder of a shard sweeps it. Every second it looks at what expires first. If that has expired, it removes
    ``scan_size`` jobs at a time until no more have. A take never hands out what has expired, swept or not.
    """

    def __init__(self, held: Callable[[], Sequence[Shard]], queues: Iterable[QueueOptions], scan_size: int) -> None:
        self._held = held
        #: The bounds of a morgue, as the script has them: seconds, and jobs of a shard.
        self._morgues = {
            options.queue_name: (
                "" if options.morgue_ttl is None else repr(options.morgue_ttl),
                "" if options.morgue_max is None else str(-(-options.morgue_max // options.shards_count)),
            )
            for options in queues
            if options.morgue_ttl is not None or options.morgue_max is not None
        }
        self._scan_size = min(scan_size, MAX_SCAN_SIZE)
        self._next = 0.0
        #: When there will be something to look at: `_next`, or never, as far as is known.
        self._due = inf
        #: Shards of which there is more to be swept at once.
        self._unfinished: list[Shard] = []

    def sweep(self, client: Client, now: float) -> float:
        """Does what is due; returns the monotonic time at which it is to be called again.

        Raises:
            RedisUnavailable
        """
        shards = self._unfinished
        if now >= self._next:
            self._next = now + SWEEP_INTERVAL
            shards = [shard for shard in self._held() if shard.in_flight.has_ttl or shard.queue in self._morgues]
            # Mostly there are none. That there are some is learnt when idle shards are asked anew, or from a take.
            self._due = self._next if shards else inf
        for _ in range(_ROUNDS):
            if not shards:
                self._unfinished = []
                return self._due
            some, shards = shards[:_WRITE], shards[_WRITE:]
            none, size = ("", ""), self._scan_size
            calls = [shard.lease.scripts.sweep(size, *self._morgues.get(shard.queue, none)) for shard in some]
            replies = client.run_many(calls)
            for shard, reply in zip(some, replies, strict=True):
                if isinstance(reply, RedisUnavailable):
                    self._unfinished = []
                if isinstance(reply, Exception):
                    raise reply
                swept: SweepReply = reply
                if swept.more:
                    shards.append(shard)
                events = shard.in_flight.events
                events.jobs_changed("expired", [*map(decode_id, swept.expired_of)], [*swept.expired_of.values()])
                events.jobs_changed("deleted", [*map(decode_id, swept.removed_ids)])
        self._unfinished = shards
        return now


def shards_of(
    client: Client,
    config: Config,
    queue: QueueOptions,
    nonce: str,
    *,
    layout: Layout | None = None,
    node: str = "",
    session: str = "",
    events: QueueEvents | None = None,
    payload_type: PayloadType | None = None,
    clock: Clock = clock_now,
) -> list[Shard]:
    """All shards of a queue in a layout, for a process with that nonce; none of them leased yet. ``layout``: None is
    that of a queue that was never resharded. ``node``: the name of the process. ``session``: of a consumer.
    ``events``: where to emit what is done to jobs. ``payload_type``: how payloads are decoded; None: as the settings
    say.
    """
    layout = layout or Layout(queue.shards_count)
    keeps = ""
    if queue.keep_finished is not None:
        form = "text" if config.dump_error is dump_error else "data"
        keeps = f"{math.ceil(queue.keep_finished * 1000)} {form} {''.join(node.split()) or '-'}"
    return [
        Shard(
            client,
            config.namespace,
            queue.queue_name,
            index,
            shards_count=layout.shards_count,
            nonce=nonce,
            epoch=layout.epoch,
            load_payload=config.load_payload if payload_type is None else payload_type.load,
            max_payloads=queue.max_payloads,
            max_crash_count=queue.max_crash_count,
            keeps=keeps,
            session=session,
            events=events,
            clock=clock,
        )
        for index in range(layout.shards_count)
    ]


def urgent_level(levels: Mapping[int, float] | None, now: float) -> int:
    """The most urgent of the levels that are due; 0 where nothing says so: whatever has come may be urgent."""
    return 0 if levels is None else min((level for level, due in levels.items() if due <= now), default=0)


def log_restored(shard: Shard, lease: Lease | LeaseDenied) -> None:
    """Logs what a call for a lease has found in flight."""
    if lease.restored:
        log.warning(
            "%r: left in flight by an earlier owner and waiting again: %d", shard, lease.restored,
            extra={"event": "restored", "jobs": lease.restored, "queue": shard.queue, "shard": shard.index},
        )  # fmt: skip
    shard.in_flight.note_poisoned(lease.poisoned)


def lag_of(shards: Iterable[Shard], queue: str) -> float | None:
    """The longest lag, in seconds, of the shards of a queue that are held, as far as known; None: none is held."""
    now = clock_now()
    due = [shard.dispatch.next_due for shard in shards if shard.queue == queue and shard.lease.current is not None]
    if not due:
        return None
    return max((now - moment for moment in due if moment is not None and moment < now), default=0.0)


def take_inflow(shards: Iterable[Shard]) -> Inflow | None:
    """The inflow of these shards since the last call; None: it is not known of any."""
    known = [inflow for inflow in (shard.inflow.take() for shard in shards) if inflow is not None]
    if not known:
        return None
    return Inflow(sum(inflow.pushed for inflow in known), sum(inflow.change for inflow in known))
