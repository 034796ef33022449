"""How costs grow: with the shards of a queue, with queues, with nodes, and with the payloads that wait for one id.

Once all nodes hold their shards, jobs are pushed that are due together some seconds later. What Redis and the nodes use
from then until the last is performed is divided by the jobs. Without prefetch, and few jobs a shard: so each job is
a pick of the dispatcher and a round trip.
"""

import time
from contextlib import ExitStack, closing

import lowq
from benchmarks.figures.own import lowq_with
from benchmarks.figures.waiting import held, wait_until
from benchmarks.measured import MeasuringFailed
from benchmarks.peers import Peer
from benchmarks.peers.turn import PATIENCE, start
from benchmarks.peers.work import QUEUE
from benchmarks.server import Server

SHARDS = (5, 100, 1_000, 10_000)
QUEUES = (1, 10, 100, 400)
NODES = (1, 4, 16)
PAYLOADS = (1, 10, 100, 1_000, 10_000)
#: Seconds within which all jobs are pushed, besides one for 4,000.
PUSHING = 2.0


def shards(*, quick: bool) -> dict[str, float]:
    """``shards/N/...``: µs of Redis and of the node per job, in one queue of N shards; ``growth_shards``."""
    return _axis("shards", SHARDS[:-1] if quick else SHARDS, quick=quick)


def queues(*, quick: bool) -> dict[str, float]:
    """``queues/N/...``: the same, of N queues with 5 shards each; ``growth_queues``."""
    return _axis("queues", QUEUES[:-1] if quick else QUEUES, quick=quick)


def nodes(*, quick: bool) -> dict[str, float]:
    """``nodes/N/...``: the same, of N nodes with 1 thread each, on 32 shards, with prefetch. The rate says nothing
    where nodes have no core each.
    """
    figures = {}
    for count in NODES[:-1] if quick else NODES:
        found = _work(lowq_with(shards=32, threads=1), 1, 32, 20_000 if quick else 60_000, nodes=count)
        figures |= {f"nodes/{count}/{name}": value for name, value in found.items()}
    return figures


def payloads(*, quick: bool) -> dict[str, float]:
    """``payloads/N/...``: µs of Redis to push and to perform a payload, where N wait for each id."""
    figures = {}
    count = 20_000
    for each in PAYLOADS[::2] if quick else PAYLOADS:
        with Server() as server, closing(lowq.Lowq(redis_url=server.url)) as app:
            queue = app.queue(QUEUE, 5)
            queue.push({"id": "first"})
            before = server.cpu()
            queue.push({"id": number // each, "payload": number, "score": number} for number in range(count))
            figures[f"payloads/{each}/push_cpu"] = (server.cpu() - before) / count * 1e6
            before = server.cpu()
            with start(lowq_with(), "work", server, count + 1) as worker:
                worker.expect("last", PATIENCE)
            figures[f"payloads/{each}/drain_cpu"] = (server.cpu() - before) / count * 1e6
    return figures


def _axis(axis: str, points: tuple[int, ...], *, quick: bool) -> dict[str, float]:
    figures = {}
    for point in points:
        peer = lowq_with(prefetch="off", **{axis: point})
        queues, shards = (point, 5) if axis == "queues" else (1, point)
        found = _work(peer, queues, shards, 5_000 if quick else 20_000)
        figures |= {f"{axis}/{point}/{name}": value for name, value in found.items()}
    least, most = points[0], points[-1]
    figures[f"growth_{axis}"] = figures[f"{axis}/{most}/node_cpu"] / figures[f"{axis}/{least}/node_cpu"]
    return figures


def _work(peer: Peer, queues: int, shards: int, count: int, *, nodes: int = 1) -> dict[str, float]:
    with Server() as server, ExitStack() as stack:
        # One node says itself when it has performed all: to ask 10,000 shards for that costs Redis more than the jobs.
        workers = [stack.enter_context(start(peer, "work", server, count if nodes == 1 else 0)) for _ in range(nodes)]
        app = stack.enter_context(closing(lowq.Lowq(redis_url=server.url)))
        wait_until(lambda: len(app.nodes()) == nodes and held(app) == queues * shards, "all shards held")
        due = time.time() + PUSHING + count / 4_000
        for number in range(queues):
            app.queue(f"{QUEUE}{number or ''}", shards).push(
                {"id": item, "payload": {"v": item}, "perform_at": due} for item in range(number, count, queues)
            )
        if time.time() > due - 0.2:
            raise MeasuringFailed("the jobs were not pushed in time")
        time.sleep(max(due - time.time() - 0.1, 0.0))
        used, spent = server.cpu(), sum(worker.processor_seconds() for worker in workers)
        time.sleep(max(due - time.time(), 0.0))
        begun, ended = time.monotonic(), 0.0
        if nodes == 1:
            ended = workers[0].expect("last", PATIENCE)["at"]
            time.sleep(0.2)  # the last acknowledgements
        else:
            wait_until(lambda: app.queue(QUEUE, shards).stats().processed >= count, "all jobs performed")
        return {
            "redis_cpu": (server.cpu() - used) / count * 1e6,
            "node_cpu": (sum(worker.processor_seconds() for worker in workers) - spent) / count * 1e6,
            "rate": count / ((ended or time.monotonic()) - begun),
        }
