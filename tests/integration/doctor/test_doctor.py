"""The doctor beside nodes that work, and on the command line."""

import json
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from click.testing import CliRunner, Result

from lowq import Lowq
from lowq.broker.shard import Shard
from lowq.cli import main
from lowq.cli.doctor import _block
from lowq.doctor import Finding
from lowq.store.keys import shard_prefix
from tests.integration.conftest import MakeRig
from tests.integration.support import TTL, until
from tests.redis_server import RedisServer

#: The tests' server persists nothing, on purpose. And that a maintenance loop ran late is true on a machine that is
#: busy.
OF_THE_MACHINE = {"persistence", "maintenance_late"}


def wrong(app: Lowq, **options: Any) -> list[Finding]:
    return [item for item in app.examine(**options) if item.wrong and item.code not in OF_THE_MACHINE]


# --- beside nodes ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_nothing_is_found_while_nodes_work_under_load(make_rig: MakeRig) -> None:
    ttl = 5.0
    rig = make_rig(ORDERS_SHARDS=8, ORDERS_BATCH=5, ORDERS_MAX_RETRIES=2, LOWQ_LEASE_TTL=ttl)
    nodes = [rig.node() for _ in range(2)]
    nodes[0].says(" starts: ")
    nodes[1].says(" starts: ")
    until(lambda: sum(node.held() for node in nodes) == 8, "leases of all shards")
    rig.produce(2, ids=200, versions=3, rounds=100_000, pause=0.01)
    app = Lowq(redis_url=rig.url, lease_ttl=ttl)
    queue = app.queue("Orders")
    stop = threading.Event()

    def meddle() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            rig.push(f"bad{number % 50}", number, do="raise")
            queue.push({"id": f"later{number % 50}", "payload": {"version": number}, "score": number, "delay": 60})
            queue.bury([f"later{number % 50}", f"bad{number % 50}", str(number % 200)])
            queue.kick([f"later{(number + 20) % 50}", str(number % 200)])
            queue.perform_now(f"later{(number + 30) % 50}")
            queue.delete(f"later{(number + 40) % 50}")
            if number % 20 == 0:
                queue.pause()
                queue.resume()

    meddler = threading.Thread(target=meddle)
    meddler.start()
    try:
        found = []
        for number in range(10):
            before = queue.stats().processed
            found += wrong(app, repair=number % 2 == 1)
            until(lambda before=before: queue.stats().processed > before, "work that went on")  # type: ignore[misc]
    finally:
        stop.set()
        meddler.join()
        app.close()
    assert found == []


def test_jobs_of_a_node_that_was_killed_are_found_and_restored(make_rig: MakeRig) -> None:
    rig = make_rig(ORDERS_SHARDS=3)
    node = rig.node().holds_all()
    rig.push("slow", 1, do="sleep", for_=60.0)
    rig.begun("slow", 1)
    app = Lowq(redis_url=rig.url, lease_ttl=TTL)
    assert wrong(app) == []
    node.kill()
    until(lambda: not rig.of_shards("lease"), "end of the leases of the dead node")
    found = {item.code: item for item in wrong(app)}
    in_its_wake = {"node_silent", "node_without_leases", "shard_unserved", "queue_unserved"}
    assert {"ownerless"} <= found.keys() <= {"ownerless", *in_its_wake}
    assert found["ownerless"].what.startswith("1 job in flight, and nobody holds the lease of shard ")
    assert "ownerless" not in {item.code for item in wrong(app, repair=True)}
    assert rig.of_shards("taken") == {}
    (job,) = app.queue("Orders").fetch(["slow"]).values()
    assert (job.state in ("due", "scheduled"), job.crashes) == (True, 1)
    app.close()


def test_a_node_that_is_frozen_is_found(make_rig: MakeRig) -> None:
    rig = make_rig(ORDERS_SHARDS=3)
    node = rig.node().holds_all()
    app = Lowq(redis_url=rig.url, lease_ttl=TTL)
    node.freeze()
    until(lambda: not rig.of_shards("lease"), "end of the leases of the frozen node")
    assert {"node_without_leases", "node_silent"} & {item.code for item in wrong(app)}
    node.signal(signal.SIGCONT)
    node.holds_all()
    # But that it was frozen, which is told for ten minutes, if its maintenance loop noticed.
    until(lambda: wrong(app) == [], "nothing that is wrong")
    app.close()


# --- in a cluster ------------------------------------------------------------------------------------------------


