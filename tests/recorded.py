"""What nodes would have recorded of a queue, without a node."""

import math
from collections.abc import Mapping, Sequence

import lowq
from lowq.observe.histories import BOUNDS, WAIT_BOUNDS
from lowq.observe.tallies import Counted, EndedBatch, record_call
from lowq.shards.shard import Inflow
from lowq.store.keys import history_key

_NOTHING = Counted(0, 0, 0.0, (0,) * (len(BOUNDS) + 1))


def record(
    app: lowq.Lowq,
    queue: str,
    now: float | None = None,
    processed: int = 0,
    failed: int = 0,
    *,
    seconds: float = 5.0,
    lag: float | None = 0.0,
    run_seconds: float = 0.0,
    runs: Mapping[float, int] | None = None,
    waits: Mapping[float, int] | None = None,
    waited: float = 0.0,
    inflow: Inflow | None = None,
    slow: Sequence[tuple[float, EndedBatch]] = (),
) -> None:
    """What a node has counted in so many seconds up to then. ``runs``, ``waits``: how many took no longer than a bound
    in seconds, and longer than the one before; ``slow``: seconds since it ended, and the batch.
    """
    lengths = _counts(BOUNDS, runs or {})
    kept = () if waits is None else _counts(WAIT_BOUNDS, waits)
    after = Counted(processed, failed, run_seconds, lengths, waits=kept, waited=waited)
    call = record_call(history_key(app.config.namespace, queue), _NOTHING, after, seconds, lag, now, inflow, slow)
    assert app.client.call(call) == 1


def _counts(bounds: Sequence[float], found: Mapping[float, int]) -> tuple[int, ...]:
    return tuple(found.get(bound, 0) for bound in (*bounds, math.inf))
