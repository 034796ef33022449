"""More than 1,024 open files in a process: `select` can't be used for descriptors above 1,023."""

import re
import resource
import signal

import pytest

import lowq
from tests.processes.conftest import MakeRig
from tests.processes.supervising import Supervise, code_folder

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


@pytest.mark.slow
@pytest.mark.threads_only
@pytest.mark.parametrize("args", [[], ["--embedded", "--processes", "1"]], ids=["node", "supervisor"])
def test_it_works_and_can_be_stopped(make_rig: MakeRig, supervise: Supervise, args: list[str]) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < LIMIT:
        pytest.skip(f"this system allows {hard} open files a process, the test needs {LIMIT}")
    rig = make_rig(LOWQ_POLL_INTERVAL=3600)
    (code_folder(rig) / "app.py").write_text(APP)
    crowded = supervise(rig, *args, program=("-c", CROWDED))
    crowded.says(" starts: ")
    embedded = re.search(r"the store listens at (\S+) ", crowded.log)
    assert (embedded is not None) == ("--embedded" in args)
    app = lowq.Lowq(redis_url=embedded[1] if embedded else rig.url)
    app.queue("Orders", 2).push([{"id": 1}])
    app.close()
    crowded.says("performed 1")
    crowded.signal(signal.SIGTERM)
    assert crowded.wait() == 0
    assert crowded.no_traceback()
