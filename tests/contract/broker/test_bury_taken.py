"""bury, of jobs in flight: whole, or some of their payloads."""

import pytest

from lowq.errors import LeaseLost
from tests.contract.support import NOW, REMAINS, ShardRig, handed, job, retry

LATER = NOW + 2


@pytest.fixture
def rig(rig: ShardRig) -> ShardRig:
    """x (three payloads) and y are in flight, under delivery 1."""
    shard = rig.own()
    rig.push(*(job("x", f"v{n}", n) for n in (1, 2, 3)), job("y", "v1", 1))
    assert handed(shard.in_flight.take(10, NOW + 1)) == {"x": ["v1", "v2", "v3"], "y": ["v1"]}
    return rig


def test_whole_job_is_buried_with_its_reason(rig: ShardRig) -> None:
    rig.shard.in_flight.bury([("x", b"bad", [])], LATER)
    assert rig.read("morgue:payloads:x") == {"v1": 1, "v2": 2, "v3": 3}
    assert rig.read("morgue") == {"x": LATER}
    assert rig.read("morgue:errors") == {"x": "bad"}
    assert set(rig.read("taken")) == {"y"}
    assert rig.read("due") == {}
    assert (rig.count("buried"), rig.count("failed"), rig.count("processed")) == (1, 0, 0)
    rig.shard.in_flight.finish(["y"])
    rig.shard.in_flight.take(0, LATER)
    assert rig.names() == REMAINS | {"morgue", "morgue:errors", "morgue:payloads:x"}


def test_without_a_reason_the_last_error_is_it(rig: ShardRig) -> None:
    shard = rig.shard
    shard.in_flight.fail([retry("x", 0, delay=0, error=b"boom")], LATER)
    shard.in_flight.release([("y", 60.0)], LATER)
    shard.in_flight.take(1, LATER)
    shard.in_flight.bury([("x", b"", [])], LATER)
    assert rig.read("morgue:errors") == {"x": "boom"}
    assert not rig.names() & {"retries", "errors"}


def test_newer_payloads_are_not_buried_with_it(rig: ShardRig) -> None:
    rig.push(job("x", "v1", 1), job("x", "v4", 4))
    rig.shard.in_flight.bury([("x", b"bad", [])], LATER)
    assert rig.read("morgue:payloads:x") == {"v1": 1, "v2": 2, "v3": 3}
    assert rig.read("payloads:x") == {"v1": 1, "v4": 4}
    assert set(rig.read("due")) == {"x"}


def test_morgue_keeps_the_lowest_score_of_equal_payloads(rig: ShardRig) -> None:
    rig.shard.in_flight.bury([("y", b"bad", [])], LATER)
    for score in (0, 5):
        rig.push(job("y", "v1", score))
        rig.shard.in_flight.take(1, LATER)
        rig.shard.in_flight.bury([("y", b"bad", [])], LATER)
        assert rig.read("morgue:payloads:y") == {"v1": 0}


def test_single_payloads_are_buried_and_the_rest_stays_in_flight(rig: ShardRig) -> None:
    shard = rig.shard
    shard.in_flight.bury([("x", b"undecodable", [b'"v2"'])], LATER)
    assert rig.read("morgue:payloads:x") == {"v2": 2}
    assert rig.read("taken:payloads:x") == {"v1": 1, "v3": 3}
    assert set(rig.read("taken")) == {"x", "y"}
    shard.in_flight.finish(["x", "y"])
    shard.in_flight.take(0, LATER)
    assert rig.count("processed") == 2
    assert rig.names() == REMAINS | {"morgue", "morgue:errors", "morgue:payloads:x"}


def test_last_payload_takes_the_job_out_of_flight(rig: ShardRig) -> None:
    rig.shard.in_flight.bury(
        [("x", b"undecodable", [b'"v1"', b'"v2"', b'"v3"']), ("y", b"undecodable", [b'"v1"'])], LATER
    )
    assert rig.read("taken") == {}
    assert not {key for key in rig.names() if key.startswith("taken:payloads:")}


def test_payload_that_is_not_in_flight_is_not_buried(rig: ShardRig) -> None:
    rig.push(job("x", "v4", 4))
    before = rig.snapshot()
    rig.shard.in_flight.bury([("x", b"undecodable", [b'"v4"', b'"v5"']), ("z", b"bad", [])], LATER)
    assert rig.snapshot() == before


@pytest.mark.parametrize("payloads", [(), ('"v2"',)], ids=["whole", "single"])
def test_repeated_call_changes_nothing(rig: ShardRig, payloads: tuple[str, ...]) -> None:
    call = (rig.read("lease"), 1, "", "", "x", "bad", len(payloads), *payloads)
    assert rig.run("bury", repr(LATER), *call) == [1]
    rig.push(job("x", "v1", 1), now=LATER)
    before = rig.snapshot()
    assert rig.run("bury", repr(LATER + 1), *call) == [0]
    assert rig.snapshot() == before


def test_repeated_call_does_not_touch_the_id_taken_again(rig: ShardRig) -> None:
    shard = rig.shard
    call = (rig.read("lease"), 1, "", "", "y", "bad", 0)
    shard.in_flight.bury([("y", b"bad", [])], LATER)
    rig.push(job("y", "v2", 2))
    shard.in_flight.release([("x", 60.0)], LATER)
    assert handed(shard.in_flight.take(10, LATER)) == {"y": ["v2"]}
    before = rig.snapshot()
    assert rig.run("bury", repr(LATER), *call) == [0]
    assert rig.snapshot() == before


def test_wrong_token_is_refused(rig: ShardRig) -> None:
    rig.crash("second", LATER)
    before = rig.snapshot()
    for payloads in ([], [b'"v1"']):
        with pytest.raises(LeaseLost):
            rig.shard.in_flight.bury([("x", b"bad", payloads)], LATER)
        assert rig.snapshot() == before


def test_bury_survives_script_flush(rig: ShardRig) -> None:
    rig.client.command("SCRIPT", "FLUSH")
    rig.shard.in_flight.bury([("x", b"bad", []), ("y", b"bad", [])], LATER)
    assert set(rig.read("morgue")) == {"x", "y"}
