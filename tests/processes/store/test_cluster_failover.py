"""A primary of a cluster is gone or cut off, and its replica has its slots."""

import asyncio
import itertools
import json
from collections.abc import Callable
from contextlib import closing

import pytest
from click.testing import CliRunner
from redis.crc import key_slot

import lowq
from lowq.cli import main
from lowq.errors import PushInterrupted, RedisNotReady, RedisUnavailable
from lowq.queue import Queue
from lowq.sharding import shard_of
from lowq.store import Client
from lowq.store.keys import nodes_key, queues_key, shard_prefix
from tests.processes.conftest import MakeRig
from tests.processes.support import Rig, answered, until
from tests.redis_cluster import RedisCluster
from tests.redis_server import RedisServer

SHARDS = 12


def primary_of(cluster: RedisCluster, key: str) -> RedisServer:
    return cluster.primary_of(key_slot(key.encode()))


def shards_at(cluster: RedisCluster, server: RedisServer) -> set[int]:
    """Shards of Orders that it serves."""
    return {shard for shard in range(SHARDS) if primary_of(cluster, shard_prefix("lowq", "Orders", shard)) is server}


def ids_of(shards: set[int], count: int) -> list[str]:
    return [job_id for job_id in map(str, range(count)) if shard_of(job_id.encode(), SHARDS) in shards]


def is_pushed(queue: Queue, job_id: str) -> bool:
    return answered(lambda: queue.push({"id": job_id, "payload": {"version": 2}, "score": 2e12}) == 1)


def test_a_silent_primary_is_waited_for_once_and_the_others_are_asked_in_pauses(cluster: RedisCluster) -> None:
    victim, *others = cluster.primaries()
    keys = {primary_of(cluster, key): key for key in map("key {}".format, range(100))}

    def asked() -> int:
        """How often the others told of their slots."""
        stats = [cluster.ask(server, "INFO", "commandstats") for server in cluster.servers if server is not victim]
        return sum(
            one.get(f"cmdstat_cluster|{word}", {"calls": 0})["calls"] for one in stats for word in ("slots", "shards")
        )

    with closing(Client(cluster.url, size=5, timeout=5, socket_timeout=5)) as client:
        assert client.command("EXISTS", keys[victim], key=keys[victim]) == 0
        before = asked()
        victim.pause()
        with pytest.raises(RedisUnavailable):
            client.command("EXISTS", keys[victim], key=keys[victim])
        for _ in range(200):
            with pytest.raises(RedisUnavailable, match="of the cluster does not answer or serve"):
                client.command("EXISTS", keys[victim], key=keys[victim])
            for server in others:
                assert client.command("EXISTS", keys[server], key=keys[server]) == 0
        assert asked() - before < 200
        cluster.replaced(victim)
        until(lambda: not client.is_partial, "the next primary")
        assert client.command("EXISTS", keys[victim], key=keys[victim]) == 0


def test_work_on_the_other_primaries_goes_on_until_there_is_a_next_one(
    make_cluster_rig: MakeRig, cluster: RedisCluster
) -> None:
    """All that is pushed to their shards between the end of the one primary and its replacement is done before that,
    though the shards of the one have become due before.
    """
    rig = make_cluster_rig(LOWQ_LEASE_TTL=30, ORDERS_SHARDS=SHARDS, ORDERS_WORK=0.01)
    queue = rig.app.queue("Orders", SHARDS)
    queue.push({"id": str(number), "payload": {"version": 1}} for number in range(1500))
    nodes = [rig.node(), rig.node(ORDERS_ASYNC="1")]
    until(lambda: len({perform.shard for perform in rig.performs()}) == SHARDS, "work on all shards")
    victim = cluster.primaries()[0]
    lost = shards_at(cluster, victim)
    victim.kill()

    def is_done(some: list[str]) -> bool:
        """In the version that was pushed since."""
        performs = [perform for perform in rig.performs() if perform.ok]
        return {job_id for perform in performs for job_id, found in perform.jobs.items() if 2 in found} >= set(some)

    of_others, mine = ids_of(set(range(SHARDS)) - lost, 400), ids_of(lost, 100)
    queue.push({"id": job_id, "payload": {"version": 2}} for job_id in of_others)
    until(lambda: is_done(of_others), "work on the shards of the others")
    assert victim in cluster.primaries()
    cluster.replaced(victim)
    until(lambda: is_pushed(queue, mine[0]), "a push to the next primary")

    async def produce() -> list[int]:
        return await asyncio.gather(*(queue.apush({"id": job_id, "payload": {"version": 2}}) for job_id in mine))

    assert set(asyncio.run(produce())) == {1}
    until(lambda: is_done(mine), "work on the shards of the next primary")
    for node in nodes:
        node.kill()


