"""A supervisor as a real process, with an application whose source the tests change."""

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.processes.support import PATIENCE, ROOT, NodeProcess, Rig, until

#: The application: the one of `app_orders`, with settings of its own, and a number that tells its versions apart.
SOURCE = """
import os
os.environ.update({settings!r})
from tests.processes.app_orders import app, configure, history
configure()
history.write("loaded", code={code})
"""


Supervise = Callable[..., "SupervisorProcess"]


class SupervisorProcess(NodeProcess):
    """`lowq run app.py ...` with a supervisor; `app.py` is in a folder of the test's own."""

    def __init__(
        self,
        rig: Rig,
        *args: str,
        name: str = "supervisor",
        prefix: Sequence[str] = (),
        program: Sequence[str] = ("-m", "lowq"),
        source: str = "app.py",
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        self._rig = rig
        self.log_path = rig.folder / f"{name}.log"
        with self.log_path.open("wb") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self.process = subprocess.Popen(
                [*prefix, sys.executable, *program, "run", "-r", source, *args],
                env={**rig.environment({}), "PYTHONPATH": f"{ROOT}:{ROOT / 'web'}", **(environment or {})},
                **{"cwd": code_folder(rig), "start_new_session": True, **streams, **options},
            )
        rig.nodes.append(self)

    def pids(self, generation: int | None = None) -> dict[str, int]:
        """Label -> process, the latest of each, of all that were ever ready."""
        found = re.findall(r"process (\d+)\.(\d+) \(pid (\d+)\) is ready", self.log)
        return {
            f"{number}.{place}": int(pid)
            for number, place, pid in found
            if generation is None or int(number) == generation
        }

    def ready(self, generation: int, count: int, timeout: float = PATIENCE) -> dict[str, int]:
        """Waits until so many processes of a generation are ready; label -> pid."""

        def all_ready() -> dict[str, int]:
            assert self.process.poll() is None, f"it ended:\n{self.log}"
            pids = self.pids(generation)
            return pids if len(pids) == count else {}

        return until(all_ready, f"{count} ready processes of generation {generation}", timeout)

    def started(self) -> set[int]:
        """All processes that it ever started."""
        return set(map(int, re.findall(r"process \S+ \(pid (\d+)\) starts", self.log)))

    def all_gone(self, timeout: float = PATIENCE) -> None:
        """Waits until no process that it ever started is left."""
        until(lambda: not any(map(lives, self.started())), "end of all processes", timeout)

    def close(self) -> None:
        """Ends it and all of its processes, whatever they do."""
        self.process.kill()
        self.process.wait()
        for pid in self.started():
            if b"--supervised" in command_of(pid):  # the number may be somebody else's by now
                os.kill(pid, signal.SIGKILL)

    def no_traceback(self) -> bool:
        return "Traceback" not in self.log


def code_folder(rig: Rig) -> Path:
    folder = rig.folder / "code"
    folder.mkdir(exist_ok=True)
    return folder


def write_code(rig: Rig, code: int, source: str = SOURCE, **settings: object) -> Path:
    """What the next process loads. In one step, as a deploy should do it."""
    path = code_folder(rig) / "app.py"
    fresh = path.with_suffix(".new")
    text = {name: str(value) for name, value in settings.items()}
    # A comment of changing length: Python's cache of compiled files tells versions apart by second and size.
    fresh.write_text(source.replace("{code}", str(code)).replace("{settings!r}", repr(text)) + "#" * code + "\n")
    fresh.replace(path)
    return path


def lives(pid: int) -> bool:
    """Whether the process exists, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def command_of(pid: int) -> bytes:
    """What the process was started with; empty when there is none."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def kill(rig: Rig, pid: int) -> None:
    """SIGKILL, and the history knows it."""
    os.kill(pid, signal.SIGKILL)
    until(lambda: not lives(pid), "end of a process that was killed")
    rig.history.gone(pid)


def code_of(rig: Rig, pid: int) -> int:
    """The version of the code that the process has loaded."""
    (code,) = [event["code"] for event in rig.events("loaded") if event["pid"] == pid]
    assert isinstance(code, int)
    return code


def supervised(
    rig: Rig, supervise: Supervise, count: int, *args: str, **options: Any
) -> tuple[SupervisorProcess, dict[str, int]]:
    """A supervisor with so many processes that are ready; label -> pid."""
    write_code(rig, 1)
    supervisor: SupervisorProcess = supervise(rig, "--processes", str(count), *args, **options)
    return supervisor, supervisor.ready(1, count)


def children(pid: int) -> list[int]:
    """Of all of its threads."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


# --- the dashboard beside it ---


def dashboards(node: NodeProcess) -> list[int]:
    """The processes of the dashboard that it has."""
    return [pid for pid in children(node.pid) if b"\0web\0" in command_of(pid)]


def get(address: str) -> tuple[int, str]:
    """Status and text; 0: nobody answers."""
    try:
        with urllib.request.urlopen(address, timeout=PATIENCE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""


def is_well(address: str) -> bool:
    return get(f"{address}/healthz")[0] == 200
