"""A node all of whose threads, or tasks, are stuck says so: `/healthz` beside it answers 503 then."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import lowq
from lowq.node.node import Node
from lowq.operate import nodes as stuck
from tests.waiting import until


@pytest.fixture
def app(store_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[lowq.Lowq]:
    """Whatever has been running for a moment is stuck."""
    monkeypatch.setattr(stuck, "STUCK_SECONDS", 0.05)
    monkeypatch.setattr(stuck, "stuck_limit", lambda _times: 0.05)
    monkeypatch.setattr(stuck.StuckLimits, "KNOWN", 0)
    app = lowq.Lowq(redis_url=store_url, concurrency=3)
    yield app
    app.close()


def test_threads(app: lowq.Lowq) -> None:
    go = threading.Event()

    @app.worker(shards_count=3)
    def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        go.wait()

    node = Node(app, threads=2)
    node.start()
    try:
        orders.queue.push({"id": n} for n in range(30))
        until(lambda: "all 2 threads have been stuck for" in (node.trouble() or ""), "trouble")
        go.set()
        until(lambda: node.trouble() is None, "the end of the trouble")
    finally:
        go.set()
        assert node.stop(60.0)


def test_tasks_once_no_other_can_begin(app: lowq.Lowq) -> None:
    go = asyncio.Event()
    begun: list[str] = []

    @app.worker(shards_count=8, batch_size=1)
    async def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        begun.extend(payloads_by_id)
        while not go.is_set():
            await asyncio.sleep(0.01)

    of_shard = {orders.queue.shard_of(str(n)): str(n) for n in range(100)}
    node = Node(app, threads=1)
    node.start()
    try:
        orders.queue.push({"id": of_shard[n]} for n in range(2))
        until(lambda: len(begun) == 2, "two tasks")
        until(lambda: any(batch["seconds"] > 0.05 for node in app.nodes() for batch in node.longest_tasks), "a while")
        assert node.trouble() is None, "a third one may begin"
        orders.queue.push({"id": of_shard[2]})
        until(lambda: "all 3 tasks have been stuck for" in (node.trouble() or ""), "trouble")
        go.set()
        until(lambda: node.trouble() is None, "the end of the trouble")
    finally:
        go.set()
        assert node.stop(60.0)
