"""fail, release and bury: what becomes of jobs in flight, in one step. What may happen meanwhile: the state machine."""

from typing import Any

import pytest

from lowq.errors import ScriptError
from tests.rows import case
from tests.rules.support import NEVER, NOW, REMAINS, Channel, ShardRig, exhausted, handed, job, report, retry, solo

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


BOTH = {"v1": 1, "v2": 2}
BURIED = {"morgue": {"x": LATER}, "morgue:errors": {"x": "bad"}}
#: What is told of x by which script, what is there then, and how often it has failed and was buried.
OUTCOMES: list[tuple[str, tuple[str | int, ...], dict[str, Any], tuple[int, int]]] = [
    ("fail", ("x", "retry", 4, "30.5", "boom"),
     {"due": {"x": LATER + 30.5}, "retries": {"x": 4}, "errors": {"x": "boom"}, "payloads:x": BOTH}, (1, 0)),
    ("fail", ("x", "solo", -1, "0", "in company"),
     {"due": {"x": NOW}, "solo": {"x"}, "errors": {"x": "in company"}, "payloads:x": BOTH}, (0, 0)),
    ("fail", ("x", "exhausted", 0, "0", "bad"),
     {"due": {"x": LATER}, "payloads:x": {"v2": 2}, "morgue:payloads:x": {"v1": 1}, **BURIED}, (1, 1)),
    ("release", (3, "x", "", ""), {"due": {"x": NOW}, "payloads:x": BOTH}, (0, 0)),
    ("release", (3, "x", "0", ""), {"due": {"x": LATER}, "payloads:x": BOTH}, (0, 0)),
    ("release", (3, "x", "5", ""), {"due": {"x": LATER + 5}, "payloads:x": BOTH}, (0, 0)),
    ("release", (3, "x", "5", "1"),
     {"due": {"x": LATER + 5}, "crashes": {"x": "1"}, "solo": {"x"}, "payloads:x": BOTH}, (0, 0)),
    ("release", (3, "x", "", "1"),
     {"due": {"x": LATER}, "crashes": {"x": "1"}, "solo": {"x"}, "payloads:x": BOTH}, (0, 0)),
    ("bury", ("", "", "x", "bad", 0), {"morgue:payloads:x": BOTH, **BURIED}, (0, 1)),
    ("bury", ("", "", "x", "bad", 2, '"v1"', '"v2"'), {"morgue:payloads:x": BOTH, **BURIED}, (0, 1)),
    ("bury", ("", "", "x", "bad", 1, '"v2"'),
     {"morgue:payloads:x": {"v2": 2}, "taken:payloads:x": {"v1": 1}, **BURIED}, (0, 1)),
]  # fmt: skip
KEYS = (
    "due", "retries", "solo", "errors", "crashes", "payloads:x", "morgue", "morgue:errors", "morgue:payloads:x",
    "taken:payloads:x",
)  # fmt: skip


def test_each_outcome_and_its_repeats_change_what_they_should_and_nothing(rig: ShardRig) -> None:
    for script, told, expected, counts in OUTCOMES:
        with case(script, told):
            rig.renew()
            take_both(rig)
            call = (rig.shard.lease.token, 1, *told)
            assert rig.run(script, repr(LATER), *call) == [1]
            assert {key: found for key in KEYS if (found := rig.read(key))} == expected
            assert (rig.count("failed"), rig.count("buried"), rig.count("processed")) == (*counts, 0)
            is_taken = "taken:payloads:x" in expected
            assert set(rig.read("taken")) == ({"x", "y"} if is_taken else {"y"})
            rig.push(job("x", "v9", 9), now=LATER)
            for _ in range(2):
                before = rig.snapshot()
                assert rig.run(script, repr(LATER + 5), *call) == [0]
                assert rig.snapshot() == before
                if not is_taken:
                    handed(rig.shard.in_flight.take(10, LATER + 60))
                    assert set(rig.read("taken")) == {"x", "y"}, "it is taken again"


def test_what_is_not_in_flight_is_not_buried(rig: ShardRig) -> None:
    rig.push(job("x", "v4", 4))
    before = rig.snapshot()
    report(rig.shard, "bury", [("x", b"undecodable", [b'"v4"', b'"v5"']), ("z", b"bad", [])], LATER)
    assert rig.snapshot() == before


