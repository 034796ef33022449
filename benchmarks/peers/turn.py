"""One turn of one row: everything that the table says of it, on fresh servers."""

from typing import Protocol

from benchmarks.measured import Measured
from benchmarks.numbers import percentile
from benchmarks.peers import Peer
from benchmarks.server import Server

#: Seconds that a single step may take.
PATIENCE = 60.0
#: Pings of one turn.
PINGS = 200
#: Bytes of a payload, as JSON: of jobs that are timed, and of those that are weighed.
SMALL, LARGE = 20, 100


def take_turn(peer: Peer, pings: int = PINGS) -> dict[str, float]:
    """Column -> value, of those columns that the row has.

    Raises:
        NotInstalled, MeasuringFailed
    """
    figures = bulk_and_drain(peer, peer.bulk)
    if peer.single:
        figures |= {"single": _single(peer), "bytes": weigh(peer, min(peer.bulk, 20_000), LARGE)}
        figures |= pickup(peer, pings)
    return figures


def versions(peer: Peer) -> str:
    """What is installed, with versions."""
    with Measured([*peer.environment.command(), "versions"], peer.environment.variables()) as process:
        return str(process.expect("versions", PATIENCE)["text"])


class HasUrl(Protocol):
    """A server, or a cluster."""

    url: str


def start(peer: Peer, verb: str, server: HasUrl, count: int, size: int = SMALL) -> Measured:
    """A process of the row that does what `adapter` says."""
    arguments = ["--url", server.url, "--count", str(count), "--size", str(size), *peer.arguments]
    return Measured([*peer.environment.command(), verb, *arguments], peer.environment.variables())


def bulk_and_drain(peer: Peer, count: int, size: int = SMALL) -> dict[str, float]:
    """Enqueues so many jobs, then drains them: rates per second, and Redis's processor time in µs per job."""
    with Server() as server:
        cpu = server.cpu()
        with start(peer, "bulk", server, count, size) as producer:
            seconds = producer.expect("done", PATIENCE)["seconds"]
        figures = {"bulk": count / seconds, "bulk_cpu": (server.cpu() - cpu) / count * 1e6}
        return figures | _drain(peer, server, count)


def _drain(peer: Peer, server: Server, count: int) -> dict[str, float]:
    cpu = server.cpu()
    with start(peer, "work", server, count) as worker:
        seconds = worker.expect("last", PATIENCE)["seconds"]  # from the first job to the last: without its start
        return {"drain": (count - 1) / seconds, "drain_cpu": (server.cpu() - cpu) / count * 1e6}


def _single(peer: Peer) -> float:
    with Server() as server, start(peer, "single", server, peer.single) as producer:
        return float(peer.single / producer.expect("done", PATIENCE)["seconds"])


def weigh(peer: Peer, count: int, size: int) -> float:
    """Bytes that Redis needs for one queued job with a payload of `size` bytes: a long queue against a short one."""
    return (_memory(peer, count + 1, size) - _memory(peer, 1, size)) / count


def _memory(peer: Peer, count: int, size: int) -> int:
    with Server() as server:
        with start(peer, "bulk", server, count, size) as producer:
            producer.expect("done", PATIENCE)
        return server.memory()


def pickup(peer: Peer, pings: int) -> dict[str, float]:
    """How long pings take to an idle worker, in ms."""
    with (
        Server() as server,
        start(peer, "receive", server, pings) as worker,
        start(peer, "send", server, pings) as producer,
    ):
        worker.expect("first", PATIENCE)
        producer.tell("it arrives")
        delays = worker.expect("delays", PATIENCE)["delays"]
    return {"pickup_p50": percentile(delays, 0.5) * 1e3, "pickup_p99": percentile(delays, 0.99) * 1e3}
