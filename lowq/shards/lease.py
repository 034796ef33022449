"""The lease of one shard: the right to work it for a while, as its holder or a process that wants it sees it.

It belongs to the maintenance loop, which gets, renews and surrenders it. Other threads only read it:
`ShardLease.current` is replaced, never changed.
"""

import math
import random
import secrets
from dataclasses import dataclass, replace
from typing import Any

from lowq.clock import Clock
from lowq.clock import now as clock_now
from lowq.codec import decode_id
from lowq.errors import ShardsCountError
from lowq.observe.events import QueueEvents
from lowq.store import Call, Client, Refusal
from lowq.store.shard import AcquireReply, RenewReply, Reshard, ShardScripts


@dataclass(frozen=True, slots=True)
class Lease:
    """A time-limited, fenced right to work a shard."""

    token: str
    #: Grows with every change of owner, and whenever the lease is resumed, as others may have had the shard meanwhile.
    #: What was taken before has the fence of then.
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
    #: For a caller that moves its jobs: it has to be sealed first.
    is_unsealed: bool = False
    #: Not all jobs that belong to it have come in a reshard, or Redis has lost that they have.
    is_fed: bool = False
    #: Nobody has it, and one call could not restore all that is in flight: ask again at once. What this call has done
    #: is below, as in `Lease`.
    is_restoring: bool = False
    restored: int = 0
    poisoned: tuple[str, ...] = ()


def seconds_since_outage(now: float, away_at: float, began_at: float, age: float) -> float:
    """Seconds for which Redis has been back. ``away_at``: when it was away last; ``began_at``: when the process began;
    both monotonic, as ``now``. ``age``: seconds for which its server has been running.

    When it was away for longer than a lease all leases have run out though their owners live; if it came back without
    its data, the registry of nodes is gone, too. So whoever held a shard gets a head start of a third of a lease, and
    within a lease nobody charges the others' jobs with a crash.
    """
    back = now - away_at
    # It was started after this process; servers give their age in whole seconds.
    return min(back, age) if age + 1.0 < now - began_at else back


class ShardLease:
    """The lease of a shard as far as this process knows, and the calls about it, which cite its token or nonce."""

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
        #: Cited by all that is written to the shard; "none" without a lease: Redis refuses it like one that was lost.
        self.token = "none"
        #: Monotonic time until which it is surely held: counted from before its renewal was sent.
        self.deadline = 0.0
        self.client = client
        self.clock = clock
        self.queue = queue
        self.scripts = ShardScripts(prefix)
        self.max_crash_count = max_crash_count
        self.events = events or QueueEvents(queue)
        self._shards_count = shards_count
        self._nonce = nonce
        #: Of a consumer: the beginning of its nonce.
        self._session = session
        self.reshard: Reshard = reshard
        #: The last fence.
        self._fence = 0
        #: The call that renews it, and with which token and lease_ttl: it is sent as it is, every few seconds.
        self._renewal: tuple[tuple[str, float], Call[RenewReply | None]] | None = None

    def acquire_call(self, lease_ttl: float, now: float | None = None, *, charge: bool = True) -> Call[AcquireReply]:
        """``charge``: what is found in flight counts as a crash of its owner; not so when Redis was away."""
        return self.scripts.acquire(
            self._nonce, _milliseconds(lease_ttl), self._shards_count, self.max_crash_count, now=now, charge=charge,
            jitter_seed=random.getrandbits(31), last_fence=self._fence, session=self._session,
            wants_ids=self.events.follows_jobs, reshard=self.reshard,
        )  # fmt: skip

    def acquired(self, reply: Any, deadline: float) -> Lease | LeaseDenied:
        """Takes note of the reply to `acquire_call`. ``deadline``: monotonic, from before it was sent.

        Raises:
            ShardsCountError
        """
        if isinstance(reply, Refusal):
            raise ShardsCountError(self.queue, reply.shards_count, self._shards_count) from None
        if isinstance(reply, Exception):
            raise reply
        got: AcquireReply = reply
        if got.state in ("acquired", "restoring"):
            self.events.jobs_changed("restored", got.restored_ids)
            self.events.jobs_changed("buried", got.poisoned)
            self.events.jobs_changed("cancelled", got.cancelled)
        ids = tuple(map(decode_id, got.poisoned))
        if got.state not in ("acquired", "resumed", "adopted"):
            self.lose()
            return LeaseDenied(
                math.inf if got.state in ("sealed", "fed") else got.held_for / 1000,
                is_sealed=got.state == "sealed",
                is_unsealed=got.state == "unsealed",
                is_fed=got.state == "fed",
                is_restoring=got.state == "restoring",
                restored=got.restored,
                poisoned=ids,
            )
        fence = self._fence = int(got.fence)
        is_resumed, is_adopted = got.state == "resumed", got.state == "adopted"
        token = f"{self._nonce}:{int(got.token_fence or fence)}"
        self.current = lease = Lease(token, fence, is_resumed, is_adopted, got.restored, ids)
        self.token, self.deadline = token, deadline
        return lease

    def acquire(self, lease_ttl: float, now: float | None = None, *, charge: bool = True) -> Lease | LeaseDenied:
        """The lease, or who keeps it from us for how long. What a dead owner left in flight waits again. ``charge``: as
        of `acquire_call`.

        Raises:
            ShardsCountError: the queue has another number of shards.
            RedisUnavailable
        """
        restored, poisoned = 0, list[str]()
        while True:
            deadline = self.clock() + lease_ttl
            (reply,) = self.client.run_many([self.acquire_call(lease_ttl, now, charge=charge)])
            got = self.acquired(reply, deadline)
            restored += got.restored
            poisoned += got.poisoned
            if not (isinstance(got, LeaseDenied) and got.is_restoring):
                return replace(got, restored=restored, poisoned=tuple(poisoned))

    def renew_call(self, lease_ttl: float) -> Call[RenewReply | None]:
        of = self.token, lease_ttl
        if self._renewal is None or self._renewal[0] != of:
            call = self.scripts.renew(self.token, _milliseconds(lease_ttl), is_consumer=bool(self._session))
            self._renewal = of, call
        return self._renewal[1]

    def detach_call(self, lease_ttl: float) -> Call[int]:
        """Leaves it, with what is in flight, to a consumer with the same session."""
        return self.scripts.detach(self.token, _milliseconds(lease_ttl))

    def lose(self) -> None:
        """Somebody else may have the shard by now: nothing of it is worked any further."""
        self.current, self.token = None, "none"
        self.deadline = 0.0

    def has_nonce(self, nonce: str) -> bool:
        """Whether it is asked for with that nonce."""
        return self._nonce == nonce

    def renew_nonce(self) -> None:
        """From now on it is asked for as by another process. So it is not resumed, and the next lease has a higher
        fence than the last one. The beginning stays: by that a node is known.
        """
        self._nonce = self._nonce[:8] + secrets.token_hex(4)

    def surrender_call(self, leave: float | None = None) -> Call[int]:
        return self.scripts.surrender(self.token, None if leave is None else _milliseconds(leave))

    def surrender(self, leave: float | None = None) -> bool:
        """Gives the shard up. With jobs in flight it is refused (False), unless ``leave`` says how many seconds the
        lease is to run on: for a process that is about to exit. What is in flight is not charged then.

        Raises:
            LeaseLost, RedisUnavailable
        """
        if self.client.call(self.surrender_call(leave)) == 0:
            return False
        self.lose()
        return True


def _milliseconds(seconds: float) -> int:
    return max(int(seconds * 1000), 1)
