"""A call that is repeated, and whose first attempt arrives after its repeat, out of a connection that was given up: it
is not done to what has come since.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

import lowq
from lowq.store.keys import shard_prefix
from tests.chaos.proxy import Proxy
from tests.redis_server import RedisServer
from tests.rows import case
from tests.waiting import PATIENCE, until

FAR = 3600.0
Step = Callable[[lowq.Queue], object]


def push(queue: lowq.Queue) -> None:
    queue.push({"id": "x", "payload": "new", "delay": FAR})


def delete_and_push(queue: lowq.Queue) -> None:
    queue.delete("x")
    push(queue)


def nothing(_queue: lowq.Queue) -> None: ...


def places(queue: lowq.Queue) -> list[str]:
    return [f"{job.state} {job.payloads[0][0]}" for job in queue.places("x")]


def is_paused(queue: lowq.Queue) -> bool:
    return queue.stats().paused


#: What was before; the call that is late; what happens between its repeat and its first attempt; what is looked at
#: then, and found.
ROWS: list[tuple[str, Step, Step, Step, Step, object]] = [
    ("delete", nothing, lambda queue: queue.delete("x"), push, places, ["scheduled new"]),
    ("bury", nothing, lambda queue: queue.bury("x"), push, places, ["scheduled new", "morgue old"]),
    ("kick", lambda queue: queue.bury("x"), lambda queue: queue.kick("x"), lambda queue: queue.bury("x"), places,
     ["morgue old"]),
    ("perform_now", nothing, lambda queue: queue.perform_now("x"), delete_and_push, places, ["scheduled new"]),
    ("pause", nothing, lambda queue: queue.pause(), lambda queue: queue.resume(), is_paused, False),
    ("resume", lambda queue: queue.pause(), lambda queue: queue.resume(), lambda queue: queue.pause(), is_paused, True),
]  # fmt: skip


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[Proxy]:
    with Proxy(redis_server.port) as proxy:
        yield proxy


@pytest.mark.parametrize("attempts", [1, 2])
def test_what_comes_late_leaves_what_has_come_since(proxy: Proxy, redis_url: str, attempts: int) -> None:
    with closing(lowq.Lowq(redis_url=proxy.url)) as one, closing(lowq.Lowq(redis_url=redis_url)) as other:
        for name, before, call, meanwhile, look, found in ROWS:
            with case(name):
                through_proxy, direct = (app.queue(f"to-{name}", 1) for app in (one, other))
                direct.push({"id": "x", "payload": "old", "delay": FAR})
                before(direct)
                through_proxy.stats()  # its connection is there
                proxy.hold_back(attempts)
                assert call(through_proxy)
                meanwhile(direct)
                assert proxy.deliver() == attempts
                assert look(direct) == found
        key = shard_prefix("lowq", "to-delete", 0) + "superseded"
        assert other.client.command("ZCARD", key, key=key) == attempts
        assert 0 < other.client.command("TTL", key, key=key) <= FAR  # in the end it is forgotten


def test_a_late_drop_leaves_the_queue_that_was_made_since(proxy: Proxy, redis_url: str) -> None:
    with closing(lowq.Lowq(redis_url=proxy.url)) as one, closing(lowq.Lowq(redis_url=redis_url)) as other:
        direct = other.queue("Orders", 1)
        push(direct)
        dropped: list[int] = []
        proxy.hold_reply(b"\r\n:0\r\n")  # to the question whether somebody holds the shard
        drops = threading.Thread(target=lambda: dropped.append(one.queue("Orders", 1).drop()))
        drops.start()
        until(lambda: proxy.is_holding, "a drop that has asked")
        proxy.hold_back(1)
        proxy.heal()
        drops.join(PATIENCE)
        assert dropped == [1]
        push(direct)
        assert proxy.deliver() == 1
        assert direct.stats().length == 1
