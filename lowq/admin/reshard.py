"""Changes the number of shards of a queue while it is used: its jobs are moved to the shards of another layout.

::

    begin     the registry says that a reshard is under way: nodes and producers learn of the next layout
    prepare   all shards of it: they accept pushes, and nothing is taken of them
    class by class (the shards that are congruent modulo gcd(N, M): only among these do jobs move)
      seal    its old shards: pushes are sent on, the holder finishes what is in flight and gives the lease up
      move    with the lease of the old shard, page by page: move_out (read a page, when the last one has come)
              -> move_in (to each new shard that jobs of it belong to) -> move_out ...
      open    its new shards: nodes take them
    end       the registry says the next layout; what is left of an old shard sends on who comes late

Everything may end anywhere: whoever begins anew with the same number of shards goes on. A page is the same whenever it
is read, and comes to a new shard once, as that remembers the step. Several may be at it at once: the lease of an old
shard is one's at a time, and what one does late changes nothing. No step touches two shards.
"""

import json
import math
import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lowq.backend import Backend
from lowq.broker.in_flight import log_poisoned
from lowq.broker.lease import LeaseDenied, ShardLease
from lowq.clock import now as monotonic
from lowq.errors import ConfigError, LeaseLost, RedisRefused, RedisUnavailable, Resharding
from lowq.inspection.calls import read_stats
from lowq.inspection.registry import find_entry, find_queue, nodes
from lowq.logs import get_log
from lowq.queue_options import QueueOptions, check_whole
from lowq.schedules import is_internal
from lowq.sharding import Layout, Layouts
from lowq.store import Call, Client, Command, NotConfirmed, Subscription, Wait
from lowq.store.keys import nodes_key, queues_key
from lowq.store.scripts import time_of

log = get_log("lowq.reshard")

#: Old shards whose pages are moved in one write: Redis works what one client wrote in one piece.
TOGETHER = 3
#: What `move_in` answers where nothing is expected.
_NOT_FED = 2
#: So often a shard answers that until it is taken for lost: its jobs may have been moved by another at first.
_NOT_FED_TIMES = 3
#: Short calls in one write.
_WRITE = 200
#: Seconds between two looks whether a holder has given its shard up, should its message have been lost.
LOOK_SECONDS = 0.5
#: What the primaries of a cluster are to confirm of seals, and of jobs that have come to another shard, and for how
#: many seconds they are not asked again when one did not.
CONFIRMATION, UNCONFIRMED_SECONDS = Wait("replicated", 1.0), 10.0
#: Seconds without any answer of Redis after which the command ends. It may be begun anew.
PATIENCE = 30.0


@dataclass(frozen=True, slots=True)
class ReshardProgress:
    """How far a reshard is."""

    queue: str
    before: Layout
    after: Layout
    #: Shards of the layout before whose jobs were all moved, by whomever.
    shards_moved: int = 0
    #: Jobs, waiting or buried, that this process has moved.
    jobs_moved: int = 0
    #: Shards whose holders have not given them up yet: they finish what is in flight.
    waits_for: tuple[int, ...] = ()
    #: The queue has the layout after.
    is_done: bool = False
    #: Jobs in shards of the layout before, as far as they were asked for.
    jobs_left: int | None = None
    #: What the registry says of it: who began it (``by``) and when (``began_at``, Unix time, seconds), as far as asked.
    facts: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def shards_count(self) -> int:
        """How many shards are to be moved in all."""
        return self.before.shards_count


