"""The lease of one shard: the right to work it for a while, as the process that has it, or wants it, sees it.

It belongs to the maintenance loop, which gets it, renews it and gives it up. Others read it: `ShardLease.current` is
replaced, never changed.
"""

import math
import random
import secrets
from dataclasses import dataclass, replace
from typing import Any, Literal

from lowq.clock import Clock
from lowq.clock import now as clock_now
from lowq.codec import decode_id
from lowq.errors import ShardsCountError
from lowq.job_events import QueueEvents
from lowq.store import Call, Client, Refusal
from lowq.store.scripts import time_argument


@dataclass(frozen=True, slots=True)
class Lease:
    """A time-limited, fenced right to work a shard."""

    token: str
    #: Grows with every change of owner.
    fence: int
    #: How it was got: anew, or resumed by the same process after it had run out unnoticed.
    resumed: bool = False
    #: By a consumer, from an earlier one with the same session: what that one left in flight is its own.
    adopted: bool = False
    #: Jobs of a dead owner that wait again.
    restored: int = 0
    #: Ids that were buried because their owners kept dying.
    poisoned: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LeaseDenied:
    """Somebody else has the shard, for `seconds` more unless it is renewed."""

    seconds: float
    #: For good: its jobs belong to another layout of the queue.
    is_sealed: bool = False
    #: For who moves its jobs: it has to be sealed first.
    is_unsealed: bool = False
    #: Nobody has it, and more than one call restores is in flight: ask again at once. What this call has done, as in
    #: `Lease`.
    is_restoring: bool = False
    restored: int = 0
    poisoned: tuple[str, ...] = ()


#: What a reshard has to do with a lease, as `acquire` has it. "prepared": the shard is of a layout that one has made,
#: and nobody has it before all that belongs to it has come. "opened": and that has ended, as the registry says.
#: "moves": its jobs are moved to another layout.
Reshard = Literal["", "prepared", "opened", "moves"]


def seconds_since_outage(now: float, away_at: float, began_at: float, age: float) -> float:
    """For how many seconds Redis has been back. ``now``, when it was ``away`` last, when the process ``began``:
    monotonic; ``age``: for how many seconds its server has been running.

    When it was away for longer than a lease all leases have run out though their owners live; if it came back without
    its data, the registry of nodes is gone, too. So whoever held a shard gets a head start of a third of a lease, and
    within a lease nobody charges the others' jobs with a crash.
    """
    back = now - away_at
    # It was started after this process; servers give their age in whole seconds.
    return min(back, age) if age + 1.0 < now - began_at else back


