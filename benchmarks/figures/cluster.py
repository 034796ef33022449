"""A cluster beside one Redis: the same load, so many producers and nodes as there are primaries.

Rates say something only where each process has a core. What each primary pays in processor time holds on any machine.
"""

import time
from contextlib import ExitStack, closing
from statistics import mean

import lowq
from benchmarks.figures.own import lowq_with
from benchmarks.figures.waiting import held, wait_until
from benchmarks.peers.turn import PATIENCE, start
from benchmarks.peers.work import QUEUE
from benchmarks.server import Cluster, Server

#: Shards for each primary.
SHARDS = 8


def measure(*, quick: bool, primaries: int = 3) -> dict[str, float]:
    """``cluster/N/...``, N primaries, 1 being a Redis that is in no cluster: rates, Redis's processor time per job over
    all primaries, and what the primaries with the least and the most of it pay, in percent of an Nth of what the one
    Redis pays for the same.
    """
    count = (20_000 if quick else 25_000) * primaries
    one, many = _Sum(), _Sum()
    # In turn, as the machine may have something else to do in between.
    for _ in range(1 if quick else 4):
        with Server() as server:
            one.add(_Load(server.url, [server], primaries, count).measure())
        with Cluster(primaries) as cluster:
            many.add(_Load(cluster.url, cluster.servers, primaries, count).measure())
            many.moved += sum(server.errors("MOVED") for server in cluster.servers)
    figures = {"cluster/1/moved": 0.0, f"cluster/{primaries}/moved": float(many.moved)}
    for name in ("bulk", "drain"):
        share = sum(one.cpu[name]) / primaries
        figures |= one.figures("cluster/1", name, count) | many.figures(f"cluster/{primaries}", name, count)
        figures |= {
            f"cluster/{primaries}/{name}_least": min(many.cpu[name]) / share * 100,
            f"cluster/{primaries}/{name}_most": max(many.cpu[name]) / share * 100,
        }
    return figures


class _Sum:
    """What several turns have measured, by name: rates, and seconds of processor time of each server together."""

    def __init__(self) -> None:
        self.rates: dict[str, list[float]] = {}
        self.cpu: dict[str, list[float]] = {}
        self.moved = 0

    def add(self, turn: dict[str, tuple[float, list[float]]]) -> None:
        for name, (rate, seconds) in turn.items():
            self.rates.setdefault(name, []).append(rate)
            before = self.cpu.get(name, [0.0] * len(seconds))
            self.cpu[name] = [so_far + more for so_far, more in zip(before, seconds, strict=True)]

    def figures(self, label: str, name: str, count: int) -> dict[str, float]:
        jobs = count * len(self.rates[name])
        return {
            f"{label}/{name}": mean(self.rates[name]),
            f"{label}/{name}_cpu": sum(self.cpu[name]) / jobs * 1e6,
        }


class _Load:
    """So many producers push all jobs, side by side; then so many nodes drain them."""

    def __init__(self, url: str, servers: list[Server], processes: int, count: int) -> None:
        self.url = url
        self._servers = servers
        self._processes = processes
        self._count = count
        self._shards = SHARDS * processes

    def measure(self) -> dict[str, tuple[float, list[float]]]:
        """``bulk`` and ``drain``: jobs a second, and seconds of processor time of each server."""
        return {"bulk": self._bulk(), "drain": self._drain()}

    def _bulk(self) -> tuple[float, list[float]]:
        each = self._count // self._processes
        before = self._cpu()
        with ExitStack() as stack:
            producers = [
                # Ids of their own: others would merge.
                stack.enter_context(
                    start(lowq_with(shards=self._shards, first=number * 10_000_000), "bulk", self, each)
                )
                for number in range(1, self._processes + 1)
            ]
            seconds = [float(producer.expect("done", PATIENCE)["seconds"]) for producer in producers]
        return self._count / mean(seconds), self._used(before)

    def _drain(self) -> tuple[float, list[float]]:
        with ExitStack() as stack:
            app = stack.enter_context(closing(lowq.Lowq(redis_url=self.url)))
            queue = app.queue(QUEUE, self._shards)
            queue.pause()
            for _ in range(self._processes):
                stack.enter_context(start(lowq_with(shards=self._shards), "work", self, 0))
            wait_until(lambda: len(app.nodes()) == self._processes and held(app) == self._shards, "all shards held")
            done = queue.stats().processed
            before, begun = self._cpu(), time.monotonic()
            queue.resume()
            wait_until(lambda: queue.stats().processed - done >= self._count, "all jobs performed")
            return self._count / (time.monotonic() - begun), self._used(before)

    def _cpu(self) -> list[float]:
        return [server.cpu() for server in self._servers]

    def _used(self, before: list[float]) -> list[float]:
        return [now - then for now, then in zip(self._cpu(), before, strict=True)]
