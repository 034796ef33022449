"""lowq's own figures, on a fresh redis-server, each measurement in a process of its own.

    make bench            # every figure, three times: min / median / max
    make bench-quick      # once, in well under two minutes

A blank job does nothing: the figures are the cost of lowq and Redis. Redis's CPU per job is the steadiest of them;
compare rates only with rates of the same run.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import lowq  # noqa: E402 - after the path
from lowq.node import Node  # noqa: E402
from tests.redis_server import RedisServer  # noqa: E402

#: Seconds after which a drain that doesn't end is given up.
PATIENCE = 120.0


class Bench:
    """What measurements share: an application on the server, and Redis's own view."""

    def __init__(self, url: str) -> None:
        self.app = lowq.Lowq(redis_url=url)
        self.performed = itertools.count()

    def worker(self, batch_size: int, shards_count: int = 5) -> type[lowq.Worker[Any]]:
        performed = self.performed

        @self.app.worker(batch_size=batch_size, shards_count=shards_count)
        class Blank(lowq.Worker[Any]):
            def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
                for _ in payloads_by_id:
                    next(performed)

        return Blank

    def info(self, section: str, name: str) -> float:
        text = self.app.client.command("INFO", section).decode()
        lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        return float(lines[name])

    def redis_cpu(self) -> float:
        return self.info("cpu", "used_cpu_user") + self.info("cpu", "used_cpu_sys")

    def count(self) -> int:
        return int(repr(self.performed)[6:-1])

    def drain(self, jobs: int, **options: Any) -> tuple[float, float]:
        """Drains; returns jobs per second from the first job on, and Redis's CPU in µs per job."""
        node = Node(self.app, **options)
        cpu, start = self.redis_cpu(), time.perf_counter()
        node.start()
        while self.count() < jobs and time.perf_counter() - start < PATIENCE:
            time.sleep(0.01)
        seconds = time.perf_counter() - start
        done = self.count()
        cpu = self.redis_cpu() - cpu
        node.stop()
        if done < jobs:
            raise SystemExit(f"only {done} of {jobs} jobs were performed in {PATIENCE} s")
        return jobs / seconds, cpu / jobs * 1e6


def jobs(count: int, size: int = 20) -> Iterator[dict[str, Any]]:
    """Jobs of distinct ids; the payload has about ``size`` bytes encoded."""
    pad = "x" * max(size - 18, 0)
    for number in range(count):
        yield {"id": number, "payload": {"v": number, "p": pad} if pad else number}


def bulk(bench: Bench, count: int) -> dict[str, float]:
    worker = bench.worker(1)
    worker.perform_async({"id": "warm"})
    cpu, start = bench.redis_cpu(), time.perf_counter()
    worker.perform_async(jobs(count))
    seconds = time.perf_counter() - start
    return {
        "enqueue in bulk, jobs/s": count / seconds,
        "enqueue in bulk, Redis µs/job": (bench.redis_cpu() - cpu) / count * 1e6,
    }


def single(bench: Bench, count: int) -> dict[str, float]:
    worker = bench.worker(1)
    worker.perform_async({"id": "warm"})
    start = time.perf_counter()
    for job in jobs(count):
        worker.perform_async(job)
    return {"enqueue one by one, jobs/s": count / (time.perf_counter() - start)}


def draining(name: str, batch_size: int, **options: Any) -> Callable[[Bench, int], dict[str, float]]:
    def measure(bench: Bench, count: int) -> dict[str, float]:
        bench.worker(batch_size).perform_async(jobs(count))
        rate, cpu = bench.drain(count, **options)
        return {f"drain, {name}, jobs/s": rate, f"drain, {name}, Redis µs/job": cpu}

    return measure


def long_queue(bench: Bench, count: int) -> dict[str, float]:
    """Drains the same number of jobs from a queue of 10,000 and from one of a million (or what `count` says)."""
    worker = bench.worker(1)
    sample = 10_000
    worker.perform_async(jobs(sample))
    short, _ = bench.drain(sample)
    worker.perform_async(jobs(count))
    bench.performed = itertools.count()
    long, _ = Bench.drain(_recounted(bench), sample * 3)
    return {f"drain with {count:,} queued against {sample:,}, ratio": long / short}


def _recounted(bench: Bench) -> Bench:
    # The worker counts with the counter it was made with: make it anew for the new counter.
    bench.app.workers.clear()
    bench.worker(1)
    return bench