def test_reports_show_what_answers_and_name_what_does_not(cluster: RedisCluster) -> None:
    app = lowq.Lowq(redis_url=cluster.url)
    app.queue("Orders", SHARDS).push([{"id": number} for number in range(200)])
    of_registries = [primary_of(cluster, key("lowq")) for key in (queues_key, nodes_key)]
    victim = next(server for server in cluster.primaries() if server not in of_registries)
    names = (f"Lone{number}" for number in itertools.count())
    lone = next(name for name in names if primary_of(cluster, shard_prefix("lowq", name, 0)) is victim)
    app.queue(lone, 1).push({"id": 1})
    away = shards_at(cluster, victim)
    listed = ", ".join(map(str, sorted(away)))
    victim.kill()

    def says(*words: str) -> tuple[dict[str, object], str]:
        done = CliRunner().invoke(main, [*words, "--json", "--redis-url", cluster.url])
        assert done.exit_code == 1, done
        return json.loads(done.stdout), done.stderr

    found, error = says("stats", "Orders")
    total: dict[str, int] = found["total"]  # type: ignore[assignment]  # of JSON
    assert 0 < total["length"] < 200
    assert f"Orders: shards {listed} not counted" in error
    assert f"{lone}: shard 0 not counted" in says("stats")[1], "also where none of its shards answers"
    found, error = says("shards", "Orders")
    shards: list[dict[str, object]] = found["shards"]  # type: ignore[assignment]  # of JSON
    assert {shard["index"] for shard in shards} == set(range(SHARDS)) - away
    assert f"Orders: shards {listed} not shown" in error
    assert str(victim.port) in error
    findings: list[dict[str, str]] = says("doctor")[0]["findings"]  # type: ignore[assignment]  # of JSON
    (silent,) = [finding for finding in findings if finding["code"] == "redis_silent"]
    assert str(victim.port) in silent["what"]
    assert len([finding for finding in findings if finding["code"] == "redis"]) == 2
    # Who calls the API is not given half an answer.
    with pytest.raises(RedisUnavailable):
        app.queue("Orders").stats()
    app.close()


# --- who starts before, during and after it ----------------------------------------------------------------------


class Pushes:
    """Pushes a next version of an id of each shard, again and again until it is in."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._ids = [ids_of({shard}, 1000)[0] for shard in range(SHARDS)]
        self._version = 0

    def performed(self) -> None:
        """Waits until all shards have done something that was pushed after this was called."""
        self._version += 1
        for job_id in self._ids:
            until(lambda job_id=job_id: answered(lambda: self._is_in(job_id)), "a push")  # type: ignore[misc]
        for job_id in self._ids:
            self._rig.done(job_id, self._version)

    def _is_in(self, job_id: str) -> bool:
        self._rig.push(job_id, self._version)
        return True


@pytest.mark.threads_only
@pytest.mark.parametrize(("registry", "consumer"), [(queues_key, ""), (nodes_key, "1")], ids=["node", "consumer"])
def test_members_go_on_whenever_they_start(
    make_cluster_rig: MakeRig, cluster: RedisCluster, registry: Callable[[str], str], consumer: str
) -> None:
    rig = make_cluster_rig(ORDERS_SHARDS=SHARDS, ORDERS_CONSUMER=consumer)
    victim, pushes = primary_of(cluster, registry("lowq")), Pushes(rig)
    before = rig.node()
    before.says(" starts: ")
    pushes.performed()
    cluster.replicated()
    victim.kill()
    during = rig.node()
    during.says("trying until it is back")
    assert victim in cluster.primaries()
    cluster.replaced(victim)
    during.says(" starts: ")
    pushes.performed()
    assert before.stop() == 0
    pushes.performed()  # the other one does the work of all shards
    assert during.stop() == 0


def test_a_primary_without_its_replica_takes_no_pushes() -> None:
    """`min-replicas-to-write`: what a primary that is cut off accepts after the lag would be lost. It does not notice
    by itself here that it is cut off.
    """

    def refusal(job_id: str) -> PushInterrupted | None:
        try:
            queue.push({"id": job_id, "payload": 1})
        except PushInterrupted as error:
            return error
        return None

    with RedisCluster() as cluster, closing(lowq.Lowq(redis_url=cluster.url)) as app:
        queue = app.queue("Orders", 1)
        assert refusal("before") is None
        cluster.replicated()
        cluster.configure(min_replicas_to_write=1, min_replicas_max_lag=1)
        victim = primary_of(cluster, shard_prefix("lowq", "Orders", 0))
        cluster.cut_off(victim)
        until(lambda: refusal("within the lag"), "a push that is refused")
        late = [f"after the lag {number}" for number in range(10)]
        errors = [error for error in map(refusal, late) if error is not None]
        assert [error.accepted for error in errors] == [0] * len(late)
        assert all(isinstance(error.__cause__, RedisNotReady) for error in errors)
        assert "takes no writes, as it has too few replicas" in str(errors[0])
        cluster.replaced(victim)
        cluster.heal(victim)  # before that the next one has no replica either
        for job_id in late:
            until(lambda job_id=job_id: refusal(job_id) is None, "a push to the next primary")  # type: ignore[misc]
        cluster.replicated()
        assert all(queue.peek(job_id) is not None for job_id in ("before", *late))
