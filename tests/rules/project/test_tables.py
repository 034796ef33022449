"""The tables of the documentation say what the code says."""

import re
from pathlib import Path

import pytest

import lowq
from lowq.operate.findings import codes, read_kinds
from lowq.options import QUEUE_OPTIONS, WORKER_OPTIONS, QueueKeywords, WorkerKeywords
from lowq.settings import SETTINGS, Config
from lowq.store.calls import load_scripts
from lowq.workers import Worker
from tests import option_tables
from tests.rows import case

ROOT = Path(__file__).resolve().parents[3]


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def rows(page: str, heading: str) -> dict[str, list[str]]:
    """The table below a heading of a page: the name in its first column -> the other cells."""
    text = re.split(rf"^##? {heading}\n", text_of(page), maxsplit=1, flags=re.MULTILINE)[1].split("\n## ", 1)[0]
    cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {row[0].strip("`"): row[1:] for row in cells[2:]}


def test_the_tables_of_settings_and_options_are_made_of_their_declarations() -> None:
    text = text_of("settings.md")
    assert option_tables.with_tables(text) == text, "python -m tests.option_tables writes it"


def test_every_setting_with_a_variable_reads_it_and_no_other_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, declared in SETTINGS.items():
        with case(name), monkeypatch.context() as patch:
            patch.delenv(f"LOWQ_{name.upper()}", raising=False)
            default = getattr(Config(), name)
            if declared.default is not None:
                assert getattr(Config(**{name: default}), name) == default
            patch.setenv(f"LOWQ_{name.upper()}", "{ nonsense }")
            if declared.variable:
                with pytest.raises(lowq.ConfigError, match=f"environment variable LOWQ_{name.upper()}: {name}="):
                    getattr(Config(), name)
            else:
                assert getattr(Config(), name) == default


def test_a_worker_has_the_keywords_the_attributes_and_the_defaults_of_its_options() -> None:
    assert WORKER_OPTIONS.keys() == WorkerKeywords.__annotations__.keys()
    others = WORKER_OPTIONS.keys() - {"retry_in"}  # which is a method
    assert others <= Worker.__annotations__.keys()
    for name in others - {"queue_name"}:
        assert getattr(Worker, name) == WORKER_OPTIONS[name].default
    assert QUEUE_OPTIONS.keys() == QueueKeywords.__annotations__.keys() | {"shards_count"}


def test_the_retry_table_follows_from_the_formula() -> None:
    table = rows("failures.md", "How long retries take")
    assert {"10", "14", "25"} <= table.keys()
    for count, (shown,) in table.items():
        # The mean of default_retry_in: of random(0..30) it is 15.
        seconds = sum(n**4 + 15 + 15 * (n + 1) for n in range(int(count)))
        assert shown == f"{seconds / 86400:.1f}"


def test_the_pages_of_the_design_have_every_script_and_name_only_files_that_exist() -> None:
    keys, package = text_of("keys.md"), ROOT / "lowq"
    assert [name for name in load_scripts() if f"| `{name}` |" not in keys] == []
    named = set(re.findall(r"\b[\w/]+\.py\b", keys + text_of("design.md")))
    assert {name for name in named if not (package / name).exists() and not (ROOT / name).exists()} == set()


def test_the_page_of_the_doctor_lists_every_finding() -> None:
    found = re.findall(r"^\| `(\w+)` \| (ok|warning|error) \| [^|]*(?:\| ([^|]*))?\|$", text_of("cli.md"), re.MULTILINE)
    assert {code for code, *_ in found} == codes()
    table = {code: (severity, bool(repair) and not re.match(r"no\b", repair)) for code, severity, repair in found}
    assert {code: table[code] for code in read_kinds() if code in table} == {
        code: (kind.severity, kind.repairable) for code, kind in read_kinds().items() if "." not in code
    }
