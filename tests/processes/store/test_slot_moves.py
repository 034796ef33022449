"""A slot of a cluster is moved from one primary to another."""

import pytest
from opentelemetry.sdk.trace import TracerProvider
from redis.crc import key_slot

import lowq
import lowq.contrib.otel
from lowq import inspection
from lowq.errors import PushInterrupted, RedisUnavailable
from lowq.shards.lease import Lease
from lowq.shards.shard import Shard
from lowq.store.keys import queues_key, shard_prefix, tasks_key
from lowq_web import background
from tests.redis_cluster import RedisCluster


class Move:
    """The slot of a key on the way from its primary to another one."""

    def __init__(self, cluster: RedisCluster, key: str) -> None:
        self._cluster = cluster
        self._slot = key_slot(key.encode())
        self._source = cluster.primary_of(self._slot)
        self.target = next(server for server in cluster.primaries() if server is not self._source)

    def begin(self) -> None:
        source, target = self._cluster.id_of(self._source), self._cluster.id_of(self.target)
        self._cluster.ask(self.target, "CLUSTER", "SETSLOT", self._slot, "IMPORTING", source)
        self._cluster.ask(self._source, "CLUSTER", "SETSLOT", self._slot, "MIGRATING", target)

    def carry(self, keys: int = 1000) -> None:
        for key in self._cluster.raw(self._source, "CLUSTER GETKEYSINSLOT", self._slot, keys):
            self._cluster.ask(self._source, "MIGRATE", "127.0.0.1", self.target.port, key, 0, 5000)

    def carried(self) -> set[bytes]:
        return set(self._cluster.raw(self.target, "CLUSTER GETKEYSINSLOT", self._slot, 1000))

    def end(self) -> None:
        for server in (self.target, self._source, *self._cluster.primaries()):
            self._cluster.ask(server, "CLUSTER", "SETSLOT", self._slot, "NODE", self._cluster.id_of(self.target))


def test_a_shard_rests_while_its_slot_is_moved_and_goes_on_as_it_was(cluster: RedisCluster) -> None:
    def shard_of(nonce: str) -> Shard:
        return Shard(app.client, "lowq", "Orders", 0, shards_count=1, nonce=nonce, load_payload=bytes.decode)

    app = lowq.Lowq(redis_url=cluster.url)
    lowq.contrib.otel.instrument(app, tracer_provider=TracerProvider())  # its traces go along
    queue = app.queue("Orders", 1)
    queue.push({"id": number} for number in range(10))
    owner, other = shard_of("owner"), shard_of("other")
    owner.lease.acquire(600)
    taken = [job.id for job in owner.in_flight.take(3).jobs]
    move = Move(cluster, shard_prefix("lowq", "Orders", 0))
    move.begin()
    for keys in (0, 4):  # none of them there yet; some here, some there
        move.carry(keys)
        there = move.carried()
        assert len(there) == keys
        with pytest.raises(RedisUnavailable):
            other.lease.acquire(600)
        with pytest.raises(RedisUnavailable):
            owner.in_flight.take(3)
        for ids in ([100], [5, 100]):
            with pytest.raises(PushInterrupted):
                queue.push({"id": number} for number in ids)
        assert move.carried() == there  # nothing is written aside
    move.carry()
    move.end()
    assert queue.push([{"id": 100}]) == 1
    assert not isinstance(other.lease.acquire(600), Lease)
    owner.in_flight.finish(taken)
    owner.in_flight.in_hand.clear()
    delivery = owner.in_flight.take(100)
    assert sorted(int(job.id) for job in delivery.jobs) == [3, 4, 5, 6, 7, 8, 9, 100]
    stats = queue.stats()
    assert (stats.processed, stats.taken, stats.length) == (3, 8, 0)
    assert len([key for key in move.carried() if b":taken:traces:" in key]) == 8
    app.close()


def test_registries_are_used_while_their_slots_are_moved(cluster: RedisCluster) -> None:
    apps = [lowq.Lowq(redis_url=cluster.url) for _ in range(2)]
    apps[0].queue("Orders", 1).push({"id": 1})
    task = background.begin(
        apps[0], background.BackgroundAction("one", "ann", "Orders", "kick", inspection.JobFilter(), "here:1", 0.0, 0.0)
    )
    moves = [Move(cluster, key("lowq")) for key in (queues_key, tasks_key)]
    for move in moves:
        move.begin()
    for _ in range(2):  # still here; there
        assert [queue.name for queue in apps[0].queues()] == ["Orders"]
        assert background.read_actions(apps[1]) == [task]
        for move in moves:
            move.carry()
    assert apps[0].queue("Mails", 1).push({"id": 1}) == 1
    moves[1].end()
    assert background.cancel(apps[1], "one")
    assert background.report(apps[0], "one", "running", 3, 7) == ("running", True)
    for app in apps:
        assert sorted(queue.name for queue in app.queues()) == ["Mails", "Orders"]
        (found,) = background.read_actions(app)
        assert (found.done, found.total, found.cancelling) == (3, 7, True)
        app.close()
    moves[0].end()
