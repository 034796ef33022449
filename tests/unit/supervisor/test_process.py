"""What a process tells its supervisor over the report pipe, and what that makes of it."""

import os
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from lowq.supervisor.process import SILENCE, Child, Health, Supervised
from lowq.supervisor.supervisor import Supervisor
from tests.waiting import until


class Node(Supervised):
    def orphaned(self) -> None:
        """The test ends."""


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Child, Node]]:
    """Both ends, in this process."""
    monkeypatch.setattr("multiprocessing.current_process", type("Process", (), {}))
    monkeypatch.setattr("lowq.supervisor.process.BEAT", 0.001)
    report, life = os.pipe(), os.pipe()
    os.set_blocking(report[0], False)
    process = cast("subprocess.Popen[bytes]", SimpleNamespace(pid=7, poll=lambda: None))
    child, node = Child("1.1", process, report[0], 0.0), Node(f"1.1:{report[1]}:{life[0]}")
    yield child, node
    child._close()  # with which the thread that reports ends
    os.close(life[1])


def test_a_process_is_ready_once_and_then_as_it_says(ends: tuple[Child, Node]) -> None:
    child, node = ends
    troubles: list[str | None] = [None]
    assert not child.hear()
    node.ready(12.5, lambda: troubles[0])
    assert child.hear()
    assert (child.ready, child.shutdown_timeout, child.trouble()) == (True, 12.5, None)
    troubles[0] = "all 5 threads have been stuck for 2 min"
    until(lambda: (child.hear(), child.trouble())[1] == troubles[0], "its trouble")
    troubles[0] = None
    until(lambda: (child.hear(), child.trouble())[1] is None, "the end of it")
    assert not child.hear(), "it is ready only once"
    assert child.report_pipe() is not None


def test_one_that_can_not_start_says_why_and_nothing_more(ends: tuple[Child, Node]) -> None:
    child, node = ends
    assert node.failed("no  such\nmodule", passing=False)
    assert not child.hear()
    assert (child.ready, child.reason, child.passing) == (False, "no such module", False)
    assert child.report_pipe() is None


def test_one_without_a_health_says_nothing_after_it_is_ready(ends: tuple[Child, Node]) -> None:
    child, node = ends
    node.ready(1.0, url="http://127.0.0.1:1")
    assert child.hear()
    assert child.url == "http://127.0.0.1:1"
    assert child.report_pipe() is None


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
    health.note(None)
    assert health.trouble() is None


def test_a_supervisor_is_well_as_long_as_one_of_its_processes_is() -> None:
    supervisor = Supervisor(["lowq", "run"], 2)
    assert supervisor.trouble() == "none of the 2 processes of the supervisor is ready"
    children = []
    for place in supervisor._current.places:
        place.child = Child("1.1", cast("subprocess.Popen[bytes]", SimpleNamespace(pid=7)), -1, 0.0)
        place.child.ready = True
        children.append(place.child)
    assert supervisor.trouble() is None
    children[0]._health.note("stuck")
    assert supervisor.trouble() is None
    children[1]._health.note("stuck, too")
    assert supervisor.trouble() == "none of the 2 processes of the supervisor is well; process 1.1 (pid 7): stuck"
    children[1].ready = False
    children[0]._health.note(None)
    assert supervisor.trouble() is None