class ShardLease:
    """What this process knows of the lease of a shard, and the calls about it."""

    def __init__(
        self,
        client: Client,
        queue: str,
        prefix: str,
        *,
        shards_count: int,
        nonce: str,
        max_crash_count: int,
        session: str = "",
        events: QueueEvents | None = None,
        reshard: Reshard = "",
        clock: Clock = clock_now,
    ) -> None:
        #: None: it is not held.
        self.current: Lease | None = None
        #: Monotonic time until which it is surely held: counted from before its renewal was sent.
        self.deadline = 0.0
        self._client = client
        self._clock = clock
        self._queue = queue
        self._prefix = prefix
        self._shards_count = shards_count
        self._nonce = nonce
        self._max_crash_count = max_crash_count
        #: Of a consumer: what its nonce begins with. Redis keeps more for it then, and of it.
        self._session = session
        self._events = events
        self.reshard: Reshard = reshard
        #: Of the last lease.
        self._fence = 0

    def acquire_call(self, lease_ttl: float, now: float | None = None, *, charge: bool = True) -> Call:
        """``charge``: what is found in flight counts as a crash of its owner; not so when Redis was away."""
        args = (time_argument(now), self._nonce, _milliseconds(lease_ttl), self._shards_count, self._max_crash_count)
        more = [self._session] if self._session or self._events is not None else []
        if self._events is not None:
            more.append("1")
        if self.reshard:
            more = [self._session, "1" if self._events is not None else "", self.reshard]
        return Call("acquire", self._prefix, [*args, random.getrandbits(31), "" if charge else "1", self._fence, *more])

    def acquired(self, reply: Any, deadline: float) -> Lease | LeaseDenied:
        """Takes note of the reply to `acquire_call`. ``deadline``: monotonic, from before it was sent.

        Raises:
            ShardsCountError
        """
        if isinstance(reply, Refusal):
            raise ShardsCountError(self._queue, int(reply.detail), self._shards_count) from None
        if isinstance(reply, Exception):
            raise reply
        if reply[0] in (b"sealed", b"fed"):
            self.lose()
            return LeaseDenied(math.inf, is_sealed=reply[0] == b"sealed")
        if reply[0] == b"unsealed":
            self.lose()
            return LeaseDenied(0.0, is_unsealed=True)
        if reply[0] == b"held":
            self.current = None
            self.deadline = 0.0
            return LeaseDenied(max(reply[1], 0) / 1000)
        restored, *poisoned = reply[2:] or [0]
        if self._events is not None and reply[0] in (b"acquired", b"restoring"):
            self._events.emit("restored", restored)
            self._events.emit("buried", poisoned)
            restored = len(restored)
        ids = tuple(decode_id(job_id) for job_id in poisoned)
        if reply[0] == b"restoring":
            self.lose()
            return LeaseDenied(0.0, is_restoring=True, restored=restored, poisoned=ids)
        fence = self._fence = int(reply[1])
        lease = Lease(f"{self._nonce}:{fence}", fence, reply[0] == b"resumed", reply[0] == b"adopted", restored, ids)
        if self.current is None or self.current.token != lease.token:
            self.current = lease
        self.deadline = deadline
        return lease

    def acquire(self, lease_ttl: float, now: float | None = None) -> Lease | LeaseDenied:
        """The lease, or who keeps it from us for how long. What a dead owner left in flight waits again.

        Raises:
            ShardsCountError: the queue has another number of shards.
            RedisUnavailable
        """
        restored, poisoned = 0, list[str]()
        while True:
            deadline = self._clock() + lease_ttl
            (reply,) = self._client.run_many([self.acquire_call(lease_ttl, now)])
            got = self.acquired(reply, deadline)
            restored += got.restored
            poisoned += got.poisoned
            if not (isinstance(got, LeaseDenied) and got.is_restoring):
                return replace(got, restored=restored, poisoned=tuple(poisoned))

    def renew_call(self, lease_ttl: float) -> Call:
        more = ["1"] if self._session else []
        return Call("renew", self._prefix, ["", self.token, _milliseconds(lease_ttl), *more])

    def detach_call(self, lease_ttl: float) -> Call:
        """Leaves it, with what is in flight, to a consumer with the same session."""
        return Call("detach", self._prefix, ["", self.token, _milliseconds(lease_ttl)])

    def lose(self) -> None:
        """Somebody else may have the shard by now: nothing of it is worked any further."""
        self.current = None
        self.deadline = 0.0

    def is_held(self, fence: int) -> bool:
        """Whether the lease with that fence is surely held now."""
        lease = self.current
        return lease is not None and lease.fence == fence and self._clock() < self.deadline

    def has_nonce(self, nonce: str) -> bool:
        """Whether it is asked for with that nonce."""
        return self._nonce == nonce

    def renew_nonce(self) -> None:
        """From now on it is asked for as by another process. So it is not resumed, and the next lease has a higher
        fence than the last one. The beginning stays: by that a node is known.
        """
        self._nonce = self._nonce[:8] + secrets.token_hex(4)

    def surrender_call(self, leave: float | None = None) -> Call:
        return Call("surrender", self._prefix, ["", self.token, "" if leave is None else _milliseconds(leave)])

    def surrender(self, leave: float | None = None) -> bool:
        """Gives the shard up. With jobs in flight it is refused (False), unless ``leave`` says how many seconds the
        lease is to run on: for a process that is about to exit. What is in flight is not charged then.

        Raises:
            LeaseLost, RedisUnavailable
        """
        call = self.surrender_call(leave)
        if self._client.run(call.script, call.key, *call.args) == 0:
            return False
        self.lose()
        return True

    @property
    def token(self) -> str:
        """Cited by all that is written to the shard. Without a lease it is what no token is like, which Redis refuses
        as it refuses a lease that was lost.
        """
        lease = self.current
        return "none" if lease is None else lease.token


def _milliseconds(seconds: float) -> int:
    return max(int(seconds * 1000), 1)
