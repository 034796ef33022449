"""What it costs a push to wait for a replica or the disk, against one that does not, on the same servers."""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import redis

import lowq
from benchmarks.server import Server
from lowq.queue import Queue
from lowq.store import Durability
from tests.waiting import until

TURNS, THREADS, BULK = 9, 20, 20_000


def measure(*, quick: bool) -> dict[str, float]:
    """Rates with a ``durability`` against those without, single jobs by one thread and by 20, and in bulk: the median
    of turns in which both follow each other. ``fsynced`` needs a server that knows WAITAOF.
    """
    turns, count = (3, 100) if quick else (TURNS, 500)
    figures: dict[str, float] = {}
    with ExitStack() as stack:
        primary = stack.enter_context(Server(repl_diskless_sync_delay=0))
        replica = stack.enter_context(Server(replicaof=f"127.0.0.1 {primary.url.rpartition(':')[2].partition('/')[0]}"))
        until(lambda: replica.client.info("replication")["master_link_status"] == "up", "replica")
        until(lambda: primary.client.wait(1, 100) == 1, "replica that confirms")
        figures |= _ratios(primary.url, "replicated", turns, count)
    with Server(appendonly="yes", appendfsync="always") as server:
        if _knows_waitaof(server):
            figures |= _ratios(server.url, "fsynced", turns, count)
    return figures


def _ratios(url: str, durability: Durability, turns: int, count: int) -> dict[str, float]:
    with closing(lowq.Lowq(redis_url=url)) as app:
        queue = app.queue("Durable", shards_count=5)
        ways: dict[str, Callable[[Durability], float]] = {
            "single": lambda how: _single(queue, how, count),
            "threads": lambda how: _threads(queue, how, count),
            "bulk": lambda how: _bulk(queue, how),
        }
        for way in ways.values():  # connections, and what a server is asked once
            way(durability)
        return {
            f"{durability}_{name}": statistics.median(way(durability) / way("none") for _ in range(turns))
            for name, way in ways.items()
        }


def _single(queue: Queue, durability: Durability, count: int) -> float:
    begun = time.perf_counter()
    for number in range(count):
        queue.push(number, {"number": number}, durability=durability)
    return count / (time.perf_counter() - begun)


def _threads(queue: Queue, durability: Durability, count: int) -> float:
    with ThreadPoolExecutor(THREADS) as executor:
        begun = time.perf_counter()
        for rate in [executor.submit(_single, queue, durability, count // 4) for _ in range(THREADS)]:
            rate.result()
        return THREADS * (count // 4) / (time.perf_counter() - begun)


def _bulk(queue: Queue, durability: Durability) -> float:
    begun = time.perf_counter()
    queue.push(({"id": number, "payload": {"number": number}} for number in range(BULK)), durability=durability)
    return BULK / (time.perf_counter() - begun)


def _knows_waitaof(server: Server) -> bool:
    try:
        server.client.execute_command("WAITAOF", 1, 0, 1)
    except redis.ResponseError:
        return False
    return True
