"""What the options of a queue cost: pushes, drains and memory with each of them, beside a queue without any."""

import time
from contextlib import closing

import lowq
from benchmarks.figures.own import lowq_with
from benchmarks.measured import MeasuringFailed
from benchmarks.peers.turn import LARGE, PATIENCE, bulk_and_drain, start, weigh
from benchmarks.peers.work import QUEUE
from benchmarks.server import Server

#: Of each row of the table its settings. Without any it is merge="collapse".
OPTIONS: dict[str, dict[str, object]] = {
    "none": {},
    "append": {"merge": "append"},
    "latest": {"merge": "latest"},
    "ttl": {"ttl": 3600},
    "priority": {"priority": 3},
    "capacity": {"capacity": 10_000_000},
    "debounce": {"debounce": 0.001, "max_wait": 1},
}
#: Those that have bounds.
BOUNDED = ("append", "ttl", "priority")
#: Jobs that expire at once, and seconds until they do.
EXPIRING, TTL = 100_000, 3.0


def measure(*, quick: bool) -> dict[str, float]:
    """``options/NAME/...``, one after the other; ``NAME_push`` and ``NAME_drain``: against a queue without options."""
    count = 50_000 if quick else 200_000
    found = {
        name: bulk_and_drain(lowq_with(batch_size=100, **options), count, LARGE)
        | {"bytes": weigh(lowq_with(**options), count // 2, LARGE)}
        for name, options in OPTIONS.items()
    }
    figures = {f"options/{name}/{column}": value for name, row in found.items() for column, value in row.items()}
    # The bounds are for ratios: each option right after none, as a machine may change its speed.
    for name in BOUNDED:
        none, row = (
            bulk_and_drain(lowq_with(batch_size=100, **options), count // 2, LARGE) for options in ({}, OPTIONS[name])
        )
        figures[f"{name}_push"], figures[f"{name}_drain"] = row["bulk"] / none["bulk"], row["drain"] / none["drain"]
    return figures


def expiry(*, quick: bool) -> dict[str, float]:
    """``expiry_seconds``: until 100,000 jobs of a paused queue are gone that expire at once, with a node;
    ``expiry_script``: the longest that one script took meanwhile, ms.
    """
    count = EXPIRING // 4 if quick else EXPIRING
    peer = lowq_with(ttl=TTL)
    with Server() as server, start(peer, "work", server, 1) as worker, closing(lowq.Lowq(redis_url=server.url)) as app:
        queue = app.queue(QUEUE, 5)
        queue.push("first")
        worker.expect("last", PATIENCE)
        queue.pause()
        queue.push({"id": number, "payload": {"v": number}, "ttl": TTL} for number in range(count))
        app.client.command("CONFIG", "SET", "slowlog-log-slower-than", 500)
        app.client.command("SLOWLOG", "RESET")
        due = time.monotonic() + TTL  # of the last of them
        deadline = due + PATIENCE
        while queue.stats().length:
            if time.monotonic() > deadline:
                raise MeasuringFailed("what has expired is still there")
            time.sleep(0.02)
        seconds = time.monotonic() - due
        slow = app.client.command("SLOWLOG", "GET", -1)
        return {
            "expiry_seconds": max(seconds, 0.0),
            "expiry_script": max((entry[2] for entry in slow), default=0) / 1e3,
        }
