"""A call that is repeated, and whose first attempt arrives after its repeat, out of a connection that was given up: it
is not done to what has come since.
"""

from collections.abc import Callable, Iterator

import pytest

import lowq
from lowq.store.keys import shard_prefix
from tests.chaos.proxy import Proxy
from tests.redis_server import RedisServer

FAR = 3600.0


class Operator:
    """A queue of one shard, and somebody whose calls go through a proxy."""

    def __init__(self, proxy: Proxy, direct: str) -> None:
        self.proxy = proxy
        self.apps = [lowq.Lowq(redis_url=url) for url in (proxy.url, direct)]
        self.through_proxy, self.direct = (app.queue("Orders", 1) for app in self.apps)
        self.direct.push({"id": "x", "payload": "old", "delay": FAR})
        self.through_proxy.stats()  # its connection is there

    def late(self, does: Callable[[lowq.Queue], object], meanwhile: Callable[[lowq.Queue], object], late: int) -> None:
        """Its first attempts arrive when something has happened since it has returned."""
        self.proxy.hold_back(late)
        assert does(self.through_proxy)
        meanwhile(self.direct)
        assert self.proxy.deliver() == late


@pytest.fixture
def operator(redis_server: RedisServer, redis_url: str) -> Iterator[Operator]:
    with Proxy(redis_server.port) as proxy:
        made = Operator(proxy, redis_url)
        yield made
        for app in made.apps:
            app.close()


attempts = pytest.mark.parametrize("late", [1, 2])


def push(queue: lowq.Queue) -> None:
    queue.push({"id": "x", "payload": "new", "delay": FAR})


@attempts
def test_a_late_delete_leaves_what_was_pushed_since(operator: Operator, late: int) -> None:
    operator.late(lambda queue: queue.delete("x"), push, late)
    job = operator.direct.peek("x")
    assert job is not None
    assert [payload for payload, _ in job.payloads] == ["new"]


@attempts
def test_a_late_bury_leaves_what_was_pushed_since(operator: Operator, late: int) -> None:
    operator.late(lambda queue: queue.bury("x"), push, late)
    assert [job.state for job in operator.direct.places("x")] == ["scheduled", "morgue"]


@attempts
def test_a_late_kick_leaves_what_was_buried_since(operator: Operator, late: int) -> None:
    operator.direct.bury("x")
    operator.late(lambda queue: queue.kick("x"), lambda queue: queue.bury("x"), late)
    assert [job.state for job in operator.direct.places("x")] == ["morgue"]


@attempts
def test_a_late_perform_now_leaves_what_was_scheduled_since(operator: Operator, late: int) -> None:
    def meanwhile(queue: lowq.Queue) -> None:
        queue.delete("x")
        push(queue)

    operator.late(lambda queue: queue.perform_now("x"), meanwhile, late)
    assert [job.state for job in operator.direct.places("x")] == ["scheduled"]


@attempts
def test_a_late_pause_does_not_undo_what_was_said_since(operator: Operator, late: int) -> None:
    operator.late(lambda queue: queue.pause(), lambda queue: queue.resume(), late)
    assert not operator.direct.stats().paused


@attempts
def test_a_late_resume_does_not_undo_what_was_said_since(operator: Operator, late: int) -> None:
    operator.direct.pause()
    operator.late(lambda queue: queue.resume(), lambda queue: queue.pause(), late)
    assert operator.direct.stats().paused


def test_a_late_drop_leaves_the_queue_that_was_made_since(operator: Operator) -> None:
    asks = operator.through_proxy._drop_replies

    def asks_first(prefixes: list[str]) -> Iterator[list[int]]:
        yield from asks(prefixes)
        operator.proxy.hold_back(1)

    operator.through_proxy._drop_replies = asks_first  # type: ignore[method-assign]
    assert operator.through_proxy.drop() == 1
    push(operator.direct)
    assert operator.proxy.deliver() == 1
    assert operator.direct.stats().length == 1


def test_what_was_late_is_forgotten_in_the_end(operator: Operator, redis_url: str) -> None:
    operator.late(lambda queue: queue.delete("x"), push, 1)
    client = operator.apps[1].client
    key = shard_prefix("lowq", "Orders", 0) + "superseded"
    assert client.command("ZCARD", key) == 1
    assert 3500 < client.command("TTL", key) <= 3600
