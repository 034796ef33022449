"""What `make test-matrix` finds, plans and runs, and what its table and exit code say."""

import sys
from pathlib import Path

import pytest

from tests import matrix
from tests.matrix import Environment, Interpreter, Result, Run, ask, candidates, newest, plan, published

NINE = Interpreter((3, 12, 9), "/a/python3")
TEN = Interpreter((3, 12, 10), "/b/python3")
NEXT = Interpreter((3, 13, 0), "/c/python3")


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
    assert [(run.part, run.server) for run in runs if run.part in ("servers", "tls")] == [
        ("servers", "/8/redis-server"), ("tls", ""), ("tls", "/8/redis-server"),
    ]  # fmt: skip
    assert all((matrix.ROOT / word).exists() for run in runs for word in run.tests if word.startswith("tests/"))
    assert all(Path(run.variables.get("PYTHONPATH", "/")).is_dir() for run in runs)


def test_a_row_replaces_the_one_of_the_same_versions_and_the_others_stay() -> None:
    def row(summary: str, day: str, part: str = "python") -> tuple[str, ...]:
        return matrix.row(Result(Run(part, Environment(TEN)), True, summary, "8.1.0", "Redis 7.0.15"), day)

    page = "a\n<!-- versions tested: begin -->\n<!-- versions tested: end -->\nz\n"
    page = published(page, [row("5 passed", "2026-01-01", "tls"), row("6 passed", "2026-01-01")])
    assert published(page, [row("7 passed in 2.5s (0:01:02)", "2026-01-02")]).splitlines()[5:7] == [
        "| python | 3.12.10 | 8.1.0 | Redis 7.0.15 | rules processes | passed: 7 passed | 2026-01-02 |",
        "| tls | 3.12.10 | 8.1.0 | Redis 7.0.15 | rules processes | passed: 5 passed | 2026-01-01 |",
    ]


def test_it_runs_what_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    says = 'if [ "$1" = -c ]; then echo 8.1.0; else echo $REDIS_PROTOCOL $*; echo 3 passed in 1s; fi'
    python = program(tmp_path / "python", says)
    server = program(tmp_path / "valkey-server", "echo Valkey server v=9.1.2 sha=0")
    monkeypatch.setattr(matrix, "candidates", lambda *_: [TEN, NEXT])
    monkeypatch.setattr(matrix, "ask", lambda found: found)
    monkeypatch.setattr(matrix, "find_servers", lambda: ([str(server)], ["valkey-8: no network"]))
    monkeypatch.setattr(matrix, "prepare", lambda _: python)
    asked = ["--only", "servers,resp3", "--versions", "3.13", "--jobs", "3", "--args", "-x -k 'push or take'"]
    assert matrix.main(asked) == 0
    said = capsys.readouterr().out
    options = "-m pytest -q -n 3 -m not slow tests/rules tests/processes -x -k push or take"
    assert f" {options}\n3 passed" in said
    assert f"3 {options}\n3 passed" in said
    rows = [line.split()[:2] for line in said.splitlines() if line.endswith("passed: 3 passed")]
    assert rows == [["servers", "3.13.0"], ["resp3", "3.13.0"]]
    assert "Valkey 9.1.2" in said
    assert "could not be had: valkey-8: no network" in said
    assert matrix.main(["--versions", "3.13,3.15"]) == 1
    assert "could not be had: Python 3.15" in capsys.readouterr().out
    program(tmp_path / "python", "exit 1")
    assert matrix.main(["--only", "resp3"]) == 1
    assert "could not be prepared" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        matrix.main(["--only", "server"])
