"""The checker can fail: lowq broken on purpose, one guarantee at a time, is caught by what that guarantee is about."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.chaos.broken import BUILDS
from tests.chaos.faults import BY_NAME, at
from tests.chaos.stage import Fault, Outcome, run


@dataclass(frozen=True)
class Case:
    """Under which fault a build shows that it is broken, and where."""

    fault: Fault
    caught: Callable[[Outcome], object]


def fault(name: str, seconds: float, *steps: tuple[float, str], **load: object) -> Fault:
    """That fault under a small load, with other steps if any are given."""
    found = BY_NAME[name]
    small: dict[str, object] = {"producers": 2, "ids": 400, "seconds": seconds, **load}
    return replace(found, load=replace(found.load, **small), plan=at(*steps) if steps else found.plan)  # type: ignore[arg-type]


def much(name: str, *steps: tuple[float, str], each: float = 0.1, **load: object) -> Fault:
    """That fault under a second's worth of jobs that take longer, each alone, and each so many seconds. A thread for
    every shard, so that what a node gains doesn't wait for what it has.
    """
    settings = {**BY_NAME[name].settings, "ORDERS_BATCH": 1, "LOWQ_THREADS_PER_NODE": 20}
    load = {"rate": 40 / each, "mix": {"sleep": (1000, each)}, **load}
    return replace(fault(name, 1.0, *steps, **load), settings=settings)


def few_payloads(fault: Fault) -> Fault:
    """That fault with a delivery that leaves payloads of its ids behind, so that the next one has the same ids."""
    return replace(fault, settings={**fault.settings, "ORDERS_MAX_PAYLOADS": 2})


LOST_REPLIES = [(0.3 + 0.05 * number, ("lose_replies", "lose_pushes")[number % 2]) for number in range(40)]
FREEZES_AND_MORE = [
    (0.5 + 0.9 * number, ("freeze_in_take", "reattach", "freeze_in_take", "lose_replies")[number % 4])
    for number in range(12)
]

CASES = {
    # A node that was frozen asks for its lease before it performs: what it may still write is what it had finished.
    "fencing": Case(
        fault("freeze", 8.0, *[(0.4 + number, "freeze") for number in range(7)]),
        lambda run: run.report.returned or run.report.overlaps,
    ),
    "exclusion": Case(
        much("membership", (0.3, "join"), (0.8, "join")),
        lambda run: run.report.overlaps or run.report.unexplained,
    ),
    "restore": Case(much("kill", (1.2, "kill")), lambda run: run.report.lost),
    "order": Case(fault("none", 0.7), lambda run: run.report.steps_back),
    "ack_by_id": Case(few_payloads(fault("lost-replies", 2.0, *LOST_REPLIES, ids=20)), lambda run: run.report.lost),
    "push_twice": Case(fault("lost-replies", 2.0, *LOST_REPLIES), lambda run: run.report.returned),
    "ticks": Case(fault("none", 0.7, ids=40), lambda run: run.report.steps_back),
    "claims": Case(fault("none", 0.7), lambda run: run.report.overlaps),
    "deadline": Case(much("cut-off", (1.2, "cut_off"), each=0.25), lambda run: run.report.overlaps),
    "fence": Case(fault("stop", 1.0, (0.5, "term")), lambda run: run.report.fences),
    "leak": Case(fault("none", 0.7), lambda run: any("left in Redis" in problem for problem in run.problems)),
    # Each shard has five seconds of work: when the node is killed, each of its shards is amid a delivery whose
    # first jobs were finished long before.
    "expired": Case(
        much("expiry", (9.0, "kill"), each=0.1, rate=800, ttl=0.5),
        lambda run: run.report.stale,
    ),
    "hasty": Case(fault("expiry", 3.0, (2.0, "kill")), lambda run: run.report.hasty),
    "capacity": Case(
        much("capacity", (0.5, "kill"), each=0.1, rate=800, producers=8),
        lambda run: any("more than its part of the capacity" in problem for problem in run.problems),
    ),
    "overdue": Case(fault("consumer-ttr", 3.0), lambda run: run.report.overlaps),
    "sessions": Case(
        fault("consumer-detach", 4.0, *[(0.4 + 0.2 * number, "reattach") for number in range(17)]),
        lambda run: any("were performed again" in problem for problem in run.problems),
    ),
    "not_ready": Case(
        fault("redis-read-only", 2.0, (0.5, "redis_read_only")),
        lambda run: any("ended by themselves" in problem for problem in run.problems),
    ),
    "schedules": Case(
        fault("schedule", 4.0, (0.5, "kill")),
        lambda run: any("ticks were pushed, of which" in problem for problem in run.problems),
    ),
    # Where all shards were made by such pushes, the registry follows them, and nothing is lost.
    "made_shards": Case(
        fault("dropped", 3.0, (1.0, "remake")),
        lambda run: run.report.lost or any("left in Redis" in problem for problem in run.problems),
    ),
    "forgotten": Case(fault("kept", 3.0), lambda run: any("is not kept" in problem for problem in run.problems)),
    "revived": Case(fault("cancel-jobs", 3.0), lambda run: run.report.revived),
    "late_reports": Case(fault("consumer-ttr", 3.0), lambda run: run.report.late_acks),
    "late_takes": Case(fault("consumer-storm", 11.0, *FREEZES_AND_MORE), lambda run: run.report.overlaps),
    "company": Case(
        fault("consumer-poison", 12.0, (0.5, "term"), (13.0, "term")),
        lambda run: any("is innocent, and buried" in problem for problem in run.problems),
    ),
    "late_acks": Case(much("kill", (3.5, "kill"), each=0.25, rate=400, ids=4000), lambda run: run.report.excess),
}


#: Only stories of a simulation show these: here all go on with the replaced primary until the end, which looks sound.
SIMULATED = {"replaced"}


def test_every_broken_build_is_tried() -> None:
    assert CASES.keys() == BUILDS.keys() - SIMULATED


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("build", CASES)
def test_a_broken_build_is_caught(build: str, tmp_path: Path) -> None:
    case = CASES[build]
    # Whether the harm of one run meets the moment that the build gets wrong is a matter of chance; of ten, hardly.
    for seed in range(1, 11):
        folder = tmp_path / str(seed)
        folder.mkdir()
        outcome = run(case.fault, seed, folder=folder, broken=build, patience=3.0, examine=False)
        if case.caught(outcome):
            assert outcome.problems
            return
    pytest.fail(f"ten runs of the build {build!r} looked sound")
