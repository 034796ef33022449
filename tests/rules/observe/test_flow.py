"""What came into a queue and what was performed in the last minutes, as nodes record it."""

import dataclasses

import pytest

import lowq
from lowq.observe.histories import Flow, read_flows
from lowq.shards.shard import Inflow
from lowq.store.keys import history_key
from tests.recorded import record
from tests.rows import case
from tests.rules.support import NOW
from tests.tiers import real_redis_often

#: The beginning of a stretch, and when 5 minutes since then are over and all nodes have reported.
START = NOW // 600 * 600
END = START + 306
KEY = history_key("lowq", "Orders")


def flow(app: lowq.Lowq, now: float) -> Flow | None:
    return read_flows(app, ["Orders"], now).get("Orders")


def test_what_several_nodes_saw_is_added_up_over_the_time_that_it_is_known_of(app: lowq.Lowq) -> None:
    record(app, "Orders", START + 5, 20, inflow=Inflow(30, -6))
    record(app, "Orders", START + 8, 1, inflow=Inflow(2, 4))
    assert flow(app, START + 15) is None, "reports of that stretch are still to come"
    assert flow(app, START + 16) == Flow(10.0, 32.0, 21.0, -2.0)
    record(app, "Orders", START + 295, 10, inflow=Inflow(0, -10))
    assert flow(app, END) == Flow(20.0, 32.0, 31.0, -12.0)
    assert flow(app, END + 10) == Flow(10.0, 0.0, 10.0, -10.0), "the first stretch is more than 5 minutes ago"
    assert flow(app, START + 600 + 16) is None
    record(app, "Orders", START + 600 + 5, 1, inflow=Inflow(2, 3))
    assert flow(app, START + 600 + 16) == Flow(10.0, 2.0, 1.0, 3.0), "that of a round before is overwritten"


def test_what_is_of_a_long_time_is_spread_over_it(app: lowq.Lowq) -> None:
    record(app, "Orders", START + 29, 59, inflow=Inflow(118, -59), seconds=59.0)
    for now, expected in ((START + 36, (60.0, 118.0, 59.0, -59.0)), (START + 286, (50.0, 98.0, 49.0, -49.0))):
        assert dataclasses.astuple(read_flows(app, ["Orders"], now)["Orders"])[:4] == pytest.approx(expected)


def test_nodes_that_know_no_flow_and_those_that_do_leave_each_others_words_alone(app: lowq.Lowq) -> None:
    record(app, "Orders", START + 5, 20, inflow=Inflow(30, -6))
    record(app, "Orders", START + 8, 100, inflow=None)
    assert flow(app, START + 16) == Flow(10.0, 30.0, 20.0, -6.0)
    (rate,) = [rate for rate in app.queue("Orders", 3).rates("hour", now=START + 60).rates if rate.processed]
    assert rate.processed == pytest.approx(12.0)
    assert len(app.client.command("HGET", KEY, f"10:{int(START // 10) % 360}").split()) == 4, "as older nodes read it"


def test_what_is_no_flow_is_left_out_and_written_anew(app: lowq.Lowq) -> None:
    number = int(START // 10)
    for word in ("x", "1 2 3", "nan nan nan nan", "{} 1e300 0 0", "{} -1 0 0", "{} 0 0 -1"):
        with case(word):
            app.client.command("HSET", KEY, f"flow:{number % 60}", word.format(number))
            assert flow(app, START + 16) is None
            if "{}" not in word:
                record(app, "Orders", START + 5, 1, inflow=Inflow(2, 3))
                assert flow(app, START + 16) == Flow(10.0, 2.0, 1.0, 3.0)


@real_redis_often
def test_the_flow_has_a_ring_of_its_own(app: lowq.Lowq) -> None:
    for number in range(0, 3000, 7):
        record(app, "Orders", START + 40 * number, number, inflow=Inflow(1, 1), seconds=700.0)
    assert app.client.command("HLEN", KEY) <= 360 + 288 + 360 + 60


def test_many_queues_are_read_at_once_and_one_of_the_wrong_type_hides_no_other(app: lowq.Lowq) -> None:
    record(app, "Orders", START + 5, 20, inflow=Inflow(30, -6))
    app.client.command("SET", history_key("lowq", "odd"), "x", key=history_key("lowq", "odd"))
    names = ["odd", *(f"queue {number}" for number in range(250)), "Orders"]
    assert read_flows(app, names, START + 16) == {"Orders": Flow(10.0, 30.0, 20.0, -6.0)}
    assert read_flows(app, [], START + 16) == {}
