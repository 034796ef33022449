"""The tables of the documentation say what the code says."""

import ast
import re
from pathlib import Path

import pytest

import lowq
from lowq.doctor import CODES, KINDS
from lowq.settings import Config
from lowq.store.scripts import load_scripts
from lowq.workers import Worker, WorkerOptions
from tests.rows import case

ROOT = Path(__file__).resolve().parents[3]


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def rows(page: str, heading: str) -> dict[str, list[str]]:
    """The table below a heading of a page: the name in its first column -> the other cells."""
    text = re.split(rf"^##? {heading}\n", text_of(page), maxsplit=1, flags=re.MULTILINE)[1].split("\n## ", 1)[0]
    cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {row[0].strip("`"): row[1:] for row in cells[2:]}


def test_settings_have_the_defaults_and_the_variables_that_their_table_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    table = rows("settings.md", "Settings")
    assert list(table) == [name for name in Config.__annotations__ if not name.startswith("_")]
    for name, (shown, _, variable, *_) in table.items():
        with case(name), monkeypatch.context() as patch:
            patch.delenv(f"LOWQ_{name.upper()}", raising=False)
            default = getattr(Config(), name)
            if callable(default):
                assert "`" not in shown, "what a callable does is told in words"
            else:
                assert ast.literal_eval(shown.strip("`")) == default
            patch.setenv(f"LOWQ_{name.upper()}", "{ nonsense }")
            if variable:
                assert variable == f"`LOWQ_{name.upper()}`"
                with pytest.raises(lowq.ConfigError, match=f"environment variable {variable.strip('`')}: "):
                    getattr(Config(), name)
            else:
                assert getattr(Config(), name) != "{ nonsense }"


def test_the_table_of_worker_options_has_all_of_them_with_their_defaults() -> None:
    table = rows("workers.md", "Worker options")
    assert table.keys() == WorkerOptions.__annotations__.keys()
    assert table.pop("queue_name")[0] == "the class's name"
    assert {name: ast.literal_eval(shown.strip("`")) for name, (shown, _) in table.items()} == {
        name: getattr(Worker, name) for name in table
    }


def test_the_retry_table_follows_from_the_formula() -> None:
    table = rows("failures.md", "How long retries take")
    assert {"10", "14", "25"} <= table.keys()
    for count, (shown,) in table.items():
        # The mean of default_retry_in: of random(0..30) it is 15.
        seconds = sum(n**4 + 15 + 15 * (n + 1) for n in range(int(count)))
        assert shown == f"{seconds / 86400:.1f}"


def test_the_page_of_the_design_has_every_script_and_names_only_files_that_exist() -> None:
    page, package = text_of("design.md"), ROOT / "lowq"
    assert [name for name in load_scripts() if f"| `{name}` |" not in page] == []
    named = set(re.findall(r"\b[\w/]+\.py\b", page))
    assert {name for name in named if not (package / name).exists() and not (ROOT / name).exists()} == set()


def test_the_page_of_the_doctor_lists_every_finding() -> None:
    found = re.findall(
        r"^\| `(\w+)` \| (ok|warning|error) \| [^|]*(?:\| ([^|]*))?\|$", text_of("doctor.md"), re.MULTILINE
    )
    assert {code for code, *_ in found} == CODES
    table = {code: (severity, bool(repair) and not re.match(r"no\b", repair)) for code, severity, repair in found}
    assert {code: table[code] for code in KINDS} == {
        code: (kind.severity, kind.repairable) for code, kind in KINDS.items()
    }
