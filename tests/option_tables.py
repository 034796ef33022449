"""The tables of settings and worker options, from their declarations: ``python -m tests.option_tables`` writes them."""

import re
from collections.abc import Mapping
from pathlib import Path

from lowq.options import WORKER_OPTIONS, Option
from lowq.settings import SETTINGS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"


def main() -> None:
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def with_tables(page: str) -> str:
    """The page with the tables as they should be."""
    for name, table in TABLES.items():
        page = _with_table(page, name, table)
    return page


def _with_table(page: str, name: str, table: str) -> str:
    between = re.compile(rf"(<!-- {name}: begin.*? -->\n).*?(<!-- {name}: end -->)", re.DOTALL)
    assert between.search(page), f"the page has no place for the table of {name}"
    return between.sub(lambda found: f"{found[1]}\n{table}\n{found[2]}", page)


def _default(declared: Option) -> str:
    if declared.shown:
        return declared.shown
    default = declared.default
    if isinstance(default, float):
        return f"`{default:g}`"
    shown = list(default) if isinstance(default, tuple) else default
    return f"`{shown!r}`".replace("'", '"')


def _settings() -> str:
    rows = [
        f"| `{name}` | {_default(one)} | {one.unit} | {f'`{one.variable}`' if one.variable else ''} | {one.help} |"
        for name, one in SETTINGS.items()
    ]
    head = ["| setting | default | unit | environment | meaning |", "|---|---|---|---|---|"]
    return "\n".join([*head, *rows, ""]).replace("|  |", "| |").replace("|  |", "| |")


def _options(options: Mapping[str, Option]) -> str:
    rows = [f"| `{name}` | {_default(one)} | {one.help} |" for name, one in options.items()]
    return "\n".join(["| option | default | meaning |", "|---|---|---|", *rows, ""])


TABLES = {"settings": _settings(), "options": _options(WORKER_OPTIONS)}

if __name__ == "__main__":
    main()
