"""What the tests of nodes are given."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import lowq
from tests.processes.supervising import Supervise, SupervisorProcess
from tests.processes.support import TTL, Rig, until
from tests.redis_cluster import RedisCluster
from tests.redis_server import RedisServer

MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeRig]:
    """Makes the test's rig, `make_rig(ORDERS_SHARDS=1)`; on the shared server, emptied, or on the one at `url`."""
    rigs: list[Rig] = []

    def make(url: str = "", **settings: object) -> Rig:
        rig = Rig(url or request.getfixturevalue("redis_url"), tmp_path, **settings)
        rigs.append(rig)
        if not url:
            # What was in flight when the server was started less than a lease ago is nobody's fault, so a crash
            # would go uncharged in whichever test happens to be the first on the shared server.
            until(lambda: rig.client.info("server")["uptime_in_seconds"] > TTL, "server that is older than a lease")
        return rig

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[RedisCluster]:
    """Three primaries with a replica each, for all tests of this process."""
    with RedisCluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: RedisCluster) -> Iterator[RedisCluster]:
    """An empty cluster. What the test kills or pauses runs again afterwards; what it cuts off does not."""
    yield shared_cluster
    shared_cluster.restore()


@pytest.fixture
def cluster_url(cluster: RedisCluster) -> str:
    return cluster.url


@pytest.fixture
def make_cluster_rig(make_rig: MakeRig, cluster: RedisCluster) -> MakeRig:
    """Makes a rig whose nodes, and whose own pushes, use the cluster. It looks at no keys."""

    def make(**settings: object) -> Rig:
        rig = make_rig(url=cluster.servers[0].url, **{"LOWQ_REDIS_URL": cluster.url, **settings})
        rig.app.close()
        rig.app = lowq.Lowq(redis_url=cluster.url)
        return rig

    return make


@pytest.fixture
def supervise(make_rig: MakeRig) -> Iterator[Supervise]:
    """Starts a supervisor, `supervise(rig, "--processes", "2")`; none of its processes outlives the test."""
    started: list[SupervisorProcess] = []

    def start(rig: Rig, *args: str, **options: Any) -> SupervisorProcess:
        started.append(SupervisorProcess(rig, *args, **options))
        return started[-1]

    yield start
    for supervisor in started:
        supervisor.close()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server for this test alone, to be stopped and paused, that loses nothing it has answered."""
    with RedisServer(tmp_path / "redis", appendonly="yes", appendfsync="always") as server:
        yield server
        server.close()
