"""The merge rate: payloads for few ids, pushed in bulk while a node performs them."""

import time
from contextlib import closing

import lowq
from benchmarks.figures.own import lowq_with
from benchmarks.measured import MeasuringFailed
from benchmarks.peers.turn import PATIENCE, start
from benchmarks.peers.work import QUEUE
from benchmarks.server import Server

IDS = (1, 10, 100, 1_000, 10_000)


def measure(*, quick: bool) -> dict[str, float]:
    """``merge/IDS/...``: payloads per second from the first push until all are performed, and payloads per perform."""
    figures = {}
    for ids in IDS[1::2] if quick else IDS:
        for name, value in _with(ids, 20_000 if quick else 100_000).items():
            figures[f"merge/{ids}/{name}"] = value
    return figures


def _with(ids: int, count: int) -> dict[str, float]:
    with (
        Server() as server,
        start(lowq_with(), "work", server, 1) as worker,
        closing(lowq.Lowq(redis_url=server.url)) as app,
    ):
        queue = app.queue(QUEUE, 5)
        queue.push({"id": "first"})
        worker.expect("last", PATIENCE)
        worker.tell(f"expect {count}")
        worker.expect("expecting", PATIENCE)
        begun = time.monotonic()
        queue.push({"id": number % ids, "payload": {"v": number}, "score": number} for number in range(count))
        pushed = time.monotonic() - begun
        at = worker.expect("last", PATIENCE)["at"]
        deadline = time.monotonic() + PATIENCE
        while queue.stats().taken or queue.stats().due:
            if time.monotonic() > deadline:
                raise MeasuringFailed("the last jobs were not acknowledged")
            time.sleep(0.01)
        performs = queue.stats().processed - 1
        return {
            "push": count / pushed,
            "rate": count / (at - begun),
            "payloads": count / performs,
        }
