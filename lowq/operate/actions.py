"""What people do to jobs by hand: one script call per shard and some 200 ids, repeated where a job takes more."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

from lowq.codec import decode_id
from lowq.errors import LeaseLost, LowqError
from lowq.observe.job_events import JobEventKind, QueueEvents
from lowq.operate.walk import TOGETHER
from lowq.shards.in_flight import log_poisoned
from lowq.shards.lease import LeaseDenied, ShardLease
from lowq.store import REPEATS, Call, Client, Command, may_repeat, shard_replies
from lowq.store.shard import ShardScripts

ActionName = Literal["perform_now", "bury", "kick", "delete"]


ACTIONS: tuple[ActionName, ...] = get_args(ActionName)


#: Those that there are events of.
EVENT_KINDS: dict[ActionName, JobEventKind] = {"bury": "buried", "kick": "kicked", "delete": "deleted"}


#: Ids of one call: with small jobs it holds Redis for a few milliseconds.
MAX_IDS = 200


#: Ids that `Acted.left` names at most.
MAX_LEFT = 1000


#: Why nothing was done to an id, in words.
IN_FLIGHT = "in flight, left alone"


CHANGED = "changed since it was looked at, left alone"


MISSING: dict[ActionName, str] = {
    "kick": "not in the morgue",
    "bury": "no such job waits",
    "delete": "no such job waits or is buried",
    "perform_now": "no such job waits",
}


@dataclass(frozen=True, slots=True)
class Acted:
    """What became of the ids that something was done to. As a number: how many it was done to."""

    done: int = 0
    #: In flight, and therefore left alone.
    in_flight: int = 0
    #: Not there, not where the action looks, or changed where it was not to be. An id that is named twice may be
    #: missing the second time, and so may one whose reply was lost, since the call is repeated then.
    missing: int = 0
    #: The first 1,000 ids that it was not done to, and why, in words. Not compared.
    left: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

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
        )


class Action(NamedTuple):
    """What is to be done."""

    name: ActionName
    #: Unix time, seconds, as text, or "": the server's clock.
    now: str = ""
    #: Why it is buried; empty: the job's last error.
    reason: bytes = b""
    #: delete only: "waiting", "morgue" or "" for both.
    where: str = ""
    #: Where it is emitted to which ids it was done.
    events: QueueEvents | None = None

    def call(self, prefix: str, ids: Sequence[bytes], not_after: str, attempt: str) -> Call[list[int]]:
        shard = ShardScripts(prefix)
        if self.name == "perform_now":
            return shard.perform_now(ids, attempt, not_after, self.now)
        if self.name == "kick":
            return shard.kick(ids, attempt, not_after, self.now)
        if self.name == "delete":
            return shard.delete(ids, attempt, self.where, not_after, self.now)
        return shard.bury(ids, self.reason, attempt, not_after, self.now)


def attempt_all(client: Client, makes: Sequence[Callable[[str], Call[Any]]]) -> list[Any]:
    """Runs what people do, in one write per server, and repeats what got no answer. Each of ``makes`` is given an
    attempt and makes the call of it. A repeat supersedes the attempts before it: one that was held back in a connection
    would otherwise be done to what has come since.

    Returns each call's reply, or the exception that it ended with. After `RedisUnavailable` nobody knows: the last
    attempt may have been done, or arrive later.
    """
    attempts = [secrets.token_hex(8) for _ in makes]
    calls = [make(attempt) for make, attempt in zip(makes, attempts, strict=True)]
    replies = client.run_many(calls, repeats=0)
    for _ in range(REPEATS):
        again = [i for i, reply in enumerate(replies) if may_repeat(reply)]
        if not again:
            break
        for i in again:
            attempts[i] = f"{secrets.token_hex(8)} {attempts[i]}"
        for i, reply in zip(again, client.run_many([makes[i](attempts[i]) for i in again], repeats=0), strict=True):
            replies[i] = reply
    return [
        reply if isinstance(reply, Exception) else call.read(reply) for call, reply in zip(calls, replies, strict=True)
    ]


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
    """Does it to the ids of one shard, in bounded calls. ``not_after``: only to jobs whose perform_at, or burial,
    is not after this (Unix time, seconds, as text; "" = any).

    Raises:
        RedisUnavailable, RedisRefused, ScriptError: ``done`` is to how many it was done before.
    """
    done = in_flight = missing = 0
    left: list[tuple[str, str]] = []
    for start in range(0, len(ids), MAX_IDS):
        pending = ids[start : start + MAX_IDS]
        while pending:
            try:
                reply = attempt(client, partial(action.call, prefix, pending, not_after))
            except LowqError as error:
                error.done += done
                raise
            if action.events is not None and action.name in EVENT_KINDS:
                finished = [job_id for job_id, code in zip(pending, reply, strict=True) if code == shard_replies.DONE]
                action.events.emit(EVENT_KINDS[action.name], finished)
            again = []
            for job_id, code in zip(pending, reply, strict=True):
                if code == shard_replies.DONE:
                    done += 1
                    continue
                if code == shard_replies.AGAIN:
                    again.append(job_id)
                    continue
                if code == shard_replies.IN_FLIGHT:
                    in_flight += 1
                else:
                    missing += 1
                if len(left) < MAX_LEFT:
                    why = IN_FLIGHT if code == shard_replies.IN_FLIGHT else MISSING[action.name]
                    left.append((decode_id(job_id), why))
            pending = again
    return Acted(done, in_flight, missing, tuple(left))


#: Seconds that a shard is nobody else's should this process die in between.
RELEASE_LEASE_TTL = 2.0


def release_all(client: Client, queue: str, prefixes: Sequence[str], *, shards_count: int, max_crash_count: int) -> int:
    """For each shard with jobs in flight whose lease has run out: gets the lease, which is what charges them and lets
    them wait again, and gives it up. Returns how many of them wait.

    Raises:
        RedisUnavailable, ShardsCountError
    """
    released = 0
    for start in range(0, len(prefixes), TOGETHER):
        some = prefixes[start : start + TOGETHER]
        counts = client.run_many([Command(prefix, "HLEN", f"{prefix}taken") for prefix in some])
        for index, (prefix, count) in enumerate(zip(some, counts, strict=True), start):
            if isinstance(count, Exception):
                raise count
            if count:
                lease = ShardLease(
                    client, queue, prefix, shards_count=shards_count, nonce=secrets.token_hex(8),
                    max_crash_count=max_crash_count,
                )  # fmt: skip
                released += _release(lease, queue, index)
    return released


def _release(lease: ShardLease, queue: str, index: int) -> int:
    got = lease.acquire(RELEASE_LEASE_TTL)
    log_poisoned(queue, index, got.poisoned)
    if isinstance(got, LeaseDenied):
        return got.restored  # its holder lives, or died less than a lease ago, which nobody can tell apart
    try:
        lease.surrender()
    except LeaseLost:
        pass  # it has run out by itself
    return got.restored
