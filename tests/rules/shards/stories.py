"""Stories of a shard, step by step, each of which shows a bug of `tests.mutants` that random ones meet late, or hardly
ever.

A step is a rule of the state machine and what it is given. Hypothesis prints the stories that it finds in that form, so
a bug that it has found can be told here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.rules.support import NOW

#: A rule of the state machine, and its arguments.
Step = tuple[str, Mapping[str, Any]]

V1, V2, V3 = b'"v1"', b'"v2"', b'"v3"'
#: Scores that go with those of the clock.
LOW, HIGH = 1e9 + 1.0, 1.1e12
#: A ttl that passes in a story, and one that does not.
SOON, LATE = 4.0, 100.0


class Draws:
    """Stands for what Hypothesis draws in the middle of a rule: these values, one after the other."""

    def __init__(self, *values: Any) -> None:
        self._values = iter(values)

    def draw(self, _strategy: object) -> Any:
        return next(self._values)


def job(job_id: str, payload: bytes, score: float | None = None, *, ttl: float | None = None, level: int = 0) -> Any:
    """As the rules are given it; due at once."""
    return job_id, payload, score, None, ttl, level


def push(*jobs: Any) -> Step:
    return "push", {"jobs": [*jobs], "lost": ""}


def take(limit: int = 1) -> Step:
    return "take", {"limit": limit, "lost": ""}


def wait(seconds: float) -> Step:
    return "time_passes", {"seconds": seconds}


def release(job_id: str) -> Step:
    return "release", {"data": Draws([job_id], None), "crashed": False, "lost": ""}


def retry(job_id: str, delay: float) -> Step:
    return "fail", {"data": Draws([job_id], "retry", 0, delay), "lost": ""}


def exhaust(job_id: str) -> Step:
    return "fail", {"data": Draws([job_id], "exhausted", 0, 0.0), "lost": ""}


def administer(what: str, job_id: str) -> Step:
    return "somebody_administers", {
        "what": what, "ids": [job_id], "reason": "", "where": "", "lost": "", "given_up": False,
    }  # fmt: skip


def take_due(limit: int) -> Step:
    """All that waits is due then."""
    return "all_that_waits_is_due_and_taken", {"limit": limit, "lost": ""}


OWNER_DIES: Step = "owner_dies_and_another_acquires", {"lost": "", "charge": True}
SUCCESS: Step = "batch_succeeds", {"limit": 1, "lost": ""}
SAID_AGAIN: Step = "outcome_is_reported_once_more", {}


def told() -> dict[str, Sequence[Step]]:
    """Name of the bug -> the story that shows it, to be told once."""
    one_delivery = [
        ("jobs_come_and_are_taken", {"jobs": [job("c", V1)], "limit": 1, "lost": ""}),
        SUCCESS,
    ]
    return {
        # Of the lost reply: "a" is acknowledged, and taken anew with its next payload.
        "ack by id alone": [
            push(job("a", V1)), take(), push(job("a", V2)), ("batch_succeeds", {"limit": 1, "lost": "at once"}),
        ],
        "fail by id alone": [push(job("a", V1)), take(), release("a"), take(), SAID_AGAIN],
        # The second death makes it poison, and its newer payload is buried with it.
        "what comes back alone replaces an inline newer payload": [
            push(job("a", V1)), take(), OWNER_DIES, take_due(1), push(job("a", V2)), OWNER_DIES,
        ],
        "what comes back takes the last score": [
            push(job("a", V1, HIGH), job("a", V2, HIGH)), take(), push(job("a", V1, LOW), job("a", V3, LOW)),
            release("a"),
        ],
        "the owner resumes when some of its jobs wait again": [
            push(job("a", V1), job("b", V1), job("c", V1)), take_due(3),
            ("whoever_restores_dies_in_the_middle", {"lost": "", "charge": True}),
            ("lease", {"what": "is asked for again", "lost": ""}),
        ],
        "retrying ids come in company": [
            push(job("a", V1)), take(), retry("a", 20.0), push(job("b", V1)), take_due(2),
        ],
        "kick keeps the retry_count": [
            push(job("a", V1)), administer("bury", "a"), push(job("a", V2)), take(), retry("a", 20.0),
            administer("kick", "a"),
        ],
        "of two equal payloads the later time counts": [
            push(job("a", V1, ttl=LATE), job("a", V2)), push(job("a", V1, ttl=SOON)),
        ],
        "payloads that come back as a set forget when they expire": [
            push(job("a", V1, ttl=LATE), job("a", V2, ttl=LATE)), take(), release("a"),
        ],
        # Its owner has heard nothing of it: the lease was lost, and was got again.
        "what was lost is handed out though it has expired": [
            push(job("a", V1, ttl=SOON)), take(), ("lease", {"what": "runs out", "lost": ""}), take(), wait(SOON + 1.0),
            take(),
        ],
        # Every tenth delivery begins with the least urgent.
        "the least urgent starve": [
            *one_delivery * 9,
            ("jobs_come_and_are_taken", {"jobs": [job("a", V1), job("b", V1, level=9)], "limit": 1, "lost": ""}),
        ],
        "what is kicked expires": [
            push(job("a", V1)), administer("bury", "a"), push(job("a", V1, ttl=LATE), job("a", V2)),
            administer("kick", "a"),
        ],
        "what has expired is buried": [
            push(job("a", V1, ttl=SOON), job("a", V2)), take(), wait(SOON + 1.0),
            ("bury_taken", {"data": Draws("a", []), "reason": "", "lost": ""}),
        ],
        "an equal payload of an inline one takes the last score": [push(job("a", V1, LOW)), push(job("a", V1, HIGH))],
        "scores of inline payloads are compared as texts": [push(job("a", V1, HIGH)), push(job("a", V1, NOW))],
        "exhausted forgets to start afresh": [
            push(job("a", V1), job("a", V2)), take(), push(("a", V3, None, 60.0, None, 0)), exhaust("a"),
        ],
        "an attempt hides those before it": [
            push(job("a", V1)), take(), retry("a", 0.5), take_due(1), retry("a", 0.5),
        ],
        "a newer payload hides a cancel": [push(job("a", V1)), take(), administer("cancel", "a"), push(job("a", V2))],
        "an acknowledgement makes room, and nobody is told": [
            push(job("a", V1), job("b", V1)), take(), push(job("c", V1)), SUCCESS,
        ],
        "the lease is given before all is restored": [push(job("a", V1), job("b", V1)), take_due(2), OWNER_DIES],
        "what comes back forgets its priority": [push(job("a", V1, level=9)), take_due(1), release("a")],
        "what comes back is the latest": [push(job("a", V1, LOW)), take(), push(job("a", V2, HIGH)), release("a")],
        "what comes back joins what has expired": [
            push(job("a", V1)), take(), push(job("a", V2, ttl=SOON)), wait(SOON + 1.0), release("a"),
        ],
    }  # fmt: skip
