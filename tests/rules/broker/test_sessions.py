"""Consumers: a shard whose owner has detached, or has died, goes to a consumer with the same session, jobs and all."""

import pytest

from lowq.broker.lease import Lease, LeaseDenied
from lowq.broker.shard import Shard
from lowq.errors import LeaseLost
from lowq.store.keys import session_key
from tests.rules.support import NOW, TTL, Channel, ShardRig, handed, job

SESSION = "feed" * 4


def consumer(rig: ShardRig, instance: str, session: str = SESSION) -> Shard:
    return rig.owner(session + instance, session=session)


def acquire(shard: Shard, now: float = NOW) -> Lease | LeaseDenied:
    return shard.lease.acquire(TTL, now)


def detach(rig: ShardRig, shard: Shard) -> object:
    (reply,) = rig.client.run_many([shard.lease.detach_call(TTL)])
    return reply


@pytest.fixture
def first(rig: ShardRig) -> Shard:
    """A consumer's shard, with two jobs in flight under two deliveries."""
    shard = consumer(rig, "1")
    assert isinstance(acquire(shard), Lease)
    for job_id in "ab":
        rig.push(job(job_id, job_id))
        assert handed(shard.in_flight.take(1, NOW)) == {job_id: [job_id]}
    return shard


def test_who_comes_back_after_detach_has_the_same_jobs_in_flight_under_a_higher_fence(
    rig: ShardRig, first: Shard
) -> None:
    taken, fence = rig.read("taken"), first.lease.current and first.lease.current.fence
    assert detach(rig, first) == 1
    second = consumer(rig, "2")
    lease = acquire(second)
    assert isinstance(lease, Lease)
    assert lease.adopted
    assert lease.fence > (fence or 0)
    assert rig.read("taken") == taken
    assert rig.meta("detached") is rig.meta("uncharged") is None
    second.in_flight.adopt(2, "ab")
    for job_id, delivery in (("a", 1), ("b", 2)):
        second.in_flight.write([second.in_flight.ack_report([job_id], delivery)])
    assert rig.read("taken") == {}
    assert rig.count("processed") == 2


def test_detach_may_be_repeated(rig: ShardRig, first: Shard) -> None:
    rig.lose_reply(first.lease.detach_call(TTL))
    before = rig.snapshot()
    assert detach(rig, first) == 1
    assert rig.snapshot() == before


def test_adoption_may_be_repeated(rig: ShardRig, first: Shard) -> None:
    detach(rig, first)
    second = consumer(rig, "2")
    taken = rig.read("taken")
    rig.lose_reply(second.lease.acquire_call(TTL, NOW))
    lease = acquire(second)
    assert isinstance(lease, Lease)
    assert lease.resumed
    assert rig.read("taken") == taken


def test_nobody_without_the_session_gets_it_before_the_lease_has_run_out(rig: ShardRig, first: Shard) -> None:
    detach(rig, first)
    before = rig.snapshot()
    assert isinstance(acquire(rig.owner("node")), LeaseDenied)
    assert isinstance(acquire(consumer(rig, "1", "dead" * 4)), LeaseDenied)
    assert rig.snapshot() == before


def test_whoever_comes_after_that_restores_the_jobs_uncharged(rig: ShardRig, first: Shard) -> None:
    detach(rig, first)
    rig.crash("node")
    assert rig.read("taken") == {}
    assert set(rig.read("due")) == {"a", "b"}
    assert {crashes.split()[0] for crashes in rig.read("crashes").values()} == {"0"}
    assert rig.meta("detached") is None
    late = consumer(rig, "2")
    assert isinstance(acquire(late), LeaseDenied)


def test_the_one_who_has_not_detached_keeps_it(rig: ShardRig, first: Shard) -> None:
    before = rig.snapshot()
    assert isinstance(acquire(consumer(rig, "2")), LeaseDenied)
    assert rig.snapshot() == before


def test_of_one_that_died_nobody_has_the_receipts_so_its_jobs_wait_again_charged(rig: ShardRig, first: Shard) -> None:
    rig.lease_runs_out()
    second = consumer(rig, "2")
    lease = acquire(second)
    assert isinstance(lease, Lease)
    assert not lease.adopted
    assert lease.restored == 2
    assert rig.read("taken") == {}
    assert rig.read("crashes") == {"a": "1", "b": "1"}
    with pytest.raises(LeaseLost):
        first.in_flight.take(1, NOW)


def test_one_that_has_detached_is_adopted_when_its_lease_has_run_out_and_nobody_came(
    rig: ShardRig, first: Shard
) -> None:
    taken = rig.read("taken")
    detach(rig, first)
    rig.lease_runs_out()
    second = consumer(rig, "2")
    lease = acquire(second)
    assert isinstance(lease, Lease)
    assert lease.adopted
    assert rig.read("taken") == taken
    with pytest.raises(LeaseLost):
        first.in_flight.take(1, NOW)
    assert isinstance(acquire(first), LeaseDenied)


def test_a_consumer_is_woken_while_it_has_jobs_in_flight_and_a_node_is_not(
    rig: ShardRig, first: Shard, wake: Channel
) -> None:
    rig.push(job("c"))
    assert len(wake.messages()) == 1
    rig.crash("node")
    rig.client.command("DEL", f"{rig.prefix}consumer")  # as it does by itself, with the lease
    node = rig.own("node")
    node.in_flight.take(10, NOW + 1)
    wake.messages()
    rig.push(job("d"), now=NOW + 2)
    assert wake.messages() == []


def test_the_key_that_says_so_lasts_as_long_as_the_lease(rig: ShardRig, first: Shard) -> None:
    def left() -> float:
        return float(rig.client.command("PTTL", f"{rig.prefix}consumer")) / 1000

    assert 0 < left() <= TTL
    rig.client.run_many([first.lease.renew_call(2 * TTL)])
    assert TTL < left() <= 2 * TTL


def test_a_node_leaves_no_such_key(rig: ShardRig) -> None:
    rig.own()
    assert "consumer" not in rig.names()


class TestSession:
    """The script that keeps a session to one consumer."""

    def keep(self, rig: ShardRig, who: str, milliseconds: int | str = 1000) -> list[int]:
        reply: list[int] = rig.client.run("session", session_key("lowq", "abc"), "", who, milliseconds)
        return reply

    def test_only_one_has_it(self, rig: ShardRig) -> None:
        assert self.keep(rig, "one", 60_000) == [1, 0]
        assert self.keep(rig, "one", 60_000) == [1, 0]
        granted, left = self.keep(rig, "two", 60_000)
        assert granted == 0
        assert 0 < left <= 60_000

    def test_it_is_free_once_it_was_given_up_by_who_had_it(self, rig: ShardRig) -> None:
        self.keep(rig, "one", 60_000)
        assert self.keep(rig, "two", "")[0] == 0
        assert self.keep(rig, "one", "") == [1, 0]
        assert self.keep(rig, "one", "") == [1, 0]
        assert self.keep(rig, "two", 60_000) == [1, 0]
