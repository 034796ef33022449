"""Actions of people on jobs and queues: one script call per shard and some 200 ids, repeated where a job takes more."""

import contextlib
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

from lowq.codec import decode_id, lookup_id
from lowq.errors import LeaseLost, LowqError, QueueInUse, Resharding
from lowq.job import JobId
from lowq.observe.events import JobEventKind, QueueEvents
from lowq.operate.queues import QueueShards
from lowq.operate.walk import ask, gather
from lowq.sharding import Layout
from lowq.shards.delivery import log_poisoned
from lowq.shards.lease import Lease, LeaseDenied, ShardLease
from lowq.store import REPEATS, Call, Client, Command, Refusal, may_repeat, shard_operations, untrusted
from lowq.store.calls import time_argument, time_of
from lowq.store.keys import MAX_SHARDS, error_groups_key, history_key, queues_key
from lowq.store.shard_operations import DropReply, ShardOperations

#: What can be done to jobs: by their ids, or to all that match a filter.
ActionName = Literal["perform_now", "bury", "kick", "delete", "cancel"]
ACTIONS: tuple[ActionName, ...] = get_args(ActionName)
#: Actions that emit events.
EVENT_KINDS: dict[ActionName, JobEventKind] = {
    "bury": "buried", "kick": "kicked", "delete": "deleted", "cancel": "cancelled",
}  # fmt: skip
#: Ids of one call: with small jobs it holds Redis for a few milliseconds.
MAX_IDS = 200
#: Ids that `Acted.left` and `Acted.running` name at most.
MAX_LEFT = 1000
#: Why an id was left alone, in words.
IN_FLIGHT = "in flight, left alone"
CHANGED = "changed since it was looked at, left alone"
MISSING: dict[ActionName, str] = {
    "kick": "not in the morgue",
    "bury": "no such job waits",
    "delete": "no such job waits or is buried",
    "perform_now": "no such job waits",
    "cancel": "no such job waits or is in flight",
}


@dataclass(frozen=True, slots=True)
class Acted:
    """The outcome of an action on ids. As a number: the jobs that it was done to."""

    done: int = 0
    #: In flight, and therefore left alone.
    in_flight: int = 0
    #: Not there, in another state, or changed since. An id that is given twice may be missing the second time, and so
    #: may one whose reply was lost, since the call is repeated then.
    missing: int = 0
    #: The first 1,000 ids that were left alone, and why, in words. Not compared.
    left: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)
    #: Of ``done``, by cancel: in flight, and told to end. The others waited, and are deleted.
    signalled: int = 0
    #: The first 1,000 ids of these. Not compared.
    running: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __int__(self) -> int:
        return self.done

    def __bool__(self) -> bool:
        return self.done > 0

    def __add__(self, other: "Acted") -> "Acted":
        return Acted(
            self.done + other.done,
            self.in_flight + other.in_flight,
            self.missing + other.missing,
            (*self.left, *other.left[: MAX_LEFT - len(self.left)]) if len(self.left) < MAX_LEFT else self.left,
            self.signalled + other.signalled,
            (*self.running, *other.running)[:MAX_LEFT] if other.running else self.running,
        )


class Action(NamedTuple):
    """An action on jobs, with its arguments."""

    name: ActionName
    #: Unix time, seconds, as text, or "": the server's clock.
    now: str = ""
    #: Why it is buried; empty: the job's last error.
    reason: bytes = b""
    #: delete only: "waiting", "morgue" or "" for both.
    where: str = ""
    #: Emits the ids that it was done to.
    events: QueueEvents | None = None

    def call(self, prefix: str, ids: Sequence[bytes], not_after: str, attempt: str) -> Call[list[int]]:
        shard = ShardOperations(prefix)
        if self.name == "perform_now":
            return shard.perform_now(ids, attempt, not_after, self.now)
        if self.name == "kick":
            return shard.kick(ids, attempt, not_after, self.now)
        if self.name in ("delete", "cancel"):
            where = "cancel" if self.name == "cancel" else self.where
            return shard.delete(ids, attempt, where, not_after, self.now)
        return shard.bury(ids, self.reason, attempt, not_after, self.now)


