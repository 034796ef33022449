"""Every script says what it is given, what it answers and what it keeps true, before its first statement."""

import math
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from lowq.errors import ConfigError
from lowq.store.scripts import load_scripts, time_argument
from tests.rows import case

FOLDER = Path(__file__).resolve().parents[3] / "lowq" / "store" / "lua"
SCRIPTS = sorted(FOLDER.glob("*.lua"))
FUNCTION = re.compile(r"^local function (\w+)\(", re.MULTILINE)


def header(source: str) -> str:
    """The comment that a script opens with, up to its first blank or other line."""
    lines = source.splitlines()
    length = next((i for i, line in enumerate(lines) if not line.startswith("--")), len(lines))
    return "\n".join(line for line in lines[:length] if not line.startswith("--!"))


def test_scripts_are_found() -> None:
    assert SCRIPTS, f"no .lua files in {FOLDER}"


def test_header_of_every_script_tells() -> None:
    for script, word in product(SCRIPTS, ["KEYS", "ARGV", "Reply", "Invariant"]):
        with case(script.name, word):
            assert re.search(rf"\b{word}\b", header(script.read_text())), (
                f"{script.name} must open with its purpose, KEYS, ARGV (with units), Reply and Invariant"
            )


def test_the_library_has_each_function_once_and_none_that_nobody_calls() -> None:
    defined = [name for path in (FOLDER / "lib").glob("*.lua") for name in FUNCTION.findall(path.read_text())]
    assert len(set(defined)) == len(defined)
    assert {name for script in load_scripts().values() for name in FUNCTION.findall(script.source)} >= set(defined)


def test_a_script_gets_what_it_calls_and_nothing_else() -> None:
    for script in load_scripts().values():
        with case(script.name):
            library = {name for path in (FOLDER / "lib").glob("*.lua") for name in FUNCTION.findall(path.read_text())}
            code = re.sub(r"--[^\n]*", "", script.source)
            defined = FUNCTION.findall(code)
            for name in library.intersection(defined):
                assert len(re.findall(rf"\b{name}\(", code)) > 1, f"{name} is not called"
                assert code.index(f"local function {name}(") < min(
                    found.start() for found in re.finditer(rf"\b{name}\(", code)
                )
            assert not {name for name in library if re.search(rf"\b{name}\(", code)}.difference(defined)


def test_a_script_announces_by_sharded_channels_alone() -> None:
    """Nobody subscribes to others: on a cluster they would go to every server."""
    for script in load_scripts().values():
        with case(script.name):
            assert "'PUBLISH'" not in script.source


def test_an_explicit_time_that_is_none_is_refused() -> None:
    moments: list[Any] = [math.nan, math.inf, -math.inf, "1800000000", True]
    for now in moments:
        with case(now), pytest.raises(ConfigError, match="now="):
            time_argument(now)
