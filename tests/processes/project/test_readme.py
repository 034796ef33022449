"""The documentation is true: its Python runs, its commands work, its links exist.

A block of Python stands below one of two lines. ``<!-- run: NAME -->``: all blocks of a page with that NAME run one
after the other in a process of their own, with an empty embedded store. A line ``expression  # -> value`` must have
that value, as ``repr`` shows it, and functions named ``test_...`` are called, with what the pytest plugin's fixtures of
these names would give. ``<!-- file: PATH -->``: the block is a
file of an application, which test_recipes.py runs.
"""

import re
import shlex
import subprocess
import sys
import tomllib
import uuid
from collections import defaultdict
from pathlib import Path

import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

import lowq
import lowq_web
from lowq.cli import main
from tests.processes.project.forked import ROOT, run_scripts
from tests.rows import case
from tests.waiting import until

DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))]
TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}

_MARKED = re.compile(r"^<!-- run: (\S+) -->\n+```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PYTHON = re.compile(r"^([^\n]*)\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SHELL = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_VALUE = re.compile(r"^(\s*)(\S.*?)\s+# -> (.*)$", re.MULTILINE)

#: What a page's blocks are run with: what looks at values, and at the end what calls the tests among them.
_BEFORE = """
import sys, types
page = sys.modules["__main__"] = types.ModuleType("__main__")
def shows(value, expected):
    if repr(value) != expected:
        raise AssertionError(f"the page says {expected}, and it is {value!r}")
page.shows_ = shows
"""
_AFTER = """
import inspect, lowq.testing
for name, function in list(vars(page).items()):
    if name.startswith("test_"):
        names = inspect.signature(function).parameters
        if not names:
            function()
            continue
        with lowq.testing.sandbox() as box:
            values = {"lowq_drain": box.drain, "lowq_clock": box.clock, "lowq_crash": box.crash}
            function(*(values[name] for name in names))
"""


def marked_blocks() -> dict[str, dict[str, str]]:
    """Page -> name -> the Python of all its blocks of that name."""
    found: defaultdict[str, defaultdict[str, str]] = defaultdict(lambda: defaultdict(str))
    for page, text in TEXTS.items():
        for name, code in _MARKED.findall(text):
            found[page][name] += code
    return {page: dict(blocks) for page, blocks in found.items()}


BLOCKS = marked_blocks()


@pytest.mark.parametrize("part", range(4))
def test_marked_python_runs_and_has_the_values_it_shows(part: int) -> None:
    scripts = {}
    for page, blocks in [*BLOCKS.items()][part::4]:
        for name, code in blocks.items():
            looked_at = _VALUE.sub(lambda match: f"{match[1]}shows_({match[2]}, {match[3]!r})", code)
            run = f'exec(compile({looked_at!r}, "page", "exec"), vars(page))'
            scripts[f"{page}: {name}"] = ROOT, _BEFORE + run + _AFTER
    run_scripts(scripts)


def test_every_block_of_python_is_valid_and_is_run() -> None:
    for page, text in TEXTS.items():
        with case(page):
            for mark, code in _PYTHON.findall(text):
                compile(code, page, "exec")
                assert re.fullmatch(r"<!-- (run|file): \S+ -->", mark), f"nothing runs this block:\n{code}"


def test_the_readme_is_short_and_first_workers_are_those_of_the_example_and_of_init() -> None:
    assert len(README.splitlines()) <= 150
    example = (ROOT / "examples" / "orders.py").read_text(encoding="utf-8")
    assert example.endswith(_MARKED.findall(README)[0][1])
    template = (ROOT / "lowq" / "cli" / "project" / "workers.py-tpl").read_text(encoding="utf-8")
    assert template == _MARKED.findall(TEXTS["docs/start.md"])[0][1]


# --- commands ------------------------------------------------------------------------------------------------


def typed(text: str) -> list[str]:
    """The lines of the shell that a page shows."""
    return [line for block in _SHELL.findall(text) for line in block.splitlines() if line.split("#")[0].strip()]


LINES = list(dict.fromkeys(line for text in TEXTS.values() for line in typed(text)))
COMMANDS = [line for line in LINES if line.startswith("lowq ")]
OTHERS = [line for line in LINES if not line.startswith("lowq ")]


def test_the_page_of_the_command_line_shows_every_verb() -> None:
    shown = {line.split()[1] for line in typed(TEXTS["docs/cli.md"]) if line.startswith("lowq ")}
    assert shown >= set(main.commands)


def test_a_command_has_the_verb_and_the_options_that_are_shown() -> None:
    for line in COMMANDS:
        with case(line):
            # With --help nothing is done, but only after all of the line was understood.
            words = shlex.split(line, comments=True)[1:]
            words.insert(words.index("--") if "--" in words else len(words), "--help")
            result = CliRunner().invoke(main, words)
            assert result.exit_code == 0, result.output


def test_other_commands_name_what_exists() -> None:
    for line in OTHERS:
        with case(line):
            words = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z_]+=", word)]
            match words:
                case ["make", target, *_]:
                    assert target in targets()
                case ["pip", "install", "-e", ".[dev]"]:
                    pass  # of the project that `lowq init --fastapi` writes
                case ["pip", "install", "-e", what]:
                    assert set(re.findall(r"\w+", what)) <= extras()
                case ["python", path]:
                    assert (ROOT / path).is_file()
                case ["pip", "install", "pytest"] | ["python3", "workers.py"]:
                    pass  # of the project that `lowq init` writes
                case _:
                    known = ("python3", ".", "cd", "export", "echo", "kill", "curl", "openapi-python-client", "pytest")
                    of_redis = ("redis-cli", "cp", "mv", "ln")  # executed by test_backup_and_upgrade.py
                    assert words[0] in (*known, *of_redis, "uvicorn")


