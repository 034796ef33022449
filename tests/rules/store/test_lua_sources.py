"""Every script says what it is given, what it answers and what it keeps true, before its first statement."""

import math
import re
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from lowq.errors import ConfigError
from lowq.store.calls import load_scripts, time_argument
from tests.rows import case

FOLDER = Path(__file__).resolve().parents[3] / "lowq" / "store" / "lua"
SCRIPTS = sorted(FOLDER.glob("*.lua"))
FUNCTION = re.compile(r"^local function (\w+)\(", re.MULTILINE)


def test_header_of_every_script_tells() -> None:
    assert SCRIPTS, f"no .lua files in {FOLDER}"
    for script in SCRIPTS:
        lines = takewhile(lambda line: line.startswith("--"), script.read_text().splitlines())
        header = "\n".join(line for line in lines if not line.startswith("--!"))
        assert {"KEYS", "ARGV", "Reply", "Invariant"} <= set(re.findall(r"\w+", header)), (
            f"{script.name} must open with its purpose, KEYS, ARGV (with units), Reply and Invariant"
        )


def test_a_script_gets_what_it_calls_and_nothing_else_and_announces_by_sharded_channels_alone() -> None:
    library = [name for path in (FOLDER / "lib").glob("*.lua") for name in FUNCTION.findall(path.read_text())]
    assert len(set(library)) == len(library)
    used: set[str] = set()
    for script in load_scripts().values():
        with case(script.name):
            code = re.sub(r"--[^\n]*", "", script.source)
            defined = set(FUNCTION.findall(code)).intersection(library)
            called = {name for name in library if re.search(rf"(?<!local function )\b{name}\(", code)}
            assert called == defined
            for name in defined:
                first = re.search(rf"\b{name}\(", code)
                assert first is not None
                assert code[: first.start()].endswith("local function "), f"{name} is called before it is defined"
            # Nobody subscribes to others: on a cluster they would go to every server.
            assert "'PUBLISH'" not in code
            used |= called
    assert used == set(library)


def test_an_explicit_time_that_is_none_is_refused() -> None:
    moments: list[Any] = [math.nan, math.inf, -math.inf, "1800000000", True]
    for now in moments:
        with case(now), pytest.raises(ConfigError, match="now="):
            time_argument(now)
