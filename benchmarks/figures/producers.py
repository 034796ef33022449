"""Producers under concurrency: pushes of one job, of many coroutines or threads, against one thread's in a loop."""

import asyncio
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial

import lowq
from benchmarks.server import Server
from lowq.queue import Queue

COROUTINES = (1, 100, 1_000)
THREADS = 20


def measure(*, quick: bool) -> dict[str, float]:
    """``producers/...``: how many times the rate of one thread that was measured right before and right after."""
    rounds, pushes = (3, 4_000) if quick else (7, 10_000)
    ratios: dict[str, list[float]] = {}
    with Server() as server, closing(lowq.Lowq(redis_url=server.url)) as app:
        queue = app.queue("Produced", 5)
        _rate(pushes // 4, lambda: _loop(queue, pushes // 4))
        for _ in range(rounds):
            for name, count, run in _kinds(queue, pushes):
                single = [_rate(pushes // 4, lambda: _loop(queue, pushes // 4))]
                rate = _rate(count, run)
                single.append(_rate(pushes // 4, lambda: _loop(queue, pushes // 4)))
                ratios.setdefault(f"producers/{name}", []).append(rate / statistics.mean(single))
    return {name: statistics.median(values) for name, values in ratios.items()}


def _kinds(queue: Queue, pushes: int) -> list[tuple[str, int, Callable[[], object]]]:
    kinds: list[tuple[str, int, Callable[[], object]]] = []
    for coroutines in COROUTINES:
        count = pushes // 4 if coroutines == 1 else 2 * pushes
        run = partial(_run_coroutines, queue, count, coroutines)
        kinds.append((f"coroutines_{coroutines}", count, run))
    kinds.append((f"threads_{THREADS}", pushes, lambda: _threads(queue, pushes)))
    return kinds


def _rate(count: int, run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return count / (time.perf_counter() - begun)


def _loop(queue: Queue, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        queue.push({"id": number, "payload": {"v": number}})


def _run_coroutines(queue: Queue, count: int, coroutines: int) -> None:
    asyncio.run(_gather(queue, count, coroutines))


async def _gather(queue: Queue, count: int, coroutines: int) -> None:
    each = count // coroutines

    async def produce(first: int) -> None:
        for number in range(first, first + each):
            await queue.apush({"id": number, "payload": {"v": number}})

    await asyncio.gather(*(produce(each * number) for number in range(coroutines)))


def _threads(queue: Queue, count: int) -> None:
    each = count // THREADS
    threads = [threading.Thread(target=_loop, args=(queue, each, each * number)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
