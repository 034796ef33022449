"""The dashboard beside a supervisor: `lowq run --web` with `--processes` and `--reload`."""

import os
import re
import signal
import socket
from pathlib import Path

from tests.processes.conftest import MakeRig
from tests.processes.supervising import (
    Supervise,
    SupervisorProcess,
    dashboards,
    get,
    is_well,
    lives,
    supervised,
    write_code,
)
from tests.processes.support import Rig, until
from tests.redis_server import free_port

WEB = ("--web=127.0.0.1:0", "--no-auth")


def well(rig: Rig, supervise: Supervise, *options: str) -> tuple[SupervisorProcess, str]:
    """A supervisor with one process and a dashboard that says that it is well; and its address."""
    supervisor, _ = supervised(rig, supervise, 1, *options, *WEB)
    at = re.findall(r"the dashboard is at (\S+)", supervisor.says("the dashboard is at "))[0]
    until(lambda: is_well(at), "word that it is well")
    return supervisor, at


def test_it_stays_through_deploys_and_comes_back_when_it_dies(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig()
    supervisor, at = well(rig, supervise)
    (pid,) = dashboards(supervisor)
    (node,) = until(rig.app.nodes, "a node")
    # On a busy machine Redis may not answer at once, and it says 503.
    until(lambda: node.name in get(f"{at}/nodes")[1], "the node on its page")

    write_code(rig, 2)
    supervisor.signal(signal.SIGHUP)
    supervisor.ready(2, 1)
    assert dashboards(supervisor) == [pid]
    until(lambda: get(f"{at}/nodes")[0] == 200, "a page")

    os.kill(pid, signal.SIGKILL)
    until(lambda: dashboards(supervisor) not in ([], [pid]) and is_well(at), "another one at the same address")
    (pid,) = dashboards(supervisor)
    assert supervisor.stop() == 0
    assert not lives(pid)
    assert supervisor.no_traceback()


def test_it_tells_that_no_process_is_well_or_ready(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig(ORDERS_TTR=0.5)
    supervisor, at = well(rig, supervise)
    rig.push("a", 1, do="wait", once=True)
    trouble = "none of the 1 process of the supervisor is well; process 1.1"

    def says_so() -> bool:
        code, text = get(f"{at}/healthz")
        return code == 503 and trouble in text and "handlers have exceeded their ttr and still run: 1" in text

    until(says_so, "word that it is not well")
    # Quiet, it does not replace one that ends.
    supervisor.signal(signal.SIGTSTP)
    supervisor.says("supervisor and its processes go quiet")
    Path(f"{rig.history.path}.go").touch()
    os.kill(supervisor.pids()["1.1"], signal.SIGTERM)
    until(lambda: "none of the 1 process of the supervisor is ready" in get(f"{at}/healthz")[1], "word of its end")


def test_it_has_the_store_inside_of_a_supervisor_and_ends_with_one_that_is_killed(
    make_rig: MakeRig, supervise: Supervise
) -> None:
    supervisor, at = well(make_rig(), supervise, "--embedded")
    until(lambda: "Orders" in get(f"{at}/api/v1/queues")[1], "its queue")
    (pid,) = dashboards(supervisor)
    supervisor.process.kill()
    supervisor.process.wait()
    until(lambda: not lives(pid), "end of the dashboard")


def test_it_waits_for_code_that_can_be_loaded(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig()
    write_code(rig, 1, "import nowhere\n")
    at = f"http://127.0.0.1:{free_port()}"
    supervisor = supervise(rig, "--reload", f"--web={at.removeprefix('http://')}", "--no-auth")
    supervisor.says("it is tried again until it starts")
    supervisor.says("waiting for a change")
    write_code(rig, 2)
    supervisor.ready(2, 1)
    assert at in supervisor.says("the dashboard is back at ")
    until(lambda: is_well(at), "word that it is well")
    supervisor.signal(signal.SIGINT)
    assert supervisor.wait() == 0


def test_a_port_that_is_taken_is_said_at_the_start(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig()
    write_code(rig, 1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        supervisor = supervise(rig, "--processes", "2", f"--web=127.0.0.1:{port}")
        assert supervisor.wait() == 2
        assert f"the dashboard can't listen on 127.0.0.1 port {port}" in supervisor.log
        assert not supervisor.started()
