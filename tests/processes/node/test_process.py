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
    children,
    code_folder,
    dashboards,
    is_well,
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


def status(pid: int, field: str) -> str:
    """What the kernel says of a process."""
    found = re.search(rf"^{field}:\s*(\S+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


#: What of an application hangs at the end of its process, and what ends that. Not in the process that checks new code.
HANGS = {
    "on_server_stop": ("lowq.app.config.on_server_stop = hang", signal.SIGHUP),
    "thread": ("threading.Thread(target=hang).start()", signal.SIGTERM),
    "at_exit": ("atexit.register(hang)", signal.SIGTERM),
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
    (code_folder(rig) / "patient.py").write_text(HANGING.format(name="patient", line=HANGS["on_server_stop"][0]))
    patient = supervise(rig, name="patient", source="patient.py", environment={"LOWQ_SHUTDOWN_TIMEOUT": f"{NEVER}"})
    for said in (" starts: ", " stops"):  # a second INT ends what the node would wait for
        patient.says(said)
        patient.signal(signal.SIGINT)
    assert patient.wait() == 3
    for name, (_, number) in HANGS.items():
        nodes[name].says(" starts: ")
        nodes[name].signal(number)
    for name, node in nodes.items():
        assert node.wait() == 3, f"{name}:\n{node.log}"
        assert "this still runs" in node.log, name
        assert "in hang" in node.log, name


def test_the_dashboard_comes_back_with_new_code_and_ends_as_it_should_and_term_may_come_twice(
    make_rig: MakeRig, supervise: Supervise
) -> None:
    rig = make_rig()
    write_code(rig, 1)
    node = supervise(rig, *WEB)
    url = node.says("the dashboard is at ").split()[-1]
    node.says(" starts: ")
    (first,) = dashboards(node)
    node.signal(signal.SIGHUP)
    node.says("starts with new code")
    (pid,) = until(lambda: [pid for pid in dashboards(node) if pid != first], "the dashboard of the new code")
    until(lambda: Path(f"/proc/{pid}/task").exists() and int(status(pid, "SigCgt"), 16), "its handlers")
    assert int(status(pid, "SigBlk"), 16) == 0
    assert url in node.says("the dashboard is back at")
    until(lambda: is_well(url), "a dashboard that says that the node is well")
    os.kill(pid, signal.SIGSTOP)
    node.signal(signal.SIGTERM)
    node.says("has stopped")
    node.signal(signal.SIGTERM)
    node.signal(signal.SIGHUP)
    until(lambda: status(node.pid, "SigPnd") == status(node.pid, "ShdPnd") == "0" * 16, "signals that were taken")
    os.kill(pid, signal.SIGCONT)
    assert node.wait() == 0
    assert not lives(pid)


def test_a_reload_that_is_cut_short_repeats_no_id_that_is_finished_and_charges_none(
    make_rig: MakeRig, supervise: Supervise
) -> None:
    rig = make_rig(LOWQ_SHUTDOWN_TIMEOUT=0.2)  # max_crash_count: one crash would bury it
    code = """
import pathlib, time
import lowq

@lowq.worker(shards_count=1, batch_size=10, max_crash_count=1)
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
    assert queue.stats().morgue_length == 0
    assert node.stop() == 0


def test_with_closed_streams_it_works_reloads_and_stops(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig()
    write_code(rig, 1)
    node = supervise(rig, prefix=("sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh"))
    until(rig.app.nodes, "a node")
    node.signal(signal.SIGHUP)
    until(lambda: len(rig.events("loaded")) == 3, "the new code")  # it was checked, too
    rig.push("a", 1)
    rig.done("a", 1)
    assert node.stop() == 0
    assert node.log == ""


def test_in_json_every_line_is_json_from_the_first_on(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig()
    early = "import logging, warnings\nwarnings.warn('old')\nlogging.getLogger('app').warning('early')\n"
    write_code(rig, 1, early + SOURCE)
    options = ("--log-format", "json", "--embedded", *WEB)
    node = supervise(rig, *options, environment={"PYTHONWARNINGS": "default"})
    for text in ("early", "old", "the store listens at", "the dashboard is at", " starts: "):
        node.says(text)
    assert node.stop() == 0
    assert all("message" in json.loads(line) for line in node.log.splitlines())


def test_output_that_can_not_be_written_ends_a_command_in_one_line(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.push("a", 1)
    words = ["sh", "-c", f"{sys.executable} -m lowq jobs Orders >/dev/full"]
    done = subprocess.run(words, env=rig.environment({}), capture_output=True, text=True, timeout=PATIENCE, check=False)
    said = "lowq: the output can't be written: [Errno 28] No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)


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
        subprocess.run([*alone, "true"], check=True, capture_output=True, timeout=PATIENCE)
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
