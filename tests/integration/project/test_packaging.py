"""What is built from the repository: a wheel that has everything, and works without the repository."""

import configparser
import re
import subprocess
import sys
import tarfile
import textwrap
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
VERSION: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def build(kind: str, folder: Path) -> Path:
    """Builds with what is installed: nothing is downloaded."""
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def metadata(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"lowq-{VERSION}.dist-info/{name}").decode()


def sources(folder: str) -> set[str]:
    """The files of a package, as the wheel is to name them."""
    base = ROOT / folder
    return {
        path.relative_to(base.parent).as_posix()
        for path in base.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }


class TestWheel:
    def test_every_script_is_in_it(self, names: set[str]) -> None:
        shipped = {name for name in names if name.startswith("lowq/store/lua/") and name.endswith(".lua")}
        assert shipped == {name for name in sources("lowq") if name.endswith(".lua")}
        for name in (
            "push",
            "ack_and_take",
            "fail",
            "release",
            "bury",
            "acquire",
            "renew",
            "surrender",
            "kick",
            "delete",
            "perform_now",
        ):
            assert f"lowq/store/lua/{name}.lua" in shipped
        assert any(name.startswith("lowq/store/lua/lib/") for name in shipped)

    def test_type_checkers_find_the_types(self, names: set[str]) -> None:
        assert "lowq/py.typed" in names

    @pytest.mark.parametrize("folder", ["lowq", "lowq_pytest", "web/lowq_web"])
    def test_the_packages_are_complete(self, names: set[str], folder: str) -> None:
        assert sources(folder) - names == set()
        assert f"{Path(folder).name}/__init__.py" in names

    def test_nothing_else_is_in_it(self, names: set[str]) -> None:
        assert {name.split("/")[0] for name in names} == {
            "lowq",
            "lowq_pytest",
            "lowq_web",
            f"lowq-{VERSION}.dist-info",
        }
        assert not [name for name in names if name.endswith(".pyc") or "/." in name]

    def test_it_brings_the_command_the_dashboard_and_the_plugin_of_pytest(self, wheel: Path) -> None:
        entry_points = configparser.ConfigParser()
        entry_points.read_string(metadata(wheel, "entry_points.txt"))
        assert dict(entry_points["console_scripts"]) == {"lowq": "lowq.cli:main"}
        assert dict(entry_points["pytest11"]) == {"lowq": "lowq_pytest"}
        assert list(entry_points["lowq.web"]) == ["app", "serve"]

    def test_its_metadata_say_what_it_needs(self, wheel: Path) -> None:
        headers = Parser().parsestr(metadata(wheel, "METADATA"))
        assert (headers["Name"], headers["Version"]) == ("lowq", VERSION)
        assert headers["Requires-Python"] == ">=3.11"
        needed = [re.split("[<>]", item)[0] for item in headers.get_all("Requires-Dist", []) if "extra ==" not in item]
        assert sorted(needed) == ["click", "cronsim", "hiredis", "msgspec", "redis"]
        assert set(headers.get_all("Provides-Extra", [])) == {
            "all", "dev", "embedded", "otel", "reload", "sentry", "uvloop", "web",
        }  # fmt: skip

    def test_it_works_without_the_repository(self, wheel: Path, tmp_path: Path) -> None:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tmp_path / "site")
        script = """
            import sys
            sys.path.insert(0, sys.argv[1])
            import lowq, lowq.testing, lowq_web
            assert lowq.__file__.startswith(sys.argv[1]) and lowq_web.__file__.startswith(sys.argv[1])
            from lowq.cli import main
            assert callable(main)
            assert lowq.__version__ == sys.argv[2]

            app = lowq.Lowq(redis_url="memory://")

            @app.worker
            def orders(payloads_by_id):
                print(payloads_by_id)

            orders.perform_async({"id": 1, "payload": "shipped"})
            assert lowq.testing.drain(orders).performed == 1
        """
        done = subprocess.run(
            [sys.executable, "-I", "-c", textwrap.dedent(script), tmp_path / "site", VERSION],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == "{'1': ['shipped']}\n"


def test_the_source_distribution_has_what_is_needed_to_build_and_test_it(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "Makefile", "CHANGELOG.md", "tests/conftest.py", "examples/orders.py"} <= names
    assert sources("lowq") <= names
    assert sources("lowq_pytest") <= names
    assert {f"web/{name}" for name in sources("web/lowq_web")} <= names
