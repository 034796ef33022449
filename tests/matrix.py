"""`make test-matrix`: the tests on every Python, redis-py, server, protocol and kind of connection that lowq supports.

Each part runs the tests that could go another way there:

| part | what is run | on what |
|---|---|---|
| python | all rules | each Python, with the newest redis-py that lowq allows |
| processes | nodes and supervisors: signals, threads, event loops, forks | each Python |
| redis-py | what talks to a server: the rules on a real one; clusters, sentinels, failovers | the oldest redis-py |
| servers | the same | each server of tests/debian.py, unpacked beside the installed one |
| hiredis | the same | without hiredis |
| resp3 | the same | with RESP3 |
| tls | push, nodes, wake-ups, command line | each server, with a certificate made by the test |
| rights | producers, nodes, people | each server, as the users of docs/operations.md |

It takes what this machine has: `python3.12` and the like on PATH, the versions of pyenv and of uv; the newest Python is
unpacked like the servers where it is not there. Each gets a virtual environment of its own below `.matrix/`, made anew
when pyproject.toml changes. All parts but the first two run on the oldest Python. Without the tests marked slow, unless
`-m` says so. What can't be had is named, and is no failure.

With `--publish` each run that passed becomes a row of docs/compatibility.md as soon as it ends, and one that failed
loses its row. Rows of what was not run stay, unless they are of tests that the part does not run any more. What has no
row is named below the table.
"""

import argparse
import datetime
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.debian import PYTHON, SERVERS, Packaged, Unavailable, installed, unpacked, version_of

ROOT = Path(__file__).resolve().parents[1]
#: The Pythons that should be there: the oldest supported one up to the newest released.
EXPECTED = ("3.11", "3.12", "3.13", "3.14")
OLDEST = (3, 11)
#: What pytest is told besides: paths, and how to choose from them.
TESTS: Mapping[str, Sequence[str]] = {
    "python": ("tests/rules",),
    "processes": ("tests/processes/node", "tests/processes/supervisor"),
    **dict.fromkeys(
        ("redis-py", "servers", "hiredis", "resp3"),
        ("tests/rules", "tests/processes/store", "-m", "redis and not slow"),
    ),
    "tls": ("tests/processes/store/test_connections.py", "-k", "tls"),
    "rights": ("tests/processes/project/test_rights.py",),
}
PARTS = tuple(TESTS)
PAGE = ROOT / "docs" / "compatibility.md"
COLUMNS = ("part", "Python", "redis-py", "server", "tests", "result", "on")

#: What an interpreter says of itself. A build without GIL is another thing than its version says: it is left out.
_QUESTION = (
    "import sys, sysconfig; "
    "print(*sys.version_info[:4], sys.implementation.name, int(bool(sysconfig.get_config_var('Py_GIL_DISABLED'))))"
)


@dataclass(frozen=True, order=True)
class Interpreter:
    """A CPython: `(3, 13, 0)` and its program."""

    version: tuple[int, int, int]
    program: str

    @property
    def minor(self) -> str:
        return f"{self.version[0]}.{self.version[1]}"

    def __str__(self) -> str:
        return ".".join(map(str, self.version))


@dataclass(frozen=True)
class Environment:
    """The packages that tests are run with."""

    interpreter: Interpreter
    #: The redis-py that is wanted, as pip takes it; empty: the newest that lowq allows.
    redis: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (str(self.interpreter), self.redis)))


@dataclass(frozen=True)
class Run:
    """Some tests in one environment, on one server."""

    part: str
    environment: Environment
    #: As of `TESTS`.
    tests: Sequence[str]
    #: The server's program; empty: the installed one.
    server: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """How the tests went in one of them."""

    run: Run
    passed: bool
    #: The last line of pytest.
    summary: str
    redis: str = "?"
    server: str = "?"


def candidates(environment: Mapping[str, str], home: Path) -> Iterator[Path]:
    """Programs that may be a Python: most of them are, some more than once."""
    for folder in environment.get("PATH", "").split(os.pathsep):
        if folder:
            yield from sorted(Path(folder).glob("python3.[0-9]*"))
    pyenv = Path(environment.get("PYENV_ROOT") or home / ".pyenv")
    data = Path(environment.get("XDG_DATA_HOME") or home / ".local" / "share")
    uv = Path(environment.get("UV_PYTHON_INSTALL_DIR") or data / "uv" / "python")
    for folders in (pyenv / "versions", uv):
        for folder_of_one in sorted(folders.glob("*")):
            yield folder_of_one / "bin" / "python3"


def ask(program: Path) -> Interpreter | None:
    """What that program is; None: no CPython that lowq supports in a final version, or none that starts."""
    if program.name.endswith("-config") or not os.access(program, os.X_OK):
        return None
    try:
        asked = subprocess.run([program, "-I", "-c", _QUESTION], capture_output=True, text=True, timeout=60, check=True)
        major, minor, micro, level, name, without_gil = asked.stdout.split()
    except (OSError, subprocess.SubprocessError, ValueError):  # a shim of pyenv for a version that is not chosen
        return None
    version = int(major), int(minor), int(micro)
    if name != "cpython" or level != "final" or without_gil == "1" or version[:2] < OLDEST:
        return None
    return Interpreter(version, str(program))


