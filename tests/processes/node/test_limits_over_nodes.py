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
from lowq.store.keys import limit_key, shard_prefix
from tests.processes.conftest import MakeRig
from tests.processes.support import Rig
from tests.waiting import NEVER, PATIENCE, until


class Nodes:
    """Nodes in this process, each with an application of its own, and what their workers perform."""

    def __init__(self, redis_url: str, kind: str) -> None:
        self._url, self.kind = redis_url, kind
        self._apps: list[lowq.Lowq] = []
        self._nodes: list[lowq.Node] = []
        self._lock = threading.Lock()
        self.now = self.most = 0
        self.begun: dict[str, list[Any]] = defaultdict(list)
        self.by_queue: dict[str, int] = defaultdict(int)
        self.goes_on = threading.Event()
        self.goes_on.set()

    def app(self) -> lowq.Lowq:
        self._apps.append(lowq.Lowq(redis_url=self._url))
        return self._apps[-1]

    def start(self, app: lowq.Lowq, threads: int = 5) -> lowq.Node:
        self._nodes.append(lowq.Node(app, threads=threads))
        self._nodes[-1].start()
        return self._nodes[-1]

    def worker(self, app: lowq.Lowq, name: str = "q", **options: Any) -> type[lowq.Worker[Any]]:
        if self.kind == "loop":

            @app.worker(queue_name=name, **options)
            async def perform(payloads_by_id: dict[str, list[Any]]) -> None:
                self._begin(name, payloads_by_id)
                while not self.goes_on.is_set():
                    await asyncio.sleep(0.001)
                await asyncio.sleep(0.001)
                self._end()

            return perform

        @app.worker(queue_name=name, **options)
        def perform_in_thread(payloads_by_id: dict[str, list[Any]]) -> None:
            self._begin(name, payloads_by_id)
            self.goes_on.wait()
            time.sleep(0.001)
            self._end()

        return perform_in_thread

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

    def close(self) -> None:
        self.goes_on.set()
        for node in self._nodes:
            node.stop(PATIENCE)
        for app in self._apps:
            app.close()


