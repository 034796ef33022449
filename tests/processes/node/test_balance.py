"""Nodes that share the shards: joining, leaving, retiring; and who serves what."""

import signal
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import lowq
from lowq.node.node import Node
from lowq.workers import Worker
from tests.processes.conftest import MakeRig
from tests.processes.node.conftest import MakeApp, Start, ids_of_shards, is_idle
from tests.waiting import NEVER, PATIENCE, until


class Shop:
    """An application with a queue `orders`; which node performed what, in order. Payloads "wait" wait for `go`."""

    def __init__(self, make_app: MakeApp, shards_count: int, **settings: Any) -> None:
        self._make_app, self._shards_count, self._settings = make_app, shards_count, settings
        self.performed: dict[str, list[tuple[int, Any]]] = defaultdict(list)
        self.go = threading.Event()
        self.own, self.worker = self._application(0)

    def _application(self, number: int) -> tuple[lowq.Lowq, type[Worker[Any]]]:
        app = self._make_app(lease_ttl=NEVER, poll_interval=NEVER, **self._settings)

        @app.worker(shards_count=self._shards_count)
        def orders(job_id: str, payloads: list[Any]) -> None:
            self.performed[job_id] += [(number, payload) for payload in payloads]
            if "wait" in payloads:
                self.go.wait(PATIENCE)

        return app, orders

    def node(self, start: Start, number: int) -> Node:
        return start(of=self._application(number)[0], threads=5)

    def held(self) -> dict[str, list[int]]:
        """Name of a node -> the shards whose leases it has."""
        found: dict[str, list[int]] = defaultdict(list)
        for shard in self.own.shards("orders"):
            if shard.owner is not None:
                found[str(shard.owner)].append(shard.index)
        return found

    def share(self, *nodes: Node) -> None:
        """Waits until these nodes hold all shards, evenly to within one."""

        def is_even() -> bool:
            held = self.held()
            each = [len(shards) for shards in held.values()]
            is_all = sum(each) == self._shards_count and held.keys() == {node.name for node in nodes}
            return is_all and max(each) - min(each) <= 1

        until(is_even, "even shares")


def test_nodes_that_join_and_leave_under_load_hand_over_and_repeat_nothing(make_app: MakeApp, start: Start) -> None:
    shop = Shop(make_app, 24)
    enough = threading.Event()
    versions = [0]

    def produce() -> None:
        while not enough.is_set():
            versions[0] += 1
            shop.worker.perform_async({"id": number, "payload": versions[0]} for number in range(50))
            time.sleep(0.01)

    def some_more() -> None:
        last = versions[0] + 3
        until(
            lambda: all((shop.performed[str(number)] or [(0, 0)])[-1][1] >= last for number in range(50)), "more work"
        )

    producer = threading.Thread(target=produce)
    producer.start()
    try:
        nodes = []
        for number in range(3):
            nodes.append(shop.node(start, number))
            shop.share(*nodes)
            some_more()
        while len(nodes) > 1:
            assert nodes.pop(0).stop(PATIENCE)
            shop.share(*nodes)
            some_more()
    finally:
        enough.set()
        producer.join()
    until(lambda: is_idle(shop.worker), "the end of the work")
    for number in range(50):
        assert [version for _, version in shop.performed[str(number)]] == [*range(1, versions[0] + 1)]
    assert {node for performs in shop.performed.values() for node, _ in performs} == {0, 1, 2}


def test_a_node_that_stops_while_it_performs_keeps_nobody_else_waiting(make_app: MakeApp, start: Start) -> None:
    shop = Shop(make_app, 10, shutdown_timeout=NEVER)
    first, second = nodes = [shop.node(start, number) for number in (1, 2)]
    shop.share(*nodes)
    busy, resting = (ids_of_shards(10)[shard] for shard in shop.held()[first.name][:2])
    shop.worker.push(busy, "wait")
    until(lambda: shop.performed[busy], "its work")
    stops = threading.Thread(target=first.stop)
    stops.start()
    until(first.stopping.is_set, "its stop")
    until(lambda: len(shop.held()[first.name]) == 1, "the end of its leases of what rests")
    shop.worker.push(resting)
    shop.worker.push(busy, "behind")
    until(lambda: [node for node, _ in shop.performed[resting]] == [2], "the shard that rests")
    assert shop.performed[busy] == [(1, "wait")]  # nothing is given up in the middle of a batch
    shop.go.set()
    stops.join(PATIENCE)
    until(lambda: shop.performed[busy] == [(1, "wait"), (2, "behind")], "the busy shard")
    shop.share(second)


def test_a_node_that_retires_ends_when_it_has_finished_however_long_that_takes(make_rig: MakeRig) -> None:
    rig = make_rig(LOWQ_LEASE_TTL=15, LOWQ_SHUTDOWN_TIMEOUT=0.01, ORDERS_SHARDS=4)
    old = rig.node().holds_all()
    rig.push("a", 1, do="wait")
    rig.begun("a", 1)
    new = rig.node()
    old.signal(signal.SIGUSR2)
    old.says(" drains")
    rig.push("a", 2)
    until(lambda: new.held() == rig.shards_count - 1, "the shards that rest")
    assert old.process.poll() is None
    Path(f"{rig.history.path}.go").touch()
    assert old.wait() == 0
    assert (rig.done("a", 1).pid, rig.done("a", 2).pid) == (old.pid, new.pid)
    new.holds_all()
    report = rig.report()
    assert (report.problems, report.repeats, report.fenced) == ([], 0, [])
