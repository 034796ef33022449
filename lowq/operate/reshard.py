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

Redis loses in a failover what no replica has received. So each step is confirmed by as many replicas as its primary
has, those included that were lost since the reshard began, before anything goes on from it; otherwise it is written
again, for as long as it takes. That includes the state of an old shard when its first page is read: from then on only
`move_out` changes it, so that the next primary has the same pages.

Everything may end anywhere: whoever begins anew with the same number of shards goes on. A page is the same whenever it
is read, and comes to a new shard once, as that remembers the step. Several may be at it at once: the lease of an old
shard is one's at a time, and what one does late changes nothing. No step touches two shards.
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
from lowq.errors import ConfigError, LeaseLost, RedisRefused, RedisUnavailable, Resharding
from lowq.logs import get_log
from lowq.operate.layout_switch import (
    PATIENCE,
    WRITE,
    LayoutSwitch,
    ReshardProgress,
    Steps,
    count_replicas,
    keys_of,
    runs_of,
)
from lowq.operate.nodes import nodes
from lowq.operate.queues import find_free_epoch, find_layout_before, find_queue, repair_registry, set_layouts
from lowq.operate.walk import read_stats
from lowq.options import QUEUE_OPTIONS, QueueOptions
from lowq.schedules import is_internal
from lowq.sharding import Layout, Layouts
from lowq.shards.in_flight import log_poisoned
from lowq.shards.lease import LeaseDenied, ShardLease, seconds_since_outage
from lowq.store import Call, Command, Subscription
from lowq.store.scripts import time_of
from lowq.store.shard import MoveInReply, OpenReply, PrepareReply, SealReply, ShardScripts
from lowq.store.shard_replies import MoveReply

log = get_log("lowq.reshard")


def reshard(
    backend: Backend, queue: str, shards_count: int, *, by: str = "", unconfirmed: bool = False
) -> Iterator[ReshardProgress]:
    """Gives a queue so many shards, or goes on with that; see above. It goes step by step as it is iterated over. Who
    stops iterating leaves it to be gone on with. ``by``: who does it, for people. ``unconfirmed``: replicas are not
    waited for, and a failover may lose jobs.

    Where the queue has so many shards already, these and those of the layout before are checked. If all is well nothing
    is yielded, unless replicas are waited for.

    Raises:
        ConfigError: shards_count is out of range; the queue is one of lowq's own; or a node is strict about it.
        Resharding: another number of shards is under way. UnknownQueueError. RedisUnavailable, RedisRefused: what was
        done stays done.
    """
    QUEUE_OPTIONS["shards_count"].kind.check(f"queue {queue!r}: ", "shards_count", shards_count)
    if is_internal(queue):
        raise ConfigError(f"queue {queue!r} is one of lowq's own: it has one shard for good")
    layouts = _begin(backend, queue, shards_count, by, unconfirmed)
    if layouts.next is not None:
        return Mover(backend, queue, layouts.current, layouts, unconfirmed).run()
    before = find_layout_before(backend, queue, layouts.current)
    return iter(()) if before is None else Mover(backend, queue, before, layouts, unconfirmed).run()


def reshard_progress(backend: Backend, queue: str) -> ReshardProgress | None:
    """How far the reshard of a queue is that is under way, whoever does it; None: none is. ``jobs_moved`` is not known.

    Raises:
        UnknownQueueError, RedisUnavailable
    """
    layouts = find_queue(backend, queue).layouts
    if layouts.next is None:
        return None
    stats = read_stats(backend.client, layouts.current.prefixes(backend.config.namespace, queue), None)
    held = tuple(i for i, each in enumerate(stats) if each.sealed and not each.moved and each.taken)
    left = sum(each.length + each.taken + each.morgue_length for each in stats)
    moved = sum(each.moved for each in stats)
    return ReshardProgress(queue, layouts.current, layouts.next, moved, 0, held, jobs_left=left, facts=layouts.facts)


