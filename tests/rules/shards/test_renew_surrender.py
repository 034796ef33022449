"""renew lengthens a lease, surrender gives it up."""

import pytest

from lowq.shards.lease import Lease
from lowq.shards.shard import Shard
from tests.rules.support import NOW, TTL, Channel, ShardRig, as_redis_answers, job


def renew(rig: ShardRig, shard: Shard, seconds: float) -> object:
    (reply,) = rig.client.run_many([as_redis_answers(shard.lease.renew_call(seconds))])
    return reply


def remaining(rig: ShardRig) -> float:
    """Seconds that the lease still runs."""
    milliseconds: int = rig.client.command("PTTL", rig.prefix + "lease")
    return milliseconds / 1000


# --- renew ---


def test_renew_lengthens_the_lease_and_tells_people_until_when(rig: ShardRig) -> None:
    shard = rig.own()
    before = rig.snapshot()
    assert float(rig.meta("leased_until") or 0) == pytest.approx(NOW + TTL)
    rig.run("renew", repr(NOW + 5), shard.lease.token, int(2 * TTL * 1000))
    assert float(rig.meta("leased_until") or 0) == pytest.approx(NOW + 5 + 2 * TTL)
    assert TTL < remaining(rig) <= 2 * TTL
    assert rig.snapshot() == before


def test_renew_tells_what_came_in_and_how_much_is_due_or_in_flight(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("a", 1), job("a", 2), job("b"), job("urgent", priority=2), job("later", delay=3600))
    shard.in_flight.take(1, NOW)
    args = shard.lease.token, int(TTL * 1000)
    assert rig.run("renew", repr(NOW + 1), *args)[:3] == [5, 3, 1], (
        "payloads that were merged count, jobs for later don't"
    )
    assert rig.run("renew", repr(NOW + 3601), *args)[:3] == [5, 4, 1]


def test_renew_tells_when_the_next_job_is_due_and_what_else_its_holder_may_have_missed(rig: ShardRig) -> None:
    shard = rig.own()

    def told(after: float, *more: str) -> tuple[float | None, int]:
        *_, delay, state = rig.run("renew", repr(NOW + after), shard.lease.token, int(TTL * 1000), *more)
        return None if delay is None else round(delay / 1e6, 3), state

    assert told(0) == (None, 0)
    rig.push(job("later", delay=3600))
    assert told(600) == (3000.0, 0)
    rig.push(job("urgent", delay=3700, priority=0), job("less so", delay=60, priority=5))
    assert told(0) == told(0, "1") == (60.0, 0), "of whatever priority; and a consumer as well"
    delay, _ = told(3601)
    assert delay == -3541.0, "it is overdue"
    rig.run("pause", repr(NOW), "", "1")
    rig.push(job("expires", ttl=7200.0, delay=5))
    assert told(0) == (5.0, 1 + 2)


def test_renew_tells_that_a_job_is_due_where_its_time_is_rounded_or_bounded(rig: ShardRig) -> None:
    """Beside a level the score of a time is coarser, and so is read as a moment later than what is due. No time is
    before the year 1697, not even for a clock that is.
    """
    shard = rig.own()
    now = NOW + 0.3
    level = 9 * 2.0**33
    assert (level + now) - level > now, "rounded up"
    rig.push(job("a", perform_at=now, priority=9), now=NOW)
    for at in (now, -9e9):
        pushed, backlog, in_flight, delay, state = rig.run("renew", repr(at), shard.lease.token, int(TTL * 1000))
        assert (pushed, backlog, in_flight, state) == (1, 1, 0, 0)
        assert delay <= 0
        rig.client.command("ZADD", rig.prefix + "due", -1e12, "a")


@pytest.mark.parametrize("key", ["due", "taken"])
def test_a_lease_is_renewed_though_a_key_has_the_wrong_type(rig: ShardRig, key: str) -> None:
    shard = rig.own()
    rig.client.command("SET", rig.prefix + key, "x")
    for features in ("", " cancelled "):
        rig.client.command("HSET", rig.prefix + "meta", "features", features)
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


def test_with_jobs_in_flight_surrender_is_refused_or_leaves_the_lease_to_run_out(rig: ShardRig, free: Channel) -> None:
    """The second is for a process that stops in mid-work."""
    shard = rig.own()
    rig.push(job("x", "v1", 1))
    shard.in_flight.take(1, NOW)
    before = rig.snapshot()
    assert not shard.lease.surrender()
    assert rig.snapshot() == before
    assert free.messages() == []
    token = shard.lease.token
    assert shard.lease.surrender(leave=TTL / 2)
    assert 0 < remaining(rig) <= TTL / 2
    assert (rig.read("lease"), set(rig.read("taken"))) == (token, {"x"})
    assert free.messages() == [b"%d" % (TTL / 2 * 1000)]  # milliseconds: when to try
