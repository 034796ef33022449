"""Queues that share a node's threads: real threads, real time. What needs no time is in tests/unit/broker."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import lowq
from tests.waiting import until

pytestmark = pytest.mark.slow

WAIT, THREADS = 0.02, 5


@pytest.fixture
def app(redis_url: str) -> Iterator[lowq.Lowq]:
    app = lowq.Lowq(redis_url=redis_url)
    yield app
    app.close()


class Performed:
    """Workers whose jobs wait, and how many of their jobs ran: in all, and at once."""

    def __init__(self, app: lowq.Lowq) -> None:
        self._app, self._lock = app, threading.Lock()
        self.count: dict[str, int] = {}
        self.now: dict[str, int] = {}
        self.most: dict[str, int] = {}

    def worker(self, name: str, **options: Any) -> type[lowq.Worker[Any]]:
        self.count[name] = self.now[name] = self.most[name] = 0

        @self._app.worker(queue_name=name, **options)
        def perform(_payloads_by_id: dict[str, list[Any]]) -> None:
            with self._lock:
                self.now[name] += 1
                self.most[name] = max(self.most[name], self.now[name])
            time.sleep(WAIT)
            with self._lock:
                self.now[name] -= 1
                self.count[name] += 1

        return perform

    def between(self, first: int, jobs: int) -> dict[str, int]:
        """Of so many jobs of all queues together, after the first ones, how many were of each queue."""
        until(lambda: sum(self.count.values()) >= first)
        before = dict(self.count)
        until(lambda: sum(self.count.values()) >= first + jobs)
        return {name: count - before[name] for name, count in self.count.items()}


def fill(worker: type[lowq.Worker[Any]], jobs: int) -> None:
    worker.perform_async({"id": number} for number in range(jobs))


def test_weights_of_3_to_1_give_3_to_1(app: lowq.Lowq) -> None:
    performed = Performed(app)
    for worker in (performed.worker("heavy", weight=3), performed.worker("light")):
        fill(worker, 4_000)
    node = lowq.Node(app, threads=THREADS)
    node.start()
    counts = performed.between(100, 1_000)
    node.stop()
    assert counts["heavy"] / counts["light"] == pytest.approx(3, rel=0.2)


def test_a_queue_with_max_threads_has_them_all_and_no_more(app: lowq.Lowq) -> None:
    performed = Performed(app)
    fill(performed.worker("bounded", weight=9, max_threads=2), 4_000)
    fill(performed.worker("free"), 4_000)
    node = lowq.Node(app, threads=THREADS)
    node.start()
    counts = performed.between(100, 1_000)
    node.stop()
    assert performed.most["bounded"] == 2
    assert counts["bounded"] / sum(counts.values()) == pytest.approx(2 / THREADS, rel=0.25)


def test_a_job_beside_a_backlog_waits_for_a_few_of_its_jobs_at_most(app: lowq.Lowq) -> None:
    performed = Performed(app)
    fill(performed.worker("slow"), 4_000)
    fast = performed.worker("fast")
    node = lowq.Node(app, threads=THREADS)
    node.start()
    until(lambda: performed.count["slow"] > 50)
    passed: list[int] = []
    for number in range(50):
        before, done = performed.count["slow"], performed.count["fast"]
        fast.perform_async({"id": number})
        until(lambda done=done: performed.count["fast"] > done)  # type: ignore[misc]  # a default binds it
        passed.append(performed.count["slow"] - before)
    node.stop()
    # Counted, not timed: while it waits for a thread and runs, each of the five ends a batch or two.
    assert sorted(passed)[len(passed) // 2] <= 4 * THREADS
