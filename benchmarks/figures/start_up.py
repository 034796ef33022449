"""From the start of the process `lowq run` to the first job, which waits already."""

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