def reshard(backend: Backend, queue: str, shards_count: int, *, by: str = "") -> Iterator[ReshardProgress]:
    """Gives a queue so many shards, or goes on with that; see above. It goes step by step as it is iterated over. Who
    stops iterating leaves it to be gone on with. ``by``: who does it, for people.

    Where the queue has so many shards already nothing is done, and nothing is yielded.

    Raises:
        ConfigError: shards_count is out of range; the queue is one of lowq's own; or a node is strict about it.
        Resharding: another number of shards is under way. UnknownQueueError. RedisUnavailable, RedisRefused: what was
        done stays done.
    """
    check_whole(f"queue {queue!r}", "shards_count", shards_count)
    if is_internal(queue):
        raise ConfigError(f"queue {queue!r} is one of lowq's own: it has one shard for good")
    layouts = _begin(backend, queue, shards_count, by)
    return iter(()) if layouts.next is None else _Mover(backend, queue, layouts.current, layouts.next).run()


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


# --- the registry ---


def _begin(backend: Backend, queue: str, shards_count: int, by: str) -> Layouts:
    """Enters the reshard in the registry, unless it is there already. Returns the layouts; without a next one the queue
    has so many shards.
    """
    while True:
        layouts = find_queue(backend, queue).layouts
        if layouts.next is not None and layouts.next.shards_count != shards_count:
            count = layouts.next.shards_count
            raise Resharding(
                f"queue {queue!r} is being resharded to {count} shards: let that end first, or go on with it: "
                f"lowq reshard {queue} {count}"
            )
        if layouts.next is not None or layouts.current.shards_count == shards_count:
            backend.note_layouts(queue, layouts)
            return layouts
        for node in nodes(backend):
            if node.strict and queue in node.queues:
                raise ConfigError(
                    f"queue {queue!r} can't be resharded: {node.kind} {node.name} serves it and is strict about the "
                    "number of shards (strict_shards_count), so it would end. Stop it first, or start it without that"
                )
        began_at = round(time_of(backend.client.command("TIME")), 3)
        following = Layout(shards_count, layouts.current.epoch + 1)
        begun = Layouts(layouts.current, following, {"began_at": began_at, "by": by[:200]})
        if _set_layouts(backend, queue, layouts, begun):
            log.info(
                "queue %r is resharded from %d shards to %d", queue, layouts.current.shards_count, shards_count,
                extra={"event": "reshard", "queue": queue},
            )  # fmt: skip
            return begun


def _set_layouts(backend: Backend, queue: str, before: Layouts, after: Layouts) -> bool:
    """Changes the layouts in the registry; False: they are others than before."""
    namespace = backend.config.namespace
    key = queues_key(namespace)
    while True:
        raw = backend.client.command("HGET", key, queue, key=key)
        info = find_entry(backend.client, namespace, queue)
        if raw is None or info is None or info.layouts != before:
            return False
        entry: dict[str, Any] = after.current.shown()
        if after.next is not None:
            entry["reshard"] = {**after.next.shown(), **after.facts}
        entry["options"] = json.loads(raw).get("options", {})
        if backend.client.run("set_layout", key, "", queue, raw, json.dumps(entry)) == 1:
            backend.note_layouts(queue, after)
            # As a node that has noticed something: all others look, and read the registry with that.
            backend.client.command("SPUBLISH", nodes_key(namespace), "reshard", key=nodes_key(namespace))
            return True
        # Somebody else has changed its options just now, or its layouts.


# --- the jobs ---


class _Old:
    """A shard whose jobs are moved."""

    __slots__ = ("done", "index", "is_moved", "lease", "not_fed", "prefix", "renew_at", "try_at")

    def __init__(self, index: int, prefix: str, lease: ShardLease) -> None:
        self.index = index
        self.prefix = prefix
        self.lease = lease
        #: The last step whose jobs have come to where they belong.
        self.done = 0
        self.is_moved = False
        #: How often in a row a shard that its jobs belong to was not fed.
        self.not_fed = 0
        #: Monotonic: when the lease is to be renewed, or tried for.
        self.renew_at = self.try_at = 0.0


