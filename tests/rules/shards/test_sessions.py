"""Consumers: a shard whose owner has detached, or has died, goes to a consumer with the same session, jobs and all."""

import pytest

from lowq.errors import LeaseLost
from lowq.shards.lease import Lease, LeaseDenied
from lowq.shards.shard import Shard
from lowq.store.keys import session_key
from tests.rules.support import NOW, TTL, Channel, ShardRig, handed, job, run_script

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
    """Whichever reply gets lost."""
    taken, fence = rig.read("taken"), first.lease.current and first.lease.current.fence
    second, before = consumer(rig, "2"), rig.snapshot()
    assert isinstance(acquire(second), LeaseDenied), "before the other one has detached"
    assert rig.snapshot() == before
    rig.lose_reply(first.lease.detach_call(TTL))
    before = rig.snapshot()
    assert detach(rig, first) == 1
    assert isinstance(acquire(rig.owner("node")), LeaseDenied)
    assert isinstance(acquire(consumer(rig, "1", "dead" * 4)), LeaseDenied)
    assert rig.snapshot() == before
    rig.lose_reply(second.lease.acquire_call(TTL, NOW))
    lease = acquire(second)
    assert isinstance(lease, Lease)
    assert (lease.resumed, lease.fence > (fence or 0)) == (True, True)
    assert rig.read("taken") == taken
    assert rig.meta("detached") is rig.meta("uncharged") is None
    second.in_flight.adopt_jobs(2, "ab")
    for job_id, delivery in (("a", 1), ("b", 2)):
        second.in_flight.write([second.in_flight.ack_report([job_id], delivery)])
    assert rig.read("taken") == {}
    assert rig.count("processed") == 2


def test_whoever_comes_when_the_lease_has_run_out_restores_the_jobs_uncharged(rig: ShardRig, first: Shard) -> None:
    detach(rig, first)
    rig.crash("node")
    assert rig.read("taken") == {}
    assert set(rig.read("due")) == {"a", "b"}
    assert {crashes.split()[0] for crashes in rig.read("crashes").values()} == {"0"}
    assert rig.meta("detached") is None
    assert isinstance(acquire(consumer(rig, "2")), LeaseDenied)


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
    rig.client.run_many([first.lease.renew_call(2 * TTL)])
    assert TTL < rig.client.command("PTTL", f"{rig.prefix}consumer") / 1000 <= 2 * TTL
    rig.crash("node")
    rig.client.command("DEL", f"{rig.prefix}consumer")  # as it does by itself, with the lease
    node = rig.own("node")
    assert "consumer" not in rig.names()
    node.in_flight.take(10, NOW + 1)
    wake.messages()
    rig.push(job("d"), now=NOW + 2)
    assert wake.messages() == []


def test_a_session_is_one_consumers_until_that_one_gives_it_up(rig: ShardRig) -> None:
    def keep(who: str, milliseconds: int | str = 60_000) -> list[int]:
        reply: list[int] = run_script(rig.client, "session", session_key("lowq", "abc"), "", who, milliseconds)
        return reply

    for _ in range(2):
        assert keep("one") == [1, 0]
    granted, left = keep("two")
    assert granted == 0
    assert 0 < left <= 60_000
    assert keep("two", "")[0] == 0
    for _ in range(2):
        assert keep("one", "") == [1, 0]
    assert keep("two") == [1, 0]
