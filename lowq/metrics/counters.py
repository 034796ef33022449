"""What the threads of a node count, and how it gets into the histories of their queues.

Each thread counts for itself (`Tally`, in its activity). With every heartbeat a node sends what was counted since the
last one (`Recorder`), one call per queue. ``lua/count.lua`` adds it to the queue's history, see `history`. What was
counted while Redis was away is lost; the exact counters are those of `Stats`.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from lowq.store import Call
from lowq.store.keys import history_key

Span = Literal["hour", "day", "month"]
#: span -> (seconds of a stretch, stretches).
RINGS: dict[Span, tuple[int, int]] = {"hour": (10, 360), "day": (300, 288), "month": (7200, 360)}
#: Seconds after which a history that nobody adds to is forgotten.
_FORGET = 31 * 86400

#: Upper bounds of the lengths by which performs are counted, in seconds; what takes longer comes last.
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Tally:
    """What one thread did for one queue since it started. Written by that thread alone, field by field: with fast jobs
    that is done a hundred thousand times a second. Others read it.
    """

    __slots__ = ("buried", "failed", "lengths", "processed", "seconds")

    def __init__(self) -> None:
        self.processed = 0
        self.failed = 0
        #: Ids that its reports have buried, exhausted or by the handler's word.
        self.buried = 0
        #: Of all performs together.
        self.seconds = 0.0
        #: Performs by their length, as in `BOUNDS`.
        self.lengths = [0] * (len(BOUNDS) + 1)


def bucket_of(seconds: float) -> int:
    """Where in `Tally.lengths` a perform of this length counts."""
    return bisect_left(BOUNDS, seconds)


class Counted(NamedTuple):
    """What was counted for a queue, over all threads."""

    processed: int
    failed: int
    seconds: float
    lengths: tuple[int, ...]
    buried: int = 0


def count(tallies: Iterable[Tally]) -> Counted:
    """The sum of some tallies."""
    some = list(tallies)
    lengths = tuple(sum(column) for column in zip(*(tally.lengths for tally in some), strict=True))
    return Counted(
        sum(tally.processed for tally in some),
        sum(tally.failed for tally in some),
        sum(tally.seconds for tally in some),
        lengths or (0,) * (len(BOUNDS) + 1),
        sum(tally.buried for tally in some),
    )


def record_call(
    key: str, before: Counted, after: Counted, seconds: float, lag: float | None, now: float | None = None
) -> Call:
    """The call that adds what was counted between two moments, ``seconds`` apart, and the lag at the second of them;
    None: it is not known.
    """
    rings = [number for ring in RINGS.values() for number in ring]
    performs: list[int] = []
    for index, (earlier, later) in enumerate(zip(before.lengths, after.lengths, strict=True)):
        if later > earlier:
            performs += (index, later - earlier)
    head: list[str | int | float] = [
        "" if now is None else repr(float(now)),
        repr(seconds),
        after.processed - before.processed,
        after.failed - before.failed,
        "" if lag is None else repr(lag),
        repr(max(after.seconds - before.seconds, 0.0)),
        _FORGET,
        len(RINGS),
    ]
    return Call("count", key, [*head, *rings, *performs])


class Recorder:
    """What a node adds to the histories of its queues, with each heartbeat. For one thread, the maintenance loop's.

    ``tallies``: queue -> those of all threads; ``lag_of``: the longest lag of the node's shards of a queue, seconds, or
    None when it holds none of them.
    """

    def __init__(
        self,
        namespace: str,
        tallies: Mapping[str, Sequence[Tally]],
        lag_of: Callable[[str], float | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._namespace = namespace
        self._tallies = tallies
        self._lag_of = lag_of
        self._clock = clock
        self._reported = {queue: count(some) for queue, some in tallies.items()}
        self._reported_at = clock()

    def __call__(self) -> list[Call]:
        now = self._clock()
        seconds, self._reported_at = now - self._reported_at, now
        calls = []
        for queue, some in self._tallies.items():
            before = self._reported[queue]
            after = self._reported[queue] = count(some)
            calls.append(record_call(history_key(self._namespace, queue), before, after, seconds, self._lag_of(queue)))
        return calls
