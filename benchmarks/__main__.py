"""The command line of the benchmarks: see the package."""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import machine, publish, tables
from benchmarks.figures import (
    async_workers,
    cluster,
    consumers,
    drains,
    durability,
    fairness,
    growth,
    idle_node,
    limits,
    load,
    many_threads,
    memory,
    merging,
    options,
    payload_size,
    producers,
    queue_length,
    start_up,
    two_processes,
)
from benchmarks.measured import MeasuringFailed
from benchmarks.peers import BASE, PEERS, Peer
from benchmarks.peers.environment import NotInstalled
from benchmarks.peers.turn import take_turn, versions
from benchmarks.results import LAST, PUBLISHED, Results, save
from benchmarks.results import load as load_results
from benchmarks.turns import Quiet

#: What is measured besides the rows of the table, by name.
MEASUREMENTS: dict[str, Callable[..., dict[str, float]]] = {
    "middleware": drains.with_middleware,
    "plain": drains.without_prefetch,
    "shards": drains.many_shards,
    "typed": drains.typed,
    "memory": memory.small,
    "length": queue_length.measure,
    "processes": two_processes.measure,
    "waiting": two_processes.waiting,
    "threads": many_threads.measure,
    "async": async_workers.measure,
    "async_memory": async_workers.memory,
    "idle": idle_node.measure,
    "idle_many": idle_node.measure_many,
    "start": start_up.measure,
    "import": start_up.importing,
    "growing_shards": growth.shards,
    "growing_queues": growth.queues,
    "growing_nodes": growth.nodes,
    "growing_payloads": growth.payloads,
    "size": payload_size.measure,
    "load": load.measure,
    "hot": fairness.hot_id,
    "slow": fairness.slow_worker,
    "shares": fairness.shares,
    "urgent": fairness.urgent,
    "merging": merging.measure,
    "producers": producers.measure,
    "single": producers.beside_redis_py,
    "consumers": consumers.measure,
    "options": options.measure,
    "expiry": options.expiry,
    "limits": limits.measure,
    "cluster": cluster.measure,
    "durability": durability.measure,
}


class Run:
    """One run: rounds over rows and figures."""

    def __init__(self, quiet: Quiet, *, quick: bool) -> None:
        self.results = Results(machine=machine.describe(), quick=quick)
        self._quiet = quiet
        self._quick = quick
        self._began = time.monotonic()

    def row(self, peer: Peer) -> None:
        """A turn of a queue system. One that fails is left out of the table, with a word."""
        label = peer.label
        if label in self.results.skipped:
            return
        try:
            with self._quiet.turn():
                if label not in self.results.versions:
                    self.results.versions[label] = versions(peer)
                self.results.add_row(label, take_turn(_smaller(peer) if self._quick else peer))
        except (NotInstalled, MeasuringFailed) as error:
            self.results.skipped[label] = str(error)
            self.results.rows.pop(label, None)
            self._tell(f"{label}: left out: {error}")
        else:
            self._tell(label)

    def figure(self, name: str) -> None:
        """A turn of a figure of lowq's own."""
        try:
            with self._quiet.turn():
                self.results.add_figures(MEASUREMENTS[name](quick=self._quick))
        except MeasuringFailed as error:
            self.results.failed[name] = str(error)
            self._tell(f"{name}: failed: {error}")
        else:
            self._tell(name)

    def _tell(self, what: str) -> None:
        print(f"{time.monotonic() - self._began:6.0f} s  {what}", flush=True)


def _smaller(peer: Peer) -> Peer:
    return Peer(peer.label, peer.environment, peer.bulk // 4, peer.single // 4, peer.settings, peer.ordered)


def main() -> None:
    """Measures, prints, and keeps what was measured."""
    parser = argparse.ArgumentParser(description="lowq beside its peers, and its own figures")
    parser.add_argument("--quick", action="store_true", help="smaller, once, without peers")
    parser.add_argument("--rounds", type=int, help="default: 3, or 1 when quick")
    parser.add_argument("--only", action="append", help="rows whose name contains this, or this figure; repeatable")
    parser.add_argument("--cluster", type=int, metavar="N", help="only a cluster of N primaries beside one Redis")
    parser.add_argument("--lock", type=Path, help="a lock file that is held while something is measured")
    parser.add_argument(
        "--publish",
        action="store_true",
        help="keep it as the run that the docs show, or with --only as figures of that run",
    )
    given = parser.parse_args()

    rounds = given.rounds or (1 if given.quick else 3)
    rows = [peer for peer in PEERS if not given.quick or peer.label.startswith(BASE)]
    names = list(MEASUREMENTS)
    if given.only:
        rows = [peer for peer in rows if any(word.lower() in peer.label.lower() for word in given.only)]
        names = [name for name in names if name in given.only]
        if not rows and not names:
            parser.error(f"--only: no row and no figure is called that; figures: {', '.join(MEASUREMENTS)}")

    if given.cluster:
        rows, names = [], ["cluster"]
        MEASUREMENTS["cluster"] = partial(cluster.measure, primaries=given.cluster)

    quiet = Quiet(given.lock)
    run = Run(quiet, quick=given.quick)
    for number in range(rounds):
        run.results.rounds = number + 1
        for peer in rows:
            run.row(peer)
        for name in names:
            run.figure(name)
        save(run.results, LAST)
    quiet.release()
    show(run.results)
    if given.publish:
        published = load_results(PUBLISHED).with_figures_of(run.results) if given.only or given.cluster else run.results
        save(published, PUBLISHED)
        publish.write(publish.made(published))


def show(results: Results) -> None:
    """All tables."""
    parts = [
        tables.machine(results),
        f"Rounds: {results.rounds}.",
        tables.beside_the_peers(results) if results.rows else "",
        tables.against_sidekiq(results),
        tables.spreads(results) if results.rows and results.rounds > 1 else "",
        tables.reach(results),
        *(part(results) for part in (tables.load, tables.fairness, tables.merging, tables.options, tables.cluster)),
        *(part(results) for part in (tables.payload_size, tables.queue_length, tables.growth, tables.waiting)),
    ]
    print("", *(part for part in parts if not _is_empty(part)), sep="\n\n")


def _is_empty(part: str) -> bool:
    return not part or (part.startswith("|") and part.count("\n") == 1)


if __name__ == "__main__":
    main()
