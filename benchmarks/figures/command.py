"""`lowq run`, as a process that is measured."""

import subprocess
import sys
from functools import cache

from benchmarks.measured import Measured
from benchmarks.server import Server

RUN = [sys.executable, "-m", "lowq", "run", "-r", "benchmarks.figures.app"]


def node(server: Server, *options: str, **environment: object) -> Measured:
    """A node, by the command line."""
    given = {name: str(value) for name, value in environment.items()}
    return Measured([*RUN, *options], {"LOWQ_REDIS_URL": server.url, **given})


@cache
def has_processes() -> bool:
    """Whether `lowq run` starts several processes itself."""
    shown = subprocess.run([sys.executable, "-m", "lowq", "run", "--help"], capture_output=True, text=True, check=True)
    return "--processes" in shown.stdout
