"""What was taken in advance: begun only while the lease is surely held and the node goes on, otherwise given back."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import lowq
from lowq import clock
from lowq.broker.dispatcher import is_ready
from lowq.broker.lease import Lease
from tests.leases import run_out
from tests.rules.support import TTL
from tests.rules.thread_rig import ThreadRig


class Prefetched:
    """A thread that has taken several batches of one job in one delivery. `meanwhile` happens in the first of them."""

    def __init__(self, url: str) -> None:
        self.app = lowq.Lowq(redis_url=url)
        self.performed: list[str] = []
        self.meanwhile: Callable[[], object] = lambda: None

        @self.app.worker(shards_count=1)
        class Orders(lowq.Worker[Any]):
            def perform(worker, payloads_by_id: dict[str, list[Any]]) -> None:  # noqa: N805
                self.performed += payloads_by_id
                if len(self.performed) == 2:
                    self.meanwhile()

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
def prefetched(store_url: str, moving: list[float]) -> Iterator[Prefetched]:
    made = Prefetched(store_url)
    yield made
    made.app.close()


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock, which only the test moves: [seconds]."""
    seconds = [1_000_000.0]
    monkeypatch.setattr(clock, "now", lambda: seconds[0])
    return seconds


def test_all_of_a_delivery_is_performed(prefetched: Prefetched) -> None:
    """What the others are compared with: both were taken in one delivery."""
    taken: list[int] = []
    prefetched.meanwhile = lambda: taken.append(prefetched.in_flight())
    prefetched.turn()
    assert taken == [2]
    assert prefetched.performed == ["first", "a", "b"]


def test_after_the_machine_was_suspended_past_the_lease_no_further_batch_is_begun(
    prefetched: Prefetched, moving: list[float]
) -> None:
    def suspend() -> None:
        moving[0] += TTL

    prefetched.meanwhile = suspend
    prefetched.turn()
    assert prefetched.performed == ["first", "a"]
    assert not is_ready(1, clock.now(), prefetched.shard)


def test_within_the_lease_the_next_batch_is_begun(prefetched: Prefetched, moving: list[float]) -> None:
    def pause() -> None:
        moving[0] += TTL - 1

    prefetched.meanwhile = pause
    prefetched.turn()
    assert prefetched.performed == ["first", "a", "b"]


def test_what_may_have_expired_meanwhile_is_given_back_and_redis_says_whether_it_has(
    prefetched: Prefetched, moving: list[float]
) -> None:
    def pause() -> None:
        moving[0] += TTL / 2

    prefetched.queue.push("b", "for a while", score=2, ttl=TTL / 4)
    prefetched.meanwhile = pause
    prefetched.turn()
    assert prefetched.performed == ["first", "a"]
    job = prefetched.queue.peek("b")
    assert job is not None
    assert (job.state, job.retry_count) == ("due", -1)
    prefetched.turn()  # by Redis's clock, which stood still, it lives
    assert prefetched.performed == ["first", "a", "b"]


def test_a_delivery_all_of_which_may_have_expired_before_it_began_is_given_back(
    prefetched: Prefetched, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_when_the_shard_was_somebody_elses_meanwhile_no_further_batch_is_begun(prefetched: Prefetched) -> None:
    """The node has the shard again, with another token; what it took before may be old by now."""

    def change_hands() -> None:
        run_out(prefetched.app.client, prefetched.shard.prefix)
        prefetched.app.client.command("HSET", f"{prefetched.shard.prefix}meta", "owner", "somebody else")
        lease = prefetched.shard.lease.acquire(TTL)
        assert isinstance(lease, Lease)
        assert not lease.resumed

    prefetched.meanwhile = change_hands
    prefetched.turn()
    assert prefetched.performed == ["first", "a"]


def test_a_lease_that_is_known_to_be_lost_ends_the_trip(prefetched: Prefetched) -> None:
    prefetched.meanwhile = prefetched.shard.lease.lose
    prefetched.turn()
    assert prefetched.performed == ["first", "a"]


def test_a_node_that_stops_gives_back_what_it_has_not_begun(prefetched: Prefetched) -> None:
    prefetched.meanwhile = prefetched.rig.stopping.set
    prefetched.turn()
    assert prefetched.performed == ["first", "a"]
    job = prefetched.queue.peek("b")
    assert job is not None
    assert (job.state, job.retry_count, job.crashes) == ("due", -1, 0)
    assert prefetched.in_flight() == 1  # the other one, which the next delivery acknowledges


def test_a_shard_that_is_to_be_given_up_has_its_jobs_back_that_were_not_begun(prefetched: Prefetched) -> None:
    prefetched.meanwhile = lambda: prefetched.rig.dispatcher.leave([prefetched.shard])
    prefetched.turn()
    assert prefetched.performed == ["first", "a"]
    job = prefetched.queue.peek("b")
    assert job is not None
    assert (job.state, job.retry_count, job.crashes) == ("due", -1, 0)
    prefetched.turn()  # acknowledges, and takes nothing
    assert prefetched.in_flight() == 0
    assert prefetched.shard.lease.surrender()
