"""A queue gets another number of shards while nodes, consumers and producers are at work: nothing is lost, no id is
performed out of order or twice at a time. Who is killed meanwhile is in the fault matrix.
"""

import pytest
from click.testing import CliRunner

from lowq.cli import main
from tests.processes.conftest import MakeRig


@pytest.mark.threads_only
@pytest.mark.timeout(600)  # on a busy machine more is pushed meanwhile than is judged in the usual time
def test_a_queue_is_resharded_under_load(make_rig: MakeRig) -> None:
    rig = make_rig(ORDERS_SHARDS=6, ORDERS_BATCH=5, ORDERS_WORK=0.002)
    for kind in ({}, {"ORDERS_ASYNC": "1"}, {"ORDERS_CONSUMER": "1"}):
        rig.node(**kind).says(" starts")
    finish = rig.produce(1, ids=20, versions=2, rounds=0, pause=0.1)
    rig.performed(30)
    for shards_count in (12, 5):
        done = CliRunner().invoke(main, ["reshard", "Orders", str(shards_count), "--redis-url", rig.url])
        assert done.exit_code == 0, done.output
        rig.resharded(shards_count)
        rig.performed(len(rig.events("end")) + 30)
    finish()
    rig.drained()
    assert rig.report().problems == []
    assert {info.epoch for info in rig.app.shards("Orders")} == {2}
