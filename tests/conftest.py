"""Fixtures for all tests: a real redis-server of our own, and the stores that rules are tested on."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import redis
from hypothesis import HealthCheck, settings

from tests.compiled_scripts import compile_scripts_once
from tests.redis_server import RedisServer, RedisServerError
from tests.waiting import PATIENCE

if TYPE_CHECKING:
    from tests.postgres_server import PostgresServer

# No deadline, and no limit for making examples: on a busy machine either may take long once. Function-scoped fixtures
# are fine as the tests that combine them with @given use names of their own for every example. The examples are the
# same ones each time; OTHER_STORIES=1 in the environment has others.
settings.register_profile(
    "lowq",
    deadline=None,
    derandomize=not os.environ.get("OTHER_STORIES"),
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("lowq")

compile_scripts_once()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what needs a real server, so that `make test-fast` can leave it out. What may take long begins first: the
    last of them would run alone for many minutes.
    """
    items.sort(key=_time_limit, reverse=True)
    for item in items:
        assert isinstance(item, pytest.Function)
        params = item.callspec.params if hasattr(item, "callspec") else {}
        of_its_own = item.nodeid.startswith("tests/processes/store/")
        if of_its_own or "redis_server" in item.fixturenames or params.get("store_url") == "redis":
            item.add_marker(pytest.mark.redis)


def _time_limit(item: pytest.Item) -> float:
    """Of those that have one of their own, seconds."""
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0]) if mark is not None else 0.0


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """The server that the tests of one test process share. Who stops, kills or pauses one starts its own."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    try:
        server.start()
    except RedisServerError as error:
        pytest.fail(str(error), pytrace=False)
    yield server
    server.close()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """URL of the shared server, emptied: it is ours alone. When a script of a broken build never ends there, the test
    that ran it has failed, and the next one gets a new process.
    """
    with redis.Redis.from_url(redis_server.url) as client:
        try:
            client.execute_command("FLUSHALL", "SYNC")  # Valkey would go on in a thread, and memory is measured
        except redis.ResponseError as error:
            if not str(error).startswith("BUSY"):
                raise
            redis_server.kill()
            redis_server.start()
    return redis_server.url


@contextmanager
def _postgres_server() -> "Iterator[PostgresServer]":
    from tests.postgres_server import PostgresServer, PostgresUnavailable  # here: most tests do without its driver

    try:
        server = PostgresServer()
    except PostgresUnavailable as error:
        pytest.skip(str(error))
    with server:
        yield server


@pytest.fixture(scope="session")
def postgres() -> "Iterator[PostgresServer]":
    """The PostgreSQL that the tests of one test process share: who uses its database empties it."""
    with _postgres_server() as server:
        yield server


@pytest.fixture
def own_postgres() -> "Iterator[PostgresServer]":
    """A PostgreSQL of the test's own, which it may kill."""
    with _postgres_server() as server:
        yield server


@pytest.fixture(params=["memory", "redis"])
def store_url(request: pytest.FixtureRequest) -> str:
    """URL of an empty store, once embedded and once on a real server: the rules are the same on both."""
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}"
    url: str = request.getfixturevalue("redis_url")
    return url


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what a developer's shell, or the runner itself, has set for lowq and for the width of output. Who waits
    for a store waits as patiently as the tests do, in processes that they start, too: a machine may stand still.
    """
    for name in list(os.environ):
        if name == "COLUMNS" or name.startswith("LOWQ_"):
            monkeypatch.delenv(name)
    for name in ("PUSH", "POOL", "DURABILITY"):
        monkeypatch.setenv(f"LOWQ_{name}_TIMEOUT", f"{PATIENCE:g}")
