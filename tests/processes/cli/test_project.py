"""The application of a project: `lowq run APP`, `[tool.lowq]` in pyproject.toml; `lowq init`; completion."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from lowq.cli import main
from tests.processes.cli.support import working_in
from tests.rows import case

APP = "import lowq\n\n\n@lowq.worker(shards_count=2)\ndef {name}(payloads_by_id):\n    pass\n"


def run(folder: Path, *args: str) -> Result:
    with working_in(folder):
        return CliRunner().invoke(main, args, env={"LOWQ_REDIS_URL": "memory://project"})


def check(folder: Path, *args: str) -> Result:
    """`lowq run` loads its code, and ends."""
    return run(folder, "run", *args, "--check")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A package with a worker, and a file with another."""
    (tmp_path / "shop" / "deep").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "shop" / "__init__.py").write_text("")
    (tmp_path / "shop" / "workers.py").write_text(APP.format(name="Orders"))
    (tmp_path / "mails.py").write_text(APP.format(name="Mails"))
    return tmp_path


def test_the_application_is_named_or_the_project_says_which(project: Path) -> None:
    for app in ["shop/workers.py", "mails"]:
        with case(app):
            assert check(project, app).exit_code == 0
    for app, folder in [("shop.workers", "."), ("shop/workers.py", "shop/deep"), ("mails.py", "elsewhere")]:
        with case(app, folder):
            (project / "pyproject.toml").write_text(f'[project]\nname = "x"\n[tool.lowq]\napp = "{app}"\n')
            found = check(project / folder)
            assert found.exit_code == 0, found.stderr
            assert "no queue" in run(project / folder, "stats").stderr


def test_what_is_typed_goes_before_the_project(project: Path) -> None:
    (project / "pyproject.toml").write_text('[tool.lowq]\napp = "nowhere"\n')
    assert check(project, "mails").exit_code == 0
    assert run(project, "stats", "-r", "mails").exit_code == 0
    found = check(project)
    assert found.exit_code == 2
    assert "there is no module 'nowhere'" in found.stderr
    assert f"({project / 'pyproject.toml'} says app = 'nowhere')" in found.stderr
    twice = check(project, "mails", "-r", "shop.workers")
    assert twice.exit_code == 2
    assert "mails and -r shop.workers say two things" in twice.stderr
    assert check(project, "mails", "-r", "mails").exit_code == 0


def test_a_project_that_makes_no_sense_or_names_nothing_is_refused(project: Path) -> None:
    for text, said in (
        ("[tool.lowq]\napp = 7\n", 'app = 7: write app = "shop.workers"'),
        ('[tool.lowq]\napp = " "\n', 'write app = "shop.workers"'),
        ("[tool.lowq]\nworkers = 'x'\n", "'workers' is no setting; it may have: app"),
        ("[tool]\nlowq = 1\n", "it is no table"),
        ("[tool.lowq\n", "it can't be read"),
        ("[tool.lowq]\n", "lowq run shop.workers"),
        ("", "lowq run shop.workers"),
    ):
        with case(text, said):
            (project / "pyproject.toml").write_text(text)
            found = check(project)
            assert found.exit_code == 2
            assert said in found.stderr
            assert check(project, "mails").exit_code == 0


def test_a_new_project_works_at_once(tmp_path: Path) -> None:
    made = run(tmp_path, "init", "shop")
    assert made.exit_code == 0, made.stderr
    shop = tmp_path / "shop"
    assert {"workers.py", "test_workers.py", "pyproject.toml", "compose.yaml"} <= {file.name for file in shop.iterdir()}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    tests = subprocess.run(command, cwd=shop, capture_output=True, text=True, timeout=120, check=False)
    assert "1 passed" in tests.stdout, tests.stdout
    assert check(shop).exit_code == 0
    assert check(shop, "--embedded").exit_code == 0
    compose = yaml.safe_load((shop / "compose.yaml").read_text())
    assert set(compose["services"]) == {"redis", "node"}
    assert "noeviction" in compose["services"]["redis"]["command"]
    assert "--find-links . 'lowq[web]'" in compose["services"]["node"]["command"]  # a wheel beside it is installed


def test_a_new_project_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "workers.py").write_text("mine")
    refused = run(tmp_path, "init")
    assert refused.exit_code == 2
    assert "is there already" in refused.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["workers.py"]
    (tmp_path / "workers.py").unlink()
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'mine'\n")
    made = run(tmp_path, "init")
    assert made.exit_code == 0
    assert "[tool.lowq]" in made.stderr
    assert (tmp_path / "pyproject.toml").read_text() == "[project]\nname = 'mine'\n"
    assert (tmp_path / "test_workers.py").exists()


def test_a_shell_completes() -> None:
    for shell in ("bash", "zsh", "fish"):
        with case(shell):
            script = CliRunner().invoke(main, ["completion", shell])
            assert script.exit_code == 0
            assert f"_LOWQ_COMPLETE={shell}_complete" in script.stdout
            words = {"COMP_WORDS": "lowq ki", "COMP_CWORD": "ki" if shell == "fish" else "1"}
            environment = {"_LOWQ_COMPLETE": f"{shell}_complete", **words}
            offered = CliRunner().invoke(main, [], prog_name="lowq", env=environment).stdout
            assert "kick" in offered
            assert "bury" not in offered
