"""Whether a deploy is safe now: what it would meet, and what a stop of all nodes would probably interrupt."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import lowq
from lowq import inspection
from lowq.observe.histories import total_times
from lowq.operate.nodes import StuckLimits
from lowq_web.background import read_actions
from lowq_web.documents import Interruption


class Process(NamedTuple):
    """A supervisor, or a node."""

    name: str
    version: str
    #: Unix time, seconds; None: not known.
    started_at: float | None
    #: The node; None: it is a supervisor.
    node: inspection.NodeInfo | None
    #: Names of the nodes that a supervisor has started.
    nodes: list[str]
    #: The running batch of the node that has been running longest.
    longest: inspection.RunningBatch | None = None

    @property
    def seconds(self) -> float:
        """For how long that has been running."""
        return self.longest["seconds"] if self.longest else 0.0


class Deploy(NamedTuple):
    """What a deploy would meet now."""

    processes: list[Process]
    #: Version -> how many nodes have it.
    versions: Counter[str]
    #: The node with the batch that has been running longest.
    longest: Process | None
    #: What a stop of all nodes would probably cut off.
    interruptions: list[Interruption]
    #: Consumers with jobs in hand, and actions that run in processes of the dashboard.
    consumers: list[inspection.NodeInfo]
    tasks: int

    @property
    def is_safe(self) -> bool:
        return not (self.interruptions or self.consumers or self.tasks)


def read_deploy(app: lowq.Lowq, living: Sequence[inspection.NodeInfo]) -> Deploy:
    """What a deploy would meet. ``living``: the nodes.

    Raises:
        RedisUnavailable, RedisRefused
    """
    processes = _processes(living)
    return Deploy(
        processes,
        Counter(node.version for node in living if node.version),
        max((each for each in processes if each.longest), key=lambda each: each.seconds, default=None),
        _interruptions(app, living),
        [node for node in living if node.taken],
        sum(action.state == "running" for action in read_actions(app)),
    )


def _processes(living: Sequence[inspection.NodeInfo]) -> list[Process]:
    def longest(node: inspection.NodeInfo) -> inspection.RunningBatch | None:
        return max((batch for _, batch in node.batches()), key=lambda batch: batch["seconds"], default=None)

    nodes = [Process(node.name, node.version, node.started_at, node, [], longest(node)) for node in living]
    return [*nodes, *_supervisors(living).values()]


def _supervisors(living: Iterable[inspection.NodeInfo]) -> dict[str, Process]:
    found: dict[str, Process] = {}
    for node in living:
        if node.supervisor:
            name, own = _name_of_supervisor(node), node.supervisor
            process = Process(name, own.get("version") or "", own.get("started_at"), None, [])
            found.setdefault(name, process).nodes.append(node.name)
    return found


def _name_of_supervisor(node: inspection.NodeInfo) -> str:
    return f"{node.host}:{node.supervisor.get('pid')}" if node.supervisor else ""


def supervisor_of(node: inspection.NodeInfo, living: Iterable[inspection.NodeInfo]) -> Process | None:
    """The process that starts another node in the place of this one; None: there is none."""
    return _supervisors(living).get(_name_of_supervisor(node))


def _interruptions(app: lowq.Lowq, living: Sequence[inspection.NodeInfo]) -> list[Interruption]:
    """What a stop of all these nodes would probably cut off, longest first."""
    running = [(node, *item) for node in living if node.shutdown_timeout is not None for item in node.batches()]
    times = {queue: runs for queue, (_, runs) in total_times(app, [*{b["queue"] for *_, b in running}]).items()}
    usual = {queue: runs.percentile(0.95) if runs.count >= StuckLimits.KNOWN else 0.0 for queue, runs in times.items()}
    found = []
    for node, thread, batch in running:
        seconds, waits = usual[batch["queue"]], node.shutdown_timeout or 0.0
        if max(batch["seconds"], seconds) > waits:
            known = seconds if math.isfinite(seconds) else None
            found.append(Interruption(node.name, thread, batch, waits, known))
    return sorted(found, key=lambda item: item.batch["seconds"], reverse=True)
