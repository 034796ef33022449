"""The procedures of the documentation for backups, restores and upgrades, typed as the pages have them."""

import os
import re
import shutil
import signal
import subprocess
import sysconfig
import uuid
import venv
from pathlib import Path

import pytest
import redis

import lowq
from tests.processes.conftest import MakeRig
from tests.processes.supervising import SOURCE, write_code
from tests.processes.support import ROOT, Rig, until
from tests.redis_server import RedisServer
from tests.rows import case
from tests.waiting import NEVER, PATIENCE

_MARKED = re.compile(r"^<!-- run: (.+?) -->\n+```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROCEDURES = dict(
    found
    for page in ("operations.md", "deploys.md")
    for found in _MARKED.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
)
#: What the log of a supervisor has for each of its processes.
IS_READY = r"process \S+ \(pid \d+\) is ready"
#: An application that notes the environment with which it was loaded.
NOTES_PYTHON = SOURCE.replace("{code}", "os.path.realpath(__import__('sys').prefix)")


def do(name: str, **variables: object) -> str:
    """Types the commands of a procedure; what they print."""
    environment = {**os.environ, **{key: str(value) for key, value in variables.items()}}
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", PROCEDURES[name]],
        env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["RDB", "AOF"])
def test_a_restore_brings_back_an_older_state(make_rig: MakeRig, tmp_path: Path, kind: str) -> None:
    backup = tmp_path / "backup"
    backup.mkdir()
    with RedisServer(tmp_path / "redis", appendonly="yes") as server:
        places = {"LOWQ_REDIS_URL": server.url, "DATA": server.directory, "BACKUP": backup}
        rig = make_rig(url=server.url)
        node = rig.node()
        rig.push("before", 1)
        rig.done("before", 1)
        rig.push("again", 1, delay=NEVER)
        rig.push("running", 1, do="wait")
        rig.begun("running", 1)
        pushed_score(rig.app)
        do(f"backup by {kind}", **places)

        queue = rig.app.queue(rig.queue_name)
        queue.perform_now("again")
        rig.done("again", 1)
        rig.push("since", 1, delay=NEVER)
        queue.pause()
        last_score = pushed_score(rig.app)
        last_fence = max(perform.fence for perform in rig.performs())
        node.kill()
        rig.app.close()
        server.stop()

        do(f"restore of {kind}", **places)
        if kind == "RDB":
            ignores = tmp_path / "ignores"
            ignores.mkdir()
            shutil.copy(server.directory / "dump.rdb", ignores)
            with RedisServer(ignores, appendonly="yes") as empty, redis.Redis(port=empty.port) as client:
                assert client.dbsize() == 0
            server.options["appendonly"] = "no"
            server.start()
            until(lambda: len(do("restored from RDB", **places).splitlines()) == 3, "the end of the rewrite")
            server.stop()
            server.options["appendonly"] = "yes"  # what it has written is complete
        server.start()

        rig.app = lowq.Lowq(redis_url=server.url)
        queue = rig.app.queue(rig.queue_name)
        assert queue.find_pause() is None
        assert [job_id for job_id in ("since", "before") if queue.describe(job_id).jobs] == []
        rig.node()
        rig.begun("running", 1, times=2)
        queue.perform_now("again")
        again = until(lambda: [one for one in rig.performs("again", 1) if one.ok][1:], "the second run")
        assert again[0].fence > last_fence
        assert pushed_score(rig.app) > last_score
        assert [finding for finding in rig.app.examine() if finding.severity == "error"] == []


def pushed_score(app: lowq.Lowq) -> float:
    """The default score of a payload that is pushed now, behind all that its id has."""
    queue = app.queue("Clock", 1)
    queue.push("1", str(uuid.uuid4()), delay=NEVER)
    job = queue.peek("1")
    assert job is not None
    return float(job.payloads[-1][1])


def environment_of(folder: Path) -> Path:
    """A virtual environment with lowq, and what this Python has installed."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "lowq.pth").write_text("\n".join([str(ROOT), str(ROOT / "web"), sysconfig.get_paths()["purelib"]]))
    return folder


class Started:
    """`lowq run` by the Python of an environment."""

    def __init__(self, rig: Rig, python: Path, name: str, *options: str) -> None:
        self._log = rig.folder / f"{name}.log"
        variables = {**rig.environment({}), "PYTHONWARNINGS": "default"}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [python / "bin" / "python", "-m", "lowq", "run", "-r", "app.py", *options],
                cwd=rig.folder / "code", env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        rig.nodes.append(self)  # type: ignore[arg-type]  # ended with the others

    @property
    def log_path(self) -> Path:
        return self._log

    @property
    def log(self) -> str:
        return self._log.read_text()

    def says(self, text: str, times: int = 1) -> None:
        def has_said() -> bool:
            assert self.process.poll() is None, self.log
            return len(re.findall(text, self.log)) >= times

        until(has_said, f"{times} times {text!r}")


def pythons(rig: Rig) -> list[str]:
    """The environments with which the application was loaded."""
    return [event["code"] for event in rig.events("loaded")]


def test_a_rolling_upgrade_repeats_nothing(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig(ORDERS_WORK=0.005, LOWQ_LEASE_TTL=NEVER)  # no lease runs out: shards move from hand to hand
    before, after = (environment_of(tmp_path / name) for name in ("before", "after"))
    write_code(rig, 1, NOTES_PYTHON)
    old = Started(rig, before, "old", "--processes", "2")
    old.says(IS_READY, 2)
    finished = rig.produce(1, ids=40, versions=2, rounds=0, pause=0.05)
    rig.performed(20)
    new = Started(rig, after, "new", "--processes", "2")
    new.says(IS_READY, 2)
    do("rolling", OLD=old.process.pid)
    assert old.process.wait(PATIENCE) == 0
    rig.performed(len(rig.performs()) + 20)
    finished()
    rig.drained()
    assert set(pythons(rig)) == {str(before), str(after)}
    report = rig.report()
    assert (report.problems, report.repeats, report.fenced) == ([], 0, [])


def test_new_processes_run_with_the_environment_that_a_link_names_now(make_rig: MakeRig, tmp_path: Path) -> None:
    before, after = (environment_of(tmp_path / name) for name in ("before", "after"))
    rig = make_rig()
    write_code(rig, 1, NOTES_PYTHON)
    for number, (options, is_ready) in enumerate(((["--processes", "1"], IS_READY), ([], "lowq.node +node .* starts"))):
        with case(options):
            known = len(pythons(rig))
            current = tmp_path / f"current-{number}"
            current.symlink_to(before)
            started = Started(rig, current, f"linked-{number}", *options)
            started.says(is_ready)
            do("reload", NEW=after, CURRENT=current, OLD=started.process.pid)
            started.says(is_ready, 2)
            loaded = pythons(rig)[known:]
            assert (loaded[0], loaded[-1], len({*loaded})) == (str(before), str(after), 2)
            started.process.send_signal(signal.SIGTERM)
            assert started.process.wait(PATIENCE) == 0


def test_an_upgrade_of_redis_loses_nothing(make_rig: MakeRig, tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", appendonly="yes") as server:
        rig = make_rig(url=server.url, ORDERS_WORK=0.005)
        node = rig.node().holds_all()
        for number in range(100):
            rig.push(number, 1)
        do("Redis", LOWQ_REDIS_URL=server.url)
        server.kill()  # it has ended: only the test learns of it
        node.says("trying until it is back")
        server.start()
        node.says("Redis is back")
        rig.drained()
        assert node.stop() == 0
        report = rig.report()
        assert [problem for problem in report.problems if problem not in report.excess] == []
