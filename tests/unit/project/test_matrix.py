"""Which Pythons `make test-matrix` finds, and what its last lines and exit code say."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import matrix
from tests.matrix import Environment, Interpreter, Result, ask, candidates, newest, report

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


def test_each_python_has_a_line_and_what_was_not_found_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        report(
            [Result(Environment(TEN), True, "7 passed in 1s"), Result(Environment(NEXT), True, "7 passed in 2s")],
            ["3.14"],
        )
        == 0
    )
    assert capsys.readouterr().out.splitlines() == [
        "Python 3.12.10  passed: 7 passed in 1s",
        "Python 3.13.0   passed: 7 passed in 2s",
        "not found: Python 3.14",
    ]


def test_one_that_fails_fails_the_whole() -> None:
    assert report([Result(Environment(TEN), False, "1 failed"), Result(Environment(NEXT), True, "7 passed")], []) == 1


def test_nothing_to_run_on_is_a_failure() -> None:
    assert report([], list(matrix.EXPECTED)) == 1


class TestMain:
    @pytest.fixture
    def ran(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
        """Two Pythons, and what is run on them."""
        ran: list[tuple[str, list[str]]] = []

        def run(environment: Environment, arguments: list[str]) -> Result:
            ran.append((f"{environment.interpreter.minor} {environment.redis}".strip(), list(arguments)))
            return Result(environment, True, "passed")

        monkeypatch.setattr(matrix, "candidates", lambda *_: [TEN, NEXT])
        monkeypatch.setattr(matrix, "ask", lambda found: found)
        monkeypatch.setattr(matrix, "run", run)
        return ran

    def test_it_runs_three_tiers_on_all_that_it_finds(self, ran: list[tuple[str, list[str]]]) -> None:
        assert matrix.main(["--jobs", "3", "--args", "-x -k 'push or take'"]) == 0
        arguments = ["-q", "-n", "3", "-m", "not slow", *matrix.TIERS, "-x", "-k", "push or take"]
        assert ran == [("3.12", arguments), ("3.13", arguments), ("3.12 redis==6.0.*", arguments)]

    def test_a_path_among_the_arguments_is_all_that_is_run(self, ran: list[tuple[str, list[str]]]) -> None:
        assert matrix.main(["--versions", "3.13", "--args=tests/unit"]) == 0
        arguments = ["-q", "-n", "2", "-m", "not slow", "tests/unit"]
        assert ran == [("3.13", arguments), ("3.13 redis==6.0.*", arguments)]

    def test_a_version_that_was_asked_for_must_be_there(
        self, ran: list[tuple[str, list[str]]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert matrix.main(["--versions", "3.13,3.15"]) == 1
        assert ran == []
        assert "not found: Python 3.15" in capsys.readouterr().out


def test_an_environment_that_can_not_be_made_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(_environment: Environment) -> Path:
        raise subprocess.CalledProcessError(1, ["pip"])

    monkeypatch.setattr(matrix, "prepare", prepare)
    assert not matrix.run(Environment(TEN), []).passed
