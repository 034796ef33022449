"""What a node counts of its jobs: how long they had waited, and which took longest."""

from typing import cast

import pytest

from lowq.broker.activity import Performing
from lowq.broker.delivery import TakenJob
from lowq.broker.shard import Shard
from lowq.metrics.counters import WAIT_BOUNDS, Tally
from lowq.metrics.slowest import FLOOR
from lowq.node.batch import WAITS_READ, count_batch, count_waits
from lowq.node.outcome import Outcome
from tests.rows import case

#: What Redis's clock is ahead, and the time in it.
OFFSET, NOW = 1_799_999_900.0, 1_800_000_000.0


def jobs(*times: bytes) -> list[TakenJob]:
    return [TakenJob("a", [], -1, (b"a", at, b"-1")) for at in times]


def due(*waited: float) -> list[TakenJob]:
    return jobs(*(repr(NOW - seconds).encode() for seconds in waited))


def counted(tally: Tally) -> dict[float, int]:
    """Bound -> how many."""
    return {
        bound: count for bound, count in zip((*WAIT_BOUNDS, float("inf")), tally.waits, strict=True) if count
    }  # fmt: skip


def test_jobs_count_by_how_long_they_had_waited() -> None:
    tally = Tally()
    count_waits(tally, due(0.0, 0.25, 0.2, 90_000.0), NOW - OFFSET, OFFSET)
    assert counted(tally) == {0.001: 1, 0.25: 2, float("inf"): 1}
    assert tally.waited == pytest.approx(90_000.45)


def test_a_job_that_is_due_in_a_moment_by_this_clock_has_not_waited() -> None:
    tally = Tally()
    count_waits(tally, due(-0.3), NOW - OFFSET, OFFSET)
    assert (counted(tally), tally.waited) == ({0.001: 1}, 0.0)


def test_without_redis_s_time_nothing_counts() -> None:
    tally = Tally()
    count_waits(tally, due(1.0), NOW, None)
    assert counted(tally) == {}


def test_of_a_long_delivery_some_stand_for_all() -> None:
    for count in [1, 7, 8, 9, 15, 16, 17, 100, 499, 500]:
        with case(count):
            tally = Tally()
            count_waits(tally, due(*([20.0] * (count // 2) + [2.0] * (count - count // 2))), NOW - OFFSET, OFFSET)
            assert sum(tally.waits) == count
            assert abs(counted(tally).get(30.0, 0) - count // 2) <= -(-count // WAITS_READ)


def test_a_time_that_somebody_has_written_spoils_no_figure() -> None:
    for written in [b"nan", b"-inf", b"inf", b"x", b"", b"-1e300", b"0"]:
        with case(written):
            tally = Tally()
            count_waits(tally, jobs(written, repr(NOW - 1.0).encode()), NOW - OFFSET, OFFSET)
            assert counted(tally).pop(1.0) == 1
            assert 0.0 <= tally.waited < 1e11
            assert sum(tally.waits) <= 2


def test_a_batch_that_took_longer_than_the_floor_is_kept_with_its_first_id() -> None:
    tally, outcome = Tally(), Outcome()
    shard = cast(Shard, type("Named", (), {"index": 3, "queue": "Orders"}))
    count_batch(tally, outcome, Performing(shard, ["a", "b"], 100.0), 100.0 + FLOOR / 2)
    assert tally.slowest.take() == []
    count_batch(tally, outcome, Performing(shard, ["a", "b"], 100.0), 102.5)
    (slow,) = tally.slowest.take()
    assert slow == ("a", 2, 3, 2.5, 102.5)
    assert sum(tally.lengths) == 2