def test_all_primaries_of_a_cluster_are_examined_and_mended(cluster_url: str) -> None:
    app = Lowq(redis_url=cluster_url)
    queue = app.queue("Orders", 20)
    queue.push({"id": number} for number in range(500))
    found = app.examine()
    assert len([item for item in found if item.code == "redis"]) == 2
    assert [item.code for item in found if item.wrong] == ["queue_unserved"]
    for shard in range(20):
        key = shard_prefix("lowq", "Orders", shard) + "due"
        app.client.command("DEL", key, key=key)
    (orphans,) = [item for item in app.examine(repair=True) if item.code == "orphan_payloads"]
    assert (orphans.count, orphans.repaired, orphans.shards) == (500, 500, tuple(range(20)))
    assert [item.code for item in app.examine() if item.wrong] == ["queue_unserved"]
    assert queue.stats().due == 500
    app.close()


# --- the command line --------------------------------------------------------------------------------------------


class Cli:
    def __init__(self, url: str) -> None:
        self.url = url
        self.app = Lowq(redis_url=url)
        self.queue = self.app.queue("Orders", 1)
        self.prefix = shard_prefix("lowq", "Orders", 0)

    def __call__(self, *args: str, code: int = 0) -> Result:
        result = CliRunner().invoke(main, ["doctor", *args, "--redis-url", self.url])
        assert result.exit_code == code, f"{args}: {result.exit_code}\n{result.output}\n{result.exception!r}"
        return result

    def node(self) -> None:
        """A node that works the queue, and its lease."""
        shard = Shard(self.app.client, "lowq", "Orders", 0, shards_count=1, nonce="tester", load_payload=json.loads)
        shard.lease.acquire(600.0)
        says = json.dumps({"queues": ["Orders"], "version": "1", "shards": {"Orders": [0]}})
        self.app.client.run("heartbeat", "lowq:v1:nodes", "", "host:1:tester", "", says, 600)


@pytest.fixture(scope="module")
def durable_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("durable"), appendonly="yes") as server:
        yield server


@pytest.fixture
def cli(durable_server: RedisServer) -> Iterator[Cli]:
    with redis.Redis.from_url(durable_server.url) as client:
        client.flushall()
    cli = Cli(durable_server.url)
    yield cli
    cli.app.close()


def test_a_healthy_queue_ends_with_0(cli: Cli) -> None:
    cli.queue.push({"id": 1})
    cli.node()
    lines = cli().stdout.splitlines()
    assert lines[-1] == "nothing is wrong"
    assert all(line.startswith("ok ") for line in lines[:-2])
    assert any("appendfsync everysec" in line for line in lines)


def test_an_error_is_explained_and_ends_with_1(cli: Cli) -> None:
    cli.queue.push([{"id": number} for number in range(12)])
    cli.node()
    cli.app.client.command("DEL", cli.prefix + "due")
    text = cli(code=1).stdout
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("error"))
    assert lines[start] == "error    Orders: payloads of 12 ids wait, and nothing makes them due [orphan_payloads]"
    assert [line.split()[0] for line in lines[start + 1 : -2] if line[9:10].strip()] == [
        "ids", "shards", "cause", "effect", "do"
    ]  # fmt: skip
    assert lines[start + 1].endswith(" and 2 more")
    assert lines[-1] == "1 error; --repair can repair 1 of them"
    repaired = cli("--repair").stdout.splitlines()
    assert "         repaired  all of it" in repaired
    assert repaired[-1] == "nothing is wrong any more; repaired: 1 finding, in whole or in part"
    assert cli().stdout.splitlines()[-1] == "nothing is wrong"


def test_a_warning_ends_with_1_too(cli: Cli) -> None:
    cli.queue.push({"id": 1})
    assert cli(code=1).stdout.splitlines()[-1] == "1 warning"


def test_what_is_left_ends_with_1_after_a_repair(cli: Cli) -> None:
    cli.queue.push([{"id": 1}, {"id": 2}])
    cli.node()
    cli.queue.bury(1)
    cli.app.client.command("DEL", cli.prefix + "morgue:payloads:1", cli.prefix + "payloads:2")
    assert cli("--repair", code=1).stdout.splitlines()[-1] == "1 warning; repaired: 1 finding, in whole or in part"


