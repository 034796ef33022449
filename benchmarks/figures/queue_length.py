"""The cost curve over the length of the queue, and from it: a drain with a million queued against ten thousand.

One node throughout. While the queue is paused it is filled, then resumed: so short queues are measured many times, by
a node that has found its pace.
"""

from contextlib import closing

import lowq
from benchmarks.figures.own import lowq_with
from benchmarks.measured import Measured
from benchmarks.peers.jobs import payloads
from benchmarks.peers.turn import PATIENCE, start
from benchmarks.peers.work import QUEUE
from benchmarks.server import Server
from lowq.queue import Queue

LENGTHS = (1_000, 10_000, 100_000, 1_000_000)
#: Jobs drained of a queue: with a long one, its first part.
SAMPLE = 100_000


def measure(*, quick: bool) -> dict[str, float]:
    """``length/N/...``: Redis's µs per job to enqueue and to drain, and rates per second."""
    figures = {}
    for length in LENGTHS[:-1] if quick else LENGTHS:
        for name, value in _at(length, quick=quick).items():
            figures[f"length/{length}/{name}"] = value
    longest = LENGTHS[-2 if quick else -1]
    figures["long_queue"] = figures[f"length/{longest}/drain"] / figures["length/10000/drain"]
    return figures


def _at(length: int, *, quick: bool) -> dict[str, float]:
    sample = SAMPLE // 4 if quick else SAMPLE
    times = max(min(sample // length, 20), 1)
    count = min(length, sample)
    warm_up = 20_000
    with (
        Server() as server,
        start(lowq_with(), "work", server, warm_up) as worker,
        closing(lowq.Lowq(redis_url=server.url)) as app,
    ):
        queue = app.queue(QUEUE, 5)
        _fill(queue, warm_up)
        worker.expect("last", PATIENCE)
        pushed = drained = seconds = 0.0
        for _ in range(times):
            queue.pause()
            begun = server.cpu()
            _fill(queue, length)
            pushed += server.cpu() - begun
            _expect(worker, count)
            begun = server.cpu()
            queue.resume()
            seconds += worker.expect("last", PATIENCE)["seconds"]
            drained += server.cpu() - begun
        jobs = count * times
        return {"push_cpu": pushed / (length * times) * 1e6, "drain_cpu": drained / jobs * 1e6, "drain": jobs / seconds}


def _fill(queue: Queue, count: int) -> None:
    queue.push({"id": number, "payload": payload} for number, payload in enumerate(payloads(count, 20), 200_000))


def _expect(worker: Measured, count: int) -> None:
    worker.tell(f"expect {count}")
    worker.expect("expecting", PATIENCE)
