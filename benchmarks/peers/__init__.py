"""The queue systems that are compared, and what is measured of each.

A row of the table is one of them with its settings. `counts`: how many jobs are enqueued in bulk and drained, and how
many are enqueued one by one; a few seconds' worth each.
"""

from dataclasses import dataclass, field

from benchmarks.peers.environment import Environment, FromDebian, FromNpm, FromPyPI, Nowhere, Ours

#: The row that the others are compared with.
BASE = "lowq"


@dataclass(frozen=True)
class Peer:
    """A row of the table."""

    label: str
    environment: Environment
    #: Jobs enqueued in bulk, and drained.
    bulk: int
    #: Jobs enqueued one by one. 0: the row says only how it drains.
    single: int
    settings: dict[str, str] = field(default_factory=dict)
    #: Whether jobs of one entity are performed in order, one at a time.
    ordered: bool = False

    @property
    def arguments(self) -> list[str]:
        return [part for name, value in self.settings.items() for part in ("--set", f"{name}={value}")]


_LOWQ = Ours("lowq")
_DRAMATIQ = FromPyPI("dramatiq", ("dramatiq[redis]", "hiredis"))

PEERS = [
    Peer("lowq", _LOWQ, 200_000, 10_000, ordered=True),
    Peer("lowq, batch_size=100", _LOWQ, 200_000, 0, {"batch_size": "100"}, ordered=True),
    Peer("Lowkiq", Nowhere("neither on PyPI or npm nor in Debian"), 0, 0, ordered=True),
    Peer(
        "Sidekiq",
        FromDebian("sidekiq.rb", ("sidekiq", "hiredis"), ("ruby-sidekiq", "ruby-hiredis")),
        60_000,
        10_000,
    ),
    Peer("BullMQ", FromNpm("bullmq.js", ("bullmq", "ioredis")), 40_000, 10_000),
    Peer("Huey", FromPyPI("huey", ("huey", "redis[hiredis]")), 10_000, 8_000),
    Peer("taskiq, stream", FromPyPI("taskiq", ("taskiq-redis", "redis[hiredis]")), 8_000, 5_000),
    Peer("arq, 10 ms poll", FromPyPI("arq", ("arq", "redis[hiredis]")), 6_000, 4_000),
    Peer("SAQ", FromPyPI("saq", ("saq[redis]", "redis[hiredis]", "typing_extensions")), 5_000, 5_000),
    Peer("Dramatiq", _DRAMATIQ, 4_000, 5_000),
    Peer("Dramatiq, prefetch 1000", _DRAMATIQ, 12_000, 0, {"prefetch": "1000"}),
    Peer("streaq", FromPyPI("streaq", ("streaq", "hiredis")), 4_000, 4_000),
    Peer("Celery, threads", FromPyPI("celery", ("celery[redis]", "hiredis")), 3_000, 3_000),
    Peer("RQ, simple worker", FromPyPI("rq", ("rq", "redis[hiredis]")), 1_200, 3_000),
]
