"""Nodes that share the shards: joining, leaving, dying, freezing; and who serves what."""

import signal
import time
from collections import Counter
from pathlib import Path

import pytest

import lowq
from tests.integration.conftest import MakeRig
from tests.integration.support import NEVER, PATIENCE, NodeProcess, Rig, id_of_shard, until

#: Seconds of a lease that no living node is late for, on a busy machine either: nobody else's lease may run out.
LONG_TTL = 5


def share(rig: Rig, *nodes: NodeProcess, timeout: float = PATIENCE) -> None:
    """Waits until these nodes hold all shards, evenly to within one."""

    def even() -> bool:
        each = [node.held() for node in nodes]
        return sum(each) == rig.shards_count and max(each) - min(each) <= 1

    until(even, f"even shares of {len(nodes)} nodes", timeout)


def owner_of(rig: Rig, shard: int, nodes: list[NodeProcess]) -> NodeProcess:
    token = rig.of_shards("lease")[shard]
    return next(node for node in nodes if token.startswith(node.nonce))


def nodes_of(rig: Rig, count: int, **environment: object) -> list[NodeProcess]:
    nodes = [rig.node(**environment) for _ in range(count)]
    for node in nodes:
        node.says(" starts: ")
    share(rig, *nodes)
    return nodes


# --- coming and going ---


def test_nodes_that_join_and_leave_under_load_hand_over_and_repeat_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(LOWQ_LEASE_TTL=15, ORDERS_SHARDS=24, ORDERS_WORK=0.001)
    nodes = nodes_of(rig, 1)
    finished = rig.produce(2, ids=50, versions=3, rounds=0, pause=0.1)
    for _ in range(3):
        nodes.append(rig.node())
        nodes[-1].says(" starts: ")
        share(rig, *nodes)
    while len(nodes) > 1:
        rig.performed(len(rig.events("end")) + 50)
        assert nodes.pop(0).stop() == 0
        share(rig, *nodes)
    finished()
    rig.drained()
    assert nodes[0].stop() == 0
    report = rig.report()
    assert report.problems == []
    assert report.fenced == []
    assert report.repeats == 0
    assert len({perform.pid for perform in rig.performs()}) == 4
    assert rig.merged("crashes") == {}
    assert rig.of_shards("lease") == {}
    assert rig.client.hgetall("lowq:v1:nodes") == {}


def test_a_shard_that_is_given_up_is_worked_by_the_next_owner_at_once(make_rig: MakeRig) -> None:
    rig = make_rig(LOWQ_LEASE_TTL=NEVER, LOWQ_POLL_INTERVAL=NEVER, ORDERS_SHARDS=5)
    nodes = nodes_of(rig, 1)
    # Every thread performs a job while the second node joins, and behind each job another one waits.
    for shard in range(5):
        rig.push(id_of_shard(shard, 5), 1, do="wait")
    until(lambda: len(rig.events("start")) == 5, "work of every thread")
    for shard in range(5):
        rig.push(id_of_shard(shard, 5), 2)
    nodes.append(rig.node())
    nodes[1].says("standing by for")
    until(lambda: [*nodes[0].lines("held: 5, wanted: 3"), *nodes[0].lines("held: 5, wanted: 2")], "word of the second")
    assert nodes[1].held() == 0  # nothing is given up in the middle of a batch
    Path(f"{rig.history.path}.go").touch()
    rig.drained()
    share(rig, *nodes)
    handovers = []
    for shard in range(5):
        first, second = rig.performs(id_of_shard(shard, 5))
        if first.pid != second.pid:
            handovers.append(second.start - first.end)
    assert len(handovers) in (2, 3)
    assert min(handovers) > 0
    report = rig.report()
    assert (report.problems, report.repeats) == ([], 0)


def test_a_node_that_stops_while_it_performs_keeps_nobody_else_waiting(make_rig: MakeRig) -> None:
    rig = make_rig(LOWQ_LEASE_TTL=15, ORDERS_SHARDS=10)
    first, second = nodes = nodes_of(rig, 2)
    shards = [shard for shard in range(10) if owner_of(rig, shard, nodes) is first]
    busy, resting = (id_of_shard(shard, 10) for shard in shards[:2])
    rig.push(busy, 1, do="wait")
    rig.begun(busy, 1)
    first.signal(signal.SIGTERM)
    first.says(" stops")
    rig.push(resting, 1)
    rig.push(busy, 2)
    assert rig.done(resting, 1).pid == second.pid
    assert rig.performs(busy, 1)[0].ok is None  # still running
    Path(f"{rig.history.path}.go").touch()
    assert first.wait() == 0
    assert rig.done(busy, 2).pid == second.pid
    share(rig, second)
    report = rig.report()
    assert (report.problems, report.repeats, report.fenced) == ([], 0, [])


def test_a_node_that_retires_ends_when_it_has_finished_however_long_that_takes(make_rig: MakeRig) -> None:
    rig = make_rig(LOWQ_LEASE_TTL=15, LOWQ_SHUTDOWN_TIMEOUT=0.2, ORDERS_SHARDS=4)
    old = nodes_of(rig, 1)[0]
    rig.push("a", 1, do="wait")
    rig.begun("a", 1)
    new = rig.node()
    old.signal(signal.SIGUSR2)
    old.says(" drains")
    rig.push("a", 2)
    times_out_at = time.monotonic() + 0.2
    until(lambda: time.monotonic() > times_out_at + 0.5, "a moment past the timeout")
    assert old.process.poll() is None
    Path(f"{rig.history.path}.go").touch()
    assert old.wait() == 0
    assert (rig.done("a", 1).pid, rig.done("a", 2).pid) == (old.pid, new.pid)
    share(rig, new)
    report = rig.report()
    assert (report.problems, report.repeats, report.fenced) == ([], 0, [])