@pytest.fixture(params=["threads", "loop"])
def nodes(redis_url: str, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    nodes = Nodes(redis_url, request.param)
    yield nodes
    nodes.close()


def test_a_concurrency_holds_over_all_nodes_and_everything_is_performed_in_order(nodes: Nodes) -> None:
    apps = [nodes.app() for _ in range(3)]
    workers = [nodes.worker(app, shards_count=12, limit=lowq.Concurrency(2)) for app in apps]
    for version in range(3):
        workers[0].perform_async({"id": number, "payload": version, "score": version} for number in range(60))
    for app in apps:
        nodes.start(app)
    until(lambda: len(nodes.begun) == 60 and all(sorted(some) == [0, 1, 2] for some in nodes.begun.values()))
    assert nodes.most <= 2
    assert all(some == sorted(some) for some in nodes.begun.values())


def test_what_waits_is_all_begun_as_soon_as_it_may(nodes: Nodes) -> None:
    apps = [nodes.app() for _ in range(2)]
    workers = [nodes.worker(app, shards_count=12, limit=lowq.Concurrency(4)) for app in apps]
    nodes.goes_on.clear()
    workers[0].perform_async({"id": number} for number in range(40))
    for app in apps:
        nodes.start(app)
    until(lambda: nodes.now == 4)
    nodes.goes_on.set()
    until(lambda: len(nodes.begun) == 40)
    assert nodes.most == 4


def test_workers_that_name_one_key_share_its_limit(nodes: Nodes) -> None:
    app = nodes.app()
    one, other = (nodes.worker(app, name, limit=lowq.Concurrency(1, key="api")) for name in ("one", "other"))
    for worker in (one, other):
        worker.perform_async({"id": f"{worker.queue_name}-{number}"} for number in range(20))
    nodes.start(app)
    until(lambda: len(nodes.begun) == 40)
    assert nodes.most == 1


def test_a_rate_bounds_how_many_begin(nodes: Nodes) -> None:
    apps = [nodes.app() for _ in range(2)]
    limit = lowq.Rate(10, per=NEVER)
    workers = [nodes.worker(app, shards_count=12, batch_size=3, limit=limit) for app in apps]
    workers[0].perform_async({"id": number} for number in range(45))
    for app in apps:
        nodes.start(app)
    until(lambda: len(nodes.begun) == 10)
    for number in set(range(45)) - {int(job_id) for job_id in nodes.begun}:
        until(lambda number=number: workers[0].queue.why(number).reason == "limited")  # type: ignore[misc]
    assert len(nodes.begun) == 10


def test_a_rate_of_which_a_node_has_given_back_what_it_had_no_jobs_for_is_free(nodes: Nodes) -> None:
    app = nodes.app()
    worker = nodes.worker(app, shards_count=12, limit=[lowq.Concurrency(5), lowq.Rate(3, per=NEVER)])
    nodes.start(app)
    calls = limit_key("lowq", lowq.Rate(3, per=NEVER).name("q"))

    def has_asked() -> bool:
        for shard in range(12):
            wake = f"{shard_prefix('lowq', 'q', shard)}wake"
            app.client.command("SPUBLISH", wake, "0", key=wake)
        return bool(app.client.command("HLEN", calls))

    until(has_asked)  # for shards that it is told of in vain, more than there is; as a rule it does so when it starts
    until(lambda: worker.queue.limits()[1].used == 0)  # it has given all of it back
    worker.perform_async({"id": number} for number in range(3))
    until(lambda: len(nodes.begun) == 3)


@pytest.mark.slow
def test_a_rate_lets_others_begin_when_its_time_has_passed(nodes: Nodes) -> None:
    apps = [nodes.app() for _ in range(2)]
    per = 0.5
    workers = [nodes.worker(app, shards_count=12, batch_size=3, limit=lowq.Rate(10, per=per)) for app in apps]
    workers[0].perform_async({"id": number} for number in range(45))
    began = time.monotonic()
    for app in apps:
        nodes.start(app)
    until(lambda: len(nodes.begun) == 45)
    # Of 45 jobs the last can't begin before four times of the rate have passed, however slow the machine is.
    assert time.monotonic() - began >= 4 * per
    assert sum(nodes.by_queue.values()) == 45


def test_several_limits_hold_together(nodes: Nodes) -> None:
    apps = [nodes.app() for _ in range(2)]
    limits = [lowq.Rate(60, per=NEVER), lowq.Concurrency(2), lowq.Concurrency(3, key="api")]
    workers = [nodes.worker(app, shards_count=12, limit=limits) for app in apps]
    workers[0].perform_async({"id": number} for number in range(100))
    for app in apps:
        nodes.start(app)
    until(lambda: len(nodes.begun) == 60)
    until(lambda: nodes.now == 0)
    for number in set(range(100)) - {int(job_id) for job_id in nodes.begun}:
        until(lambda number=number: workers[0].queue.why(number).reason == "limited")  # type: ignore[misc]
    assert len(nodes.begun) == 60
    assert nodes.most <= 2


def test_a_queue_whose_limit_is_reached_takes_no_thread_from_others(nodes: Nodes) -> None:
    app = nodes.app()
    limited = nodes.worker(app, "limited", shards_count=12, limit=lowq.Rate(2, per=86400))
    free = nodes.worker(app, "free")
    limited.perform_async({"id": f"limited-{number}"} for number in range(100))
    nodes.start(app, threads=2)
    until(lambda: nodes.by_queue["limited"] == 2)
    free.perform_async({"id": f"free-{number}"} for number in range(100))
    until(lambda: nodes.by_queue["free"] == 100)
    assert nodes.by_queue["limited"] == 2


@pytest.mark.parametrize("limit", [lowq.Rate(1000), lowq.Concurrency(5)], ids=["rate", "concurrency"])
def test_a_queue_with_a_limit_has_its_share_though_another_could_use_all_threads(
    redis_url: str, nodes: Nodes, limit: lowq.Rate | lowq.Concurrency
) -> None:
    app = lowq.Lowq(redis_url=redis_url, concurrency=1)
    ended: list[str] = []
    if nodes.kind == "loop":

        @app.worker(queue_name="long")
        async def perform_long(payloads_by_id: dict[str, list[Any]]) -> None:
            await asyncio.sleep(0.2)  # longer than a permit is kept for a place
            ended.extend(payloads_by_id)
    else:

        @app.worker(queue_name="long")
        def perform_long_in_thread(payloads_by_id: dict[str, list[Any]]) -> None:
            time.sleep(0.2)
            ended.extend(payloads_by_id)

    limited = nodes.worker(app, "limited", limit=limit)
    app.queue("long").push({"id": number} for number in range(1000))
    limited.perform_async({"id": number} for number in range(20))
    nodes.start(app, threads=1)
    until(lambda: nodes.by_queue["limited"] == 20)
    assert len(ended) < 100
    nodes.close()
    app.close()


def test_why_says_that_an_id_is_limited(nodes: Nodes) -> None:
    app = nodes.app()
    worker = nodes.worker(app, limit=lowq.Rate(1, per=86400, key="api"))
    worker.push("first")
    nodes.start(app)
    until(lambda: nodes.begun.keys() == {"first"})
    worker.push("second")
    until(lambda: worker.queue.why("second").reason == "limited")
    why = worker.queue.why("second")
    assert "1 of 1 jobs in 1 d, shared as 'api'" in why.detail, why.detail
    assert worker.queue.describe("second").why.reason == "limited"
    (state,) = worker.queue.limits()
    assert (state.used, state.is_reached) == (1, True)
    assert state.wait is not None
    assert 86000 < state.wait <= 86400


def test_a_node_that_stops_gives_its_permits_back(nodes: Nodes) -> None:
    one, other = nodes.app(), nodes.app()
    worker = nodes.worker(one, limit=lowq.Concurrency(1))
    nodes.worker(other, limit=lowq.Concurrency(1))
    worker.push("first")
    first = nodes.start(one)
    until(lambda: "first" in nodes.begun)
    assert first.stop(PATIENCE)
    assert [state.used for state in worker.queue.limits()] == [0]
    nodes.start(other)
    worker.push("second")
    until(lambda: "second" in nodes.begun)


def test_a_lower_limit_of_newer_code_holds_once_it_is_there(nodes: Nodes) -> None:
    old, new = nodes.app(), nodes.app()
    worker = nodes.worker(old, shards_count=12, limit=lowq.Concurrency(4))
    nodes.worker(new, shards_count=12, limit=lowq.Concurrency(1))
    worker.perform_async({"id": number} for number in range(20))
    first = nodes.start(old)
    until(lambda: len(nodes.begun) >= 5)
    first.stop(PATIENCE)
    nodes.most = 0
    worker.perform_async({"id": f"new-{number}"} for number in range(20))
    nodes.start(new)
    until(lambda: len(nodes.begun) == 40)
    assert nodes.most == 1


def test_a_worker_without_limits_has_nothing_of_it(nodes: Nodes) -> None:
    others = set(threading.enumerate())
    app = nodes.app()
    nodes.worker(app).perform_async({"id": number} for number in range(20))
    nodes.start(app)
    until(lambda: len(nodes.begun) == 20)
    assert "lowq-permits" not in [thread.name for thread in set(threading.enumerate()) - others]
    client = app.connect(1)
    assert client.command("KEYS", "lowq:v1:limit:*") == []


def test_what_somebody_else_has_put_in_its_place_stops_nothing_else(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    app = nodes.app()
    limited, free = nodes.worker(app, "limited", limit=lowq.Concurrency(1)), nodes.worker(app, "free")
    client, key = app.connect(1), limit_key("lowq", "concurrency:limited")
    client.command("SET", key, "not ours")
    limited.push("a")
    nodes.start(app)
    free.push("b")
    until(lambda: "b" in nodes.begun)
    until(lambda: "waits for its limits" in caplog.text)
    assert "a" not in nodes.begun
    client.command("DEL", key)
    until(lambda: "a" in nodes.begun)


def most_at_once(rig: Rig) -> int:
    """How many performs ran at once, at most. Those of a process that was killed end with it."""
    changes = [change for perform in rig.performs() for change in ((perform.start, 1), (perform.end, -1))]
    return max(itertools.accumulate(change for _, change in sorted(changes)), default=0)


def test_permits_of_killed_nodes_return_and_are_never_too_many(make_rig: MakeRig) -> None:
    # A lease as long as none of them may be frozen, on a busy machine either: what it had would be somebody else's.
    rig = make_rig(ORDERS_CONCURRENCY=3, ORDERS_SHARDS=12, ORDERS_WORK=0.02, LOWQ_LEASE_TTL=5)
    nodes = [rig.node() for _ in range(3)]
    finished = rig.produce(1, ids=40, versions=4, rounds=0, pause=0.05)
    for number in range(3):
        until(lambda number=number: len(rig.performs()) > 40 * (number + 1))  # type: ignore[misc]  # a default binds it
        nodes[number].kill()
        nodes.append(rig.node())
    begun = len(rig.performs())
    until(lambda: len(rig.performs()) > begun + 40)
    finished()
    rig.drained()
    assert rig.report().problems == []
    assert most_at_once(rig) == 3