def _begin(backend: Backend, queue: str, shards_count: int, by: str, unconfirmed: bool) -> Layouts:
    """Enters the reshard in the registry, unless it is there already. Returns the layouts; without a next one the queue
    has so many shards.
    """
    while True:
        layouts = repair_registry(backend, queue)
        if layouts.next is not None and layouts.next.shards_count != shards_count:
            count = layouts.next.shards_count
            raise Resharding(
                f"queue {queue!r} is being resharded to {count} shards: let that end first, or go on with it: "
                f"lowq reshard {queue} {count}"
            )
        if layouts.next is not None or layouts.current.shards_count == shards_count:
            backend.registrations.note_layouts(queue, layouts)
            return layouts
        for node in nodes(backend):
            if node.strict and queue in node.queues:
                raise ConfigError(
                    f"queue {queue!r} can't be resharded: {node.kind} {node.name} serves it and is strict about the "
                    "number of shards (strict_shards_count), so it would end. Stop it first, or start it without that"
                )
        facts: dict[str, Any] = {"began_at": round(time_of(backend.client.command("TIME")), 3), "by": by[:200]}
        following = Layout(shards_count, find_free_epoch(backend, queue, layouts.current, shards_count))
        if not unconfirmed:
            counts = count_replicas(backend, keys_of(backend, queue, layouts.current, following))
            if replicas := runs_of(counts):
                facts["replicas"] = replicas
        begun = Layouts(layouts.current, following, facts)
        if set_layouts(backend, queue, layouts, begun):
            log.info(
                "queue %r is resharded from %d shards to %d", queue, layouts.current.shards_count, shards_count,
                extra={"event": "reshard", "queue": queue},
            )  # fmt: skip
            return begun


# --- the mover ---

#: Old shards whose pages are moved in one write: Redis works what one client wrote in one piece.
TOGETHER = 3
#: So often a shard answers `NOT_FED` until it is taken for lost: its jobs may have been moved by another at first.
_NOT_FED_TIMES = 3
#: Seconds between two looks whether a holder has given its shard up, should its message have been lost.
LOOK_SECONDS = 0.5


