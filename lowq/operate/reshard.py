"""Changes the number of shards of a queue while it is used: its jobs are moved to the shards of another layout.

::

    begin     the registry says that a reshard is under way: nodes and producers learn of the next layout. Its epoch is
              one that no shard was ever made for
    prepare   all shards of it: they accept pushes, and nothing is taken of them
    class by class (the shards that are congruent modulo gcd(N, M): only among these do jobs move)
      seal    its old shards: pushes are sent on, the holder finishes what is in flight and gives the lease up
      move    with the lease of the old shard, page by page: move_out (read a page, when the last one has come)
              -> move_in (to each new shard that jobs of it belong to) -> move_out ...
      open    its new shards: nodes take them
    check     every old shard once more: sealed and moved; every new one: open. Otherwise its class again
    end       the registry says the next layout; what is left of an old shard sends on who comes late

Each step is confirmed by replicas (`layout_switch`). That includes the state of an old shard when its first page is
read: from then on only `move_out` changes it, so that the next primary has the same pages.

A mover may die anywhere: the next one with the same number of shards goes on. A page is the same whenever it is read,
and comes to a new shard once, as that remembers the step. Several movers may run at once: only one has the lease of an
old shard, and late writes of another change nothing. No step touches two shards.
"""

import math
import random
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lowq.backend import Backend
from lowq.clock import now as monotonic
from lowq.errors import ConfigError, LeaseLost, RedisRefused, RedisUnavailable
from lowq.logs import get_log
from lowq.operate.layout_switch import PATIENCE, WRITE, LayoutSwitch, ReshardProgress, Steps, begin_reshard
from lowq.operate.queues import find_layout_before, find_queue, repair_registry
from lowq.operate.walk import answers
from lowq.options import QUEUE_OPTIONS, QueueOptions
from lowq.schedules import is_internal
from lowq.sharding import Layout, Layouts
from lowq.shards.delivery import log_poisoned
from lowq.shards.lease import LeaseDenied, ShardLease, seconds_since_outage
from lowq.store import Call, Command, Subscription
from lowq.store.shard import MoveInReply, MoveReply, OpenReply, SealReply, ShardScripts

log = get_log("lowq.reshard")


def _repair_first(
    progress: ReshardProgress,
    repair: Iterator[ReshardProgress],
    backend: Backend,
    queue: str,
    shards_count: int,
    by: str,
    unconfirmed: bool,
) -> Iterator[ReshardProgress]:
    """Puts the layout before right, and begins the reshard then."""
    yield progress
    yield from repair
    yield from reshard(backend, queue, shards_count, by=by, unconfirmed=unconfirmed)


def reshard(
    backend: Backend, queue: str, shards_count: int, *, by: str = "", unconfirmed: bool = False
) -> Iterator[ReshardProgress]:
    """Gives a queue so many shards, or goes on with that; see above. It goes step by step as it is iterated over, and
    whoever calls it next goes on where the iteration has ended. ``by``: who does it, for people. ``unconfirmed``:
    replicas are not waited for, and a failover may lose jobs.

    Where the queue has so many shards already, these and those of the layout before are checked. If all is well nothing
    is yielded, unless replicas are waited for. They are checked and put right before another reshard begins, too.

    Raises:
        ConfigError: shards_count is out of range; the queue is one of lowq's own; or a node is strict about it.
        Resharding: another number of shards is under way. UnknownQueueError. RedisUnavailable, RedisRefused: what was
        done stays done.
    """
    QUEUE_OPTIONS["shards_count"].kind.check(f"queue {queue!r}: ", "shards_count", shards_count)
    if is_internal(queue):
        raise ConfigError(f"queue {queue!r} is one of lowq's own: it has one shard for good")
    present = repair_registry(backend, queue)
    if present.next is None and present.current.shards_count != shards_count:
        # A failover may have brought jobs back to the layout before. Once there is another, no reshard looks there.
        earlier = find_layout_before(backend, queue, present.current)
        repair: Iterator[ReshardProgress] = (
            iter(()) if earlier is None else Mover(backend, queue, earlier, present, unconfirmed).run()
        )
        if (progress := next(repair, None)) is not None:
            return _repair_first(progress, repair, backend, queue, shards_count, by, unconfirmed)
    layouts = begin_reshard(backend, queue, shards_count, by, unconfirmed)
    if layouts.next is not None:
        return Mover(backend, queue, layouts.current, layouts, unconfirmed).run()
    before = find_layout_before(backend, queue, layouts.current)
    return iter(()) if before is None else Mover(backend, queue, before, layouts, unconfirmed).run()


