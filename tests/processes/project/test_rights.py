"""Users of Redis that may do only what docs/operations.md says, on a real server."""

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from starlette.testclient import TestClient

import lowq
import lowq_web
from lowq.store import Client
from lowq.store.calls import load_scripts
from lowq.store.keys import shard_prefix
from tests.processes.support import Rig, until
from tests.redis_server import RedisServer
from tests.rights import CAN_DO_WITHOUT, as_user, commands, create, refused, rules
from tests.rules.support import run_script
from tests.waiting import NEVER, PATIENCE

PRODUCER, NODE, PEOPLE = "lowq-producer", "lowq-node", "lowq-people"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """One with the users of the document."""
    with RedisServer(tmp_path / "redis", maxmemory_policy="allkeys-lru") as server:
        with redis.Redis.from_url(server.url) as client:
            for user in rules():
                create(client, user)
        yield server


@pytest.fixture
def rig(server: RedisServer, tmp_path: Path) -> Iterator[Rig]:
    """Its nodes and producers are those users; what looks at Redis besides may do everything."""
    rig = Rig(server.url, tmp_path, ORDERS_SHARDS=3, LOWQ_POLL_INTERVAL=3600, ORDERS_MAX_RETRIES=1)
    rig.settings["LOWQ_REDIS_URL"] = as_user(server.url, NODE)
    rig.app.close()
    rig.app = lowq.Lowq(redis_url=as_user(server.url, PRODUCER))
    yield rig
    rig.close()


def app_of(server: RedisServer, user: str, lease_ttl: float = 1.0) -> lowq.Lowq:
    return lowq.Lowq(redis_url=as_user(server.url, user), lease_ttl=lease_ttl)


def test_a_producer_pushes_with_the_rights_of_a_producer(server: RedisServer, rig: Rig) -> None:
    rig.push("a", 1)
    rig.push("a", 2)  # a second payload: another form of its key
    rig.push("later", 1, delay=60)
    rig.app.queue("Orders").push([{"id": number, "payload": "x" * 5000, "score": 1} for number in range(2000)])
    assert sum(map(len, rig.of_shards("due").values())) == 2002
    assert refused(rig.client) == set()


def test_a_node_works_with_the_rights_of_a_node_and_says_what_it_does_not_know(rig: Rig) -> None:
    first = rig.node().holds_all()
    assert "needs maxmemory-policy noeviction" in first.says("Redis does not let this user ask about itself")
    rig.push("good", 1)
    rig.push("good", 2)
    rig.push("bad", 1, do="raise")
    rig.push("twice", 1, do="raise", once=True)
    rig.push("again", 1, do="push", once=True)
    rig.push("later", 1, delay=0.2)
    rig.done("good", 2)
    until(lambda: rig.buried() == {("bad", 1)}, "burial of what fails each time")
    rig.drained()
    second = rig.node()
    until(lambda: first.held() > 0 and second.held() > 0 and first.held() + second.held() == 3, "shards of each node")
    assert first.stop() == 0
    second.holds_all()
    rig.push("last", 1)
    rig.done("last", 1)
    assert second.stop() == 0
    assert rig.report().problems == []
    assert refused(rig.client) == set()


def test_a_consumer_works_with_the_rights_of_a_node(server: RedisServer, rig: Rig) -> None:
    app = app_of(server, NODE, lease_ttl=NEVER)  # or a machine that stands still loses what was taken
    queue = app.queue("mail", 2)
    queue.push([{"id": n} for n in range(8)])
    with queue.consumer(ttr=60, session="ann") as consumer:
        jobs = [job for _ in range(8) for job in consumer.take(timeout=0)]
        jobs[0].ack()
        jobs[1].release(60)
        jobs[2].fail("no")
        jobs[3].bury("no")
        jobs[4].touch(60)
        queue.put("x")
        consumer.detach()
    with queue.consumer(session="ann") as consumer:
        consumer.ack(jobs[5].receipt)
    app.close()
    assert refused(rig.client) == set()


