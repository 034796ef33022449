"""Redis read only, a replica, or loading its data: nodes and consumers wait, and go on by themselves."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import redis

import lowq
from tests.processes.conftest import MakeRig
from tests.processes.supervising import Supervise, write_code
from tests.processes.support import PATIENCE, NodeProcess, Rig, until
from tests.redis_server import RedisServer


def become_replica(rig: Rig) -> None:
    """Of a server that is not there: what it has it keeps, and nobody can write."""
    rig.client.execute_command("REPLICAOF", "127.0.0.1", "1")


def become_primary(rig: Rig) -> None:
    rig.client.execute_command("REPLICAOF", "NO", "ONE")


def is_busy(client: "redis.Redis") -> bool:
    try:
        client.get("anything")
    except redis.ResponseError as error:
        return "busy" in str(error)
    return False


def problems(rig: Rig) -> list[str]:
    """All but this: what was finished, and could not be acknowledged in time, may come again."""
    report = rig.report()
    return [problem for problem in report.problems if problem not in report.excess]


def waits(node: NodeProcess) -> None:
    node.says("is a read-only replica; redis_url must name the primary")
    node.says("waiting until it can")


def lowq_says(rig: Rig, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lowq", *words], env=rig.environment({}), capture_output=True, text=True, check=False
    )


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
    listed = lowq_says(rig, "nodes")
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


def test_a_node_that_waits_at_its_start_can_be_stopped(make_rig: MakeRig, replica: RedisServer) -> None:
    rig = make_rig(replica.url)
    node = rig.node()
    waits(node)
    assert node.stop() == 0
    assert "Traceback" not in node.log


def test_a_node_waits_at_its_start_too_and_does_then_what_it_was_told(make_rig: MakeRig, replica: RedisServer) -> None:
    rig = make_rig(replica.url)
    node = rig.node()
    waits(node)
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


def test_a_wrong_address_still_is_an_error(make_rig: MakeRig) -> None:
    rig = make_rig("redis://127.0.0.1:1")
    node = rig.node()
    assert node.process.wait(PATIENCE) == 1
    assert "127.0.0.1:1 does not answer" in node.log
    (said,) = rig.events("last_words")
    assert "RedisUnavailable" in said["error"]


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
def test_it_waits_for_a_script_of_somebody_else(make_rig: MakeRig) -> None:
    with (
        RedisServer(busy_reply_threshold=10) as server,
        socket.create_connection(("127.0.0.1", server.port)) as other,
        redis.Redis(port=server.port) as client,
    ):
        other.sendall(b"EVAL 'while true do end' 0\r\n")
        until(lambda: is_busy(client), "a busy Redis")
        rig = make_rig(server.url)
        node = rig.node()
        assert "runs a script of somebody else" in node.says("waiting until it can")
        client.execute_command("SCRIPT", "KILL")
        node.holds_all()
        rig.push("a", 1)
        rig.done("a", 1)
        assert node.stop() == 0


@pytest.mark.threads_only
def test_healthz_says_that_the_node_waits(make_rig: MakeRig, supervise: Supervise, own_server: RedisServer) -> None:
    rig = make_rig(own_server.url)
    write_code(rig, 1)
    node = supervise(rig, "--web=127.0.0.1:0", "--no-auth", name="node")
    url = node.says("the dashboard is at").split()[-1] + "/healthz"

    def health() -> tuple[int, str]:
        try:
            with urlopen(url) as answer:
                return answer.status, ""
        except HTTPError as error:
            with error:
                return error.code, json.loads(error.read())["error"]

    until(lambda: health()[0] == 200, "a node that is well")
    become_replica(rig)

    def waiting() -> tuple[int, str] | None:
        found = health()
        return found if found[1].startswith("waiting") else None

    found = until(waiting, "a node that waits")
    assert found is not None
    code, said = found
    assert code == 503
    assert said.endswith("Redis is a read-only replica")
    become_primary(rig)
    until(lambda: health()[0] == 200, "a node that is well again")
    assert node.stop() == 0


@pytest.mark.threads_only
def test_it_waits_for_a_primary_that_takes_no_writes(make_rig: MakeRig, own_server: RedisServer) -> None:
    rig = make_rig(own_server.url, ORDERS_MAX_CRASHES=1)
    node, consumer = rig.node(), rig.node(ORDERS_CONSUMER="1")
    for one in (node, consumer):
        one.says(" starts: ")
    rig.push("a", 1)
    rig.done("a", 1)
    rig.client.config_set("min-replicas-to-write", 1)
    for one in (node, consumer):
        assert "takes no writes, as it has too few replicas" in one.says("waiting until it can")
    late = rig.node()  # waits at its start, too
    late.says("waiting until it can")
    with pytest.raises(lowq.PushError) as refused:
        rig.push("b", 1)
    assert isinstance(refused.value.__cause__, lowq.RedisNotReady)
    rig.client.config_set("min-replicas-to-write", 0)
    for one in (node, consumer, late):
        one.says("Redis is back")
    rig.push("b", 1)
    rig.done("b", 1)
    rig.drained()
    assert [one.stop() for one in (node, consumer, late)] == [0, 0, 0]
    assert problems(rig) == []


@pytest.mark.threads_only
def test_a_consumer_waits_and_keeps_what_it_has(make_rig: MakeRig, own_server: RedisServer) -> None:
    rig = make_rig(own_server.url)
    app = lowq.Lowq(redis_url=own_server.url)
    queue = app.queue("Orders", 5)
    queue.push([{"id": "a", "payload": {"version": 1}}])
    with queue.consumer() as consumer:
        (job,) = consumer.take(timeout=PATIENCE)
        become_replica(rig)
        with pytest.raises(lowq.RedisNotReady):
            job.ack()
        with pytest.raises(lowq.PushInterrupted, match="is a read-only replica; redis_url must name") as refused:
            queue.push({"id": "b", "payload": {"version": 1}})
        assert isinstance(refused.value.__cause__, lowq.RedisNotReady)
        assert refused.value.accepted == 0
        with pytest.raises(lowq.RedisNotReady):
            consumer.take(timeout=0)
        become_primary(rig)

        def acknowledged() -> bool:
            try:
                job.ack()
            except lowq.RedisUnavailable:
                return False
            return True

        until(acknowledged, "an acknowledgement")
        queue.push({"id": "b", "payload": {"version": 1}})
        (other,) = consumer.take(timeout=PATIENCE)
        assert other.id == "b"
        other.ack()
    assert queue.stats().length == queue.stats().taken == 0
    app.close()


@pytest.mark.threads_only
def test_a_command_that_consumes_waits_at_its_start(make_rig: MakeRig, replica: RedisServer, tmp_path: Path) -> None:
    rig = make_rig(replica.url)
    become_primary(rig)
    rig.app.queue("Orders", 5).push({"id": "a"})
    become_replica(rig)
    log_path = tmp_path / "consume.log"
    words = ["consume", "Orders", "--idle", "0.2", "--", "touch", str(tmp_path / "{id}")]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "lowq", *words], env=rig.environment({}), stdout=log, stderr=log
        )  # fmt: skip
    until(lambda: "waiting until it can" in log_path.read_text(), "a command that waits")
    become_primary(rig)
    until((tmp_path / "a").exists, "a job that was performed")
    process.terminate()
    process.wait(PATIENCE)


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
