"""Workers of the tests of tracing and error reports: the same handler, plain and as a coroutine."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lowq
from lowq.node.node import Node
from lowq.workers import Worker

#: Called with the payloads by id.
Handler = Callable[[dict[str, list[Any]]], object]


def make_worker(
    app: lowq.Lowq, handler: Handler = lambda _: None, *, is_async: bool = False, **options: Any
) -> type[Worker[Any]]:
    """Of the queue `Orders` with one shard, unless the options say otherwise."""

    def plain(payloads_by_id: dict[str, list[Any]]) -> None:
        handler(payloads_by_id)

    async def awaits(payloads_by_id: dict[str, list[Any]]) -> None:
        await asyncio.sleep(0)
        handler(payloads_by_id)

    decorate: Any = app.worker(**{"shards_count": 1, "batch_size": 10, "queue_name": "Orders", **options})
    made: type[Worker[Any]] = decorate(awaits if is_async else plain)
    return made


@contextmanager
def running_node(app: lowq.Lowq, threads: int = 1) -> Iterator[Node]:
    """A node in this process, which has stopped afterwards."""
    node = Node(app, threads=threads)
    node.start()
    try:
        yield node
    finally:
        node.stop()
