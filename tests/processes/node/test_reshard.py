"""A queue gets another number of shards while nodes, consumers and producers are at work: nothing is lost, no id is
performed out of order or twice at a time. Who is killed meanwhile is in the fault matrix.
"""

import subprocess
import sys

import pytest

from tests.processes.conftest import MakeRig
from tests.processes.support import ROOT


@pytest.mark.threads_only
@pytest.mark.timeout(600)  # on a busy machine more is pushed meanwhile than is judged in the usual time
def test_a_queue_is_resharded_under_load(make_rig: MakeRig) -> None:
    rig = make_rig(ORDERS_SHARDS=6, ORDERS_BATCH=5, ORDERS_WORK=0.002)
    for kind in ({}, {"ORDERS_ASYNC": "1"}, {"ORDERS_CONSUMER": "1"}):
        rig.node(**kind).says(" starts")
    finish = rig.produce(1, ids=40, versions=2, rounds=0, pause=0.1)
    rig.performed(50)
    for shards_count in (12, 5):
        command = [sys.executable, "-m", "lowq", "reshard", "Orders", str(shards_count)]
        subprocess.run(command, cwd=ROOT, env=rig.environment({}), capture_output=True, check=True)
        rig.resharded(shards_count)
        rig.performed(len(rig.events("end")) + 50)
    finish()
    rig.drained()
    assert rig.report().problems == []
    assert {info.epoch for info in rig.app.shards("Orders")} == {2}
