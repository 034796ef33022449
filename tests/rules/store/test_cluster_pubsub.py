"""What a subscription to a cluster makes of what its servers say."""

from collections import deque
from typing import Any

from lowq.store.cluster_pubsub import ClusterSubscription, Nodes, _Link


class Silent:
    """A connection that takes everything and says nothing."""

    _sock = None

    def send_packed_command(self, *_args: Any, **_options: Any) -> None:
        pass

    def disconnect(self) -> None:
        pass


def test_a_channel_whose_slot_moves_while_another_is_dropped_is_looked_for() -> None:
    nodes = Nodes(lambda _key: ("h", 1), lambda *_: None, lambda _: Silent(), lambda *_: None, lambda error: error)
    subscription = ClusterSubscription(nodes)
    subscription.add(["kept", "dropped"])
    link = _Link(("h", 1), Silent())
    link.channels = {"kept"}
    subscription._homeless.clear()
    link.send(b"SUNSUBSCRIBE", ["dropped"])
    subscription._take(link, "sunsubscribe", "kept", b"")
    assert subscription._homeless == {"kept"}
    subscription._take(link, "sunsubscribe", "dropped", b"")
    assert link.pending == deque()
    assert subscription._homeless == {"kept"}
    subscription.close()
