"""Schedules in real nodes: each tick is performed once, through the end of nodes, new code, and a Redis that lost its
data. Kills at each moment are in tests/rules/node/test_schedules and in the fault matrix.
"""

import logging
import threading
from typing import Any

import pytest

import lowq
from lowq.store.keys import shard_prefix
from tests.processes.node.conftest import MakeApp, Start
from tests.waiting import NEVER, PATIENCE, until


class Ticks:
    """Applications whose worker `report` has a schedule with a tick every second, and what was performed."""

    def __init__(self, make_app: MakeApp) -> None:
        self._make_app = make_app
        #: planned_at, in order.
        self.performed: list[float] = []

    def app(self, *, is_scheduled: bool = True) -> lowq.Lowq:
        app = self._make_app(lease_ttl=NEVER)

        @app.worker(shards_count=2, merge="append")  # a tick that is pushed twice is performed twice
        def report(job_id: str, payloads: list[Any]) -> None:
            self.performed.extend(payload["planned_at"] for payload in payloads)

        if is_scheduled:
            lowq.every(1, missed="all")(report)
        return app

    def more(self) -> None:
        enough = len(self.performed) + 2
        until(lambda: len(self.performed) >= enough, "two more ticks")


@pytest.fixture
def ticks(make_app: MakeApp) -> Ticks:
    return Ticks(make_app)


def test_each_tick_is_performed_once_also_when_a_node_stops_or_redis_has_lost_its_data(
    ticks: Ticks, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowq.node.schedules.ENTER_SECONDS", 0.05)
    _, app = apps = [ticks.app() for _ in range(2)]
    first, second = (start(of=app, threads=1) for app in apps)
    ticks.more()
    assert first.stop(PATIENCE)
    ticks.more()
    assert ticks.performed == [ticks.performed[0] + number for number in range(len(ticks.performed))]
    # The internal queue is seen nowhere.
    assert [info.name for info in app.queues()] == ["report"]
    (info,) = app.nodes()
    assert info.schedules == {"report": {"report": {"at": 1, "tz": None, "missed": "all"}}}
    assert len(info.performing) == info.threads == 1
    assert app.client.command("KEYS", "lowq:v1:history:lowq*") == []
    app.client.command("FLUSHALL")
    ticks.more()
    assert app.queue("report", 2).stats().buried == 0
    assert second.stop(PATIENCE)
    lease = shard_prefix("lowq", "lowq:schedules:report", 0) + "lease"
    assert app.client.command("EXISTS", lease, key=lease) == 0


def test_nodes_without_any_schedule_left_see_to_what_there_was(
    ticks: Ticks, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lowq.node.schedules.LOOK_SECONDS", 0.05)
    monkeypatch.setattr("lowq.node.schedules.FORGET_SECONDS", 0.0)
    caplog.set_level(logging.INFO, "lowq.node")
    old = start(of=ticks.app())
    ticks.more()
    assert old.stop(PATIENCE)
    app = ticks.app(is_scheduled=False)
    new = start(of=app)
    until(lambda: "has ended: no node knows it any more" in caplog.text, "the end of the schedule")
    until(lambda: not app.schedules(), "the end of its record")
    assert new.stop(PATIENCE)
    start(of=ticks.app(is_scheduled=False))  # the next one removes what is left
    until(lambda: app.client.command("KEYS", "*schedules*") == [], "the end of the internal queue")
    assert [info.name for info in app.queues()] == ["report"]


def test_ticks_come_while_all_threads_are_busy(make_app: MakeApp, start: Start) -> None:
    """A schedule has a thread of its own. What it pushes waits as any job does."""
    app = make_app()
    go = threading.Event()

    @app.worker(queue_name="Slow", shards_count=1)
    def slow(job_id: str, payloads: list[Any]) -> None:
        go.wait(PATIENCE)

    @lowq.every(1)
    @app.worker(queue_name="Other", shards_count=1)
    def other(job_id: str, payloads: list[Any]) -> None: ...

    slow.push("x")
    start(of=app, threads=1)
    until(lambda: other.queue.stats().length > 0, "a tick")
    assert slow.queue.stats().taken == 1
    go.set()
