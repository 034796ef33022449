"""Lag against load: jobs arrive at random moments, at a share of what the node can do at most.

Handlers wait 2 ms, so that what a node can do is set by them, and one producer is enough. 50 shards, as with few of
them the busiest one has more than its share of the load.
"""

from benchmarks.figures.own import lowq_with
from benchmarks.figures.pings import Stream, delays_of, summary
from benchmarks.peers.turn import bulk_and_drain
from benchmarks.server import Server

LOADS = (0.5, 0.8, 0.95)
SHARDS = 50


def measure(*, quick: bool) -> dict[str, float]:
    """``load/PERCENT/...``: delays in ms, from the moment at which a job was to be sent to its perform."""
    peer = lowq_with(shards=SHARDS, work="wait:0.002")
    capacity = bulk_and_drain(peer, 2_000 if quick else 6_000)["drain"]
    figures = {"capacity": capacity}
    for load in LOADS[1:2] if quick else LOADS:
        with Server() as server:
            stream = Stream(capacity * load, ("--shards", str(SHARDS)))
            figures |= summary(f"load/{load * 100:g}", delays_of(server, peer, stream, 2.0 if quick else 8.0))
    return figures
