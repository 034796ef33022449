"""What a process tells its supervisor over the report pipe, and what that makes of it."""

import os
import subprocess
from types import SimpleNamespace
from typing import cast

from lowq.supervisor.process import SILENCE, Child, Health


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
