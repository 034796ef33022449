"""What a node counts of its performs, and what it tells of them with each heartbeat."""

from lowq.metrics.counters import BOUNDS, Recorder, Tally, bucket_of, count
from lowq.store import Call


def performs(call: Call) -> dict[int, int]:
    """Bucket -> how many, of a call of `record`."""
    args = [str(arg) for arg in call.args]
    tail = args[8 + 2 * int(args[7]) :]
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
