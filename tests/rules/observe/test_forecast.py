"""When the backlog of a queue is gone, from what its nodes have recorded and what waits."""

import uuid

import pytest

import lowq
from lowq import inspection
from lowq.shards.shard import Inflow
from lowq.store.keys import shard_prefix
from tests.recorded import record
from tests.rows import case
from tests.rules.support import NOW, emptied_app

START = NOW // 600 * 600
#: When 5 minutes since then are over and all nodes have reported.
END = START + 306


@pytest.fixture
def store_url() -> str:
    """One store will do: a forecast is computed of what is read."""
    return f"memory://{uuid.uuid4().hex}"


def work(app: lowq.Lowq, pushed: int, processed: int, change: int) -> None:
    """What a node has recorded in the five minutes."""
    record(app, "Orders", START + 299, processed, seconds=299.0, inflow=Inflow(pushed, change))


def push(app: lowq.Lowq, count: int, *, is_worked: bool = True, waited: float = 5.0) -> lowq.Queue:
    """A queue with a backlog that has waited for so long, and 5 jobs for later."""
    queue = app.queue("Orders", 3)
    queue.push({"id": f"later {number}", "perform_at": NOW + 86400} for number in range(5))
    queue.push({"id": number, "perform_at": END - waited} for number in range(count))
    if is_worked:
        lease = shard_prefix("lowq", "Orders", 1) + "lease"
        app.client.command("SET", lease, "somebody:1", key=lease)
    return queue


def test_a_backlog_that_shrinks_is_gone_after_a_while(app: lowq.Lowq) -> None:
    queue = push(app, 200)
    assert queue.forecast(now=END) == inspection.Forecast(200, None, None, None, None), "a node that has just started"
    assert queue.forecast(now=END).text == "not known yet"
    work(app, pushed=3000, processed=150, change=-15)
    found = queue.forecast(now=END)
    assert found.backlog == 200, "what is scheduled for later is none"
    assert found.pushed_rate == pytest.approx(10.0), "payloads: most were merged"
    assert found.performed_rate == pytest.approx(0.5)
    assert found.drain_seconds == pytest.approx(4000.0)
    assert (found.growing_rate, found.text) == (0.0, "empty in about 67 min")


def test_what_becomes_of_a_backlog(store_url: str) -> None:
    rows = [
        (200, 30000, 3, 2.0, 0.0, "keeps up"),
        (201, 30000, 3, None, 0.0, "late"),  # some of it stands still
        (200, 300, 0, None, 0.0, "steady"),
        (200, 300, 3, None, 0.0, "steady"),
        (200, 0, 0, None, 0.0, "nothing is performed"),
        (200, 300, -299, 200.0, 0.0, "empty in about 3 min"),
        (200, 300, -2990, 20.0, 0.0, "empty in about 20 s"),
        (200, 300, 3600, None, 12.0, "growing by 12/s"),
        (0, 300, 0, 0.0, 0.0, "empty"),
    ]
    for count, processed, change, drain_seconds, growing_rate, text in rows:
        with case(count, processed, change), emptied_app(store_url) as app:
            queue = push(app, count, waited=61.0 if text == "late" else 5.0)
            work(app, pushed=0, processed=processed, change=change)
            found = queue.forecast(now=END)
            assert found.text == text
            assert found.growing_rate == pytest.approx(growing_rate, rel=0.01)
            assert found.drain_seconds == (None if drain_seconds is None else pytest.approx(drain_seconds, rel=0.01))


def test_what_came_at_once_minutes_ago_is_no_growth(app: lowq.Lowq) -> None:
    queue = push(app, 6_000)
    record(app, "Orders", START + 119, 10, seconds=10.0, inflow=Inflow(10_000, 9_990))
    record(app, "Orders", START + 299, 1_800, seconds=180.0, inflow=Inflow(0, -1_800))
    found = queue.forecast(now=END)
    assert (found.growing_rate, found.text) == (0.0, "empty in about 10 min")
    assert found.pushed_rate == pytest.approx(10_000 / 190, rel=0.1)


def test_nothing_is_said_before_half_a_minute_is_known(app: lowq.Lowq) -> None:
    queue = push(app, 200)
    record(app, "Orders", START + 299, 100, seconds=15.0, inflow=Inflow(300, 200))
    assert queue.forecast(now=END).text == "not known yet"


def test_a_queue_that_is_paused_does_not_grow(app: lowq.Lowq) -> None:
    queue = push(app, 200)
    work(app, pushed=3600, processed=0, change=3600)
    queue.pause()
    found = queue.forecast(now=END)
    assert (found.text, found.growing_rate, found.drain_seconds) == ("paused", None, None)


def test_without_a_node_nothing_is_known_but_that_it_is_empty(app: lowq.Lowq) -> None:
    assert push(app, 0, is_worked=False).forecast(now=END).text == "empty"
    queue = push(app, 200, is_worked=False)
    work(app, pushed=0, processed=150, change=-150)  # it has left since
    assert queue.forecast(now=END) == inspection.Forecast(200, None, None, None, None, is_worked=False)
    assert queue.forecast(now=END).text == "no node works it"
    with pytest.raises(lowq.UnknownQueueError):
        app.queue("Ordres").forecast()


def test_in_words() -> None:
    for forecast, text in (
        (inspection.Forecast(1000000, 1.0, 300.0, 5.2 * 3600, 0.0), "empty in about 5 h"),
        (inspection.Forecast(1000000, 1.0, 300.0, 3 * 86400.0, 0.0), "empty in about 3 d"),
        (inspection.Forecast(1000000, 1.0, 300.0, None, 0.06), "growing by 0.1/s"),
        (inspection.Forecast(1000000, 1.0, 300.0, None, 12345.6), "growing by 12,346/s"),
    ):
        assert forecast.text == text, forecast
