"""The listener of a node or a consumer."""

import threading
from contextlib import closing

from lowq.shards.wakeups import Listener
from lowq.store.client import Client
from tests.chaos.proxy import Proxy
from tests.redis_server import RedisServer
from tests.waiting import PATIENCE, until

CHANNEL = "lowq:v1:nodes"


def connections(client: Client) -> set[bytes]:
    """The ids of those that the server has; some of an earlier test may end just now."""
    return {line.split()[0] for line in client.command("CLIENT", "LIST").splitlines()}


def test_a_listener_that_is_closed_as_it_connects_keeps_no_subscription(
    redis_url: str, redis_server: RedisServer
) -> None:
    with Proxy(redis_server.port) as proxy, closing(Client(redis_url, size=1, timeout=PATIENCE)) as looking:
        client = Client(proxy.url, size=2, timeout=PATIENCE, socket_timeout=PATIENCE)
        listener = Listener(client, [], CHANNEL, *(lambda *_: None,) * 4)
        proxy.hold()
        before = connections(looking)
        listener.start()
        until(lambda: connections(looking) - before, "a connection that is being made")
        closes = threading.Thread(target=listener.close)
        closes.start()
        closes.join(0.05)  # so that it is under way, most likely
        proxy.heal()
        closes.join(PATIENCE)
        until(lambda: looking.command("PUBSUB", "SHARDNUMSUB", CHANNEL, key=CHANNEL)[1] == 0, "no subscription")
        client.close()
