"""Limits over all nodes: how close to a rate two nodes come together, and what a limit costs that is never reached."""

import threading
import time
from contextlib import ExitStack, closing
from typing import Any

import lowq
from benchmarks.server import Server
from lowq.node.node import Node

RATE, NODES, THREADS, SHARDS = 100, 2, 5, 24


def measure(*, quick: bool) -> dict[str, float]:
    """``limit_rate``: jobs that began in 10 s, against those that the rate allows. ``limit_drain``: the drain of jobs
    that take 1 ms with a `lowq.Concurrency` that is never reached, against none.
    """
    seconds, count = (3.0, 3_000) if quick else (10.0, 10_000)
    begun = _begun(seconds)
    return {
        "limit_rate": begun / (RATE * seconds),
        "limit_drain": _drain(count, lowq.Concurrency(10_000)) / _drain(count, None),
    }


def _begun(seconds: float) -> int:
    with Server() as server, ExitStack() as stack:
        moments: list[float] = []
        apps = [stack.enter_context(closing(lowq.Lowq(redis_url=server.url))) for _ in range(NODES)]
        for app in apps:

            @app.worker(queue_name="limited", shards_count=SHARDS, limit=lowq.Rate(RATE))
            def perform(_payloads_by_id: dict[str, list[Any]]) -> None:
                moments.append(time.monotonic())

        apps[0].queue("limited").push({"id": number} for number in range(int(RATE * seconds * 3)))
        for app in apps:
            node = Node(app, threads=THREADS)
            node.start()
            stack.callback(node.stop, 5.0)
        time.sleep(2.0)  # all shards are held, and the first burst is over
        since = time.monotonic()
        time.sleep(seconds)
        return sum(since <= moment < since + seconds for moment in list(moments))


def _drain(count: int, limit: lowq.Concurrency | None) -> float:
    with Server() as server, closing(lowq.Lowq(redis_url=server.url)) as app:
        left, done = count, threading.Event()

        @app.worker(queue_name="limited", shards_count=SHARDS, limit=limit, max_threads=THREADS)
        def perform(_payloads_by_id: dict[str, list[Any]]) -> None:
            nonlocal left
            time.sleep(0.001)
            left -= 1
            if left == 0:
                done.set()

        app.queue("limited").push({"id": number} for number in range(count))
        node = Node(app, threads=THREADS)
        begun = time.perf_counter()
        node.start()
        assert done.wait(120), f"{left} of {count} jobs were not performed"
        seconds = time.perf_counter() - begun
        node.stop(5.0)
        return count / seconds
