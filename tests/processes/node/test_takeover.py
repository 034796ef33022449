"""Two nodes and one set of shards: crashes, poison, and owners that were frozen, with and without a successor."""

from pathlib import Path

from tests.processes.conftest import MakeRig
from tests.processes.support import until

#: Seconds of a lease that no living node is late for, on a busy machine either: nobody else's lease may run out.
LONG_TTL = 3


# --- crashes ---


def test_a_poisonous_job_is_buried_and_its_neighbours_survive(make_rig: MakeRig) -> None:
    rig = make_rig(ORDERS_SHARDS=1, ORDERS_BATCH=10, ORDERS_MAX_CRASHES=2)
    rig.push("healthy", 1, do="sleep", for_=0.01)
    rig.push("poison", 1, do="die")
    for _ in range(2):
        assert rig.node().wait() == 9
    node = rig.node()
    assert "'poison' is buried as poison" in node.says("poison")
    rig.done("healthy", 1)
    rig.drained()
    assert rig.buried() == {("poison", 1)}
    assert rig.merged("crashes") == {}
    assert len(rig.performs("poison")) == 2
    assert len(rig.performs("healthy")) == 2  # with the poison, then alone
    assert "poison: its process died, or its batch exceeded ttr, 2 times" in rig.merged("morgue:errors")["poison"]
    assert node.stop() == 0
    assert rig.report().problems == []


# --- frozen owners ---


def test_a_node_stopped_past_its_lease_is_refused_and_stands_by(make_rig: MakeRig) -> None:
    rig = make_rig(LOWQ_LEASE_TTL=LONG_TTL, ORDERS_SPLITTER="all")
    owner = rig.node().holds_all()
    standby = rig.node().stands_by()
    rig.push("a", 1, do="wait", once=True)
    rig.begun("a", 1)
    until(Path(f"{rig.history.path}.once-a-1").exists, "its wait: frozen before that, it would leave it to the standby")
    rig.push("a", 2)
    owner.freeze()
    assert rig.done("a", 2).pid == standby.pid
    Path(f"{rig.history.path}.go").touch()
    owner.thaw()
    owner.says("the lease was lost")
    rig.drained()
    report = rig.report()
    assert report.problems == []
    assert (owner.pid, standby.pid) in {(old.pid, new.pid) for old, new in report.fenced}
    assert rig.performs("a")[-1].jobs == {"a": [1, 2]}
    assert standby.stop() == 0
    owner.holds_all()
    rig.push("afterwards", 1)
    assert rig.done("afterwards", 1).pid == owner.pid
    assert rig.merged("crashes") == {}
    assert owner.stop() == 0


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
    assert {other.pid for other in rig.performs()} == {perform.pid}
    assert rig.performs()[-1].fence > perform.fence, "others may have had the shard meanwhile"
    assert rig.merged("crashes") == {}
    assert node.stop() == 0
