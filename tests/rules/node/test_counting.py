"""What a node counts of its jobs: how long they had waited, and which took longest."""

from typing import cast

import pytest

from lowq.observe.events import QueueEvents
from lowq.observe.histories import WAIT_BOUNDS
from lowq.observe.tallies import FLOOR, WAITS_READ, SlowBatches, Tally
from lowq.shards.delivery import TakenJob
from lowq.shards.shard import Shard
from lowq.work.outcome import Outcome
from tests.rows import case

#: What Redis's clock is ahead, and the time in it.
OFFSET, NOW = 1_799_999_900.0, 1_800_000_000.0


def counted(*due: bytes | float, offset: float | None = OFFSET) -> tuple[dict[float, int], float]:
    """Bound -> how many jobs, and their seconds together. ``due``: how long each had waited, or what stands there."""
    tally = Tally(SlowBatches())
    times = [repr(NOW - at).encode() if isinstance(at, float) else at for at in due]
    events = QueueEvents("Orders").counted_by(tally, lambda: offset)
    events.jobs_taken([TakenJob("a", [], -1, (b"a", at, b"-1")) for at in times], NOW - OFFSET)
    bounds = zip((*WAIT_BOUNDS, float("inf")), tally.waits, strict=True)
    return {bound: count for bound, count in bounds if count}, tally.waited


def test_jobs_count_by_how_long_they_had_waited() -> None:
    waits, seconds = counted(0.0, 0.25, 0.2, 90_000.0)
    assert waits == {0.001: 1, 0.25: 2, float("inf"): 1}
    assert seconds == pytest.approx(90_000.45)
    assert counted(-0.3) == ({0.001: 1}, 0.0), "due in a moment, by this clock"
    assert counted(1.0, offset=None) == ({}, 0.0), "without Redis's time"
    for count in (1, 8, 9, 17, 499):
        with case(count):
            waits, _ = counted(*[20.0] * (count // 2), *[2.0] * (count - count // 2))
            assert sum(waits.values()) == count
            assert abs(waits.get(30.0, 0) - count // 2) <= -(-count // WAITS_READ)  # some stand for all


def test_a_time_that_somebody_has_written_spoils_no_figure() -> None:
    for written in (b"nan", b"-inf", b"inf", b"x", b"-1e300", b"0"):
        with case(written):
            waits, seconds = counted(written, 1.0)
            assert waits.pop(1.0) == 1
            assert 0.0 <= seconds < 1e11


def test_a_batch_that_took_longer_than_the_floor_is_kept_with_its_first_id() -> None:
    slow = SlowBatches()
    tally = Tally(slow)
    events = QueueEvents("Orders").counted_by(tally)
    shard = cast(Shard, type("Named", (), {"index": 3, "queue": "Orders"}))
    jobs = [TakenJob(job_id, [], -1, ()) for job_id in "ab"]
    events.tally.batch_performed(shard, jobs, Outcome(), FLOOR / 2, 100.0)
    assert slow.unrecorded(102.5) == []
    events.tally.batch_performed(shard, jobs, Outcome(), 2.5, 102.5)
    assert slow.unrecorded(102.5) == [("a", 2, 3, 2.5, 102.5)]
    assert sum(tally.lengths) == 2
