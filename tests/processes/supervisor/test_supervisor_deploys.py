"""New code: a whole generation of processes takes over, or nothing changes."""

import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.processes.conftest import MakeRig
from tests.processes.supervising import (
    SOURCE,
    Supervise,
    SupervisorProcess,
    code_folder,
    code_of,
    kill,
    lives,
    supervised,
    write_code,
)
from tests.processes.support import NEVER, ROOT, until
from tests.tiers import often


def alone(supervisor: SupervisorProcess, pids: Collection[int]) -> None:
    """Waits until these are all of its processes that live."""
    until(lambda: {pid for pid in supervisor.started() if lives(pid)} == set(pids), f"{pids} alone")


def test_under_load_new_code_takes_over_from_hand_to_hand(make_rig: MakeRig, supervise: Supervise) -> None:
    # No lease runs out and nobody polls: what is not handed over is never worked again.
    rig = make_rig(ORDERS_SHARDS=6, ORDERS_WORK=0.01, LOWQ_LEASE_TTL=NEVER, LOWQ_POLL_INTERVAL=NEVER)
    supervisor, old = supervised(rig, supervise, 2)
    finished = rig.produce(1, ids=60, versions=2, rounds=0, pause=0.1)  # order, not only existence
    rig.performed(100)
    write_code(rig, 2)
    supervisor.signal(signal.SIGHUP)
    new = supervisor.ready(2, 2)
    until(lambda: not any(map(lives, old.values())), "end of the old processes")
    ended = time.monotonic()
    until(lambda: {perform.pid for perform in rig.performs() if perform.start > ended} == set(new.values()), "new ones")
    finished()
    rig.drained()
    assert supervisor.stop() == 0
    assert {code_of(rig, pid) for pid in old.values()} == {1}
    assert {code_of(rig, pid) for pid in new.values()} == {2}
    assert {perform.pid for perform in rig.performs() if perform.start > ended} == set(new.values())
    report = rig.report()
    assert (report.problems, report.repeats, report.fenced) == ([], 0, [])
    assert supervisor.no_traceback()