def newest(found: Iterable[Interpreter | None]) -> dict[str, Interpreter]:
    """Of each minor version the newest one; of equal ones the first."""
    chosen: dict[str, Interpreter] = {}
    for interpreter in found:
        if interpreter is not None:
            known = chosen.get(interpreter.minor)
            if known is None or interpreter.version > known.version:
                chosen[interpreter.minor] = interpreter
    return dict(sorted(chosen.items(), key=lambda item: item[1].version))


def oldest_redis() -> str:
    """The oldest redis-py that pyproject.toml allows, as pip takes it."""
    found = re.search(r'^    "redis>=([0-9.]+),<[0-9.]+"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None, "pyproject.toml has no bounds of redis"
    return f"redis=={found[1]}.*"


def plan(parts: Sequence[str], interpreters: Sequence[Interpreter], servers: Sequence[str]) -> list[Run]:
    """What is to be run. ``servers``: programs of those besides the installed one."""
    oldest = Environment(interpreters[0])
    # A folder whose hiredis can't be imported.
    variables = {"hiredis": {"PYTHONPATH": str(ROOT / "tests" / "without_hiredis")}, "resp3": {"REDIS_PROTOCOL": "3"}}
    runs = []
    for part in (part for part in PARTS if part in parts):
        environments = {
            "python": [Environment(each) for each in interpreters],
            "processes": [Environment(each) for each in interpreters],
            "redis-py": [Environment(interpreters[0], oldest_redis())],
        }
        programs = {"servers": servers, "tls": ("", *servers), "rights": ("", *servers)}
        runs += [
            Run(part, environment, TESTS[part], program, variables.get(part, {}))
            for environment in environments.get(part, [oldest])
            for program in programs.get(part, [""])
        ]
    return runs


def find_packaged(wanted: Iterable[Packaged]) -> tuple[list[Path], list[str]]:
    """The programs of those that Debian's packages have, and why others can't be had."""
    found, missing = [], []
    for packaged in wanted:
        try:
            found.append(unpacked(packaged))
        except Unavailable as error:
            missing.append(f"{packaged.name}: {error}")
    return found, missing


def prepare(environment: Environment) -> Path:
    """The Python of a virtual environment with lowq and its development tools.

    Raises:
        subprocess.CalledProcessError: it can't be made, or something can't be installed there.
    """
    folder = ROOT / ".matrix" / re.sub(r"[^0-9a-z.]+", "-", str(environment)).rstrip("-.")
    python, stamp = folder / "bin" / "python", folder / ".installed"
    project = ROOT / "pyproject.toml"
    if not stamp.exists() or stamp.stat().st_mtime < project.stat().st_mtime:
        print(f"installing lowq and its development tools into {folder.relative_to(ROOT)}", flush=True)
        # Without pip, as Debian's Python brings none: the pip that lowq was installed with does it.
        subprocess.run([environment.interpreter.program, "-m", "venv", "--clear", "--without-pip", folder], check=True)
        pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "-qq", "install"]
        redis = [environment.redis] if environment.redis else []
        subprocess.run([*pip, "-e", ".[all]", "--group", "dev", *redis], cwd=ROOT, check=True)
        stamp.touch()
    return python


def carry_out(run: Run, options: Sequence[str], more: Sequence[str]) -> Result:
    """Runs the tests, and shows what they print. ``more``: with a path in it, only what that names is run."""
    try:
        python = prepare(run.environment)
        asked = [str(python), "-c", "import redis; print(redis.__version__)"]
        redis = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        server = version_of(run.server or installed() or "redis-server")
    except (OSError, subprocess.CalledProcessError, Unavailable) as error:
        return Result(run, False, f"could not be prepared: {error}")
    run = replace(run, tests=(*([] if any(word.startswith("tests/") for word in more) else run.tests), *more))
    command = [str(python), "-m", "pytest", *options, *run.tests]
    variables = os.environ | run.variables | ({"REDIS_SERVER": run.server} if run.server else {})
    print(f"\n{run.part}: Python {run.environment}, redis-py {redis}, {server}: {' '.join(command[3:])}", flush=True)
    last = ""
    with subprocess.Popen(
        command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True, errors="replace"
    ) as pytest:
        assert pytest.stdout is not None
        for line in pytest.stdout:
            print(line, end="", flush=True)
            last = line.strip(" =\n") or last
    return Result(run, pytest.returncode == 0, last, redis, server)


def shown(tests: Sequence[str]) -> str:
    """What was run, as a row says it."""
    return " ".join(word.removeprefix("tests/").removesuffix(".py") for word in tests)


