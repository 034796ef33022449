"""Bytes per queued job, small payloads: the table beside the peers has those of 100 bytes."""

from benchmarks.figures.own import lowq_with
from benchmarks.peers.turn import weigh


def small(*, quick: bool) -> dict[str, float]:
    """Payloads of 20 bytes."""
    return {"bytes_20": weigh(lowq_with(), 10_000 if quick else 100_000, 20)}
