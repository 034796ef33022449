"""What keeps a node from starting, or stops it, for reasons that concern no job."""

import asyncio
import threading
from typing import Any, cast

import pytest

import lowq
from lowq.node.node import Node
from lowq.node.watchdog import Watchdog
from lowq.work.loop import BatchActivity
from tests.rows import case
from tests.rules.node.conftest import MakeApp
from tests.rules.node.drivers import running
from tests.waiting import until


def test_what_makes_a_splitter_or_a_scheduler_must_give_one(make_app: MakeApp) -> None:
    for kind in ("splitter", "scheduler"):
        with case(kind):
            makes_none: dict[str, Any] = {f"build_{kind}": lambda: None}
            app = make_app(**makes_none)
            work: Any = type("Work", (lowq.Worker,), {"perform": lambda _self, _payloads_by_id: None})
            app.worker(shards_count=1)(work)
            with pytest.raises(lowq.ConfigError, match=rf"makes the {kind} .* gave None; it must be callable"):
                Node(app, threads=1).start()
            assert app.nodes() == []


def test_what_raises_in_the_watchdog_stops_the_node() -> None:
    seen: list[BaseException] = []
    no_activities = cast("list[BatchActivity]", [None])
    watchdog = Watchdog(lambda: no_activities, [10], 0, write_off=lambda _: None, on_fatal=seen.append)
    watchdog.start()
    until(lambda: seen, "what was raised")
    watchdog.stop()
    assert [type(error) for error in seen] == [AttributeError]


def test_who_watches_a_loop_that_has_ended_meanwhile_ends_without_a_word(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks, raised = list[threading.Thread](), list[object]()

    class Loop(asyncio.SelectorEventLoop):
        """Who watches stands still before it asks, until the loop is closed."""

        def call_soon_threadsafe(self, callback: Any, *args: Any, **options: Any) -> Any:  # type: ignore[override]
            if threading.current_thread().name == "lowq-loop-watch":
                asks.append(threading.current_thread())
                until(self.is_closed, "the end of the loop")
            return super().call_soon_threadsafe(callback, *args, **options)

    monkeypatch.setattr("lowq.work.event_loop.new_event_loop", Loop)
    monkeypatch.setattr(threading, "excepthook", raised.append)
    app = make_app()

    @app.worker(shards_count=1)
    async def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        while not asks:
            await asyncio.sleep(0.001)

    orders.push(1)
    with running(Node(app, threads=1)):
        until(lambda: asks, "who watches")
    until(lambda: not asks[0].is_alive(), "its end")
    assert raised == []
