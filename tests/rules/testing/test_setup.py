"""`setup` and `teardown` in `drain` and `adrain`: in the thread or loop that performs."""

import asyncio
import threading
from typing import Any

import pytest

import lowq
from lowq.errors import QueueInUse
from lowq.testing import adrain, drain
from lowq.workers import Worker

#: No store sees what is set up in a thread or a loop.
pytestmark = pytest.mark.parametrize("store_url", ["redis"], indirect=True)

Calls = list[tuple[str, int]]


@pytest.fixture
def calls() -> Calls:
    return []


@pytest.fixture
def worker(is_async: bool, app: lowq.Lowq, calls: Calls) -> type[Worker[Any]]:
    class Plain(lowq.Worker[Any]):
        def setup(self) -> None:
            calls.append(("setup", threading.get_ident()))

        def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
            calls.append(("perform", threading.get_ident()))
            if "bad" in payloads_by_id:
                raise KeyboardInterrupt

        def teardown(self) -> None:
            calls.append(("teardown", threading.get_ident()))

    class Awaits(Plain):
        async def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:  # type: ignore[override]  # another form
            await asyncio.sleep(0)
            super().perform(payloads_by_id)

        async def teardown(self) -> None:  # type: ignore[override]  # another form
            await asyncio.sleep(0)
            super().teardown()

    return app.worker(shards_count=1)(Awaits if is_async else Plain)


def test_it_is_set_up_and_torn_down_around_all_that_a_drain_performs(worker: type[Worker[Any]], calls: Calls) -> None:
    worker.perform_async({"id": n} for n in range(3))
    drain(worker)
    assert [what for what, _ in calls] == ["setup", "perform", "perform", "perform", "teardown"]
    assert {thread for _, thread in calls} == {threading.get_ident()}
    calls.clear()
    worker.push(1)
    asyncio.run(adrain(worker))
    assert [what for what, _ in calls] == ["setup", "perform", "teardown"]
    calls.clear()
    worker.push("bad")
    with pytest.raises(KeyboardInterrupt):
        drain(worker)
    assert [what for what, _ in calls] == ["setup", "perform", "teardown"]


def test_a_setup_that_fails_is_raised_and_nothing_is_performed(worker: type[Worker[Any]], calls: Calls) -> None:
    def setup(_self: Any) -> None:
        raise ZeroDivisionError("no database")

    worker.setup = setup  # type: ignore[method-assign, assignment]
    worker.push(1)
    with pytest.raises(ZeroDivisionError, match="no database"):
        drain(worker)
    assert calls == []
    assert worker.queue.stats().length == 1
    worker.setup = lambda _self: None  # type: ignore[method-assign, assignment]
    assert drain(worker).performed == 1  # its shards are free again


def test_a_queue_that_is_worked_already_sets_nothing_up(app: lowq.Lowq, calls: Calls) -> None:
    @app.worker(shards_count=1)
    class Orders(lowq.Worker[Any]):
        def setup(self) -> None:
            calls.append(("setup", 0))

        def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
            with pytest.raises(QueueInUse):
                drain(Orders)

    Orders.push(1)
    assert drain(Orders).performed == 1
    assert calls == [("setup", 0)]
