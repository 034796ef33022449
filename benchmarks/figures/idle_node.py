"""What a node costs that has nothing to do, with default settings: with 100 shards, and with 10 x 1,000."""

import time
from contextlib import closing

import lowq
from benchmarks.figures.command import node
from benchmarks.figures.own import lowq_with
from benchmarks.figures.waiting import held, wait_until
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


def measure_many(*, quick: bool) -> dict[str, float]:
    """With 10 queues of 1,000 shards: its processor time and Redis's, and how many scripts it runs."""
    queues, shards = 10, 100 if quick else 1_000
    with (
        Server() as server,
        start(lowq_with(queues=queues, shards=shards), "work", server, 0) as process,
        closing(lowq.Lowq(redis_url=server.url)) as app,
    ):
        wait_until(lambda: held(app) == queues * shards, "all shards held")
        time.sleep(3.0)  # what it does at its start
        # A third of a lease is 5 s: so these are three rounds of renewals.
        scripts = lambda: int(server.client.info("commandstats")["cmdstat_evalsha"]["calls"])  # noqa: E731
        cpu, used, calls, begun = process.processor_seconds(), server.cpu(), scripts(), time.monotonic()
        time.sleep(15.0)
        passed = time.monotonic() - begun
        return {
            "idle_many_cpu": (process.processor_seconds() - cpu) / passed * 100,
            "idle_many_redis_cpu": (server.cpu() - used) / passed * 100,
            "idle_many_scripts": (scripts() - calls) / passed,
        }
