"""Calls to several primaries of a cluster: to the right one each, and side by side."""

import asyncio
from contextlib import closing
from typing import Any

import pytest

import lowq
from lowq.store import Call
from lowq.store.keys import shard_prefix
from tests.processes.support import until
from tests.redis_cluster import RedisCluster


def test_calls_to_all_primaries_are_sent_before_a_reply_is_waited_for(cluster: RedisCluster) -> None:
    primaries = cluster.primaries()
    calls = [Call("stats", shard_prefix("lowq", "Sent", shard), [""]) for shard in range(12)]
    with closing(lowq.Lowq(redis_url=cluster.url)) as app:
        app.client.run_many(calls)  # connects
        for server in primaries:
            cluster.ask(server, "CONFIG RESETSTAT")

        def carried_out() -> list[int]:
            stats = [cluster.ask(server, "INFO", "commandstats") for server in primaries]
            return [one.get("cmdstat_evalsha", {"calls": 0})["calls"] for one in stats]

        finish = app.client.start(calls)
        until(lambda: sum(carried_out()) == 12, "all calls, though nobody has read a reply")
        assert all(carried_out())
        assert not any(isinstance(reply, Exception) for reply in finish())


@pytest.mark.parametrize("kind", ["threads", "async"])
def test_no_call_goes_to_a_wrong_primary(cluster: RedisCluster, kind: str) -> None:
    performed: set[str] = set()

    def perform(payloads_by_id: dict[str, list[Any]]) -> None:
        performed.update(payloads_by_id)

    async def aperform(payloads_by_id: dict[str, list[Any]]) -> None:
        performed.update(payloads_by_id)

    def moved() -> list[Any]:
        return [cluster.ask(server, "INFO", "errorstats").get("errorstat_MOVED") for server in cluster.servers]

    before = moved()
    app = lowq.Lowq(redis_url=cluster.url)
    worker = app.worker(queue_name="Orders", shards_count=12)(perform if kind == "threads" else aperform)
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
    assert moved() == before
