"""docs/production.md, executed on a real PostgreSQL and Redis; its manifests are validated."""

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
from click.testing import CliRunner

from lowq.cli import main
from tests.postgres_server import PostgresServer
from tests.processes.project.forked import ROOT
from tests.redis_server import free_port
from tests.waiting import PATIENCE, until

PAGE = (ROOT / "docs" / "production.md").read_text(encoding="utf-8")
#: What is to be done with a block, the path of a file, and the block.
_BLOCK = re.compile(r"^<!-- (\w+)(?:: (\S+))? -->\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILES = {path: text for kind, path, text in _BLOCK.findall(PAGE) if kind == "file"}


def test_the_manifests_are_valid_and_fit_those_of_deploy(tmp_path: Path) -> None:
    import kubernetes_validate  # here: it takes seconds

    k8s = ROOT / "deploy" / "k8s"
    api, service = yaml.safe_load_all(FILES["deploy/k8s/api.yaml"])
    for document in (api, service):
        kubernetes_validate.validate(document, "1.30", strict=True)
    assert service["spec"]["selector"] == api["spec"]["selector"]["matchLabels"]
    patch = yaml.safe_load(FILES["kustomization"])
    nodes = next(yaml.safe_load_all((k8s / "nodes.yaml").read_text()))
    (container,) = nodes["spec"]["template"]["spec"]["containers"]
    assert patch["patches"][0]["target"] == {"kind": nodes["kind"], "name": nodes["metadata"]["name"]}
    (operation,) = yaml.safe_load(patch["patches"][0]["patch"])
    container["env"].append(operation["value"])
    kubernetes_validate.validate(nodes, "1.30", strict=True)
    if shutil.which("kubectl"):
        folder = tmp_path / "k8s"
        shutil.copytree(k8s, folder)
        (folder / "api.yaml").write_text(FILES["deploy/k8s/api.yaml"])
        kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text()) | patch
        kustomization["resources"].append("api.yaml")
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        text = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=True).stdout
        assert text.count("image: registry.example.com/shop:1.0.0") == text.count("image: ") == 3
        assert text.count("name: DATABASE_URL") == 2
    images = yaml.safe_load((k8s / "kustomization.yaml").read_text())["images"]
    assert {image["name"] for image in images} == {image["name"] for image in patch["images"]} == {"shop"}
    asked = [
        spec["containers"][0]["env"] for spec in (api["spec"]["template"]["spec"], nodes["spec"]["template"]["spec"])
    ]
    secrets = {
        (key["name"], key["key"])
        for variables in asked
        for variable in variables
        if (key := variable.get("valueFrom", {}).get("secretKeyRef"))
    }
    made = set(re.findall(r"secret generic (\S+) ((?:.*\\\n)*.*)", PAGE))
    assert secrets <= {(name, key) for name, literals in made for key in re.findall(r"literal=([\w-]+)=", literals)}


@pytest.mark.slow
@pytest.mark.redis
def test_the_page_works_as_it_is_written(tmp_path: Path, redis_url: str, postgres: PostgresServer) -> None:
    folder = tmp_path / "shop"
    assert CliRunner().invoke(main, ["init", "--fastapi", "--deploy", str(folder)]).exit_code == 0
    (folder / "backfill.py").write_text(FILES["backfill.py"])
    ports = {":8000": f":{free_port()}", ":9000": f":{free_port()}", "--port 8000": f"--port {free_port()}"}
    ports[":8000"] = ports["--port 8000"].replace("--port ", ":")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LOWQ_")}
    environment = {
        **clean, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "web"), clean.get("PYTHONPATH", "")]),
        "PATH": f"{Path(sys.executable).parent}:{clean['PATH']}", "LOWQ_REDIS_URL": redis_url,
        "DATABASE_URL": postgres.empty_database().replace("postgresql://", "postgresql+asyncpg://"),
    }  # fmt: skip
    started: list[subprocess.Popen[Any]] = []
    log = tmp_path / "log"
    printed = ""
    try:
        for kind, _, shown in _BLOCK.findall(PAGE):
            text = shown
            for port, ours in ports.items():
                text = text.replace(port, ours)
            if kind == "start":
                with log.open("wb") as output:
                    started += [
                        subprocess.Popen(
                            [sys.executable, "-m", *shlex.split(line)], cwd=folder, env=environment, stdout=output,
                            stderr=output,
                        )
                        for line in text.splitlines()
                    ]  # fmt: skip
                until(lambda: "running on http" in log.read_text(), "the API")
                until(lambda: "shards held: 24" in log.read_text(), "the node")
            elif kind == "shell":
                ran = subprocess.run(
                    ["bash", "-euo", "pipefail", "-c", text], cwd=folder, env=environment, capture_output=True,
                    text=True, timeout=2 * PATIENCE, check=False,
                )  # fmt: skip
                assert ran.returncode == 0, f"{text}\n{ran.stdout}{ran.stderr}"
                printed += ran.stdout
        assert len(started) == 2
        assert '{"accepted":1}{"id":42,"version":1,"status":"paid"}ok' in printed
        assert "1 pushed\npayloads in Redis: 1\n" in printed
        for process in started:
            process.terminate()
        assert [process.wait(PATIENCE) in (0, -signal.SIGTERM) for process in started] == [True, True]
    finally:
        for process in started:
            process.kill()
            process.wait()
        print(log.read_text() if log.exists() else "")  # noqa: T201
