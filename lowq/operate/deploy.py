"""Whether a deploy is safe now: what a stop of all nodes would probably interrupt."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from lowq.backend import Backend
from lowq.observe.histories import total_times
from lowq.operate.nodes import NodeInfo, RunningBatch, StuckLimits, nodes
from lowq.store import untrusted
from lowq.store.calls import time_of
from lowq.store.keys import tasks_key

#: Seconds without a report after which an action of the dashboard counts as interrupted: longer than a call may go
#: unanswered.
TASK_SILENCE = 20.0


@dataclass(frozen=True, slots=True)
class Interruption:
    """A running batch that a stop of its node would probably cut off, to be performed again: it has been running for
    longer than the node's ``shutdown_timeout``, or batches of its queue often do.
    """

    node: str
    #: From 0; None: a task of the node's event loop.
    thread: int | None
    batch: RunningBatch
    #: Seconds that a stop of the node waits.
    shutdown_timeout: float
    #: Seconds that 95 % of its queue's batches take at most; 0.0: not known; None: more than 300.
    usual: float | None


@dataclass(frozen=True, slots=True)
class DeployCheck:
    """What a stop of all nodes would meet now, as of their last heartbeats."""

    #: What it would probably cut off, the batch that runs longest first.
    interruptions: list[Interruption]
    #: Consumers with jobs in hand: what their programs have not reported when they end is performed again.
    consumers: list[NodeInfo]
    #: Actions that run in processes of the dashboard, and end with them.
    tasks: int
    #: Version -> how many nodes have it.
    versions: Counter[str]

    @property
    def is_safe(self) -> bool:
        """Whether it would interrupt nothing."""
        return not (self.interruptions or self.consumers or self.tasks)


def deploy_check(backend: Backend, living: Sequence[NodeInfo] | None = None) -> DeployCheck:
    """What a deploy that stops all nodes would meet now. ``living``: the nodes, if they are known already.

    Raises:
        RedisUnavailable, RedisRefused
    """
    living = nodes(backend) if living is None else living
    return DeployCheck(
        _interruptions(backend, living),
        [node for node in living if node.taken],
        _running_tasks(backend),
        Counter(node.version for node in living if node.version),
    )


def _interruptions(backend: Backend, living: Sequence[NodeInfo]) -> list[Interruption]:
    running = [(node, *item) for node in living if node.shutdown_timeout is not None for item in node.batches()]
    times = total_times(backend, [*{batch["queue"] for *_, batch in running}])
    known = {queue: runs.percentile(0.95) for queue, (_, runs) in times.items() if runs.count >= StuckLimits.KNOWN}
    found = []
    for node, thread, batch in running:
        seconds, waits = known.get(batch["queue"], 0.0), node.shutdown_timeout or 0.0
        if max(batch["seconds"], seconds) > waits:
            found.append(Interruption(node.name, thread, batch, waits, seconds if isfinite(seconds) else None))
    return sorted(found, key=lambda item: item.batch["seconds"], reverse=True)


def _running_tasks(backend: Backend) -> int:
    """How many records of actions say that they run, and were written lately; task_begin.lua has their form."""
    key = tasks_key(backend.config.namespace)
    raw, time = backend.client.commands([("HGETALL", key), ("TIME",)], key=key)
    reported = [head[2] for head in (one.split(b" ", 3) for one in raw[1::2]) if head[0] == b"running" and head[3:]]
    return sum(abs(time_of(time) - (untrusted.finite(at) or 0.0)) <= TASK_SILENCE for at in reported)
