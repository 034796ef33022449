"""What a process tells its supervisor over the report pipe, what that makes of it, and the dashboard of its node."""

import os
import subprocess
import threading
from types import SimpleNamespace
from typing import cast

import pytest

from lowq.supervisor.dashboard import NodeWatcher
from lowq.supervisor.process import SILENCE, Child, Health
from tests.waiting import PATIENCE


def test_a_line_that_came_in_part_is_read_when_it_is_whole() -> None:
    read, write = os.pipe()
    os.set_blocking(read, False)
    child = Child("1.1", cast("subprocess.Popen[bytes]", SimpleNamespace(pid=7)), read, 0.0)
    for part, is_ready in ((b'{"ready": true, "shutdown_ti', False), (b'meout": 3}\n{"trouble": "b', True)):
        os.write(write, part)
        assert child.hear() is is_ready
    assert child.trouble() is None
    os.write(write, b'ad"}\n')
    assert not child.hear()
    assert child.trouble() == "bad"
    os.close(write)
    child.hear()
    assert child.report_pipe() is None


def test_silence_is_not_well() -> None:
    now = 100.0
    health = Health(None, lambda: now)
    now += SILENCE - 1
    assert health.trouble() is None
    now += 1
    assert health.trouble() == f"the node has said nothing for {SILENCE:.0f} s"
    health.note({"trouble": None})
    assert health.trouble() is None


def test_the_dashboard_beside_a_node_hears_how_that_is_and_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    class Watcher(NodeWatcher):
        """One that does not end this process when its node has ended."""

        def orphaned(self) -> None:
            ended.set()

    monkeypatch.setattr("multiprocessing.current_process", type("Process", (), {}))
    report, life = os.pipe(), os.pipe()
    node = Watcher(f"web:{report[1]}:{life[0]}:1000.0:0.1.0", lambda: 1000.0)
    assert node.trouble() == "the node has not started yet"
    for said, trouble in ((b'{"trouble": "no Redis"}', "no Redis"), (b'{"trouble": null}', None)):
        node.heard(said)
        assert node.trouble() == trouble
    os.close(life[1])
    assert ended.wait(PATIENCE)
    for end in (life[0], *report):
        os.close(end)
