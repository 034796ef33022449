"""The machine that the figures are from."""

import importlib.metadata
import os
import platform
from pathlib import Path

from benchmarks.server import Server


def describe() -> dict[str, str]:
    """What may be said of it in public: no names."""
    with Server() as server:
        redis = server.version
    return {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "Python": platform.python_version(),
        "Redis": redis,
        **{name: importlib.metadata.version(name) for name in ("lowq", "redis", "hiredis")},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] != "unknown" else platform.machine()
