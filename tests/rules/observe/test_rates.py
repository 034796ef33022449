"""A queue's history: rates, lag and perform times, as nodes record them."""

from typing import Any

import pytest

import lowq
from lowq import inspection
from lowq.observe.histories import History
from lowq.store.keys import history_key
from tests.recorded import record
from tests.rows import case
from tests.rules.support import NOW
from tests.tiers import real_redis_often

#: The beginning of a stretch of every span.
START = NOW // 7200 * 7200
KEY = history_key("lowq", "Orders")


def told(history: History) -> dict[float, Any]:
    """Seconds after START -> what is known, where anything is."""
    return {
        rate.at - START: (rate.processed, rate.failed, rate.lag) for rate in history.rates if rate.processed is not None
    }


def test_counts_of_several_nodes_become_rates_over_the_time_that_they_come_from(app: lowq.Lowq) -> None:
    record(app, "Orders", START + 5, 30, 1, lag=2.0)
    record(app, "Orders", START + 9, 20, 0, seconds=4.0, lag=7.0)
    record(app, "Orders", START + 45, 100, seconds=20.0)
    assert told(app.queue("Orders", 3).rates("hour", now=START + 80)) == {
        0: (pytest.approx(5.0), pytest.approx(0.1), 7.0),
        20: (pytest.approx(2.5), 0.0, 0.0),
        30: (pytest.approx(5.0), 0.0, 0.0),
        40: (2.5, 0.0, 0.0),
    }


def test_a_lag_that_nobody_saw_is_a_gap_and_not_zero(app: lowq.Lowq) -> None:
    record(app, "Orders", START + 9, 0, lag=300.0)
    # Redis was away until now: what was done meanwhile is told, how long jobs waited then is not known.
    record(app, "Orders", START + 105, 96, seconds=96.0, lag=396.0)
    found = told(app.queue("Orders", 3).rates("hour", now=START + 160))
    assert [found[second][2] for second in range(0, 110, 10)] == [300.0, *[None] * 9, 396.0]
    assert {found[second][0] for second in range(10, 100, 10)} == {1.0}
    record(app, "Orders", START + 108, 0, seconds=3.0, lag=None)
    record(app, "Orders", START + 113, 0, seconds=5.0, lag=None)
    found = told(app.queue("Orders", 3).rates("hour", now=START + 160))
    assert (found[100][2], found[110][2]) == (396.0, None)
    record(app, "Orders", START + 114, 0, seconds=5.0, lag=3.0)
    assert told(app.queue("Orders", 3).rates("hour", now=START + 160))[110][2] == 3.0


def test_a_word_that_comes_a_little_late_tells_the_lag_until_then(app: lowq.Lowq) -> None:
    record(app, "Orders", START + 9, 0, lag=300.0)
    record(app, "Orders", START + 35, 0, seconds=26.0, lag=326.0)
    found = told(app.queue("Orders", 3).rates("hour", now=START + 160))
    assert [found[second][2] for second in (0, 10, 20, 30)] == [300.0, 326.0, 326.0, 326.0]


def test_time_without_a_node_is_told_from_time_without_work(app: lowq.Lowq) -> None:
    record(app, "Orders", START + 5, 0)
    record(app, "Orders", START + 35, 0)
    rates = app.queue("Orders", 3).rates("hour", now=START + 60).rates
    assert [rate.processed for rate in rates][-4:] == [None, None, 0.0, None]


def test_a_ring_forgets_what_is_older_than_its_span(app: lowq.Lowq) -> None:
    queue = app.queue("Orders", 3)
    rows: list[tuple[inspection.Span, int, int]] = [("hour", 10, 360), ("day", 300, 288), ("month", 7200, 360)]
    for span, width, slots in rows:
        with case(span):
            app.client.command("DEL", KEY)
            record(app, "Orders", START + 1, 10, seconds=1.0)
            assert told(queue.rates(span, now=START + 2 * width))[0][0] == pytest.approx(10 / width)
            # The same slot, one turn later: not added to what is there.
            record(app, "Orders", START + slots * width + 1, 20, seconds=1.0)
            found = told(queue.rates(span, now=START + (slots + 2) * width))
            assert found == {slots * width: (pytest.approx(20 / width), 0.0, 0.0)}


def test_the_stretch_that_goes_on_is_told_once_enough_of_it_has_passed(app: lowq.Lowq) -> None:
    record(app, "Orders", START + 100, 50, seconds=50.0)
    assert told(app.queue("Orders", 3).rates("day", now=START + 100))[0][0] == pytest.approx(0.5)
    assert 0 not in told(app.queue("Orders", 3).rates("hour", now=START + 5))


@real_redis_often
def test_a_history_is_bounded_and_expires(app: lowq.Lowq) -> None:
    for number in range(0, 3000, 7):
        record(app, "Orders", START + 40 * number, number, seconds=700.0)
    assert app.client.command("HLEN", KEY) <= 360 + 288 + 360
    assert 30 * 86400 < app.client.command("TTL", KEY) <= 31 * 86400
    app.queue("Orders", 3).push({"id": 1})
    app.queue("Orders").drop()
    assert app.client.command("EXISTS", KEY) == 0


def test_no_history_is_no_error(app: lowq.Lowq) -> None:
    queue = app.queue("Orders", 3)
    assert told(queue.rates("month")) == {}
    assert queue.perform_times().count == 0
    with pytest.raises(lowq.ConfigError, match="hour, day, month"):
        queue.rates("year")  # type: ignore[arg-type]  # that is the point
