"""Fairness: what a cold id sees of a hot one, a fast worker of a slow one beside it, and what shares are worth."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing

import lowq
from benchmarks.figures.arrivals import timetable
from benchmarks.figures.own import lowq_with
from benchmarks.figures.pings import SEED, SHARES, Stream, arrivals, delays_of, summary
from benchmarks.measured import MeasuringFailed
from benchmarks.numbers import percentile
from benchmarks.peers.turn import PATIENCE, start
from benchmarks.peers.work import QUEUE, SLOW
from benchmarks.server import Server
from lowq.node.node import Node

#: Jobs per second of those that are asked how long they waited.
RATE = 200.0
#: Threads of the node, and the seconds that a slow job waits for something.
THREADS, WAIT = 5, 0.05


def hot_id(*, quick: bool) -> dict[str, float]:
    """``hot/...``: delays of cold ids in ms, alone and while one id gets 2,000 payloads a second. A perform takes 2 ms;
    all are in one shard, so a cold id waits behind the hot one when that runs.
    """
    peer = lowq_with(shards=1, work="wait:0.002")
    hot = Stream(2_000.0, ("--shards", "1", "--id", "hot"))
    cold = Stream(RATE, ("--shards", "1"))
    figures = {}
    for name, others in (("alone", ()), ("beside", (hot,))):
        with Server() as server:
            figures |= summary(f"hot/{name}", delays_of(server, peer, cold, _seconds(quick), *others))
    return figures


def slow_worker(*, quick: bool) -> dict[str, float]:
    """``slow/...``: delays of a fast worker's jobs in ms. The slow one, 50 ms a job, gets 60 jobs a second of the 100
    that 5 threads can do; or has a backlog, with either scheduler.
    """
    slow = Stream(60.0, ("--queue", SLOW, "--id", ""))
    figures = {}
    cases = (
        ("alone", {}, (), 0),
        ("beside", {}, (slow,), 0),
        ("backlog, lag", {}, (), 1),
        ("backlog, seq", {"scheduler": "seq"}, (), 1),
    )
    for name, settings, others, backlog in cases:
        peer = lowq_with(slow="wait:0.05", **settings)
        with Server() as server:
            if backlog:
                with closing(lowq.Lowq(redis_url=server.url)) as app:
                    app.queue(SLOW, 5).push({"id": number} for number in range(int(_seconds(quick) * 100)))
            figures |= summary(f"slow/{name}", delays_of(server, peer, Stream(RATE), _seconds(quick), *others))
    return figures


def shares(*, quick: bool) -> dict[str, float]:
    """``fair_...``: 200 jobs come one after the other, in 16 s, beside 5,000 that take 50 ms each, on 5 threads: their
    delays in ms, and how much of the threads that they leave the slow queue gets. What is left of the node for a
    queue alone; two queues with backlogs and weights of 3:1; and a queue that may have 2 of the threads.
    """
    seconds = 2.0 if quick else 16.0
    with Server() as server, closing(lowq.Lowq(redis_url=server.url)) as app:
        slow = app.queue(SLOW, 5)
        slow.push({"id": number} for number in range(5_000))
        stream, count = Stream(RATE / 16), len(timetable(RATE / 16, seconds, SEED))
        with start(lowq_with(slow=f"wait:{WAIT}"), "receive", server, count) as worker:
            _until(lambda: slow.stats().processed > 10)
            with arrivals(server, stream, seconds) as producer:
                producer.expect("begins", PATIENCE)
                began, before = time.monotonic(), slow.stats().processed
                producer.expect("done", PATIENCE)
                rate = (slow.stats().processed - before) / (time.monotonic() - began)
            delays = worker.expect("delays", PATIENCE)["delays"]
    figures = {f"fair_{name}": percentile(delays, SHARES[name]) * 1e3 for name in ("p50", "p99")}
    figures["fair_left"] = rate * WAIT / THREADS
    seconds /= 4
    (alone,) = _performed(seconds, {"slow": f"wait:{WAIT}"}, [SLOW])
    heavy, light = _performed(seconds, {"slow": f"wait:{WAIT}", "work": f"wait:{WAIT}", "weight": 3}, [QUEUE, SLOW])
    (bounded,) = _performed(seconds, {"slow": f"wait:{WAIT}", "max_threads": 2}, [SLOW])
    return figures | {
        "fair_alone": alone / seconds * WAIT / THREADS,
        "fair_weights": abs(heavy / light / 3 - 1) * 100,
        "fair_bounded": bounded / seconds * WAIT,
    }


def urgent(*, quick: bool) -> dict[str, float]:
    """``urgent_p90``: how long 50 jobs a second wait, seconds, pushed one by one with the most urgent priority beside
    500,000 of the least urgent one in the same queue, all of which take 20 ms, on 5 threads.
    """
    count, delays = int(_seconds(quick) * 100), list[float]()
    with Server() as server, closing(lowq.Lowq(redis_url=server.url)) as app:

        @app.worker(shards_count=20, queue_name=QUEUE)
        def work(payloads_by_id: dict[str, list[float]]) -> None:
            now = time.monotonic()
            delays.extend(now - pushed for (pushed,) in payloads_by_id.values() if pushed)
            time.sleep(0.02)

        work.perform_async({"id": f"backfill {number}", "priority": 9} for number in range(500_000))
        node = Node(app, threads=THREADS)
        node.start()
        try:
            _until(lambda: work.queue.stats().processed > 10)
            for number in range(count):
                work.perform_async({"id": f"order {number}", "payload": time.monotonic(), "priority": 0})
                time.sleep(0.02)
            _until(lambda: len(delays) == count)
        finally:
            node.stop(5.0)
    return {"urgent_p90": percentile(delays, 0.9)}


def _performed(seconds: float, settings: dict[str, object], queues: Sequence[str]) -> list[int]:
    """How many jobs of each queue, all of which have backlogs, a node performs in that time."""
    with Server() as server, closing(lowq.Lowq(redis_url=server.url)) as app:
        handles = [app.queue(name, 5) for name in queues]
        for queue in handles:
            queue.push({"id": number, "payload": {"v": number}} for number in range(int((seconds + 3) * 200)))
        with start(lowq_with(**settings), "work", server, 10**9):
            _until(lambda: all(queue.stats().processed > 10 for queue in handles))
            before = [queue.stats().processed for queue in handles]
            time.sleep(seconds)
            return [queue.stats().processed - count for queue, count in zip(handles, before, strict=True)]


def _until(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > give_up_at:
            raise MeasuringFailed("the node does not begin, or end")
        time.sleep(0.05)


def _seconds(quick: bool) -> float:
    return 1.5 if quick else 5.0
