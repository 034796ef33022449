"""A process that is measured. It prints what happens as JSON lines, and may be told things on its stdin.

Moments are seconds of CLOCK_MONOTONIC, which all processes of a machine share.
"""

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent


class MeasuringFailed(Exception):
    """A measured process ended early, or didn't say in time what it was to say."""


class Measured:
    """A process of its own, killed at the end of the block with all that it started."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._command = list(command)
        self._environment = {**os.environ, **(environment or {})}

    def __enter__(self) -> Self:
        self._errors = tempfile.TemporaryFile()
        self.started = time.monotonic()
        self._process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        self._said: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)  # the group is its own: start_new_session
        except ProcessLookupError:
            pass
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    pass

    @property
    def pid(self) -> int:
        return self._process.pid

    def expect(self, event: str, timeout: float) -> dict[str, Any]:
        """Waits until it says that; other events before it are passed over.

        Raises:
            MeasuringFailed: it ended, or `timeout` seconds went by.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                said = self._said.get(timeout=max(deadline - time.monotonic(), 0.001))
            except queue.Empty:
                raise MeasuringFailed(f"no {event!r} within {timeout:g} s{self._last_words()}") from None
            if said is None:
                raise MeasuringFailed(f"ended before {event!r}{self._last_words()}")
            if said["event"] == event:
                return said

    def tell(self, line: str) -> None:
        """Writes a line to its stdin."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def processor_seconds(self) -> float:
        """Processor time that it has used so far, without its children's (Linux)."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _listen(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                if line.startswith('{"event"'):  # a queue system may have printed something of its own
                    self._said.put(json.loads(line))
        except ValueError:  # closed meanwhile
            pass
        self._said.put(None)

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        return ": " + " / ".join(lines[-3:])[-400:] if lines else ""
