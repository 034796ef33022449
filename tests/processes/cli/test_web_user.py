"""`lowq web-user` at a terminal."""

import os
import pty
import subprocess
import sys

from lowq.admin.passwords import PasswordHash
from tests.waiting import PATIENCE


def test_at_a_terminal_it_asks_twice_and_shows_nothing_of_it() -> None:
    terminal, theirs = pty.openpty()
    command = [sys.executable, "-m", "lowq", "web-user", "ann"]
    with subprocess.Popen(
        command, stdin=theirs, stderr=theirs, stdout=subprocess.PIPE, start_new_session=True
    ) as process:  # fmt: skip
        os.close(theirs)
        shown = typed(terminal, "s3cret", "s3cret")
        assert process.stdout is not None
        line = process.stdout.read().decode()
        assert process.wait(PATIENCE) == 0
    os.close(terminal)
    assert "s3cret" not in shown
    name, text, role = line.removesuffix("\n").split(":")
    assert (name, role) == ("ann", "read")
    assert PasswordHash.parse(text).fits("s3cret")


def typed(terminal: int, *answers: str) -> str:
    """Types an answer to each question; what the terminal has shown."""
    shown = ""
    for number, answer in enumerate(answers, 1):
        while shown.count(": ") < number:  # the space comes when the echo is off
            shown += os.read(terminal, 1000).decode()
        os.write(terminal, f"{answer}\n".encode())
    while True:
        try:
            more = os.read(terminal, 1000)
        except OSError:  # it has ended (Linux)
            return shown
        if not more:
            return shown
        shown += more.decode()
