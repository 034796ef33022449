"""`lowq web-user` at a terminal."""

import os
import pty
import subprocess
import sys

from lowq.operate.logins import PasswordHash
from tests.waiting import PATIENCE


def test_at_a_terminal_it_asks_twice_and_shows_nothing_of_it() -> None:
    terminal, theirs = pty.openpty()
    command = [sys.executable, "-m", "lowq", "web-user", "ann"]
    with subprocess.Popen(
        command, stdin=theirs, stderr=theirs, stdout=subprocess.PIPE, start_new_session=True
    ) as process:  # fmt: skip
        os.close(theirs)
        shown = ""
        for number in (1, 2):
            while shown.count(": ") < number:  # the space comes when the echo is off
                shown += os.read(terminal, 1000).decode()
            os.write(terminal, b"s3cret\n")
        assert process.stdout is not None
        line = process.stdout.read().decode()
        shown += os.read(terminal, 1000).decode()
        assert process.wait(PATIENCE) == 0
    os.close(terminal)
    assert "s3cret" not in shown
    name, text, role = line.removesuffix("\n").split(":")
    assert (name, role) == ("ann", "read")
    assert PasswordHash.parse(text).fits("s3cret")
