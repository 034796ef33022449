"""What the tests of consumers are given."""

from collections.abc import Iterator

import pytest

import lowq
from lowq.consumer import Consumer
from lowq.queue import Queue
from tests.rules.consumer.line import Line
from tests.waiting import PATIENCE


@pytest.fixture
def app(store_url: str) -> Iterator[lowq.Lowq]:
    """With leases that outlast any pause of the machine."""
    app = lowq.Lowq(redis_url=store_url, lease_ttl=PATIENCE)
    yield app
    app.close()


@pytest.fixture
def queue(app: lowq.Lowq) -> Queue:
    queue = app.queue("mail", 4)
    queue.push([])
    return queue


@pytest.fixture
def consumer(queue: Queue) -> Iterator[Consumer]:
    with queue.consumer() as consumer:
        yield consumer


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Line:
    return Line(monkeypatch)
