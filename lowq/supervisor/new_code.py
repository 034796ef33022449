"""Whether the code that is on the disk now can be run: found out in a process of its own, which ends then."""

import os
import select
import time
from collections.abc import Mapping, Sequence

from lowq.supervisor.process import Child, how_it_ended
from lowq.supervisor.supervisor import READY_SECONDS


def why_not(
    command: Sequence[str], folder: str, environment: Mapping[str, str], ready_seconds: float = READY_SECONDS
) -> str | None:
    """Runs the command, which loads the code and reports that it could (`Supervised.ready`). Why it couldn't, or None.
    Should this process die meanwhile, so does that one.
    """
    theirs, ours = os.pipe()
    try:
        child = Child.start(command, folder, "check", theirs, time.monotonic(), environment)
    except OSError as error:
        return f"it could not be started: {error}"
    finally:
        os.close(theirs)
    try:
        while not child.hear():
            pipe = child.report_pipe()
            if pipe is None:  # it has said why, or died
                return child.reason or f"its process {how_it_ended(child.process.wait())}"
            if time.monotonic() > child.started_at + ready_seconds:
                return f"it is not loaded after {ready_seconds:g} s"
            poll = select.poll()
            poll.register(pipe, select.POLLIN)
            poll.poll(500)
        return None
    finally:
        # It has nothing more to do, and nothing to finish.
        child.kill()
        child.process.wait()
        child.ended()
        os.close(ours)
