"""How long jobs wait and are performed, over time, and which took longest: as nodes record it."""

import math

import pytest

import lowq
from lowq import inspection
from lowq.observe.histories import BOUNDS, MOST_SLOW, SLOW_SLOTS, SLOW_STRETCH, TIMES_RINGS, WAIT_BOUNDS
from lowq.observe.tallies import EndedBatch
from lowq.store.keys import history_key
from tests.recorded import record
from tests.rows import case
from tests.rules.support import NOW
from tests.tiers import real_redis_often

#: The beginning of a stretch of every span.
START = NOW // 28800 * 28800
KEY = history_key("lowq", "Orders")


@pytest.fixture
def queue(app: lowq.Lowq) -> lowq.Queue:
    return app.queue("Orders", 3)


def batch(name: str, seconds: float, ids_count: int = 1, shard: int = 2) -> EndedBatch:
    return EndedBatch(name, ids_count, shard, seconds, 0.0)


def told(histogram: inspection.Histogram) -> dict[float, int]:
    return {bound: number for bound, number in histogram.buckets if number}


def test_what_several_nodes_counted_is_added_up_stretch_by_stretch(app: lowq.Lowq, queue: lowq.Queue) -> None:
    record(app, "Orders", START + 5, waits={0.1: 10, 86400.0: 1}, runs={0.5: 3})
    record(app, "Orders", START + 59, waits={0.1: 5, math.inf: 1}, runs={0.5: 1, math.inf: 2})
    record(app, "Orders", START + 60, runs={0.001: 7})
    found = queue.times("hour", now=START + 119)
    assert (found.span, found.step, len(found.stretches)) == ("hour", 60, 60)
    before, first, second = found.stretches[-3:]
    assert (first.at, second.at) == (START, START + 60)
    assert (told(before.wait), told(before.run)) == ({}, {})
    assert (told(first.wait), told(first.run)) == ({0.1: 15, 86400.0: 1, math.inf: 1}, {0.5: 4, math.inf: 2})
    assert (told(second.wait), told(second.run)) == ({}, {0.001: 7})
    assert (told(found.wait), told(found.run)) == (told(first.wait), {0.001: 7, 0.5: 4, math.inf: 2})
    assert [found.run.percentile(share) for share in (0.5, 0.8, 1.0)] == [0.001, 0.5, math.inf], "upper bounds"
    assert second.wait.percentile(0.99) == 0.0, "there were none"


def test_a_ring_forgets_what_is_older_than_its_span(app: lowq.Lowq, queue: lowq.Queue) -> None:
    for span, (width, slots) in TIMES_RINGS.items():
        with case(span):
            app.client.command("DEL", KEY)
            record(app, "Orders", START + 1, waits={1.0: 10})
            assert told(queue.times(span, now=START + slots * width).wait) == {}
            # The same slot, one turn later: not added to what is there.
            record(app, "Orders", START + slots * width + 1, waits={1.0: 2})
            assert told(queue.times(span, now=START + slots * width + 2).wait) == {1.0: 2}


def test_the_totals_are_those_of_all_times(app: lowq.Lowq, queue: lowq.Queue) -> None:
    record(app, "Orders", START, waits={0.25: 4, 7200.0: 1}, waited=7201.0, runs={0.5: 1}, run_seconds=0.4)
    record(app, "Orders", START + 40 * 86400, waits={0.25: 4}, waited=1.0, runs={math.inf: 2}, run_seconds=800.0)
    waits, runs = queue.wait_times(), queue.perform_times()
    assert (waits.count, round(waits.seconds, 6), told(waits)) == (9, 7202.0, {0.25: 8, 7200.0: 1})
    assert (runs.count, round(runs.seconds, 6), told(runs)) == (3, 800.4, {0.5: 1, math.inf: 2})


def test_nothing_is_recorded_of_a_queue_without_work(app: lowq.Lowq, queue: lowq.Queue) -> None:
    record(app, "Orders", START)
    names = app.client.command("HKEYS", KEY, key=KEY)
    assert not [name for name in names if name.startswith((b"times", b"slow", b"wait"))]
    assert queue.slowest(now=START) == []
    assert queue.wait_times().count == 0
    with pytest.raises(lowq.ConfigError, match="hour, day, month"):
        queue.times("year")  # type: ignore[arg-type]  # that is the point


@real_redis_often
def test_times_are_bounded_however_long_a_queue_is_worked(app: lowq.Lowq, queue: lowq.Queue) -> None:
    every = dict.fromkeys((*WAIT_BOUNDS, math.inf), 10**9)
    runs = dict.fromkeys((*BOUNDS, math.inf), 10**9)
    for number in range(0, 35 * 86400, 3000):
        record(app, "Orders", START + number, waits=every, runs=runs)
    values = dict(zip(*[iter(app.client.command("HGETALL", KEY, key=KEY))] * 2, strict=True))
    times = [value for name, value in values.items() if name.startswith(b"times:")]
    assert len(times) <= 60 + 96 + 90
    assert max(map(len, times)) <= 600
    assert 30 * 86400 < app.client.command("TTL", KEY, key=KEY) <= 31 * 86400


