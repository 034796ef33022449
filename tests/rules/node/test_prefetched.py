"""What was taken in advance: begun only while the lease is surely held and the node goes on, otherwise given back."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import lowq
from lowq import clock
from lowq.shards.lease import Lease
from tests.leases import run_out
from tests.rows import case
from tests.rules.node.conftest import MakeApp
from tests.rules.node.drivers import job_of
from tests.rules.support import TTL
from tests.rules.thread_rig import ThreadRig


class Prefetched:
    """A thread that has taken several batches of one job in one delivery. `meanwhile` happens in the first of them."""

    def __init__(self, app: lowq.Lowq) -> None:
        self.app = app
        self.performed: list[str] = []
        self.meanwhile: Callable[[], object] = lambda: None

        @self.app.worker(shards_count=1)
        class Orders(lowq.Worker[Any]):
            def perform(worker, payloads_by_id: dict[str, list[Any]]) -> None:  # noqa: N805
                self.performed += payloads_by_id
                if len(self.performed) == 2:
                    self.meanwhile()

        self.worker = Orders
        self.queue = Orders.queue
        Orders.perform_async({"id": "first", "delay": 0, "score": 1})
        self.rig = ThreadRig(self.app, Orders, lambda: clock.now())  # noqa: PLW0108  # tests replace it
        (self.shard,) = self.rig.shards
        self.rig.turn()  # how quick its jobs are is known now
        Orders.perform_async([{"id": job_id, "score": 1} for job_id in ("a", "b")])
        self.rig.wake()

    def turn(self) -> None:
        self.rig.turn()

    def in_flight(self) -> int:
        return self.queue.stats().taken


@pytest.fixture
def make_prefetched(make_app: MakeApp, moving: list[float]) -> Callable[[], Prefetched]:
    return lambda: Prefetched(make_app())


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock, which only the test moves: [seconds]."""
    seconds = [1_000_000.0]
    monkeypatch.setattr(clock, "now", lambda: seconds[0])
    return seconds


def test_the_next_batch_is_begun_only_if_the_lease_is_surely_held_and_the_node_goes_on(
    make_prefetched: Callable[[], Prefetched], moving: list[float]
) -> None:
    """Otherwise it waits again, uncharged."""

    def suspend(seconds: float) -> None:
        moving[0] += seconds

    def change_hands(made: Prefetched) -> None:
        """The node has the shard again, with another token; what it took before may be old by now."""
        run_out(made.app.client, made.shard.prefix)
        made.app.client.command("HSET", f"{made.shard.prefix}meta", "owner", "somebody else")
        lease = made.shard.lease.acquire(TTL)
        assert isinstance(lease, Lease)
        assert not lease.resumed

    def lose(made: Prefetched) -> None:
        run_out(made.app.client, made.shard.prefix)

    def lose_and_fail(made: Prefetched) -> None:
        lose(made)
        raise ValueError

    def assert_taken(made: Prefetched) -> None:
        assert made.in_flight() == 2, "both were taken in one delivery"

    rows: list[tuple[str, Callable[[Prefetched], object], bool]] = [
        ("nothing", assert_taken, True),
        ("a pause within the lease", lambda _: suspend(TTL - 1), True),
        ("a pause past the lease", lambda _: suspend(TTL), False),
        ("somebody else's meanwhile", change_hands, False),
        ("lost in Redis, says the next take", lose, True),
        ("lost in Redis, says the report of a failure", lose_and_fail, False),
        ("known to be lost", lambda made: made.shard.lease.lose(), False),
        ("the node stops", lambda made: made.rig.stopping.set(), False),
        ("to be given up", lambda made: made.rig.dispatcher.leave([made.shard]), False),
    ]
    for name, meanwhile, is_begun in rows:
        with case(name):
            made = make_prefetched()
            made.meanwhile = partial(meanwhile, made)
            made.turn()
            assert made.performed == ["first", "a", "b"][: 2 + is_begun]
            if name in ("the node stops", "to be given up"):
                job = job_of(made.worker, "b")
                assert (job.state, job.retry_count, job.crashes) == ("due", -1, 0)
                assert made.in_flight() == 1  # the other one, which the next delivery acknowledges
            if meanwhile is lose:
                made.turn()
            assert made.rig.maintenance.doubted == [made.shard] * name.startswith("lost in Redis")
            if name == "to be given up":
                made.turn()  # acknowledges, and takes nothing
                assert made.in_flight() == 0
                assert made.shard.lease.surrender()


def test_what_may_have_expired_meanwhile_is_given_back_and_redis_says_whether_it_has(
    make_prefetched: Callable[[], Prefetched], moving: list[float]
) -> None:
    prefetched = make_prefetched()

    def pause() -> None:
        moving[0] += TTL / 2

    prefetched.queue.push("b", "for a while", score=2, ttl=TTL / 4)
    prefetched.meanwhile = pause
    prefetched.turn()
    assert prefetched.performed == ["first", "a"]
    job = job_of(prefetched.worker, "b")
    assert (job.state, job.retry_count) == ("due", -1)
    prefetched.turn()  # by Redis's clock, which stood still, it lives
    assert prefetched.performed == ["first", "a", "b"]


def test_a_delivery_all_of_which_may_have_expired_before_it_began_is_given_back(
    make_prefetched: Callable[[], Prefetched], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefetched = make_prefetched()
    seconds = [clock.now()]

    def passing() -> float:
        """Time that passes whenever somebody looks, so that the reply is older than the ttl when the work begins."""
        seconds[0] += 0.002
        return seconds[0]

    prefetched.turn()  # what the others are about
    prefetched.queue.push("c", "for a while", score=2, ttl=0.001)
    prefetched.rig.wake()
    monkeypatch.setattr(clock, "now", passing)
    prefetched.rig.turn()
    assert "c" not in prefetched.performed
    prefetched.queue.push("d", score=2)
    prefetched.rig.wake()
    prefetched.rig.turn()
    assert prefetched.performed[-1] == "d"
