"""The doctor beside nodes that work, and on the command line."""

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import redis
from click.testing import CliRunner, Result

from lowq import Lowq
from lowq.cli import main
from lowq.inspection import Finding
from lowq.shards.shard import Shard
from lowq.store.keys import nodes_key, shard_prefix
from tests.processes.conftest import MakeRig
from tests.processes.support import TTL, until
from tests.redis_server import RedisServer
from tests.rules.support import run_script

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

    meddler = threading.Thread(target=meddle)
    meddler.start()
    try:
        found = []
        for number in range(6):
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
    until(lambda: wrong(app) == [], "nothing that is wrong")  # a lease may run out while the machine stands still
    node.kill()
    until(lambda: not rig.of_shards("lease"), "end of the leases of the dead node")
    found = {item.code: item for item in wrong(app)}
    in_its_wake = {"node_silent", "node_without_leases", "shard_unserved", "queue_unserved"}
    assert {"ownerless"} <= found.keys() <= {"ownerless", *in_its_wake}
    assert found["ownerless"].what.startswith("1 job in flight, and nobody holds the lease of shard ")
    assert "ownerless" not in {item.code for item in wrong(app, repair=True)}
    assert rig.of_shards("taken") == {}
    (job,) = app.queue("Orders").fetch(["slow"]).values()
    assert job.state in ("due", "scheduled")
    assert job.crashes == 1
    app.close()


# --- in a cluster ------------------------------------------------------------------------------------------------


def test_all_primaries_of_a_cluster_are_examined_and_mended(cluster_url: str) -> None:
    with closing(Lowq(redis_url=cluster_url)) as app:
        queue = app.queue("Orders", 20)
        queue.push({"id": number} for number in range(500))
        found = app.examine()
        assert len([item for item in found if item.code == "redis"]) == 3
        for shard in range(20):
            key = shard_prefix("lowq", "Orders", shard) + "due"
            app.client.command("DEL", key, key=key)
        (orphans,) = [item for item in app.examine(repair=True) if item.code == "orphan_payloads"]
        assert (orphans.count, orphans.repaired, orphans.shards) == (500, 500, tuple(range(20)))
        assert "orphan_payloads" not in {item.code for item in app.examine()}
        assert queue.stats().due == 500


# --- the command line --------------------------------------------------------------------------------------------


