"""A primary of a cluster is gone or cut off, and its replica has its slots."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from redis.crc import key_slot

import lowq
from lowq.errors import RedisUnavailable
from lowq.queue import Queue
from lowq.store import Client, Deadline
from tests.integration.conftest import MakeRig
from tests.integration.support import until
from tests.redis_server import RedisServer


class Cluster:
    """Three primaries, and a replica of the first one."""

    def __init__(self) -> None:
        options: dict[str, Any] = {
            "cluster_enabled": "yes", "cluster_node_timeout": 1000, "cluster_replica_validity_factor": 0,
            "repl_diskless_sync_delay": 0,
        }  # fmt: skip
        self.servers = [RedisServer(**options) for _ in range(4)]
        self.first, *self.others, self.replica = self.servers

    def start(self) -> None:
        for number, server in enumerate(self.servers):
            server.start()
            with redis.Redis(port=server.port) as client:
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
                if server is not self.replica:
                    client.execute_command("CLUSTER", "ADDSLOTSRANGE", number * 5500, min(number * 5500 + 5499, 16383))
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", self.first.port)
        for server in self.servers:
            until(lambda server=server: self._state(server) == ("ok", "4"), "cluster in order")  # type: ignore[misc]
        with redis.Redis(port=self.replica.port) as client, redis.Redis(port=self.first.port) as first:
            client.execute_command("CLUSTER", "REPLICATE", first.execute_command("CLUSTER", "MYID"))
            until(lambda: client.info("replication")["master_link_status"] == "up", "replica")

    def _state(self, server: RedisServer) -> tuple[str, str]:
        with redis.Redis(port=server.port) as client:
            info = client.execute_command("CLUSTER INFO")
            return info["cluster_state"], info["cluster_known_nodes"]

    def replica_leads(self) -> bool:
        with redis.Redis(port=self.replica.port) as client:
            return bool(client.info("replication")["role"] == "master")

    def replicated(self) -> bool:
        """Whether the replica has all that the first one has said to be in."""
        with redis.Redis(port=self.first.port) as client:
            return bool(client.execute_command("WAIT", 1, 5000) == 1)

    def close(self) -> None:
        for server in self.servers:
            server.close()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


def ids_of_first(queue: Queue) -> list[str]:
    names = [str(number) for number in range(100)]
    return [name for name in names if key_slot(queue._prefix_of(name.encode()).encode()) < 5500]


def answered(look: Callable[[], bool]) -> bool:
    """What it gives; False: there was no answer. A cluster whose servers get no time is down again for a moment."""
    try:
        return look()
    except RedisUnavailable:
        return False


def is_pushed(queue: Queue, job_id: str) -> bool:
    return answered(lambda: queue.push({"id": job_id, "payload": 2}) == 1)


@pytest.mark.parametrize("end", ["killed", pytest.param("frozen", marks=pytest.mark.slow)])
def test_producers_find_the_primary_that_has_the_slots_now(cluster: Cluster, end: str) -> None:
    """The URL names the one that is gone first."""
    ports = [server.port for server in cluster.servers]
    app = lowq.Lowq(redis_url=f"redis+cluster://{','.join(f'127.0.0.1:{port}' for port in ports)}", push_timeout=2)
    queue = app.queue("Orders", 8)
    queue.push([{"id": str(number), "payload": 1} for number in range(100)])
    (mine, *_) = ids_of_first(queue)
    assert cluster.replicated()
    if end == "killed":
        cluster.first.kill()
    else:
        cluster.first.pause()
    until(cluster.replica_leads, "next primary")
    until(lambda: is_pushed(queue, mine), "a push to it")
    until(lambda: answered(lambda: queue.stats().length == 100), "all jobs")

    async def produce() -> list[int]:
        return await asyncio.gather(*(queue.apush({"id": name, "payload": 3}) for name in ids_of_first(queue)))

    until(lambda: answered(lambda: set(asyncio.run(produce())) == {1}), "pushes of coroutines")
    app.close()


def test_nodes_and_producers_go_on_with_the_next_primary(make_rig: MakeRig, cluster: Cluster) -> None:
    with RedisServer() as unused:  # the rig's own looks are at one server
        url = f"redis+cluster://127.0.0.1:{cluster.others[0].port}"
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
        assert cluster.replicated()
        cluster.first.kill()
        until(cluster.replica_leads, "next primary")
        until(lambda: is_pushed(queue, "probe"), "a push to it")
        rig.produce(2, ids=50, versions=3, rounds=10, first=1000)()
        drained()
        assert [node.stop() for node in nodes] == [0, 0]
        performed = {job_id for perform in rig.performs() for job_id in perform.jobs}
        assert performed >= {str(number) for number in (*range(100), *range(1000, 1100))}


def test_slots_are_asked_for_once_in_a_while_and_not_first_of_who_does_not_answer(cluster: Cluster) -> None:
    client = Client(f"redis+cluster://127.0.0.1:{cluster.first.port}", size=5, timeout=5)
    servers: Any = client._servers
    assert client.command("PING", key="") in (b"PONG", "PONG")
    asked: list[int] = []
    refresh = servers.refresh

    def count(deadline: Deadline | None = None) -> None:
        asked.append(1)
        refresh(deadline)

    servers.refresh = count
    cluster.first.pause()
    try:
        for _ in range(50):
            servers.doubt("")
            servers.pool_for("", Deadline(30.0))
        assert 0 < len(asked) < 50
    finally:
        cluster.first.cont()
    client.close()
