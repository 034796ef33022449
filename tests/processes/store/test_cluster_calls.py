"""Calls to several primaries of a cluster: to the right one each, and side by side."""

import asyncio
from contextlib import closing
from typing import Any

import lowq
from lowq.node.node import Node
from lowq.store.keys import shard_prefix
from lowq.store.shard_operations import ShardOperations
from tests.processes.support import until
from tests.redis_cluster import RedisCluster
from tests.waiting import NEVER


def test_calls_to_all_primaries_are_sent_before_a_reply_is_waited_for(cluster: RedisCluster) -> None:
    primaries = cluster.primaries()
    calls = [ShardOperations(shard_prefix("lowq", "Sent", shard)).stats() for shard in range(12)]
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


def test_no_call_goes_to_a_wrong_primary_and_a_push_wakes_the_holder_that_never_polls(cluster: RedisCluster) -> None:
    performed: set[str] = set()

    def perform(payloads_by_id: dict[str, list[Any]]) -> None:
        performed.update(payloads_by_id)

    async def aperform(payloads_by_id: dict[str, list[Any]]) -> None:
        performed.update(payloads_by_id)

    def moved() -> list[Any]:
        return [cluster.ask(server, "INFO", "errorstats").get("errorstat_MOVED") for server in cluster.servers]

    before = moved()
    app = lowq.Lowq(redis_url=cluster.url, poll_interval=NEVER)
    threads = app.worker(queue_name="Threads", shards_count=12)(perform)
    loop = app.worker(queue_name="Loop", shards_count=12)(aperform)
    node = Node(app, threads=2)
    node.start()
    try:
        for worker, name in ((threads, "threads"), (loop, "loop")):
            worker.perform_async({"id": f"{name}-{number}"} for number in range(100))
            for number in range(100, 120):  # one by one: each meets a node that has nothing to do
                worker.push(f"{name}-{number}")
                until(lambda id_=f"{name}-{number}": id_ in performed, "perform")  # type: ignore[misc]

        async def produce() -> None:
            jobs = [threads.aperform_async({"id": f"threads-{number}"}) for number in range(120, 200)]
            assert await asyncio.gather(*jobs) == [1] * 80

        asyncio.run(produce())
        until(lambda: len(performed) == 120 + 200, "all jobs")
    finally:
        node.stop()
        app.close()
    assert moved() == before
