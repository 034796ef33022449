"""renew lengthens a lease, surrender gives it up."""

import pytest

from lowq.broker.lease import Lease
from lowq.broker.shard import Shard
from tests.rules.support import NOW, TTL, Channel, ShardRig, handed, job


def renew(rig: ShardRig, shard: Shard, seconds: float) -> object:
    (reply,) = rig.client.run_many([shard.lease.renew_call(seconds)])
    return reply


def remaining(rig: ShardRig) -> float:
    """Seconds that the lease still runs."""
    milliseconds: int = rig.client.command("PTTL", rig.prefix + "lease")
    return milliseconds / 1000


# --- renew ---


def test_until_when_a_lease_lasts_is_told_to_those_who_ask_why(rig: ShardRig) -> None:
    shard = rig.own()
    assert float(rig.meta("leased_until") or 0) == pytest.approx(NOW + TTL)
    rig.run("renew", repr(NOW + 5), shard.lease.token if shard.lease.current else "", int(TTL * 1000))
    assert float(rig.meta("leased_until") or 0) == pytest.approx(NOW + 5 + TTL)
    rig.run("surrender", repr(NOW + 6), shard.lease.token if shard.lease.current else "", "")
    assert float(rig.meta("leased_until") or 0) == pytest.approx(NOW + 6)


def test_renew_lengthens_the_lease(rig: ShardRig) -> None:
    shard = rig.own()
    before = rig.snapshot()
    assert renew(rig, shard, 2 * TTL) == [0, 0, 0]
    assert TTL < remaining(rig) <= 2 * TTL
    assert rig.snapshot() == before


def test_renew_tells_what_came_in_and_how_much_is_due_or_in_flight(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("a", 1), job("a", 2), job("b"), job("urgent", priority=2), job("later", delay=3600))
    shard.in_flight.take(1, NOW)
    args = shard.lease.token, int(TTL * 1000)
    assert rig.run("renew", repr(NOW + 1), *args) == [5, 3, 0], "payloads that were merged count, jobs for later don't"
    assert rig.run("renew", repr(NOW + 3601), *args) == [5, 4, 0]
    assert rig.run("renew", repr(NOW + 1), *args, "1") == 1, "a consumer doesn't count"


@pytest.mark.parametrize("key", ["due", "taken"])
def test_a_lease_is_renewed_though_a_key_has_the_wrong_type(rig: ShardRig, key: str) -> None:
    shard = rig.own()
    rig.client.command("SET", rig.prefix + key, "x")
    assert renew(rig, shard, 2 * TTL) == 1
    assert TTL < remaining(rig) <= 2 * TTL


# --- surrender ---


def test_surrendered_shard_is_free_at_once_and_whoever_waits_is_told(rig: ShardRig, free: Channel) -> None:
    shard = rig.own()
    assert shard.lease.surrender()
    assert free.messages() == [b"0"]
    assert shard.lease.current is None
    assert "lease" not in rig.names()
    assert rig.meta("owner") is None
    lease = rig.owner("second").lease.acquire(TTL, NOW)
    assert isinstance(lease, Lease)
    assert not lease.resumed


def test_surrender_is_refused_with_jobs_in_flight(rig: ShardRig, free: Channel) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1))
    shard.in_flight.finish(handed(shard.in_flight.take(1, NOW)))
    before = rig.snapshot()
    assert not shard.lease.surrender()
    assert rig.snapshot() == before
    assert free.messages() == []
    assert shard.lease.current is not None
    shard.in_flight.take(0, NOW)
    assert shard.lease.surrender()


def test_lease_is_left_to_run_out_by_a_process_that_stops_in_mid_work(rig: ShardRig, free: Channel) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1))
    shard.in_flight.take(1, NOW)
    token = rig.read("lease")
    assert shard.lease.surrender(leave=3.0)
    assert 0 < remaining(rig) <= 3
    assert rig.read("lease") == token
    assert set(rig.read("taken")) == {"x"}
    assert free.messages() == [b"3000"]  # milliseconds: when to try