def test_an_idle_node_that_retires_ends_at_once(make_rig: MakeRig) -> None:
    rig = make_rig()
    node = nodes_of(rig, 1)[0]
    node.signal(signal.SIGUSR2)
    assert node.wait() == 0
    assert rig.of_shards("lease") == {}


# --- dying and freezing ---


@pytest.mark.parametrize("prefetch", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_the_shards_of_one_of_three_nodes_that_is_killed_work_again_soon(make_rig: MakeRig, prefetch: int) -> None:
    rig = make_rig(
        ORDERS_SHARDS=12, ORDERS_WORK=0.001, ORDERS_PREFETCH=prefetch, ORDERS_MAX_CRASHES=1000, LOWQ_LEASE_TTL=LONG_TTL
    )
    nodes = nodes_of(rig, 3)
    finished = rig.produce(2, ids=60, versions=3, rounds=0, pause=0.1)
    rig.performed(200)
    victim = nodes[1]
    shards = {shard for shard in range(12) if owner_of(rig, shard, nodes) is victim}
    victim.kill()
    killed_at = time.monotonic()

    def starts() -> dict[int, float]:
        """When each of its shards was worked first by somebody else."""
        later = [perform for perform in rig.performs() if perform.start > killed_at and perform.shard in shards]
        return {perform.shard: perform.start for perform in reversed(later)}

    until(lambda: starts().keys() == shards, "work of its shards")
    share(rig, nodes[0], nodes[2])
    finished()
    rig.drained()
    report = rig.report()
    assert (report.problems, report.fenced) == ([], [])
    assert rig.merged("crashes") == {}


@pytest.mark.slow
def test_a_frozen_node_comes_back_as_a_healthy_member(make_rig: MakeRig) -> None:
    rig = make_rig(ORDERS_SHARDS=9, ORDERS_BATCH=3, LOWQ_LEASE_TTL=2)  # a busy machine must not freeze the others, too
    nodes = nodes_of(rig, 3)
    frozen = nodes[0]
    shard = next(shard for shard in range(9) if owner_of(rig, shard, nodes) is frozen)
    job_id = id_of_shard(shard, 9)
    rig.push(job_id, 1, do="wait")
    rig.begun(job_id, 1)
    frozen.freeze()
    share(rig, *nodes[1:])
    again = rig.begun(job_id, 1, times=2)[-1]
    assert again.pid != frozen.pid
    Path(f"{rig.history.path}.go").touch()
    frozen.signal(signal.SIGCONT)
    frozen.says("the lease was lost")
    share(rig, *nodes)
    rig.push(job_id, 2)
    assert rig.done(job_id, 2).fence > rig.performs(job_id, 1)[0].fence
    rig.drained()
    assert [node.stop() for node in nodes] == [0, 0, 0]
    assert rig.report().problems == []
    assert rig.merged("crashes") == {}


@pytest.mark.slow
def test_nodes_find_each_other_again_when_the_registry_is_lost(make_rig: MakeRig) -> None:
    rig = make_rig(ORDERS_SHARDS=10)
    nodes = nodes_of(rig, 2)
    rig.client.delete("lowq:v1:nodes")
    nodes.append(rig.node())
    nodes[-1].says(" starts: ")
    share(rig, *nodes)


def test_announcements_that_are_lost_are_made_up_for_by_the_next_heartbeat(make_rig: MakeRig) -> None:
    rig = make_rig(ORDERS_SHARDS=10)
    first = nodes_of(rig, 1)[0]
    # A node that is in the registry and that nobody was told of.
    entry = '{"queues": {"Orders": 10}}'

    def half_is_given_up() -> bool:
        now = rig.client.time()[0]
        rig.client.hset("lowq:v1:nodes", "ghost:1:abcdef", f"{now} 3 {len(entry)} {entry}{{}}")
        return first.held() == 5

    until(half_is_given_up, "half of the shards given up")
    # It never says a word again, so it is dead after its three seconds.
    until(lambda: first.held() == 10, "all shards again")


# --- who serves what ---


def nothing(payloads_by_id: dict[str, list[object]]) -> None:
    """A worker's function."""


def test_nodes_with_different_queues_share_what_both_serve(redis_url: str) -> None:
    apps = [lowq.Lowq(redis_url=redis_url) for _ in range(2)]
    for app in apps:
        for name in ("Orders", "Mails"):
            app.worker(queue_name=name, shards_count=6)(nothing)
    everything, mails = nodes = [lowq.Node(apps[0]), lowq.Node(apps[1], queues=["Mails"])]
    for node in nodes:
        node.start()
    try:

        def held() -> dict[str, dict[str, int]]:
            return {info.name: {queue: len(of) for queue, of in info.shards.items()} for info in apps[0].nodes()}

        until(lambda: held() == {everything.name: {"Orders": 6, "Mails": 3}, mails.name: {"Mails": 3}}, "fair shares")
        mails.stop()
        until(lambda: held() == {everything.name: {"Orders": 6, "Mails": 6}}, "all shards again")
    finally:
        for node in nodes:
            node.stop()


def test_each_node_has_its_own_threads_share_in_the_work(make_rig: MakeRig) -> None:
    rig = make_rig(ORDERS_SHARDS=12, ORDERS_WORK=0.01, LOWQ_LEASE_TTL=15)  # no node is late: it keeps its shards
    nodes = nodes_of(rig, 3)
    for number in range(300):
        rig.push(number, 1)
    rig.drained()
    each = Counter(perform.pid for perform in rig.performs())
    assert set(each) == {node.pid for node in nodes}
    assert min(each.values()) > 50
