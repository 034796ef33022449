"""Primaries of a cluster that do not answer, and who finds out whether they do again."""

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from redis import exceptions

from lowq.errors import RedisUnavailable
from lowq.store.endpoints import ASK_PAUSES, _Cluster
from lowq.store.tags import slot_of_key
from tests.waiting import PATIENCE, until

NODE = [b"10.0.0.1", 7001, b"id"]
ALL = [[0, 16383, NODE]]


class Server:
    """Stands for the only server of a cluster, and for the connections to it."""

    def __init__(self) -> None:
        #: What it answers; None: nothing.
        self.ranges: list[Any] | None = None

    def ask(self, *_command: object, **_options: object) -> Any:
        if self.ranges is None:
            raise exceptions.ConnectionError("nobody answers")
        return self.ranges

    def close(self) -> None:
        pass


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def cluster(server: Server) -> Iterator[_Cluster]:
    """One whose only primary is known, and has no answer."""
    cluster = _Cluster([("10.0.0.1", 7001)], lambda _host, _port: server)  # type: ignore[arg-type, return-value]
    cluster._take_ranges(ALL, "10.0.0.1")
    yield cluster
    cluster.close()


def test_two_threads_watch_however_many_notice_it_at_once(cluster: _Cluster) -> None:
    others = set(threading.enumerate())
    pool = cluster.pool_at("10.0.0.1", 7001)
    together = threading.Barrier(30)

    def notice() -> None:
        together.wait(PATIENCE)
        cluster.doubt(pool, exceptions.ConnectionError("it is gone"))

    noticing = [threading.Thread(target=notice) for _ in range(30)]
    for thread in noticing:
        thread.start()
    for thread in noticing:
        thread.join(PATIENCE)
    watching = set(threading.enumerate()) - others
    assert [thread.name for thread in watching] == ["lowq-cluster"] * 2
    cluster.close()
    until(lambda: not any(thread.is_alive() for thread in watching), "the end of the watchers")


def test_it_is_found_out_that_one_answers_again_after_the_application_was_closed(
    cluster: _Cluster, server: Server
) -> None:
    cluster.close()
    cluster.doubt(cluster.pool_at("10.0.0.1", 7001), exceptions.ConnectionError("it is gone"))
    with pytest.raises(RedisUnavailable, match="does not answer or serve: it is gone"):
        cluster.pool_for("key")
    server.ranges = ALL
    until(lambda: not cluster.is_watched, "an answer")
    assert cluster.pool_for("key") is server  # type: ignore[comparison-overlap]


def test_a_slot_that_nobody_served_at_first_is_looked_for_again(
    cluster: _Cluster, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("lowq.store.endpoints.time.monotonic", lambda: now[0])
    slot = slot_of_key("key")
    server.ranges = [[0, slot - 1, NODE], [slot + 1, 16383, NODE]]
    cluster.refresh()
    with pytest.raises(RedisUnavailable, match="no primary of the cluster serves key"):
        cluster.pool_for("key")
    server.ranges = ALL
    now[0] += 1.0
    assert cluster.pool_for("key") is server  # type: ignore[comparison-overlap]


def test_nodes_are_asked_less_often_for_a_slot_that_stays_without_a_primary(
    cluster: _Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("lowq.store.endpoints.time.monotonic", lambda: now[0])
    asked: list[float] = []

    def refresh(_deadline: object = None) -> None:
        asked.append(now[0])
        cluster._take_ranges([[1, 16383, NODE]], "10.0.0.1")

    monkeypatch.setattr(cluster, "refresh", refresh)
    refresh()
    for _ in range(1000):
        cluster._look_again(None)
        now[0] += 0.01
    pauses = [later - before for before, later in itertools.pairwise(asked[5:])]
    assert pauses
    assert min(pauses) >= ASK_PAUSES[1] / 2