@pytest.mark.slow
def test_a_long_job_is_finished_by_its_old_process(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig(LOWQ_SHUTDOWN_TIMEOUT=0.1, LOWQ_LEASE_TTL=15)  # a deploy is no stop: that doesn't count
    supervisor, _ = supervised(rig, supervise, 2)
    rig.push("a", 1, do="wait")
    (perform,) = rig.begun("a", 1)
    for generation in (2, 3):  # over several generations
        write_code(rig, generation)
        supervisor.signal(signal.SIGHUP)
        new = supervisor.ready(generation, 2)
        supervisor.says(f"deployed: generation {generation} works")
        alone(supervisor, {perform.pid, *new.values()})
        rig.push("b", generation)
        assert rig.done("b", generation).pid in new.values()
    Path(f"{rig.history.path}.go").touch()
    assert rig.done("a", 1).pid == perform.pid
    supervisor.says(f"(pid {perform.pid}) has ended")
    rig.drained()
    report = rig.report()
    assert (report.problems, report.repeats) == ([], 0)
    assert supervisor.stop() == 0


# --- deploys that fail ---


def test_a_new_process_that_dies_ends_the_deploy(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig()
    supervisor, old = supervised(rig, supervise, 2)
    # The first process of the new code becomes ready, the second one waits until the first was killed.
    wait = "import os, time\ntry:\n    os.mkdir('first')\nexcept OSError:\n    time.sleep(60)\n"
    write_code(rig, 2, wait + SOURCE)
    supervisor.signal(signal.SIGUSR2)
    kill(rig, supervisor.ready(2, 1)["2.1"])
    assert "was killed by SIGKILL" in supervisor.says("the deploy has failed")
    alone(supervisor, old.values())
    rig.push("a", 1)
    assert rig.done("a", 1).pid in old.values()
    assert supervisor.stop() == 0


#: A supervisor that doesn't wait long for its processes.
IMPATIENT = """
import sys
from lowq import logs
from lowq.supervisor.supervisor import Supervisor

logs.configure(None, None)
command = [sys.executable, "-m", "lowq", "run", "-r", "app.py"]
sys.exit(Supervisor(command, 2, ready_seconds=1).run())
"""
WAITING = """
import pathlib, time
while not pathlib.Path("gate").exists():
    time.sleep(0.01)
"""


def test_a_process_that_does_not_become_ready_is_waited_for_at_the_start_and_ends_a_deploy(
    make_rig: MakeRig, supervise: Supervise
) -> None:
    rig = make_rig()
    write_code(rig, 1, WAITING + SOURCE)
    supervisor = supervise(rig, program=("-c", IMPATIENT))
    supervisor.says("is not ready after 1 s; waiting on")
    gate = code_folder(rig) / "gate"
    gate.touch()
    old = supervisor.ready(1, 2)
    assert supervisor.started() == set(old.values())
    gate.unlink()
    supervisor.signal(signal.SIGHUP)
    assert "is not ready after 1 s" in supervisor.says("the deploy has failed")
    alone(supervisor, old.values())
    rig.push("a", 1)
    assert rig.done("a", 1).pid in old.values()
    assert supervisor.stop() == 0


@pytest.mark.slow
def test_an_old_process_that_dies_while_new_ones_start_is_replaced(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig()
    supervisor, pids = supervised(rig, supervise, 1)
    gate = code_folder(rig) / "gate"
    write_code(rig, 2, WAITING + SOURCE)
    supervisor.signal(signal.SIGHUP)
    supervisor.says("process 2.1")
    kill(rig, pids["1.1"])
    supervisor.says("replaced at once")
    gate.touch()
    supervisor.says("deployed: generation 2 works")
    new = supervisor.pids(2)["2.1"]
    alone(supervisor, [new])  # also of the one that took its place, which may have begun to work in the meantime
    rig.push("a", 1)
    assert rig.done("a", 1).pid == new
    assert supervisor.stop() == 0
    supervisor.all_gone()


# --- signals at any moment ---


@pytest.mark.slow
@pytest.mark.parametrize("when", ["it starts", "a deploy is under way"])
def test_of_several_deploys_in_a_row_the_last_loads_the_last_code(
    make_rig: MakeRig, supervise: Supervise, when: str
) -> None:
    rig = make_rig()
    write_code(rig, 1)
    supervisor = supervise(rig, "--processes", "2")
    supervisor.says("process 1.1")
    if when == "a deploy is under way":
        supervisor.ready(1, 2)
    supervisor.signal(signal.SIGHUP)
    supervisor.says("process 2.1")
    for code in (3, 4, 5):
        write_code(rig, code)
        supervisor.signal(signal.SIGHUP)
    new = supervisor.ready(3, 2)
    alone(supervisor, new.values())
    assert {code_of(rig, pid) for pid in new.values()} == {5}
    rig.push("a", 1)
    assert rig.done("a", 1).pid in new.values()
    assert supervisor.stop() == 0
    assert not supervisor.pids(4)
    assert supervisor.no_traceback()


@pytest.mark.parametrize("line", often(["process 2.1", "(pid {pid}) is ready"], ["process 2.1"]))
def test_term_at_any_moment_of_a_deploy(make_rig: MakeRig, supervise: Supervise, line: str) -> None:
    rig = make_rig(LOWQ_LEASE_TTL=15)
    supervisor, _ = supervised(rig, supervise, 2)
    supervisor.signal(signal.SIGHUP)
    if "{pid}" in line:
        supervisor.ready(2, 1)
    else:
        supervisor.says(line)
    assert supervisor.stop() == 0  # one that does not hear of it is killed in the end, which makes it 3
    supervisor.all_gone()
    assert rig.of_shards("lease") == {}
    assert supervisor.no_traceback()


@pytest.mark.slow
def test_quiet_while_new_ones_start_keeps_the_old_ones_quiet(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig()
    supervisor, old = supervised(rig, supervise, 2)
    supervisor.signal(signal.SIGHUP)
    supervisor.says("process 2.1")
    supervisor.signal(signal.SIGTSTP)
    supervisor.says("the deploy has failed: the supervisor goes quiet")
    alone(supervisor, old.values())
    until(lambda: not rig.of_shards("lease"), "end of all leases")
    rig.push("a", 1)
    supervisor.signal(signal.SIGHUP)  # and a deploy ends the quiet
    new = supervisor.ready(3, 2)
    assert rig.done("a", 1).pid in new.values()
    assert supervisor.stop() == 0


@pytest.mark.slow
def test_a_folder_that_is_a_link_is_looked_up_anew(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig()
    link = code_folder(rig)
    write_code(rig, 1)
    first, second = rig.folder / "release-1", rig.folder / "release-2"
    link.rename(first)
    link.symlink_to(first)
    supervisor = supervise(rig, "--processes", "1", environment={"PWD": str(link)})
    supervisor.ready(1, 1)
    second.mkdir()
    (second / "app.py").write_text((first / "app.py").read_text().replace("code=1", "code=2"))
    fresh = rig.folder / "fresh"
    fresh.symlink_to(second)
    fresh.replace(link)
    supervisor.signal(signal.SIGHUP)
    assert code_of(rig, supervisor.ready(2, 1)["2.1"]) == 2
    assert supervisor.stop() == 0


# --- --reload ---


def test_reload_follows_the_source_wherever_it_is_through_broken_code(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig()
    write_code(rig, 1)
    elsewhere = rig.folder / "elsewhere"
    elsewhere.mkdir()
    supervisor = supervise(rig, "--reload", cwd=elsewhere, source="../code/app.py")
    supervisor.says("watching Python files in")
    old = supervisor.ready(1, 1)["1.1"]
    write_code(rig, 2, "def f(:\n")
    assert "SyntaxError" in supervisor.says("the deploy has failed")
    rig.push("a", 1)
    assert rig.done("a", 1).pid == old
    write_code(rig, 3)
    new = supervisor.ready(3, 1)["3.1"]
    until(lambda: not lives(old), "end of the old process")
    rig.push("a", 2)
    assert rig.done("a", 2).pid == new
    assert code_of(rig, new) == 3
    assert "app.py changed): generation 3 starts" in supervisor.log
    supervisor.signal(signal.SIGINT)  # the thread that watches doesn't mistake it for its own
    assert supervisor.wait() == 0
    assert "KeyboardInterrupt" not in supervisor.log


def test_reload_without_watchfiles_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "watchfiles.py").write_text("raise ModuleNotFoundError(name='watchfiles')\n")
    ran = subprocess.run(
        [sys.executable, "-m", "lowq", "run", "-r", "app.py", "--reload"],
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 2
    assert ran.stderr == "lowq: --reload needs watchfiles: pip install 'lowq[reload]'\n"