def attempt_all(client: Client, makes: Sequence[Callable[[str], Call[Any]]]) -> list[Any]:
    """Runs calls of people in one write per server, and repeats those without an answer. Each of ``makes`` makes the
    call of an attempt. A repeat supersedes the attempts before it: one that was held back in a connection would
    otherwise act on jobs that have come since.

    Returns each call's reply, or the exception that it ended with. After `RedisUnavailable` the last attempt may have
    been carried out, or arrive later.
    """
    attempts = [secrets.token_hex(8) for _ in makes]
    replies: list[Any] = [None] * len(makes)
    again = list(range(len(makes)))
    for _ in range(REPEATS + 1):
        calls = [makes[i](attempts[i]) for i in again]
        for i, reply in zip(again, client.run_many(calls, repeats=0), strict=True):
            replies[i] = reply
        again = [i for i in again if may_repeat(replies[i])]
        if not again:
            break
        for i in again:
            attempts[i] = f"{secrets.token_hex(8)} {attempts[i]}"
    return replies


def attempt(client: Client, make: Callable[[str], Call[Any]]) -> Any:
    """As `attempt_all`, for one call.

    Raises:
        RedisUnavailable, RedisRefused, ScriptError
    """
    (reply,) = attempt_all(client, [make])
    if isinstance(reply, Exception):
        raise reply
    return reply


def act(client: Client, prefix: str, action: Action, ids: Sequence[bytes], not_after: str = "") -> Acted:
    """Acts on ids of one shard, in bounded calls. ``not_after``: only on jobs whose perform_at, or burial, is not after
    this (Unix time, seconds, as text; "" = any).

    Raises:
        RedisUnavailable, RedisRefused, ScriptError: its ``done`` is the number of jobs that it was done to before.
    """
    acted = Acted()
    for start in range(0, len(ids), MAX_IDS):
        pending = ids[start : start + MAX_IDS]
        while pending:
            try:
                reply = attempt(client, partial(action.call, prefix, pending, not_after))
            except LowqError as error:
                error.done += acted.done
                raise
            codes = list(zip(pending, reply, strict=True))
            done = [job_id for job_id, code in codes if code == shard_operations.DONE]
            if action.events is not None and action.events.follows_jobs and action.name in EVENT_KINDS:
                action.events.jobs_changed(EVENT_KINDS[action.name], done)
            pending = [job_id for job_id, code in codes if code == shard_operations.AGAIN]
            running: list[str] = []
            if action.name == "cancel":
                running = [decode_id(job_id) for job_id, code in codes if code == shard_operations.IN_FLIGHT]
                codes = [(job_id, code) for job_id, code in codes if code != shard_operations.IN_FLIGHT]
            left = [
                (decode_id(job_id), IN_FLIGHT if code == shard_operations.IN_FLIGHT else MISSING[action.name])
                for job_id, code in codes
                if code not in (shard_operations.DONE, shard_operations.AGAIN)
            ]
            in_flight = sum(code == shard_operations.IN_FLIGHT for _, code in codes)
            acted += Acted(
                len(done) + len(running), in_flight, len(left) - in_flight, tuple(left), len(running), tuple(running)
            )
    return acted


# --- ids of a queue ---

#: perform_at and the time of burial of an id's jobs: Unix time, seconds; None: no job waits, or is buried.
Moments = tuple[float | None, float | None]

#: Ids that are gathered before they are sent: with many shards, a call for a few ids each would be slow.
MAX_GATHERED = 5000
#: Seconds for which an action on single jobs waits while a reshard moves them.
RESHARD_SECONDS = 1.0


def act_on(
    queue: QueueShards, action: Action, ids: JobId | Iterable[JobId], unchanged: Mapping[str, Moments] | None = None
) -> Acted:
    """Acts on ids, in whichever shards they are. ``unchanged``: an earlier answer of `read_moments`; ids that have
    changed since are left alone.

    Raises:
        JobError: an id is malformed. UnknownQueueError, RedisUnavailable: as of `act`.
    """
    acted = Acted()
    try:
        for prefix, some in _by_shard(queue, ids):
            acted += act_where_it_is(queue, prefix, action, some, unchanged)
    except LowqError as error:
        error.done += acted.done
        raise
    return acted


def read_moments(queue: QueueShards, ids: JobId | Iterable[JobId]) -> dict[str, Moments]:
    """id -> the perform_at and the time of burial of its jobs, None where it has none."""
    found: dict[str, Moments] = {}
    for prefix, some in _by_shard(queue, ids):
        for job_id, moments in zip(some, _read_moments_of_shard(queue.client, prefix, some)[1], strict=True):
            found[decode_id(job_id)] = moments
    return found


def as_ids(ids: Any) -> Iterable[JobId]:
    """One id, or many. Bytes and mappings are one, which is refused: what they iterate over are numbers and keys, and
    these may be ids, too.
    """
    is_many = isinstance(ids, Iterable) and not isinstance(ids, str | bytes | bytearray | memoryview | Mapping)
    return ids if is_many else [ids]


