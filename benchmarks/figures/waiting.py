"""What figures wait for."""

import time
from collections.abc import Callable

import lowq
from benchmarks.measured import MeasuringFailed
from benchmarks.peers.turn import PATIENCE


def held(app: lowq.Lowq) -> int:
    """The number of shards that nodes hold."""
    return sum(len(numbers) for node in app.nodes() for numbers in node.shards.values())


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    """Raises:
    MeasuringFailed: it took too long.
    """
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        if time.monotonic() > deadline:
            raise MeasuringFailed(f"after {PATIENCE:g} s there were not: {what}")
        time.sleep(0.1)