def test_people_see_and_do_everything_with_the_rights_of_people(rig: Rig, server: RedisServer) -> None:
    for number in range(6):
        rig.push(number, 1, delay=3600)
    rig.push("bad", 1, do="raise")
    node = rig.node().holds_all()
    until(lambda: rig.buried() == {("bad", 1)}, "burial of what fails each time")
    app = app_of(server, PEOPLE)
    queue = app.queue("Orders")
    browser = TestClient(lowq_web.create_app(app), base_url="http://127.0.0.1:8080")
    browser.headers["sec-fetch-site"] = "same-origin"
    for address in ("/", "/nodes", "/shards/Orders", "/queues/Orders", "/audit", "/metrics", "/healthz",
                    "/queues/Orders?state=morgue", "/api/v1/redis", "/api/v1/queues"):  # fmt: skip
        assert browser.get(address).status_code in (200, 404), address
    assert "unknown, as this user may not ask" in browser.get("/").text
    assert queue.why("1").state == "scheduled"
    assert {job.id for job in queue.jobs("scheduled")} == set("012345")
    queue.perform_now(["1"])
    queue.bury(["2"])
    queue.kick(["bad"])
    queue.delete(["3"])
    rig.done(1, 1)
    until(lambda: rig.buried() == {("2", 1), ("bad", 1)}, "burial of the other, and again of what fails")
    assert {job.id for job in queue.jobs("scheduled")} == set("045")
    queue.pause()
    queue.resume()
    assert browser.get("/").status_code == 200
    codes = {finding.code: finding for finding in app.examine()}
    assert codes["redis"].severity == "warning"
    app.examine(repair=True)
    app.send_command(until(app.nodes, "a node that lives")[0].name, "stop")
    assert node.wait() == 0
    _leave_in_flight(server, rig, "4")
    assert queue.release_all() == 1
    assert queue.reshard(4) is not None
    assert app.queue("Orders").layouts.current.shards_count == 4
    app.queue("Orders").drop()
    assert refused(rig.client) == set()
    app.close()


