"""A stage for browsers: queues with all kinds of jobs, a node that works them, and the dashboard over HTTP."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Mount

import lowq
import lowq_web
from lowq.node.node import Node
from tests.rules.web.hand import Hand
from tests.rules.web.served import served
from tests.waiting import until


class Stage:
    """An application on an empty Redis, whose queues are filled by hand."""

    def __init__(self, redis_url: str) -> None:
        # So long that no node is held for dead, or loses its shards, while a busy machine keeps its threads waiting.
        self.app = lowq.Lowq(redis_url=redis_url, lease_ttl=15.0)
        self._nodes: list[Node] = []

    def close(self) -> None:
        for node in self._nodes:
            node.stop(5.0)
        self.app.close()

    def stopping(self) -> bool:
        """Whether any of its nodes is to stop."""
        return any(node.stopping.is_set() for node in self._nodes)

    def start_node(self, threads: int = 3) -> Node:
        """A node of all workers of the application, in this process."""
        node = Node(self.app, threads=threads)
        node.start()
        self._nodes.append(node)
        until(lambda: any(found.name == node.name for found in self.app.nodes()), "heartbeat of the node")
        return node

    def fail(self, queue: str, job_id: str, error: str, *, retry_count: int = 0, delay: float = 3600.0) -> None:
        """It alone is due in its shard, is taken, and fails. The queue must have no node."""
        now, hand = time.time(), Hand(self.app, queue, self.app.queue(queue).shards_count)
        hand.fail(job_id, now, now + delay, retry_count=retry_count, error=error)
        hand.die(hand.index(job_id))

    @contextmanager
    def serving(self, below: str = "", **options: Any) -> Iterator[str]:
        """The address of the dashboard, or of an application that has it ``below`` a path."""
        application = lowq_web.create_app(self.app, **options)
        with served(Starlette(routes=[Mount(below, application)]) if below else application) as address:
            try:
                yield address
            finally:
                application.state.context.open_streams.close()


TRACEBACK = """Traceback (most recent call last):
  File "/srv/shop/sync.py", line 48, in perform
    self.warehouse.book(order)
  File "/srv/shop/warehouse.py", line 112, in book
    raise TimeoutError("warehouse did not answer within 5 s")
TimeoutError: warehouse did not answer within 5 s
"""
