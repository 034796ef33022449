"""``lowq init``: the first files of a new project; ``lowq completion``: what a shell completes behind ``lowq``."""

import shlex
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from lowq.cli.failure import FAILED, USAGE, Failure
from lowq.cli.output import echo_lines, say

_WORKERS = '''"""The workers of this project: `lowq run` performs their jobs."""

import logging

import lowq

log = logging.getLogger("orders")

#: Stands for your database: order -> its newest state.
orders: dict[str, dict] = {}


@lowq.worker(shards_count=24, score="version")
class OrderSync(lowq.Worker):
    """Saves orders. Jobs of one order never run at the same time, and their payloads come oldest first."""

    def perform_one(self, order_id: str, payloads: list[dict]) -> None:
        newest = payloads[-1]
        if order_id not in orders or newest["version"] > orders[order_id]["version"]:
            orders[order_id] = newest
            log.info("order %s is %s, the newest of %d changes", order_id, newest["status"], len(payloads))


if __name__ == "__main__":  # python workers.py pushes a few changes
    OrderSync.push(42, {"version": 2, "status": "paid"})
    OrderSync.push(42, {"version": 1, "status": "new"})
'''

_TESTS = '''"""The workers, without Redis and without waiting."""

from workers import OrderSync, orders


def test_the_newest_version_wins(lowq_drain, assert_ordered) -> None:
    OrderSync.push(1, {"version": 2, "status": "paid"})
    OrderSync.push(1, {"version": 1, "status": "new"})
    assert lowq_drain().performed == 1
    assert orders["1"]["status"] == "paid"
    assert_ordered()
'''

_COMPOSE = """# docker compose up: Redis, a node with two processes, and the dashboard at http://localhost:8080
services:
  redis:
    image: redis:7
    # Jobs outlast a restart, and Redis never drops any to make room.
    command: redis-server --appendonly yes --maxmemory-policy noeviction
    volumes: [redis:/data]
  node:
    image: python:3.12
    # lowq is on no package index yet: put its wheel beside this file. It is built in lowq's folder by
    # pip wheel --no-deps -w FOLDER .
    command: sh -c "pip install -q --find-links . 'lowq[web]' && exec lowq run --processes 2 --web 0.0.0.0:8080"
    working_dir: /app
    volumes: [".:/app"]
    environment:
      LOWQ_REDIS_URL: redis://redis:6379/0
      # Who may use the dashboard. Change the password; it has 12 characters or more.
      LOWQ_WEB_USER: admin
      LOWQ_WEB_PASSWORD: change-me-please
    ports: ["127.0.0.1:8080:8080"]
    depends_on: [redis]
    # What runs is finished before a container ends.
    stop_grace_period: 60s
volumes:
  redis:
"""

_PROJECT = """[project]
name = "orders"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["lowq[web]"]

[project.optional-dependencies]
dev = ["lowq[embedded]", "pytest"]

[tool.setuptools]
py-modules = ["workers"]

[tool.lowq]
app = "workers"
"""

_FILES = {
    "workers.py": _WORKERS,
    "test_workers.py": _TESTS,
    "compose.yaml": _COMPOSE,
    "pyproject.toml": _PROJECT,
}


@click.command
@click.argument("folder", required=False, default=".", type=click.Path(file_okay=False, path_type=Path))
def init(folder: Path) -> None:
    """Write the first files of a project: a worker, its test, a compose file.

    Into FOLDER, by default the current one. What is there stays as it is: with a file of one of these names nothing is
    written, except that a pyproject.toml is left to you.
    """
    there = [name for name in _FILES if name != "pyproject.toml" and (folder / name).exists()]
    if there:
        raise Failure(f"{folder / there[0]} is there already, so nothing was written; name another folder", USAGE)
    has_project = (folder / "pyproject.toml").exists()
    names = [name for name in _FILES if not (has_project and name == "pyproject.toml")]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write(_FILES[name])
    except OSError as error:
        raise Failure(f"{folder}: it can't be written: {error}", FAILED) from None
    echo_lines([f"wrote {folder / name}" for name in names])
    if has_project:
        say(f'add to {folder / "pyproject.toml"}:\n\n[tool.lowq]\napp = "workers"\n')
    go_there = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    echo_lines(
        [
            "",
            "what now:",
            f"  {go_there}python -m pytest       # without Redis, where pytest is installed",
            "  lowq run --embedded    # a node, with a store inside of it",
            "  docker compose up      # Redis, a node, the dashboard",
        ]
    )


@click.command
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print what makes a shell complete verbs and options.

    bash, in ~/.bashrc: eval "$(lowq completion bash)". zsh, in ~/.zshrc: eval "$(lowq completion zsh)". fish: lowq
    completion fish > ~/.config/fish/completions/lowq.fish
    """
    kind, root = get_completion_class(shell), context.find_root()
    if kind is None:
        raise Failure(f"this version of click completes nothing for {shell}", USAGE)
    click.echo(kind(root.command, {}, "lowq", "_LOWQ_COMPLETE").source())