@dataclass(slots=True, eq=False)
class _Old:
    """A shard whose jobs are moved."""

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
        """Moves all jobs, and says how far it is."""
        is_over = self.layouts.next is None
        try:
            if not is_over:
                yield self.progress
                yield from self.write_layouts(Layouts(self.before), self.layouts)
                yield from self._prepare_shards(self.prefixes(self.after))
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
                # Unless another one has ended it.
                yield from self.write_layouts(self.layouts, Layouts(self.after))
                self.note(is_done=True)
            if self.progress.is_done:
                yield self.note(waits_for=())
        finally:
            self.backend.registrations.forget()

    # --- new shards ---

    def _prepare_shards(self, prefixes: Sequence[str]) -> Steps:
        """Prepares these shards of the next layout, paused if the queue is. Returns the replies of `prepare_shard`."""
        paused = self._find_pause()
        replies: list[int] = yield from self.run_confirmed(
            [ShardScripts(prefix).prepare(self.after.shards_count, *paused) for prefix in prefixes]
        )
        # A producer prepares what Redis has lost without knowing of a pause.
        written = paused if 2 not in replies else (b"", b"")
        fed = [prefix for prefix, reply in zip(prefixes, replies, strict=True) if reply]
        # Whoever pauses or resumes since the reshard was entered does so with the old shards first, then with the new
        # ones: what was written over theirs just now is seen here. From then on only they change it.
        while True:
            if paused != written:
                at, by = written = paused
                self.run_all([ShardScripts(prefix).pause(bool(at), by, now=at) for prefix in fed])
            paused = self._find_pause()
            if paused == written:
                return replies

    def _find_pause(self) -> tuple[bytes, bytes]:
        """Since when the queue is paused, and who did that; empty: it is not."""
        prefixes = self.prefixes(self.layouts.current)
        found = self.read_metas(prefixes, "paused", "paused_by")
        return min(((at, by or b"") for at, by in found if at is not None), default=(b"", b""))

    # --- the check ---

    def _check(self) -> Steps:
        """Has replicas confirm that all old shards are moved and all new ones open. Returns the classes of which that
        is not so, as Redis has lost it, or as nobody has moved them.
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
                yield from self._open(olds[number :: self._classes], self._new_shards(number))
        return left

    def _new_shards(self, number: int) -> range:
        return range(number, self.after.shards_count, self._classes)

    # --- one class ---

    def _move_class(self, number: int) -> Steps:
        olds = [self._old(index) for index in range(number, self.before.shards_count, self._classes)]
        if not self.patiently(self.is_wanted):
            return
        yield from self._seal(olds, number)
        subscription = self.client.subscribe()
        try:
            waiting = [old for old in olds if not old.is_moved]
            self._say(olds)
            subscription.add(f"{old.prefix}lease_released" for old in waiting)
            said_at = answered_at = monotonic()
            while waiting:
                try:
                    yield from self._acquire(waiting, number)
                    held = [old for old in waiting if old.lease.current is not None]
                    yield from self._move(held[:TOGETHER], number)
                    self._renew(held)
                    answered_at = monotonic()
                except RedisUnavailable:
                    self._away_at = monotonic()
                    if monotonic() - answered_at >= PATIENCE:
                        raise
                    time.sleep(random.uniform(0.1, 0.3))
                has_moved = any(old.is_moved for old in waiting)
                waiting = [old for old in waiting if not old.is_moved]
                if has_moved or monotonic() - said_at >= LOOK_SECONDS:
                    said_at = monotonic()
                    self._say(olds)
                    yield self.progress
                if waiting and not any(old.lease.current is not None for old in waiting):
                    self._wait(subscription, waiting)
        finally:
            subscription.close()
            self._give_up(olds)
        yield from self._open(olds, self._new_shards(number))
        self._say(olds)
        yield self.progress

    def _say(self, olds: Sequence[_Old]) -> None:
        self._moved.update(old.index for old in olds if old.is_moved)
        waits_for = tuple(old.index for old in olds if not old.is_moved and old.lease.current is None)
        self.note(shards_moved=len(self._moved), waits_for=waits_for)

    def _old(self, index: int) -> _Old:
        prefix = self.prefix(self.before, index)
        lease = ShardLease(
            self.client, self.queue, prefix, shards_count=self.before.shards_count, nonce=self._nonce,
            max_crash_count=self._max_crash_count, reshard="moves",
        )  # fmt: skip
        return _Old(index, prefix, lease)

    def _seal_call(self, old: _Old, done: int) -> Call[Any]:
        count, after = self.before.shards_count, self.after
        return ShardScripts(old.prefix).seal(count, after.shards_count, after.epoch, done)

    def _seal(self, olds: Sequence[_Old], number: int) -> Steps:
        """Seals old shards of the class with that number."""
        # Should Redis have lost a seal, what is moved with the next one must not be taken for what has come.
        fields = ["came", *(f"moved:{old.index}" for old in olds)]
        prefixes = [self.prefix(self.after, shard) for shard in self._new_shards(number)]
        found = self.read_metas(prefixes, *fields)
        done = max((int(step) for steps in found for step in steps if step is not None), default=0)
        replies = yield from self.run_confirmed([self._seal_call(old, done) for old in olds])
        for old, reply in zip(olds, replies, strict=True):
            old.is_moved = reply is SealReply.MOVED

    def _acquire(self, waiting: Sequence[_Old], number: int) -> Steps:
        """Tries for the leases of these shards: what a dead holder left in flight waits again with that."""
        now = monotonic()
        some = [old for old in waiting if old.lease.current is None and old.try_at <= now]
        unsealed: list[_Old] = []
        for start in range(0, len(some), WRITE):
            unsealed += self._acquire_some(some[start : start + WRITE])
        if unsealed:
            # Redis has lost the seals, in a failover to a replica that was behind.
            if self.is_wanted():
                yield from self._seal(unsealed, number)
            else:
                for old in unsealed:
                    old.is_moved = True

    def _acquire_some(self, some: Sequence[_Old]) -> list[_Old]:
        """Returns those that have to be sealed anew. As among nodes: when Redis was away all leases have run out though
        their holders live, so these come first, and what they have in flight is not charged with a crash.
        """
        # What is asked of a frozen Redis is carried out when that goes on, before its holder renews a lease that ran
        # out meanwhile. So only what had no holder just before is charged.
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
        unsealed: list[_Old] = []
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

    def _renew(self, held: Sequence[_Old]) -> None:
        now = monotonic()
        some = [old for old in held if old.renew_at <= now and not old.is_moved and old.lease.current is not None]
        calls = [old.lease.renew_call(self._lease_ttl) for old in some]
        for start in range(0, len(calls), WRITE):
            part = some[start : start + WRITE]
            for old, reply in zip(part, self.client.run_many(calls[start : start + WRITE]), strict=True):
                if isinstance(reply, LeaseLost):
                    old.lease.lose()
                elif isinstance(reply, Exception):
                    raise reply
                else:
                    old.renew_at = now + self._lease_ttl / 3

    def _wait(self, subscription: Subscription, waiting: Sequence[_Old]) -> None:
        """Until a holder gives its shard up, or for a moment."""
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

    def _move(self, olds: Sequence[_Old], number: int) -> Steps:
        """One page of each of these shards, of the class with that number."""
        if not olds:
            return
        asks = [ShardScripts(old.prefix).move_out(old.lease.token, old.done) for old in olds]
        if all(old.is_confirmed for old in olds):
            replies = self.client.run_many(asks)
        else:
            replies = yield from self.run_confirmed(asks)
        calls: list[Call[Any]] = []
        pages: list[tuple[_Old, MoveReply, list[Call[Any]]]] = []
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
            own = self._move_in_calls(old, page, number)
            calls += own
            pages.append((old, page, own))
        came = iter((yield from self.run_confirmed(calls)))
        for old, page, own in pages:
            not_fed = [call.key for call in own if next(came) is MoveInReply.NOT_FED]
            if not_fed and (yield from self._prepare_lost(not_fed)):
                continue
            if not_fed:
                # Its lease was lost, and another one has moved all of it and opened them. If not, nothing of it is
                # deleted.
                self._note_not_fed(old, not_fed[0])
                continue
            old.not_fed = 0
            # An id comes in several steps if it is large, and is counted with each of them.
            old.done = page.step
            self.note(jobs_moved=self.progress.jobs_moved + page.jobs)

    def _prepare_lost(self, prefixes: Sequence[str]) -> Steps:
        """Prepares shards of the next layout anew, of which Redis has nothing any more, as in a failover to a replica
        that was behind; whether all of these were. One that was opened meanwhile stays so.

        Raises:
            UnknownQueueError, Resharding: the queue was dropped meanwhile.
        """
        if not self.patiently(self.is_wanted):
            return False
        replies = yield from self._prepare_shards(prefixes)
        lost = [prefix for prefix, reply in zip(prefixes, replies, strict=True) if reply is PrepareReply.FED]
        if lost:
            log.warning(
                "queue %r: Redis has lost shards of the next layout, as in a failover, with what no replica had of "
                "them; they are prepared anew: %s", self.queue, ", ".join(lost),
                extra={"event": "reshard_prepared_anew", "queue": self.queue},
            )  # fmt: skip
        return all(replies)

    def _note_not_fed(self, old: _Old, prefix: str) -> None:
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

    def _move_in_calls(self, old: _Old, page: MoveReply, number: int) -> list[Call[Any]]:
        """The calls with which the items of a page come to the shards that they belong to."""
        groups: defaultdict[int, list[tuple[bytes, bytes, Any]]] = defaultdict(list)
        for item in page.items:
            # Counters belong to no id: they go to the first shard of the class.
            groups[number if page.kind == b"rest" else self.after.shard_of(item[0])].append(item)
        return [
            ShardScripts(self.prefix(self.after, shard)).move_in(old.index, page, items)
            for shard, items in groups.items()
        ]

    # --- the end of a class ---

    def _give_up(self, olds: Sequence[_Old]) -> None:
        held = [old for old in olds if old.lease.current is not None]
        if held:
            self.client.run_many([old.lease.surrender_call(0.0) for old in held])
            for old in held:
                old.lease.lose()

    def _open(self, olds: Sequence[_Old], shards: range) -> Steps:
        prefixes = [self.prefix(self.after, shard) for shard in shards]
        replies = [OpenReply.ABSENT]
        while OpenReply.ABSENT in replies:
            fields = ("clock", "server_time", "server_time_since", "fence", "paused", "step")
            found = self.read_metas([old.prefix for old in olds], *fields)
            news = self.read_metas(prefixes, "shards_count", "fed", "paused")
            is_paused = any(state[4] is not None for state in found)
            if any(count is None or (fed and is_paused and paused is None) for count, fed, paused in news):
                # Lost since the last of its jobs came, or prepared by a producer, who knows of no pause.
                yield from self._prepare_lost(prefixes)
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
