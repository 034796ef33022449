"""A queue of three shards under the tests' hands: push at any time, work its shards, look into its keys."""

import itertools
from typing import Any

from lowq import Lowq
from lowq.codec import EncodedJob, load_payload
from lowq.sharding import shard_of
from lowq.shards.delivery import Failure
from lowq.shards.lease import Lease
from lowq.shards.shard import Shard
from lowq.store.keys import shard_prefix
from tests.rules.support import NOW, TTL, report, run_script

SHARDS = 3


class QueueRig:
    """`queue` is the handle of the empty queue "Orders" in an empty store."""

    def __init__(self, url: str) -> None:
        self.app = Lowq(redis_url=url)
        self.client = self.app.client
        self.queue = self.app.queue("Orders", SHARDS)
        self._tokens = itertools.count(1)
        self._shards: dict[int, Shard] = {}

    def close(self) -> None:
        self.app.close()

    def push(self, *jobs: EncodedJob, now: float | None = NOW) -> None:
        for item in jobs:
            moment = "" if now is None else repr(now)
            head: list[str | int] = [moment, f"token-{next(self._tokens)}", "", SHARDS, "4 anew=1", 15, ""]
            run_script(self.client, "push", self.prefix_of(item[0].decode()), *head, *item)

    def prefix_of(self, job_id: str) -> str:
        return shard_prefix("lowq", "Orders", shard_of(job_id.encode(), SHARDS))

    def shard_index(self, job_id: str) -> int:
        return shard_of(job_id.encode(), SHARDS)

    def own(self, job_id: str, now: float = NOW) -> Shard:
        """The shard of an id, leased."""
        index = self.shard_index(job_id)
        shard = self._shards.get(index)
        if shard is None:
            shard = self._shards[index] = Shard(
                self.client, "lowq", "Orders", index, shards_count=SHARDS, nonce="tester", load_payload=load_payload
            )
        if shard.lease.current is None:
            assert isinstance(shard.lease.acquire(TTL, now), Lease)
        return shard

    def take(self, job_id: str, now: float = NOW) -> Shard:
        """Hands out the due jobs of its shard, and gives all but this one back. None of them may be retrying."""
        shard = self.own(job_id, now)
        taken = [item.id for item in shard.in_flight.take(100, now).jobs]
        assert job_id in taken, f"{job_id} is not due"
        report(shard, "release", [(item, None) for item in taken if item != job_id], now)
        return shard

    def fail(
        self, job_id: str, retry_count: int = 0, delay: float = 10.0, error: bytes = b"boom", now: float = NOW
    ) -> None:
        """The id is taken, and fails."""
        shard = self.take(job_id, now)
        report(shard, "fail", [Failure(job_id, "retry", retry_count, delay, error)], now)

    def ids(self, **options: Any) -> list[str]:
        """All ids of a listing, page by page."""
        found: list[str] = []
        cursor: str | None = None
        while True:
            page = self.queue.jobs(after=cursor, **options)
            found += [item.id for item in page.jobs]
            cursor = page.cursor
            if cursor is None:
                return found

    def all_keys(self) -> set[str]:
        return {raw.decode() for raw in self.client.command("KEYS", "*")}