def act_where_it_is(
    queue: QueueShards, prefix: str, action: Action, ids: Sequence[bytes],
    unchanged: Mapping[str, Moments] | None = None, not_after: str = "",
) -> Acted:  # fmt: skip
    """Acts on ids of a shard. While a reshard moves them it waits for a moment, and acts in the shard that has all of
    their jobs then. ``unchanged``: as of `act_on`; without it, ``not_after`` is as of `act`.

    Raises:
        Resharding: the move takes longer.
    """
    give_up_at = time.monotonic() + RESHARD_SECONDS
    while True:
        try:
            if unchanged is None:
                return act(queue.client, prefix, action, ids, not_after)
            return _act_on_unchanged(queue.client, prefix, action, ids, unchanged)
        except Resharding:
            if time.monotonic() >= give_up_at:
                raise Resharding(
                    f"queue {queue.name!r}: {decode_id(ids[0])}{' and others are' if len(ids) > 1 else ' is'} being "
                    "moved to another shard, as the queue is resharded; try again in a moment"
                ) from None
            time.sleep(0.05)
        except Refusal as refusal:
            if refusal.code != "SEALED":
                raise
            count, epoch = map(int, refusal.detail.split()[:2])
            layout = Layout(count, epoch)
            by_prefix: dict[str, list[bytes]] = defaultdict(list)
            for job_id in ids:
                by_prefix[queue.prefix(layout, layout.shard_of(job_id))].append(job_id)
            acted = Acted()
            for each, some in by_prefix.items():
                acted += act_where_it_is(queue, each, action, some, unchanged, not_after)
            return acted


def _act_on_unchanged(
    client: Client, prefix: str, action: Action, ids: Sequence[bytes], unchanged: Mapping[str, Moments]
) -> Acted:
    now, found = _read_moments_of_shard(client, prefix, ids)
    # Jobs that are pushed or buried from here on are later than `now`. A job that is not due has no such bound: before
    # the call another one may take its place, if its time is no later.
    due: list[bytes] = []
    later: list[tuple[float, bytes]] = []
    changed: list[tuple[str, str]] = []
    for job_id, moments in zip(ids, found, strict=True):
        name = decode_id(job_id)
        if moments != unchanged.get(name):
            changed.append((name, CHANGED))
        elif moments[0] is not None and moments[0] > now:
            later.append((moments[0], job_id))
        else:
            due.append(job_id)
    acted = Acted(missing=len(changed), left=tuple(changed))
    if due:
        acted += act(client, prefix, action, due, repr(now))
    if later:
        acted += act(client, prefix, action, [job_id for _, job_id in later], repr(max(later)[0]))
    return acted


def _read_moments_of_shard(client: Client, prefix: str, ids: Sequence[bytes]) -> tuple[float, list[Moments]]:
    """The server's time, and the moments of ids of a shard at that time or a little later."""
    lookups = [("ZMSCORE", prefix + name, *ids) for name in ("due", "morgue")]
    time, waiting, buried = client.commands([("TIME",), *lookups], key=prefix)
    times = map(untrusted.perform_at, waiting), map(untrusted.finite, buried)
    return time_of(time), list(zip(*times, strict=True))


def _by_shard(queue: QueueShards, ids: JobId | Iterable[JobId]) -> Iterator[tuple[str, list[bytes]]]:
    """The ids by the prefixes of their shards, some at a time."""
    encoded = map(lookup_id, as_ids(ids))
    for groups in gather(((queue.prefixes_of(job_id)[0], job_id) for job_id in encoded), MAX_IDS, MAX_GATHERED):
        yield from groups


#: Seconds for which nobody else gets the shard should this process die in between.
RELEASE_LEASE_TTL = 2.0


def release_all(queue: QueueShards, max_crash_count: int) -> int:
    """Releases each shard with jobs in flight whose lease has run out. Returns how many of them wait.

    Raises:
        RedisUnavailable, ShardsCountError
    """
    released = 0
    for layout in queue.layouts.all:
        prefixes = layout.prefixes(queue.namespace, queue.name)
        counts = ask(queue.client, [Command(prefix, "HLEN", f"{prefix}taken") for prefix in prefixes])
        for shard, count in enumerate(counts):
            if count:
                # Denied: its holder lives, or died less than a lease ago.
                released += release_shard(queue, layout, shard, max_crash_count).restored
    return released


