"""The faults of the matrix: what is planned, from a seed, and under which load."""

import random
from collections.abc import Callable

from tests.chaos.load import Load
from tests.chaos.stage import Fault, Step

Plan = Callable[[random.Random, float], list[Step]]


def every(gap: tuple[float, float], *names: str) -> Plan:
    """One of the names after another, with so many seconds between them, until the load ends."""

    def plan(chance: random.Random, seconds: float) -> list[Step]:
        steps = []
        at = chance.uniform(0.3, max(gap[0], 0.4))
        while at < seconds:
            steps.append(Step(at, chance.choice(names), chance.randrange(1000)))
            at += chance.uniform(*gap)
        return steps

    return plan


def nothing(chance: random.Random, seconds: float) -> list[Step]:
    return []


#: Seconds between two deaths so that the first is over when the second comes: a lease and some more.
APART = (2.3, 3.0)

FAULTS = [
    Fault("none", "none", nothing),
    Fault("kill", "a node is killed (SIGKILL)", every(APART, "kill"), Load(seconds=9)),
    Fault("kills", "nodes are killed all the time", every((0.1, 0.7), "kill"), timed=False),
    Fault("freeze", "a node is frozen (SIGSTOP) for longer than a lease", every(APART, "freeze"), Load(seconds=9)),
    Fault("blink", "nodes are frozen for about a lease", every((0.2, 1.0), "blink"), timed=False),
    Fault("cut-off", "a node is cut off from Redis in mid-perform", every((1.0, 2.5), "cut_off", "hold", "half_open"), proxied=True),
    Fault("lost-replies", "replies of executed commands are lost", every((0.02, 0.2), "lose_replies", "lose_pushes", "cut"), proxied=True),
]

BY_NAME = {fault.name: fault for fault in FAULTS}
