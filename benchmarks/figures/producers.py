"""Producers: pushes of one job, of many coroutines or threads, against one thread's in a loop; and that against calls
of the same script by redis-py's own `evalsha`.
"""

import asyncio
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import redis

import lowq
from benchmarks.server import Server
from lowq.push.calls import new_token, push_arguments
from lowq.queue import Queue
from lowq.store.calls import load_scripts
from lowq.store.keys import shard_prefix

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


def beside_redis_py(*, quick: bool) -> dict[str, float]:
    """``single_evalsha``: pushes of one thread, one after the other, in calls of their script by a client of redis-py
    that does nothing else: the arguments are made before.
    """
    rounds, pushes = (5, 1_000) if quick else (11, 2_000)
    ratios: list[float] = []
    with Server() as server, closing(lowq.Lowq(redis_url=server.url)) as app:
        queue, client = app.queue("Produced", 1), redis.Redis.from_url(server.url)
        _loop(queue, pushes)
        prefix = shard_prefix("lowq", "Produced", 0)
        sha1 = load_scripts()["push"].for_server(shebang=True)[1].decode()
        for first in range(pushes, pushes * (2 * rounds + 1), 2 * pushes):
            rate = _rate(pushes, partial(_loop, queue, pushes, first))
            calls = [(1, prefix, *_push_arguments(first + pushes + number)) for number in range(pushes)]
            ratios.append(rate / _rate(pushes, partial(_evaluate, client, sha1, calls)))
        client.close()
    return {"single_evalsha": statistics.median(ratios)}


def _evaluate(client: redis.Redis, sha1: str, calls: list[tuple[Any, ...]]) -> None:
    for call in calls:
        client.evalsha(sha1, *call)


def _push_arguments(number: int) -> list[bytes]:
    job = b"%d" % number, b'{"v":%d}' % number, b"", b""
    return push_arguments(1, [job], new_token(), b"", b"15", b"")


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
