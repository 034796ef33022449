"""A primary of a cluster is gone or cut off, and its replica has its slots."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.crc import key_slot

import lowq
from lowq.errors import RedisUnavailable
from lowq.queue import Queue
from lowq.sharding import shard_of
from lowq.store import Client, Deadline
from lowq.store.keys import nodes_key, queues_key, shard_prefix
from tests.integration.conftest import MakeRig
from tests.integration.support import answered, until
from tests.redis_cluster import SLOTS, RedisCluster
from tests.redis_server import RedisServer
from tests.waiting import NEVER, PATIENCE


@pytest.fixture
def cluster() -> Iterator[RedisCluster]:
    with RedisCluster() as cluster:
        yield cluster


def ids_of_first(queue: Queue) -> list[str]:
    names = [str(number) for number in range(100)]
    return [name for name in names if key_slot(queue._prefixes_of(name.encode())[0].encode()) < 5461]


def is_pushed(queue: Queue, job_id: str) -> bool:
    return answered(lambda: queue.push({"id": job_id, "payload": {"version": 2}, "score": 2e12}) == 1)


@pytest.mark.parametrize("end", ["killed", pytest.param("frozen", marks=pytest.mark.slow)])
def test_producers_find_the_primary_that_has_the_slots_now(cluster: RedisCluster, end: str) -> None:
    """The URL names the one that is gone first."""
    app = lowq.Lowq(redis_url=cluster.url, push_timeout=2)
    queue = app.queue("Orders", 8)
    queue.push([{"id": str(number), "payload": 1} for number in range(100)])
    (mine, *_) = ids_of_first(queue)
    cluster.replicated()
    first = cluster.servers[0]
    if end == "killed":
        first.kill()
    else:
        first.pause()
    cluster.replaced(first)
    until(lambda: is_pushed(queue, mine), "a push to it")
    until(lambda: answered(lambda: queue.stats().length == 100), "all jobs")

    async def produce() -> list[int]:
        return await asyncio.gather(*(queue.apush({"id": name, "payload": 3}) for name in ids_of_first(queue)))

    until(lambda: answered(lambda: set(asyncio.run(produce())) == {1}), "pushes of coroutines")
    app.close()


def test_nodes_and_producers_go_on_with_the_next_primary(make_rig: MakeRig, cluster: RedisCluster) -> None:
    with RedisServer() as unused:  # the rig's own looks are at one server
        url = cluster.url_of([cluster.servers[1]])
        rig = make_rig(url=unused.url, LOWQ_REDIS_URL=url, ORDERS_WORK=0.001, ORDERS_SHARDS=8)
        rig.app.close()
        rig.app = lowq.Lowq(redis_url=url)
        queue = rig.app.queue("Orders", 8)

        def is_drained() -> bool:
            stats = queue.stats()
            return (stats.length, stats.taken) == (0, 0)

        def drained() -> None:
            until(lambda: answered(is_drained), "end of the work")

        nodes = [rig.node(), rig.node()]
        until(lambda: all(node.lines("shards held: 4, wanted: 4 of 8") for node in nodes), "shards for both")
        rig.produce(2, ids=50, versions=3, rounds=10)()
        drained()
        cluster.replicated()
        cluster.servers[0].kill()
        cluster.replaced(cluster.servers[0])
        until(lambda: is_pushed(queue, "probe"), "a push to it")
        rig.produce(2, ids=50, versions=3, rounds=10, first=1000)()
        drained()
        assert [node.stop() for node in nodes] == [0, 0]
        performed = {job_id for perform in rig.performs() for job_id in perform.jobs}
        assert performed >= {str(number) for number in (*range(100), *range(1000, 1100))}


def keys_of(cluster: RedisCluster) -> list[str]:
    """A key of each of the three primaries that the cluster was made with."""
    names = [f"key {number}" for number in range(100)]
    return [next(name for name in names if key_slot(name.encode()) * 3 // SLOTS == place) for place in range(3)]


def test_a_silent_primary_is_waited_for_once_and_the_others_are_asked_in_pauses(
    cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(cluster.url_of([cluster.servers[0]]), size=5, timeout=5, socket_timeout=1)
    servers: Any = client._servers
    frozen, *others = keys_of(cluster)
    assert client.command("EXISTS", frozen, key=frozen) == 0
    asked: list[int] = []
    refresh = servers.refresh

    def count(deadline: Deadline | None = None) -> None:
        asked.append(1)
        refresh(deadline)

    servers.refresh = count
    # Who waits for its answer keeps nobody from asking the others.
    is_over = threading.Event()
    monkeypatch.setattr(servers, "_answers", lambda *_args: is_over.wait())
    cluster.servers[0].pause()
    try:
        with pytest.raises(RedisUnavailable):
            client.command("EXISTS", frozen, key=frozen)
        pool = servers.pool_at("127.0.0.1", cluster.servers[0].port)
        monkeypatch.setattr(pool, "checkout", lambda *_args: pytest.fail("it was asked again"))
        for _ in range(200):
            with pytest.raises(RedisUnavailable, match="of the cluster does not answer or serve"):
                servers.pool_for(frozen)
            for key in others:
                assert client.command("EXISTS", key, key=key) == 0
        assert 0 < len(asked) < 200
        cluster.replaced(cluster.servers[0])
        until(lambda: not client.is_partial, "the next primary")
        assert client.command("EXISTS", frozen, key=frozen) == 0
    finally:
        is_over.set()
        cluster.servers[0].cont()
        client.close()


@pytest.mark.parametrize("is_async", ["", "1"])
def test_work_on_the_other_primaries_goes_on_until_there_is_a_next_one(
    make_rig: MakeRig, cluster: RedisCluster, is_async: str
) -> None:
    """All that is pushed to their shards between the end of the one primary and its replacement is done before that,
    though the shards of the one have become due before.
    """
    with RedisServer() as unused:  # the rig's own looks are at one server
        settings = {"ORDERS_WORK": 0.01, "ORDERS_SHARDS": 12, "ORDERS_ASYNC": is_async, "ORDERS_BATCH": 1}
        rig = make_rig(url=unused.url, LOWQ_REDIS_URL=cluster.url, LOWQ_LEASE_TTL=30, **settings)
        rig.app.close()
        rig.app = lowq.Lowq(redis_url=cluster.url)
        queue = rig.app.queue("Orders", 12)
        ids = [str(number) for number in range(3000)]
        queue.push({"id": job_id, "payload": {"version": 1}} for job_id in ids)
        node = rig.node()
        until(lambda: len({perform.shard for perform in rig.performs()}) == 12, "work on all shards")
        theirs = {shard for shard in range(12) if key_slot(rig.prefix(shard).encode()) * 3 // SLOTS > 0}
        cluster.servers[0].kill()

        def is_done(some: list[str]) -> bool:
            """In the version that was pushed since."""
            performs = [perform for perform in rig.performs() if perform.ok]
            return {job_id for perform in performs for job_id, found in perform.jobs.items() if 2 in found} >= set(some)

        of_others = [job_id for job_id in ids[:1000] if shard_of(job_id.encode(), 12) in theirs]
        mine = [job_id for job_id in ids[:100] if job_id not in of_others]
        queue.push({"id": job_id, "payload": {"version": 2}} for job_id in of_others)
        until(lambda: is_done(of_others), "work on the shards of the others")
        assert cluster.servers[0] in cluster.primaries()
        cluster.replaced(cluster.servers[0])
        until(lambda: is_pushed(queue, mine[0]), "a push to the next primary")
        queue.push({"id": job_id, "payload": {"version": 2}} for job_id in mine)
        until(lambda: is_done(mine), "work on the shards of the next primary")
        node.kill()


def test_reports_show_what_answers_and_name_what_does_not(tmp_path: Path) -> None:
    with RedisCluster(tmp_path, cluster_node_timeout=int(1000 * NEVER)) as cluster:
        app = lowq.Lowq(redis_url=cluster.url)
        app.queue("Orders", 24).push([{"id": number} for number in range(200)])
        whole = app.queue("Orders").stats()
        of_registries = [cluster.primary_of(key_slot(key("lowq").encode())) for key in (queues_key, nodes_key)]
        victim = next(server for server in cluster.servers[:3] if server not in of_registries)
        served = [cluster.primary_of(key_slot(shard_prefix("lowq", "Orders", shard).encode())) for shard in range(24)]
        away = [shard for shard, server in enumerate(served) if server is victim]
        victim.kill()

        def says(*words: str) -> tuple[Any, str]:
            environment = {**os.environ, "LOWQ_REDIS_URL": cluster.url}
            command = [sys.executable, "-m", "lowq", *words, "--json"]
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
            )
            assert done.returncode == 1, done
            return json.loads(done.stdout), done.stderr

        for words in (["stats"], ["stats", "Orders"]):
            found, error = says(*words)
            assert 0 < found["total"]["length"] < whole.length
            assert f"Orders: shards {', '.join(map(str, away))} not counted" in error
        found, error = says("shards", "Orders")
        assert [shard["index"] for shard in found["shards"]] == [index for index in range(24) if index not in away]
        assert f"Orders: shards {', '.join(map(str, away))} not shown" in error
        assert str(victim.port) in error
        found, _ = says("doctor")
        (silent,) = [finding for finding in found["findings"] if finding["code"] == "redis_silent"]
        assert str(victim.port) in silent["what"]
        assert len([finding for finding in found["findings"] if finding["code"] == "redis"]) == 2
        # Who calls the API is not given half an answer.
        with pytest.raises(RedisUnavailable):
            app.queue("Orders").stats()
        app.close()
