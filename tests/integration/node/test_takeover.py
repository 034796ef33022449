"""Two nodes and one set of shards: standing by, taking over, crashes, frozen and replaced owners, poison."""

import signal
from pathlib import Path

import pytest

from tests.integration.conftest import MakeRig
from tests.integration.support import NEVER, TTL, NodeProcess, Rig, until

#: Seconds of a lease that no living node is late for, on a busy machine either: nobody else's lease may run out.
LONG_TTL = 5


def owner_and_standby(rig: Rig) -> tuple[NodeProcess, NodeProcess]:
    rig.settings["ORDERS_SPLITTER"] = "all"
    owner = rig.node().holds_all()
    return owner, rig.node().stands_by()


def at_work(rig: Rig, node: NodeProcess) -> None:
    """Waits until the node has performed quite some jobs."""
    until(lambda: sum(perform.pid == node.pid for perform in rig.performs()) > 100, "work of that node")


# --- an orderly change ---


def test_a_second_node_stands_by_and_takes_over_at_once(make_rig: MakeRig) -> None:
    rig = make_rig(LOWQ_LEASE_TTL=NEVER)  # whoever waits for a lease to run out waits in vain
    owner, standby = owner_and_standby(rig)
    for job_id in range(20):
        rig.push(job_id, 1)
    rig.drained()
    assert {perform.pid for perform in rig.performs()} == {owner.pid}
    assert owner.stop() == 0
    standby.holds_all()
    rig.push("after", 1)
    assert rig.done("after", 1).pid == standby.pid
    assert rig.report().problems == []


@pytest.mark.slow
def test_nodes_come_and_go_under_load(make_rig: MakeRig) -> None:
    rig = make_rig(LOWQ_LEASE_TTL=15, ORDERS_SPLITTER="all", ORDERS_WORK=0.001)
    nodes = [rig.node().holds_all()]
    finished = rig.produce(2, ids=30, versions=3, rounds=0, pause=0.1)
    for _ in range(3):
        nodes.append(rig.node().stands_by())
        at_work(rig, nodes[-2])
        assert nodes[-2].stop() == 0
    finished()
    rig.drained()
    assert nodes[-1].stop() == 0
    assert rig.of_shards("lease") == {}
    report = rig.report()
    assert report.problems == []
    assert report.fenced == []
    assert report.repeats == 0
    assert {perform.pid for perform in rig.performs()} >= {node.pid for node in nodes[:-1]}
    assert rig.merged("crashes") == {}


@pytest.mark.parametrize("work", ["sleep", pytest.param("spin", marks=pytest.mark.slow)])
def test_handlers_that_take_longer_than_the_lease_keep_it(make_rig: MakeRig, work: str) -> None:
    rig = make_rig(LOWQ_LEASE_TTL=LONG_TTL)
    owner, standby = owner_and_standby(rig)
    for job_id in range(5):
        rig.push(job_id, 1, do=work, for_=1.5 * LONG_TTL)
    rig.drained()
    assert {perform.pid for perform in rig.performs()} == {owner.pid}
    assert [standby.stop(), owner.stop()] == [0, 0]
    report = rig.report()
    assert report.problems == []
    assert report.repeats == 0


@pytest.mark.slow
def test_nodes_that_go_quiet_under_load_hand_over_in_order(make_rig: MakeRig) -> None:
    rig = make_rig(LOWQ_LEASE_TTL=15, ORDERS_SHARDS=20, ORDERS_WORK=0.001)
    nodes = [rig.node().holds_all()]
    finished = rig.produce(2, ids=30, versions=3, rounds=0, pause=0.1)
    for _ in range(3):
        at_work(rig, nodes[-1])
        nodes[-1].signal(signal.SIGTSTP)
        nodes.append(rig.node().holds_all())
    finished()
    rig.drained()
    assert [node.stop() for node in nodes] == [0, 0, 0, 0]
    report = rig.report()
    assert report.problems == []
    assert report.fenced == []
    assert report.repeats == 0


# --- crashes ---