# --- the mover ---

#: Old shards whose pages are moved in one write: Redis works what one client wrote in one piece.
TOGETHER = 3
#: Replies `NOT_FED` in a row after which a shard counts as lost: at first another mover may have opened it.
_NOT_FED_TIMES = 3
#: Seconds between two looks whether a holder has given its shard up: its message may be lost.
LOOK_SECONDS = 0.5


@dataclass(slots=True, eq=False)
class _OldShard:
    """A shard of the layout before, whose jobs are moved."""

    index: int
    prefix: str
    lease: ShardLease
    #: The last step whose jobs have come to where they belong.
    done: int = 0
    #: Whether replicas have the state that its pages are read of.
    is_confirmed: bool = False
    is_moved: bool = False
    #: How often in a row a shard that its jobs belong to was not fed.
    not_fed: int = 0
    #: Monotonic: when the lease is to be renewed, and tried for.
    renew_at: float = 0.0
    try_at: float = 0.0


class Mover(LayoutSwitch):
    """Moves all jobs of a reshard, class by class."""

    def __init__(self, backend: Backend, queue: str, before: Layout, layouts: Layouts, unconfirmed: bool) -> None:
        super().__init__(backend, queue, before, layouts, unconfirmed)
        self._classes = math.gcd(before.shards_count, self.after.shards_count)
        self._lease_ttl = backend.config.lease_ttl
        self._nonce = secrets.token_hex(8)
        entry = find_queue(backend, queue)
        options = QueueOptions(queue, before.shards_count).registered(entry.options)
        self._max_crash_count = options.max_crash_count
        #: The old shards that were moved.
        self._moved: set[int] = set()
        self._began_at = monotonic()
        #: When Redis was last known to be away, monotonic.
        self._away_at = -math.inf

    def run(self) -> Iterator[ReshardProgress]:
        """Moves all jobs, and yields its progress."""
        is_over = self.layouts.next is None
        try:
            if not is_over:
                yield self.progress
                yield from self.write_layouts(Layouts(self.before), self.layouts)
                yield from self.prepare_shards(self.prefixes(self.after))
                for number in range(self._classes):
                    yield from self._move_class(number)
            while self.patiently(self.is_wanted) and (left := (yield from self._check())):
                if is_over:
                    log.warning(
                        "queue %r: shards of the layout before were not moved whole, as Redis has lost that they were, "
                        "or jobs came since; this is done now", self.queue,
                        extra={"event": "reshard_repaired", "queue": self.queue},
                    )  # fmt: skip
                for number in left:
                    yield from self._move_class(number)
                    self.note(is_done=is_over)
            if not is_over:
                # Unless another mover has ended it.
                yield from self.write_layouts(self.layouts, Layouts(self.after))
                self.note(is_done=True)
            if self.progress.is_done:
                yield self.note(waits_for=())
        finally:
            self.backend.registrations.forget()

    # --- the check ---

    def _check(self) -> Steps:
        """Has replicas confirm that all old shards are moved and all new ones open. Returns the other classes: nobody
        has moved them, or Redis has lost that.
        """
        olds = [self._old(index) for index in range(self.before.shards_count)]
        states = self.read_metas([old.prefix for old in olds], "sealed", "moved")
        for old, (sealed, moved) in zip(olds, states, strict=True):
            old.is_moved = bool(sealed and moved)
        replies = yield from self.run_confirmed([self._seal_call(old, 0) for old in olds if old.is_moved])
        for old, reply in zip([old for old in olds if old.is_moved], replies, strict=True):
            old.is_moved = reply is SealReply.MOVED
        left = sorted({old.index % self._classes for old in olds if not old.is_moved})
        for number in range(self._classes):
            if number not in left:
                yield from self._open(olds[number :: self._classes])
        return left

    def _new_shards(self, old: _OldShard) -> range:
        """The shards of the next layout in the class of an old one."""
        return range(old.index % self._classes, self.after.shards_count, self._classes)

    # --- one class ---

    def _move_class(self, number: int) -> Steps:
        olds = [self._old(index) for index in range(number, self.before.shards_count, self._classes)]
        if not self.patiently(self.is_wanted):
            return
        yield from self._seal(olds)
        subscription = self.client.subscribe()
        try:
            waiting = [old for old in olds if not old.is_moved]
            self._note_moved(olds)
            subscription.add(f"{old.prefix}lease_released" for old in waiting)
            noted_at = answered_at = monotonic()
            while waiting:
                try:
                    yield from self._acquire(waiting)
                    held = [old for old in waiting if old.lease.current is not None]
                    yield from self._move_pages(held[:TOGETHER])
                    self._renew(held)
                    answered_at = monotonic()
                except RedisUnavailable:
                    self._away_at = monotonic()
                    if monotonic() - answered_at >= PATIENCE:
                        raise
                    time.sleep(random.uniform(0.1, 0.3))
                has_moved = any(old.is_moved for old in waiting)
                waiting = [old for old in waiting if not old.is_moved]
                if has_moved or monotonic() - noted_at >= LOOK_SECONDS:
                    noted_at = monotonic()
                    yield self._note_moved(olds)
                if waiting and not any(old.lease.current is not None for old in waiting):
                    self._wait(subscription, waiting)
        finally:
            subscription.close()
            self._give_up(olds)
        yield from self._open(olds)
        yield self._note_moved(olds)

    def _note_moved(self, olds: Sequence[_OldShard]) -> ReshardProgress:
        self._moved.update(old.index for old in olds if old.is_moved)
        waits_for = tuple(old.index for old in olds if not old.is_moved and old.lease.current is None)
        return self.note(shards_moved=len(self._moved), waits_for=waits_for)

    def _old(self, index: int) -> _OldShard:
        prefix = self.prefix(self.before, index)
        lease = ShardLease(
            self.client, self.queue, prefix, shards_count=self.before.shards_count, nonce=self._nonce,
            max_crash_count=self._max_crash_count, reshard="moves",
        )  # fmt: skip
        return _OldShard(index, prefix, lease)

    def _seal_call(self, old: _OldShard, done: int) -> Call[Any]:
        count, after = self.before.shards_count, self.after
        return ShardScripts(old.prefix).seal(count, after.shards_count, after.epoch, done)

    def _seal(self, olds: Sequence[_OldShard]) -> Steps:
        """Seals old shards of one class."""
        # Should Redis have lost a seal, what is moved with the next one must not be taken for what has come.
        fields = ["came", *(f"moved:{old.index}" for old in olds)]
        prefixes = [self.prefix(self.after, shard) for shard in self._new_shards(olds[0])]
        found = self.read_metas(prefixes, *fields)
        done = max((int(step) for steps in found for step in steps if step is not None), default=0)
        replies = yield from self.run_confirmed([self._seal_call(old, done) for old in olds])
        for old, reply in zip(olds, replies, strict=True):
            old.is_moved = reply is SealReply.MOVED

    def _acquire(self, waiting: Sequence[_OldShard]) -> Steps:
        """Tries for the leases of these shards. Jobs that a dead holder left in flight wait again with that."""
        now = monotonic()
        some = [old for old in waiting if old.lease.current is None and old.try_at <= now]
        unsealed: list[_OldShard] = []
        for start in range(0, len(some), WRITE):
            unsealed += self._acquire_some(some[start : start + WRITE])
        if unsealed:
            # Redis has lost the seals, in a failover to a replica that was behind.
            if self.is_wanted():
                yield from self._seal(unsealed)
            else:
                for old in unsealed:
                    old.is_moved = True

    def _acquire_some(self, some: Sequence[_OldShard]) -> list[_OldShard]:
        """Returns the shards that have to be sealed anew. As among nodes: when Redis was away all leases have run out
        though their holders live, so these get a head start, and their jobs in flight are not charged with a crash.
        """
        # A frozen Redis carries out a call when it goes on, before the holder renews a lease that ran out meanwhile. So
        # only shards without a holder just before are charged.
        sent = monotonic()
        looks = [Command(old.prefix, "GET", f"{old.prefix}lease") for old in some]
        are_free: list[bool] = []
        for holder in self.client.run_many(looks, repeats=0):
            if isinstance(holder, Exception):
                raise holder
            are_free.append(holder is None)
        now = monotonic()
        if now - sent > self._lease_ttl / 3:
            self._away_at = now
        age = self.client.server_age()
        back = seconds_since_outage(now, self._away_at, self._began_at, age)
        if back < self._lease_ttl / 3:
            for old in some:
                old.try_at = now + self._lease_ttl / 3 - back
            return []
        charge = back > self._lease_ttl and age > self._lease_ttl
        calls = [
            old.lease.acquire_call(self._lease_ttl, charge=charge and is_free)
            for old, is_free in zip(some, are_free, strict=True)
        ]
        unsealed: list[_OldShard] = []
        for old, reply in zip(some, self.client.run_many(calls, repeats=0), strict=True):
            lease = old.lease.acquired(reply, now + self._lease_ttl)
            log_poisoned(self.queue, old.index, lease.poisoned)
            if isinstance(lease, LeaseDenied):
                old.try_at = now + min(max(lease.seconds, 0.01), LOOK_SECONDS)
                if lease.is_unsealed:
                    unsealed.append(old)
            else:
                old.is_confirmed = False
                old.renew_at = now + self._lease_ttl / 3
        return unsealed

    def _renew(self, held: Sequence[_OldShard]) -> None:
        now = monotonic()
        some = [old for old in held if old.renew_at <= now and not old.is_moved and old.lease.current is not None]
        calls = [old.lease.renew_call(self._lease_ttl) for old in some]
        for old, reply in zip(some, answers(self.client, calls, WRITE), strict=True):
            if isinstance(reply, LeaseLost):
                old.lease.lose()
            elif isinstance(reply, Exception):
                raise reply
            else:
                old.renew_at = now + self._lease_ttl / 3

    def _wait(self, subscription: Subscription, waiting: Sequence[_OldShard]) -> None:
        """Waits until a holder gives its shard up, or for a moment."""
        seconds = min(old.try_at for old in waiting) - monotonic()
        if seconds <= 0:
            return
        try:
            if subscription.get(min(seconds, LOOK_SECONDS)) is not None:
                for old in waiting:
                    old.try_at = 0.0
        except RedisUnavailable:
            time.sleep(min(seconds, 0.1))

    # --- a step ---

    def _move_pages(self, olds: Sequence[_OldShard]) -> Steps:
        """Moves one page of each of these shards."""
        if not olds:
            return
        asks = [ShardScripts(old.prefix).move_out(old.lease.token, old.done) for old in olds]
        if all(old.is_confirmed for old in olds):
            replies = self.client.run_many(asks)
        else:
            replies = yield from self.run_confirmed(asks)
        calls: list[Call[Any]] = []
        pages: list[tuple[_OldShard, MoveReply, list[Call[Any]]]] = []
        for old, reply in zip(olds, replies, strict=True):
            if isinstance(reply, LeaseLost):
                old.lease.lose()
                continue
            if isinstance(reply, Exception):
                raise reply
            old.is_confirmed = True
            page: MoveReply = reply
            if page.kind == b"end":
                old.is_moved = True
                continue
            own = self._move_in_calls(old, page)
            calls += own
            pages.append((old, page, own))
        came = iter((yield from self.run_confirmed(calls)))
        for old, page, own in pages:
            not_fed = [call.key for call in own if next(came) is MoveInReply.NOT_FED]
            if not_fed and (yield from self.prepare_lost_shards(not_fed)):
                continue
            if not_fed:
                # The lease was lost, and another mover has moved all of it and opened the new shards. If it has not,
                # nothing is deleted.
                self._note_not_fed(old, not_fed[0])
                continue
            old.not_fed = 0
            # An id comes in several steps if it is large, and is counted with each of them.
            old.done = page.step
            self.note(jobs_moved=self.progress.jobs_moved + page.jobs)

    def _note_not_fed(self, old: _OldShard, prefix: str) -> None:
        old.not_fed += 1
        if old.not_fed == _NOT_FED_TIMES:
            raise RedisRefused(
                f"queue {self.queue!r}: a shard of the next layout is open, and shard {old.index} has jobs for it: "
                "Redis has lost how far that one was moved, as in a failover. Nothing more was moved. To have these "
                "jobs merged with what waits there, also if they were performed: "
                f"redis-cli -c HSET '{prefix}meta' fed 1; and go on with: "
                f"lowq reshard {self.queue} {self.after.shards_count}"
            )
        old.lease.lose()
        old.try_at = monotonic() + LOOK_SECONDS

    def _move_in_calls(self, old: _OldShard, page: MoveReply) -> list[Call[Any]]:
        """The calls that bring the items of a page to the shards that they belong to."""
        groups: defaultdict[int, list[tuple[bytes, bytes, Any]]] = defaultdict(list)
        first, *_ = self._new_shards(old)
        for item in page.items:
            # Counters belong to no id: they go to the first shard of the class.
            groups[first if page.kind == b"rest" else self.after.shard_of(item[0])].append(item)
        return [
            ShardScripts(self.prefix(self.after, shard)).move_in(old.index, page, items)
            for shard, items in groups.items()
        ]

    # --- the end of a class ---

    def _give_up(self, olds: Sequence[_OldShard]) -> None:
        held = [old for old in olds if old.lease.current is not None]
        if held:
            self.client.run_many([old.lease.surrender_call(0.0) for old in held])
            for old in held:
                old.lease.lose()

    def _open(self, olds: Sequence[_OldShard]) -> Steps:
        """Opens the new shards of the class of these old ones, behind all clocks, fences and steps of theirs."""
        prefixes = [self.prefix(self.after, shard) for shard in self._new_shards(olds[0])]
        replies = [OpenReply.ABSENT]
        while OpenReply.ABSENT in replies:
            fields = ("clock", "server_time", "server_time_since", "fence", "paused", "step")
            found = self.read_metas([old.prefix for old in olds], *fields)
            news = self.read_metas(prefixes, "shards_count", "fed", "paused")
            is_paused = any(state[4] is not None for state in found)
            if any(count is None or (fed and is_paused and paused is None) for count, fed, paused in news):
                # Lost since its last job came, or prepared by a producer, which knows of no pause.
                yield from self.prepare_lost_shards(prefixes)
            clock = max((state[0] for state in found if state[0]), key=float, default=b"")
            server_time, since = max(
                ((state[1], state[2] or b"") for state in found if state[1]), key=lambda pair: float(pair[0]),
                default=(b"", b""),
            )  # fmt: skip
            fence = max((state[3] for state in found if state[3]), key=int, default=b"")
            step = max((state[5] for state in found if state[5]), key=int, default=b"0")
            opens = [ShardScripts(prefix).open(clock, server_time, since, fence, step) for prefix in prefixes]
            replies = yield from self.run_confirmed(opens)
            if OpenReply.ABSENT in replies and not self.patiently(self.is_wanted):
                return
