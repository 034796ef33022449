"""Fairness: what a cold id sees of a hot one, and a fast worker of a slow one beside it."""

from contextlib import closing

import lowq
from benchmarks.figures.own import lowq_with
from benchmarks.figures.pings import Stream, delays_of, summary
from benchmarks.peers.work import SLOW
from benchmarks.server import Server

#: Jobs per second of those that are asked how long they waited.
RATE = 200.0


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


def _seconds(quick: bool) -> float:
    return 1.5 if quick else 5.0
