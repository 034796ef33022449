"""Redis stopped, hanging, connections cut: under load, with nothing lost and nobody charged."""

import signal
import time
from pathlib import Path

import pytest

from tests.checker import Report
from tests.processes.conftest import MakeRig
from tests.processes.support import NEVER, NodeProcess, until
from tests.redis_server import RedisServer
from tests.tiers import often

#: Seconds of a lease that no living node is late for, on a busy machine either.
LONG_TTL = 3


def problems(report: Report) -> list[str]:
    """All but this: what was finished, and not acknowledged when Redis went away, may come again."""
    return [problem for problem in report.problems if problem not in report.excess]


def outages(node: NodeProcess) -> tuple[int, int]:
    """How many have begun, and have ended. On a busy machine an answer may come so late that it is one, too."""
    return len(node.lines("trying until it is back")), len(node.lines("Redis is back"))


def is_away(node: NodeProcess) -> bool:
    begun, ended = outages(node)
    return begun > ended


def each_ended(node: NodeProcess) -> bool:
    """Whether each outage was said to begin once at most, to be one of a Redis that is not ready, too, and to end."""
    begun, ended = outages(node)
    not_ready = len(node.lines("waiting until it can"))
    return max(begun, not_ready) <= ended <= begun + not_ready <= 2 * ended


def test_a_subscription_that_was_cut_while_idle_is_made_anew(make_rig: MakeRig) -> None:
    rig = make_rig(LOWQ_POLL_INTERVAL=NEVER)
    node = rig.node().holds_all()
    channel = f"{rig.prefix(0)}wake"
    until(lambda: rig.client.pubsub_shardnumsub(channel)[0][1] == 1, "subscription")
    rig.client.client_kill_filter(_type="pubsub")
    rig.push("a", 1)  # nobody listens just now
    rig.done("a", 1)
    until(lambda: rig.client.pubsub_shardnumsub(channel)[0][1] == 1, "new subscription")
    rig.client.spublish(channel, "no message of lowq's")
    rig.push("a", 2)
    rig.done("a", 2)
    assert node.stop() == 0


# --- outages ---


@pytest.mark.parametrize("how", often(["stopped", "hangs"], ["stopped"]))
def test_redis_away_for_longer_than_the_lease_loses_nothing_and_charges_nobody(
    make_rig: MakeRig, own_server: RedisServer, how: str
) -> None:
    # A single crash would bury a job.
    settings = {"ORDERS_WORK": 0.001, "ORDERS_BATCH": 3, "ORDERS_MAX_CRASHES": 1, "LOWQ_POLL_INTERVAL": NEVER}
    rig = make_rig(own_server.url, LOWQ_LEASE_TTL=LONG_TTL, **settings)
    node = rig.node().holds_all()
    nodes = [node]
    if how == "stopped":  # while one hangs the leases run out, and a standby can't know that their owner lives
        nodes.append(rig.node(ORDERS_SPLITTER="all").stands_by())
    finished = rig.produce(2, ids=30, versions=3, rounds=0, pause=0.1)
    rig.performed(100)
    rig.push("slow", 1, do="wait")
    rig.begun("slow", 1)
    for job_id in range(5):  # due while Redis is away
        rig.push(f"due {job_id}", 1, delay=LONG_TTL)
    (own_server.stop if how == "stopped" else own_server.pause)()
    lease_ends_at = time.monotonic() + 1.5 * LONG_TTL
    for one in nodes:
        until(lambda one=one: is_away(one), "a node that says that Redis is away")  # type: ignore[misc]  # a default binds it
    before = [outages(one) for one in nodes]
    until(lambda: time.monotonic() > lease_ends_at, "the end of the leases")
    if how == "stopped":  # one that hangs may have answered what was asked before
        assert [outages(one) for one in nodes] == before  # each says so once, whoever notices
        assert [begun - ended for begun, ended in before] == [1, 1]
    (own_server.start if how == "stopped" else own_server.cont)()
    Path(f"{rig.history.path}.go").touch()
    finished()
    rig.done("slow", 1)
    rig.drained()
    assert rig.buried() == set()
    assert rig.merged("crashes") == {}
    report = rig.report()
    assert problems(report) == []
    if how == "hangs":
        assert report.fenced == []
    for one in nodes:
        until(lambda one=one: each_ended(one), "a node that says that Redis is back")  # type: ignore[misc]  # a default binds it
        assert one.stop() == 0
    assert rig.of_shards("lease") == {}


# --- stopping meanwhile ---


def test_a_node_stops_while_redis_is_away_and_tells_it_what_finished_if_it_comes_back(
    make_rig: MakeRig, own_server: RedisServer
) -> None:
    rig = make_rig(own_server.url, LOWQ_LEASE_TTL=NEVER)
    nodes = [rig.node().holds_all(), rig.node()]
    until(lambda: all(node.held() for node in nodes), "shards of each node")
    rig.push("a", 1, do="wait")
    (performed,) = rig.begun("a", 1)
    idle, node = sorted(nodes, key=lambda one: one.pid == performed.pid)
    own_server.kill()
    idle.says("does not answer")
    assert idle.stop() == 0
    Path(f"{rig.history.path}.go").touch()
    rig.done("a", 1)
    node.signal(signal.SIGTERM)
    node.says(" stops")
    own_server.start()
    assert node.wait() == 0
    assert rig.of_shards("taken") == {}
    assert rig.of_shards("due") == {}
