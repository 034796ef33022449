"""A queue gets another number of shards while nodes and producers are at work: nothing is lost, no id is performed
out of order or twice at a time, whoever is killed.
"""

import random
import signal
import subprocess
import sys

import pytest

from tests.checker import Report
from tests.integration.conftest import MakeRig
from tests.integration.support import ROOT, Rig


def reshard(rig: Rig, shards_count: int, *, wait: bool = True) -> "subprocess.Popen[bytes]":
    """``lowq reshard`` in a process of its own."""
    command = [sys.executable, "-m", "lowq", "reshard", "Orders", str(shards_count)]
    process = subprocess.Popen(
        command, cwd=ROOT, env=rig.environment({}), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    if wait:
        assert process.wait(120) == 0
    return process


def judged(rig: Rig) -> Report:
    rig.drained(120)
    report = rig.report()
    assert report.problems == []
    return report


@pytest.mark.timeout(1200)  # on a busy machine more is pushed meanwhile than is judged in the usual time
@pytest.mark.parametrize("environment", [{}, {"ORDERS_ASYNC": "1"}, {"ORDERS_CONSUMER": "mixed"}])
def test_a_queue_is_resharded_under_load(make_rig: MakeRig, environment: dict[str, str]) -> None:
    rig = make_rig(ORDERS_SHARDS=12, ORDERS_BATCH=5, ORDERS_WORK=0.002, **environment)
    nodes = [rig.node() for _ in range(3)]
    for node in nodes:
        node.says(" starts")
    finish = rig.produce(2, ids=40, versions=2, rounds=0, pause=0.01)
    rig.performed(50)
    for shards_count in (24, 7):
        reshard(rig, shards_count)
        rig.resharded(shards_count)
        before = len(rig.events("end"))
        rig.performed(before + 200)
    finish()
    assert judged(rig).accepted > 1000
    assert {info.epoch for info in rig.app.shards("Orders")} == {2}


def kill_and_begin_anew(rig: Rig, shards_count: int, chance: random.Random, kills: int) -> None:
    for _ in range(kills):
        process = reshard(rig, shards_count, wait=False)
        try:
            process.wait(chance.uniform(0.2, 1.2))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
    reshard(rig, shards_count)


@pytest.mark.parametrize("seed", range(2))
def test_a_mover_that_is_killed_is_gone_on_with(make_rig: MakeRig, seed: int) -> None:
    chance = random.Random(seed)
    rig = make_rig(ORDERS_SHARDS=12, ORDERS_BATCH=5, ORDERS_WORK=0.002)
    nodes = [rig.node() for _ in range(2)]
    for node in nodes:
        node.says(" starts")
    rig.push("late", 1, delay=3600)
    finish = rig.produce(2, ids=40, versions=2, rounds=0, pause=0.01)
    rig.performed(50)
    for shards_count in (24, 7):
        kill_and_begin_anew(rig, shards_count, chance, 4)
        rig.resharded(shards_count)
        nodes.pop(0).kill()
        nodes.append(rig.node())
    finish()
    rig.app.queue("Orders").perform_now("late")
    judged(rig)
