"""fail: the outcome of a batch that failed, in one step. Whatever else may happen meanwhile: the state machine."""

from typing import Any

import pytest

from lowq.broker.delivery import Failure
from tests.rows import case
from tests.rules.support import NEVER, NOW, Channel, ShardRig, exhausted, handed, job, retry, solo

LATER = NOW + 2


@pytest.fixture
def rig(rig: ShardRig) -> ShardRig:
    take_both(rig)
    return rig


def take_both(rig: ShardRig) -> None:
    """x (two payloads) and y are in flight, under delivery 1."""
    shard = rig.own()
    rig.push(job("x", "v2", 2), job("x", "v1", 1), job("y", "v1", 1))
    assert handed(shard.in_flight.take(10, NOW + 1)) == {"x": ["v1", "v2"], "y": ["v1"]}


#: Outcome of x -> what is there of it: the keys that are not named are empty.
VERDICTS: list[tuple[Failure, dict[str, Any], tuple[int, int]]] = [
    (
        retry("x", 4, delay=30.5),
        {"due": {"x": LATER + 30.5}, "retries": {"x": 4}, "errors": {"x": "boom"}, "payloads:x": {"v1": 1, "v2": 2}},
        (1, 0),
    ),
    (
        solo("x"),
        {"due": {"x": NOW}, "solo": {"x"}, "errors": {"x": "in company"}, "payloads:x": {"v1": 1, "v2": 2}},
        (0, 0),
    ),
    (
        exhausted("x"),
        {
            "due": {"x": LATER}, "payloads:x": {"v2": 2},
            "morgue": {"x": LATER}, "morgue:errors": {"x": "given up"}, "morgue:payloads:x": {"v1": 1},
        },
        (1, 1),
    ),
]  # fmt: skip
KEYS = "due", "retries", "solo", "errors", "payloads:x", "morgue", "morgue:errors", "morgue:payloads:x"


def test_each_verdict_and_its_repeat(rig: ShardRig) -> None:
    for outcome, expected, counts in VERDICTS:
        with case(outcome.verdict):
            rig.renew()
            take_both(rig)
            call = (rig.shard.lease.token, 1, *outcome[:3], repr(outcome.delay), outcome.error)
            assert rig.run("fail", repr(LATER), *call) == [1]
            assert {key: found for key in KEYS if (found := rig.read(key))} == expected
            assert (rig.count("failed"), rig.count("buried")) == counts
            assert set(rig.read("taken")) == {"y"}
            rig.push(job("x", "v9", 9), now=LATER)
            before = rig.snapshot()
            assert rig.run("fail", repr(LATER + 5), *call) == [0]
            assert rig.snapshot() == before
            assert "x" in handed(rig.shard.in_flight.take(10, LATER + 60))
            before = rig.snapshot()
            assert rig.run("fail", repr(LATER + 65), *call) == [0], "it is taken again"
            assert rig.snapshot() == before


@pytest.mark.parametrize("newer", [-500.0, 0.0, 500.0])
def test_failed_job_wins_over_a_newer_one_of_its_id(rig: ShardRig, newer: float) -> None:
    rig.push(job("x", "v3", 3, perform_at=LATER + 30 + newer), job("x", "v1", 0))
    rig.shard.in_flight.fail([retry("x", 4, delay=30)], LATER)
    assert rig.read("payloads:x") == {"v1": 0, "v2": 2, "v3": 3}
    assert (rig.read("due"), rig.read("retries")) == ({"x": LATER + 30}, {"x": 4})


def test_a_retry_in_centuries_is_never_and_not_overdue(rig: ShardRig) -> None:
    for delay in (2.0**33, 2.0**63, 1e300):
        with case(delay):
            rig.renew()
            take_both(rig)
            rig.shard.in_flight.fail([retry("x", 0, delay=delay)], LATER)
            assert rig.read("due") == {"x": NEVER}
            delivery = rig.shard.in_flight.take(10, LATER)
            assert not delivery.jobs
            assert delivery.delay == pytest.approx(NEVER - LATER)


def test_exhausted_id_whose_payloads_were_removed_by_hand_does_not_stop_the_shard(rig: ShardRig) -> None:
    rig.client.command("DEL", rig.prefix + "taken:payloads:x")
    rig.shard.in_flight.fail([exhausted("x"), retry("y", delay=0)], LATER)
    assert rig.read("morgue") == rig.read("taken") == {}
    assert rig.count("buried") == 0
    assert rig.read("due") == {"y": LATER}


def test_no_outcome_wakes_anybody_since_its_owner_asks_anyway(rig: ShardRig, wake: Channel) -> None:
    in_flight = rig.shard.in_flight
    in_flight.fail([retry("x", delay=0), solo("y")], LATER)
    in_flight.finish(handed(in_flight.take(1, LATER)))
    in_flight.take(0, LATER)
    assert wake.messages() == []
