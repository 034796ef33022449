"""renew lengthens a lease, surrender gives it up."""

import pytest

from lowq.broker.lease import Lease
from lowq.broker.shard import Shard
from lowq.errors import LeaseLost
from tests.contract.support import NOW, TTL, Channel, ShardRig, handed, job


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


def test_renew_may_be_repeated(rig: ShardRig) -> None:
    shard = rig.own()
    rig.lose_reply(shard.lease.renew_call(TTL))
    assert renew(rig, shard, TTL) == [0, 0, 0]


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


def test_lease_that_has_run_out_is_not_renewed(rig: ShardRig) -> None:
    shard = rig.own()
    rig.lease_runs_out()
    before = rig.snapshot()
    assert isinstance(renew(rig, shard, TTL), LeaseLost)
    assert rig.snapshot() == before


def test_lease_of_another_is_not_renewed(rig: ShardRig) -> None:
    shard = rig.own()
    rig.crash("second")
    assert isinstance(renew(rig, shard, 2 * TTL), LeaseLost)
    assert remaining(rig) <= TTL


def test_earlier_lease_of_the_same_process_is_not_renewed(rig: ShardRig) -> None:
    call = rig.own().lease.renew_call(2 * TTL)
    rig.crash("second")
    rig.crash("first")
    (reply,) = rig.client.run_many([call])
    assert isinstance(reply, LeaseLost)


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


def test_shard_with_nothing_in_flight_is_given_up_at_once_all_the_same(rig: ShardRig) -> None:
    shard = rig.own()
    assert shard.lease.surrender(leave=3.0)
    assert "lease" not in rig.names()


def test_surrendering_process_gets_a_new_fence_when_it_comes_back(rig: ShardRig) -> None:
    shard = rig.own()
    assert shard.lease.current is not None
    fence = shard.lease.current.fence
    shard.lease.surrender()
    lease = shard.lease.acquire(TTL, NOW)
    assert isinstance(lease, Lease)
    assert lease.fence > fence
    assert not lease.resumed


@pytest.mark.parametrize("leave", [None, 3.0])
def test_wrong_token_is_refused(rig: ShardRig, free: Channel, leave: float | None) -> None:
    first = rig.own()
    rig.crash("second")
    before = rig.snapshot()
    with pytest.raises(LeaseLost):
        first.lease.surrender(leave)
    assert rig.snapshot() == before
    assert remaining(rig) > 3
    assert free.messages() == []


def test_repeat_of_a_surrender_whose_reply_was_lost_changes_nothing(rig: ShardRig, free: Channel) -> None:
    shard = rig.own()
    rig.lose_reply(shard.lease.surrender_call())
    rig.own("second")
    before, _ = rig.snapshot(), free.messages()
    with pytest.raises(LeaseLost):
        shard.lease.surrender()
    assert rig.snapshot() == before
    assert free.messages() == []


def test_renew_and_surrender_survive_script_flush(rig: ShardRig) -> None:
    shard = rig.own()
    rig.client.command("SCRIPT", "FLUSH")
    assert renew(rig, shard, TTL) == [0, 0, 0]
    rig.client.command("SCRIPT", "FLUSH")
    assert shard.lease.surrender()
