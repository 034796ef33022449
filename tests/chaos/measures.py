"""Times and rates that have bounds, measured on real nodes."""

import tempfile
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from tests.chaos.matrix import Measure
from tests.chaos.proxy import Proxy
from tests.chaos.stage import TTL, Outcome
from tests.history import read
from tests.processes.support import NodeProcess, Rig
from tests.redis_server import RedisServer
from tests.waiting import until

#: What a shard with work may rest after its owner was killed, seconds.
TAKEOVER = TTL + 1.0
#: And after its owner was stopped.
HANDOVER = 0.2
#: And after its node went on with new code.
RELOAD = 2.0
#: What is left of the throughput while shards move, at least.
THROUGHPUT = 0.7
#: A node with a thousand idle shards: share of a core, and round trips a second.
IDLE_CPU = 0.02
IDLE_TRIPS = 10.0


@contextmanager
def rig(folder: Path, **settings: object) -> Iterator[Rig]:
    with RedisServer() as server:
        made = Rig(server.url, folder, **settings)
        try:
            yield made
        finally:
            made.end()


def rebalancing(folder: Path, *, settle: float = 2.5, watch: float = 4.0) -> float:
    """The least throughput of any second after a fourth node has joined three, as a part of that before. The nodes
    have more work than they get done all the time, on 100 shards.
    """
    with rig(folder, ORDERS_SHARDS=100, ORDERS_WORK=0.02, LOWQ_LEASE_TTL=15) as made:
        queue = made.app.queue(made.queue_name, made.shards_count)
        queue.push({"id": str(number), "payload": {"version": 1}} for number in range(8000))
        nodes = [made.node() for _ in range(3)]
        until(lambda: len(made.of_shards("lease")) == 100, "leases of all shards")
        until(lambda: _even(nodes, 33), "an even share for everybody")
        time.sleep(settle)
        joined_at = time.monotonic()
        nodes.append(made.node())
        until(lambda: _even(nodes, 25), "an even share for everybody")
        moved_at = time.monotonic()
        time.sleep(watch)
        ends = sorted(event["at"] for event in read(made.history.path) if event["event"] == "end")
        before = _count(ends, joined_at - settle, joined_at) / settle
        until_ = moved_at + watch - 1.0
        starts = [joined_at + step * 0.05 for step in range(int((until_ - joined_at) / 0.05))]
        return min(_count(ends, start, start + 1.0) for start in starts) / before


def _even(nodes: Sequence[NodeProcess], least: int) -> bool:
    return all(node.held() >= least for node in nodes)


def _count(times: Sequence[float], begin: float, end: float) -> int:
    return bisect_left(times, end) - bisect_left(times, begin)


def idle(folder: Path, *, settle: float = 2.0, seconds: float = 10.0) -> tuple[float, float]:
    """Share of a core, and round trips a second, of a node that holds a thousand shards without work. Its settings are
    the defaults.
    """
    with (
        rig(folder, ORDERS_SHARDS=1000, LOWQ_LEASE_TTL=15) as made,
        Proxy(urlsplit(made.url).port or 0) as proxy,
    ):
        node = made.node(LOWQ_REDIS_URL=proxy.url)
        until(lambda: len(made.of_shards("lease")) == 1000, "leases of all shards")
        time.sleep(settle)
        used, round_trips, began = node.processor_seconds(), proxy.round_trips, time.monotonic()
        time.sleep(seconds)
        until(lambda: proxy.round_trips > round_trips, "a renewal")
        took = time.monotonic() - began
        return (node.processor_seconds() - used) / took, (proxy.round_trips - round_trips) / took


def measure_all(outcomes: Sequence[Outcome]) -> list[Measure]:
    """Everything that has a bound; the first three from the runs of their faults."""
    measures = []
    for name, what, bound in (
        ("kill", "a shard is worked again after its node was killed", TAKEOVER),
        ("stop", "a shard is worked again after its node was stopped", HANDOVER),
        ("reload", "a shard is worked again after its node was told to take new code", RELOAD),
    ):
        found = [outcome.recovery for outcome in outcomes if outcome.fault == name]
        if found:
            measures.append(Measure(what, f"at most {bound:g} s", f"{max(found):.2f} s at worst", max(found) <= bound))
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        (Path(folder) / "a").mkdir()
        (Path(folder) / "b").mkdir()
        ratio = rebalancing(Path(folder) / "a")
        processor, round_trips = idle(Path(folder) / "b")
    measures += [
        Measure(
            "throughput while 100 shards are spread from 3 nodes to 4, of that before",
            f"at least {THROUGHPUT:.0%} in every second", f"{ratio:.0%} in the worst second", ratio >= THROUGHPUT,
        ),
        Measure(
            "processor time of a node with 1,000 idle shards", f"less than {IDLE_CPU:.0%} of a core",
            f"{processor:.1%}", processor < IDLE_CPU,
        ),
        Measure(
            "round trips of a node with 1,000 idle shards", f"fewer than {IDLE_TRIPS:g} a second",
            f"{round_trips:.1f} a second", round_trips < IDLE_TRIPS,
        ),
    ]  # fmt: skip
    return measures
