"""Is anything wrong? What the first page says before any figure: the problems of queues, the worst first."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lowq import inspection
from lowq.observe.histories import Flow
from lowq.operate.nodes import StuckBatch
from lowq_web import text

Level = Literal["red", "amber"]

#: Seconds that shards have no owner for in a deploy.
OWNERLESS_LAG = 10.0
#: Latency from which on a queue is very late, in multiples of its goal.
VERY_LATE = 10.0
#: Shares of the jobs of the last 5 minutes that failed, and the least number of them.
FAILING: Mapping[Level, float] = {"red": 0.5, "amber": 0.1}
LEAST_FAILED = 5.0
#: What is wrong with queues -> of one queue, of several, and the column of the first page that shows it.
_WORDS = {
    "nodeless": ("waits, and no node is running", "wait, and no node is running", "due"),
    "unworked": ("has no worker", "have no worker", "due"),
    "unowned": ("has shards without an owner", "have shards without an owner", "due"),
    "stuck": ("is held up by a stuck batch", "are held up by stuck batches", "taken"),
    "failing": ("fails", "fail", "failed"),
    "starved": ("gets no thread", "get no thread", "lag"),
    "late": ("is late", "are late", "lag"),
}


@dataclass(frozen=True, slots=True)
class Trouble:
    """What is wrong with one queue."""

    kind: str
    level: Level
    queue: str
    #: Jobs that wait for it, and seconds that the oldest has.
    jobs: int
    lag: float
    #: More of it, where it is the only one; "": nothing.
    detail: str = ""
    #: Its dead jobs, where they matter.
    dead: int = 0


@dataclass(frozen=True, slots=True)
class Problem:
    """Queues with the same trouble, by name."""

    kind: str
    level: Level
    troubles: Sequence[Trouble]

    @property
    def words(self) -> str:
        """What is wrong: ``has no worker``."""
        return _WORDS[self.kind][len(self.troubles) > 1]

    @property
    def jobs(self) -> int:
        """Jobs that wait for it."""
        return sum(trouble.jobs for trouble in self.troubles)

    @property
    def dead(self) -> int:
        """Dead jobs of queues that fail."""
        return sum(trouble.dead for trouble in self.troubles)

    @property
    def lag(self) -> float:
        """Seconds that the oldest of them has waited."""
        return max(trouble.lag for trouble in self.troubles)


def find_problems(
    queues: Iterable[inspection.QueueOverview],
    flows: Mapping[str, Flow],
    stuck: Sequence[StuckBatch],
    deaths: Mapping[str, float],
    *,
    any_node: bool = True,
) -> list[Problem]:
    """The red ones first, then by the number of jobs that wait for them. A paused queue is late on purpose.

    ``deaths``: queue -> jobs that die per minute.
    """
    groups: dict[tuple[str, Level], list[Trouble]] = {}
    for item in queues:
        for trouble in _troubles(item, flows.get(item.stats.name), stuck, deaths.get(item.stats.name, 0.0)):
            kind = "nodeless" if trouble.kind == "unworked" and not any_node else trouble.kind
            groups.setdefault((kind, trouble.level), []).append(trouble)
    problems = [Problem(kind, level, troubles) for (kind, level), troubles in groups.items()]
    return sorted(problems, key=lambda problem: (problem.level != "red", -problem.jobs, problem.kind))


def levels_of(problems: Iterable[Problem]) -> dict[tuple[str, str], Level]:
    """(queue, column) -> how bad it is; of the queue "": the worst of all."""
    found: dict[tuple[str, str], Level] = {}
    for problem in problems:
        column = _WORDS[problem.kind][2]
        for queue in ("", *(trouble.queue for trouble in problem.troubles)):
            found.setdefault((queue, column), problem.level)
    return found


def level_of_lag(lag: float, goal: float) -> Level | None:
    """How bad it is that a job has waited for so many seconds."""
    return None if lag <= goal else "red" if lag > VERY_LATE * goal else "amber"


def level_of_redis(redis: inspection.RedisInfo) -> Level | None:
    """How bad its warnings are: red where jobs are lost, or can't be written any more."""
    loses = not redis.disk_ok or redis.eviction.startswith("allkeys-")
    return ("red" if loses else "amber") if redis.warnings else None


def _troubles(
    item: inspection.QueueOverview, flow: Flow | None, stuck: Sequence[StuckBatch], deaths: float
) -> Iterable[Trouble]:
    """What is wrong with a queue. Shards without an owner, or with a stuck batch, do not make it late as well."""
    stats, others = item.stats, item.shards
    # Nobody is to hold a shard whose jobs are being moved, or are still to come.
    held = [shard for shard in item.shards if not (shard.sealed or shard.fed)]
    lost = [shard for shard in held if shard.owner is None]
    jobs = sum(shard.length + shard.taken for shard in lost)
    lag = _lag_of(lost)
    if jobs and len(lost) == len(held):
        waits = (stats.due or stats.taken) and not stats.paused
        yield Trouble("unworked", "red" if waits else "amber", stats.name, jobs, lag)
        others = []
    elif jobs and (late := sum(shard.lag > OWNERLESS_LAG for shard in lost)):
        has = "has" if late == 1 else "have"
        level = None if stats.paused else level_of_lag(lag, stats.latency_goal)
        yield Trouble("unowned", level or "amber", stats.name, jobs, lag, f"{late} of {len(held)} {has} none")
        others = [shard for shard in others if shard.owner is not None or shard.sealed or shard.fed]
    behind = [batch for batch in stuck if batch.queue == stats.name]
    if behind:
        longest = text.duration(max(batch.seconds for batch in behind))
        places = {batch.shard for batch in behind}
        lag = _lag_of(shard for shard in item.shards if shard.index in places)
        yield Trouble("stuck", "red", stats.name, sum(batch.waiting for batch in behind), lag, f"for {longest}")
        others = [shard for shard in others if shard.index not in places]
    if flow is not None and flow.failed >= LEAST_FAILED:
        share = flow.failed / (flow.failed + flow.processed)
        level = next((level for level, least in FAILING.items() if share >= least), None)
        if level is not None:
            detail = f"{share:.0%} of what it performed in the last 5 minutes"
            if deaths:
                detail += f", and {text.rate(deaths)} a minute die"
            yield Trouble("failing", level, stats.name, stats.retries, 0.0, detail, stats.morgue_length)
    lag = _lag_of(others)
    late_level = level_of_lag(lag, stats.latency_goal)
    if late_level is not None and not stats.paused:
        starved = stats.due > 0 and stats.taken == 0 and not lost
        yield Trouble("starved" if starved else "late", late_level, stats.name, stats.due, lag)


def _lag_of(shards: Iterable[inspection.ShardInfo]) -> float:
    return max((shard.lag for shard in shards), default=0.0)
