"""What type checkers say to applications: correct uses are accepted, mistakes are found on exactly their lines."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiers import often

ROOT = Path(__file__).parents[3]
ACCEPTED = ROOT / "tests" / "typing" / "accepted.py"
REJECTED = ROOT / "tests" / "typing" / "rejected.py"
MARK = "# rejected"

#: (file name, line) -> what is wrong there.
Findings = dict[tuple[str, int], str]


def mypy(*paths: Path) -> Findings:
    output = run("mypy", "--strict", "--no-error-summary", "--hide-error-context", "--no-pretty", *paths)
    found = re.findall(r"^(.+?):(\d+): error: (.*)$", output, re.MULTILINE)
    return {(Path(path).name, int(line)): text for path, line, text in found}


def pyright(*paths: Path) -> Findings:
    report = json.loads(run("pyright", "--outputjson", "--pythonpath", sys.executable, *paths))
    assert report["summary"]["filesAnalyzed"] == len(paths)
    return {
        (Path(item["file"]).name, item["range"]["start"]["line"] + 1): item["message"]
        for item in report["generalDiagnostics"]
        if item["severity"] == "error"
    }


def run(tool: str, *args: str | Path) -> str:
    environment = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1", "NO_COLOR": "1", "MYPY_FORCE_COLOR": "0"}
    done = subprocess.run(
        [sys.executable, "-m", tool, *args], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    # 0: nothing found, 1: something found; everything else is the tool's own trouble.
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("check", often([mypy, pyright], [mypy]), ids=lambda check: check.__name__)
def test_a_type_checker_accepts_correct_uses_and_finds_each_mistake(
    check: Callable[..., Findings], tmp_path: Path
) -> None:
    source = REJECTED.read_text()
    first, _, rest = source.partition("\n")
    assert first == "# type: ignore"  # keeps the linter quiet; a checker is to see the file without it
    rejected = tmp_path / REJECTED.name
    rejected.write_text(f"#\n{rest}")
    expected = {line for line, text in enumerate(source.splitlines(), 1) if text.endswith(MARK)}
    assert len(expected) > 30

    findings = check(ACCEPTED, rejected)
    assert {key: text for key, text in findings.items() if key[0] == ACCEPTED.name} == {}
    found = {line: text for (name, line), text in findings.items() if name == REJECTED.name}
    lines = source.splitlines()
    assert {line: lines[line - 1] for line in expected - set(found)} == {}, "not found"
    assert {line: found[line] for line in set(found) - expected} == {}, "found, but not marked"
