"""`make release-check`: everything about a release that can be done without publishing it.

1. the wheel and the source distribution are built once, into dist/; what follows is about these files;
2. the wheel made from the source distribution is the same; `twine check`: the README renders on an index;
3. the version is that of the tag, if there is one, and has a section in the changelog; no page says then that
   lowq is on no index;
4. for the lowest and the newest dependencies: the wheel is installed into an environment of its own, and the rules that
   need no Redis pass on it, and a node starts on a real Redis, performs and stops;
5. what the wheel needs is written into dist/sbom.json (CycloneDX);
6. the workflows are audited (zizmor).

What only the publication itself can show is named at the end.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from tests.redis_server import RedisServer
from tests.waiting import PATIENCE, until

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
#: The extras that need no compiler and no server.
EXTRAS = "all"
#: What the tests of the rules import besides lowq.
TEST_TOOLS = [
    "pytest",
    "pytest-randomly",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "greenlet",
    "attrs",
    "pydantic",
    "httpx2",
    "itsdangerous",
]
#: Rules that show what lowq uses of other packages: types and JSON, the embedded store, connections, pages. They need
#: none of the tools of the repository. All others run in `make test`.
TESTS = [
    "tests/rules/codec",
    "tests/rules/testing",
    *(f"tests/rules/store/test_{name}.py" for name in ("cluster", "deadline", "pool", "pubsub", "sentinels")),
    *(f"tests/rules/web/test_{name}.py" for name in ("auth", "compression", "live", "pages")),
]
#: Performed by a node: a thread's worker, and one of an event loop, which is uvloop's.
APPLICATION = """
import asyncio, pathlib
import lowq

@lowq.worker(shards_count=3)
class Orders(lowq.Worker):
    def perform_one(self, order_id, payloads):
        Mails.push(order_id, payloads[-1])

@lowq.worker(shards_count=3)
class Mails(lowq.Worker):
    async def perform_one(self, order_id, payloads):
        with pathlib.Path("performed").open("a") as file:
            print(order_id, type(asyncio.get_running_loop()).__module__, file=file)

if __name__ == "__main__":
    Orders.perform_async([{"id": number, "payload": number} for number in range(100)])
"""
#: What a machine without the accounts of the project can't show.
NOT_HERE = (
    "the upload to an index by trusted publishing, and its attestations: .github/workflows/release.yml does it",
    "how the index shows the README: twine has only rendered it",
    "audits of the workflows that ask GitHub: zizmor ran offline",
)


class Failed(Exception):
    """A part of the check failed; the message is for people."""


def run(*command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=None if env is None else {**os.environ, **env}, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        raise Failed(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


def tool(name: str) -> Path:
    return Path(sys.executable).with_name(name)


def build() -> tuple[Path, Path]:
    """The wheel and the source distribution."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST)  # the wheel is built from the source distribution
    (wheel,), (source,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    return wheel, source


def check_files(wheel: Path, source: Path) -> None:
    run(tool("twine"), "check", "--strict", wheel, source)
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "build", "--wheel", "--outdir", folder)  # from the tree
        (other,) = Path(folder).iterdir()
        names = [set(zipfile.ZipFile(each).namelist()) for each in (wheel, other)]
        if names[0] != names[1]:
            raise Failed(f"the source distribution lacks files, or has others: {sorted(names[0] ^ names[1])}")


def check_version(wheel: Path, tag: str | None, changelog: str) -> None:
    version = wheel.name.split("-")[1]
    if tag is not None and tag != f"v{version}":
        raise Failed(f"the tag is {tag}, and the version in lowq/version.py is {version}")
    if tag is not None and not re.search(rf"^## \[{re.escape(version)}\] - \d", changelog, re.MULTILINE):
        raise Failed(f"CHANGELOG.md has no section '## [{version}] - DATE'")


def check_pages(tag: str | None, pages: dict[str, str]) -> None:
    """``pages``: their texts by name."""
    before = r"not on a package index yet|[Uu]ntil lowq is on an index"
    left = [name for name, text in pages.items() if re.search(before, text)]
    if tag is not None and left:
        raise Failed(f"these pages say that lowq is on no index: {', '.join(left)}")


