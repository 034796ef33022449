"""What a node counts of its performs, and what it tells of them with each heartbeat."""

import pytest

from lowq.broker.inflow import Inflow, ShardInflow
from lowq.metrics.counters import BOUNDS, Recorder, Tally, bucket_of, count
from lowq.metrics.slowest import EndedBatch
from lowq.store import Call


def words(call: Call) -> list[str]:
    return [str(arg) for arg in call.args]


def performs(call: Call) -> dict[int, int]:
    """Bucket -> how many, of a call of `record`."""
    args = words(call)
    tail = args[12 + 2 * int(args[11]) :]
    return {int(index): int(number) for index, number in zip(tail[::2], tail[1::2], strict=True)}


def add(tally: Tally, processed: int, failed: int, seconds: float) -> None:
    """One perform, as a thread counts it."""
    tally.processed += processed
    tally.failed += failed
    tally.seconds += seconds
    tally.lengths[bucket_of(seconds)] += 1


def test_a_perform_counts_in_the_first_bucket_that_is_not_shorter() -> None:
    for seconds, bucket in (
        (0.0, 0), (BOUNDS[0], 0), (BOUNDS[0] * 1.01, 1), (BOUNDS[-1], len(BOUNDS) - 1), (BOUNDS[-1] + 1, len(BOUNDS)),
    ):  # fmt: skip
        assert bucket_of(seconds) == bucket
    assert count([])[:3] == (0, 0, 0.0)


def test_each_word_tells_what_all_threads_have_counted_since_the_last_one() -> None:
    first, second, clock = Tally(), Tally(), iter([100.0, 105.0, 110.0, 112.5])
    lags, inflows = iter([7.5, None, 0.0]), iter([None, Inflow(30, -4), None])
    recorder = Recorder(
        "lowq", {"Orders": [first, second]}, lambda _: next(lags), clock=lambda: next(clock),
        take_inflow=lambda _: next(inflows),
    )  # fmt: skip
    add(first, 7, 1, 0.2)
    add(second, 3, 0, 0.1)
    (call,) = recorder()
    assert (call.script, call.key) == ("count", "lowq:v1:history:Orders")
    assert words(call)[:5] == ["", "5.0", "10", "1", "7.5"]
    assert float(words(call)[5]) == pytest.approx(0.3)
    assert (words(call)[7], performs(call)) == ("", {6: 1, 7: 1})

    (call,) = recorder()
    assert words(call)[1:6] == ["5.0", "0", "0", "", "0.0"], "a lag that is not known is not none at all"
    assert (words(call)[7], performs(call)) == ("30 -4 10 60", {})

    add(first, 4, 0, 0.0)
    (call,) = recorder()
    assert words(call)[1:4] == ["2.5", "4", "0"]


def test_slow_batches_go_along_until_redis_has_them() -> None:
    tally, clock = Tally(), iter([100.0, 105.0, 110.0, 115.0])
    recorder = Recorder("lowq", {"Orders": [tally]}, lambda _: None, clock=lambda: next(clock))
    tally.slowest.add(EndedBatch("a", 3, 7, 1.5, 104.0))

    def slow(call: Call) -> list[object]:
        head, ring = 12 + 2 * int(str(call.args[11])), str(call.args[10])
        return [*call.args[head : head + 5]] if ring else []

    assert [slow(call) for call in recorder()] == [["1.0", "1.5", 3, 7, b"a"]]
    (call,) = recorder()  # nobody answered the first
    assert slow(call) == ["6.0", "1.5", 3, 7, b"a"]
    recorder.answered(call, 1)
    assert [slow(call) for call in recorder()] == [[]]


def test_a_holder_counts_what_changed_between_two_renewals_of_one_lease() -> None:
    shard = ShardInflow()
    shard.note("me:1", 1000, 50)
    assert shard.take() is None, "what was there before is not known to have come in now"
    shard.note("me:1", 1010, 45)
    shard.note("me:1", 1030, 60)  # the heartbeat between was not sent, or a reply was lost
    assert shard.take() == (30, 10)
    assert shard.take() == (0, 0), "a heartbeat without a renewal: nothing that is known"
    shard.note("me:3", 2000, 900)  # somebody else had it meanwhile, and has counted
    assert shard.take() == (0, 0)
    shard.note("me:3", 5, 890)  # its counters were lost
    assert shard.take() == (0, -10)
