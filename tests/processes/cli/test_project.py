"""The application of a project: `lowq run APP`, `[tool.lowq]` in pyproject.toml; `lowq init`; completion."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.rows import case

LOWQ = [sys.executable, "-m", "lowq"]
APP = "import lowq\n\n\n@lowq.worker(shards_count=2)\ndef {name}(payloads_by_id):\n    pass\n"


def run(folder: Path, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LOWQ, *args], cwd=folder, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "LOWQ_REDIS_URL": "memory://", **environment},
    )  # fmt: skip


def check(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """`lowq run` loads its code, and ends."""
    return run(folder, "run", *args, "--check")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A package with a worker, and a file with another."""
    (tmp_path / "shop" / "deep").mkdir(parents=True)
    (tmp_path / "shop" / "__init__.py").write_text("")
    (tmp_path / "shop" / "workers.py").write_text(APP.format(name="Orders"))
    (tmp_path / "mails.py").write_text(APP.format(name="Mails"))
    return tmp_path


def test_the_application_is_named_without_an_option(project: Path) -> None:
    for app in ["shop/workers.py", "mails"]:
        with case(app):
            assert check(project, app).returncode == 0


def test_what_is_named_is_passed_on_to_processes(project: Path) -> None:
    with subprocess.Popen(
        [*LOWQ, "run", "shop.workers", "--processes", "1", "--embedded"], cwd=project, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if "of Orders" in line:
                break
        else:
            raise AssertionError("no process has loaded it")
        running.terminate()
        running.stderr.read()
    assert running.returncode == 0


def test_the_project_says_which(project: Path) -> None:
    rows: list[tuple[str, str]] = [
        ("shop.workers", "."), ("shop/workers.py", "shop/deep"), ("mails.py", "elsewhere"),
    ]  # fmt: skip
    (project / "elsewhere").mkdir()
    for app, folder in rows:
        with case(app, folder):
            (project / "pyproject.toml").write_text(f'[project]\nname = "x"\n[tool.lowq]\napp = "{app}"\n')
            found = check(project / folder)
            assert found.returncode == 0, found.stderr
            assert "no queue" in run(project / folder, "stats").stderr


def test_what_is_typed_goes_before_the_project(project: Path) -> None:
    (project / "pyproject.toml").write_text('[tool.lowq]\napp = "nowhere"\n')
    assert check(project, "mails").returncode == 0
    assert run(project, "stats", "-r", "lowq").returncode == 0
    found = check(project)
    assert found.returncode == 2
    assert "there is no module 'nowhere'" in found.stderr
    assert f"({project / 'pyproject.toml'} says app = 'nowhere')" in found.stderr


def test_a_project_that_makes_no_sense_or_names_nothing_is_refused(project: Path) -> None:
    rows: list[tuple[str, str]] = [
        ("[tool.lowq]\napp = 7\n", 'app = 7: write app = "shop.workers"'),
        ('[tool.lowq]\napp = " "\n', 'write app = "shop.workers"'),
        ("[tool.lowq]\nworkers = 'x'\n", "'workers' is no setting; it may have: app"),
        ("[tool]\nlowq = 1\n", "it is no table"),
        ("[tool.lowq\n", "it can't be read"),
        ("[tool.lowq]\n", "lowq run shop.workers"),
        ("", "lowq run shop.workers"),
    ]
    for text, said in rows:
        with case(text, said):
            (project / "pyproject.toml").write_text(text)
            found = check(project)
            assert found.returncode == 2
            assert said in found.stderr
            assert "Traceback" not in found.stderr
            assert check(project, "mails").returncode == 0


def test_two_that_differ_are_refused(project: Path) -> None:
    found = check(project, "mails", "-r", "shop.workers")
    assert found.returncode == 2
    assert "mails and -r shop.workers say two things" in found.stderr
    assert check(project, "mails", "-r", "mails").returncode == 0


def test_a_new_project_works_at_once(tmp_path: Path) -> None:
    made = run(tmp_path, "init", "shop")
    assert made.returncode == 0, made.stderr
    shop = tmp_path / "shop"
    assert {"workers.py", "test_workers.py", "pyproject.toml", "compose.yaml"} <= {file.name for file in shop.iterdir()}
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd=shop, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert "1 passed" in tests.stdout, tests.stdout
    assert check(shop).returncode == 0
    assert check(shop, "--embedded").returncode == 0
    compose = yaml.safe_load((shop / "compose.yaml").read_text())
    assert set(compose["services"]) == {"redis", "node"}
    assert "noeviction" in compose["services"]["redis"]["command"]
    assert "--find-links . 'lowq[web]'" in compose["services"]["node"]["command"]  # a wheel beside it is installed
    for line in made.stdout.splitlines():
        assert "lowq[" not in line


def test_a_new_project_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "workers.py").write_text("mine")
    refused = run(tmp_path, "init")
    assert refused.returncode == 2
    assert "is there already" in refused.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["workers.py"]
    (tmp_path / "workers.py").unlink()
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'mine'\n")
    made = run(tmp_path, "init")
    assert made.returncode == 0
    assert "[tool.lowq]" in made.stderr
    assert (tmp_path / "pyproject.toml").read_text() == "[project]\nname = 'mine'\n"
    assert (tmp_path / "test_workers.py").exists()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes(tmp_path: Path, shell: str) -> None:
    script = run(tmp_path, "completion", shell)
    assert script.returncode == 0
    assert f"_LOWQ_COMPLETE={shell}_complete" in script.stdout
    words = {"COMP_WORDS": "lowq ki", "COMP_CWORD": "1" if shell != "fish" else "ki"}
    offered = run(tmp_path, _LOWQ_COMPLETE=f"{shell}_complete", **words)
    assert "kick" in offered.stdout
    assert "bury" not in offered.stdout
