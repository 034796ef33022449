"""What came into a queue in the last minutes and what was performed, as its nodes have recorded it, for forecasts."""

from collections.abc import Sequence
from dataclasses import dataclass

from lowq.backend import Backend
from lowq.errors import ScriptError
from lowq.observe.counters import FLOW_RING
from lowq.store import Command, untrusted
from lowq.store.keys import history_key
from lowq.store.scripts import time_of

#: Seconds over which rates are measured.
WINDOW = 300.0
#: Seconds until everybody has reported what happened in a stretch: nodes report with their heartbeats.
_DELAY = 6.0
#: Queues that are read in one write: each takes Redis some 10 microseconds.
_TOGETHER = 100
#: What is beyond that was never counted.
_ABSURD = 1e15


@dataclass(frozen=True, slots=True)
class Flow:
    """What became of a queue in some seconds of the last 5 minutes."""

    #: Of these it is known: nodes were running.
    seconds: float
    #: Payloads that came in, also those that were merged.
    pushed: float
    #: Jobs performed.
    processed: float
    #: By how many jobs the backlog, those due or in flight, has grown.
    change: float


def read_flows(backend: Backend, queues: Sequence[str], now: float | None = None) -> dict[str, Flow]:
    """The flows of these queues; of those of which nodes have recorded none in the last 5 minutes there is none.

    Raises:
        RedisUnavailable, RedisRefused
    """
    if now is None:
        now = time_of(backend.client.command("TIME"))
    width, slots = FLOW_RING
    last = int((now - _DELAY) // width) - 1  # the latest stretch of which all have reported
    numbers = range(last - int(WINDOW // width) + 1, last + 1)
    fields = [f"flow:{number % slots}" for number in numbers]
    flows = {}
    for start in range(0, len(queues), _TOGETHER):
        some = queues[start : start + _TOGETHER]
        keys = [history_key(backend.config.namespace, queue) for queue in some]
        replies = backend.client.run_many([Command(key, "HMGET", key, *fields) for key in keys])
        for queue, key, reply in zip(some, keys, replies, strict=True):
            if isinstance(reply, ScriptError):  # a key of the wrong type
                untrusted.log_skipped("history", key, str(reply))
                continue
            if isinstance(reply, Exception):
                raise reply
            flow = _add_up(key, dict(zip(numbers, reply, strict=True)))
            if flow is not None:
                flows[queue] = flow
    return flows


def _add_up(key: str, stretches: dict[int, bytes | None]) -> Flow | None:
    known = [figures for number, raw in stretches.items() if raw for figures in [_figures(key, number, raw)] if figures]
    if not known:
        return None
    pushed, change, processed = (sum(column) for column in zip(*known, strict=True))
    return Flow(len(known) * float(FLOW_RING[0]), pushed, processed, change)


def _figures(key: str, number: int, raw: bytes) -> tuple[float, float, float] | None:
    """Pushed, change, processed."""
    values = [value for value in map(untrusted.finite, raw.split()) if value is not None and abs(value) <= _ABSURD]
    if len(values) != 4 or len(raw.split()) != 4 or values[1] < 0 or values[3] < 0:
        untrusted.log_skipped("history", key, f"{raw!r:.60} is no stretch of time")
        return None
    of_stretch, pushed, change, processed = values
    return (pushed, change, processed) if of_stretch == number else None  # otherwise of a round before
