"""The servers that the tests share."""

import pytest
import redis

from tests.redis_server import RedisServer


def test_a_script_that_never_ends_does_not_take_the_next_test_with_it(
    redis_server: RedisServer, request: pytest.FixtureRequest
) -> None:
    with redis.Redis.from_url(redis_server.url) as client:
        client.config_set("busy-reply-threshold", 1)
    with redis.Redis.from_url(redis_server.url, socket_timeout=1) as client, pytest.raises(redis.TimeoutError):
        client.eval("while true do redis.call('SET', 'a', 1) end", 0)
    url = request.getfixturevalue("redis_url")
    with redis.Redis.from_url(url) as client:
        assert client.dbsize() == 0
