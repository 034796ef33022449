"""The measurement of lost pushes finds what is there and what is not."""

import time

from tests.chaos.losses import Producers, losses
from tests.redis_server import RedisServer
from tests.waiting import PATIENCE, until


def test_it_tells_lost_pushes_from_those_that_are_there() -> None:
    with RedisServer() as server:
        producers = Producers(server.url, "none", push_timeout=PATIENCE)
        until(lambda: len(producers.returned) >= 50, "pushes that have returned")
        producers.end()
        at = time.monotonic()
        found = losses(producers.returned, server.url, at)
        assert (found.returned, found.lost, found.age) == (len(producers.returned), 0, 0.0)
        lost = losses({**producers.returned, "never-pushed": at - 1.0}, server.url, at)
        assert (lost.lost, lost.age) == (1, 1.0)
