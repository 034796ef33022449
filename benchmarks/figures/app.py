"""An application for `lowq run -r`, as figures want it. Environment: BENCH_SHARDS, BENCH_WORK (see `peers.work`)."""

import os
from typing import Any

import lowq
from benchmarks.peers.handler import handle
from benchmarks.peers.work import QUEUE, work
from lowq.shards.splitter import ByNodeSplitter

_work = work(os.environ.get("BENCH_WORK", "blank"))


@lowq.worker(queue_name=QUEUE, shards_count=int(os.environ.get("BENCH_SHARDS", "5")))
class Bench(lowq.Worker[Any]):
    """Counts, and works."""

    def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
        for payloads in payloads_by_id.values():
            for payload in payloads:
                handle(payload)
        if _work is not None:
            _work()


def _part() -> None:
    # Two nodes that share the shards by number, where the command line can't start several processes itself.
    nodes, number = int(os.environ["BENCH_NODES"]), int(os.environ["BENCH_NODE"])
    lowq.config.build_splitter = lambda: ByNodeSplitter(nodes, number, lowq.config.threads_per_node)


if "BENCH_NODES" in os.environ:
    _part()
