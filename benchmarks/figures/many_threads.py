"""200 threads over 200 shards, with handlers that wait for something for 50 ms: at most 4,000 jobs a second."""

import time
from contextlib import closing

import lowq
from benchmarks.figures.own import lowq_with
from benchmarks.peers.turn import PATIENCE, start
from benchmarks.peers.work import QUEUE
from benchmarks.server import Server


def measure(*, quick: bool) -> dict[str, float]:
    """From the counters in Redis, after all threads have begun."""
    seconds = 2.0 if quick else 5.0
    peer = lowq_with(threads=200, shards=200, work="wait:0.05")
    with Server() as server:
        # Ids are spread unevenly over the shards: enough that none runs dry before the end.
        with start(peer, "bulk", server, int(4_000 * (seconds + 2) * 1.4)) as producer:
            producer.expect("done", PATIENCE)
        with start(peer, "work", server, 2_000) as worker, closing(lowq.Lowq(redis_url=server.url)) as app:
            worker.expect("last", PATIENCE)
            queue = app.queue(QUEUE, 200)
            begun, first = time.monotonic(), queue.stats().processed
            time.sleep(seconds)
            return {"many_threads": (queue.stats().processed - first) / (time.monotonic() - begun)}
