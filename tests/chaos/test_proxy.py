"""The proxy does the harm that it is told to do, and no other."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.chaos.proxy import Proxy
from tests.redis_server import RedisServer
from tests.waiting import PATIENCE, until

COUNT = "return redis.call('INCR', 'count')"


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[Proxy]:
    with redis.Redis.from_url(redis_server.url) as direct:
        direct.flushall()
        direct.script_load(COUNT)
    with Proxy(redis_server.port) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: Proxy) -> Iterator["redis.Redis"]:
    with redis.Redis.from_url(
        proxy.url, socket_timeout=PATIENCE, retry=Retry(NoBackoff(), 0), single_connection_client=True
    ) as client:
        client.ping()
        yield client


def count(client: "redis.Redis") -> object:
    return client.evalsha(client.script_load(COUNT), 0)


def ask_in_vain(client: "redis.Redis", *command: object) -> None:
    """No answer comes; the connection is given up."""
    connection: Any = client.connection
    connection.send_command(*command)
    assert not connection.can_read(timeout=0.2)
    connection.disconnect()


def counted(redis_server: RedisServer) -> int:
    """How often Redis has run the script."""
    with redis.Redis.from_url(redis_server.url) as direct:
        return int(direct.get("count") or 0)


def test_it_holds_a_script_back_and_delivers_it_later(
    proxy: Proxy, client: "redis.Redis", redis_server: RedisServer
) -> None:
    proxy.hold_back(1)
    with pytest.raises(redis.ConnectionError):
        count(client)
    assert counted(redis_server) == 0
    assert count(client) == 1
    assert proxy.deliver() == 1
    assert counted(redis_server) == 2
    assert proxy.deliver() == 0


def test_it_forwards(client: "redis.Redis") -> None:
    value = "x" * 200_000
    client.set("large", value)
    assert client.get("large") == value.encode()
    assert count(client) == 1


@pytest.mark.slow
def test_a_delay_is_in_both_directions(proxy: Proxy, client: "redis.Redis") -> None:
    proxy.delay(0.05)
    began = time.monotonic()
    client.ping()
    assert time.monotonic() - began >= 0.1
    proxy.heal()


def test_a_cut_connection_can_be_made_anew_unless_that_is_refused(proxy: Proxy, client: "redis.Redis") -> None:
    proxy.cut()
    with pytest.raises(redis.ConnectionError):
        client.ping()
    assert client.ping()
    proxy.cut(refuse=True)
    for _ in range(2):
        with pytest.raises(redis.ConnectionError):
            client.ping()
    proxy.heal()
    assert client.ping()


def test_what_is_held_arrives_later(proxy: Proxy, client: "redis.Redis", redis_server: RedisServer) -> None:
    sha = client.script_load(COUNT)
    client.evalsha(sha, 0)
    proxy.hold()
    ask_in_vain(client, "EVALSHA", sha, 0)
    assert counted(redis_server) == 1
    proxy.heal()
    until(lambda: counted(redis_server) == 2, "arrival of what was held")


def test_the_reply_that_is_waited_for_is_held_and_no_other(
    proxy: Proxy, client: "redis.Redis", redis_server: RedisServer
) -> None:
    client.set("large", "needle")
    proxy.hold_reply(b"needle")
    assert count(client) == 1
    assert not proxy.is_holding
    with ThreadPoolExecutor(1) as thread:
        reply = thread.submit(client.get, "large")
        until(lambda: proxy.is_holding, "a reply that is held")
        assert not reply.done()
        proxy.heal()
        assert reply.result() == b"needle"
    assert not proxy.is_holding
    assert client.get("large") == b"needle"


@pytest.mark.parametrize(("direction", "executed"), [("reply", 2), ("request", 1)])
def test_what_goes_in_one_direction_disappears(
    proxy: Proxy, client: "redis.Redis", redis_server: RedisServer, direction: str, executed: int
) -> None:
    sha = client.script_load(COUNT)
    client.evalsha(sha, 0)
    proxy.half_open("reply" if direction == "reply" else "request")
    ask_in_vain(client, "EVALSHA", sha, 0)
    until(lambda: counted(redis_server) >= executed, "a request that gets through")
    proxy.heal()
    assert client.ping()
    assert counted(redis_server) == executed


@pytest.mark.parametrize("replies", [1, 2])
def test_a_lost_reply_is_that_of_an_executed_command(
    proxy: Proxy, client: "redis.Redis", redis_server: RedisServer, replies: int
) -> None:
    sha = client.script_load(COUNT)
    client.evalsha(sha, 0)
    proxy.lose_replies(replies)
    for _ in range(replies):
        with pytest.raises(redis.ConnectionError):
            client.evalsha(sha, 0)
    assert client.evalsha(sha, 0) == 2 + replies
    assert counted(redis_server) == 2 + replies
    assert proxy.lost == replies
