"""Wrong clocks: Redis's, which steps back and forward, and producers', which are an hour off.

`clock.c` is compiled into a library that is preloaded. Only the time of day is wrong; the monotonic clocks, by which
histories are written, are those of the machine.
"""

import os
import shutil
import struct
import subprocess
import sys
from functools import cache
from pathlib import Path


def available() -> bool:
    """Whether clocks can be made wrong here: Linux with a C compiler."""
    return sys.platform == "linux" and shutil.which("cc") is not None


@cache
def _library(folder: Path) -> Path:
    library = folder / "clock.so"
    source = Path(__file__).with_name("clock.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def environment(path: Path, seconds: float = 0.0) -> dict[str, str]:
    """What is added to the environment of a process so that its clock is off by what `path` says; see `step`."""
    step(path, seconds)
    preload = f"{_library(path.parent)} {os.environ.get('LD_PRELOAD', '')}".strip()
    return {"LD_PRELOAD": preload, "CHAOS_CLOCK": str(path)}


def step(path: Path, seconds: float) -> None:
    """From now on that clock is off by so many seconds."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.pwrite(file, struct.pack("=q", round(seconds * 1e6)), 0)  # in place: the processes have it mapped
    finally:
        os.close(file)
