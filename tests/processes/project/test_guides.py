"""The guides from other systems: the program before and the program after, each run by what runs it, on a real server.

The program before needs the packages of its system, as the benchmarks install them (`make bench-peers`). Where
one isn't there the test is skipped, and says why: `make test-slow` doesn't depend on Ruby and Node.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from benchmarks.peers import PEERS
from benchmarks.peers.environment import HOME, FromDebian, FromNpm, FromPyPI, NotInstalled
from tests.processes.support import ROOT, until
from tests.waiting import PATIENCE

GUIDES = ("celery", "rq", "sidekiq", "bullmq")
_FILE = re.compile(r"^<!-- file: (\S+) -->\n+```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: What the programs take for granted: a database, in each of their languages.
DATABASES = {
    "database.py": """
def save(order_id, version, status):
    with open("saved", "a") as file:
        file.write(f"{order_id} {version} {status}\\n")
""",
    "database.rb": """
def save(order_id, version, status)
  File.write("saved", "#{order_id} #{version} #{status}\\n", mode: "a")
end
""",
    "database.js": """
exports.save = (...values) => require("fs").appendFileSync("saved", values.join(" ") + "\\n");
""",
    # BullMQ Pro is on no public registry.
    "node_modules/@taskforcesh/bullmq-pro/index.js": """
const { Queue, Worker } = require("bullmq");
exports.QueuePro = Queue;
exports.WorkerPro = Worker;
""",
}
#: Changes of orders, which come in the wrong order.
CHANGES = [("42", 1, "new"), ("42", 3, "sent"), ("43", 1, "new"), ("42", 2, "paid")]


def write_files(guide: str, folder: Path) -> None:
    shown = dict(_FILE.findall((ROOT / "docs" / f"from-{guide}.md").read_text(encoding="utf-8")))
    for name, text in {**DATABASES, **shown}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def saved(folder: Path) -> list[str]:
    path = folder / "saved"
    return path.read_text().splitlines() if path.exists() else []


def perform(
    folder: Path,
    pushes: Sequence[Sequence[str]],
    worker: Sequence[str],
    variables: Mapping[str, str],
    expected: list[str],
) -> None:
    """Pushes, then works until all is saved that is expected."""
    environment = {**os.environ, **variables, "TERM": "dumb"}
    for command in pushes:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            worker, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:

            def all_is_saved() -> bool:
                assert process.poll() is None, log.read_text()
                return len(saved(folder)) >= len(expected)

            until(all_is_saved, "all changes saved")
            process.terminate()
            process.wait(PATIENCE)
        finally:
            process.kill()
            process.wait()
    assert sorted(saved(folder)) == sorted(expected)


def before(guide: str) -> tuple[list[list[str]], list[str], dict[str, str]]:
    """The commands that push, the one of the page that works, and variables.

    Raises:
        NotInstalled
    """
    page = (ROOT / "docs" / f"from-{guide}.md").read_text(encoding="utf-8")
    worker = re.findall(r"^```\n(\S.*)\n```$", page, re.MULTILINE)[0].split()
    environments = [peer.environment for peer in PEERS]
    match guide:
        case "celery" | "rq":
            (of_python,) = [one for one in environments if isinstance(one, FromPyPI) and one.module == guide]
            of_python.command()  # raises
            programs = HOME / guide / "bin"
            pushes = [[str(programs / "python"), "-c", f"import tasks; tasks.order_changed{one!r}"] for one in CHANGES]
            return pushes, [str(programs / worker[0]), *worker[1:]], {}
        case "sidekiq":
            (of_ruby,) = [one for one in environments if isinstance(one, FromDebian)]
            of_ruby.command()
            return [["ruby", "-r", "./workers.rb", "-e", f"order_changed{one!r}"] for one in CHANGES], worker, {}
        case _:
            (of_node,) = [one for one in environments if isinstance(one, FromNpm)]
            of_node.command()
            script = "require('./workers').orderChanged(...{})"
            return [["node", "-e", script.format([*one])] for one in CHANGES], worker, of_node.variables()


@pytest.mark.slow
@pytest.mark.parametrize("guide", GUIDES)
def test_the_program_before_runs(redis_url: str, tmp_path: Path, guide: str) -> None:
    write_files(guide, tmp_path)
    try:
        pushes, worker, variables = before(guide)
    except NotInstalled as error:
        pytest.skip(str(error))
    address = {"CELERY_BROKER_URL": redis_url, "REDIS_URL": redis_url, "RQ_REDIS_URL": redis_url}
    variables |= address | {"REDIS_PORT": str(urlsplit(redis_url).port)}
    perform(tmp_path, pushes, worker, variables, [" ".join(map(str, change)) for change in CHANGES])


@pytest.mark.parametrize("guide", GUIDES)
def test_the_program_after_saves_the_newest_version_once(redis_url: str, tmp_path: Path, guide: str) -> None:
    write_files(guide, tmp_path)
    changes = "; ".join(f"shop.order_changed{change!r}" for change in CHANGES)
    pushes = [[sys.executable, "-c", f"import shop; {changes}"]]
    worker = [sys.executable, "-m", "lowq", "run", "shop.py"]
    perform(tmp_path, pushes, worker, {"LOWQ_REDIS_URL": redis_url}, ["42 3 sent", "43 1 new"])