def test_the_slowest_of_the_last_hour_come_first(app: lowq.Lowq, queue: lowq.Queue) -> None:
    odd = b"\xff \x00'\"\n1 2".decode("utf-8", "surrogateescape")
    record(app, "Orders", START, slow=[(2.0, batch("a", 1.5)), (1.0, batch(odd, 80.25, 100, 0))])
    record(app, "Orders", START + 10, slow=[(0.0, batch("a", 3.0)), (0.0, batch(odd, 1.0))])
    found = queue.slowest(now=START + 20)
    assert found == [
        inspection.SlowBatch(odd, 100, 0, 80.25, START - 1.0),
        inspection.SlowBatch("a", 1, 2, 3.0, START + 10.0),
    ]
    assert [item.id for item in queue.slowest(now=START + 3601)] == ["a"]
    record(app, "Orders", START + 7200, slow=[(0.0, batch("c", 0.5))])
    assert [item.id for item in queue.slowest(now=START + 7200)] == ["c"]


def test_of_many_slow_batches_the_slowest_are_kept(app: lowq.Lowq, queue: lowq.Queue) -> None:
    for number in range(100):
        slow = [(0.0, batch(f"{i}", 1.0 + number % 50)) for i in range(number % MOST_SLOW + 1)]
        record(app, "Orders", START + 30 * number, slow=slow)
    found = [item.seconds for item in queue.slowest(now=START + 30 * 99)]
    assert found == sorted(found, reverse=True)
    assert len(found) == MOST_SLOW
    assert found[0] == 50.0
    fields = [name for name in app.client.command("HKEYS", KEY, key=KEY) if name.startswith(b"slow")]
    assert len(fields) <= MOST_SLOW * SLOW_SLOTS


def test_what_was_slower_an_hour_ago_hides_nothing(app: lowq.Lowq, queue: lowq.Queue) -> None:
    record(app, "Orders", START, slow=[(0.0, batch(f"outage {number}", 100.0)) for number in range(MOST_SLOW)])
    record(app, "Orders", START + 1800, slow=[(0.0, batch("a", 50.0))])
    record(app, "Orders", START + 3000, slow=[(0.0, batch("outage 1", 2.0))])
    assert [item.seconds for item in queue.slowest(now=START + 3000)] == [100.0] * MOST_SLOW
    assert [(item.id, item.seconds) for item in queue.slowest(now=START + 3601)] == [("a", 50.0), ("outage 1", 2.0)]


def test_slow_batches_of_another_time_and_foreign_ones_are_left_out(app: lowq.Lowq, queue: lowq.Queue) -> None:
    for at in (START - 86400, START + 86400):
        record(app, "Orders", at, slow=[(0.0, batch("by a clock that was set", 50.0))])
        assert queue.slowest(now=START) == []
    field = f"slow:{int(START // SLOW_STRETCH) % SLOW_SLOTS}:0"
    for written in (b"x", b"\xff", b"nan nan 1 1 a", b"1 2 3", b"{} -5 1 1 a", b"{} 1e400 1 1 a", b"{} 1 x x a"):
        with case(written):
            app.client.command("DEL", KEY)
            app.client.command("HSET", KEY, field, written.replace(b"{}", b"%d" % START), key=KEY)
            assert queue.slowest(now=START) == []
            record(app, "Orders", START, slow=[(0.0, batch("a", 1.0))])
            assert [item.id for item in queue.slowest(now=START)][-1] == "a"


def test_a_stretch_that_somebody_has_written_costs_only_itself(app: lowq.Lowq, queue: lowq.Queue) -> None:
    rows: list[tuple[bytes, dict[float, int]]] = [
        (b"x", {}), (b"\xff\xff\xff", {}), (b"{} 1:1", {}), (b"1 0:5 0:5", {}), (b"nan 0:5 0:5", {}),
        (b"{} - 0:5,x,7,99:1,1:x,2:1e300,-1:5", {0.001: 5}), (b"{} x:x -", {}),
    ]  # fmt: skip
    number = int(START // 60)
    for written, runs in rows:
        with case(written):
            app.client.command("DEL", KEY)
            field, raw = f"times:60:{number % 60}", written.replace(b"{}", b"%d" % number)
            app.client.command("HSET", KEY, field, raw, key=KEY)
            assert told(queue.times(now=START).run) == runs
            record(app, "Orders", START, runs={1.0: 1})
            assert queue.times(now=START).run.count >= 1
