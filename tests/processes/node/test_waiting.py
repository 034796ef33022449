"""Redis read only, a replica, or loading its data: nodes and consumers wait, and go on by themselves."""

import asyncio
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner

import lowq
from lowq.cli import main
from tests.processes.conftest import MakeRig
from tests.processes.support import PATIENCE, NodeProcess, Rig, answered, until
from tests.redis_server import RedisServer


def become_replica(rig: Rig) -> None:
    """Of a server that is not there: what it has it keeps, and nobody can write."""
    rig.client.execute_command("REPLICAOF", "127.0.0.1", "1")


def become_primary(rig: Rig) -> None:
    rig.client.execute_command("REPLICAOF", "NO", "ONE")


def problems(rig: Rig) -> list[str]:
    """All but this: what was finished, and could not be acknowledged in time, may come again."""
    report = rig.report()
    return [problem for problem in report.problems if problem not in report.excess]


def waits(node: NodeProcess) -> None:
    node.says("is a read-only replica; redis_url must name the primary")
    node.says("waiting until it can")


@pytest.fixture
def replica() -> Iterator[RedisServer]:
    with RedisServer(replicaof="127.0.0.1 1") as server:
        yield server


def test_a_wait_for_longer_than_the_lease_charges_nobody(make_rig: MakeRig, own_server: RedisServer) -> None:
    rig = make_rig(own_server.url, LOWQ_LEASE_TTL=0.5, ORDERS_MAX_CRASHES=1)
    node = rig.node().holds_all()
    rig.push("a", 1, do="wait")
    rig.begun("a", 1)
    become_replica(rig)
    waits(node)
    until(lambda: [one.waiting for one in rig.app.nodes()] == [True], "a node that is said to wait")
    listed = CliRunner().invoke(main, ["nodes", "--redis-url", own_server.url])
    assert "waiting" in listed.stdout
    assert "WAITING: Redis is a replica" in listed.stderr
    node.signal(signal.SIGTTIN)
    assert "waiting for" in node.says("stacks of all threads")
    Path(f"{rig.history.path}.go").touch()
    rig.done("a", 1)
    become_primary(rig)
    rig.drained()
    until(lambda: [one.waiting for one in rig.app.nodes()] == [False], "a node that is said to work")
    rig.push("b", 1)
    rig.done("b", 1)
    assert rig.merged("crashes") == {}
    assert rig.buried() == set()  # one crash would have buried it
    assert node.stop() == 0
    assert problems(rig) == []


@pytest.mark.threads_only
def test_a_node_waits_at_its_start_too_and_does_then_what_it_was_told(make_rig: MakeRig, replica: RedisServer) -> None:
    rig = make_rig(replica.url)
    node, other = rig.node(), rig.node()
    for one in (node, other):
        waits(one)
    assert other.stop() == 0
    assert "Traceback" not in other.log
    node.signal(signal.SIGTTIN)
    assert "waiting for" in node.says("stacks of all threads")
    node.signal(signal.SIGTSTP)
    assert node.lines(" starts: ") == []
    become_primary(rig)
    node.says("Redis is back")
    node.says("goes quiet")
    until(lambda: [one.quiet for one in rig.app.nodes()] == [True], "a quiet node")
    assert node.stop() == 0
    assert len(node.lines("waiting until it can")) == 1


@pytest.mark.threads_only
def test_it_waits_until_the_data_is_loaded(make_rig: MakeRig) -> None:
    with RedisServer(loading_process_events_interval_bytes=1024) as server:
        client = redis.Redis(port=server.port)
        client.mset({f"other:{number}": "x" * 100 for number in range(100_000)})
        client.save()
        client.close()
        server.kill()
        server.options["key_load_delay"] = 1000  # microseconds for each key: longer than anybody waits here
        server.start_loading()
        rig = make_rig(server.url)
        node = rig.node()
        assert "loads its data" in node.says("waiting until it can")
        with pytest.raises(lowq.RedisNotReady, match="it serves again when that is done"):
            rig.app.queue("Orders", 5).push({"id": 1})
        server.kill()
        server.options["key_load_delay"] = 0
        server.start()
        node.holds_all()
        rig.push("a", 1)
        rig.done("a", 1)
        assert node.stop() == 0


@pytest.mark.threads_only
def test_it_waits_for_a_primary_that_takes_no_writes(make_rig: MakeRig, own_server: RedisServer) -> None:
    rig = make_rig(own_server.url, ORDERS_MAX_CRASHES=1)
    node = rig.node()
    rig.push("a", 1)
    rig.done("a", 1)
    rig.client.config_set("min-replicas-to-write", 1)
    assert "takes no writes, as it has too few replicas" in node.says("waiting until it can")
    with pytest.raises(lowq.PushError) as refused:
        rig.push("b", 1)
    assert isinstance(refused.value.__cause__, lowq.RedisNotReady)
    rig.client.config_set("min-replicas-to-write", 0)
    node.says("Redis is back")
    rig.push("b", 1)
    rig.done("b", 1)
    rig.drained()
    assert node.stop() == 0
    assert problems(rig) == []


@pytest.mark.threads_only
def test_a_consumer_waits_and_keeps_what_it_has(make_rig: MakeRig, own_server: RedisServer) -> None:
    rig = make_rig(own_server.url)
    queue = rig.app.queue("Orders", 5)
    queue.push("a")
    with queue.consumer() as consumer:
        (job,) = consumer.take(timeout=PATIENCE)
        become_replica(rig)
        with pytest.raises(lowq.RedisNotReady):
            job.ack()
        with pytest.raises(lowq.RedisNotReady):
            consumer.take(timeout=0)
        become_primary(rig)

        def is_acknowledged() -> bool:
            job.ack()
            return True

        until(lambda: answered(is_acknowledged), "an acknowledgement")
        queue.push("b")
        (other,) = consumer.take(timeout=PATIENCE)
        other.ack()
    assert queue.stats().length == queue.stats().taken == 0


@pytest.mark.threads_only
@pytest.mark.parametrize("kind", ["consumer", "aconsumer"])
def test_a_consumer_waits_at_its_start(
    kind: str, make_rig: MakeRig, replica: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(replica.url)
    become_primary(rig)
    queue = rig.app.queue("Orders", 5)
    queue.push("a")
    become_replica(rig)
    taken: list[str] = []

    def consume() -> None:
        with queue.consumer() as consumer:
            taken.extend(job.id for job in consumer.take(timeout=PATIENCE))

    async def aconsume() -> None:
        async with queue.aconsumer() as consumer:
            taken.extend(job.id for job in await consumer.take(timeout=PATIENCE))

    thread = threading.Thread(target=consume if kind == "consumer" else lambda: asyncio.run(aconsume()))
    thread.start()
    until(lambda: "waiting until it can" in caplog.text, "a consumer that waits")
    assert taken == []
    become_primary(rig)
    thread.join(PATIENCE)
    assert taken == ["a"]
    assert "Redis is back" in caplog.text
