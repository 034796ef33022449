"""Pings to a node from a producer that keeps to a timetable, perhaps with something else going on."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

from benchmarks.figures.arrivals import timetable
from benchmarks.measured import Measured
from benchmarks.numbers import percentile
from benchmarks.peers import Peer
from benchmarks.peers.turn import PATIENCE, start
from benchmarks.server import Server

SEED = 7


class Stream(NamedTuple):
    """Jobs that arrive: per second, and what else `arrivals` takes."""

    rate: float
    options: Sequence[str] = ()


def delays_of(server: Server, peer: Peer, stream: Stream, seconds: float, *others: Stream) -> list[float]:
    """The delays of the jobs of `stream`, in seconds, each from the moment at which it was to be sent. The others
    arrive meanwhile, and begin a little earlier.
    """
    count = len(timetable(stream.rate, seconds, SEED))
    with ExitStack() as stack:
        worker = stack.enter_context(start(peer, "receive", server, count))
        for other in others:
            stack.enter_context(arrivals(server, other, seconds + 1.0)).expect("begins", PATIENCE)
        stack.enter_context(arrivals(server, stream, seconds)).expect("done", PATIENCE)
        delays: list[float] = worker.expect("delays", PATIENCE)["delays"]
        return delays


def summary(name: str, delays: Sequence[float]) -> dict[str, float]:
    """p50, p99 and p99.9 in ms, by name."""
    return {f"{name}/{label}": percentile(delays, share) * 1e3 for label, share in SHARES.items()}


SHARES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}


def arrivals(server: Server, stream: Stream, seconds: float) -> Measured:
    """The producer of a stream, for so many seconds."""
    timing = ["--url", server.url, "--rate", str(stream.rate), "--seconds", str(seconds), "--seed", str(SEED)]
    return Measured([sys.executable, "-m", "benchmarks.figures.arrivals", *timing, *stream.options])
