"""What the tests of rules are given."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import lowq
from tests.rules.support import Channel, ShardRig
from tests.waiting import PATIENCE

MakeApp = Callable[..., lowq.Lowq]


@pytest.fixture
def make_app(store_url: str) -> Iterator[MakeApp]:
    """Makes applications on each of the stores, with these settings."""
    made: list[lowq.Lowq] = []

    def make(**settings: Any) -> lowq.Lowq:
        # A machine may stand still for seconds.
        made.append(lowq.Lowq(redis_url=store_url, **{"push_timeout": PATIENCE, **settings}))
        return made[-1]

    yield make
    for app in made:
        app.close()


@pytest.fixture
def app(make_app: MakeApp) -> lowq.Lowq:
    return make_app()


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
