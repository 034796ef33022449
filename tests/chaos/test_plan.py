"""What a seed plans, and how the matrix is written."""

import json
from dataclasses import asdict, replace
from itertools import chain, islice
from pathlib import Path

import pytest

from tests.chaos import matrix
from tests.chaos.__main__ import main
from tests.chaos.actions import ACTIONS
from tests.chaos.death import BOUNDARIES
from tests.chaos.faults import BY_NAME, FAULTS
from tests.chaos.load import Load, chunks
from tests.chaos.stage import Outcome
from tests.checker import Report
from tests.rows import case


def pushes(seed: int, producer: int = 0, load: Load | None = None) -> list[list[dict[str, object]]]:
    return list(chunks(seed, producer, load or Load(seconds=1)))


def test_a_seed_plans_the_same_every_time() -> None:
    for fault in FAULTS:
        with case(fault.name):
            steps = fault.steps(1)
            assert (fault.steps(1), fault.deaths(1)) == (steps, fault.deaths(1))
            assert all(step.what in ACTIONS for step in steps)
            assert len(steps) <= 2 or steps != fault.steps(2)


def test_a_seed_pushes_the_same_jobs_every_time_also_where_a_load_went_to_the_producers_as_json() -> None:
    assert pushes(1) != pushes(2)
    load = Load(seconds=1, mix={"raise": (100, 0)})
    sent = Load(**json.loads(json.dumps(asdict(load))))
    assert pushes(1, load=sent) == pushes(1, load=load)


def test_no_two_producers_have_an_id_in_common() -> None:
    seen = [{job["id"] for job in chain.from_iterable(pushes(1, producer))} for producer in range(4)]
    assert not set.intersection(*seen[:2])
    assert sum(map(len, seen)) == len(set.union(*seen))


def test_a_part_of_the_ids_has_no_scores_and_keeps_its_order() -> None:
    jobs = list(chain.from_iterable(pushes(1)))
    unscored = {job["id"] for job in jobs if "score" not in job}
    assert 0 < len(unscored) < len({job["id"] for job in jobs}) / 2
    assert not {job["id"] for job in jobs if "score" in job} & unscored
    for job_id in unscored:
        versions = [job["payload"]["version"] for job in jobs if job["id"] == job_id]  # type: ignore[index]
        assert versions == list(range(1, len(versions) + 1))


def test_versions_of_an_id_grow_from_push_to_push() -> None:
    latest: dict[object, int] = {}
    for chunk in pushes(1):
        versions: dict[object, set[int]] = {}
        for job in chunk:
            versions.setdefault(job["id"], set()).add(job["payload"]["version"])  # type: ignore[index]
        for job_id, those in versions.items():
            assert min(those) == latest.get(job_id, 0) + 1
            latest[job_id] = max(those)


def test_every_boundary_of_a_call_is_died_at() -> None:
    deaths = [death.rpartition(":")[0] for death in BY_NAME["boundaries"].deaths(1)]
    assert sorted(deaths) == sorted(
        f"{script}:{moment}" for script, moments in BOUNDARIES.items() for moment in moments
    )


def outcome(fault: str, persistence: str, report: Report, **more: object) -> Outcome:
    found = Outcome(fault, 1, persistence, report, 1.234, 5, 0, 0, [], 0.0, 0.5, 9.0, [], Path())
    return replace(found, **more)  # type: ignore[arg-type]


def test_the_matrix_has_a_row_for_each_fault_and_durability() -> None:
    lost = Report(accepted=1000, lost=["x", "y"], lapsed=True)
    outcomes = [
        outcome("kill", "none", Report(accepted=1000, repeats=3)),
        outcome("kill", "none", Report(accepted=1000, repeats=4), recovery=1.5),
        outcome("redis-kill", "none", lost),
        outcome("redis-kill", "always", Report(accepted=7)),
    ]
    rows = matrix.table(FAULTS, outcomes)[2:]
    assert rows == [
        "| a node is killed (SIGKILL) |  | 2 | 10 | 2,000 | 0 | 7 | 0 | 0 | 0 | 1.50 |",
        "| Redis is killed and started at once | no | 1 | 5 | 1,000 | 2 by Redis | 0 | 0 | 0 | 0 | 1.23 |",
        "| Redis is killed and started at once | `appendfsync always` | 1 | 5 | 7 | 0 | 0 | 0 | 0 | 0 | 1.23 |",
    ]


def test_the_matrix_replaces_what_stands_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{matrix.BEGIN}\nold\n{matrix.END}\nafter\n")
    matrix.put(page, ["new"])
    assert page.read_text() == f"before\n{matrix.BEGIN}\n\nnew\n\n{matrix.END}\nafter\n"
    page.write_text("no markers\n")
    with pytest.raises(ValueError, match="lacks the lines"):
        matrix.put(page, ["new"])


def test_rows_of_some_faults_come_among_those_that_are_there(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{matrix.BEGIN}\n{matrix.END}\n")
    before = [("kill", "none"), ("stop", "none"), ("redis-kill", "none"), ("redis-kill", "always")]
    rows = matrix.table(FAULTS, [outcome(name, kept, Report()) for name, kept in before])
    matrix.put(page, ["introduction", "", *rows, "", "| what | must be |"])
    again = [
        outcome("stop", "none", Report(), harm=7),
        *(outcome(name, "none", Report()) for name in ("freeze", "capacity")),
    ]
    matrix.put_rows(page, FAULTS, again)
    names = ["kill", "freeze", "stop", "capacity", "redis-kill", "redis-kill"]
    lines = page.read_text().splitlines()
    assert [line.split(" | ")[0][2:] for line in lines[6:-4]] == [BY_NAME[name].title for name in names]
    assert " | 7 | " in lines[8]
    assert lines[2:6] == ["introduction", "", *matrix.table(FAULTS, [])]
    assert lines[-4:] == ["", "| what | must be |", "", matrix.END]


def test_the_page_has_a_place_for_the_matrix() -> None:
    text = (Path(__file__).parents[2] / "docs" / "proof.md").read_text()
    assert text.count(matrix.BEGIN) == text.count(matrix.END) == 1


def test_the_schedule_can_be_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "kill", "--seed", "7", "--schedule"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [f"  {step}" for step in islice(BY_NAME["kill"].steps(7), len(lines))]
    with pytest.raises(SystemExit, match="unknown fault 'kil'"):
        main(["--only", "kil"])
