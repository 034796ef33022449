"""What the tests of nodes are given."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import lowq
from tests.rules.node.drivers import NAMES, Driver
from tests.waiting import NEVER

#: Makes an application on the store of the test, with these settings, in a namespace of its own.
MakeApp = Callable[..., lowq.Lowq]


@pytest.fixture
def store_url(redis_url: str) -> str:
    """One store will do: what a store does to jobs is tested with the scripts."""
    return redis_url


@pytest.fixture
def make_app(store_url: str) -> Iterator[MakeApp]:
    apps: list[lowq.Lowq] = []

    def make(**settings: Any) -> lowq.Lowq:
        """With leases that outlast any pause of the machine."""
        own = {"namespace": f"lowq{len(apps)}", "lease_ttl": NEVER, **settings}
        apps.append(lowq.Lowq(redis_url=store_url, **own))
        return apps[-1]

    yield make
    for app in apps:
        app.close()


@pytest.fixture
def app(make_app: MakeApp) -> lowq.Lowq:
    return make_app()


@pytest.fixture(params=NAMES)
def driver(request: pytest.FixtureRequest) -> Driver:
    return Driver(request.param)
