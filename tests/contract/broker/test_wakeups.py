"""The listener of a node or a consumer."""

import threading

from lowq.broker.wakeups import Listener
from lowq.store.client import Client
from lowq.store.pubsub import ServerSubscription
from tests.waiting import PATIENCE, until

CHANNEL = "lowq:v1:nodes"


def test_a_listener_that_is_closed_as_it_connects_keeps_no_subscription(redis_url: str) -> None:
    client = Client(redis_url, size=2, timeout=5.0)
    begins, goes_on = threading.Event(), threading.Event()
    listener = Listener(client, [], CHANNEL, *(lambda *_: None,) * 4)
    subscription = listener._subscription
    assert isinstance(subscription, ServerSubscription)
    connect = subscription._open

    def late() -> object:
        begins.set()
        assert goes_on.wait(PATIENCE)
        return connect()

    subscription._open = late  # type: ignore[method-assign]
    listener.start()
    assert begins.wait(PATIENCE)
    closes = threading.Thread(target=listener.close)
    closes.start()
    until(listener._closed.is_set, "that it is to end")
    goes_on.set()
    closes.join()
    listener._thread.join(PATIENCE)
    until(lambda: client.command("PUBSUB", "SHARDNUMSUB", CHANNEL, key=CHANNEL)[1] == 0, "the end of the subscription")
    client.close()
