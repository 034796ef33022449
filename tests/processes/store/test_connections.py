"""What lowq may be told to connect with: TLS, RESP3, redis-py without hiredis. Each goes through the same story."""

import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner

import lowq
from lowq.cli import main
from lowq.store import Client
from tests.processes.support import ROOT, Rig, until
from tests.redis_cluster import RedisCluster
from tests.redis_server import RedisServer
from tests.rows import case
from tests.sentinel import Sentinel
from tests.tls import Tls
from tests.waiting import NEVER, PATIENCE

#: A folder whose hiredis can't be imported.
WITHOUT_HIREDIS = {"PYTHONPATH": f"{ROOT / 'tests' / 'without_hiredis'}{os.pathsep}{ROOT}"}


@pytest.fixture(params=["tls resp3 async", "without-hiredis resp3"], ids=lambda words: words.replace(" ", "-"))
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    words = request.param.split()
    tls = Tls(tmp_path / "tls") if "tls" in words else None
    with RedisServer() if tls is None else tls.server() as server:
        url = server.url.partition("?")[0] if tls is None else tls.url(server)
        if "resp3" in words:
            url += "&protocol=3" if "?" in url else "?protocol=3"
        more: dict[str, object] = {"LOWQ_POLL_INTERVAL": NEVER, "ORDERS_MAX_RETRIES": 1, "ORDERS_BATCH": 3}
        more |= WITHOUT_HIREDIS if "without-hiredis" in words else {}
        with closing(Rig(url, tmp_path, **more, ORDERS_ASYNC="1" if "async" in words else "")) as rig:
            yield rig


def spoken(client: Any, since: int = 0) -> set[str]:
    """The protocols of connections, made after that one, that have sent something of lowq's: all begin with RESP2."""
    mine = client.client_id()
    others = [found for found in client.client_list() if int(found["id"]) not in (mine, *range(since))]
    return {found["resp"] for found in others if found["cmd"] in ("evalsha", "subscribe", "ssubscribe")}


def test_messages_that_come_together_are_all_heard_at_once_with_tls(tmp_path: Path) -> None:
    tls = Tls(tmp_path / "tls")
    for query in ("", "&protocol=3"):
        with (
            case(query),
            tls.server() as server,
            closing(Client(tls.url(server) + query, size=1, timeout=PATIENCE)) as client,
            closing(client.subscribe()) as subscription,
        ):
            subscription.add(["a"])
            until(lambda: subscription.get(0.1), "the subscription")
            client.command("EVAL", "for i = 1, 3 do redis.call('SPUBLISH', KEYS[1], i) end", "1", "a", key="a")
            heard = [subscription.get(PATIENCE) for _ in range(3)]
            assert [event and event[2] for event in heard] == [b"1", b"2", b"3"]


def test_producers_nodes_wake_ups_and_the_command_line(rig: Rig) -> None:
    def lowq_says(*words: str, code: int = 0) -> str:
        done = CliRunner().invoke(main, [*words, "--redis-url", rig.url])
        assert done.exit_code == code, done.output
        return done.stdout

    node = rig.node().holds_all()
    for number in range(20):
        rig.push(number, 1)  # a node that only polls would not see them for an hour
    rig.push("bad", 1, do="raise")
    rig.push("later", 1, delay=0.2)
    rig.done("later", 1)
    until(lambda: rig.buried() == {("bad", 1)}, "burial of what fails each time")
    protocol = "3" if "protocol=3" in rig.url else "2"
    until(lambda: spoken(rig.client) == {protocol}, f"connections that speak RESP{protocol}, and no others")
    rig.produce(1, ids=10, versions=2, rounds=1, first=1000)()
    rig.drained()
    before = len(rig.performs("bad"))
    assert lowq_says("kick", "Orders", "bad").strip() != ""
    until(lambda: len(rig.performs("bad")) == before + 2, "two more performs of what fails each time")
    until(lambda: rig.buried() == {("bad", 1)}, "its second burial")
    # It warns of the server's settings; and a lease may run out while the machine stands still.
    until(lambda: '"severity": "error"' not in lowq_says("doctor", "--json", code=1), "no error")
    assert json.loads(lowq_says("stats", "Orders", "--json"))
    assert node.stop() == 0
    assert rig.report().problems == []


def test_clusters_and_sentinels_with_resp3(cluster: RedisCluster, redis_server: RedisServer, tmp_path: Path) -> None:
    with Sentinel(tmp_path, redis_server, watches=False) as sentinel:
        for url, servers in ((cluster.url, cluster.primaries()), (sentinel.url, [redis_server])):
            clients = [redis.Redis(port=server.port, single_connection_client=True) for server in servers]
            before = [client.client_id() for client in clients]
            with case(url), closing(lowq.Lowq(redis_url=f"{url}?protocol=3")) as app:
                queue = app.queue("Resp3", 5)
                queue.push([{"id": number} for number in range(50)])
                assert "Resp3" in {found.name for found in app.queues()}
                assert queue.stats().length == 50
                queue.push([{"id": number} for number in range(50)])  # last, so that all have sent a script
                assert set.union(*map(spoken, clients, before)) == {"3"}
            for client in clients:
                client.close()


#: The plain commands that lowq sends besides scripts, and others whose replies differ between the protocols.
COMMANDS: list[tuple[str | int, ...]] = [
    ("ZRANGE", "zset", 0, -1, "WITHSCORES"),
    ("ZRANGE", "none", 0, -1, "WITHSCORES"),
    ("ZSCORE", "zset", "half"),
    ("ZMSCORE", "zset", "one", "none", "endless", "least"),
    ("HGETALL", "hash"),
    ("HGETALL", "none"),
    ("HMGET", "hash", "a", "none"),
    ("SMEMBERS", "set"),
    ("MEMORY", "USAGE", "none"),
    ("CONFIG", "GET", "appendfsync"),
    ("SCRIPT", "EXISTS", "0" * 40),
    ("MEMORY", "DOCTOR"),
    ("EVAL", "return {redis.call('HGETALL', 'hash'), redis.call('ZSCORE', 'zset', 'half'), false, true, {}}", 0),
]


def test_replies_are_the_same_with_both_protocols(redis_url: str) -> None:
    url = redis_url.partition("?")[0]
    with redis.Redis.from_url(url) as filling:
        scores = {"one": 1, "half": 0.5, "endless": float("inf"), "least": float("-inf"), "large": 2.0**53}
        filling.zadd("zset", scores)
        filling.hset("hash", mapping={"a": "1", "b": ""})
        filling.sadd("set", "a")
    clients = [Client(f"{url}?protocol={protocol}", size=1, timeout=PATIENCE) for protocol in (2, 3)]
    for command in COMMANDS:
        with case(command):
            two, three = (client.command(*command) for client in clients)
            assert two == three
    for client in clients:
        client.close()
