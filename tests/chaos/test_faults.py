"""A short version of the matrix: some faults under a small load. The full one is `make chaos`."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos import clocks
from tests.chaos.faults import BY_NAME
from tests.chaos.stage import Outcome, run
from tests.checker import FAST

#: Fault -> seconds of load.
SHORT = {
    "kill": 3.0,
    "boundaries": 4.0,
    "freeze": 2.5,
    "gil": 2.0,
    "membership": 2.5,
    "redis-kill": 2.0,
    "lost-replies": 2.0,
    "cut-off": 2.0,
    "memory-full": 2.0,
    "clocks": 2.0,
}


def short_run(name: str, seconds: float, folder: Path, persistence: str, *, broken: str = "", seed: int = 1) -> Outcome:
    fault = BY_NAME[name]
    fault = replace(fault, load=replace(fault.load, seconds=seconds, ids=400))
    return run(fault, seed, persistence, folder=folder, broken=broken)


@pytest.mark.parametrize("name", SHORT)
def test_no_fault_loses_work_or_order(name: str, tmp_path: Path) -> None:
    if BY_NAME[name].clocks and not clocks.available():
        pytest.skip("clocks can only be made wrong on Linux with a C compiler")
    outcome = short_run(name, SHORT[name], tmp_path, BY_NAME[name].persistence[-1])
    assert outcome.problems == []
    assert outcome.report.performed > 500
    assert outcome.harm or not BY_NAME[name].steps(1)
