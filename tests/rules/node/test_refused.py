"""What keeps a node from starting, or stops it, for reasons that concern no job."""

from typing import Any, cast

import pytest

import lowq
from lowq.node.node import Node
from lowq.node.watchdog import Watchdog
from lowq.work.loop import BatchActivity
from tests.rows import case
from tests.rules.node.conftest import MakeApp
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