@pytest.mark.parametrize("prefetch", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_after_a_kill_another_node_takes_over_and_nothing_is_lost(make_rig: MakeRig, prefetch: int) -> None:
    rig = make_rig(
        ORDERS_WORK=0.001, ORDERS_BATCH=5, ORDERS_PREFETCH=prefetch, ORDERS_MAX_CRASHES=1000, LOWQ_LEASE_TTL=LONG_TTL
    )
    owner, standby = owner_and_standby(rig)
    finished = rig.produce(2, ids=50, versions=3, rounds=0, pause=0.1)
    rig.performed(200)
    owner.kill()
    until(lambda: rig.performs()[-1].pid == standby.pid, "work of the standby")
    finished()
    rig.drained()
    assert standby.stop() == 0
    report = rig.report()
    assert report.problems == []
    assert report.fenced == []
    assert rig.merged("crashes") == {}  # successes cleared them


def test_a_crash_in_the_middle_of_a_batch_repeats_the_batch_in_order(make_rig: MakeRig) -> None:
    rig = make_rig(ORDERS_SHARDS=1, ORDERS_BATCH=10)
    for version in (3, 1, 2):
        rig.push("a", version, do="sleep", for_=20 if version == 2 else 0.0, once=True)
    rig.push("b", 1)
    owner, standby = owner_and_standby(rig)
    rig.begun("a", 2)
    rig.push("a", 4)
    owner.kill()
    again = rig.done("a", 2)
    assert (again.pid, again.jobs) == (standby.pid, {"a": [1, 2, 3, 4]})
    rig.done("b", 1)
    report = rig.report()
    assert report.problems == []
    assert report.repeats == 4


def test_a_poisonous_job_is_buried_and_its_neighbours_survive(make_rig: MakeRig) -> None:
    rig = make_rig(LOWQ_LEASE_TTL=1.5, ORDERS_SHARDS=1, ORDERS_BATCH=10, ORDERS_MAX_CRASHES=3)
    rig.push("healthy", 1, do="sleep", for_=0.01)
    rig.push("poison", 1, do="die")
    for _ in range(3):
        node = rig.node()
        assert node.wait() == 9
    node = rig.node()
    assert "'poison' is buried as poison" in node.says("poison")
    rig.done("healthy", 1)
    rig.drained()
    assert rig.buried() == {("poison", 1)}
    assert rig.merged("crashes") == {}
    assert len(rig.performs("poison")) == 3
    assert len(rig.performs("healthy")) == 2  # with the poison, then alone
    assert "poison: its process died, or its batch exceeded ttr, 3 times" in rig.merged("morgue:errors")["poison"]
    assert node.stop() == 0
    assert rig.report().problems == []


# --- frozen owners ---


def refused_and_healthy(rig: Rig, old: NodeProcess, new: NodeProcess) -> None:
    """The old owner's writes were refused; it stands by, and takes over when the new one stops."""
    old.says("the lease was lost")
    rig.drained()
    report = rig.report()
    assert report.problems == []
    assert report.fenced
    assert {(a.pid, b.pid) for a, b in report.fenced} == {(old.pid, new.pid)}
    assert new.held() == rig.shards_count
    assert new.stop() == 0
    old.holds_all()
    rig.push("afterwards", 1)
    assert rig.done("afterwards", 1).pid == old.pid
    assert rig.merged("crashes") == {}
    assert old.stop() == 0
    assert rig.report().problems == []


def test_a_node_stopped_past_its_lease_is_refused_and_stands_by(make_rig: MakeRig) -> None:
    rig = make_rig()
    owner, standby = owner_and_standby(rig)
    rig.push("a", 1, do="wait", once=True)
    rig.begun("a", 1)
    rig.push("a", 2)
    owner.freeze()
    assert rig.done("a", 2).pid == standby.pid
    Path(f"{rig.history.path}.go").touch()
    owner.thaw()
    refused_and_healthy(rig, owner, standby)
    assert rig.performs("a")[-1].jobs == {"a": [1, 2]}


def test_a_node_whose_handler_holds_the_gil_past_its_lease_is_refused_and_stands_by(make_rig: MakeRig) -> None:
    rig = make_rig()
    owner, standby = owner_and_standby(rig)
    rig.push("greedy", 1, do="hold", for_=2 * TTL + 1, once=True)
    rig.begun("greedy", 1)
    rig.push("greedy", 2)
    assert rig.done("greedy", 2).pid == standby.pid
    warning = owner.says("the maintenance loop ran ")
    assert "ids greedy" in warning
    refused_and_healthy(rig, owner, standby)


def test_a_stopped_node_that_nobody_replaced_goes_on_where_it_was(make_rig: MakeRig) -> None:
    rig = make_rig()
    node = rig.node().holds_all()
    rig.push("a", 1, do="wait")
    (perform,) = rig.begun("a", 1)
    node.freeze()
    until(lambda: not rig.of_shards("lease"), "end of the leases")
    rig.push("a", 2)
    Path(f"{rig.history.path}.go").touch()
    node.thaw()
    rig.done("a", 2)
    rig.drained()
    report = rig.report()
    assert report.problems == []
    assert report.fenced == []
    assert {perform.fence for perform in rig.performs()} == {perform.fence}
    assert rig.merged("crashes") == {}
    assert node.stop() == 0


def test_freezing_nodes_in_turn_under_load_loses_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(ORDERS_WORK=0.001, ORDERS_MAX_CRASHES=1000)
    nodes = owner_and_standby(rig)
    finished = rig.produce(2, ids=30, versions=3, rounds=0, pause=0.1)
    for _ in range(3):
        # Whichever it is: on a busy machine an owner may be late with a renewal.
        until(lambda: max(node.held() for node in nodes) == rig.shards_count, "one owner of all")
        owner, other = sorted(nodes, key=NodeProcess.held, reverse=True)
        owner.freeze()
        other.holds_all()
        performs = len(rig.performs())
        until(lambda known=performs: len(rig.performs()) > known + 50, "work of the other")  # type: ignore[misc]
        owner.thaw()
    finished()
    rig.drained()
    assert [node.stop() for node in nodes] == [0, 0]
    assert rig.report().problems == []
    assert rig.merged("crashes") == {}
