"""Priority: which of the jobs of a shard that are due is taken first."""

import pytest

from tests.rules.support import NOW, Channel, ShardRig, handed, job, run_script

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


def test_a_batch_takes_one_priority_after_the_other(owned: ShardRig) -> None:
    owned.push(job("a", priority=0))
    assert owned.meta("features") is None
    assert owned.read("due") == {"a": NOW}, "without a priority times are plain"
    owned.push(job("c", priority=9), job("b", priority=3), job("later", perform_at=NOW + 100))
    assert take(owned, limit=10) == ["a", "b", "c"]
    assert take(owned, NOW + 100, limit=10) == ["later"]


def test_never_is_never_at_each_priority(owned: ShardRig) -> None:
    owned.push(*(job(f"{level}", priority=level, perform_at=1e300) for level in range(10)))
    assert take(owned, NOW + 1e9, 10) == []
    assert run_script(owned.client, "stats", owned.prefix, repr(NOW))[:2] == [10, 0]


def test_the_least_urgent_gets_every_tenth_delivery_and_none_starves(owned: ShardRig) -> None:
    """With far more urgent work than is ever done."""
    for level in (0, 4, 9):
        owned.push(*(job(f"{level}-{number}", priority=level) for number in range(200)))
    taken = [take(owned)[0][0] for _ in range(200)]
    assert all("9" in taken[start : start + 10] for start in range(0, 200, 10))
    assert {level: taken.count(level) for level in "049"} == {"0": 176, "4": 2, "9": 22}


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
