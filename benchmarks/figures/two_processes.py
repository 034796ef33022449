"""Two processes against one: with handlers that compute, as the GIL lets one process do so much, and with handlers that
wait, as most do; and 16 processes.
"""

import time
from contextlib import ExitStack, closing

import lowq
from benchmarks.figures.command import has_processes, node
from benchmarks.figures.own import lowq_with
from benchmarks.measured import MeasuringFailed
from benchmarks.peers.turn import PATIENCE, start
from benchmarks.peers.work import QUEUE
from benchmarks.server import Server

WORK = "spin:0.0002"


def measure(*, quick: bool) -> dict[str, float]:
    """Rates from the counters in Redis, between the first second and the end of the window."""
    seconds = 1.5 if quick else 4.0
    one, two = _rate(1, seconds), _rate(2, seconds)
    return {"two_processes": two / one, "one_process_rate": one, "two_processes_rate": two}


def waiting(*, quick: bool) -> dict[str, float]:
    """``waiting/N/...``: of handlers that sleep for 1 and 10 ms, the rate of N processes with 5 threads, in percent of
    what so many threads could do if nothing else took any time.
    """
    figures = {}
    for processes in (1, 2) if quick else (1, 2, 16):
        for milliseconds in (1, 10) if processes < 16 else (10,):
            most = processes * 5 * 1_000 / milliseconds
            work = f"wait:{milliseconds / 1_000}"
            rate = _rate(processes, 1.5 if quick else 3.0, work=work, shards=20 * processes, most=most)
            figures[f"waiting/{processes}/{milliseconds}_ms"] = rate / most * 100
    return figures


def _rate(processes: int, seconds: float, *, work: str = WORK, shards: int = 20, most: float = 9_000) -> float:
    with Server() as server, ExitStack() as stack:
        # Ids are spread unevenly over the shards: enough that none runs dry before the end.
        with start(lowq_with(shards=shards), "bulk", server, int(1.4 * most * (seconds + 1.5)) + 2_000) as producer:
            producer.expect("done", PATIENCE)
        environment = {"BENCH_WORK": work, "BENCH_SHARDS": shards}
        if processes > 1 and has_processes():
            nodes = [node(server, "--processes", str(processes), **environment)]
        elif processes > 1:
            parts = [{"BENCH_NODES": processes, "BENCH_NODE": number} for number in range(processes)]
            nodes = [node(server, **environment, **part) for part in parts]
        else:
            nodes = [node(server, **environment)]
        for item in nodes:
            stack.enter_context(item)
        app = stack.enter_context(closing(lowq.Lowq(redis_url=server.url)))
        queue = app.queue(QUEUE, shards)
        deadline = time.monotonic() + PATIENCE
        while queue.stats().processed < 2000 or len(app.nodes()) < processes:  # all of them are at it
            if time.monotonic() > deadline:
                raise MeasuringFailed("2,000 jobs were not performed")
            time.sleep(0.05)
        begun, first = time.monotonic(), queue.stats().processed
        time.sleep(seconds)
        stats = queue.stats()
        passed = time.monotonic() - begun
        if stats.due == 0:
            raise MeasuringFailed("the queue was empty too soon")
        return (stats.processed - first) / passed