def test_a_reshard_without_info_waits_a_second_for_replicas_only_as_it_begins(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not at each step."""
    on_all, waits = Client.on_all, list[int]()

    def recorded(client: Client, commands: Any, *args: Any) -> Any:
        waits.extend(command[2] for command in commands if command[0] == "WAIT")
        return on_all(client, commands, *args)

    monkeypatch.setattr(Client, "on_all", recorded)
    app = app_of(server, PEOPLE)
    queue = app.queue("Orders", 2)
    queue.push({"id": number, "payload": 1} for number in range(2000))
    assert queue.reshard(3) is not None
    assert (queue.stats().length, len(waits) > 6, waits.count(1000)) == (2000, True, 2)
    app.close()


def test_a_script_whose_commands_are_not_all_allowed_writes_nothing(server: RedisServer) -> None:
    """Each command in turn is forbidden to a user who may do everything else."""
    scripts = {name: commands((name,)) for name in load_scripts()}
    prefix = shard_prefix("lowq", "Orders", 0)
    with redis.Redis.from_url(server.url) as client:
        lowq.Lowq(redis_url=server.url).queue("Orders", 1, merge="append").push([{"id": "first", "payload": 0}])
        for command in sorted(set[str]().union(*scripts.values())):
            client.execute_command(
                "ACL", "SETUSER", "most", "reset", "on", "nopass", "~*", "&*", "+@all", f"-{command}"
            )
            client.acl_log_reset()
            app = lowq.Lowq(redis_url=server.url.replace("redis://", "redis://most:any@"))
            before = {key: client.dump(key) for key in client.scan_iter()}
            for name, needed in scripts.items():
                if command in needed - CAN_DO_WITHOUT:
                    with pytest.raises(lowq.RedisRefused, match=rf"[+]{command}\b.*nothing was written"):
                        run_script(app.client, name, prefix)
            assert {key: client.dump(key) for key in client.scan_iter()} == before, command
            queue = app.queue("Orders", 1, merge="append")
            if command in (scripts["push"] | {"hget"}) - CAN_DO_WITHOUT:
                with pytest.raises(lowq.RedisRefused):
                    queue.push([{"id": command, "payload": 1}])
                assert client.hget(f"{prefix}payloads", command) is None, command
                client.execute_command("ACL", "SETUSER", "most", f"+{command}")
            queue.push([{"id": command, "payload": 1}])
            assert client.hget(f"{prefix}payloads", command), command
            app.close()
            refused_in_scripts = {entry["object"] for entry in client.acl_log(count=128) if entry["context"] == "lua"}
            assert refused_in_scripts <= CAN_DO_WITHOUT, command


def test_rights_that_are_taken_and_given_back_are_noticed_by_a_loop(server: RedisServer) -> None:
    app = lowq.Lowq(redis_url=server.url.replace("redis://", "redis://most:any@"))
    with redis.Redis.from_url(server.url) as client:

        async def refused_while_it_lasts() -> None:
            queue = app.queue("Orders", 1)
            for number in range(5):  # the loop has a connection of its own from the second on
                await queue.apush([{"id": number}])
            client.execute_command("ACL", "SETUSER", "most", "-unlink", "-lpush")
            client.acl_log_reset()
            for _ in range(3):
                with pytest.raises(lowq.RedisRefused):
                    await queue.apush([{"id": "refused"}])
            assert sum(entry["count"] for entry in client.acl_log() if entry["context"] == "lua") <= 1
            client.execute_command("ACL", "SETUSER", "most", "+unlink", "+lpush")
            await queue.apush([{"id": "accepted"}])

        client.execute_command("ACL", "SETUSER", "most", "on", "nopass", "~*", "&*", "+@all")
        asyncio.run(refused_while_it_lasts())
    app.close()


def test_a_user_without_channels_pushes_once_and_is_worked_for(server: RedisServer, rig: Rig) -> None:
    """As Redis 7 makes users."""
    with redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", "deaf", "on", "nopass", "~*", "resetchannels", "+@all")
    url = server.url.replace("redis://", "redis://deaf:any@")
    app = lowq.Lowq(redis_url=url)
    assert "rights" in {finding.code for finding in app.examine()}
    node = rig.node(LOWQ_REDIS_URL=url, LOWQ_POLL_INTERVAL=0.5).holds_all()
    node.says("does not let this user publish")
    node.says("does not let this user listen")
    app.queue("Orders").push([{"id": "a", "payload": {"version": 1}}])
    rig.done("a", 1)
    app.close()
    assert node.stop() == 0
    assert len(node.lines("does not let this user")) == 2


def _leave_in_flight(server: RedisServer, rig: Rig, job_id: str) -> None:
    """As a consumer does that died more than a lease ago."""
    app = app_of(server, NODE, lease_ttl=NEVER)
    queue = app.queue("Orders")
    queue.perform_now([job_id])
    with queue.consumer() as consumer:
        assert consumer.take(timeout=PATIENCE)
        consumer.detach()
    for shard in range(rig.shards_count):
        rig.client.delete(f"{rig.prefix(shard)}lease")
        rig.client.hset(f"{rig.prefix(shard)}meta", "leased_until", 1)
    app.close()


def test_the_age_of_a_server_is_guessed_from_its_scripts_when_it_may_not_be_asked(server: RedisServer) -> None:
    first, second = app_of(server, NODE), app_of(server, NODE)
    first.client.command("TIME")
    assert first.client.server_age() < math.inf  # nothing of lowq's was there: it may have been started just now
    second.client.command("TIME")
    assert second.client.server_age() == math.inf
    with redis.Redis.from_url(server.url) as client:
        client.script_flush()  # as a restart does
    second.queue("Orders", 1).push([{"id": 1}])
    assert second.client.server_age() < math.inf
    first.close()
    second.close()


def test_without_info_the_server_is_unknown_and_without_config_its_snapshots(server: RedisServer) -> None:
    app = app_of(server, PEOPLE)
    info: Any = app.redis_info()
    assert (info.version, info.eviction, info.persistence) == ("unknown", "unknown", "unknown")
    (warning,) = info.warnings
    assert "unknown, as this user may not ask" in warning
    app.close()
    with redis.Redis.from_url(server.url) as client:
        create(client, PEOPLE, "+info")
    app = app_of(server, PEOPLE)
    info = app.redis_info()
    assert info.version.startswith(("Redis ", "Valkey "))
    assert (info.eviction, info.persistence) == ("allkeys-lru", "no AOF")
    assert any("whether there are snapshots may not be asked" in warning for warning in info.warnings)
    (found,) = [finding for finding in app.examine() if finding.code == "persistence"]
    assert "whether there are snapshots may not be asked" in found.what
    app.close()
