"""A handler that does not come back within ttr: what its successor reports, and what it itself can still do."""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import lowq
from lowq.errors import LeaseLost, RedisUnavailable
from lowq.shards.lease import Lease
from lowq.shards.scheduler import is_ready
from lowq.store import Call, Client
from lowq.work.loop import BatchActivity
from lowq.work.threads import WorkerThread
from tests.leases import run_out
from tests.rules.support import TTL
from tests.rules.thread_rig import ThreadRig
from tests.waiting import PATIENCE, until


class Hanging:
    """A thread whose handler hangs in a batch of three, having said of two what becomes of them. Its ttr has passed,
    and the test is who watches. When the handler is called again it waits for `second`.
    """

    def __init__(self, url: str) -> None:
        self.app = lowq.Lowq(redis_url=url)
        self.hangs, self.first, self.second = threading.Event(), threading.Event(), threading.Event()
        self.performed: list[list[str]] = []
        self.instances: list[object] = []
        #: What the handler was told that hung, when it went on.
        self.told: list[BaseException] = []

        @self.app.worker(shards_count=1, batch_size=3, ttr=1e-6, max_crash_count=3)
        class Orders(lowq.Worker[Any]):
            def perform(worker, payloads_by_id: dict[str, list[Any]]) -> None:  # noqa: N805
                self.instances.append(worker)
                self.performed.append(sorted(payloads_by_id))
                if len(self.performed) == 1:
                    self._hang()
                else:
                    self.second.wait(PATIENCE)

        self.queue = Orders.queue
        Orders.perform_async([{"id": job_id, "score": 1} for job_id in ("done", "buried", "unknown")])
        self.rig = ThreadRig(self.app, Orders)
        (self.shard,) = self.rig.shards
        self.token = self.shard.lease.token
        self.thread = self.rig.thread
        self.successor: WorkerThread | None = None
        self.thread.start()
        assert self.hangs.wait(PATIENCE)

    def _hang(self) -> None:
        batch = lowq.current()
        batch.done("done")
        batch.bury("buried", "enough")
        self.hangs.set()
        self.first.wait(PATIENCE)
        try:
            batch.done("unknown")
        except LeaseLost as error:
            self.told.append(error)
        try:
            batch.touch(5)
        except LeaseLost as error:
            self.told.append(error)

    def write_off(self) -> None:
        """What a watchdog does."""
        limits = self.thread.activity.limits
        assert limits is not None
        limits.enforce(self._replace)
        assert self.successor is not None

    def _replace(self) -> None:
        self.successor = self.thread.successor(BatchActivity(0))
        self.successor.start()

    def is_reported(self) -> bool:
        return self.rig.written_off == [self.thread]

    def lease_anew(self) -> Lease:
        """What the maintenance loop does then."""
        assert self.rig.maintenance.replaced == [(self.shard, self.token)]
        assert self.shard.lease.surrender()
        self.shard.lease.renew_nonce()
        lease = self.shard.lease.acquire(TTL)
        assert isinstance(lease, Lease)
        self.rig.dispatcher.unclaim(self.shard)
        self.rig.wake()
        return lease

    def close(self) -> None:
        self.rig.dispatcher.close()
        self.first.set()
        self.second.set()
        for thread in (self.thread, self.successor):
            if thread is not None:
                thread.join(PATIENCE)
                assert not thread.is_alive()
        self.app.close()


@pytest.fixture
def hanging(store_url: str) -> Iterator[Hanging]:
    made = Hanging(store_url)
    yield made
    made.close()


@pytest.mark.parametrize("failures", [0, 2])
def test_what_the_handler_has_said_of_ids_holds_and_the_others_are_charged_a_crash(
    hanging: Hanging, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """Once Redis is there."""
    run_many, left = Client.run_many, [RedisUnavailable("away")] * failures

    def run(client: Client, calls: Sequence[Call[Any]], **options: Any) -> list[Any]:
        if left and any(call.script == "release" for call in calls):
            raise left.pop()
        return run_many(client, calls, **options)

    monkeypatch.setattr(Client, "run_many", run)
    hanging.write_off()
    until(hanging.is_reported, "report of what was in hand")
    assert left == []
    assert hanging.queue.peek("done") is None
    buried, unknown = hanging.queue.peek("buried"), hanging.queue.peek("unknown")
    assert buried is not None
    assert (buried.state, buried.error) == ("morgue", "enough")
    assert unknown is not None
    assert (unknown.state in ("due", "scheduled"), unknown.retry_count, unknown.crashes) == (True, -1, 1)
    assert hanging.queue.stats().taken == 0
    hanging.rig.wake()  # but nobody may take of the shard before its lease is a new one
    assert not any(is_ready(number, float("inf"), hanging.shard) for number in range(3))
    fence = int(hanging.token.partition(":")[2])
    assert hanging.lease_anew().fence > fence


def test_a_handler_that_comes_back_while_its_jobs_are_performed_again_finishes_nothing(hanging: Hanging) -> None:
    hanging.write_off()
    until(hanging.is_reported, "report of what was in hand")
    hanging.lease_anew()
    until(lambda: hanging.performed[1:], "another try")
    hanging.first.set()
    hanging.thread.join(PATIENCE)
    assert not hanging.thread.is_alive()
    assert len(hanging.told) == 2
    assert hanging.queue.stats().taken == 1
    assert hanging.shard.in_flight.in_hand.keys() == {"unknown"}
    assert hanging.shard.dispatch.claimed_by == 0
    assert hanging.rig.maintenance.doubted == []
    hanging.second.set()
    until(lambda: hanging.queue.stats().taken == 0, "acknowledgement of the other try")
    assert hanging.performed == [["buried", "done", "unknown"], ["unknown"]]
    assert hanging.instances[0] is not hanging.instances[1]
    assert hanging.queue.peek("unknown") is None


def test_when_the_lease_was_lost_meanwhile_nothing_is_reported(hanging: Hanging) -> None:
    run_out(hanging.app.client, hanging.shard.prefix)
    hanging.app.client.command("HSET", f"{hanging.shard.prefix}meta", "owner", "somebody else")
    hanging.write_off()
    until(hanging.is_reported, "end of the report")
    assert hanging.queue.stats().taken == 3  # the next owner restores them
    assert hanging.shard.lease.current is None
    assert hanging.rig.maintenance.replaced == [(hanging.shard, hanging.token)]


def test_what_can_not_be_reported_is_left_to_the_next_lease(hanging: Hanging) -> None:
    taken = f"{hanging.shard.prefix}taken"
    hanging.app.client.command("RENAME", taken, "elsewhere", key=taken)
    hanging.app.client.command("SET", taken, "spoilt", key=taken)
    hanging.write_off()
    until(hanging.is_reported, "end of the report")
    assert hanging.rig.maintenance.replaced == [(hanging.shard, hanging.token)]
    assert not is_ready(0, float("inf"), hanging.shard)
