"""What a node counts of its performs, and what it tells of them with each heartbeat."""

from typing import Any, cast

import pytest

import lowq
from lowq.observe.histories import BOUNDS, read_flows
from lowq.observe.tallies import EndedBatch, Recorder, SlowBatches, Tally
from lowq.shards.delivery import Failure, TakenJob
from lowq.shards.shard import Inflow, Shard, ShardInflow
from lowq.work.outcome import Outcome


def end_batch(tally: Any, processed: int, failed: int, seconds: float) -> None:
    """One perform, as a thread counts it."""
    failures = [Failure("f", "retry", 0, 1.0, b"")] * failed
    outcome, shard = Outcome(["a"] * processed, failures), type("Shard", (), {"index": 0})
    tally.batch_performed(cast(Shard, shard), [TakenJob("a", [], -1, ())], outcome, seconds, 0.0)


def redis_time(app: lowq.Lowq) -> float:
    seconds, microseconds = app.client.command("TIME")
    return int(seconds) + int(microseconds) / 1e6


def send(app: lowq.Lowq, recorder: Recorder, *, is_answered: bool = True) -> None:
    for call in recorder():
        if is_answered:
            recorder.answered(call, app.client.call(call))


def test_a_perform_counts_in_the_first_bucket_that_is_not_shorter() -> None:
    for seconds, bucket in (
        (0.0, 0), (BOUNDS[0], 0), (BOUNDS[0] * 1.01, 1), (BOUNDS[-1], len(BOUNDS) - 1), (BOUNDS[-1] + 1, len(BOUNDS)),
    ):  # fmt: skip
        tally = Tally(SlowBatches())
        end_batch(tally, 1, 0, seconds)
        assert tally.lengths.index(1) == bucket


def test_each_heartbeat_adds_what_all_threads_have_counted_since_the_last_one(app: lowq.Lowq) -> None:
    clock = iter([100.0, 105.0, 110.0])
    lags, inflows = iter([None, 7.5]), iter([None, Inflow(30, -4)])
    recorder = Recorder("lowq", ["Orders"], lambda _: next(lags), lambda: next(clock), lambda _: next(inflows))
    first, second = recorder.new_tally("Orders"), recorder.new_tally("Orders")
    end_batch(first, 7, 1, 0.2)
    end_batch(second, 3, 0, 0.1)
    for count, processed, lags_known in ((2, 10.0, set()), (3, 14.0, {7.5})):
        send(app, recorder)
        queue, now = app.queue("Orders", 1), redis_time(app) + 60
        runs, rates = queue.perform_times(), [r for r in queue.rates("hour", now=now).rates if r.processed is not None]
        assert (runs.count, round(runs.seconds, 6)) == (count, 0.3)
        assert sum(10 * (rate.processed or 0) for rate in rates) == pytest.approx(processed)
        assert sum(10 * (rate.failed or 0) for rate in rates) == pytest.approx(1.0)
        assert {rate.lag for rate in rates} - {None} == lags_known, "a lag that is not known is not none at all"
        end_batch(first, 4, 0, 0.0)
    assert read_flows(app, ["Orders"], redis_time(app) + 60)["Orders"].pushed == pytest.approx(30.0)


def test_slow_batches_go_along_until_redis_has_them(app: lowq.Lowq) -> None:
    clock = iter([100.0, 105.0, 110.0, 115.0])
    recorder = Recorder("lowq", ["Orders"], lambda _: None, clock=lambda: next(clock))
    recorder.slow["Orders"].add(EndedBatch("a", 3, 7, 1.5, 104.0))
    send(app, recorder, is_answered=False)
    before = redis_time(app)
    send(app, recorder)
    queue = app.queue("Orders", 8)
    (slow,) = queue.slowest()
    assert (slow.id, slow.ids_count, slow.shard, slow.seconds) == ("a", 3, 7, 1.5)
    assert before - 6.01 <= slow.at <= redis_time(app) - 5.99
    app.client.command("FLUSHALL")
    send(app, recorder)
    assert queue.slowest() == []


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
