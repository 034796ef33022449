"""Consumers: batches taken by hand against a node's drain of the same jobs, and one job after the other."""

import time
from collections.abc import Callable
from contextlib import closing

import lowq
from benchmarks.figures.own import lowq_with
from benchmarks.peers.turn import bulk_and_drain
from benchmarks.server import Server
from lowq.consumer import Consumer

SHARDS, BATCH = 5, 100


def measure(*, quick: bool) -> dict[str, float]:
    """``consumer_batches``: against the drain of a node with as large batches; ``consumer_single``: jobs a second, each
    taken and acknowledged by itself.
    """
    count, single = (50_000, 5_000) if quick else (200_000, 20_000)
    node = bulk_and_drain(lowq_with(batch_size=BATCH, shards=SHARDS), count)["drain"]
    return {"consumer_batches": _rate(count, _batches) / node, "consumer_single": _rate(single, _one_by_one)}


def _rate(count: int, consume: Callable[[Consumer], int]) -> float:
    with Server() as server, closing(lowq.Lowq(redis_url=server.url)) as app:
        queue = app.queue("Consumed", SHARDS)
        queue.push({"id": number, "payload": {"v": number}} for number in range(count))
        with queue.consumer(ttr=60) as consumer:
            begun = time.perf_counter()
            done = consume(consumer)
            seconds = time.perf_counter() - begun
        assert done == count, f"{done} of {count} jobs were consumed"
        return count / seconds


def _batches(consumer: Consumer) -> int:
    return sum(len(jobs) for jobs in consumer.batches(BATCH, timeout=0))


def _one_by_one(consumer: Consumer) -> int:
    done = 0
    while jobs := consumer.take(timeout=0):
        jobs[0].ack()
        done += 1
    return done
