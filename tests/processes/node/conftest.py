"""What the tests of nodes are given."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import lowq
from lowq.node.node import Node
from lowq.workers import Worker
from tests.processes.support import Rig, id_of_shard

MakeApp = Callable[..., lowq.Lowq]
Start = Callable[..., Node]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """What is tested with processes is tested with workers in threads and with async workers in an event loop."""
    if "make_rig" in metafunc.fixturenames:
        kinds = ["threads", pytest.param("loop", marks=pytest.mark.slow)]
        if metafunc.definition.get_closest_marker("threads_only") is not None:
            kinds = ["threads"]
        metafunc.parametrize("kind_of_worker", kinds, indirect=True)


@pytest.fixture(autouse=True)
def kind_of_worker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all rigs that the test makes."""
    if getattr(request, "param", "threads") == "loop":
        monkeypatch.setattr(Rig, "defaults", {"ORDERS_ASYNC": "1"})


@pytest.fixture
def make_app(redis_url: str) -> Iterator[MakeApp]:
    """Makes applications on the shared server, emptied, with these settings."""
    apps: list[lowq.Lowq] = []

    def make(**settings: Any) -> lowq.Lowq:
        apps.append(lowq.Lowq(redis_url=redis_url, **{"shutdown_timeout": 0, **settings}))
        return apps[-1]

    yield make
    for app in apps:
        app.close()


@pytest.fixture
def app(make_app: MakeApp) -> lowq.Lowq:
    return make_app()


@pytest.fixture
def start(app: lowq.Lowq) -> Iterator[Start]:
    """Starts a node in this process: of the application, or of another one, `start(of=other)`."""
    nodes: list[Node] = []

    def start(of: lowq.Lowq = app, **options: Any) -> Node:
        nodes.append(Node(of, **options))
        nodes[-1].start()
        return nodes[-1]

    yield start
    for node in nodes:
        node.stop(5.0)


def is_idle(worker: type[Worker[Any]]) -> bool:
    """Whether nothing waits and nothing is in flight, at one moment."""
    stats = worker.queue.stats()
    return not stats.length and not stats.taken


def ids_of_shards(shards_count: int) -> list[str]:
    """An id of each shard."""
    return [id_of_shard(shard, shards_count) for shard in range(shards_count)]
