"""Limits over all nodes: real nodes that share a limit, and what becomes of it when one of them dies."""

import asyncio
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

import lowq
from tests.processes.conftest import MakeRig
from tests.processes.node.conftest import MakeApp, Start
from tests.processes.support import Rig
from tests.waiting import PATIENCE, until


class Nodes:
    """Nodes in this process, each with an application of its own, and what their workers perform."""

    def __init__(self, make_app: MakeApp, start: Start, kind: str) -> None:
        self.app, self.start, self.kind = make_app, start, kind
        self._lock = threading.Lock()
        self.now = self.most = 0
        self.begun: dict[str, list[Any]] = defaultdict(list)
        self.by_queue: dict[str, int] = defaultdict(int)
        self.goes_on = threading.Event()
        self.goes_on.set()

    def worker(self, app: lowq.Lowq, name: str = "q", **options: Any) -> type[lowq.Worker[Any]]:
        async def aperform(payloads_by_id: dict[str, list[Any]]) -> None:
            self._begin(name, payloads_by_id)
            while not self.goes_on.is_set():
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.001)
            self._end()

        def perform(payloads_by_id: dict[str, list[Any]]) -> None:
            self._begin(name, payloads_by_id)
            self.goes_on.wait()
            time.sleep(0.001)
            self._end()

        return app.worker(queue_name=name, **options)(aperform if self.kind == "loop" else perform)

    def _begin(self, name: str, payloads_by_id: dict[str, list[Any]]) -> None:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
            self.by_queue[name] += len(payloads_by_id)
            for job_id, payloads in payloads_by_id.items():
                self.begun[job_id] += payloads

    def _end(self) -> None:
        with self._lock:
            self.now -= 1


@pytest.fixture(params=["threads", "loop"])
def nodes(make_app: MakeApp, start: Start, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    nodes = Nodes(make_app, start, request.param)
    yield nodes
    nodes.goes_on.set()


def test_a_concurrency_holds_over_all_nodes_and_everything_is_performed_in_order(nodes: Nodes) -> None:
    apps = [nodes.app() for _ in range(3)]
    workers = [nodes.worker(app, shards_count=12, limit=lowq.Concurrency(2)) for app in apps]
    for version in range(3):
        workers[0].perform_async({"id": number, "payload": version, "score": version} for number in range(60))
    nodes.goes_on.clear()
    for app in apps:
        nodes.start(of=app)
    until(lambda: nodes.now == 2)  # all that may begin has begun
    nodes.goes_on.set()
    until(lambda: len(nodes.begun) == 60 and all(sorted(some) == [0, 1, 2] for some in nodes.begun.values()))
    assert nodes.most == 2
    assert all(some == sorted(some) for some in nodes.begun.values())


def test_workers_that_name_one_key_share_its_limit(nodes: Nodes) -> None:
    app = nodes.app()
    one, other = (nodes.worker(app, name, limit=lowq.Concurrency(1, key="api")) for name in ("one", "other"))
    for worker in (one, other):
        worker.perform_async({"id": f"{worker.queue_name}-{number}"} for number in range(20))
    nodes.start(of=app)
    until(lambda: len(nodes.begun) == 40)
    assert nodes.most == 1


def test_several_limits_hold_together_and_why_says_which_is_reached(nodes: Nodes) -> None:
    apps = [nodes.app() for _ in range(2)]
    limits = [lowq.Rate(60, per=86400, key="api"), lowq.Concurrency(2), lowq.Concurrency(3, key="api")]
    workers = [nodes.worker(app, shards_count=12, limit=limits) for app in apps]
    workers[0].perform_async({"id": number} for number in range(100))
    for app in apps:
        nodes.start(of=app)
    until(lambda: len(nodes.begun) == 60)
    until(lambda: nodes.now == 0)
    for number in set(range(100)) - {int(job_id) for job_id in nodes.begun}:
        until(lambda number=number: workers[0].queue.why(number).reason == "limited")  # type: ignore[misc]
    why = workers[0].queue.why(number)
    assert "60 of 60 jobs in 1 d, shared as 'api'" in why.detail, why.detail
    rate, *others = workers[0].queue.limits()
    assert (rate.used, rate.is_reached) == (60, True)
    assert 86000 < (rate.wait or 0) <= 86400
    assert not any(state.is_reached for state in others)
    assert len(nodes.begun) == 60
    assert nodes.most <= 2


def test_a_queue_whose_limit_is_reached_takes_no_thread_from_others(nodes: Nodes) -> None:
    app = nodes.app()
    limited = nodes.worker(app, "limited", shards_count=12, limit=lowq.Rate(2, per=86400))
    free = nodes.worker(app, "free")
    limited.perform_async({"id": f"limited-{number}"} for number in range(100))
    nodes.start(of=app, threads=2)
    until(lambda: nodes.by_queue["limited"] == 2)
    free.perform_async({"id": f"free-{number}"} for number in range(100))
    until(lambda: nodes.by_queue["free"] == 100)
    assert nodes.by_queue["limited"] == 2


def test_a_node_that_stops_gives_its_permits_back_and_a_lower_limit_of_newer_code_holds_then(nodes: Nodes) -> None:
    old, new = nodes.app(), nodes.app()
    worker = nodes.worker(old, shards_count=12, limit=lowq.Concurrency(4))
    nodes.worker(new, shards_count=12, limit=lowq.Concurrency(1))
    worker.perform_async({"id": number} for number in range(20))
    first = nodes.start(of=old)
    until(lambda: len(nodes.begun) >= 5)
    assert first.stop(PATIENCE)
    assert [state.used for state in worker.queue.limits()] == [0]
    nodes.most = 0
    worker.perform_async({"id": f"new-{number}"} for number in range(20))
    nodes.start(of=new)
    until(lambda: len(nodes.begun) == 40)
    assert nodes.most == 1


def most_at_once(rig: Rig) -> int:
    """How many performs ran at once, at most. Those of a process that was killed end with it."""
    changes = [change for perform in rig.performs() for change in ((perform.start, 1), (perform.end, -1))]
    return max(itertools.accumulate(change for _, change in sorted(changes)), default=0)


def test_permits_of_killed_nodes_return_and_are_never_too_many(make_rig: MakeRig) -> None:
    # A lease as long as none of them may be frozen, on a busy machine either: what it had would be somebody else's.
    rig = make_rig(ORDERS_CONCURRENCY=3, ORDERS_SHARDS=12, ORDERS_WORK=0.02, LOWQ_LEASE_TTL=5)
    nodes = [rig.node() for _ in range(3)]
    finished = rig.produce(1, ids=40, versions=4, rounds=0, pause=0.05)
    for number in range(2):
        until(lambda number=number: len(rig.performs()) > 40 * (number + 1))  # type: ignore[misc]  # a default binds it
        nodes[number].kill()
        rig.node()
    begun = len(rig.performs())
    until(lambda: len(rig.performs()) > begun + 40)
    finished()
    rig.drained()
    assert rig.report().problems == []
    assert most_at_once(rig) == 3
