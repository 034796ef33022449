"""What the tests of rules are given."""

from collections.abc import Iterator

import pytest

import lowq
from tests.rules.support import Channel, ShardRig
from tests.waiting import PATIENCE


@pytest.fixture
def app(store_url: str) -> Iterator[lowq.Lowq]:
    """An application on each of the stores."""
    app = lowq.Lowq(redis_url=store_url, push_timeout=PATIENCE)  # a machine may stand still for seconds
    yield app
    app.close()


@pytest.fixture(params=["plain", "async"])
def is_async(request: pytest.FixtureRequest) -> bool:
    """Whether the handler is a coroutine."""
    return bool(request.param == "async")


@pytest.fixture
def rig(store_url: str) -> Iterator[ShardRig]:
    """An untouched shard, on each of the stores."""
    rig = ShardRig(store_url)
    yield rig
    rig.close()


@pytest.fixture
def wake(rig: ShardRig) -> Iterator[Channel]:
    channel = Channel(rig, "wake")
    yield channel
    channel.close()


@pytest.fixture
def free(rig: ShardRig) -> Iterator[Channel]:
    channel = Channel(rig, "lease_released")
    yield channel
    channel.close()