def test_the_requests_of_the_page_of_the_dashboard_work() -> None:
    lines = [line for line in typed(TEXTS["docs/dashboard.md"]) if line.startswith("curl ")]
    app = lowq.Lowq(redis_url=f"memory://{uuid.uuid4().hex}")
    try:
        app.queue("OrderSync", shards_count=5).push({"id": 42})
        with TestClient(lowq_web.create_app(app), base_url="http://localhost:8080") as client:
            for line in lines:
                _, _, url, *options = shlex.split(line, comments=True)
                if options:
                    assert options[0] == "--json"
                    headers = {"content-type": "application/json"}
                    answer = client.post(f"http://{url}", content=options[1], headers=headers)
                else:
                    answer = client.get(f"http://{url}")
                assert answer.is_success, f"{line}: {answer.status_code} {answer.text}"
    finally:
        app.close()


def targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))


def extras() -> set[str]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return set(tomllib.load(file)["project"]["optional-dependencies"])


def test_targets_of_make_that_a_page_names_exist() -> None:
    for page, text in TEXTS.items():
        with case(page):
            assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets()


def test_the_first_worker_and_then_all_commands_work_as_they_are_shown(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = re.findall(r"^```\n\S+ \S+( INFO .*\n)```$", README, re.MULTILINE)[0]
    answer = re.findall(r"^```\n(ID .*\n.*\n)```$", README, re.MULTILINE)[0]
    monkeypatch.setenv("LOWQ_REDIS_URL", redis_url)
    said = tmp_path / "node.log"
    with said.open("w") as log:
        command = [sys.executable, "-m", "lowq", "run", "-r", "examples/orders.py"]
        node = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    try:
        until(lambda: "shards held: 24" in said.read_text(), "the node holds its shards")
        subprocess.run([sys.executable, "examples/orders.py"], cwd=ROOT, check=True, timeout=120)
        until(lambda: printed in said.read_text(), "the node prints what the page shows")
    finally:
        node.terminate()
        node.wait(120)
    monkeypatch.chdir(tmp_path)
    section = README.split("\n## What is going on\n", 1)[1].split("\n## ", 1)[0]
    assert without_times(answer) in without_times(done(typed(section)))
    lines = [
        line
        for line in typed(TEXTS["docs/cli.md"].split("\nMore verbs", 1)[0])
        if not line.startswith(("lowq run", "lowq stack"))  # no node runs any more
    ]
    assert len(lines) > 15
    assert done(lines).splitlines()[-1].startswith("OrderSync: removed, with ")


def without_times(text: str) -> str:
    return re.sub(r"due in .*", "due in", text)


def done(lines: list[str]) -> str:
    """Lines of a page, one after the other, as somebody would type them; what they print."""
    printed = ""
    for line in lines:
        with case(line):
            if line.startswith("lowq "):
                ran = CliRunner().invoke(main, shlex.split(line, comments=True)[1:])
                assert ran.exit_code == 0, ran.output
                printed += ran.stdout
            else:
                printed += subprocess.run(["bash", "-c", line], check=True, capture_output=True, text=True).stdout
    return printed


# --- links ---------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(text: str) -> list[str]:
    found = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    return [link for link in found if "://" not in link]


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        with case(page.name):
            for link in links(page.read_text(encoding="utf-8")):
                path, _, anchor = link.partition("#")
                target = (page.parent / path).resolve() if path else page
                assert target.exists(), link
                assert not anchor or anchor in anchors(target), link


def test_the_index_leads_to_every_page() -> None:
    names = {page.name for page in DOCS.glob("*.md")} - {"README.md"}
    assert names <= {link.partition("#")[0] for link in links(TEXTS["docs/README.md"])}
    assert "docs/README.md" in links(README)
