"""Stories from seeds: in each of them all guarantees hold, and builds that are broken on purpose are found."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import broken
from tests.mutants import MUTATIONS
from tests.simulation import __main__ as simulation
from tests.simulation.__main__ import BEGIN, END, OUT_OF_REACH, PAGE, faults_in_reach, find, tell

#: Seconds for all that one test tells, on a machine that is busy with much else.
PATIENCE = 2300.0
#: The seeds of `make test`, and those of `make test-slow`, so many in one test.
OFTEN, SELDOM, EACH = 2, 60, 8
#: What failed once: payloads that are pushed again after they were performed were judged wrongly; reshards that a
#: failover had set back were taken for ended, or waited for nobody, or for an operator who does what he is told.
KNOWN = (125, 136, 707052, 771043, 900152, 1200028, 1200033)
#: Stories in which each of these has to be found: several times as many as it takes.
FOUND_WITHIN = 20
#: Broken build of `tests/chaos/broken.py`, or bug of `tests/mutants.py` -> how the plans of the stories that look for
#: it differ from what is drawn: they have what it takes, and little else. Those of a group share a process.
GROUPS: list[dict[str, dict[str, Any]]] = [
    {
        "fencing": {"faults": ["freeze"], "lease_ttl": 1.0}, "order": {}, "claims": {}, "fence": {},
        "push_twice": {
            "performers": ["threads", "loop"], "producers": [True, False, True], "faults": ["lose messages"],
            "batch_size": 1, "servers": 1,
        },
    },
    {
        "leak": {}, "schedules": {},
        "restore": {"performers": ["threads", "loop"], "faults": ["kill"]},
        "late_reports": {"performers": ["consumer", "consumer"], "faults": [], "ttr": 1.5},
    },
    {
        "revived": {"performers": ["threads", "loop"], "faults": ["cancel"], "ids": 3},
        "a limit forgets whom else it has let in": {"performers": ["threads", "loop"], "faults": [], "calls": 1},
        "a push that comes behind its repeat pushes again": {
            "performers": ["threads", "loop"], "faults": ["repeat messages"], "servers": 1, "pushes": 200,
            "sentinels": 0,
        },
        "replaced": {
            "performers": ["threads", "loop"], "faults": ["isolate"], "servers": 1, "sentinels": 3, "pushes": 200,
        },
        # The other one has the shards of the one that is frozen, Redis loses that, and the first one is back before it.
        "who resumes a lease goes on under its fence": {
            "performers": ["threads", "threads"], "servers": 1, "shards": 4, "sentinels": 0, "pushes": 200, "ids": 20,
            "lease_ttl": 1.0, "lag": 0.0, "ttr": None,
            "faults": [
                fault
                for which, at in ((0, 1.0), (1, 7.0))
                for fault in (
                    {"name": "freeze", "at": at, "which": which, "seconds": 1.6, "steps": 0},
                    {"name": "freeze", "at": at + 1.3, "which": 1 - which, "seconds": 1.0, "steps": 0},
                    {"name": "lose writes", "at": at + 1.35, "which": 0, "seconds": 0.3, "steps": 0},
                )
            ],
        },
    },
]  # fmt: skip


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    root = Path(__file__).parents[2]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=PATIENCE, check=False)


def problems_of(first: int, last: int) -> list[str]:
    return [f"seed {told['seed']}: {problem}" for told in tell(first, last) for problem in told["problems"]]


@pytest.mark.timeout(PATIENCE)
def test_guarantees_hold_in_stories_and_a_seed_tells_the_same_story_each_time() -> None:
    """Whatever its process has told before."""
    last = OFTEN - 1
    with ThreadPoolExecutor(2) as pool:
        told, again = pool.map(lambda first: [*tell(first, last, "--tell")], (0, last))
    assert [(each["seed"], each["problems"]) for each in told] == [(seed, []) for seed in range(OFTEN)]
    assert told[-1] | {"took": again[0]["took"]} == again[0]
    assert any("fault 1:" in line for line in again[0]["log"])


def test_a_failure_is_shortened(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """To the faults that it takes: here two of twenty."""

    def told(_seed: int, *options: str) -> dict[str, Any]:
        left_out = {int(part) for part in options[-1].split(",")} if "--without" in options else set[int]()
        faults = [number for number in range(20) if number not in left_out]
        problems = ["lost"] if {3, 11} <= {*faults} else []
        return {"faults": faults, "problems": problems, "log": [f"fault {each}" for each in faults], "plan": ""}

    monkeypatch.setattr(simulation, "one", told)
    monkeypatch.setattr(sys, "argv", ["simulate", "--seed", "7", "--shrink"])
    assert simulation.main() == 1
    said = capsys.readouterr().out
    assert "it takes the faults [3, 11]; the same without the others: --seed 7 --without 0,1,2,4" in said
    assert said.count("\nfault ") == 2


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize("first", range(OFTEN, SELDOM, EACH))
def test_guarantees_hold_in_many_stories(first: int) -> None:
    assert problems_of(first, min(first + EACH, SELDOM) - 1) == []


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize("seed", KNOWN)
def test_guarantees_hold_where_they_once_did_not(seed: int) -> None:
    assert problems_of(seed, seed) == []


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE)
def test_a_story_of_a_broken_build_is_told_with_all_that_happened() -> None:
    ended = simulate("--seed", "1", "--break", "order")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "fault 1:" in ended.stdout
    ended = simulate("--seeds", "1", "--jobs", "1", "--break", "order", "--until-found")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "seed 0: " in ended.stdout


def test_the_table_of_faults_names_what_there_is() -> None:
    """A fault that went or got another name goes from the documentation, and from those that no story reaches."""
    names = {*broken.BUILDS, *(mutation.name for mutation in MUTATIONS)}
    assert names >= OUT_OF_REACH
    page = PAGE.read_text(encoding="utf-8")
    rows = page.partition(BEGIN)[2].partition(END)[0].splitlines()[4:]
    named = {title for row in rows if row for title in row.split("|")[2].strip().split("; ")}
    assert named, "there is no table"
    assert named <= faults_in_reach().keys()


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize("group", GROUPS, ids="-".join)
def test_broken_builds_are_found(group: dict[str, dict[str, Any]]) -> None:
    found = {each["fault"]: each["found"] for each in find(group, FOUND_WITHIN)}
    assert found.keys() == group.keys()
    assert [name for name, seed in found.items() if seed is None] == []
