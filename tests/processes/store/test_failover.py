"""The primary dies, and a sentinel makes its replica the next one."""

import asyncio
import itertools
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis

import lowq
from tests.processes.conftest import MakeRig
from tests.processes.support import until
from tests.redis_server import RedisServer
from tests.sentinel import Sentinel
from tests.waiting import PATIENCE


@pytest.fixture
def primary(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "primary") as server:
        yield server


@pytest.fixture
def replica(tmp_path: Path, primary: RedisServer) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "replica", replicaof=f"127.0.0.1 {primary.port}") as server:
        yield server


def test_nodes_and_producers_go_on_with_the_next_primary(
    make_rig: MakeRig, tmp_path: Path, primary: RedisServer, replica: RedisServer
) -> None:
    with Sentinel(tmp_path / "sentinel", primary, watches=False) as sentinel:
        rig = make_rig(url=primary.url, LOWQ_REDIS_URL=sentinel.url, ORDERS_WORK=0.001)
        until(lambda: sentinel.replicas() == 1, "sentinel that knows the replica")
        nodes = [rig.node(), rig.node()]
        until(lambda: all(node.held() for node in nodes), "shards for both")
        rig.produce(2, ids=50, versions=3, rounds=4)()
        rig.drained()
        rig.push("later", 1, delay=1.0)
        rig.push("slow", 1, do="sleep", for_=1.5)
        rig.begun("slow", 1)
        # What the replica doesn't have when the primary dies is lost, whoever has said that it was in: see the docs.
        until(lambda: rig.client.execute_command("WAIT", 1, 1000) == 1, "replica that has all of it")
        primary.kill()
        sentinel.watch()
        until(lambda: sentinel.primary_port() == replica.port, "next primary")

        follow(rig, sentinel, replica)
        rig.produce(2, ids=50, versions=3, rounds=4, first=1000)()
        rig.drained()
        rig.done("later", 1)
        assert [node.stop() for node in nodes] == [0, 0]
        report = rig.report()
        assert [problem for problem in report.problems if problem not in report.excess] == []
        assert rig.merged("crashes") == {}
        for node in nodes:
            # A sentinel that gets no time may take the next primary for dead, too, and then know of none for a moment.
            # Each outage is said once.
            away, back = len(node.lines("trying until it is back")), len(node.lines("Redis is back"))
            assert away - 1 <= back <= away
            assert away >= 1


def test_sentinels_that_do_not_answer_stop_nothing(make_rig: MakeRig, tmp_path: Path, primary: RedisServer) -> None:
    """All of them frozen: leases are renewed, pushes come in and are performed, also on new connections."""
    with Sentinel(tmp_path / "sentinel", primary, watches=False) as sentinel:
        rig = make_rig(url=primary.url, LOWQ_REDIS_URL=sentinel.url, LOWQ_LEASE_TTL=3)
        nodes = [rig.node(), rig.node()]
        until(lambda: all(node.held() for node in nodes), "shards for both")
        rig.push("first", 1)
        rig.done("first", 1)
        fences = {shard: meta["fence"] for shard, meta in rig.of_shards("meta").items()}
        app = lowq.Lowq(redis_url=sentinel.url, push_timeout=PATIENCE)
        queue = app.queue(rig.queue_name, rig.shards_count)
        queue.push({"id": "known", "payload": {"version": 1}, "score": 1})
        sentinel.pause()
        try:
            rig.client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            began = time.time()
            for number in itertools.count():
                # Before anything else, so that it is pushed on a new connection, too.
                queue.push({"id": number, "payload": {"version": 1}, "score": 1})
                rig.done(number, 1)
                if all(float(meta["leased_until"]) > began + 2 * 3 for meta in rig.of_shards("meta").values()):
                    break
            assert {shard: meta["fence"] for shard, meta in rig.of_shards("meta").items()} == fences
            assert not [line for node in nodes for line in node.lines("trying until it is back")]
        finally:
            sentinel.cont()
        assert [node.stop() for node in nodes] == [0, 0]


