"""A node as a process: signals while it loads, an end that is bounded, closed streams, process 1 of a container."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes.conftest import MakeRig
from tests.processes.supervising import (
    SOURCE,
    Supervise,
    SupervisorProcess,
    code_folder,
    command_of,
    lives,
    write_code,
)
from tests.processes.support import NEVER, PATIENCE, until

pytestmark = pytest.mark.threads_only

#: An application that loads for as long as a file is not there.
LOADS_LONG = """
import pathlib, time
pathlib.Path("loads").touch()
while not pathlib.Path("go").exists():
    time.sleep(0.01)
"""
WEB = ("--web=127.0.0.1:0", "--no-auth")


def children(pid: int) -> list[int]:
    """Of all of its threads."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def status(pid: int, field: str) -> str:
    """What the kernel says of a process."""
    found = re.search(rf"^{field}:\s*(\S+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def test_signals_while_it_loads_come_to_the_node(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig()
    write_code(rig, 1, LOADS_LONG + SOURCE)
    node = supervise(rig)
    until((code_folder(rig) / "loads").exists, "the import")
    for number in (signal.SIGHUP, signal.SIGTTIN, signal.SIGTSTP):
        node.signal(number)
    (code_folder(rig) / "go").touch()
    node.says("stacks of all threads")
    node.says("goes quiet")
    assert node.stop() == 0


#: What of an application hangs at the end of its process, and what ends that. Not in the process that checks new code.
HANGS = {
    "on_server_stop": ("lowq.app.config.on_server_stop = hang", signal.SIGTERM),
    "on_server_stop_at_reload": ("lowq.app.config.on_server_stop = hang", signal.SIGHUP),
    "thread": ("threading.Thread(target=hang).start()", signal.SIGTERM),
    "at_exit": ("atexit.register(hang)", signal.SIGTERM),
    "at_exit_at_reload": ("atexit.register(hang)", signal.SIGHUP),
}
HANGING = """
import atexit, sys, threading, time
import lowq

@lowq.worker(shards_count=1)
def {name}(batch):
    pass

def hang():
    while True:
        time.sleep(0.1)

if "--check" not in sys.argv:
    {line}
"""


def test_what_hangs_at_the_end_is_named_and_the_process_ends(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig(LOWQ_SHUTDOWN_TIMEOUT=0.2)
    nodes: dict[str, SupervisorProcess] = {}
    for name, (line, _) in HANGS.items():
        (code_folder(rig) / f"{name}.py").write_text(HANGING.format(name=name, line=line))
        nodes[name] = supervise(rig, name=name, source=f"{name}.py")
    for name, (_, number) in HANGS.items():
        nodes[name].says(" starts: ")
        nodes[name].signal(number)
    for name, node in nodes.items():
        assert node.wait() == 3, f"{name}:\n{node.log}"
        assert "this still runs" in node.log, name
        assert "in hang" in node.log, name


def test_a_second_int_ends_a_hook_that_hangs(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig(LOWQ_SHUTDOWN_TIMEOUT=NEVER)
    line = "lowq.app.config.on_server_stop = hang"
    (code_folder(rig) / "app.py").write_text(HANGING.format(name="hook", line=line))
    node = supervise(rig)
    node.says(" starts: ")
    node.signal(signal.SIGINT)
    node.says(" stops")
    node.signal(signal.SIGINT)
    assert node.wait() == 3


def test_the_dashboard_of_new_code_ends_as_it_should_and_term_may_come_twice(
    make_rig: MakeRig, supervise: Supervise
) -> None:
    rig = make_rig()
    write_code(rig, 1)
    node = supervise(rig, *WEB)
    node.says("the dashboard is at ")
    node.says(" starts: ")
    (first,) = dashboards(node)
    node.signal(signal.SIGHUP)
    node.says("starts with new code")
    (pid,) = until(lambda: [pid for pid in dashboards(node) if pid != first], "the dashboard of the new code")
    until(lambda: Path(f"/proc/{pid}/task").exists() and int(status(pid, "SigCgt"), 16), "its handlers")
    assert int(status(pid, "SigBlk"), 16) == 0
    os.kill(pid, signal.SIGSTOP)
    node.signal(signal.SIGTERM)
    node.says("has stopped")
    node.signal(signal.SIGTERM)
    node.signal(signal.SIGHUP)
    until(lambda: status(node.pid, "SigPnd") == status(node.pid, "ShdPnd") == "0" * 16, "signals that were taken")
    os.kill(pid, signal.SIGCONT)
    assert node.wait() == 0
    assert not lives(pid)


def dashboards(node: SupervisorProcess) -> list[int]:
    return [pid for pid in children(node.pid) if b"\0web\0" in command_of(pid)]


def test_a_reload_that_is_cut_short_repeats_no_id_that_is_finished(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig(LOWQ_SHUTDOWN_TIMEOUT=0.2)
    code = """
import pathlib, time
import lowq

@lowq.worker(shards_count=1, batch_size=10)
def ids(job_id, payloads):
    with open("performed", "a") as file:
        file.write(job_id)
    while job_id == "c" and not pathlib.Path("go").exists():
        time.sleep(0.01)
"""
    (code_folder(rig) / "app.py").write_text(code)
    performed = code_folder(rig) / "performed"
    queue = rig.app.queue("ids", 1)
    queue.push([{"id": job_id} for job_id in "abcd"])
    node = supervise(rig)
    until(lambda: performed.exists() and performed.read_text() == "abc", "the third id")
    node.signal(signal.SIGHUP)
    node.says("changes to the new code while it still performs")
    (code_folder(rig) / "go").touch()
    node.says("starts with new code")
    until(lambda: not (found := queue.stats()).length + found.taken, "the other ids")
    assert performed.read_text() == "abccd"
    assert node.stop() == 0


def test_with_closed_streams_it_works_reloads_and_stops(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig()
    write_code(rig, 1)
    loads = 0

    def has_loaded(times: int) -> None:
        until(lambda: len(rig.events("loaded")) >= times, f"start {times} of the code")

    for closed in ("2>&-", "1>&-", "0<&- 1>&- 2>&-"):
        node = supervise(rig, prefix=("sh", "-c", f'exec "$@" {closed}', "sh"))
        loads += 1
        has_loaded(loads)
        until(rig.app.nodes, f"a node with {closed}")
        node.signal(signal.SIGHUP)
        loads += 2  # it is checked, and started
        has_loaded(loads)
        rig.push("a", loads)
        rig.done("a", loads)
        assert node.stop() == 0, closed
        assert "Traceback" not in node.log


def test_in_json_every_line_is_json_from_the_first_on(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig()
    early = "import logging, warnings\nwarnings.warn('old')\nlogging.getLogger('app').warning('early')\n"
    write_code(rig, 1, early + SOURCE)
    environment = {"PYTHONWARNINGS": "default"}
    nodes = {
        name: supervise(rig, "--log-format", "json", "--embedded", *WEB, *more, name=name, environment=environment)
        for name, more in (("node", ()), ("supervisor", ("--processes", "1")))
    }
    for name, node in nodes.items():
        for text in ("early", "old", "the store listens at", "the dashboard is at", " starts: "):
            node.says(text)
        assert node.stop() == 0
        assert all("message" in json.loads(line) for line in node.log.splitlines()), name


def test_output_that_can_not_be_written_ends_a_command_in_one_line(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.push("a", 1)
    command = f"{sys.executable} -m lowq jobs Orders"
    for to, code, says in (
        (">/dev/full", 1, "lowq: the output can't be written: [Errno 28] No space left on device\n"),
        (">&-", 0, ""),
        (">/dev/full 2>&1", 1, ""),
    ):
        done = subprocess.run(  # noqa: PLW1510 - its code is what this is about
            ["sh", "-c", f"{command} {to}"], env=rig.environment({}), capture_output=True, text=True, timeout=PATIENCE
        )
        assert (done.returncode, done.stderr) == (code, says), to


def test_ctrl_c_while_the_application_is_imported_ends_without_a_traceback(
    make_rig: MakeRig, supervise: Supervise
) -> None:
    rig = make_rig()
    write_code(rig, 1, LOADS_LONG + SOURCE)
    node = supervise(rig)
    until((code_folder(rig) / "loads").exists, "the import")
    node.signal(signal.SIGINT)
    assert node.wait() == 130
    assert "Traceback" not in node.log


def test_as_process_1_it_reaps_the_orphans_of_others(make_rig: MakeRig, supervise: Supervise) -> None:
    alone = ("unshare", "--pid", "--fork", "--kill-child")
    try:
        subprocess.run([*alone, "true"], check=True, capture_output=True, timeout=10)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this machine lets nobody make a process 1")
    rig = make_rig()
    # The shell ends at once, so what it leaves behind becomes a child of process 1, for as long as there is the file.
    hold = code_folder(rig) / "hold"
    hold.touch()
    orphan = "(while test -e hold; do sleep 0.05; done) &"
    write_code(rig, 1, f"import subprocess\nsubprocess.run(['sh', '-c', {orphan!r}])\n" + SOURCE)
    node = supervise(rig, prefix=alone)
    (outside,) = until(lambda: children(node.pid), "process 1")
    node.says(" starts: ")
    assert len(children(outside)) == 2  # the node, and the orphan
    hold.unlink()
    until(lambda: len(children(outside)) == 1, "end of the orphan, also as a zombie")
    os.kill(outside, signal.SIGTERM)
    assert node.wait() == 0
    assert "has stopped" in node.log
