"""The files in deploy/ for containers, systemd and Kubernetes: accepted by the tools that read them, and the steps of
the image done one by one. No image is built: that needs an engine.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lowq.cli import main
from tests.processes.project.test_packaging import ROOT, build
from tests.redis_server import RedisServer, free_port
from tests.rows import case
from tests.waiting import PATIENCE, until

DEPLOY = ROOT / "deploy"
MANIFESTS = ("nodes.yaml", "web.yaml", "network.yaml")
#: An application, as the Dockerfile expects one.
PROJECT = """
[project]
name = "shop"
version = "1.0.0"
dependencies = ["lowq"]
[tool.setuptools]
py-modules = ["workers"]
[tool.lowq]
app = "workers"
"""


def run(*command: str | Path, **options: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return str(done.stdout)


def succeeds(command: list[str], environment: dict[str, str]) -> bool:
    return subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "k8s" / name).read_text()))


def commands() -> list[list[str]]:
    """All commands of lowq in compose file and manifests."""
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"].values()
    pods = [
        doc["spec"]["template"]["spec"] for name in MANIFESTS for doc in documents(name) if doc["kind"] == "Deployment"
    ]
    found = [service["command"] for service in services if "command" in service]
    found += [container["args"] for pod in pods for container in pod["containers"]]
    return [command for command in found if command[0] == "lowq"]


def test_the_manifests_are_valid_and_fit_together() -> None:
    import kubernetes_validate  # here: it takes seconds

    found = [doc for name in MANIFESTS for doc in documents(name)]
    for document in found:
        with case(document["kind"], document["metadata"]["name"]):
            kubernetes_validate.validate(document, "1.30", strict=True)
    nodes = documents("nodes.yaml")[0]["spec"]["template"]
    (container,) = nodes["spec"]["containers"]
    ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
    environment = {item["name"]: item.get("value", "") for item in container["env"]}
    assert environment["LOWQ_HEALTH"].endswith(f":{ports['health']}")
    assert nodes["metadata"]["annotations"]["prometheus.io/port"] == ports["health"]
    (scaled,) = documents("keda.yaml")
    assert scaled["spec"]["scaleTargetRef"]["name"] in {doc["metadata"]["name"] for doc in found}
    if shutil.which("kubectl"):  # otherwise only the list of its files is checked
        assert run("kubectl", "kustomize", DEPLOY / "k8s").count("\nkind: ") == len(found)
    assert documents("kustomization.yaml")[0]["resources"] == list(MANIFESTS)


def test_their_commands_are_those_that_lowq_has() -> None:
    assert len(commands()) == 3
    for _, verb, *options in commands():
        with case(verb, options):
            main.commands[verb].make_context(verb, options, resilient_parsing=False).close()


def compose() -> list[str]:
    """The command of Docker Compose; none: it is not here."""
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    has_plugin = shutil.which("docker") and succeeds(["docker", "compose", "version"], dict(os.environ))
    return ["docker", "compose"] if has_plugin else []


def test_compose_accepts_its_file_and_what_fastapi_adds_and_asks_for_a_password(tmp_path: Path) -> None:
    command = compose()
    if not command:
        pytest.skip("there is no Docker Compose")
    added = ROOT / "lowq" / "cli" / "project" / "fastapi" / "compose.override.yaml-tpl"
    for source, name in ((DEPLOY / "compose.yaml", "compose.yaml"), (added, "compose.override.yaml")):
        shutil.copy(source, tmp_path / name)
    environment = {name: value for name, value in os.environ.items() if name not in ("LOWQ_WEB_PASSWORD", "APP_SECRET")}
    passwords = {**environment, "LOWQ_WEB_PASSWORD": "a" * 12, "APP_SECRET": "b"}
    for files in (["-f", "compose.yaml"], ["-f", "compose.yaml", "-f", "compose.override.yaml"]):
        with case(files):
            shown = yaml.safe_load(run(*command, *files, "config", cwd=tmp_path, env=passwords))
            assert {"valkey", "node", "web"} <= shown["services"].keys()
            refused = subprocess.run(
                [*command, *files, "config"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
            )
            assert refused.returncode != 0
            assert "12 characters" in refused.stderr


def test_the_unit_of_systemd_is_accepted(tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("there is no systemd-analyze")
    text = (DEPLOY / "lowq.service").read_text()
    program = Path(sys.executable).with_name("lowq")
    unit = tmp_path / "lowq.service"
    unit.write_text(text.replace("/srv/shop/.venv/bin/lowq", str(program)).replace("/srv/shop", str(tmp_path)))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert (done.returncode, "lowq.service" in done.stderr) == (0, False), done.stderr
    (command,) = re.findall(r"^ExecStart=\S+ (\S+) (.*)$", text, re.MULTILINE)
    main.commands[command[0]].make_context(command[0], shlex.split(command[1])).close()


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, without comments, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in text.splitlines()) if name]


def test_the_dockerfile_is_clean() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("there is no hadolint for this machine")
    run(hadolint, DEPLOY / "Dockerfile")


@pytest.mark.slow
def test_the_steps_of_the_image_give_a_node_that_stops_in_order(tmp_path: Path) -> None:
    """In a venv with nothing but pip, with the environment of the image alone."""
    wheels, app, venv = tmp_path / "wheels", tmp_path / "app", tmp_path / "venv"
    app.mkdir()
    shutil.copy(build("wheel", wheels), app)
    (app / "pyproject.toml").write_text(PROJECT)
    (app / "workers.py").write_text("import lowq\n\n@lowq.worker\ndef orders(payloads_by_id): ...\n")
    run(sys.executable, "-m", "venv", venv)
    environment = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}  # where packages are
    links = environment.get("PIP_FIND_LINKS", "")
    environment["PATH"] = f"{venv}/bin:/usr/bin:/bin"
    command, probe = [], []
    for name, rest in instructions():
        if name == "ENV":
            environment |= dict(item.split("=", 1) for item in shlex.split(rest))
        elif name == "RUN" and not rest.startswith("useradd"):
            found = f"{environment['PIP_FIND_LINKS']} {links}".strip()
            run("/bin/sh", "-c", rest, cwd=app, env={**environment, "PIP_FIND_LINKS": found})
        elif name == "CMD":
            command = json.loads(rest)
        elif name == "HEALTHCHECK":
            probe = json.loads(rest.partition(" CMD ")[2])
    assert shutil.which("lowq", path=str(venv / "bin"))
    with RedisServer(tmp_path / "redis") as server, (tmp_path / "log").open("wb") as log:
        environment |= {"LOWQ_REDIS_URL": server.url, "LOWQ_HEALTH": f"127.0.0.1:{free_port()}"}
        node = subprocess.Popen(command, cwd=app, env=environment, stdout=log, stderr=log)
        try:
            until(lambda: succeeds(probe, environment), "a node that lives")
            until(lambda: succeeds(["lowq", "ready"], environment), "a node that is ready")
            node.send_signal(signal.SIGTERM)
            assert node.wait(PATIENCE) == 0
        finally:
            node.kill()
            node.wait()