class _Mover:
    def __init__(self, backend: Backend, queue: str, before: Layout, after: Layout) -> None:
        self._backend = backend
        self._queue = queue
        self._before, self._after = before, after
        self._namespace = backend.config.namespace
        self._lease_ttl = backend.config.lease_ttl
        self._nonce = secrets.token_hex(8)
        entry = find_queue(backend, queue)
        self._max_crash_count = QueueOptions(queue, before.shards_count).registered(entry.options).max_crash_count
        self._progress = ReshardProgress(queue, before, after)
        #: Monotonic: when replicas are asked again whether they have what has come.
        self._confirms_at = 0.0

    @property
    def _client(self) -> Client:
        return self._backend.client

    def run(self) -> Iterator[ReshardProgress]:
        """Moves all jobs, and says how far it is."""
        try:
            yield self._progress
            self._patiently(self._prepare)
            classes = math.gcd(self._before.shards_count, self._after.shards_count)
            for number in range(classes):
                yield from self._move_class(number, classes)
            self._patiently(self._end)
            self._progress = replace(self._progress, is_done=True, waits_for=())
            yield self._progress
        finally:
            self._backend.forget_registered()

    def _patiently(self, do: Callable[[], Any]) -> Any:
        """Does it, again and again while Redis does not answer, for a while."""
        give_up_at = monotonic() + PATIENCE
        while True:
            try:
                return do()
            except RedisUnavailable:
                if monotonic() >= give_up_at:
                    raise
                time.sleep(random.uniform(0.1, 0.3))

    def _run_all(self, calls: Sequence[Call], together: int = _WRITE) -> list[Any]:
        replies: list[Any] = []
        for start in range(0, len(calls), together):
            for reply in self._client.run_many(calls[start : start + together]):
                if isinstance(reply, Exception):
                    raise reply
                replies.append(reply)
        return replies

    def _prepare(self) -> None:
        self._prepare_shards(self._after.prefixes(self._namespace, self._queue))

    def _prepare_shards(self, prefixes: Sequence[str]) -> list[int]:
        """Prepares these shards of the next layout, paused if the queue is. Returns the replies of `prepare_shard`."""
        paused = self._find_pause()
        replies: list[int] = self._run_confirmed(
            [Call("prepare_shard", prefix, ["", self._after.shards_count, *paused]) for prefix in prefixes]
        )
        # A producer prepares what Redis has lost without knowing of a pause.
        written = paused if 2 not in replies else (b"", b"")
        fed = [prefix for prefix, reply in zip(prefixes, replies, strict=True) if reply]
        # Whoever pauses or resumes since the reshard was entered does so with the old shards first, then with the new
        # ones: what was written over theirs just now is seen here. From then on only they change it.
        while True:
            if paused != written:
                at, by = written = paused
                self._run_all([Call("pause", prefix, [at, "", "1" if at else "", by]) for prefix in fed])
            paused = self._find_pause()
            if paused == written:
                return replies

    def _find_pause(self) -> tuple[bytes, bytes]:
        """Since when the queue is paused, and who did that; empty: it is not."""
        prefixes = self._before.prefixes(self._namespace, self._queue)
        looks = [Command(prefix, "HMGET", f"{prefix}meta", "paused", "paused_by") for prefix in prefixes]
        return min(((at, by or b"") for at, by in self._run_all(looks) if at is not None), default=(b"", b""))

    def _end(self) -> None:
        before = Layouts(self._before, self._after)
        if not _set_layouts(self._backend, self._queue, before, Layouts(self._after)):
            # Another one has ended it, unless the queue was dropped meanwhile.
            layouts = find_queue(self._backend, self._queue).layouts
            if layouts == before:
                raise RedisUnavailable(f"the registry could not be changed for queue {self._queue!r}")

    # --- one class ---

    def _move_class(self, number: int, classes: int) -> Iterator[ReshardProgress]:
        olds = [self._old(index) for index in range(number, self._before.shards_count, classes)]
        if not self._patiently(self._is_wanted):
            return
        self._patiently(lambda: self._seal(olds))
        subscription = self._client.subscribe()
        try:
            waiting = [old for old in olds if not old.is_moved]
            self._say(len(olds) - len(waiting), [])
            subscription.add(f"{old.prefix}lease_released" for old in waiting)
            said_at = answered_at = monotonic()
            while waiting:
                try:
                    self._acquire(waiting)
                    held = [old for old in waiting if old.lease.current is not None]
                    self._move(held[:TOGETHER], number)
                    self._renew(held)
                    answered_at = monotonic()
                except RedisUnavailable:
                    if monotonic() - answered_at >= PATIENCE:
                        raise
                    time.sleep(random.uniform(0.1, 0.3))
                    held = [old for old in waiting if old.lease.current is not None]
                moved = [old for old in waiting if old.is_moved]
                waiting = [old for old in waiting if not old.is_moved]
                if moved or monotonic() - said_at >= LOOK_SECONDS:
                    said_at = monotonic()
                    self._say(len(moved), waiting)
                    yield self._progress
                if waiting and not any(old.lease.current is not None for old in waiting):
                    self._wait(subscription, waiting)
        finally:
            subscription.close()
            self._give_up(olds)
        self._patiently(lambda: self._open(olds, range(number, self._after.shards_count, classes)))
        self._say(0, [])
        yield self._progress

    def _say(self, moved: int, waiting: Sequence[_Old]) -> None:
        waits_for = tuple(old.index for old in waiting if old.lease.current is None)
        done = self._progress.shards_moved + moved
        self._progress = replace(self._progress, shards_moved=done, waits_for=waits_for)

    def _is_wanted(self) -> bool:
        """Whether the registry still says that the reshard is under way. It does not if another one has ended it.

        Raises:
            UnknownQueueError, Resharding: the queue was dropped meanwhile. One that has its name now must not be sealed
            for a layout that nobody serves.
        """
        layouts = find_queue(self._backend, self._queue).layouts
        if layouts.current.epoch < self._after.epoch and layouts != Layouts(self._before, self._after):
            raise Resharding(
                f"queue {self._queue!r} was dropped while it was resharded, and made anew: this reshard ends here"
            )
        return layouts.current.epoch < self._after.epoch

    def _old(self, index: int) -> _Old:
        prefix = self._before.prefix(self._namespace, self._queue, index)
        lease = ShardLease(
            self._client, self._queue, prefix, shards_count=self._before.shards_count, nonce=self._nonce,
            max_crash_count=self._max_crash_count, reshard="moves",
        )  # fmt: skip
        return _Old(index, prefix, lease)

    def _seal(self, olds: Sequence[_Old]) -> None:
        args: list[str | int] = ["", self._before.shards_count, self._after.shards_count, self._after.epoch]
        replies = self._run_confirmed([Call("seal", old.prefix, args) for old in olds])
        for old, reply in zip(olds, replies, strict=True):
            old.is_moved = reply == 2

    def _acquire(self, waiting: Sequence[_Old]) -> None:
        """Tries for the leases of these shards: what a dead holder left in flight waits again with that."""
        now = monotonic()
        some = [old for old in waiting if old.lease.current is None and old.try_at <= now]
        calls = [old.lease.acquire_call(self._lease_ttl) for old in some]
        unsealed: list[_Old] = []
        for start in range(0, len(calls), _WRITE):
            sent = monotonic()
            part = some[start : start + _WRITE]
            for old, reply in zip(part, self._client.run_many(calls[start : start + _WRITE]), strict=True):
                lease = old.lease.acquired(reply, sent + self._lease_ttl)
                if isinstance(lease, LeaseDenied):
                    old.try_at = now + min(max(lease.seconds, 0.01), LOOK_SECONDS)
                    if lease.is_unsealed:
                        unsealed.append(old)
                else:
                    old.renew_at = sent + self._lease_ttl / 3
                    log_poisoned(self._queue, old.index, lease.poisoned)
        if unsealed:
            # Redis has lost the seals, in a failover to a replica that was behind.
            if self._is_wanted():
                self._seal(unsealed)
            else:
                for old in unsealed:
                    old.is_moved = True

    def _renew(self, held: Sequence[_Old]) -> None:
        now = monotonic()
        some = [old for old in held if old.renew_at <= now and not old.is_moved and old.lease.current is not None]
        calls = [old.lease.renew_call(self._lease_ttl) for old in some]
        for start in range(0, len(calls), _WRITE):
            part = some[start : start + _WRITE]
            for old, reply in zip(part, self._client.run_many(calls[start : start + _WRITE]), strict=True):
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

    def _move(self, olds: Sequence[_Old], number: int) -> None:
        """One page of each of these shards, of the class with that number."""
        if not olds:
            return
        replies = self._client.run_many([Call("move_out", old.prefix, ["", old.lease.token, old.done]) for old in olds])
        calls: list[Call] = []
        pages: list[tuple[_Old, int, int, list[Call]]] = []
        for old, reply in zip(olds, replies, strict=True):
            if isinstance(reply, LeaseLost):
                old.lease.lose()
                continue
            if isinstance(reply, Exception):
                raise reply
            step, kind = reply[0], reply[1]
            if kind == b"end":
                old.is_moved = True
                continue
            own = self._move_in_calls(old, reply, number)
            calls += own
            pages.append((old, step, (len(reply) - 6) // 3 if kind in (b"waiting", b"morgue") else 0, own))
        came = iter(self._run_confirmed(calls))
        for old, step, jobs, own in pages:
            not_fed = [call.key for call in own if next(came) == _NOT_FED]
            if not_fed and self._prepare_lost(not_fed):
                continue
            if not_fed:
                # Its lease was lost, and another one has moved all of it and opened them. If not, nothing of it is
                # deleted.
                self._note_not_fed(old, not_fed[0])
                continue
            old.not_fed = 0
            # An id comes in several steps if it is large, and is counted with each of them.
            old.done = step
            self._progress = replace(self._progress, jobs_moved=self._progress.jobs_moved + jobs)

    def _prepare_lost(self, prefixes: Sequence[str]) -> bool:
        """Prepares shards of the next layout anew, of which Redis has nothing any more, as in a failover to a replica
        that was behind; whether all of these were. One that was opened meanwhile stays so.

        Raises:
            UnknownQueueError, Resharding: the queue was dropped meanwhile.
        """
        if not self._is_wanted():
            return False
        replies = self._prepare_shards(prefixes)
        lost = [prefix for prefix, reply in zip(prefixes, replies, strict=True) if reply == 1]
        if lost:
            log.warning(
                "queue %r: Redis has lost shards of the next layout, as in a failover, with what no replica had of "
                "them; they are prepared anew: %s", self._queue, ", ".join(lost),
                extra={"event": "reshard_prepared_anew", "queue": self._queue},
            )  # fmt: skip
        return all(replies)

    def _note_not_fed(self, old: _Old, prefix: str) -> None:
        old.not_fed += 1
        if old.not_fed == _NOT_FED_TIMES:
            raise RedisRefused(
                f"queue {self._queue!r}: a shard of the next layout is open, and shard {old.index} has jobs for it: "
                "Redis has lost how far that one was moved, as in a failover. Nothing more was moved. To have these "
                "jobs merged with what waits there, also if they were performed: "
                f"redis-cli -c HSET '{prefix}meta' fed 1; and go on with: "
                f"lowq reshard {self._queue} {self._after.shards_count}"
            )
        old.lease.lose()
        old.try_at = monotonic() + LOOK_SECONDS

    def _run_confirmed(self, calls: Sequence[Call]) -> list[Any]:
        """Runs calls whose loss on one primary of a cluster would lose jobs, as others go on from them: the next
        `move_out` deletes what `move_in` has brought to another primary, and a shard whose seal is lost takes pushes
        that nobody will look for. A failover loses what the replica does not have. So it is waited for, where there is
        one that confirms.
        """
        replies: list[Any] = []
        for start in range(0, len(calls), 4 * TOGETHER):
            some = calls[start : start + 4 * TOGETHER]
            if not self._client.is_cluster or monotonic() < self._confirms_at:
                replies += self._run_all(some)
                continue
            found = self._client.start(some, wait=CONFIRMATION)()
            unconfirmed = [reply for reply in found if isinstance(reply, NotConfirmed | RedisRefused)]
            if unconfirmed:
                self._confirms_at = monotonic() + UNCONFIRMED_SECONDS
                log.warning(
                    "queue %r: no replica has confirmed what this reshard wrote to some shards (%s): a failover of "
                    "their primary now could lose jobs", self._queue, unconfirmed[0],
                    extra={"event": "reshard_unconfirmed", "queue": self._queue},
                )  # fmt: skip
            for call, reply in zip(some, found, strict=True):
                if isinstance(reply, RedisRefused):  # it can't confirm anything, and has done nothing
                    replies += self._run_all([call])
                elif isinstance(reply, NotConfirmed):
                    replies.append(reply.reply)
                elif isinstance(reply, Exception):
                    raise reply
                else:
                    replies.append(reply)
        return replies

    def _move_in_calls(self, old: _Old, reply: Sequence[Any], number: int) -> list[Call]:
        """The calls with which the items of a page come to the shards that they belong to."""
        step, kind, clock, _, _, features = reply[:6]
        head = [b"", b"%d" % old.index, b"%d" % step, kind, clock, features]
        groups: dict[int, list[bytes]] = {}
        # Counters belong to no id: they go to the first shard of the class.
        to = None if kind != b"rest" else number
        for position in range(6, len(reply), 3):
            item_id, score, rest = reply[position : position + 3]
            shard = self._after.shard_of(item_id) if to is None else to
            data = groups.get(shard)
            if data is None:
                data = groups[shard] = [*head]
            if type(rest) is list:
                data += (item_id, score, b"%d" % len(rest), *map(_as_bytes, rest))
            else:
                data += (item_id, score, b"1", rest)
        return [
            Call("move_in", self._after.prefix(self._namespace, self._queue, shard), (), data)
            for shard, data in groups.items()
        ]

    # --- the end of a class ---

    def _give_up(self, olds: Sequence[_Old]) -> None:
        held = [old for old in olds if old.lease.current is not None]
        if held:
            self._client.run_many([old.lease.surrender_call(0.0) for old in held])
            for old in held:
                old.lease.lose()

    def _open(self, olds: Sequence[_Old], shards: range) -> None:
        prefixes = [self._after.prefix(self._namespace, self._queue, shard) for shard in shards]
        fields = ("clock", "server_time", "server_time_since", "fence", "paused")
        looks = [Command(old.prefix, "HMGET", f"{old.prefix}meta", *fields) for old in olds]
        looks += [Command(prefix, "HMGET", f"{prefix}meta", "fed", "paused") for prefix in prefixes]
        replies = self._run_all(looks)
        found, fed = replies[: len(olds)], replies[len(olds) :]
        is_paused = any(reply[4] is not None for reply in found)
        if any(reply[0] is None or (is_paused and reply[1] is None) for reply in fed):
            # Lost since the last of its jobs came, or prepared by a producer, who knows of no pause; or open already.
            self._prepare_lost(prefixes)
        clock = max((reply[0] for reply in found if reply[0]), key=float, default=b"")
        server_time, since = max(
            ((reply[1], reply[2] or b"") for reply in found if reply[1]), key=lambda pair: float(pair[0]),
            default=(b"", b""),
        )  # fmt: skip
        fence = max((reply[3] for reply in found if reply[3]), key=int, default=b"")
        args = ["", clock, server_time, since, fence]
        self._run_all([Call("open_shard", prefix, args) for prefix in prefixes])


def _as_bytes(value: bytes | int) -> bytes:
    return value if isinstance(value, bytes) else b"%d" % value
