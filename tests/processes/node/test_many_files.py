"""More than 1,024 open files in a process: `select` can't be used for descriptors above 1,023."""

import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import lowq
from tests.processes.supervising import code_folder
from tests.processes.support import ROOT, NodeProcess, Rig
from tests.tiers import often

#: Files that the process holds before it does anything else.
HELD = 1100
#: The files it may hold at all: those, and what it opens itself.
LIMIT = HELD + 400

#: The command line, in a process whose free descriptors are all above 1,024.
CROWDED = f"""
import os, resource, sys
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, ({LIMIT}, hard))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range({HELD})]
assert held[-1] > 1024
from lowq.cli import main
main()
"""

APP = """
import lowq

@lowq.worker(shards_count=2)
def Orders(payloads_by_id):
    print("performed", *payloads_by_id, flush=True)
"""


class Crowded(NodeProcess):
    """`lowq run` among many open files."""

    def __init__(self, rig: Rig, *args: str) -> None:
        self._rig = rig
        self.log_path = rig.folder / "crowded.log"
        folder = code_folder(rig)
        (folder / "app.py").write_text(APP)
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", CROWDED, "run", "-r", "app.py", *args],
                cwd=folder,
                env={**rig.environment({}), "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        rig.nodes.append(self)


@pytest.mark.slow
@pytest.mark.parametrize("number", often([signal.SIGTERM, signal.SIGINT], [signal.SIGTERM]))
@pytest.mark.parametrize(
    "args",
    [
        pytest.param([], id="node"),
        pytest.param(["--processes", "1"], id="supervisor"),
        pytest.param(["--embedded", "--processes", "1"], id="embedded-store"),
    ],
)
def test_it_works_and_can_be_stopped(redis_url: str, tmp_path: Path, args: list[str], number: signal.Signals) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < LIMIT:
        pytest.skip(f"this system allows {hard} open files a process, the test needs {LIMIT}")
    rig = Rig(redis_url, tmp_path, LOWQ_POLL_INTERVAL=3600)
    crowded = Crowded(rig, *args)
    try:
        crowded.says(" starts: ")
        embedded = re.search(r"the store listens at (\S+);", crowded.log)
        assert (embedded is not None) == ("--embedded" in args)
        app = lowq.Lowq(redis_url=embedded[1] if embedded else redis_url)
        app.queue("Orders", 2).push([{"id": 1}])
        app.close()
        crowded.says("performed 1")
        crowded.signal(number)
        assert crowded.wait() == 0
        assert "Traceback" not in crowded.log
    finally:
        rig.close()