def test_sentinels_with_users_of_their_own(tmp_path: Path, primary: RedisServer) -> None:
    with Sentinel(tmp_path / "sentinel", primary, watches=False) as sentinel:
        with redis.Redis(port=sentinel.port) as client:
            rights = ("resetchannels", "-@all", "+auth", "+client", "+hello", "+ping", "+sentinel|master")
            client.execute_command("ACL", "SETUSER", "lowq", "on", ">hunter2@?", *rights)
            client.execute_command("ACL", "SETUSER", "default", ">hunter3")
        own = f"{sentinel.url}?sentinel_username=lowq&sentinel_password=hunter2%40%3F"
        for url in (own, f"{sentinel.url}?sentinel_password=hunter3"):
            app = lowq.Lowq(redis_url=url)
            app.queue("Orders", 1).push({"id": 1})
            app.close()
        for wrong in (sentinel.url, own.replace("hunter2", "hunter4")):
            app = lowq.Lowq(redis_url=wrong)
            with pytest.raises(lowq.RedisRefused, match="sentinel_username=user&sentinel_password=password") as caught:
                app.queue("Orders", 1).push({"id": 1})
            assert "hunter" not in str(caught.value) + str(app.config)
            app.close()


def test_passwords_of_sentinel_and_primary(tmp_path: Path) -> None:
    """``requirepass`` of both, which differ."""
    with (
        RedisServer(tmp_path / "primary", requirepass="hunter2") as primary,
        Sentinel(
            tmp_path / "sentinel", primary, watches=False, password="hunter3", primary_password="hunter2"
        ) as sentinel,
    ):
        url = sentinel.url.replace("//", "//:hunter2@") + "?sentinel_password=hunter3"
        for right in (url, url.replace("redis+", "valkey+")):
            with closing(lowq.Lowq(redis_url=right)) as app:
                assert app.queue("Orders", 1).push({"id": 1}) == 1
        for wrong in (url.replace("hunter3", "hunter2"), url.replace("hunter2", "hunter3"), sentinel.url):
            with closing(lowq.Lowq(redis_url=wrong)) as app, pytest.raises(lowq.RedisRefused) as caught:
                app.queue("Orders", 1).push({"id": 1})
            assert "refused the user or password" in str(caught.value)
            assert "hunter" not in str(caught.value)


def follow(rig: Any, sentinel: Sentinel, server: RedisServer) -> None:
    """From now on the test, too, looks at this server."""
    rig.client.close()
    rig.app.close()
    rig.client = redis.Redis.from_url(server.url, decode_responses=True, socket_timeout=10)
    rig.app = lowq.Lowq(redis_url=sentinel.url)


def test_coroutines_leave_a_primary_that_answers_though_the_sentinels_name_another(
    tmp_path: Path, primary: RedisServer
) -> None:
    """A loop sends on a connection of its own, which nothing else would end."""

    async def push_until_it_is_left() -> None:
        with RedisServer(tmp_path / "next") as following, Sentinel(tmp_path / "s", primary, watches=False) as sentinel:
            app = lowq.Lowq(redis_url=sentinel.url)
            queue = app.queue("Orders", 1)
            for number in range(5):
                await queue.apush(str(number), {})
            with redis.Redis(port=sentinel.port) as client:
                client.execute_command("SENTINEL", "REMOVE", "main")
                client.execute_command("SENTINEL", "MONITOR", "main", "127.0.0.1", following.port, 1)
            with redis.Redis(port=following.port) as client:
                give_up_at = time.monotonic() + PATIENCE
                while not client.dbsize():
                    assert time.monotonic() < give_up_at
                    await queue.apush("more", {})
                    await asyncio.sleep(0.01)
            app.close()

    asyncio.run(push_until_it_is_left())
