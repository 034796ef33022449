"""The example that follows the history of a git repository: shuffled, repeated changes, and the right table."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import lowq
from tests.redis_server import RedisServer
from tests.waiting import PATIENCE, until

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = str(ROOT / "examples" / "git_history.py")
#: As git's import has them: spaces, lines, quotes, bytes that are no text, and one that is too long for an id.
PATHS = [
    *(f"dir {number % 5}/file {number}" for number in range(30)),
    r" ends with a space ", r"two\nlines", r"tab\t and \001", r":colon", r"100%", r"%41", r"quote\" and \\", r"-option",
    r"gr\303\266\303\237e", r"latin-1 \351", r"half \360\237", "y" * 200 + "/" + "z" * 400,
]  # fmt: skip


def commits(dice: random.Random, count: int) -> Iterator[str]:
    """For git fast-import: files, links and submodules come, change, and go; side branches, some with a root of their
    own, are merged.
    """
    for mark in range(1, count + 1):
        yield f"reset refs/heads/main\ncommit refs/heads/main\nmark :{mark}\n"
        yield f"committer x <x@example.org> {dice.randrange(10**9)} +0000\ndata 0\n"
        # Most commits are built on the one before, or HEAD's line of first parents would be short.
        parents = dice.sample(range(1, mark), k=min(mark - 1, dice.choice([0, 0, 1, 2])))
        if mark > 1 and dice.random() < 0.9:
            parents = [mark - 1, *(parent for parent in parents if parent != mark - 1)]
        yield from (f"{'merge' if number else 'from'} :{parent}\n" for number, parent in enumerate(parents))
        for path in dice.sample(PATHS, k=4):
            kind = dice.choice(["D", "100644", "100644", "100755", "120000", "160000"])
            if kind == "D":
                yield f'D "{path}"\n'
            elif kind == "160000":
                yield f'M {kind} {dice.randrange(10**9):040} "{path}"\n'
            else:
                yield f'M {kind} inline "{path}"\ndata 3\n{dice.randrange(100, 1000)}\n'
        yield "\n"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    stream = "".join(commits(random.Random(7), 300)).encode()
    subprocess.run(["git", "init", "-q", "-b", "main", folder], check=True)
    subprocess.run(["git", "-C", folder, "fast-import", "--quiet", "--force"], input=stream, check=True)
    return folder


def run(*arguments: str | Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, EXAMPLE, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)


def test_embedded_ends_with_the_table_that_git_has(repository: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "GIT_HISTORY_DB": str(tmp_path / "table.sqlite3")}
    done = run("run-embedded", repository, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nodes_end_with_the_table_that_git_has_and_the_check_can_fail(repository: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.sqlite3"
    with RedisServer() as server:
        environment = {**os.environ, "LOWQ_REDIS_URL": server.url, "LOWQ_LEASE_TTL": "2", "GIT_HISTORY_DB": str(table)}
        command = [sys.executable, "-m", "lowq", "run", "-r", EXAMPLE]
        nodes = [
            subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for _ in range(2)
        ]
        app = lowq.Lowq(redis_url=server.url)
        try:
            until(lambda: len(app.nodes()) == 2, "both nodes")  # before that a signal would just end one
            pushed = run("push", repository, environment=environment)
            assert pushed.returncode == 0, pushed.stdout + pushed.stderr
            nodes[0].kill()  # whichever shards it had go to the others, with what was in flight
            verified = run("verify", repository, "--timeout", "60", environment=environment)
            assert verified.returncode == 0, verified.stdout + verified.stderr
        finally:
            for node in nodes:
                node.send_signal(signal.SIGTERM)
            codes = [node.wait(PATIENCE) for node in nodes]
            app.close()
        assert codes[1] == 0

        with closing(sqlite3.connect(table)) as changed, changed:
            changed.execute("UPDATE paths SET mode = '100600' WHERE mode = '100644'")
        verified = run("verify", repository, "--timeout", "5", environment=environment)
        assert verified.returncode == 1, verified.stdout + verified.stderr
