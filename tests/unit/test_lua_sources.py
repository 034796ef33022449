"""Every script says what it is given, what it answers and what it keeps true, before its first statement."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from lowq.errors import ConfigError
from lowq.store.scripts import time_argument

FOLDER = Path(__file__).resolve().parents[2] / "lowq" / "store" / "lua"
SCRIPTS = sorted(FOLDER.glob("*.lua"))
INCLUDE = re.compile(r"^--!include (\S+)$", re.MULTILINE)


def header(source: str) -> str:
    """The comment that a script opens with, up to its first blank or other line."""
    lines = source.splitlines()
    length = next((i for i, line in enumerate(lines) if not line.startswith("--")), len(lines))
    return "\n".join(line for line in lines[:length] if not line.startswith("--!"))


def test_scripts_are_found() -> None:
    assert SCRIPTS, f"no .lua files in {FOLDER}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
@pytest.mark.parametrize("word", ["KEYS", "ARGV", "Reply", "Invariant"])
def test_header_of_every_script_tells(script: Path, word: str) -> None:
    assert re.search(rf"\b{word}\b", header(script.read_text())), (
        f"{script.name} must open with its purpose, KEYS, ARGV (with units), Reply and Invariant"
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_what_a_script_includes_exists(script: Path) -> None:
    snippets = {path.stem for path in (FOLDER / "lib").glob("*.lua")}
    assert set(INCLUDE.findall(script.read_text())) <= snippets


@pytest.mark.parametrize("now", [math.nan, math.inf, -math.inf, "1800000000", True], ids=str)
def test_an_explicit_time_that_is_none_is_refused(now: Any) -> None:
    with pytest.raises(ConfigError, match="now="):
        time_argument(now)
