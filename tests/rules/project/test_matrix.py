"""What `make test-matrix` finds, plans and runs, and what its table and exit code say."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import matrix
from tests.debian import PYTHON, SERVERS
from tests.matrix import TESTS, Environment, Interpreter, Result, Run, ask, candidates, newest, plan, published

NINE = Interpreter((3, 12, 9), "/a/python3")
TEN = Interpreter((3, 12, 10), "/b/python3")
NEXT = Interpreter((3, 13, 0), "/c/python3")
NEWEST = Interpreter((3, 14, 1), "/d/python3.14")


def program(path: Path, says: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{says}\n")
    path.chmod(0o755)
    return path


def test_the_newest_of_each_supported_python_that_is_found_is_taken(tmp_path: Path) -> None:
    on_path = program(tmp_path / "bin" / "python3.12", "true")
    uv = program(tmp_path / ".local/share/uv/python" / "cpython-3.14" / "bin" / "python3", "true")
    assert list(candidates({"PATH": str(tmp_path / "bin")}, tmp_path)) == [on_path, uv]
    assert ask(Path(sys.executable)) == Interpreter(sys.version_info[:3], sys.executable)
    for says in ("echo 3 10 13 final cpython 0", "echo 3 14 0 alpha cpython 0", "echo 3 11 9 final pypy 0", "exit 127"):
        assert ask(program(tmp_path / "python3.13", says)) is None, says
    assert newest([NEXT, None, TEN, NINE, Interpreter(TEN.version, "/z/python3")]) == {"3.12": TEN, "3.13": NEXT}


def test_all_parts_are_planned_on_files_that_are_there() -> None:
    runs = plan(matrix.PARTS, [TEN, NEXT], ["/8/redis-server"])
    assert {run.part for run in runs} == set(matrix.PARTS)
    assert [str(run.environment) for run in runs if run.part in ("python", "redis-py")] == [
        "3.12.10", "3.13.0", "3.12.10 redis==6.0.*",
    ]  # fmt: skip
    assert [run.variables for run in runs if run.part == "resp3"] == [{"REDIS_PROTOCOL": "3"}]
    assert [(run.part, run.server) for run in runs if run.part in ("servers", "tls")] == [
        ("servers", "/8/redis-server"), ("tls", ""), ("tls", "/8/redis-server"),
    ]  # fmt: skip
    assert all((matrix.ROOT / word).exists() for run in runs for word in run.tests if word.startswith("tests/"))
    assert all(Path(run.variables.get("PYTHONPATH", "/")).is_dir() for run in runs)


EMPTY_PAGE = "a\n<!-- versions tested: begin -->\n<!-- versions tested: end -->\nz\n"


def a_row(
    summary: str, part: str = "python", *, passed: bool = True, server: str = "Redis 7.0.15", tests: Sequence[str] = ()
) -> tuple[str, ...]:
    run = Run(part, Environment(TEN), tests or TESTS[part])
    return matrix.row(Result(run, passed, summary, "8.1.0", server), "2026-01-01")


def rows_of(page: str) -> list[tuple[str, str]]:
    """Part and result."""
    return [(cells[0], cells[5]) for cells in matrix.rows_of(page)]


def test_a_row_replaces_the_one_of_the_same_versions_and_the_others_stay() -> None:
    page = published(EMPTY_PAGE, [a_row("5 passed", "rights"), a_row("6 passed")])
    assert published(page, [a_row("7 passed in 2.5s (0:01:02)")]).splitlines()[5:7] == [
        "| python | 3.12.10 | 8.1.0 | Redis 7.0.15 | rules | passed: 7 passed | 2026-01-01 |",
        "| rights | 3.12.10 | 8.1.0 | Redis 7.0.15 | processes/project/test_rights | passed: 5 passed | 2026-01-01 |",
    ]


def test_what_failed_or_is_no_run_of_the_matrix_has_no_row_and_is_named() -> None:
    page = published(EMPTY_PAGE, [a_row("5 passed", "tls"), a_row("6 passed"), a_row("7 passed", "processes")])
    page = published(page, [a_row("1 failed", passed=False), a_row("3 passed", tests=["tests/rules", "-k", "push"])])
    assert rows_of(page) == [("processes", "passed: 7 passed"), ("tls", "passed: 5 passed")]
    assert "Without a row: python 3.11, python 3.12, python 3.13, python 3.14, processes 3.11, " in page
    assert "servers valkey-9, servers redis-8.0," in page
    assert "servers valkey-9" not in published(page, [a_row("8 passed", "servers", server="Valkey 9.1.2")])
    outdated = page.replace("processes/store/test_connections", "integration/test_connections")
    assert rows_of(published(outdated, [])) == [("processes", "passed: 7 passed")]


def test_the_page_has_the_rows_that_would_be_published_today() -> None:
    page = matrix.PAGE.read_text()
    assert published(page, []) == page


def test_it_runs_what_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    says = 'if [ "$1" = -c ]; then echo 8.1.0; else echo $REDIS_PROTOCOL $*; echo 3 passed in 1s; fi'
    python = program(tmp_path / "python", says)
    server = program(tmp_path / "valkey-server", "echo Valkey server v=9.1.2 sha=0")
    monkeypatch.setattr(matrix, "candidates", lambda *_: [TEN, NEXT])
    monkeypatch.setattr(matrix, "ask", lambda found: found)
    packaged = {PYTHON: NEWEST, SERVERS[0]: server}
    monkeypatch.setattr(
        matrix,
        "find_packaged",
        lambda wanted: ([packaged[each] for each in wanted if each in packaged], ["valkey-8: no network"]),
    )
    monkeypatch.setattr(matrix, "prepare", lambda _: python)
    asked = ["--only", "servers,resp3", "--versions", "3.13", "--jobs", "3", "--args", "-x -k 'push or take'"]
    assert matrix.main(asked) == 0
    said = capsys.readouterr().out
    tests = "tests/rules tests/processes/store -m redis and not slow"
    options = f"-m pytest -q -n 3 -m not slow {tests} -x -k push or take"
    assert f" {options}\n3 passed" in said
    assert f"3 {options}\n3 passed" in said
    rows = [line.split()[:2] for line in said.splitlines() if line.endswith("passed: 3 passed")]
    assert rows == [["servers", "3.13.0"], ["resp3", "3.13.0"]]
    assert "Valkey 9.1.2" in said
    assert "could not be had: valkey-8: no network" in said
    assert matrix.main(["--only", "python"]) == 0
    assert "python  3.14.1 " in capsys.readouterr().out
    assert matrix.main(["--versions", "3.13,3.15"]) == 1
    assert "could not be had: Python 3.15" in capsys.readouterr().out
    program(tmp_path / "python", "exit 1")
    assert matrix.main(["--only", "resp3"]) == 1
    assert "could not be prepared" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        matrix.main(["--only", "server"])