def requirements(wheel: Path) -> list[Requirement]:
    """What the wheel needs with all extras, here."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    extras = ["", *metadata.get_all("Provides-Extra", [])]
    found = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    return [
        each
        for each in found
        if each.name != metadata["Name"]
        and (each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras))
    ]


def floor_of(requirement: Requirement) -> Version:
    """The lowest version that it allows."""
    (floor,) = (each.version for each in requirement.specifier if each.operator == ">=")
    return Version(floor)


def check_installed(wheel: Path, source: Path, resolution: str) -> None:
    """Tests the installed wheel, by its own tests, with the lowest or the newest dependencies that it allows."""
    with tempfile.TemporaryDirectory() as folder:
        venv, tree = Path(folder, "venv"), Path(folder, source.name.removesuffix(".tar.gz"))
        python = venv / "bin" / "python"
        uv: list[str | Path] = [tool("uv"), "pip"]
        run(tool("uv"), "venv", "--quiet", "--python", sys.executable, venv)
        # Named one by one: only what is named is taken at its lowest, and not what that needs in turn.
        needed = [f"{each.name}{each.specifier}" for each in requirements(wheel)]
        asked = [f"lowq[{EXTRAS}] @ {wheel.as_uri()}", *needed]
        run(*uv, "install", "--quiet", "--python", python, "--resolution", resolution, *asked)
        frozen = Path(folder, "frozen.txt")
        frozen.write_text(run(*uv, "freeze", "--quiet", "--python", python))
        if resolution == "lowest-direct":
            check_floors(requirements(wheel), frozen.read_text())
        else:
            written: list[str | Path] = ["-o", DIST / "sbom.json"]
            run(tool("cyclonedx-py"), "environment", "--pyproject", ROOT / "pyproject.toml", *written, python)
        run(*uv, "install", "--quiet", "--python", python, "--constraint", frozen, *TEST_TOOLS)
        with tarfile.open(source) as archive:
            archive.extractall(folder, filter="data")
        for name in ("lowq", "lowq_pytest", "web"):  # the installed ones are meant
            shutil.rmtree(tree / name)
        chosen = ["-m", "not slow and not redis", *TESTS]
        run(python, "-m", "pytest", "-q", "-n", "2", *chosen, cwd=tree, env={"PYTHONPATH": ""})
        check_node(venv / "bin", Path(folder, "application"))


def check_floors(needed: list[Requirement], frozen: str) -> None:
    """That what is installed is the lowest that is allowed: what pyproject.toml says is what is tested."""
    installed = dict(line.split("==") for line in frozen.splitlines() if "==" in line)
    wrong = [
        f"{each.name} {installed.get(each.name, 'is not installed')} instead of {floor}"
        for each in needed
        if (floor := floor_of(each)).release != Version(installed.get(each.name, "0")).release[: len(floor.release)]
    ]
    if wrong:
        raise Failed(f"not the lowest that pyproject.toml allows: {', '.join(wrong)}")


def check_node(programs: Path, folder: Path) -> None:
    """A node of the installed wheel performs on a real Redis, and stops when it is told to."""
    folder.mkdir()
    (folder / "app.py").write_text(APPLICATION)
    performed, log = folder / "performed", folder / "log"
    with RedisServer(folder / "redis") as server, log.open("wb") as output:
        environment = {"LOWQ_REDIS_URL": server.url, "PYTHONPATH": ""}
        run(programs / "python", "app.py", cwd=folder, env=environment)
        command = [str(programs / "lowq"), "run", "app.py"]
        node = subprocess.Popen(command, cwd=folder, env=os.environ | environment, stdout=output, stderr=output)
        try:
            until(
                lambda: node.poll() is not None or (performed.exists() and performed.read_text().count("\n") >= 100),
                "100 jobs",
            )
            node.terminate()
            code = node.wait(PATIENCE)
        finally:
            node.kill()
            node.wait()
    lines = set(performed.read_text().splitlines()) if performed.exists() else set()
    if code or lines != {f"{number} uvloop" for number in range(100)}:
        raise Failed(f"the node ended with {code}, and has performed {len(lines)} jobs:\n{log.read_text()[-4000:]}")


def check_workflows() -> None:
    run(tool("zizmor"), "--offline", "--quiet", ROOT / ".github")


def main() -> None:
    parser = argparse.ArgumentParser(prog="make release-check", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tag", help="the tag that is released, v0.1.0")
    tag: str | None = parser.parse_args().tag
    wheel, source = build()
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    steps: list[tuple[str, Callable[[], None]]] = [
        ("the version and its tag", lambda: check_version(wheel, tag, (ROOT / "CHANGELOG.md").read_text())),
        ("the pages", lambda: check_pages(tag, {path.name: path.read_text() for path in pages})),
        ("the files", lambda: check_files(wheel, source)),
        ("with the lowest dependencies", lambda: check_installed(wheel, source, "lowest-direct")),
        ("with the newest dependencies, and their list", lambda: check_installed(wheel, source, "highest")),
        ("the workflows", check_workflows),
    ]
    failed = 0
    for name, check in steps:
        try:
            check()
        except (Failed, AssertionError) as error:
            failed += 1
            print(f"FAILED  {name}\n{error}", flush=True)
        else:
            print(f"ok      {name}", flush=True)
    print(*(f"{path.relative_to(ROOT)}  {path.stat().st_size:,} bytes" for path in sorted(DIST.iterdir())), sep="\n")
    print(*(f"not done here: {what}" for what in NOT_HERE), sep="\n")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