def test_json_for_machines(cli: Cli) -> None:
    cli.queue.push({"id": 1})
    cli.node()
    text = cli("--json").stdout
    assert text.count("\n") == 1
    assert json.loads(text)["healthy"] is True
    cli.app.client.command("DEL", cli.prefix + "due")
    document = json.loads(cli("--json", code=1).stdout)
    assert document["healthy"] is False
    (finding,) = [item for item in document["findings"] if item["wrong"]]
    assert finding.keys() == {
        "code", "severity", "what", "cause", "effect", "advice", "queue", "shards", "ids", "nodes", "count",
        "repairable", "repaired", "wrong", "ignored",
    }  # fmt: skip
    assert (finding["code"], finding["queue"], finding["ids"], finding["repairable"]) == (
        "orphan_payloads", "Orders", ["1"], True
    )  # fmt: skip
    assert json.loads(cli("--json", "--repair").stdout)["healthy"] is True


def test_only_some_queues(cli: Cli) -> None:
    cli.queue.push({"id": 1})
    cli.app.queue("Mails", 1)
    cli.app.register("Mails", 1)
    for args in (["Mails"], ["-q", "Mails"], ["--queue", "Mails", "Mails"]):
        assert "Orders" not in cli(*args).stdout
    assert "Orders: 1 job in the queue, and no node works it" in cli("Mails", "-q", "Orders", code=1).stdout


def test_wrong_usage_ends_with_2(cli: Cli) -> None:
    cli.queue.push({"id": 1})
    assert "did you mean 'Orders'?" in cli("Ordrs", code=2).stderr
    assert "No such option" in cli("--cure", code=2).stderr


def test_redis_away_ends_with_1_and_one_line() -> None:
    result = CliRunner().invoke(main, ["doctor", "--redis-url", "redis://127.0.0.1:1/0"])
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1


def test_json_for_machines_tells_that_redis_is_away() -> None:
    result = CliRunner().invoke(main, ["doctor", "--json", "--redis-url", "redis://127.0.0.1:1/0"])
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert (document["healthy"], document["findings"]) == (False, [])
    assert "does not answer" in document["error"]
    assert result.stderr == f"lowq: {document['error']}\n"


def test_a_finding_can_be_ignored(cli: Cli) -> None:
    cli.queue.push([{"id": 1}, {"id": 2}])
    assert "[queue_unserved]" in cli(code=1).stdout
    lines = cli("--ignore", "queue_unserved").stdout.splitlines()
    assert lines[-1] == "nothing else is wrong; 1 ignored"
    (line,) = [line for line in lines if "[queue_unserved]" in line]
    assert line.endswith("[queue_unserved], ignored")
    document = json.loads(cli("--ignore", "queue_unserved", "--json").stdout)
    assert document["healthy"] is True
    assert [item["code"] for item in document["findings"] if item["ignored"]] == ["queue_unserved"]
    assert "queue_unserved" in cli("--ignore", "persistence", code=1).stdout
    cli.app.client.command("DEL", cli.prefix + "payloads:2")
    left = cli("--ignore", "queue_unserved", "--ignore", "persistence", code=1).stdout
    assert left.splitlines()[-1] == "1 error; --repair can repair 1 of them; 1 ignored"
    assert "did you mean persistence" in cli("--ignore", "persistance", code=2).stderr


def test_a_redis_without_persistence_can_pass(redis_url: str) -> None:
    cli = Cli(redis_url)
    assert "[persistence]" in cli(code=1).stdout
    assert cli("--ignore", "persistence").stdout.splitlines()[-1] == "nothing else is wrong; 1 ignored"
    cli.app.close()


def test_names_reach_the_terminal_escaped() -> None:
    finding = Finding("x", "error", "bad \x1b[31m", "cause", "effect", "advice", queue="Q", ids=("a\x1b[2J\n",))
    text = "".join(_block(finding, ignored=False))
    assert "\x1b[2J" not in text
    assert "\x1b[31mbad" not in text
    assert "\\x1b[2J" in text


def test_replicas_and_eviction_of_a_real_server(durable_server: RedisServer) -> None:
    host, port = "127.0.0.1", durable_server.port
    with RedisServer(appendonly="yes", maxmemory="50mb", maxmemory_policy="allkeys-lru") as server:
        app = Lowq(redis_url=server.url)
        found = {item.code: item.severity for item in app.examine() if item.wrong}
        assert found == {"eviction": "error"}
        with redis.Redis.from_url(server.url) as client:
            client.replicaof(host, port)
            until(lambda: client.info("replication")["master_link_status"] == "up", "replica in step")
            until(lambda: "replica" in {item.code for item in app.examine() if item.wrong}, "replica that is told of")
            primary = Lowq(redis_url=durable_server.url)
            until(lambda: "replication" in {item.code for item in primary.examine()}, "primary with a replica")
            primary.close()
        app.close()
