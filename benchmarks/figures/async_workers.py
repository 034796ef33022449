"""Async workers: 1,000 shards whose handlers await 50 ms, at most 20,000 jobs a second, and other systems with as many
jobs at once; blank jobs, beside those of a worker with threads; and many jobs in flight.
"""

import time
from contextlib import closing
from dataclasses import replace

import lowq
from benchmarks.figures.own import lowq_with
from benchmarks.measured import MeasuringFailed
from benchmarks.peers import PEERS, Peer
from benchmarks.peers.environment import NotInstalled
from benchmarks.peers.turn import PATIENCE, bulk_and_drain, pickup, start
from benchmarks.peers.work import QUEUE
from benchmarks.server import Server

#: Shards of which as many are worked at once.
SHARDS, IN_FLIGHT = 1_000, 5_000


#: The systems beside it, all of which run coroutines, and how many jobs each is given: some seconds' worth.
BESIDE = {"SAQ": 8_000, "taskiq, stream": 8_000, "streaq": 8_000, "arq, 10 ms poll": 4_000}


def measure(*, quick: bool) -> dict[str, float]:
    """``async_rate``: jobs a second, from the counters in Redis. ``async_rate/...``: of other systems. ``async_drain``,
    ``async_pickup``: rate and median delay against a worker with threads, one right after the other.
    """
    figures = {"async_rate": _rate(2.0 if quick else 5.0)}
    for peer in () if quick else PEERS:
        if peer.label in BESIDE:
            try:
                figures[f"async_rate/{peer.label}"] = _rate_of(peer, BESIDE[peer.label])
            except (NotInstalled, MeasuringFailed) as error:
                print(f"{peer.label}: left out: {error}", flush=True)
    count, pings = (50_000, 50) if quick else (200_000, 200)
    threads, loop = (bulk_and_drain(lowq_with(work=work), count)["drain"] for work in ("blank", "async"))
    late, async_late = (pickup(lowq_with(work=work), pings)["pickup_p50"] for work in ("blank", "async"))
    return figures | {"async_drain": loop / threads, "async_pickup": async_late / late}


def _rate_of(peer: Peer, count: int) -> float:
    peer = replace(peer, settings={"work": "await:0.05", "concurrency": str(SHARDS)})
    return bulk_and_drain(peer, count)["drain"]


def _rate(seconds: float) -> float:
    peer = lowq_with(shards=SHARDS, concurrency=SHARDS, work="await:0.05")
    with Server() as server:
        # Ids are spread unevenly over the shards: enough that few run dry before the end.
        with start(peer, "bulk", server, int(20_000 * (seconds + 2))) as producer:
            producer.expect("done", PATIENCE)
        with start(peer, "work", server, 10_000) as worker, closing(lowq.Lowq(redis_url=server.url)) as app:
            worker.expect("last", PATIENCE)
            queue = app.queue(QUEUE, SHARDS)
            began, first = time.monotonic(), queue.stats().processed
            time.sleep(seconds)
            return (queue.stats().processed - first) / (time.monotonic() - began)


def memory(*, quick: bool) -> dict[str, float]:
    """``async_memory``: MB of a node with 5,000 jobs in flight. They await 5 s each: a slow machine gets there."""
    del quick  # it takes a moment
    peer = lowq_with(shards=IN_FLIGHT, concurrency=IN_FLIGHT, work="await:5")
    with Server() as server, closing(lowq.Lowq(redis_url=server.url)) as app:
        with start(peer, "bulk", server, IN_FLIGHT * 12) as producer:
            producer.expect("done", PATIENCE)
        with start(peer, "work", server, IN_FLIGHT) as worker:
            worker.expect("last", PATIENCE)
            give_up_at = time.monotonic() + PATIENCE
            while time.monotonic() < give_up_at:
                nodes = app.nodes()
                if nodes and nodes[0].tasks > IN_FLIGHT * 0.9:
                    return {"async_memory": nodes[0].memory / 2**20}
                time.sleep(0.1)
    raise MeasuringFailed(f"there never were {IN_FLIGHT} jobs in flight")
