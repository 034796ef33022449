"""A shard in a cluster whose slot is being moved from one primary to another."""

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from opentelemetry.sdk.trace import TracerProvider
from redis.crc import key_slot

import lowq
import lowq.contrib.otel
from lowq.broker.lease import Lease
from lowq.broker.shard import Shard
from lowq.errors import PushInterrupted, RedisUnavailable
from lowq.store.keys import queues_key, shard_prefix
from tests.integration.support import until
from tests.redis_server import RedisServer


class Move:
    """The slot of the only shard of `Orders`, or of ``key``, on the way from the first primary to the second."""

    def __init__(self, source: RedisServer, target: RedisServer, key: str = "") -> None:
        self.source: Any = redis.Redis(port=source.port)
        self.target: Any = redis.Redis(port=target.port)
        self._servers = source, target
        self._port = target.port
        self.prefix = shard_prefix("lowq", "Orders", 0)
        self._slot = key_slot((key or self.prefix).encode())

    def of(self, key: str) -> "Move":
        """The slot of that key instead."""
        return Move(*self._servers, key)

    def begin(self) -> None:
        of_source, of_target = (client.execute_command("CLUSTER", "MYID") for client in (self.source, self.target))
        self.target.execute_command("CLUSTER", "SETSLOT", self._slot, "IMPORTING", of_source)
        self.source.execute_command("CLUSTER", "SETSLOT", self._slot, "MIGRATING", of_target)

    def carry(self, keys: int = 1000) -> None:
        for key in self.source.execute_command("CLUSTER", "GETKEYSINSLOT", self._slot, keys):
            self.source.execute_command("MIGRATE", "127.0.0.1", self._port, key, 0, 5000)

    def end(self) -> None:
        of_target = self.target.execute_command("CLUSTER", "MYID")
        for client in (self.target, self.source):
            client.execute_command("CLUSTER", "SETSLOT", self._slot, "NODE", of_target)


@pytest.fixture
def move() -> Iterator[Move]:
    with RedisServer(cluster_enabled="yes") as source, RedisServer(cluster_enabled="yes") as target:
        made = Move(source, target)
        made.source.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        made.source.execute_command("CLUSTER", "MEET", "127.0.0.1", target.port)
        clients = (made.source, made.target)
        until(lambda: all(client.cluster("INFO")["cluster_state"] == "ok" for client in clients), "cluster in order")
        yield made
        for client in clients:
            client.close()


def shard_of(app: lowq.Lowq, nonce: str) -> Shard:
    return Shard(app.client, "lowq", "Orders", 0, shards_count=1, nonce=nonce, load_payload=bytes.decode)


@pytest.mark.parametrize("is_traced", [False, True])
def test_a_shard_rests_while_its_slot_is_moved_and_goes_on_as_it_was(move: Move, is_traced: bool) -> None:
    port = move.source.get_connection_kwargs()["port"]
    app = lowq.Lowq(redis_url=f"redis+cluster://127.0.0.1:{port}")
    if is_traced:
        lowq.contrib.otel.instrument(app, tracer_provider=TracerProvider())
    queue = app.queue("Orders", 1)
    queue.push({"id": number} for number in range(10))
    owner, other = shard_of(app, "owner"), shard_of(app, "other")
    owner.lease.acquire(60)
    taken = [job.id for job in owner.in_flight.take(3).jobs]
    move.begin()
    for keys in (0, 4):  # none of them there yet; some here, some there
        move.carry(keys)
        there = set(move.target.keys())
        with pytest.raises(RedisUnavailable):
            other.lease.acquire(60)
        with pytest.raises(RedisUnavailable):
            owner.in_flight.take(3)
        for ids in ([100], [5, 100]):
            with pytest.raises(PushInterrupted):
                queue.push({"id": number} for number in ids)
        assert set(move.target.keys()) == there  # nothing is written aside
    move.carry()
    move.end()
    assert queue.push([{"id": 100}]) == 1
    assert not isinstance(other.lease.acquire(60), Lease)
    owner.in_flight.finish(taken)
    owner.in_flight.keep_finished()
    delivery = owner.in_flight.take(100)
    assert sorted(int(job.id) for job in delivery.jobs) == [3, 4, 5, 6, 7, 8, 9, 100]
    stats = queue.stats()
    assert (stats.processed, stats.taken, stats.length) == (3, 8, 0)
    assert len([key for key in move.target.scan_iter() if b":taken:traces:" in key]) == (8 if is_traced else 0)
    app.close()


def test_the_registry_is_used_while_its_slot_is_moved(move: Move) -> None:
    port = move.source.get_connection_kwargs()["port"]
    app = lowq.Lowq(redis_url=f"redis+cluster://127.0.0.1:{port}")
    app.queue("Orders", 1).push({"id": 1})
    of_registry = move.of(queues_key("lowq"))
    of_registry.begin()
    for _ in range(2):  # still here; there
        assert [queue.name for queue in app.queues()] == ["Orders"]
        of_registry.carry()
    assert app.queue("Mails", 1).push({"id": 1}) == 1
    assert sorted(queue.name for queue in app.queues()) == ["Mails", "Orders"]
    app.close()
