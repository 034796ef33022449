"""The dashboard's connections are its own: it keeps no producer of its host waiting, nor they it."""

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

import lowq
import lowq_web
from lowq.store.keys import shard_prefix
from lowq.store.shard_operations import ShardOperations
from tests.rules.web.conftest import OWN
from tests.waiting import until


@pytest.fixture
def host(redis_url: str) -> Iterator[lowq.Lowq]:
    """Whoever finds no connection free is answered at once."""
    app = lowq.Lowq(redis_url=redis_url, pool_timeout=0.05)
    app.queue("Orders", 1).push({"id": 1, "delay": 60})
    yield app
    app.close()


def browse(host: lowq.Lowq) -> tuple[TestClient, lowq.Lowq]:
    application = lowq_web.create_app(host)
    client = TestClient(application, base_url="http://127.0.0.1", headers=OWN)
    return client, application.state.context.app


def test_neither_waits_for_the_other(host: lowq.Lowq) -> None:
    client, dashboard = browse(host)
    call = ShardOperations(shard_prefix(host.config.namespace, "Orders", 0)).stats()
    for busy in (dashboard, host):
        answers = [busy.client.start([call]) for _ in range(host.config.client_pool_size)]
        if busy is dashboard:
            assert host.queue("Orders").push({"id": 2, "delay": 60}) == 1
        else:
            assert client.get("/queues/Orders").status_code == 200
        for answer in answers:
            answer()


def test_they_are_closed_with_the_application(redis_url: str) -> None:
    watcher, host = lowq.Lowq(redis_url=redis_url), lowq.Lowq(redis_url=redis_url)

    def connections() -> set[bytes]:
        return {line.split()[0] for line in watcher.client.command("CLIENT", "LIST").splitlines()}

    # Not how many there are: those of earlier tests may end meanwhile.
    before = connections()
    client, _ = browse(host)
    assert client.get("/").status_code == 200
    opened = connections() - before
    assert opened
    host.close()
    until(lambda: not opened & connections(), "end of the connections")
    with client:  # its server starts, and shuts down at the end
        assert client.get("/nodes").status_code == 200
        opened = connections() - before
        assert opened
    until(lambda: not opened & connections(), "end of the connections")
    watcher.close()


def test_it_follows_into_an_embedded_store(host: lowq.Lowq) -> None:
    client, _ = browse(host)
    path = "/api/v1/queues/Orders"
    assert client.get(path).json()["stats"]["length"] == 1
    for count in (2, 3):
        with host.embedded():
            host.queue("Orders", 1).push([{"id": n, "delay": 60} for n in range(count)])
            assert client.get(path).json()["stats"]["length"] == count
    assert client.get(path).json()["stats"]["length"] == 1
