"""What a node counts of its performs, and what it tells of them with each heartbeat."""

from lowq.broker.inflow import Inflow, ShardInflow
from lowq.metrics.counters import BOUNDS, Recorder, Tally, bucket_of, count
from lowq.metrics.slowest import EndedBatch
from lowq.store import Call


def performs(call: Call) -> dict[int, int]:
    """Bucket -> how many, of a call of `record`."""
    args = [str(arg) for arg in call.args]
    tail = args[12 + 2 * int(args[11]) :]
    return {int(index): int(number) for index, number in zip(tail[::2], tail[1::2], strict=True)}


def add(tally: Tally, processed: int, failed: int, seconds: float) -> None:
    """One perform, as a thread counts it."""
    tally.processed += processed
    tally.failed += failed
    tally.seconds += seconds
    tally.lengths[bucket_of(seconds)] += 1


def test_a_perform_counts_in_the_first_bucket_that_is_not_shorter() -> None:
    tally = Tally()
    for seconds in (0.0, BOUNDS[0], BOUNDS[0] * 1.01, BOUNDS[-1], BOUNDS[-1] + 1):
        add(tally, 1, 0, seconds)
    lengths = dict(enumerate(tally.lengths))
    assert {index: number for index, number in lengths.items() if number} == {
        0: 2,
        1: 1,
        len(BOUNDS) - 1: 1,
        len(BOUNDS): 1,
    }


def test_counts_are_summed_over_threads_and_nothing_is_nothing() -> None:
    first, second = Tally(), Tally()
    add(first, 3, 0, 0.5)
    add(second, 0, 1, 0.25)
    assert count([first, second])[:3] == (3, 1, 0.75)
    assert count([])[:3] == (0, 0, 0.0)


def test_each_word_tells_what_happened_since_the_last_one() -> None:
    tally, clock = Tally(), iter([100.0, 105.0, 110.0, 112.5])
    recorder = Recorder("lowq", {"Orders": [tally]}, lambda _: 7.5, clock=lambda: next(clock))
    add(tally, 10, 1, 0.2)
    (call,) = recorder()
    assert (call.script, call.key) == ("count", "lowq:v1:history:Orders")
    assert [str(arg) for arg in call.args[:6]] == ["", "5.0", "10", "1", "7.5", "0.2"]
    assert performs(call) == {7: 1}

    (call,) = recorder()
    assert [str(arg) for arg in call.args[:6]] == ["", "5.0", "0", "0", "7.5", "0.0"]
    assert performs(call) == {}

    add(tally, 4, 0, 0.0)
    (call,) = recorder()
    assert [str(arg) for arg in call.args[1:4]] == ["2.5", "4", "0"]


def test_a_lag_that_is_not_known_is_not_told_as_none_at_all() -> None:
    clock = iter([100.0, 105.0])
    recorder = Recorder("lowq", {"Orders": [Tally()]}, lambda _: None, clock=lambda: next(clock))
    (call,) = recorder()
    assert str(call.args[4]) == ""


def test_what_came_in_goes_along_when_it_is_known() -> None:
    clock, inflows = iter([100.0, 105.0, 110.0]), iter([None, Inflow(30, -4)])
    recorder = Recorder(
        "lowq", {"Orders": [Tally()]}, lambda _: None, clock=lambda: next(clock), take_inflow=lambda _: next(inflows)
    )
    assert [str(call.args[7]) for call in (*recorder(), *recorder())] == ["", "30 -4 10 60"]


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
