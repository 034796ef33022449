"""What `make test-matrix` finds and plans, and what its table and exit code say."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import matrix
from tests.matrix import Environment, Interpreter, Result, Run, ask, candidates, newest, plan, published, report

NINE = Interpreter((3, 12, 9), "/a/python3")
TEN = Interpreter((3, 12, 10), "/b/python3")
NEXT = Interpreter((3, 13, 0), "/c/python3")


def program(path: Path, says: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{says}\n")
    path.chmod(0o755)
    return path


def test_programs_are_looked_for_on_path_and_where_pyenv_and_uv_have_them(tmp_path: Path) -> None:
    on_path = program(tmp_path / "bin" / "python3.12", "true")
    pyenv = program(tmp_path / ".pyenv" / "versions" / "3.13.0" / "bin" / "python3", "true")
    uv = program(tmp_path / ".local/share/uv/python" / "cpython-3.14" / "bin" / "python3", "true")
    assert list(candidates({"PATH": str(tmp_path / "bin")}, tmp_path)) == [on_path, pyenv, uv]


def test_their_folders_can_be_elsewhere(tmp_path: Path) -> None:
    pyenv = program(tmp_path / "py" / "versions" / "3.13.0" / "bin" / "python3", "true")
    uv = program(tmp_path / "uv" / "cpython-3.14" / "bin" / "python3", "true")
    environment = {"PYENV_ROOT": str(tmp_path / "py"), "UV_PYTHON_INSTALL_DIR": str(tmp_path / "uv")}
    assert list(candidates(environment, tmp_path)) == [pyenv, uv]


def test_a_python_says_what_it_is() -> None:
    found = ask(Path(sys.executable))
    assert found == Interpreter(sys.version_info[:3], sys.executable)
    assert str(found) == ".".join(map(str, sys.version_info[:3]))


@pytest.mark.parametrize(
    "says",
    [
        pytest.param("echo 3 10 13 final cpython 0", id="too-old"),
        pytest.param("echo 3 14 0 alpha cpython 0", id="not-final"),
        pytest.param("echo 3 13 0 final cpython 1", id="without-gil"),
        pytest.param("echo 3 11 9 final pypy 0", id="another-implementation"),
        pytest.param("echo pyenv: python3.13: command not found >&2; exit 127", id="shim"),
        pytest.param("echo hello", id="something-else"),
    ],
)
def test_what_is_no_supported_python_is_left_out(tmp_path: Path, says: str) -> None:
    assert ask(program(tmp_path / "python3.13", says)) is None
    assert ask(program(tmp_path / "python3.13", "echo 3 13 0 final cpython 0")) is not None


def test_of_each_version_the_newest_is_taken() -> None:
    assert newest([NEXT, None, TEN, NINE, Interpreter(TEN.version, "/z/python3")]) == {"3.12": TEN, "3.13": NEXT}


def result(summary: str, *, passed: bool = True, part: str = "python", python: Interpreter = TEN) -> Result:
    return Result(Run(part, Environment(python)), passed, summary, "8.1.0", "Redis 7.0.15")


def test_each_run_has_a_line_and_what_could_not_be_had_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    results = [result("7 passed in 1s"), result("1 failed, 6 passed in 2.5s (0:01:02)", passed=False, python=NEXT)]
    assert report(results, ["valkey-9: no network"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "",
        "part    Python   redis-py  server        tests                 result",
        "python  3.12.10  8.1.0     Redis 7.0.15  contract integration  passed: 7 passed",
        "python  3.13.0   8.1.0     Redis 7.0.15  contract integration  FAILED: 1 failed, 6 passed",
        "could not be had: valkey-9: no network",
    ]
    assert report(results[:1], ["valkey-9: no network"]) == 0


def test_nothing_to_run_on_is_a_failure() -> None:
    assert report([], list(matrix.EXPECTED)) == 1


def test_what_is_planned() -> None:
    runs = [
        (run.part, str(run.environment), run.server, *run.tests, *run.variables)
        for run in plan(matrix.PARTS, [TEN, NEXT], ["/8/redis-server"])
    ]
    tiers, both = matrix.TIERS, ("tests/contract", "tests/integration")
    tls, rights = (matrix.CONNECTIONS, "-k", "tls"), (matrix.RIGHTS,)
    assert runs == [
        ("python", "3.12.10", "", *tiers),
        ("python", "3.13.0", "", *tiers),
        ("redis-py", "3.12.10 redis==6.0.*", "", *tiers),
        ("servers", "3.12.10", "/8/redis-server", *both),
        ("hiredis", "3.12.10", "", *both, "PYTHONPATH"),
        ("resp3", "3.12.10", "", *both, "REDIS_PROTOCOL"),
        ("tls", "3.12.10", "", *tls),
        ("tls", "3.12.10", "/8/redis-server", *tls),
        ("rights", "3.12.10", "", *rights),
        ("rights", "3.12.10", "/8/redis-server", *rights),
    ]


def test_the_files_that_are_planned_are_there() -> None:
    runs = plan(matrix.PARTS, [TEN], ["/8/redis-server"])
    assert all((matrix.ROOT / word).exists() for run in runs for word in run.tests if word.startswith("tests/"))
    assert all(Path(run.variables.get("PYTHONPATH", "/")).is_dir() for run in runs)


def test_a_row_replaces_the_one_of_the_same_versions_and_the_others_stay() -> None:
    page = "a\n<!-- versions tested: begin -->\n<!-- versions tested: end -->\nz\n"
    tls = matrix.row(result("5 passed", part="tls"), "2026-01-01")
    page = published(page, [tls, matrix.row(result("1 failed", passed=False), "2026-01-01")])
    page = published(page, [matrix.row(result("7 passed"), "2026-01-02")])
    assert page.splitlines()[2:] == [
        "",
        "| part | Python | redis-py | server | tests | result | on |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| python | 3.12.10 | 8.1.0 | Redis 7.0.15 | contract integration | passed: 7 passed | 2026-01-02 |",
        "| tls | 3.12.10 | 8.1.0 | Redis 7.0.15 | contract integration | passed: 5 passed | 2026-01-01 |",
        "",
        "<!-- versions tested: end -->",
        "z",
    ]


class TestMain:
    @pytest.fixture
    def ran(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
        """Two Pythons and one server besides the installed one, and what is run on them."""
        ran: list[tuple[str, list[str]]] = []

        def carry_out(run: Run, options: list[str], more: list[str]) -> Result:
            ran.append((f"{run.part} {run.environment.interpreter.minor}", [*options, *more]))
            return Result(run, True, "passed")

        monkeypatch.setattr(matrix, "candidates", lambda *_: [TEN, NEXT])
        monkeypatch.setattr(matrix, "ask", lambda found: found)
        monkeypatch.setattr(matrix, "find_servers", lambda: (["/8/redis-server"], ["valkey-9: no network"]))
        monkeypatch.setattr(matrix, "carry_out", carry_out)
        return ran

    def test_it_runs_all_parts(self, ran: list[tuple[str, list[str]]], capsys: pytest.CaptureFixture[str]) -> None:
        assert matrix.main(["--jobs", "3", "--args", "-x -k 'push or take'"]) == 0
        arguments = ["-q", "-n", "3", "-m", "not slow", "-x", "-k", "push or take"]
        assert ran[:3] == [("python 3.12", arguments), ("python 3.13", arguments), ("redis-py 3.12", arguments)]
        assert {part.split()[0] for part, _ in ran} == set(matrix.PARTS)
        said = capsys.readouterr().out
        assert "could not be had: Python 3.14" in said
        assert "could not be had: valkey-9: no network" in said

    def test_or_some_of_them(self, ran: list[tuple[str, list[str]]]) -> None:
        assert matrix.main(["--only", "servers,resp3", "--versions", "3.13"]) == 0
        assert [part for part, _ in ran] == ["servers 3.13", "resp3 3.13"]

    def test_a_part_that_there_is_not(self, ran: list[tuple[str, list[str]]]) -> None:
        with pytest.raises(SystemExit):
            matrix.main(["--only", "server"])
        assert ran == []

    def test_a_version_that_was_asked_for_must_be_there(
        self, ran: list[tuple[str, list[str]]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert matrix.main(["--versions", "3.13,3.15"]) == 1
        assert ran == []
        assert "could not be had: Python 3.15" in capsys.readouterr().out


def test_an_environment_that_can_not_be_made_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(_environment: Environment) -> Path:
        raise subprocess.CalledProcessError(1, ["pip"])

    monkeypatch.setattr(matrix, "prepare", prepare)
    assert not matrix.carry_out(Run("python", Environment(TEN)), [], []).passed


def test_a_run_has_its_server_its_variables_and_its_tests(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = program(tmp_path / "valkey-server", "echo Valkey server v=9.1.2 sha=0")
    python = program(
        tmp_path / "python",
        'if [ "$1" = -c ]; then echo 8.1.0; else echo $REDIS_SERVER $REDIS_PROTOCOL $*; echo 3 passed in 1s; fi',
    )
    monkeypatch.setattr(matrix, "prepare", lambda _: python)
    run = Run("resp3", Environment(TEN), str(server), ("tests/contract",), {"REDIS_PROTOCOL": "3"})
    done = matrix.carry_out(run, ["-q"], [])
    assert "tests/contract" in capsys.readouterr().out
    other = matrix.carry_out(run, ["-q"], ["tests/unit/test_x.py", "-x"])
    assert matrix.row(other, "")[4] == "test_x -x"
    assert (done.passed, done.summary, done.redis, done.server) == (True, "3 passed in 1s", "8.1.0", "Valkey 9.1.2")
