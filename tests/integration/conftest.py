"""What the tests of nodes are given."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.support import Rig
from tests.redis_server import RedisServer

MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeRig]:
    """Makes the test's rig, `make_rig(ORDERS_SHARDS=1)`; on the shared server, emptied, or on the one at `url`."""
    rigs: list[Rig] = []

    def make(url: str = "", **settings: object) -> Rig:
        rig = Rig(url or request.getfixturevalue("redis_url"), tmp_path, **settings)
        rigs.append(rig)
        return rig

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server for this test alone, to be stopped and paused, that loses nothing it has answered."""
    with RedisServer(tmp_path / "redis", appendonly="yes", appendfsync="always") as server:
        yield server
        server.close()
