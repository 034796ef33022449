"""A queue worked by hand: jobs in any state, at known times, without a node and without waiting."""

import itertools
import uuid
from collections.abc import Iterable
from typing import Any

import msgspec

import lowq
from lowq.codec import load_payload
from lowq.sharding import shard_of
from lowq.shards.delivery import Failure
from lowq.shards.lease import Lease
from lowq.shards.shard import Shard
from lowq.store import Call
from lowq.store.keys import nodes_key, shard_prefix
from tests.leases import run_out
from tests.recorded import record
from tests.rules.support import report, run_script

#: Seconds for which shards are leased: longer than any test.
LEASE = 3600.0


class Hand:
    """Times are Unix time in seconds, and may be long past: for the scripts they are the clock."""

    def __init__(self, app: lowq.Lowq, name: str, shards: int = 1) -> None:
        self.app = app
        self.queue = app.queue(name, shards)
        self._shards: dict[int, Shard] = {}
        app.registrations.enter(name, shards)

    def index(self, job_id: str) -> int:
        return shard_of(job_id.encode(), self.queue.shards_count)

    def ids(self, index: int, count: int, word: str = "job") -> list[str]:
        """Some ids of a shard."""
        names = (f"{word}-{n}" for n in itertools.count())
        return list(itertools.islice((name for name in names if self.index(name) == index), count))

    def prefix(self, index: int) -> str:
        return shard_prefix(self.app.config.namespace, self.queue.name, index)

    def push(self, job_id: str, at: float, payload: Any = "", score: float | None = None) -> None:
        """``at``: when it becomes due. It was pushed then, or now if that is to come."""
        item = (job_id.encode(), msgspec.json.encode(payload), b"" if score is None else repr(score).encode())
        head: list[Any] = [repr(at), uuid.uuid4().hex, "", self.queue.shards_count, "4 anew=1", 15, ""]
        run_script(self.app.client, "push", self.prefix(self.index(job_id)), *head, *item, repr(at))

    def own(self, index: int, at: float, nonce: str = "aaaaaaaaaaaa") -> Shard:
        """The shard, leased then to a process with that nonce."""
        shard = self._shards.get(index)
        if shard is None or shard.lease.current is None:
            shard = self._shards[index] = Shard(
                self.app.client, self.app.config.namespace, self.queue.name, index,
                shards_count=self.queue.shards_count, nonce=nonce, load_payload=load_payload,
            )  # fmt: skip
            assert isinstance(shard.lease.acquire(LEASE, at), Lease)
        return shard

    def die(self, index: int) -> None:
        """The owner of a shard is gone; what it had in flight stays there until there is another one."""
        run_out(self.app.client, self.prefix(index))
        self._shards.pop(index).lease.lose()

    def take(self, ids: Iterable[str], at: float) -> Shard:
        """Exactly these, which are all that is due in their shard by then, are in flight."""
        wanted = set(ids)
        (index,) = {self.index(job_id) for job_id in wanted}
        shard = self.own(index, at)
        taken = {job.id for job in shard.in_flight.take(100, at).jobs}
        assert taken == wanted, f"due at {at:.0f} are {taken}"
        return shard

    def perform(self, ids: Iterable[str], at: float) -> None:
        """These are performed."""
        ids = list(ids)
        shard = self.take(ids, at)
        shard.in_flight.finish(ids)
        shard.in_flight.take(0, at)

    def fail(self, job_id: str, at: float, until: float, *, retry_count: int = 0, error: str = "boom") -> None:
        """It is taken and fails, and is retried ``until`` then."""
        report(self.take([job_id], at), "fail", [Failure(job_id, "retry", retry_count, until - at, error.encode())], at)

    def record(self, at: float, seconds: float, processed: int, failed: int, lag: float) -> None:
        """What a node counted in some seconds up to then."""
        record(self.app, self.queue.name, at, processed, failed, seconds=seconds, lag=lag)


def heartbeat(app: lowq.Lowq, node: str, at: float, silence: float = 3600.0, **details: Any) -> None:
    """A heartbeat of a node, then."""
    says = msgspec.json.encode(details)
    call = Call[Any]("heartbeat", nodes_key(app.config.namespace), [repr(at), node, "", says, silence])
    app.client.call(call)
