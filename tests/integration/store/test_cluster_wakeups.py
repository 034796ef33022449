"""Wake-ups on a cluster: from the primary of a channel alone, and after its slot has moved or its primary died."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis

import lowq
from lowq.errors import RedisUnavailable
from lowq.store import Client, Subscription
from lowq.store.keys import shard_prefix
from lowq.store.tags import slot_of_key
from tests.integration.support import until
from tests.redis_cluster import RedisCluster
from tests.redis_server import RedisServer

CHANNELS = [f"{shard_prefix('lowq', 'Orders', shard)}wake" for shard in range(8)]


@pytest.fixture(scope="module")
def calm() -> Iterator[RedisCluster]:
    """A cluster whose primaries stay what they are."""
    with RedisCluster(replicas=0) as cluster:
        yield cluster


def ask(server: RedisServer, *command: Any) -> Any:
    with redis.Redis(port=server.port) as client:
        return client.execute_command(*command)


def listeners(server: RedisServer) -> int:
    with redis.Redis(port=server.port) as client:
        return len(client.client_list(_type="pubsub"))


def primary_of(cluster: RedisCluster, channel: str) -> RedisServer:
    return cluster.primary_of(slot_of_key(channel))


class Heard:
    """What a subscription hears, read by a thread of its own."""

    def __init__(self, cluster: RedisCluster) -> None:
        self.client = Client(cluster.url, size=5, timeout=5, socket_timeout=2)
        self.subscription: Subscription = self.client.subscribe()
        self.events: list[tuple[str, str, bytes]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> "Heard":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.subscription.close()
        self._thread.join(10)
        assert not self._thread.is_alive()
        self.client.close()

    def _listen(self) -> None:
        while not self._ended.is_set():
            try:
                event = self.subscription.get(3600.0)  # it must be woken
            except RedisUnavailable:
                continue
            if event is not None:
                self.events.append(event)

    def confirmed(self, channels: list[str]) -> bool:
        assert self._thread.is_alive()
        return {channel for kind, channel, _ in self.events if kind == "subscribe"} >= set(channels)

    def confirmations(self, channel: str) -> int:
        return sum(event[:2] == ("subscribe", channel) for event in self.events)

    def hears(self, channel: str, text: str) -> None:
        """A message comes, from wherever the channel is now. While the servers tell each other who has a slot one may
        be lost; then the channel is confirmed once more.
        """

        def is_heard() -> bool:
            before = self.confirmations(channel)
            self.client.command("SPUBLISH", channel, text, key=channel)
            until(lambda: message in self.events or self.confirmations(channel) > before, f"message {text}")
            return message in self.events

        message = ("message", channel, text.encode())
        until(is_heard, f"message {text}")


def test_each_primary_has_one_connection_and_its_own_channels(calm: RedisCluster) -> None:
    with Heard(calm) as heard:
        heard.subscription.add(CHANNELS)
        until(lambda: heard.confirmed(CHANNELS), "confirmations")
        assert [listeners(server) for server in calm.servers] == [1, 1, 1]
        for number, channel in enumerate(CHANNELS):
            heard.hears(channel, str(number))
            assert len(ask(primary_of(calm, channel), "PUBSUB", "SHARDCHANNELS", channel)) == 1
        heard.subscription.remove(CHANNELS[:4])
        until(lambda: sum(kind == "unsubscribe" for kind, _, _ in heard.events) == 4, "goodbyes")
        heard.subscription.add(["later"])
        until(lambda: heard.confirmed(["later"]), "one more")
        assert heard.confirmations(CHANNELS[0]) == 1
    until(lambda: [listeners(server) for server in calm.servers] == [0] * 3, "end of all connections")


def test_a_message_goes_to_no_other_primary(calm: RedisCluster) -> None:
    def received(server: RedisServer) -> int:
        lines = ask(server, "CLUSTER INFO")
        return sum(int(lines.get(f"cluster_stats_messages_{kind}_received", 0)) for kind in ("publish", "publishshard"))

    before = [received(server) for server in calm.servers]
    app = lowq.Lowq(redis_url=calm.url)
    queue = app.queue("Quiet", 12)
    for number in range(50):
        queue.push({"id": number, "payload": 1})
    with Heard(calm) as heard:
        heard.subscription.add(CHANNELS)
        until(lambda: heard.confirmed(CHANNELS), "confirmations")
        heard.hears(CHANNELS[0], "all others were before")
    assert [received(server) for server in calm.servers] == before
    app.close()


def test_a_push_wakes_the_holder_that_never_polls(calm: RedisCluster) -> None:
    app = lowq.Lowq(redis_url=calm.url, poll_interval=3600, namespace="waking")
    performed: set[str] = set()

    @app.worker(queue_name="Orders", shards_count=12)
    class Orders(lowq.Worker[Any]):
        def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
            performed.update(payloads_by_id)

    node = lowq.Node(app, threads=2)
    node.start()
    try:
        channels = [f"{shard_prefix('waking', 'Orders', shard)}wake" for shard in range(12)]
        until(lambda: all(subscribers(calm, channel) for channel in channels), "subscriptions")
        for number in range(40):  # one by one: each meets a node that has nothing to do
            Orders.push(str(number), 1)
            until(lambda number=number: str(number) in performed, "perform")  # type: ignore[misc]
    finally:
        node.stop()
        app.close()


def subscribers(cluster: RedisCluster, channel: str) -> int:
    found = ask(primary_of(cluster, channel), "PUBSUB", "SHARDNUMSUB", channel)
    return int(found[0][1] if isinstance(found[0], tuple | list) else found[1])


@pytest.mark.parametrize("has_been_asked", [True, False])
def test_a_channel_follows_its_slot(*, has_been_asked: bool) -> None:
    with RedisCluster(replicas=0) as cluster, Heard(cluster) as heard:
        channel = CHANNELS[0]
        slot, old = slot_of_key(channel), primary_of(cluster, channel)
        new = next(server for server in cluster.servers if server is not old)
        if has_been_asked:
            heard.subscription.add(CHANNELS)
            until(lambda: heard.confirmed(CHANNELS), "confirmations")
        else:
            heard.subscription.add(["other"])
            until(lambda: heard.confirmed(["other"]), "knowledge of the slots")
        ids = {server: ask(server, "CLUSTER MYID").decode() for server in (old, new)}
        ask(new, "CLUSTER", "SETSLOT", slot, "IMPORTING", ids[old])
        ask(old, "CLUSTER", "SETSLOT", slot, "MIGRATING", ids[new])
        for server in (new, old, *cluster.servers):
            ask(server, "CLUSTER", "SETSLOT", slot, "NODE", ids[new])
        heard.subscription.add(CHANNELS)
        until(lambda: heard.confirmations(channel) >= (2 if has_been_asked else 1), "confirmation by the new primary")
        heard.hears(channel, "hello")
        assert len(ask(new, "PUBSUB", "SHARDCHANNELS", channel)) == 1
        assert all(heard.confirmations(other) == 1 for other in CHANNELS if slot_of_key(other) != slot)


@pytest.mark.parametrize("end", ["killed", "frozen"])
def test_channels_follow_the_primary_that_has_the_slots_now(end: str) -> None:
    with RedisCluster() as cluster, Heard(cluster) as heard:
        first = cluster.servers[0]
        heard.subscription.add(CHANNELS)
        until(lambda: heard.confirmed(CHANNELS), "confirmations")
        mine = [channel for channel in CHANNELS if primary_of(cluster, channel) is first]
        others = [channel for channel in CHANNELS if channel not in mine]
        assert mine
        assert others
        cluster.replicated()
        if end == "killed":
            first.kill()
        else:
            first.pause()
        cluster.replaced(first)

        def asked() -> bool:
            try:
                return bool(heard.client.command("EXISTS", mine[0], key=mine[0]) == 0)
            except RedisUnavailable:
                return False

        until(asked, "an answer of the next primary")
        until(lambda: all(heard.confirmations(channel) >= 2 for channel in mine), "confirmations by the next primary")
        for channel in (*mine, *others):
            heard.hears(channel, "hello")
        assert all(heard.confirmations(channel) == 1 for channel in others)


def test_a_primary_that_hangs_delays_no_message_of_another() -> None:
    with RedisCluster(replicas=0) as cluster:
        last = cluster.servers[-1]
        primaries = {channel: primary_of(cluster, channel) for channel in CHANNELS}
        last.pause()
        with Heard(cluster) as heard:
            heard.subscription.add(CHANNELS)
            known = [channel for channel in CHANNELS if primaries[channel] is not last]
            assert 0 < len(known) < len(CHANNELS)
            for channel in known:
                until(lambda channel=channel: heard.confirmed([channel]), "confirmation")  # type: ignore[misc]
                # Straight to its primary, as a client may be waiting for the one that hangs.
                ask(primaries[channel], "SPUBLISH", channel, "hello")
                until(lambda channel=channel: ("message", channel, b"hello") in heard.events, "message")  # type: ignore[misc]
            last.cont()
            until(lambda: heard.confirmed(CHANNELS), "the others")