def row(result: Result, day: str) -> tuple[str, ...]:
    """The cells of a result."""
    return (
        result.run.part,
        str(result.run.environment.interpreter),
        result.redis,
        result.server,
        shown(result.run.tests),
        ("passed: " if result.passed else "FAILED: ") + re.sub(r" in [\d.]+s.*$", "", result.summary),
        day,
    )


def table(rows: Iterable[Sequence[str]]) -> str:
    """Rows of Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


_TABLE = re.compile(r"(<!-- versions tested: begin.*? -->\n).*?(<!-- versions tested: end -->)", re.DOTALL)


def rows_of(page: str) -> list[list[str]]:
    """The cells of the table in the page."""
    found = _TABLE.search(page)
    assert found is not None, f"{PAGE} has no place for the table"
    return [line.strip("| ").split(" | ") for line in found[0].splitlines() if line.startswith("| ")][2:]


def published(page: str, rows: Sequence[Sequence[str]]) -> str:
    """The page with those of these rows that passed. The others of the same part, on the same versions, go; so do rows
    of tests that their part does not run any more.
    """
    kept = {tuple(cells[:5]): cells for cells in [*rows_of(page), *map(list, rows)]}
    current = [
        cells for cells in kept.values() if cells[4] == shown(TESTS.get(cells[0], ())) and cells[5].startswith("passed")
    ]
    current.sort(key=lambda cells: (PARTS.index(cells[0]), cells[1:4]))
    absent = f"Without a row: {', '.join(without_row(current))}.\n\n" if without_row(current) else ""
    return _TABLE.sub(lambda found: f"{found[1]}\n{table(current)}\n{absent}{found[2]}", page)


def without_row(rows: Sequence[Sequence[str]]) -> list[str]:
    """What the matrix is about, and none of these rows shows."""
    found = []
    for part in PARTS:
        cells = [cells for cells in rows if cells[0] == part]
        if part in ("python", "processes"):
            minors = {each[1].rpartition(".")[0] for each in cells}
            found += [f"{part} {minor}" for minor in EXPECTED if minor not in minors]
        elif part == "servers":
            names = " ".join(each[3].lower().replace(" ", "-") for each in cells)
            found += [f"servers {server.name}" for server in SERVERS if server.name not in names]
        elif not cells:
            found.append(part)
    return found


def report(results: Sequence[Result], missing: Sequence[str]) -> int:
    """The table, and what could not be had; returns the exit code."""
    rows = [row(result, "") for result in results]
    widths = [max(len(cells[column]) for cells in [COLUMNS, *rows]) for column in range(len(COLUMNS) - 1)]
    print()
    for cells in [COLUMNS, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=False)).rstrip())
    for what in missing:
        print(f"could not be had: {what}")
    return 0 if results and all(result.passed for result in results) else 1


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="make test-matrix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help=f"These parts: {', '.join(PARTS)}. The default is all.")
    parser.add_argument("--versions", default="", help='Only these Pythons: "3.12 3.13".')
    parser.add_argument("--jobs", default="2", help="Test processes.")
    parser.add_argument("--args", default="", help="For pytest. With a path in them, only what they name is run.")
    parser.add_argument("--publish", action="store_true", help="Write the table into docs/compatibility.md.")
    options = parser.parse_args(arguments)
    parts = options.only.replace(",", " ").split() or PARTS
    if not set(parts) <= set(PARTS):
        parser.error(f"--only {options.only}: the parts are {', '.join(PARTS)}")
    asked = options.versions.replace(",", " ").split()
    found = newest(map(ask, candidates(os.environ, Path.home())))
    missing: list[str] = []
    if {"python", "processes"} & set(parts) and EXPECTED[-1] in (asked or EXPECTED) and EXPECTED[-1] not in found:
        programs, missing = find_packaged([PYTHON])
        found = newest([*found.values(), *map(ask, programs)])
    print("found:", ", ".join(f"{each} ({each.program})" for each in found.values()) or "no Python", flush=True)
    absent = [version for version in (asked or EXPECTED) if version not in found]
    missing += [f"Python {version}" for version in absent if "python" in parts]
    chosen = [each for minor, each in found.items() if not asked or minor in asked]
    if (asked and absent) or not chosen:
        return report([], [f"Python {version}" for version in absent])
    servers, without = find_packaged(SERVERS if {"servers", "tls", "rights"} & set(parts) else ())
    missing += without
    for what in missing:
        print(f"could not be had: {what}", flush=True)
    pytest = ["-q", "-n", options.jobs, "-m", "not slow"]
    results = []
    for run in plan(parts, chosen, [str(server) for server in servers]):
        results.append(carry_out(run, pytest, shlex.split(options.args)))
        if options.publish:
            day = datetime.datetime.now(datetime.UTC).date().isoformat()
            PAGE.write_text(published(PAGE.read_text(), [row(results[-1], day)]))
    return report(results, missing)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
