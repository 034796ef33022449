"""The application of a project: `lowq run APP`, `[tool.lowq]` in pyproject.toml; `lowq init`; completion."""

import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from click.testing import CliRunner, Result

from lowq.cli import main
from tests.processes.cli.support import working_in
from tests.rows import case
from tests.waiting import PATIENCE, until

ROOT = Path(__file__).parents[3]
#: The files of deploy/ that every new project has.
CONTAINERS = {"Dockerfile", ".dockerignore", "compose.yaml"}
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


def test_workers_of_another_application_are_named(project: Path) -> None:
    other = "app = lowq.Lowq()\n@app.worker\nclass Users:\n    def perform(self, payloads_by_id): ...\n"
    (project / "one.py").write_text(APP.format(name="Orders"))
    (project / "two.py").write_text(APP.format(name="Orders") + other)
    for app, said in (
        ("one.py", ""),
        ("two.py", "workers of another application are not run by this node: Users"),
        ("two.py:app", "workers of the default application are not run by this node: Orders"),
    ):
        with case(app):
            ran = subprocess.run(
                [sys.executable, "-m", "lowq", "run", app, "--check"], cwd=project, capture_output=True, text=True,
                env={**os.environ, "LOWQ_REDIS_URL": "memory://project"}, timeout=120, check=True,
            )  # fmt: skip
            assert said in ran.stderr
            assert ("are not run" in ran.stderr) == bool(said)


def test_a_new_project_works_at_once(tmp_path: Path) -> None:
    """Also in a folder of another project, such as the clone that lowq was installed from."""
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "--unknown"\n')
    made = run(tmp_path, "init", "shop")
    assert made.exit_code == 0, made.stderr
    shop = tmp_path / "shop"
    names = {"workers.py", "test_workers.py", "pyproject.toml", *CONTAINERS}
    assert {file.name for file in shop.iterdir()} == names
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    tests = subprocess.run(command, cwd=shop, capture_output=True, text=True, timeout=120, check=False)
    assert "1 passed" in tests.stdout, tests.stdout
    assert check(shop).exit_code == 0
    assert check(shop, "--embedded").exit_code == 0
    for name in CONTAINERS:
        assert (shop / name).read_text() == (ROOT / "deploy" / name).read_text()


def test_a_new_project_may_have_all_files_for_a_deploy(tmp_path: Path) -> None:
    made = run(tmp_path, "init", "--deploy")
    assert made.exit_code == 0, made.stderr
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    for original in (path for path in (ROOT / "deploy").rglob("*") if path.is_file()):
        (copy,) = [path for path in written if path.name == original.name]
        assert copy.read_text() == original.read_text()
    assert "deploy/k8s" in made.stdout
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "deploy").write_text("mine")
    refused = run(tmp_path / "elsewhere", "init", "--deploy")
    assert "can't be written" in refused.stderr


def test_a_new_project_with_fastapi_works_at_once(tmp_path: Path, redis_url: str) -> None:
    made = run(tmp_path, "init", "shop", "--fastapi")
    assert made.exit_code == 0, made.stderr
    shop = tmp_path / "shop"
    names = {"workers.py", "api.py", "database.py", "test_api.py", "pyproject.toml", "compose.override.yaml"}
    names |= CONTAINERS
    assert {file.name for file in shop.iterdir()} == names
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    tests = subprocess.run(command, cwd=shop, capture_output=True, text=True, timeout=120, check=False)
    assert "5 passed" in tests.stdout, tests.stdout
    compose, override = (yaml.safe_load((shop / f"compose{kind}.yaml").read_text()) for kind in ("", ".override"))
    assert compose["services"].keys() - override["services"].keys() == {"valkey"}
    assert override["services"].keys() - compose["services"].keys() == {"postgres"}
    database = override["services"]["web"]["environment"]["DATABASE_URL"]
    assert override["services"]["node"]["environment"]["DATABASE_URL"] == database
    assert override["services"]["web"]["command"][0] == "uvicorn"
    variables = {**os.environ, "LOWQ_REDIS_URL": redis_url}
    log = tmp_path / "log"
    with ExitStack() as stack, log.open("wb") as output:
        processes = [
            stack.enter_context(ended(subprocess.Popen([sys.executable, "-m", *words], cwd=shop, env=variables, **to)))
            for words, to in (
                (["uvicorn", "api:app", "--port", "0"], {"stderr": output}),
                (["lowq", "run"], {"stderr": subprocess.DEVNULL}),
            )
        ]

        def serves() -> re.Match[str] | None:
            assert [process.poll() for process in processes] == [None, None], log.read_text()
            return re.search(r"running on (http://\S+)", log.read_text())

        found = until(serves, "the API")
        assert found is not None
        client = stack.enter_context(httpx.Client(base_url=found[1], timeout=PATIENCE))
        until(lambda: client.get("/readyz").json() == {"nodes": 1}, "the node")
        assert client.post("/orders/42", json={"version": 2, "status": "paid"}).status_code == 202
        until(lambda: client.get("/orders/42").status_code == 200, "the order saved")
        assert client.get("/orders/42").json() == {"id": 42, "version": 2, "status": "paid"}
        for process in processes:
            process.terminate()
            assert process.wait(PATIENCE) in (0, -signal.SIGTERM)


@contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_new_project_is_named_after_its_folder(tmp_path: Path) -> None:
    rows = [("shop", "shop"), ("My Shop_2", "my-shop-2"), ("lowq", "orders"), ("заказы", "orders")]
    for folder, name in rows:
        for options in ([], ["--fastapi"]):
            with case(folder, *options):
                own = tmp_path / str(len(options)) / folder
                own.mkdir(parents=True)
                assert run(own, "init", *options).exit_code == 0
                assert tomllib.loads((own / "pyproject.toml").read_text())["project"]["name"] == name


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
