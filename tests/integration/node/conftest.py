"""What the tests of nodes are given."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import lowq
from lowq.node.node import Node
from tests.integration.support import Rig

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
def app(redis_url: str) -> Iterator[lowq.Lowq]:
    app = lowq.Lowq(redis_url=redis_url, shutdown_timeout=0)
    yield app
    app.close()


@pytest.fixture
def start(app: lowq.Lowq) -> Iterator[Start]:
    """Starts a node of the application in this process."""
    nodes: list[Node] = []

    def start(**options: Any) -> Node:
        nodes.append(Node(app, **options))
        nodes[-1].start()
        return nodes[-1]

    yield start
    for node in nodes:
        node.stop(5.0)
