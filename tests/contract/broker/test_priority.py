"""Priority: which of the jobs of a shard that are due is taken first."""

import pytest

from tests.contract.support import NOW, Channel, ShardRig, exhausted, handed, job, retry

LEVEL = 2.0**33


@pytest.fixture
def owned(rig: ShardRig) -> ShardRig:
    rig.own()
    return rig


def take(rig: ShardRig, now: float = NOW + 1, limit: int = 1) -> list[str]:
    """The ids that are taken, and finished at once."""
    ids = list(handed(rig.shard.in_flight.take(limit, now)))
    rig.shard.in_flight.finish(ids)
    return ids


def test_the_most_urgent_is_taken_first_and_within_a_priority_the_oldest(owned: ShardRig) -> None:
    owned.push(job("c", priority=9), job("b1", priority=3), job("b2", priority=3), job("a"))
    assert [take(owned) for _ in range(5)] == [["a"], ["b1"], ["b2"], ["c"], []]


def test_a_batch_takes_one_priority_after_the_other(owned: ShardRig) -> None:
    owned.push(job("c", priority=9), job("b", priority=3), job("later", perform_at=NOW + 100), job("a"))
    assert take(owned, limit=10) == ["a", "b", "c"]
    assert take(owned, NOW + 100, limit=10) == ["later"]


def test_what_is_not_due_is_not_taken_however_urgent(owned: ShardRig) -> None:
    owned.push(job("urgent", perform_at=NOW + 50), job("least", priority=9, perform_at=NOW + 10))
    assert owned.shard.in_flight.take(1, NOW).delay == pytest.approx(10)
    assert take(owned, NOW + 11) == ["least"]
    assert owned.shard.in_flight.take(1, NOW + 11).delay == pytest.approx(39)


def test_a_shard_that_never_saw_a_priority_keeps_plain_times(owned: ShardRig) -> None:
    owned.push(job("a", priority=0), job("b"))
    assert owned.meta("features") is None
    assert set(owned.read("due").values()) == {NOW, NOW + 0.000001}


def test_the_score_is_level_and_time(owned: ShardRig) -> None:
    owned.push(job("a", priority=2, perform_at=NOW + 100))
    assert owned.read("due") == {"a": 2 * LEVEL + NOW + 100}


def test_never_is_never_at_each_priority(owned: ShardRig) -> None:
    owned.push(*(job(f"{level}", priority=level, perform_at=1e300) for level in range(10)))
    assert take(owned, NOW + 1e9, 10) == []
    assert owned.client.run("stats", owned.prefix, repr(NOW))[:2] == [10, 0]


def test_merging_takes_the_more_urgent_and_keeps_the_time(owned: ShardRig) -> None:
    owned.push(job("a", "v1", 1, priority=5, perform_at=NOW + 10), job("b", "v1", 1, priority=2))
    owned.push(job("a", "v2", 2, priority=3), job("b", "v2", 2, priority=7))
    assert owned.read("due") == {"a": 3 * LEVEL + NOW + 10, "b": pytest.approx(2 * LEVEL + NOW)}
    owned.push(job("a", "v3", 3))
    assert owned.read("due")["a"] == pytest.approx(NOW + 10, abs=0.0001)


@pytest.mark.parametrize("newer", [None, 2, 8])
def test_it_is_kept_through_a_retry_and_merges_with_what_came_meanwhile(owned: ShardRig, newer: int | None) -> None:
    owned.push(job("a", "v1", 1, priority=5))
    owned.shard.in_flight.take(1, NOW + 1)
    if newer is not None:
        owned.push(job("a", "v2", 2, priority=newer))
    owned.shard.in_flight.fail([retry("a", delay=10.0)], NOW + 2)
    assert owned.read("due") == {"a": min(5, newer or 5) * LEVEL + NOW + 12}


def test_it_is_kept_when_the_owner_dies_and_by_the_rest_of_an_exhausted_job(owned: ShardRig) -> None:
    owned.push(job("a", "v1", 1, priority=5), job("a", "v2", 2, priority=5))
    owned.shard.in_flight.take(1, NOW + 1)
    second = owned.crash("second", NOW + 2)
    assert 5 * LEVEL < owned.read("due")["a"] < 6 * LEVEL
    second.in_flight.take(1, NOW + 5)
    second.in_flight.fail([exhausted("a")], NOW + 6)
    assert owned.read("due") == {"a": 5 * LEVEL + NOW + 6}


def test_performed_now_it_stays_as_urgent_as_it_is(owned: ShardRig) -> None:
    owned.push(job("a", priority=5, perform_at=NOW + 100))
    assert owned.run("perform_now", repr(NOW + 1), "", "", "a") == [1]
    assert owned.read("due") == {"a": 5 * LEVEL + NOW + 1}
    assert owned.run("perform_now", repr(NOW + 2), "", repr(NOW), "a") == [0]  # only what was due by then


def test_the_least_urgent_gets_every_tenth_delivery_and_none_starves(owned: ShardRig) -> None:
    """With far more urgent work than is ever done."""
    for level in (0, 4, 9):
        owned.push(*(job(f"{level}-{number}", priority=level) for number in range(200)))
    taken = [take(owned)[0][0] for _ in range(200)]
    assert all("9" in taken[start : start + 10] for start in range(0, 200, 10))
    assert {level: taken.count(level) for level in "049"} == {"0": 176, "4": 2, "9": 22}


def test_what_was_due_stays_due_at_each_priority_when_the_servers_clock_steps_back(owned: ShardRig) -> None:
    owned.push(job("a"), job("b", priority=3), job("c", priority=9), now=NOW)
    owned.set_clock(NOW + 1, NOW - 100)
    assert sorted(take(owned, NOW - 3600, limit=10)) == ["a", "b", "c"]


def test_figures_know_of_all_priorities(owned: ShardRig) -> None:
    owned.push(job("new", perform_at=NOW + 5), job("oldest", priority=9), job("later", priority=4, perform_at=NOW + 50))
    length, due, *_ = reply = owned.run("stats", repr(NOW + 10))
    assert (length, due, reply[12]) == (3, 2, b"oldest")
    assert float(reply[5]) == pytest.approx(10, abs=0.001)
    assert float(reply[13]) == pytest.approx(NOW, abs=0.001)


def test_a_reply_says_when_the_jobs_of_each_priority_are_due(owned: ShardRig, wake: Channel) -> None:
    assert owned.shard.in_flight.take(1, NOW).levels is None
    owned.push(job("a", priority=9), job("b", priority=9), job("later", perform_at=NOW + 50), job("c", priority=3))
    assert wake.messages() == [b"0.000000"]  # the most urgent of them
    delivery = owned.shard.in_flight.take(1, NOW + 1)
    assert list(handed(delivery)) == ["c"]
    assert delivery.levels == pytest.approx({0: 49, 9: -1}, abs=0.01)
    owned.shard.in_flight.finish(["c"])
    delivery = owned.shard.in_flight.take(0, NOW + 50)  # as whoever asks about an idle shard
    assert delivery.levels == pytest.approx({0: 0, 9: -50}, abs=0.01)
    owned.push(job("d", priority=9), now=NOW + 50)
    assert wake.messages() == [b"0.000000 9"]


def test_of_what_was_lost_the_reply_says_it_too(owned: ShardRig) -> None:
    owned.push(job("lost", priority=4))
    owned.lose_reply(owned.shard.in_flight.take_call(1, NOW + 1))
    owned.push(job("urgent"), now=NOW + 1)
    assert owned.shard.in_flight.take(0, NOW + 1).levels == {0: 0, 4: 0}
