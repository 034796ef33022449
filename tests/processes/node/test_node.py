"""A node that is left in peace: order, wake-ups, what it costs when idle."""

import re
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import lowq
from lowq.shards.delivery import InFlight
from lowq.store import Call
from lowq.store.keys import shard_prefix
from tests.processes.conftest import MakeRig
from tests.processes.node.conftest import MakeApp, Start, is_idle
from tests.rows import case
from tests.waiting import NEVER, PATIENCE, until


def test_each_id_is_performed_in_order_and_by_one_thread_at_a_time(make_rig: MakeRig) -> None:
    settings = {"ORDERS_BATCH": 10, "ORDERS_MAX_PAYLOADS": 3, "ORDERS_WORK": 0.001}
    rig = make_rig(LOWQ_LEASE_TTL=15, ORDERS_SHARDS=7, ORDERS_SCHEDULER="own", ORDERS_SPLITTER="own", **settings)
    node = rig.node()
    rig.produce(2, ids=100, versions=5, rounds=4)()
    rig.drained()
    assert node.stop() == 0
    report = rig.report()
    assert (report.problems, report.repeats) == ([], 0)
    assert report.accepted == 2 * 100 * 5 * 4


def test_work_begins_by_wake_ups_alone(make_app: MakeApp, start: Start) -> None:
    app = make_app(poll_interval=NEVER)
    performed: list[tuple[str, list[str]]] = []
    begun, go = threading.Event(), threading.Event()

    @app.worker(shards_count=5)
    class Orders(lowq.Worker[str]):
        def perform_one(self, job_id: str, payloads: list[str]) -> None:
            performed.append((job_id, payloads))
            if payloads == ["fails"] and performed.count((job_id, payloads)) == 1:
                raise ValueError
            if payloads == ["pushes"]:
                Orders.push(job_id, "again")
            if payloads == ["waits"]:
                begun.set()
                go.wait(PATIENCE)

        def retry_in(self, retry_count: int) -> float:
            return 0.05

    def change_meanwhile() -> None:
        Orders.push("changed", "waits")
        assert begun.wait(PATIENCE)
        Orders.push("changed", "since")
        go.set()

    def pause() -> None:
        Orders.queue.pause()
        Orders.push("paused", "at once")
        Orders.queue.resume()

    start(of=app, threads=2)
    rows: list[tuple[str, Callable[[], object], list[str]]] = [
        ("idle", lambda: Orders.push("idle", "at once"), ["at once"]),
        ("delayed", lambda: Orders.push("delayed", "later", delay=0.2), ["later"]),
        ("retried", lambda: Orders.push("retried", "fails"), ["fails", "fails"]),
        ("changed", change_meanwhile, ["waits", "since"]),
        ("own", lambda: Orders.push("own", "pushes"), ["pushes", "again"]),
        ("paused", pause, ["at once"]),
    ]
    for name, push, expected in rows:
        with case(name):
            push()
            until(lambda: is_idle(Orders), "the end of the job")
            assert [payloads for job_id, payloads in performed if job_id == name] == [[one] for one in expected]


def test_acknowledgements_are_not_kept_waiting_by_a_slow_job(make_app: MakeApp, start: Start) -> None:
    app = make_app(poll_interval=NEVER)
    begun, go = threading.Event(), threading.Event()

    @app.worker(shards_count=1)
    def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        if "slow" in payloads_by_id:
            begun.set()
            go.wait(PATIENCE)

    start(of=app, threads=1)
    for _ in range(2):  # what was acknowledged so far is of one delivery
        for _ in range(3):  # quick jobs teach the node to take several at a time
            orders.perform_async({"id": number} for number in range(100))
            until(lambda: is_idle(orders), "the end of all jobs")
        begun.clear()
        go.clear()
        orders.perform_async({"id": job_id} for job_id in ("a", "b", "c", "slow"))
        assert begun.wait(PATIENCE)
        until(lambda: orders.queue.stats().taken == 1, "acknowledgement of the quick ones")
        go.set()


def test_an_idle_node_asks_little(make_app: MakeApp, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app(lease_ttl=30, poll_interval=0.2)  # renewals every second
    take_call, takes = InFlight.take_call, Counter[InFlight]()

    def counted(self: InFlight, *args: Any) -> Call[Any]:
        takes[self] += 1
        return take_call(self, *args)

    monkeypatch.setattr(InFlight, "take_call", counted)

    @app.worker(shards_count=20)
    def orders(payloads_by_id: dict[str, list[Any]]) -> None: ...

    start(of=app)

    def calls() -> Counter[str]:
        found = re.findall(r"cmdstat_(\w+):calls=(\d+)", app.client.command("INFO", "commandstats").decode())
        return Counter({name: int(count) for name, count in found})

    until(lambda: len(takes) == 20, "takes of all shards")
    wakes = [shard_prefix("lowq", "orders", shard) + "wake" for shard in range(20)]
    until(lambda: app.client.command("PUBSUB", "SHARDNUMSUB", *wakes)[1::2] == [1] * 20, "all subscriptions")
    app.client.command("CONFIG", "RESETSTAT")
    until(lambda: calls()["pexpire"] >= 4 * 20, "renewals")
    idle = calls()
    # Each shard is asked when it is acquired and when its subscription stands, often at once, and then no more.
    assert max(takes.values()) <= 2
    # What the node does for itself, as its heartbeats, is less than a call for each shard.
    others = idle["evalsha"] - idle["pexpire"] - sum(takes.values())
    assert others < idle["pexpire"] / 2
    assert not idle["ssubscribe"]
