"""The command line, in this process and in processes of its own, against one Redis."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
from click.testing import CliRunner, Result

import lowq
from lowq import Lowq
from lowq.cli import main
from tests.waiting import PATIENCE, until

ROOT = Path(__file__).parents[3]
LOWQ = (sys.executable, "-P", "-m", "lowq")

#: Two workers: ids that begin with "bad" fail until there is a file `repaired`.
WORKERS = """
from pathlib import Path
import lowq

@lowq.worker(shards_count=3, max_retry_count=0)
class Orders(lowq.Worker):
    def perform(self, payloads_by_id):
        for order_id in payloads_by_id:
            if order_id.startswith("bad") and not Path("repaired").exists():
                raise ValueError("no such order")

@lowq.worker
def Mails(payloads_by_id): ...
"""


class Cli:
    """``lowq ...`` against one Redis, and the same queues seen through the library."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.app = Lowq(redis_url=url)

    def __call__(self, *args: str, code: int = 0, stdin: str | bytes | None = None) -> Result:
        result = CliRunner().invoke(main, ["--redis-url", self.url, *args], input=stdin)
        assert result.exit_code == code, f"{args}: {result.exit_code}\n{result.output}\n{result.exception!r}"
        return result

    def json(self, *args: str, code: int = 0, stdin: str | None = None) -> Any:
        """What --json gives: one document on one line, and nothing else."""
        text = self("--json", *args, code=code, stdin=stdin).stdout
        assert text.count("\n") == 1
        return json.loads(text)

    def push(self, *jobs: dict[str, Any]) -> None:
        self.app.queue("Orders", 3).push(jobs)


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """The current folder, and an untouched default application; what is imported meanwhile is forgotten afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", sys.path[:])
        default = Lowq()
        for name, value in (("app", default), ("config", default.config), ("worker", default.worker)):
            patch.setattr(lowq, name, value)
        before = set(sys.modules)
        try:
            yield
        finally:
            for name in set(sys.modules) - before:
                del sys.modules[name]


def lines_of(result: Result) -> list[str]:
    return re.sub(r"\x1b\[\d*m", "", result.stdout).splitlines()


class Process:
    """``lowq ...`` as a process of its own."""

    def __init__(self, folder: Path, args: Sequence[str], environment: dict[str, str], **options: Any) -> None:
        self.folder = folder
        self._out, self._err = folder / "out.txt", folder / "err.txt"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err, **options}
            self.process = subprocess.Popen(args, cwd=folder, env=environment, **streams)

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")

    @property
    def stdin(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    def ends_after(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.wait()

    def until(self, condition: Callable[[], Any]) -> Any:
        """Waits for something to become true while the process runs."""

        def fulfilled() -> Any:
            assert self.process.poll() is None, f"it ended:\n{self.out}\n{self.err}"
            return condition()

        return until(fulfilled)

    def address(self, what: str) -> str:
        """Waits until it has said where the dashboard, or the store, is."""
        found = self.until(lambda: re.search(rf'the {what} (?:is|listens) at ([^\s;"]+)', self.out + self.err))
        assert isinstance(found, re.Match)
        return str(found[1])

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


class Start:
    """Starts processes, each in a folder of its own with the workers in app.py, and ends them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[Process] = []

    def __call__(
        self,
        *args: str,
        program: Sequence[str] = LOWQ,
        app: str = WORKERS,
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> Process:
        folder = self._folder / str(len(self._started))
        folder.mkdir()
        (folder / "app.py").write_text(app)
        paths = os.pathsep.join([str(ROOT), str(ROOT / "web")])
        variables = {**os.environ, "PYTHONPATH": paths, **(environment or {})}
        self._started.append(Process(folder, [*program, *args], variables, **options))
        return self._started[-1]

    def close(self) -> None:
        for process in self._started:
            process.close()
