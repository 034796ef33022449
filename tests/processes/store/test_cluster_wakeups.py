"""Wake-ups on a cluster: from the primary of a channel alone, and after its slot has moved or its primary died."""

import threading

import pytest
import redis

from lowq.errors import RedisUnavailable
from lowq.store import Client, Subscription
from lowq.store.keys import shard_prefix, slot_of
from tests.processes.support import answered, until
from tests.redis_cluster import RedisCluster
from tests.redis_server import RedisServer
from tests.waiting import NEVER

CHANNELS = [f"{shard_prefix('lowq', 'Orders', shard)}wake" for shard in range(8)]


def listeners(server: RedisServer) -> int:
    with redis.Redis(port=server.port) as client:
        return len(client.client_list(_type="pubsub"))


def primary_of(cluster: RedisCluster, channel: str) -> RedisServer:
    return cluster.primary_of(slot_of(channel))


def is_listened_to(cluster: RedisCluster, channel: str) -> bool:
    server = primary_of(cluster, channel)
    return len(cluster.raw(server, "PUBSUB SHARDCHANNELS", channel)) == 1


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
        self._thread.join(60)
        assert not self._thread.is_alive()
        self.client.close()

    def _listen(self) -> None:
        while not self._ended.is_set():
            try:
                event = self.subscription.get(NEVER)  # it must be woken
            except RedisUnavailable:
                continue
            if event is not None:
                self.events.append(event)

    def add(self, channels: list[str]) -> None:
        self.subscription.add(channels)
        for channel in channels:
            until(lambda channel=channel: self.confirmations(channel), f"confirmation of {channel}")  # type: ignore[misc]

    def confirmations(self, channel: str) -> int:
        assert self._thread.is_alive()
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


def test_each_primary_has_one_connection_and_its_own_channels_whose_messages_go_to_no_other(
    cluster: RedisCluster,
) -> None:
    def received(server: RedisServer) -> int:
        lines = cluster.ask(server, "CLUSTER", "INFO")
        return sum(int(lines.get(f"cluster_stats_messages_{kind}_received", 0)) for kind in ("publish", "publishshard"))

    primaries = cluster.primaries()
    until(lambda: not any(map(listeners, primaries)), "an end of connections of other tests")
    before = list(map(received, primaries))
    with Heard(cluster) as heard:
        heard.add(CHANNELS)
        assert list(map(listeners, primaries)) == [1, 1, 1]
        for number, channel in enumerate(CHANNELS):
            heard.hears(channel, str(number))
            assert is_listened_to(cluster, channel)
        heard.subscription.remove(CHANNELS[:4])
        until(lambda: sum(kind == "unsubscribe" for kind, _, _ in heard.events) == 4, "goodbyes")
        heard.add(["later"])
        assert heard.confirmations(CHANNELS[0]) == 1
    until(lambda: not any(map(listeners, primaries)), "end of all connections")
    assert list(map(received, primaries)) == before


@pytest.mark.parametrize("has_been_asked", [True, False])
def test_a_channel_follows_its_slot(cluster: RedisCluster, has_been_asked: bool) -> None:
    with Heard(cluster) as heard:
        channel = CHANNELS[0]
        slot, old = slot_of(channel), primary_of(cluster, channel)
        new = next(server for server in cluster.primaries() if server is not old)
        heard.add(CHANNELS if has_been_asked else ["other"])  # now the slots are known
        cluster.move_slot(slot, new)
        heard.subscription.add(CHANNELS)
        until(lambda: heard.confirmations(channel) >= (2 if has_been_asked else 1), "confirmation by the new primary")
        heard.hears(channel, "hello")
        assert primary_of(cluster, channel) is new
        assert is_listened_to(cluster, channel)
        assert all(heard.confirmations(other) <= 1 for other in CHANNELS if slot_of(other) != slot)


def test_channels_follow_the_primary_that_has_the_slots_now(cluster: RedisCluster) -> None:
    with Heard(cluster) as heard:
        heard.add(CHANNELS)
        first = primary_of(cluster, CHANNELS[0])
        mine = [channel for channel in CHANNELS if primary_of(cluster, channel) is first]
        others = [channel for channel in CHANNELS if channel not in mine]
        assert others
        cluster.replicated()
        first.pause()
        cluster.replaced(first)
        until(lambda: answered(lambda: heard.client.command("EXISTS", mine[0], key=mine[0]) == 0), "the next primary")
        until(lambda: all(heard.confirmations(channel) >= 2 for channel in mine), "confirmations by the next primary")
        for channel in (*mine, *others):
            heard.hears(channel, "hello")
        assert all(heard.confirmations(channel) == 1 for channel in others)


def test_a_primary_that_hangs_delays_no_message_of_another(cluster: RedisCluster) -> None:
    primaries = {channel: primary_of(cluster, channel) for channel in CHANNELS}
    hanging = primaries[CHANNELS[-1]]
    known = [channel for channel in CHANNELS if primaries[channel] is not hanging]
    assert known
    hanging.pause()
    with Heard(cluster) as heard:
        heard.subscription.add(CHANNELS)
        for channel in known:
            until(lambda channel=channel: heard.confirmations(channel), "confirmation")  # type: ignore[misc]
            # Straight to its primary, as a client may be waiting for the one that hangs.
            cluster.raw(primaries[channel], "SPUBLISH", channel, "hello")
            until(lambda channel=channel: ("message", channel, b"hello") in heard.events, "message")  # type: ignore[misc]
        hanging.cont()
        until(lambda: all(map(heard.confirmations, CHANNELS)), "the others")
