"""The example that follows the history of a real git repository: shuffled, repeated changes, and the right table."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import lowq
from tests.redis_server import RedisServer
from tests.waiting import PATIENCE, until

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = str(ROOT / "examples" / "git_history.py")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a few hundred changes of 40 paths: added, edited, deleted, added again."""
    folder = tmp_path_factory.mktemp("repository")
    choice = random.Random(7)
    stream = [b"feature done\n"]
    present: set[str] = set()
    for number in range(1, 301):
        stream.append(b"commit refs/heads/main\ncommitter a <a@b> %d +0000\ndata 1\nx\n" % (1_600_000_000 + number))
        for name in choice.sample([f"dir {i % 5}/file {i}" for i in range(40)], 3):
            if name in present and choice.random() < 0.25:
                present.discard(name)
                stream.append(b'D "%s"\n' % name.encode())
            else:
                present.add(name)
                content = b"%d %d" % (number, choice.randrange(10**6))
                stream.append(b'M 100644 inline "%s"\ndata %d\n%s\n' % (name.encode(), len(content), content))
    stream.append(b"done\n")
    subprocess.run(["git", "init", "-q", "-b", "main", str(folder)], check=True)
    subprocess.run(["git", "-C", str(folder), "fast-import", "--quiet"], input=b"".join(stream), check=True)
    return folder


def run(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, EXAMPLE, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)


def test_embedded_ends_with_the_table_that_git_has(repository: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "GIT_HISTORY_DB": str(tmp_path / "table.sqlite3")}
    done = run("run-embedded", str(repository), environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_nodes_end_with_the_table_that_git_has_and_the_check_can_fail(
    repository: Path, tmp_path: Path, nodes: int
) -> None:
    with RedisServer() as server:
        environment = {
            **os.environ,
            "LOWQ_REDIS_URL": server.url,
            "LOWQ_LEASE_TTL": "2",
            "GIT_HISTORY_DB": str(tmp_path / "table.sqlite3"),
        }
        command = [sys.executable, "-m", "lowq", "run", "-r", EXAMPLE]
        running = [
            subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for _ in range(nodes)
        ]
        app = lowq.Lowq(redis_url=server.url)
        try:
            # Before that a signal would just end it.
            until(lambda: len(app.nodes()) == nodes, "all nodes")
            pushed = run("push", str(repository), environment=environment)
            assert pushed.returncode == 0, pushed.stdout + pushed.stderr
            if nodes > 1:
                running[0].kill()  # whichever shards it had go to the others, with what was in flight
            verified = run("verify", str(repository), "--timeout", "60", environment=environment)
            assert verified.returncode == 0, verified.stdout + verified.stderr
        finally:
            for process in running:
                process.send_signal(signal.SIGTERM)
            codes = [process.wait(PATIENCE) for process in running]
            app.close()
        assert codes[nodes > 1 :] == [0] * (nodes - (nodes > 1))

        subprocess.run(
            ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty",
             "-m", "y"], check=True,
        )  # fmt: skip
        (repository / "unknown").write_text("to the table")
        subprocess.run(["git", "-C", str(repository), "add", "unknown"], check=True)
        try:
            subprocess.run(
                ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "z"],
                check=True,
            )
            assert run("verify", str(repository), "--timeout", "5", environment=environment).returncode == 1
        finally:
            subprocess.run(["git", "-C", str(repository), "reset", "-q", "--hard", "HEAD~2"], check=True)
