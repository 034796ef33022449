"""What is built from the repository: a wheel that has everything, and works without the repository."""

import configparser
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from lowq.version import VERSION

ROOT = Path(__file__).parents[3]


def build(kind: str, folder: Path) -> Path:
    """Builds with what is installed: nothing is downloaded."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


def sources(*folders: str) -> set[str]:
    """The files of packages, as the wheel is to name them."""
    return {
        path.relative_to((ROOT / folder).parent).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_has_the_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.startswith(f"lowq-{VERSION}.dist-info/")}
        metadata = Parser().parsestr(archive.read(f"lowq-{VERSION}.dist-info/METADATA").decode())
        entry_points = configparser.ConfigParser()
        entry_points.read_string(archive.read(f"lowq-{VERSION}.dist-info/entry_points.txt").decode())
    deploy = {f"lowq/cli/project/{name}" for name in sources("deploy")}
    assert names == sources("lowq", "lowq_pytest", "web/lowq_web") | deploy
    assert {"lowq/py.typed", "lowq/store/lua/push.lua"} <= names
    assert dict(entry_points["console_scripts"]) == {"lowq": "lowq.cli:main"}
    assert dict(entry_points["pytest11"]) == {"lowq": "lowq_pytest"}
    assert list(entry_points["lowq.web"]) == ["app", "serve"]
    assert dict(entry_points["opentelemetry_instrumentor"]) == {"lowq": "lowq.contrib.otel:LowqInstrumentor"}
    assert (metadata["Name"], metadata["Version"], metadata["Requires-Python"]) == ("lowq", VERSION, ">=3.11")
    readme = metadata.get_payload()
    assert isinstance(readme, str)
    links = re.findall(r'\]\(([^)]+)|(?:src|srcset)="([^"]+)', readme)  # an index shows no files of the repository
    assert len(links) > 30
    assert all("".join(link).startswith(("https://", "#")) for link in links)
    needed = [re.split("[<>]", item)[0] for item in metadata.get_all("Requires-Dist", []) if "extra ==" not in item]
    assert sorted(needed) == ["click", "cronsim", "hiredis", "msgspec", "redis"]
    assert set(metadata.get_all("Provides-Extra", [])) == {
        "all", "django", "embedded", "otel", "outbox", "reload", "sentry", "uvloop", "web",
    }  # fmt: skip


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import lowq, lowq.cli, lowq.testing, lowq_web
assert lowq.__file__.startswith(sys.argv[1]) and lowq_web.__file__.startswith(sys.argv[1])
assert lowq.__version__ == sys.argv[2]

app = lowq.Lowq(redis_url="memory://")

@app.worker
def orders(payloads_by_id):
    print(payloads_by_id)

orders.perform_async({"id": 1, "payload": "shipped"})
assert lowq.testing.drain(orders).performed == 1
lowq.cli.main(["init", "--deploy", "made"], standalone_mode=False)
"""


def test_the_wheel_works_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    command = [sys.executable, "-I", "-c", SCRIPT, str(tmp_path / "site"), VERSION]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("{'1': ['shipped']}\nwrote made/Dockerfile\n")
    written = {path.relative_to(tmp_path / "made").as_posix() for path in (tmp_path / "made").rglob("*")}
    assert {"Dockerfile", ".dockerignore", "compose.yaml", "deploy/lowq.service", "deploy/k8s/nodes.yaml"} < written


def test_the_source_distribution_has_what_is_needed_to_build_and_test_it(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "Makefile", "CHANGELOG.md", "tests/conftest.py", "examples/orders.py"} <= names
    assert sources("deploy") <= names  # a wheel is built from it
    assert sources("lowq", "lowq_pytest") | {f"web/{name}" for name in sources("web/lowq_web")} <= names