def memory(bench: Bench, count: int) -> dict[str, float]:
    figures = {}
    for size in (20, 100):
        bench.app.client.command("FLUSHALL")
        bench.app.forget_registered()
        worker = bench.worker(1)
        worker.perform_async({"id": "warm"})
        before = bench.info("memory", "used_memory")
        worker.perform_async(jobs(count, size))
        figures[f"bytes per queued job, payload of {size} B"] = (bench.info("memory", "used_memory") - before) / count
    return figures


def pickup(bench: Bench, count: int) -> dict[str, float]:
    delays: list[float] = []

    @bench.app.worker(shards_count=5)
    def ping(payloads_by_id: dict[str, list[float]]) -> None:
        now = time.time()
        delays.extend(now - payload for payloads in payloads_by_id.values() for payload in payloads)

    node = Node(bench.app)
    node.start()
    for number in range(count):
        ping.perform_async({"id": number, "payload": time.time()})
        time.sleep(0.005)
    deadline = time.monotonic() + 5
    while len(delays) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    node.stop()
    delays.sort()
    return {
        "pickup when idle, p50 ms": delays[len(delays) // 2] * 1e3,
        "pickup when idle, p99 ms": delays[int(len(delays) * 0.99)] * 1e3,
    }


def idle(bench: Bench, seconds: int) -> dict[str, float]:
    bench.worker(1, shards_count=100)
    node = Node(bench.app)
    node.start()
    time.sleep(1.0)
    cpu, start = time.process_time(), time.perf_counter()
    time.sleep(seconds)
    share = (time.process_time() - cpu) / (time.perf_counter() - start) * 100
    node.stop()
    return {"idle node, 100 shards, % CPU": share}


def start_up(bench: Bench, _count: int) -> dict[str, float]:
    started = float(os.environ["BENCH_STARTED"])
    bench.worker(1).perform_async({"id": 1})
    node = Node(bench.app)
    node.start()
    while bench.count() < 1:
        time.sleep(0.0005)
    seconds = time.time() - started
    node.stop()
    return {"process start to first job, s": seconds}


#: name -> (measurement, its size, its size when quick)
MEASUREMENTS: dict[str, tuple[Callable[[Bench, int], dict[str, float]], int, int]] = {
    "bulk": (bulk, 200_000, 100_000),
    "single": (single, 10_000, 5_000),
    "drain": (draining("batch_size=1", 1), 200_000, 100_000),
    "drain_plain": (draining("batch_size=1 without prefetch", 1, prefetch=False), 50_000, 20_000),
    "drain_100": (draining("batch_size=100", 100), 200_000, 100_000),
    "long_queue": (long_queue, 1_000_000, 300_000),
    "memory": (memory, 100_000, 50_000),
    "pickup": (pickup, 500, 200),
    "idle": (idle, 5, 2),
    "start_up": (start_up, 1, 1),
}


def measure_once(name: str, *, quick: bool) -> dict[str, float]:
    """One measurement, in a process and on a server of its own."""
    with RedisServer() as server:
        command = [sys.executable, __file__, "--measure", name, "--url", server.url, *(["--quick"] if quick else [])]
        environment = {**os.environ, "BENCH_STARTED": repr(time.time())}
        output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    figures: dict[str, float] = json.loads(output.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller and once")
    parser.add_argument("--runs", type=int, default=0, help="how often each figure is measured")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--only", choices=MEASUREMENTS, action="append", help="only this measurement (repeatable)")
    parser.add_argument("--measure", choices=MEASUREMENTS, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        function, size, small = MEASUREMENTS[options.measure]
        print(json.dumps(function(Bench(options.url), small if options.quick else size)))
        return
    runs = options.runs or (1 if options.quick else 3)
    results: dict[str, list[float]] = {}
    for name in options.only or MEASUREMENTS:
        for _ in range(runs):
            for figure, value in measure_once(name, quick=options.quick).items():
                results.setdefault(figure, []).append(value)
    if options.json:
        print(json.dumps(results, indent=2))
        return
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, lowq {lowq.__version__}")
    print(f"{'figure':58} {'min':>12} {'median':>12} {'max':>12}")
    for figure, values in results.items():
        row = " ".join(f"{value:12,.2f}" for value in (min(values), statistics.median(values), max(values)))
        print(f"{figure:58} {row}")


if __name__ == "__main__":
    main()
