"""What the tests of consumers are given."""

from collections.abc import Iterator

import pytest

import lowq
from lowq.queue import Queue


@pytest.fixture
def app(store_url: str) -> Iterator[lowq.Lowq]:
    app = lowq.Lowq(redis_url=store_url, lease_ttl=5)
    yield app
    app.close()


@pytest.fixture
def queue(app: lowq.Lowq) -> Queue:
    queue = app.queue("mail", 4)
    queue.push([])
    return queue