def release_shard(queue: QueueShards, layout: Layout, shard: int, max_crash_count: int) -> Lease | LeaseDenied:
    """Gets the lease of a shard, which charges the jobs of a dead holder and lets them wait again, and gives it up.
    Should this process die in between, the lease runs out, and nothing is in flight that could be charged. Nothing is
    charged while Redis has been running for less than the ``lease_ttl`` of the application: the holder may be waiting
    for it.

    Raises:
        RedisUnavailable, ShardsCountError
    """
    lease = ShardLease(
        queue.client, queue.name, queue.prefix(layout, shard), shards_count=layout.shards_count,
        nonce=secrets.token_hex(8), max_crash_count=max_crash_count,
    )  # fmt: skip
    got = lease.acquire(RELEASE_LEASE_TTL, charge=queue.client.server_age() > queue.backend.config.lease_ttl)
    log_poisoned(queue.name, shard, got.poisoned)
    if not isinstance(got, LeaseDenied):
        with contextlib.suppress(LeaseLost):  # it has run out by itself
            lease.surrender()
    return got


# --- whole queues ---

#: Shards that are paused in one write.
TOGETHER_PAUSED = 200
#: Jobs of one kind that one step of `drop` removes.
DROP_JOBS = 500


def pause_queue(queue: QueueShards, pauses: bool, by: str = "", now: float | None = None) -> bool:
    """Pauses or resumes all shards; returns whether that changed anything."""
    changed, layouts = False, None
    # A reshard may begin meanwhile: its new shards are as the old ones were.
    while layouts != (layouts := queue.read_layouts()):
        calls = [
            partial(ShardOperations(prefix).pause, pauses, by[:200], now=time_argument(now))
            for prefix in queue.prefixes
        ]
        for start in range(0, len(calls), TOGETHER_PAUSED):
            for reply in attempt_all(queue.client, calls[start : start + TOGETHER_PAUSED]):
                if isinstance(reply, Exception):
                    raise reply
                changed = changed or reply == 1
    return changed


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause of a queue."""

    #: Unix time, seconds.
    at: float
    #: Who paused it, if known.
    by: str | None


def find_pause(queue: QueueShards) -> Pause | None:
    """The pause of a queue, as its first shard has it; None: it is not paused."""
    return read_pause(queue.client, queue.prefixes[0])


def read_pause(client: Client, prefix: str) -> Pause | None:
    """The pause of a shard."""
    at, by = client.command("HMGET", f"{prefix}meta", "paused", "paused_by", key=prefix)
    paused_at = untrusted.finite(at)
    return None if paused_at is None else Pause(paused_at, by.decode("utf-8", "replace") if by else None)


def drop_queue(queue: QueueShards) -> int:
    """Removes a queue with all its jobs; returns their number.

    Raises:
        QueueInUse: a node holds a shard of it. UnknownQueueError, RedisUnavailable
    """
    layouts = queue.read_layouts()
    prefixes = queue.prefixes
    for shard, reply in enumerate(ask(queue.client, [ShardOperations(each).drop(0, asks=True) for each in prefixes])):
        _refuse_in_use(queue, shard, reply)
    removed = 0
    # Shards of earlier layouts send late pushes on; nobody holds them. Shard 0, which has their number, goes last: so a
    # drop that was interrupted finds the others when it is called again.
    for epoch in range(layouts.current.epoch):
        prefixes += reversed(_tombstones(queue, epoch))
    for shard, prefix in enumerate(prefixes):
        is_gone = False
        while not is_gone:
            dropped = attempt(queue.client, partial(ShardOperations(prefix).drop, DROP_JOBS))
            _refuse_in_use(queue, shard, dropped)
            removed += dropped.removed
            is_gone = dropped.is_gone
    for key in history_key(queue.namespace, queue.name), error_groups_key(queue.namespace, queue.name):
        queue.client.command("UNLINK", key, key=key)
    key = queues_key(queue.namespace)
    queue.client.command("HDEL", key, queue.name, key=key)
    return removed


def _tombstones(queue: QueueShards, epoch: int) -> list[str]:
    """The shards of a layout that all jobs have left."""
    prefix = queue.prefix(Layout(1, epoch), 0)
    count = untrusted.count(queue.client.command("HGET", f"{prefix}meta", "shards_count", key=prefix))
    return Layout(count, epoch).prefixes(queue.namespace, queue.name) if 0 < count <= MAX_SHARDS else []


def _refuse_in_use(queue: QueueShards, shard: int, reply: DropReply) -> None:
    if reply.is_held:
        raise QueueInUse(
            f"queue {queue.name!r} can't be dropped: a node holds its shard {shard}. Stop the nodes that work it "
            "first (a dead node's lease runs out by itself), then drop it"
        )
