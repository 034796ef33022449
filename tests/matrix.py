"""`make test-matrix`: the tiers `unit`, `contract` and `integration` on every Python that lowq supports.

It takes what this machine has: `python3.12` and the like on PATH, the versions of pyenv and of uv. Each gets a virtual
environment of its own below `.matrix/`, made anew when pyproject.toml changes, with the newest redis-py that lowq
allows; the oldest of them is run once more with the oldest one. Without the tests marked slow, unless `-m` says so.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: The Pythons that should be there: the oldest supported one up to the newest released.
EXPECTED = ("3.11", "3.12", "3.13", "3.14")
OLDEST = (3, 11)
TIERS = ("tests/unit", "tests/contract", "tests/integration")

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
    """What the tests are run in."""

    interpreter: Interpreter
    #: The redis-py that is wanted, as pip takes it; empty: the newest that lowq allows.
    redis: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (str(self.interpreter), self.redis)))


@dataclass(frozen=True)
class Result:
    """How the tests went in one of them."""

    environment: Environment
    passed: bool
    summary: str


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


def environments(interpreters: Sequence[Interpreter]) -> list[Environment]:
    """Each of them with the newest redis-py, and the oldest of them with the oldest one."""
    return [*map(Environment, interpreters), *(Environment(oldest, oldest_redis()) for oldest in interpreters[:1])]


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
        subprocess.run([environment.interpreter.program, "-m", "venv", "--clear", folder], check=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-qq", "install", "-e", ".[all,dev]"]
        subprocess.run([*pip, environment.redis] if environment.redis else pip, cwd=ROOT, check=True)
        stamp.touch()
    return python


def run(environment: Environment, arguments: Sequence[str]) -> Result:
    """Runs the tests there, and shows what they print."""
    try:
        python = prepare(environment)
    except (OSError, subprocess.CalledProcessError) as error:
        return Result(environment, False, f"could not be prepared: {error}")
    last = ""
    command = [str(python), "-m", "pytest", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, errors="replace") as tests:
        assert tests.stdout is not None
        for line in tests.stdout:
            print(line, end="", flush=True)
            last = line.strip(" =\n") or last
    return Result(environment, tests.returncode == 0, last)


def report(results: Sequence[Result], missing: Sequence[str]) -> int:
    """A line for each; returns the exit code."""
    for result in results:
        print(f"Python {result.environment!s:<8} {'passed' if result.passed else 'FAILED'}: {result.summary}")
    if missing:
        print(f"not found: Python {', '.join(missing)}")
    return 0 if results and all(result.passed for result in results) else 1


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make test-matrix", description=__doc__)
    parser.add_argument("--versions", default="", help='Only these: "3.12 3.13".')
    parser.add_argument("--jobs", default="2", help="Test processes.")
    parser.add_argument("--args", default="", help="For pytest. With a path in them, only what they name is run.")
    options = parser.parse_args(arguments)
    asked = options.versions.replace(",", " ").split()
    found = newest(map(ask, candidates(os.environ, Path.home())))
    print("found:", ", ".join(f"{each} ({each.program})" for each in found.values()) or "no Python", flush=True)
    missing = [version for version in (asked or EXPECTED) if version not in found]
    if missing:
        print(f"not found: Python {', '.join(missing)}", flush=True)
    if asked and missing:
        return 1
    if shutil.which("redis-server") is None and shutil.which("valkey-server") is None:
        print("redis-server is missing", file=sys.stderr)
        return 1
    more = shlex.split(options.args)
    paths = [] if any(word.startswith("tests/") for word in more) else TIERS
    pytest = ["-q", "-n", options.jobs, "-m", "not slow", *paths, *more]
    chosen = [each for minor, each in found.items() if not asked or minor in asked]
    results = [run(each, pytest) for each in environments(chosen)]
    return report(results, missing)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
