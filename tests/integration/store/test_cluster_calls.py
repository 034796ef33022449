"""Calls to several primaries of a cluster: to the right one each, and side by side."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import redis

import lowq
from lowq.store import Call
from lowq.store.keys import shard_prefix
from tests.integration.support import until
from tests.redis_cluster import RedisCluster
from tests.redis_server import RedisServer


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with RedisCluster(replicas=0) as cluster:
        yield cluster


@pytest.fixture
def app(cluster: RedisCluster) -> Iterator[lowq.Lowq]:
    app = lowq.Lowq(redis_url=cluster.url)
    yield app
    app.close()


def info(server: RedisServer, section: str) -> dict[str, Any]:
    with redis.Redis(port=server.port) as client:
        return dict(client.info(section))


def test_calls_to_all_primaries_are_sent_before_a_reply_is_waited_for(cluster: RedisCluster, app: lowq.Lowq) -> None:
    calls = [Call("stats", shard_prefix("lowq", "Sent", shard), [""]) for shard in range(12)]
    app.client.run_many(calls)  # connects
    for server in cluster.servers:
        with redis.Redis(port=server.port) as client:
            client.config_resetstat()

    def carried_out() -> list[int]:
        stats = [info(server, "commandstats").get("cmdstat_evalsha", {"calls": 0}) for server in cluster.servers]
        return [int(one["calls"]) for one in stats]

    finish = app.client.start(calls)
    until(lambda: sum(carried_out()) == 12, "all calls, though nobody has read a reply")
    assert all(carried_out())
    assert not any(isinstance(reply, Exception) for reply in finish())


@pytest.mark.parametrize("kind", ["threads", "async"])
def test_no_call_goes_to_a_wrong_primary(cluster: RedisCluster, app: lowq.Lowq, kind: str) -> None:
    performed: set[str] = set()

    def perform(payloads_by_id: dict[str, list[Any]]) -> None:
        performed.update(payloads_by_id)

    async def aperform(payloads_by_id: dict[str, list[Any]]) -> None:
        performed.update(payloads_by_id)

    worker = app.worker(queue_name=f"Right-{kind}", shards_count=12)(perform if kind == "threads" else aperform)
    moved = [info(server, "errorstats").get("errorstat_MOVED") for server in cluster.servers]
    node = lowq.Node(app, threads=2)
    node.start()
    try:
        worker.perform_async({"id": f"bulk-{number}", "payload": 1} for number in range(300))
        for number in range(20):
            worker.perform_async({"id": f"one-{number}", "payload": 1})

        async def produce() -> None:
            jobs = [worker.aperform_async({"id": f"loop-{number}", "payload": 1}) for number in range(200)]
            assert await asyncio.gather(*jobs) == [1] * 200

        asyncio.run(produce())
        until(lambda: len(performed) == 520, "all jobs")
    finally:
        node.stop()
    assert [info(server, "errorstats").get("errorstat_MOVED") for server in cluster.servers] == moved
