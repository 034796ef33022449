"""The cost curve over the size of a payload, from 10 bytes to the largest that lowq takes by default."""

from benchmarks.figures.own import lowq_with
from benchmarks.peers.turn import bulk_and_drain, weigh

SIZES = (10, 64, 100, 1_000, 10_000, 100_000, 1_000_000)
#: Bytes of payloads that a step moves at most, and jobs.
BYTES, JOBS = 50_000_000, 50_000


def measure(*, quick: bool) -> dict[str, float]:
    """``size/N/...``: rates, Redis's µs per job, bytes in Redis per job."""
    figures = {}
    for size in SIZES[::2] if quick else SIZES:
        count = min(BYTES // size, JOBS) // (5 if quick else 1)
        values = bulk_and_drain(lowq_with(), count, size)
        values["bytes"] = weigh(lowq_with(), max(count // 5, 10), size)
        figures |= {f"size/{size}/{name}": value for name, value in values.items()}
    return figures
