"""Moments that processes hit once in a million tries, brought about by hand."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
import redis

import lowq
from lowq import clock
from lowq.codec import load_payload
from lowq.node.node import Node
from lowq.shards.lease import Lease
from lowq.shards.shard import Shard
from tests.leases import run_out
from tests.processes.support import PATIENCE, until
from tests.redis_server import free_port


@pytest.fixture
def app(redis_url: str) -> Iterator[lowq.Lowq]:
    app = lowq.Lowq(redis_url=redis_url)
    yield app
    app.close()


def shard_of(app: lowq.Lowq, nonce: str, index: int = 0) -> Shard:
    return Shard(
        app.client, "lowq", "Orders", index, shards_count=2, nonce=nonce, load_payload=load_payload, max_crash_count=5
    )


def push(app: lowq.Lowq, version: int) -> None:
    app.queue("Orders", 2).push({"id": "1", "payload": {"version": version}, "score": version})


def test_jobs_taken_under_a_lease_that_changed_hands_before_the_reply_was_read_are_not_performed(
    app: lowq.Lowq,
) -> None:
    index = 1  # of id "1", in two shards
    old, new = shard_of(app, "old", index), shard_of(app, "new", index)
    push(app, 1)
    assert isinstance(old.lease.acquire(60), Lease)
    (reply,) = app.client.run_many([old.in_flight.take_call(1)])  # and here its process is frozen

    run_out(app.client, old.prefix)
    assert isinstance(new.lease.acquire(60), Lease)
    push(app, 2)
    until(lambda: new.in_flight.take(1).jobs, "restored job")
    new.in_flight.finish(["1"])
    new.in_flight.take(0)
    assert new.lease.surrender()

    # Back to life: first its maintenance loop gets the shard again, then the thread reads its reply.
    (again,) = app.client.run_many([old.lease.acquire_call(60)])
    assert isinstance(old.lease.acquired(again, clock.now() + 60), Lease)
    with pytest.raises(lowq.LeaseLost):
        old.in_flight.read_delivery(reply)
    assert old.in_flight.take(1).jobs == []


def test_new_code_waits_for_a_redis_that_is_away_when_it_starts(caplog: pytest.LogCaptureFixture) -> None:
    app = lowq.Lowq(redis_url=f"redis://127.0.0.1:{free_port()}")

    @app.worker(shards_count=1)
    def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        raise AssertionError("there is no job")

    node = Node(app, resumes_as="0" * 16)
    with ThreadPoolExecutor(1) as executor:
        start = executor.submit(node.start)
        until(lambda: "trying until it is back" in caplog.text or start.done(), "what it says of Redis")
        assert not start.done()
        node.request_stop()
        assert isinstance(start.exception(), lowq.RedisUnavailable)
    app.close()


def test_nodes_inside_an_application_leave_nothing_behind(redis_url: str) -> None:
    def connections() -> set[int]:
        return {int(each["id"]) for each in observer.client_list()}

    def left() -> list[threading.Thread]:
        # By name: what Python knows of threads that others have started comes and goes.
        return [thread for thread in threading.enumerate() if thread.name.startswith("lowq-") and thread not in before]

    done, before = threading.Event(), set(threading.enumerate())
    observer = redis.Redis.from_url(redis_url, single_connection_client=True)
    known, pool = connections(), 2
    with closing(observer), closing(lowq.Lowq(redis_url=redis_url, client_pool_size=pool)) as app:

        @app.worker(shards_count=2)
        class Orders(lowq.Worker[Any]):
            def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
                done.set()

        for version in range(3):
            node = Node(app, threads=2)
            node.start()
            push(app, version)
            assert len(left()) >= 4
            assert done.wait(PATIENCE)
            done.clear()
            assert node.stop()
            until(lambda: not left(), "end of the node's threads")
        until(lambda: len(connections() - known) <= pool, "no connections but those of the application")
