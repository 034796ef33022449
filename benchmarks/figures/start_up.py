"""From the start of the process `lowq run` to the first job, which waits already; and what `import lowq` takes."""

import subprocess
import sys

from benchmarks.figures.command import node
from benchmarks.figures.own import lowq_with
from benchmarks.numbers import percentile
from benchmarks.peers.turn import PATIENCE, start
from benchmarks.server import Server


def measure(*, quick: bool) -> dict[str, float]:
    """The median of some starts."""
    seconds = []
    for _ in range(2 if quick else 5):
        with Server() as server:
            with start(lowq_with(), "single", server, 1) as producer:
                producer.expect("done", PATIENCE)
            with node(server) as process:
                seconds.append(process.expect("first", PATIENCE)["at"] - process.started)
    return {"start_up": percentile(seconds, 0.5)}


def importing(*, quick: bool) -> dict[str, float]:
    """Processor time of `import lowq`, and of `import redis` alone, in turn: the least of some."""
    times: dict[str, list[float]] = {"lowq": [], "redis": []}
    for _ in range(3 if quick else 10):
        for name, found in times.items():
            code = f"import time; begun = time.process_time(); import {name}; print(time.process_time() - begun)"
            ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            found.append(float(ran.stdout) * 1e3)
    return {f"import_{name}": min(found) for name, found in times.items()}
