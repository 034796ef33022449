"""Stories from seeds: in each of them all guarantees hold, and builds that are broken on purpose are found."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos import broken
from tests.mutants import MUTATIONS
from tests.simulation.__main__ import BEGIN, END, GUARANTEES, OUT_OF_REACH, faults_in_reach

#: Seconds for all that one test tells, on a machine that is busy with much else.
PATIENCE = 1500.0
#: What was judged wrongly once: payloads that are pushed again after they were performed.
KNOWN = ("125-125", "136-136")
#: Broken build of `tests/chaos/broken.py` -> stories within which it is found: several times as many as it took.
FOUND_WITHIN = {
    "fencing": 10,
    "restore": 10,
    "order": 10,
    "push_twice": 20,
    "claims": 10,
    "fence": 10,
    "late_reports": 40,
    "leak": 10,
    "schedules": 10,
}


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    root = Path(__file__).parents[2]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=PATIENCE, check=False)


@pytest.mark.timeout(PATIENCE)
def test_guarantees_hold_in_stories_from_seeds() -> None:
    ended = simulate("--seeds", "16", "--jobs", "1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.startswith("16 stories"), ended.stdout


@pytest.mark.timeout(PATIENCE)
def test_a_seed_tells_the_same_story_each_time() -> None:
    one, other = (simulate("--seed", "1") for _ in range(2))
    assert one.returncode == 0, one.stdout + one.stderr
    assert one.stdout == other.stdout
    assert "fault 1:" in one.stdout


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE)
def test_the_story_of_a_failure_is_shortened() -> None:
    ended = simulate("--seed", "1", "--break", "restore", "--shrink")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "it takes the faults" in ended.stdout


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE)
def test_guarantees_hold_in_many_stories() -> None:
    for seeds in ("16-59", *KNOWN):
        ended = simulate("--seeds", seeds, "--jobs", "1")
        assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_table_of_faults_names_what_there_is() -> None:
    """A fault that went or got another name goes from the documentation, and from those that no story reaches."""
    names = {*broken.BUILDS, *(mutation.name for mutation in MUTATIONS)}
    assert names >= OUT_OF_REACH
    page = GUARANTEES.read_text(encoding="utf-8")
    rows = page.partition(BEGIN)[2].partition(END)[0].splitlines()[4:]
    assert {row.split("|")[1].strip() for row in rows if row} <= faults_in_reach().keys()


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize("build", FOUND_WITHIN)
def test_a_broken_build_is_found(build: str) -> None:
    ended = simulate("--seeds", str(FOUND_WITHIN[build]), "--jobs", "1", "--break", build, "--until-found")
    assert ended.returncode == 0, ended.stdout + ended.stderr
