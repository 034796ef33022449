"""How many connections a node may have at once."""

from typing import Any

import pytest

import lowq
from lowq.node.node import Node
from tests.rules.node.conftest import MakeApp
from tests.rules.node.drivers import running


@pytest.mark.parametrize(("threads", "expected"), [(None, 9 + 3), (4, 4 + 3)], ids=["of the settings", "its own"])
def test_it_has_one_for_each_thread_and_some_more_whatever_its_workers_are(
    make_app: MakeApp, is_async: bool, threads: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_async:
        expected = 9 + 3  # it has no threads for workers
    app = make_app(threads_per_node=9)

    class Orders(lowq.Worker[Any]):
        def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
            pass

    class AsyncOrders(lowq.Worker[Any]):
        async def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
            pass

    app.worker(shards_count=1)(AsyncOrders if is_async else Orders)
    sizes: list[int] = []
    connect = app.connect

    def connect_noting(size: int, **options: Any) -> Any:
        sizes.append(size)
        return connect(size, **options)

    monkeypatch.setattr(app, "connect", connect_noting)
    with running(Node(app, threads=threads)):
        assert expected in sizes  # others are the client of the application, and the listener
