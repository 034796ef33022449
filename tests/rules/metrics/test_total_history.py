"""The histories of several queues as one."""

from collections.abc import Iterator, Mapping

import pytest

from lowq import HistoryPoint, Lowq
from lowq.metrics.counters import RINGS, Span
from lowq.metrics.total_history import TOGETHER, total_history
from lowq.store.keys import history_key
from tests.rows import case
from tests.rules.support import NOW

#: What is read is added up here.
pytestmark = pytest.mark.parametrize("store_url", ["memory"], indirect=True)


@pytest.fixture
def app(store_url: str) -> Iterator[Lowq]:
    app = Lowq(redis_url=store_url)
    yield app
    app.close()


def record(app: Lowq, queue: str, span: Span, ago: Mapping[int, str]) -> None:
    """Stretches so many stretches ago: "processed failed lag"."""
    width, slots = RINGS[span]
    for back, figures in ago.items():
        number = int(NOW // width) - back
        key = history_key(app.config.namespace, queue)
        app.client.command("HSET", key, f"{width}:{number % slots}", f"{number} {figures}")


def rates(app: Lowq, span: Span, queues: list[str]) -> list[HistoryPoint]:
    return [rate for rate in total_history(app, queues, span, NOW).rates if rate.processed is not None]


def test_rates_are_added_and_the_longest_lag_counts(app: Lowq) -> None:
    record(app, "a", "hour", {9: "10 2 4", 8: "20 0 9"})
    record(app, "b", "hour", {9: "100 5 7", 8: "200 10 1"})
    first, second = rates(app, "hour", ["a", "b"])
    assert (first.processed, first.failed, first.lag) == (11, 0.7, 7)
    assert (second.processed, second.failed, second.lag) == (22, 1, 9)
    assert second.at - first.at == 10


def test_of_one_queue_it_is_that_of_the_queue(app: Lowq) -> None:
    spans: tuple[Span, ...] = ("hour", "day", "month")
    for span in spans:
        with case(span):
            record(app, span, span, {9: "10 2 4", 8: "20 0 -1", 5: "7 7 0"})
            assert total_history(app, [span], span, NOW) == app.queue(span, 1).rates(span, now=NOW)


def test_what_is_unknown_of_some_is_left_out(app: Lowq) -> None:
    record(app, "a", "day", {9: "300 0 3"})
    record(app, "b", "day", {7: "600 300 -1"})
    assert [(rate.processed, rate.failed, rate.lag) for rate in rates(app, "day", ["a", "b"])] == [
        (1, 0, 3),
        (2, 1, None),
    ]


def test_what_was_recorded_a_round_before_or_by_hand_does_not_count(app: Lowq) -> None:
    width, slots = RINGS["hour"]
    number = int(NOW // width) - 9
    for queue, raw in (
        ("a", f"{number - slots} 10 2 4"),
        ("b", "nonsense"),
        ("c", f"{number} 10 2 nan"),
        ("d", f"{number} 5 0 1"),
    ):
        app.client.command("HSET", history_key(app.config.namespace, queue), f"{width}:{number % slots}", raw)
    assert [(rate.processed, rate.lag) for rate in rates(app, "hour", ["a", "b", "c", "d"])] == [(0.5, 1)]


def test_many_queues_and_none(app: Lowq) -> None:
    names = [f"q-{number}" for number in range(2 * TOGETHER + 3)]
    for name in names:
        record(app, name, "hour", {9: "10 0 1"})
    (rate,) = rates(app, "hour", names)
    assert rate.processed == pytest.approx(len(names))
    assert total_history(app, [], "hour", NOW).rates == []
