"""URLs behind which nobody answers, or somebody else than they say: each verb says what is wrong, and what to do."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import redis

import lowq
from tests.integration.support import ROOT, until
from tests.redis_cluster import RedisCluster
from tests.redis_server import RedisServer


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with RedisCluster(primaries=2, replicas=1) as cluster:
        yield cluster


def said(url: str, *words: str) -> str:
    """What a command of lowq says when it has failed."""
    ended = subprocess.run(
        [sys.executable, "-m", "lowq", *words],
        cwd=ROOT, env=os.environ | {"LOWQ_REDIS_URL": url, "ORDERS_HISTORY": os.devnull}, capture_output=True,
        text=True, check=False, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 1, ended.stdout + ended.stderr
    return ended.stderr


def run_said(url: str) -> str:
    return said(url, "run", "-r", "tests.integration.app_orders:app")


def push_error(url: str) -> str:
    app = lowq.Lowq(redis_url=url, push_timeout=2)
    try:
        with pytest.raises(lowq.LowqError) as caught:
            app.queue("Orders", 5).push([{"id": "1", "payload": 1}])
        return f"{type(caught.value).__name__}: {caught.value}"
    finally:
        app.close()


#: A port that nobody listens on: nobody may without being root.
NOBODY = 1
UNREACHABLE = {
    f"redis://127.0.0.1:{NOBODY}": "does not answer: Error 111",
    "redis://nobody.invalid": "does not answer: Error -2 connecting to nobody.invalid:6379",
    f"redis+cluster://127.0.0.1:{NOBODY},127.0.0.1:{NOBODY}": "does not answer: Error 111",
    "redis+cluster://nobody.invalid:1,nowhere.invalid:2": "does not answer: Error -2 connecting to no",
    f"redis+sentinel://127.0.0.1:{NOBODY}/main": "none of the sentinels does (Error 111",
    "redis+sentinel://nobody.invalid/main": "none of the sentinels does (Error -2 connecting to nobody.invalid",
}


@pytest.mark.parametrize("url", UNREACHABLE)
def test_nobody_is_there(url: str) -> None:
    reason = UNREACHABLE[url]
    for text in (said(url, "nodes"), run_said(url)):
        assert f"lowq: Redis at {url}" in text
        assert reason in text
        assert "LOWQ_REDIS_URL" in text
        assert "object at 0x" not in text
    assert "RedisUnavailable: Redis at " in push_error(url)
    assert reason in push_error(url)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_server_of_a_cluster_is_no_redis_of_its_own(cluster: RedisCluster, place: int) -> None:
    """Also where it happens to serve the shards that are asked for first, and where it is a replica."""
    url = cluster.servers[place].url
    for text in (said(url, "nodes"), run_said(url), push_error(url)):
        assert "the server is part of a cluster; use redis+cluster:// in redis_url" in text


def test_some_servers_of_the_url_are_enough(cluster: RedisCluster) -> None:
    names = f"nobody.invalid:1,127.0.0.1:{NOBODY},127.0.0.1:{cluster.servers[-1].port}"
    app = lowq.Lowq(redis_url=f"redis+cluster://{names}")
    assert app.queue("Others", 5).push([{"id": str(number)} for number in range(20)]) == 20
    app.close()


def test_a_single_server_is_no_cluster() -> None:
    with RedisServer() as server:
        url = server.url.replace("redis://", "redis+cluster://")
        for text in (said(url, "nodes"), run_said(url), push_error(url)):
            assert "is no cluster: use redis:// for a single server" in text


def test_a_cluster_that_is_not_made_yet() -> None:
    with RedisServer(cluster_enabled="yes") as server:
        url = f"redis+cluster://127.0.0.1:{server.port}"
        for text in (said(url, "nodes"), run_said(url), push_error(url)):
            assert "serves any slot; make the cluster first: redis-cli --cluster create" in text


def test_a_replica_is_no_primary_and_a_node_waits_until_it_is() -> None:
    with RedisServer() as primary, RedisServer(replicaof=f"127.0.0.1 {primary.port}") as replica:
        with redis.Redis(port=replica.port) as client:  # until then it says that it is loading
            until(lambda: client.info("replication").get("master_link_status") == "up", "a replica in step")
        error = push_error(replica.url)
        assert error.startswith(f"RedisNotReady: Redis at redis://127.0.0.1:{replica.port}/0 is a read-only replica; ")
        assert "redis_url must name the primary" in error
        node = subprocess.Popen(
            [sys.executable, "-m", "lowq", "run", "-r", "tests.integration.app_orders:app"],
            cwd=ROOT, env=os.environ | {"LOWQ_REDIS_URL": replica.url, "ORDERS_HISTORY": os.devnull},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            assert node.stdout is not None
            assert "redis_url must name the primary" in next(line for line in node.stdout if "replica" in line)
            with redis.Redis(port=replica.port) as client:
                client.execute_command("REPLICAOF", "NO", "ONE")
                until(lambda: client.exists("lowq:v1:nodes"), "node")
        finally:
            node.terminate()
            node.communicate(timeout=60)
