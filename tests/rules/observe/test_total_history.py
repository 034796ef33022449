"""The histories of several queues as one."""

import pytest

from lowq import Lowq
from lowq.inspection import HistoryPoint
from lowq.observe.histories import RINGS, Span, total_history
from lowq.store.keys import history_key
from tests.rules.support import NOW

#: What is read is added up here.
pytestmark = pytest.mark.parametrize("store_url", ["memory"], indirect=True)


def record(app: Lowq, queue: str, span: Span, *stretches: tuple[int, str]) -> None:
    """How many stretches ago, and "processed failed lag"."""
    width, slots = RINGS[span]
    for ago, figures in stretches:
        number = int(NOW // width) - ago
        app.client.command("HSET", history_key("lowq", queue), f"{width}:{number % slots}", f"{number} {figures}")


def rates(app: Lowq, span: Span, queues: list[str]) -> list[HistoryPoint]:
    return [rate for rate in total_history(app, queues, span, NOW).rates if rate.processed is not None]


def test_rates_are_added_the_longest_lag_counts_and_what_is_unknown_of_some_is_left_out(app: Lowq) -> None:
    record(app, "a", "hour", (9, "10 2 4"), (8, "20 0 9"), (7, "30 0 -1"))
    record(app, "b", "hour", (9, "100 5 7"), (8, "200 10 1"))
    record(app, "by hand", "hour", (9, "nonsense"), (8, "10 2 nan"))
    record(app, "a round before", "hour", (9 + RINGS["hour"][1], "10 2 4"))
    first, second, third = rates(app, "hour", ["a", "b", "by hand", "a round before"])
    assert (first.processed, first.failed, first.lag) == (11, 0.7, 7)
    assert (second.processed, second.failed, second.lag) == (22, 1, 9)
    assert (third.processed, third.failed, third.lag) == (3, 0, None)
    assert second.at - first.at == 10


def test_of_one_queue_it_is_that_of_the_queue(app: Lowq) -> None:
    spans: tuple[Span, ...] = ("hour", "day", "month")
    for span in spans:
        record(app, span, span, (9, "10 2 4"), (8, "20 0 -1"), (5, "7 7 0"))
        assert total_history(app, [span], span, NOW) == app.queue(span, 1).rates(span, now=NOW)


def test_many_queues_and_none(app: Lowq) -> None:
    names = [f"q-{number}" for number in range(2 * 20 + 3)]
    for name in names:
        record(app, name, "hour", (9, "10 0 1"))
    (rate,) = rates(app, "hour", names)
    assert rate.processed == pytest.approx(len(names))
    assert total_history(app, [], "hour", NOW).rates == []
