"""A lease whose key Redis has evicted: under a maxmemory-policy volatile-* that happens to keys that expire."""

import pytest

from lowq.errors import LeaseLost
from lowq.shards.lease import Lease, LeaseDenied
from tests.rules.support import NOW, TTL, ShardRig, handed, job, report, retry


@pytest.fixture
def rig(rig: ShardRig) -> ShardRig:
    """x is in flight, y waits, and the key of the lease is gone."""
    rig.push(job("x", "v1", 1), job("y", "v1", 1))
    rig.own().in_flight.take(1, NOW)
    evict(rig)
    return rig


def evict(rig: ShardRig) -> None:
    rig.client.command("DEL", rig.prefix + "lease")


def time_left(rig: ShardRig) -> float:
    return float(rig.client.command("PTTL", rig.prefix + "lease")) / 1000


def test_nobody_else_gets_the_shard(rig: ShardRig) -> None:
    held = rig.owner("second").lease.acquire(TTL, NOW + 100)
    assert isinstance(held, LeaseDenied)
    assert held.seconds == pytest.approx(TTL - 100, abs=0.01)
    assert set(rig.read("taken")) == {"x"}
    # Its key is there again, and no longer than before.
    assert rig.shard.lease.current is not None
    assert rig.read("lease") == rig.shard.lease.token
    assert TTL - 160 < time_left(rig) <= TTL - 100


def test_its_owner_goes_on_renews_it_and_gives_it_up(rig: ShardRig) -> None:
    shard = rig.shard
    shard.in_flight.finish(["x"])
    assert handed(shard.in_flight.take(1, NOW + 1)) == {"y": ["v1"]}
    evict(rig)
    report(shard, "fail", [retry("y")], NOW + 2)
    assert rig.count("processed") == rig.count("failed") == 1
    shard = rig.own(now=None)  # renew has no explicit time
    evict(rig)
    (reply,) = rig.client.run_many([shard.lease.renew_call(TTL)])
    assert not isinstance(reply, Exception), reply
    assert TTL - 60 < time_left(rig) <= TTL
    evict(rig)
    assert shard.lease.surrender()
    assert isinstance(rig.owner("second").lease.acquire(TTL), Lease)


@pytest.mark.parametrize("by_another", [True, False])
def test_once_it_has_run_out_its_owner_is_refused_and_another_gets_the_shard(rig: ShardRig, by_another: bool) -> None:
    with pytest.raises(LeaseLost):
        rig.run("ack_and_take", repr(NOW + 1), "first:1", 0, 1, 10, 1000, 0)  # by another token at any time
    evict(rig)
    if by_another:
        assert isinstance(rig.owner("second").lease.acquire(TTL, NOW + 1), LeaseDenied)
        evict(rig)
        lease = rig.owner("third").lease.acquire(TTL, NOW + TTL + 0.001)
        assert isinstance(lease, Lease)
        assert (lease.resumed, lease.restored) == (False, 1)
    for refused in (
        lambda: report(rig.shard, "fail", [retry("x")], NOW + TTL + 1),
        lambda: rig.shard.in_flight.take(1, NOW + TTL + 1),
    ):
        with pytest.raises(LeaseLost):
            refused()
    assert ("lease" in rig.names()) == by_another


def test_a_clock_that_stepped_back_does_not_keep_a_dead_owners_for_longer_than_a_lease(rig: ShardRig) -> None:
    back = NOW - 86_400
    held = rig.owner("second").lease.acquire(TTL, back)
    assert isinstance(held, LeaseDenied)
    assert TTL - 60 < held.seconds <= TTL  # the key of the lease runs by the real clock
    evict(rig)
    assert isinstance(rig.owner("second").lease.acquire(TTL, back + TTL / 2), LeaseDenied)
    evict(rig)
    assert isinstance(rig.owner("second").lease.acquire(TTL, back + TTL + 1), Lease)


def test_a_clock_that_stepped_back_does_not_keep_it_again_once_its_key_has_run_out(rig: ShardRig) -> None:
    rig.run("acquire", repr(NOW + 1), "first", int(TTL * 1000), rig.shards_count, 3, 1, "", 0)
    rig.client.command("PEXPIRE", rig.prefix + "lease", int(100 * TTL * 1000))  # as it looks after a step back
    back = NOW - 86_400
    assert isinstance(rig.owner("second").lease.acquire(TTL, back), LeaseDenied)
    evict(rig)  # by its time
    assert isinstance(rig.owner("second").lease.acquire(TTL, back + TTL + 1), Lease)


def test_a_shard_with_such_a_lease_is_not_dropped(rig: ShardRig) -> None:
    assert rig.run("drop", repr(NOW + 1), "", 500, "1") == [2, 0]
    evict(rig)
    assert rig.run("drop", repr(NOW + 1), "", 500, "") == [2, 0]
    assert set(rig.read("due")) == {"y"}