@pytest.mark.parametrize("newer", [-500.0, 0.0, 500.0])
def test_failed_job_wins_over_a_newer_one_of_its_id(rig: ShardRig, newer: float) -> None:
    rig.push(job("x", "v3", 3, perform_at=LATER + 30 + newer), job("x", "v1", 0))
    report(rig.shard, "fail", [retry("x", 4, delay=30)], LATER)
    assert rig.read("payloads:x") == {"v1": 0, "v2": 2, "v3": 3}
    assert (rig.read("due"), rig.read("retries")) == ({"x": LATER + 30}, {"x": 4})


def test_centuries_are_never_and_not_overdue(rig: ShardRig) -> None:
    for delay in (2.0**33, 2.0**63, 1e300):
        with case(delay):
            rig.renew()
            take_both(rig)
            report(rig.shard, "fail", [retry("x", 0, delay=delay)], LATER)
            report(rig.shard, "release", [("y", delay)], LATER)
            assert rig.read("due") == {"x": NEVER, "y": NEVER}
            delivery = rig.shard.in_flight.take(10, LATER)
            assert not delivery.jobs
            assert delivery.delay == pytest.approx(NEVER - LATER)


def test_exhausted_id_whose_payloads_were_removed_by_hand_does_not_stop_the_shard(rig: ShardRig) -> None:
    rig.client.command("DEL", rig.prefix + "taken:payloads:x")
    report(rig.shard, "fail", [exhausted("x"), retry("y", delay=0)], LATER)
    assert rig.read("morgue") == rig.read("taken") == {}
    assert rig.count("buried") == 0
    assert rig.read("due") == {"y": LATER}


def test_no_outcome_wakes_anybody_since_its_owner_asks_anyway(rig: ShardRig, wake: Channel) -> None:
    in_flight = rig.shard.in_flight
    report(rig.shard, "fail", [retry("x", delay=0), solo("y")], LATER)
    in_flight.finish(handed(in_flight.take(1, LATER)))
    in_flight.take(0, LATER)
    assert wake.messages() == []


def test_what_keeps_making_its_process_stop_is_buried_as_poison(
    rig: ShardRig, caplog: pytest.LogCaptureFixture
) -> None:
    shard = rig.shard
    shard.in_flight.finish(["y"])
    shard.in_flight.take(0, LATER)
    for crash in range(3):
        if crash:
            assert handed(shard.in_flight.take(10, LATER)) == {"x": ["v1", "v2"]}
        assert caplog.messages == []
        report(shard, "release", [("x", 0.0)], LATER, crashed=True)
    (said,) = caplog.messages
    assert "id 'x' is buried as poison: its process died, or its batch exceeded ttr, too often" in said
    assert (rig.read("morgue:payloads:x"), rig.read("morgue")) == ({"v1": 1, "v2": 2}, {"x": LATER})
    assert "3 times" in rig.read("morgue:errors")["x"]
    assert rig.count("buried") == 1
    assert rig.names() == REMAINS | {"morgue", "morgue:errors", "morgue:payloads:x"}


#: The shard's own keys that somebody may have given another type.
TYPED = ("due", "retries", "errors", "solo", "crashes", "morgue", "morgue:errors", "expires", "debounced")


@pytest.mark.parametrize("key", TYPED)
def test_where_a_key_has_a_wrong_type_nothing_is_written(rig: ShardRig, key: str) -> None:
    calls = [(script, (rig.shard.lease.token, 1, *told)) for script, told, *_ in OUTCOMES]
    calls += [("kick", ("", "", "b")), ("delete", ("", "", "", "b", "w")), ("bury", ("", "", "", "", "w", "why", 0))]
    for script, words in calls:
        with case(script, words):
            rig.renew()
            take_both(rig)
            rig.push(job("w", "v", 1), job("b", "v", 1))
            assert rig.run("bury", repr(LATER), "", "", "", "", "b", "why", 0) == [1]
            rig.client.command("DEL", rig.prefix + key)
            before = rig.snapshot()
            rig.client.command("SET", rig.prefix + key, "by hand")
            words = (rig.shard.lease.token, *words[1:]) if words[0] else words
            with pytest.raises(ScriptError, match="WRONGTYPE"):
                rig.run(script, repr(LATER), *words)
            rig.client.command("DEL", rig.prefix + key)
            assert rig.snapshot() == before
