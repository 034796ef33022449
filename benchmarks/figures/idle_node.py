"""What a node costs that has nothing to do: 100 shards, default settings."""

import time

from benchmarks.figures.command import node
from benchmarks.figures.own import lowq_with
from benchmarks.peers.turn import PATIENCE, start
from benchmarks.server import Server


def measure(*, quick: bool) -> dict[str, float]:
    """Its processor time, and how often Redis reads from its connections: one write is one read."""
    seconds = 4.0 if quick else 12.0
    with Server() as server, node(server, BENCH_SHARDS=100) as process:
        with start(lowq_with(shards=100), "single", server, 1) as producer:
            producer.expect("done", PATIENCE)
        process.expect("first", PATIENCE)
        time.sleep(2.0)  # what it does at its start
        server.client.ping()
        cpu, reads, begun = process.processor_seconds(), server.reads(), time.monotonic()
        time.sleep(seconds)
        reads = server.reads() - reads - 1  # this one
        passed = time.monotonic() - begun
        return {
            "idle_cpu": (process.processor_seconds() - cpu) / passed * 100,
            "idle_trips": reads / passed,
        }
