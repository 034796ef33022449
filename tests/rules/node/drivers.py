"""Who performs a worker's jobs: a thread of a node, its event loop, a drain, a drain in an event loop. What becomes of
a job is the same with all of them.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import lowq
from lowq.node.node import Node
from lowq.testing import drain
from lowq.workers import Worker
from tests.waiting import PATIENCE, until

NAMES = ("thread", "loop", "drain", "async drain")


class Driver:
    """Makes workers, and performs a batch of one."""

    def __init__(self, name: str) -> None:
        self.is_async = name in ("loop", "async drain")
        self.is_node = name in ("thread", "loop")
        #: What ``retries_exhausted`` of the worker made last was told.
        self.exhausted: list[lowq.Job] = []
        #: What stopped its nodes.
        self._stops: list[BaseException] = []
        self._on_last: Callable[[], object] = lambda: None

    def worker(
        self, app: lowq.Lowq, handler: Callable[..., object], *, per_id: bool = False, **options: Any
    ) -> type[Worker[Any]]:
        """A worker of one shard that calls the handler with a batch, or with each id and its payloads; in the kind of
        function that is performed so. Its jobs are retried after 100 s.
        """
        exhausted = self.exhausted = []
        self._stops = []
        if self.is_node:
            app.config.last_words = self._stops.append

        def call(*args: Any) -> None:
            if not per_id or args[0] == lowq.current().jobs[-1].id:  # of a node that stops no other id begins
                self._on_last()
            handler(*args)

        class Orders(lowq.Worker[Any]):
            def retry_in(self, retry_count: int) -> float:
                return 100.0

            def retries_exhausted(self, jobs: list[lowq.Job]) -> None:
                exhausted.extend(jobs)

        class ByBatch(Orders):
            def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
                call(payloads_by_id)

        class ById(Orders):
            def perform_one(self, job_id: str, payloads: list[Any]) -> None:
                call(job_id, payloads)

        class Awaits(Orders):
            async def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
                await asyncio.sleep(0)
                call(payloads_by_id)

        class AwaitsById(Orders):
            async def perform_one(self, job_id: str, payloads: list[Any]) -> None:
                await asyncio.sleep(0)
                call(job_id, payloads)

        kinds: list[type[Worker[Any]]] = [ByBatch, ById, Awaits, AwaitsById]
        kind = kinds[2 * self.is_async + per_id]
        return app.worker(**{"shards_count": 1, "batch_size": 10, "queue_name": "Orders", **options})(kind)

    def perform(self, app: lowq.Lowq, worker: type[Worker[Any]]) -> BaseException | None:
        """Performs one batch and writes its outcome. Returns what was raised to stop the process."""
        if not self.is_node:
            try:
                drain(worker, limit=1)
            except Exception:
                raise
            except BaseException as stop:
                return stop
            return None
        node = Node(app, queues=[worker.queue_name], threads=1)

        def take_no_more() -> None:
            node.request_stop()
            node.quiet()

        self._on_last = take_no_more
        with running(node):
            until(lambda: node.stopping.is_set() or is_idle(worker), "a batch, or that there is none")
        self._on_last = lambda: None
        return self._stops[0] if self._stops else None


@contextmanager
def running(node: Node) -> Iterator[None]:
    """The node runs for the time of the block, and finishes what it performs."""
    node.start()
    try:
        yield
    finally:
        assert node.stop(PATIENCE)


def job_of(worker: type[Worker[Any]], job_id: str = "1") -> lowq.Job:
    """The job, which there is."""
    job = worker.queue.peek(job_id)
    assert job is not None
    return job


def is_idle(worker: type[Worker[Any]]) -> bool:
    stats = worker.queue.stats()
    return (stats.due, stats.taken) == (0, 0)


def states(worker: type[Worker[Any]], ids: Iterable[str]) -> dict[str, tuple[str, int] | None]:
    """State and retry count of each id; None: it is finished. "crashed": it is charged a crash."""
    found = {job_id: worker.queue.peek(job_id) for job_id in ids}
    assert worker.queue.stats().taken == 0
    return {
        job_id: None if job is None else ("crashed" if job.crashes else job.state, job.retry_count)
        for job_id, job in found.items()
    }
