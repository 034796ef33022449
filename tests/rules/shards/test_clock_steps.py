"""The server's clock steps, or another server with another clock takes over: what is due, and in which order.

Order within an id goes by scores, whose clock never steps back. What is due goes by the server's time, except that what
had become due stays so.
"""

import pytest

from tests.rules.support import NEVER, NOW, ShardRig, handed, job, report, retry

DAY = 86_400.0


@pytest.fixture
def rig(rig: ShardRig) -> ShardRig:
    """Shortly before, something was pushed."""
    rig.own()
    rig.set_clock(NOW - 1, NOW - DAY)
    return rig


def pushed_for_real(rig: ShardRig, now: float) -> None:
    """What a push by the server's own clock leaves behind it: tests may not wait for that clock."""
    seen = float(rig.meta("server_time") or 0)
    since = now if now - seen > 60 else float(rig.meta("server_time_since") or now)
    rig.set_clock(max(now, float(rig.meta("clock") or 0)), since)
    rig.client.command("HSET", rig.prefix + "meta", "server_time", repr(now))


def ids_at(rig: ShardRig, now: float) -> list[str]:
    return list(handed(rig.shard.in_flight.take(100, now)))


def test_after_a_moment_a_day_ahead_nothing_waits_for_that_day(rig: ShardRig) -> None:
    rig.push(job("tonight", perform_at=NOW + DAY / 2))
    rig.push(job("early", "v1"), now=NOW + DAY)
    pushed_for_real(rig, NOW + DAY)
    rig.push(job("soon", delay=2.0), job("today", perform_at=NOW + 3600), now=NOW)
    rig.push(job("early", "v2"), now=NOW)
    assert handed(rig.shard.in_flight.take(10, NOW + 1.9)) == {"early": ["v1", "v2"]}
    report(rig.shard, "fail", [retry("early", delay=10.0)], NOW + 1.9)
    for moment, job_id in ((2.0, "soon"), (11.9, "early"), (3600.0, "today"), (DAY / 2, "tonight")):
        delivery = rig.shard.in_flight.take(10, NOW + moment - 0.1)
        assert not delivery.jobs
        assert delivery.delay == pytest.approx(0.1)
        assert ids_at(rig, NOW + moment) == [job_id]
        rig.shard.in_flight.finish([job_id])


# --- a step back, as of a failover to a server with an earlier clock ---


@pytest.mark.parametrize("step", [0.5, 30.0, 3600.0])
def test_what_was_due_stays_due_in_its_order(rig: ShardRig, step: float) -> None:
    for number, job_id in enumerate("dbca"):
        rig.push(job(job_id), now=NOW + number / 100)
    pushed_for_real(rig, NOW + 0.03)
    back = NOW + 0.03 - step
    assert ids_at(rig, back) == ["d", "b", "c", "a"]


def test_more_jobs_than_one_call_moves(rig: ShardRig) -> None:
    ids = [f"{number:04}" for number in range(1200)]
    for start in range(0, 1200, 400):
        rig.push(*(job(job_id) for job_id in ids[start : start + 400]))
    pushed_for_real(rig, NOW + 0.001)
    found: list[str] = []
    while some := ids_at(rig, NOW - 60):
        found += some
        rig.shard.in_flight.finish(some)
    assert sorted(found) == ids
    assert float(rig.meta("server_time") or 0) == NOW - 60


# --- a real push ---


def test_a_push_remembers_the_servers_time_and_since_when_it_came_there_without_a_jump(rig: ShardRig) -> None:
    rig.client.command("DEL", rig.prefix + "meta")
    before = rig.server_time()
    rig.push(job("x"), now=None)
    first = float(rig.meta("server_time") or 0)
    assert before <= first <= rig.server_time()
    assert float(rig.meta("server_time_since") or 0) == first
    rig.push(job("x"), now=None)
    assert float(rig.meta("server_time") or 0) > first
    assert float(rig.meta("server_time_since") or 0) == first, "that was no jump"
    rig.set_clock(first - 61, first - DAY)
    rig.push(job("x"), now=None)
    assert rig.meta("server_time_since") == rig.meta("server_time")


# --- never ---


def test_a_push_for_never_is_kept_as_such(rig: ShardRig) -> None:
    rig.push(job("a", perform_at=1e300), job("b", delay=1e300), job("c", perform_at=2.0**33))
    assert rig.read("due") == {"a": NEVER, "b": NEVER, "c": NEVER}
    assert rig.shard.in_flight.take(10, NOW + 1000 * DAY).jobs == []
