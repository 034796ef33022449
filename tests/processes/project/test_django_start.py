"""docs/django-start.md, executed from top to bottom: its files, its commands, and its units as processes."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from tests.postgres_server import PostgresServer
from tests.processes.project.test_django_shop import Browser
from tests.redis_server import free_port
from tests.waiting import PATIENCE, until

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "django-start.md").read_text(encoding="utf-8")
#: What is to be done with a block, the path of a file, and the block.
_BLOCK = re.compile(r"^<!-- (\w+)(?:: (\S+))? -->\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.redis
def test_the_page_works_as_it_is_written(tmp_path: Path, redis_url: str, postgres: PostgresServer) -> None:
    folder, programs, port = tmp_path / "shop", Path(sys.executable).parent, free_port()
    folder.mkdir()
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("LOWQ_", "DJANGO_", "PG"))}
    environment = {
        **clean, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "web"), clean.get("PYTHONPATH", "")]),
        "PATH": f"{programs}:{clean['PATH']}", "LOWQ_REDIS_URL": redis_url,
    }  # fmt: skip
    database = psycopg.conninfo.conninfo_to_dict(postgres.empty_database())
    ours = {
        "PGHOST": database["host"], "PGPORT": database["port"], "PGUSER": database["user"],
        "PGDATABASE": database["dbname"], "LOWQ_REDIS_URL": redis_url,
    }  # fmt: skip
    units: list[subprocess.Popen[bytes]] = []
    commands: list[list[str]] = []
    logs: list[Path] = []
    seen: list[str] = []
    try:
        for kind, path, text in _BLOCK.findall(PAGE):
            seen.append(kind)
            if kind == "file":
                before = (folder / path).read_text() if path.startswith("shop/") else ""  # "At the end of ..."
                (folder / path).write_text(before + text)
            elif kind == "environment":
                environment |= dict(line.split("=", 1) for line in text.splitlines())
                environment |= {name: str(value) for name, value in ours.items()}
            elif kind == "unit":
                commands.append(shlex.split(re.findall(r"^ExecStart=(.*)", text, re.MULTILINE)[0]))
            elif kind == "start":
                for program, *arguments in commands:
                    assert program.startswith("/srv/shop/.venv/bin/")
                    logs.append(tmp_path / f"{len(logs)}.log")
                    command = ["-m", "gunicorn"] if program.endswith("/gunicorn") else []
                    with logs[-1].open("wb") as log:
                        units.append(
                            subprocess.Popen(
                                [sys.executable, *command, *(part.replace(":8000", f":{port}") for part in arguments)],
                                cwd=folder,
                                env=environment,
                                stdout=log,
                                stderr=log,
                            )
                        )
                until(Browser(port).is_served, "gunicorn serves")
                until(lambda: " starts: " in logs[1].read_text(), "the node works")
            else:
                assert kind == "shell"
                ran = subprocess.run(
                    ["bash", "-euo", "pipefail", "-c", text.replace(":8000", f":{port}")], cwd=folder, env=environment,
                    capture_output=True, text=True, timeout=2 * PATIENCE, check=False,
                )  # fmt: skip
                assert ran.returncode == 0, f"{text}\n{ran.stdout}{ran.stderr}{[log.read_text() for log in logs]}"
        assert seen.count("shell") == 4
        assert seen.count("unit") == len(units) == 2
        with psycopg.connect(postgres.url("lowq"), autocommit=True) as connection:
            query = "SELECT is_at_warehouse FROM orders_order"
            until(lambda: connection.execute(query).fetchall() == [(True,)], "the order is at the warehouse")
        web, node = units
        node.send_signal(signal.SIGHUP)
        until(lambda: " starts with new code: " in logs[1].read_text(), "the new code")
        for unit in units:
            unit.send_signal(signal.SIGTERM)
        assert (node.wait(PATIENCE), web.wait(PATIENCE)) == (0, 0)
    finally:
        for unit in units:
            if unit.poll() is None:
                unit.kill()
            unit.wait()
        for path in logs:
            print(f"--- {path.name}\n{path.read_text()}")  # noqa: T201
