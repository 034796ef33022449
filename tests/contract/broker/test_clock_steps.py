"""The server's clock steps, or another server with another clock takes over: what is due, and in which order.

Order within an id goes by scores, whose clock never steps back. What is due goes by the server's time, except that what
had become due stays so.
"""

import pytest

from tests.contract.support import NEVER, NOW, ShardRig, handed, job, retry

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


# --- a day ahead for a moment ---


@pytest.fixture
def shaken(rig: ShardRig) -> ShardRig:
    """The clock was a day ahead while `early` was pushed. Before, `tonight` had been scheduled."""
    rig.push(job("tonight", perform_at=NOW + DAY / 2))
    rig.push(job("early", "v1"), now=NOW + DAY)
    pushed_for_real(rig, NOW + DAY)
    return rig


def test_what_was_pushed_in_that_moment_does_not_wait_for_a_day(shaken: ShardRig) -> None:
    assert ids_at(shaken, NOW) == ["early"]


def test_a_delay_is_as_long_as_it_says(shaken: ShardRig) -> None:
    shaken.push(job("soon", delay=2.0), now=NOW)
    assert shaken.read("due")["soon"] == NOW + 2
    assert ids_at(shaken, NOW + 1.9) == ["early"]
    shaken.shard.in_flight.finish(["early"])
    assert ids_at(shaken, NOW + 2) == ["soon"]


def test_a_retry_waits_as_long_as_it_says(shaken: ShardRig) -> None:
    assert ids_at(shaken, NOW) == ["early"]
    shaken.shard.in_flight.fail([retry("early", delay=10.0)], NOW)
    assert shaken.shard.in_flight.take(10, NOW).delay == pytest.approx(10)
    assert ids_at(shaken, NOW + 10) == ["early"]


def test_absolute_times_within_that_day_are_kept(shaken: ShardRig) -> None:
    shaken.push(job("today", perform_at=NOW + 3600), now=NOW)
    assert ids_at(shaken, NOW) == ["early"]
    shaken.shard.in_flight.finish(["early"])
    assert ids_at(shaken, NOW + 3599) == []
    assert ids_at(shaken, NOW + 3600) == ["today"]


def test_what_is_pushed_for_now_is_due_now(shaken: ShardRig) -> None:
    shaken.push(job("a", "v1"), job("b", "v1"), now=NOW)
    assert set(ids_at(shaken, NOW)) == {"early", "a", "b"}


def test_order_within_an_id_stays(shaken: ShardRig) -> None:
    shaken.push(job("early", "v2"), now=NOW)
    shaken.push(job("early", "v3"), now=NOW + 1)
    assert handed(shaken.shard.in_flight.take(1, NOW + 1)) == {"early": ["v1", "v2", "v3"]}


def test_what_is_performed_now_is_due_now(shaken: ShardRig) -> None:
    assert shaken.run("perform_now", repr(NOW), "", "", "tonight") == [1]
    assert set(ids_at(shaken, NOW)) == {"early", "tonight"}


# --- a step back, as of a failover to a server with an earlier clock ---


@pytest.mark.parametrize("step", [0.5, 30.0, 3600.0])
def test_what_was_due_stays_due_in_its_order(rig: ShardRig, step: float) -> None:
    for number, job_id in enumerate("dbca"):
        rig.push(job(job_id), now=NOW + number / 100)
    pushed_for_real(rig, NOW + 0.03)
    back = NOW + 0.03 - step
    assert ids_at(rig, back) == ["d", "b", "c", "a"]


def test_what_was_not_due_waits_until_the_servers_clock_is_there(rig: ShardRig) -> None:
    rig.push(job("later", perform_at=NOW + 10))
    pushed_for_real(rig, NOW)
    delivery = rig.shard.in_flight.take(10, NOW - 3600)
    assert delivery.jobs == []
    assert delivery.delay == pytest.approx(3610)


def test_it_steps_back_twice(rig: ShardRig) -> None:
    rig.push(job("x"))
    pushed_for_real(rig, NOW)
    rig.push(job("y"), now=NOW - 50)
    pushed_for_real(rig, NOW - 50)
    assert set(ids_at(rig, NOW - 100)) == {"x", "y"}


def test_a_time_that_lay_in_what_was_gone_through_is_kept_from_then_on(rig: ShardRig) -> None:
    rig.push(job("x"))
    pushed_for_real(rig, NOW)
    back = NOW - 3600
    rig.push(job("y", delay=60.0), now=back)
    rig.push(job("z", perform_at=NOW - 1800), now=back)
    assert ids_at(rig, back + 59) == ["x"]


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


def test_a_push_remembers_the_servers_time(rig: ShardRig) -> None:
    rig.client.command("DEL", rig.prefix + "meta")
    before = rig.server_time()
    rig.push(job("x"), now=None)
    first = float(rig.meta("server_time") or 0)
    assert before <= first <= rig.server_time()
    assert float(rig.meta("server_time_since") or 0) == first
    rig.push(job("x"), now=None)
    assert float(rig.meta("server_time") or 0) > first
    assert float(rig.meta("server_time_since") or 0) == first, "that was no jump"


def test_a_jump_forward_begins_a_new_stretch(rig: ShardRig) -> None:
    now = rig.server_time()
    rig.set_clock(now - 61, now - DAY)
    rig.push(job("x"), now=None)
    assert rig.meta("server_time_since") == rig.meta("server_time")


# --- never ---


def test_a_push_for_never_is_kept_as_such(rig: ShardRig) -> None:
    rig.push(job("a", perform_at=1e300), job("b", delay=1e300), job("c", perform_at=2.0**33))
    assert rig.read("due") == {"a": NEVER, "b": NEVER, "c": NEVER}
    assert rig.shard.in_flight.take(10, NOW + 1000 * DAY).jobs == []
