"""A short version of the matrix: some faults under a small load. The full one is `make chaos`, and only that judges how
long anything took.
"""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos import clocks
from tests.chaos.faults import BY_NAME, at
from tests.chaos.stage import run
from tests.tiers import often

#: Fault -> seconds of load.
SHORT = {
    "kill": 2.5,
    "boundaries": 3.0,
    "freeze": 2.5,
    "gil": 2.0,
    "stop": 2.0,
    "membership": 2.0,
    "reload": 3.0,
    "redis-kill": 2.0,
    "redis-read-only": 2.0,
    "lost-replies": 2.0,
    "cut-off": 2.0,
    "memory-full": 2.0,
    "clocks": 2.0,
    "ttr-supervisor": 2.0,
    "ttr-async-supervisor": 2.0,
    "blocked-loop": 2.0,
    "cancel": 2.0,
    "cancel-jobs": 3.0,
    "consumer-kill": 2.5,
    "consumer-freeze": 2.5,
    "consumer-freeze-in-take": 4.0,
    "consumer-poison": 6.0,
    "consumer-detach": 2.0,
    "consumer-ttr": 3.0,
    "consumer-read-only": 2.0,
    "expiry": 3.0,
    "expiry-redis": 3.0,
    "capacity": 2.0,
    "kept": 2.5,
    "limit": 4.0,
    "limit-failover": 4.0,
    "schedule": 5.0,
    "cluster-killed": 4.0,
    "cluster-frozen": 4.0,
    "cluster-cut-off": 4.0,
    "cluster-restarted": 4.0,
    "cluster-slots": 9.0,
    "sentinel-failover": 4.0,
    "sentinel-frozen": 4.0,
    "sentinel-isolated": 4.0,
    "reshard-killed": 3.0,
    "reshard-nodes": 3.0,
    "reshard-redis": 3.0,
    "cluster-reshard": 4.0,
    "cluster-reshard-isolated": 5.0,
    "cluster-reshard-registry": 5.0,
    "dropped": 4.0,
}
#: Those that `make test` does; `make test-slow` does the others.
OFTEN = ("kill",)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kill", "boundaries", "membership", "lost-replies"])
def test_nor_does_it_when_every_trip_takes_one_batch(name: str, tmp_path: Path) -> None:
    found = BY_NAME[name]
    fault = replace(
        found,
        load=replace(found.load, producers=2, ids=400, seconds=2.0),
        settings={**found.settings, "ORDERS_PREFETCH": 0},
        settles=math.inf,
    )
    outcome = run(fault, 2, found.persistence[-1], folder=tmp_path, examine=False)
    assert outcome.problems == []
    assert outcome.report.performed > 300


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_storm_over_consumers_and_nodes_does(seed: int, tmp_path: Path) -> None:
    found = BY_NAME["consumer-storm"]
    fault = replace(found, load=replace(found.load, producers=2, ids=400, seconds=12.0), settles=math.inf)
    outcome = run(fault, seed, folder=tmp_path, examine=False)
    # A link may be cut for longer than a lease: what finished and could not be acknowledged is performed again.
    assert [problem for problem in outcome.problems if " again, finished by " not in problem] == []
    assert outcome.report.performed > 5000
    assert outcome.harm >= len(fault.steps(seed))


@pytest.mark.parametrize("name", often(list(SHORT), OFTEN))
def test_no_fault_loses_work_or_order(name: str, tmp_path: Path) -> None:
    found = BY_NAME[name]
    if found.servers and name not in (
        "cluster-slots",
        "cluster-reshard",
        "cluster-reshard-isolated",
        "cluster-reshard-registry",
    ):  # once
        found = replace(found, plan=at((1.0, found.steps(1)[0].what)))
    if name == "memory-full":  # producers that a busy machine slows down would not fill it in that time
        found = replace(found, plan=at((0.5, "memory_full")))
    if found.servers == "cluster":  # nobody is to be replaced but who is harmed, however long the machine stands still
        found = replace(found, redis={"cluster_node_timeout": "4000", **found.redis})
    if found.clocks and not clocks.available():
        pytest.skip("clocks can only be made wrong on Linux with a C compiler")
    fault = replace(found, load=replace(found.load, producers=2, ids=400, seconds=SHORT[name]), settles=math.inf)
    outcome = run(fault, 1, found.persistence[-1], folder=tmp_path, examine=False)
    problems = outcome.problems
    if name in ("redis-read-only", "consumer-read-only"):
        # Longer than a lease: what finished and could not be acknowledged is performed again, by who resumes the lease.
        problems = [problem for problem in problems if " again, finished by " not in problem]
    assert problems == []
    assert outcome.report.performed > 300
    assert outcome.harm >= len(fault.steps(1))