class Cli:
    """`lowq doctor` on a queue of one shard, which a node works."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.app = Lowq(redis_url=url)
        self.queue = self.app.queue("Orders", 1)
        shard = Shard(self.app.client, "lowq", "Orders", 0, shards_count=1, nonce="tester", load_payload=json.loads)
        shard.lease.acquire(600.0)
        says = json.dumps({"queues": ["Orders"], "version": "1", "shards": {"Orders": [0]}})
        run_script(self.app.client, "heartbeat", nodes_key("lowq"), "", "host:1:tester", "", says, 600)

    def __call__(self, *args: str, code: int = 0) -> Result:
        # What is suspicious is looked at for as long as leases last.
        runner = CliRunner(env={"LOWQ_LEASE_TTL": "0.2"})
        result = runner.invoke(main, ["doctor", *args, "--redis-url", self.url])
        assert result.exit_code == code, f"{args}: {result.exit_code}\n{result.output}\n{result.exception!r}"
        return result

    def last_line(self, *args: str, code: int = 0) -> str:
        return self(*args, code=code).stdout.splitlines()[-1]

    def document(self, *args: str, code: int = 0) -> Any:
        text = self("--json", *args, code=code).stdout
        assert text.count("\n") == 1
        return json.loads(text)

    def lose(self, *keys: str) -> None:
        prefix = shard_prefix("lowq", "Orders", 0)
        self.app.client.command("DEL", *(prefix + key for key in keys))

    def node_leaves(self) -> None:
        self.app.client.command("DEL", nodes_key("lowq"))


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


def test_an_error_is_explained_and_ends_with_1_until_it_is_repaired(cli: Cli) -> None:
    cli.queue.push([{"id": f"a\x1b[2J\n{number}"} for number in range(12)])
    lines = cli().stdout.splitlines()
    assert lines[-1] == "nothing is wrong"
    assert all(line.startswith("ok ") for line in lines[:-2])
    assert any("appendfsync everysec" in line for line in lines)
    cli.lose("due")
    lines = cli(code=1).stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("error"))
    assert lines[start] == "error    Orders: payloads of 12 ids wait, and nothing makes them due [orphan_payloads]"
    assert [line.split()[0] for line in lines[start + 1 : -2] if line[9:10].strip()] == [
        "ids", "shards", "cause", "effect", "do"
    ]  # fmt: skip
    assert "\\x1b[2J\\n" in lines[start + 1]
    assert " and 2 more" in " ".join(" ".join(lines).split())
    assert lines[-1] == "1 error; --repair can repair 1 of them"
    repaired = cli("--repair").stdout.splitlines()
    assert "         repaired  all of it" in repaired
    assert repaired[-1] == "nothing is wrong any more; repaired: 1 finding, in whole or in part"
    assert cli.last_line() == "nothing is wrong"


def test_a_warning_and_what_is_left_after_a_repair_end_with_1_too(cli: Cli) -> None:
    cli.queue.push([{"id": 1}, {"id": 2}])
    cli.queue.bury(1)
    cli.lose("morgue:payloads", "payloads")
    last = "1 warning; repaired: 1 finding, in whole or in part"
    assert cli.last_line("--repair", code=1) == last
    assert cli.last_line(code=1) == "1 warning"


def test_json_for_machines(cli: Cli) -> None:
    cli.queue.push({"id": 1})
    assert cli.document()["healthy"] is True
    cli.lose("due")
    document = cli.document(code=1)
    assert document["healthy"] is False
    (finding,) = [item for item in document["findings"] if item["wrong"]]
    assert finding.keys() == {
        "code", "severity", "what", "cause", "effect", "advice", "queue", "shards", "ids", "nodes", "count",
        "repairable", "repaired", "wrong", "ignored",
    }  # fmt: skip
    assert (finding["code"], finding["queue"], finding["ids"]) == ("orphan_payloads", "Orders", ["1"])
    assert finding["repairable"] is True
    assert cli.document("--repair")["healthy"] is True


def test_only_some_queues_and_wrong_usage(cli: Cli) -> None:
    cli.queue.push({"id": 1})
    cli.node_leaves()
    cli.app.registrations.enter("Mails", 1)
    for args in (["Mails"], ["-q", "Mails"], ["--queue", "Mails", "Mails"]):
        assert "Orders" not in cli(*args).stdout
    assert "Orders: 1 job in the queue, and no node works it" in cli("Mails", "-q", "Orders", code=1).stdout
    for args, said in (["Ordrs"], "did you mean 'Orders'?"), (["--cure"], "No such option"):
        assert said in cli(*args, code=2).stderr


def test_that_redis_is_away_is_said_in_one_line_and_to_machines() -> None:
    for words in ([], ["--json"]):
        result = CliRunner().invoke(main, ["doctor", *words, "--redis-url", "redis://127.0.0.1:1/0"])
        assert result.exit_code == 1
        assert result.stderr.count("\n") == 1
        assert "does not answer" in result.stderr
        if words:
            said = result.stderr.removeprefix("lowq: ").rstrip()
            assert json.loads(result.stdout) == {"healthy": False, "findings": [], "error": said}


def test_a_finding_can_be_ignored(cli: Cli) -> None:
    cli.queue.push([{"id": 1}, {"id": 2}])
    cli.node_leaves()
    assert "[queue_unserved]" in cli(code=1).stdout
    ignore = ["--ignore", "queue_unserved", "--ignore", "lease_unknown"]
    lines = cli(*ignore).stdout.splitlines()
    assert lines[-1] == "nothing else is wrong; 2 ignored"
    (line,) = [line for line in lines if "[queue_unserved]" in line]
    assert line.endswith("[queue_unserved], ignored")
    document = cli.document(*ignore)
    assert document["healthy"] is True
    assert {item["code"] for item in document["findings"] if item["ignored"]} == {"queue_unserved", "lease_unknown"}
    cli.lose("payloads")
    assert cli.last_line(*ignore, "--ignore", "persistence", code=1) == (
        "1 error; --repair can repair 1 of them; 2 ignored"
    )
    assert "did you mean persistence" in cli("--ignore", "persistance", code=2).stderr


def test_a_redis_without_persistence_can_pass(redis_url: str) -> None:
    cli = Cli(redis_url)
    cli.queue.push({"id": 1})
    assert "[persistence]" in cli(code=1).stdout
    assert cli.last_line("--ignore", "persistence") == "nothing else is wrong; 1 ignored"
    cli.app.close()


def test_replicas_and_eviction_of_a_real_server(durable_server: RedisServer) -> None:
    with (
        RedisServer(appendonly="yes", maxmemory="50mb", maxmemory_policy="allkeys-lru") as server,
        closing(Lowq(redis_url=server.url)) as app,
        closing(Lowq(redis_url=durable_server.url)) as primary,
    ):
        assert {item.code: item.severity for item in app.examine() if item.wrong} == {"eviction": "error"}
        with redis.Redis.from_url(server.url) as client:
            client.replicaof("127.0.0.1", durable_server.port)
            until(lambda: client.info("replication")["master_link_status"] == "up", "replica in step")
        until(lambda: "replica" in {item.code for item in wrong(app)}, "replica that is told of")
        until(lambda: "replication" in {item.code for item in primary.examine()}, "primary with a replica")
