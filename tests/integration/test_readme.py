"""The documentation is true: its Python runs, its tables say what the code says, its links lead somewhere.

A block of Python runs when a line ``<!-- run: NAME -->`` stands above it. Blocks with one NAME run one after the other
in a process of their own, with an empty embedded store. A line ``expression  # -> value`` must have that value, as
``repr`` shows it, and functions named ``test_...`` are called.
"""

import ast
import inspect
import os
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from click.testing import CliRunner

import lowq
from lowq.cli import main
from lowq.doctor import CODES, KINDS, server
from lowq.settings import Config
from lowq.store.scripts import load_scripts
from lowq.workers import Worker, WorkerOptions

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_MARKED = re.compile(r"^<!-- run: (\S+) -->\n+```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_VALUE = re.compile(r"^(\s*)(\S.*?)\s+# -> (.*)$", re.MULTILINE)

#: Runs a page's blocks, given on stdin, as a script in a process of its own.
_RUNNER = """
import sys, types
page = sys.modules["__main__"] = types.ModuleType("__main__")
def shows(value, expected):
    if repr(value) != expected:
        raise AssertionError(f"the page says {expected}, and it is {value!r}")
page.shows_ = shows
exec(compile(sys.stdin.read(), "page", "exec"), vars(page))
for name, function in list(vars(page).items()):
    if name.startswith("test_"):
        function()
"""


def marked_blocks() -> dict[str, str]:
    """Page and name -> the Python of all blocks of that name."""
    found: defaultdict[str, str] = defaultdict(str)
    for page in PAGES:
        for name, code in _MARKED.findall(page.read_text(encoding="utf-8")):
            found[f"{page.name}:{name}"] += code
    return dict(found)


BLOCKS = marked_blocks()


@pytest.mark.parametrize("name", BLOCKS)
def test_marked_python_runs_and_has_the_values_it_shows(name: str) -> None:
    code = _VALUE.sub(lambda match: f"{match[1]}shows_({match[2]}, {match[3]!r})", BLOCKS[name])
    environment = {key: value for key, value in os.environ.items() if not key.startswith("LOWQ_")}
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", _RUNNER],
        input=code,
        env={**environment, "LOWQ_REDIS_URL": "memory://"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def test_every_block_of_python_is_valid() -> None:
    for page in PAGES:
        for code in re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            compile(code, page.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_first_worker_is_the_example() -> None:
    example = (ROOT / "examples" / "orders.py").read_text(encoding="utf-8")
    shown = _MARKED.findall(README)[0][1]
    assert shown in example


SHELL = "".join(re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL))
COMMANDS = list(dict.fromkeys(re.findall(r"^lowq .*$", SHELL, re.MULTILINE)))


def test_the_readme_shows_every_verb() -> None:
    shown = {word for line in COMMANDS for word in line.split()[1:2]}
    assert shown >= set(main.commands)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_has_the_verb_and_the_options_that_are_shown(line: str) -> None:
    # With --help nothing is done, but only after all of the line was understood.
    result = CliRunner().invoke(main, [*shlex.split(line, comments=True)[1:], "--help"])
    assert result.exit_code == 0, result.output


def test_the_commands_work_one_after_the_other_after_the_first_worker(redis_url: str, tmp_path: Path) -> None:
    section = README.split("\n## Command line\n", 1)[1].split("\n## ", 1)[0]
    typed = "".join(re.findall(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL))
    lines = [line for line in typed.splitlines() if not line.startswith("lowq run")]
    assert len(lines) > 15
    python = shlex.quote(sys.executable)
    script = f'set -e\nlowq() {{ {python} -m lowq "$@"; }}\n{python} {ROOT}/examples/orders.py\n' + "\n".join(lines)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("LOWQ_")}
    ran = subprocess.run(
        ["bash", "-c", script],
        env={**environment, "LOWQ_REDIS_URL": redis_url, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1].startswith("OrderSync: removed, with ")


# --- tables --------------------------------------------------------------------------------------------------


def rows(heading: str) -> dict[str, list[str]]:
    """The table below a heading of the README: the name in its first column -> the other cells."""
    text = README.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {row[0].strip("`"): row[1:] for row in cells[2:]}


SETTINGS = [name for name in Config.__annotations__ if not name.startswith("_")]


def test_the_table_of_settings_names_all_of_them_in_order() -> None:
    assert list(rows("Settings")) == SETTINGS


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_has_the_default_that_the_table_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(f"LOWQ_{name.upper()}", raising=False)
    default = getattr(Config(), name)
    shown = rows("Settings")[name][0]
    if callable(default):
        assert "`" not in shown, "what a callable does is told in words"
    else:
        assert ast.literal_eval(shown.strip("`")) == default


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_read_from_the_environment_when_the_table_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = f"LOWQ_{name.upper()}"
    monkeypatch.setenv(variable, "{ nonsense }")
    shown = rows("Settings")[name][2]
    if shown:
        assert shown == f"`{variable}`"
        with pytest.raises(lowq.ConfigError, match=variable):
            getattr(Config(), name)
    else:
        assert getattr(Config(), name) != "{ nonsense }"


def test_the_table_of_worker_options_has_all_of_them_with_their_defaults() -> None:
    table = rows("Worker options")
    assert list(table) == list(WorkerOptions.__annotations__)
    for name, (shown, _) in table.items():
        if name == "queue_name":
            assert shown == "the class's name"
        else:
            assert ast.literal_eval(shown.strip("`")) == getattr(Worker, name)


def test_the_retry_table_follows_from_the_formula() -> None:
    table = rows("How long retries take")
    assert {"10", "14", "25"} <= table.keys()
    for count, (shown,) in table.items():
        # The mean of default_retry_in: of random(0..30) it is 15.
        seconds = sum(n**4 + 15 + 15 * (n + 1) for n in range(int(count)))
        assert shown == f"{seconds / 86400:.1f}"


def test_the_design_page_has_every_key_and_every_script() -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    keys = (ROOT / "lowq" / "keys.py").read_text(encoding="utf-8")
    suffixes = re.findall(r"^(\S+) +(?:ZSET|HASH|SET|LIST|STRING|channel) ", keys, re.MULTILINE)
    assert len(suffixes) > 15
    for name in [*suffixes, *load_scripts()]:
        assert f"| `{name}` |" in page, name


def test_the_page_of_the_doctor_lists_every_finding() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    rows = {row[0].strip(" `"): [cell.strip() for cell in row[1:]] for row in re.findall(
        r"^\| (`\w+`) \| (ok|warning|error) \| ([^|]*)(?:\| ([^|]*))?\|$", page, re.MULTILINE
    )}  # fmt: skip
    assert KINDS.keys() <= rows.keys()
    for code, kind in KINDS.items():
        severity, _, repair = rows[code]
        assert severity == kind.severity, code
        assert bool(repair and not re.match(r"no\b", repair)) == kind.repairable, code
    of_servers = set(re.findall(r'^ +"(\w+)",$|Finding\("(\w+)"', inspect.getsource(server), re.MULTILINE))
    codes = {name for pair in of_servers for name in pair if name} - {"ok", "warning", "error"}
    assert codes <= rows.keys()
    assert codes == server.CODES
    assert rows.keys() == CODES


# --- links ---------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link
