"""release: taken jobs wait again, and nobody is charged a retry."""

import itertools

import pytest

from lowq.errors import LeaseLost
from tests.contract.support import NEVER, NOW, REMAINS, ShardRig, handed, job, retry
from tests.rows import case

LATER = NOW + 2


def take_both(rig: ShardRig) -> None:
    """x (two payloads) and y are in flight, under delivery 1."""
    shard = rig.own()
    rig.push(job("x", "v2", 2), job("x", "v1", 1), job("y", "v1", 1))
    assert handed(shard.in_flight.take(10, NOW + 1)) == {"x": ["v1", "v2"], "y": ["v1"]}


@pytest.fixture
def rig(rig: ShardRig) -> ShardRig:
    take_both(rig)
    return rig


def test_released_job_is_what_it_was_before_it_was_taken(rig: ShardRig) -> None:
    before_take = rig.read("taken")["x"][1]
    rig.shard.in_flight.release([("x", None)], LATER)
    assert rig.read("due") == {"x": before_take}
    assert rig.read("payloads:x") == {"v1": 1, "v2": 2}
    assert set(rig.read("taken")) == {"y"}
    assert not rig.names() & {"retries", "errors", "solo", "crashes", "taken:payloads:x"}
    assert (rig.count("failed"), rig.count("processed"), rig.count("buried")) == (0, 0, 0)


def test_released_job_may_wait(rig: ShardRig) -> None:
    rig.shard.in_flight.release([("x", 30.5), ("y", 0.0)], LATER)
    assert rig.read("due") == {"x": LATER + 30.5, "y": LATER}


def test_delay_is_waited_for_when_the_servers_clock_has_stepped_back(rig: ShardRig) -> None:
    rig.set_clock(LATER, NOW - 100_000)
    back = LATER - 3600
    rig.shard.in_flight.release([("x", 10.0), ("y", 20.0)], back)
    assert rig.shard.in_flight.take(10, back + 9).jobs == []
    assert handed(rig.shard.in_flight.take(10, back + 10)) == {"x": ["v1", "v2"]}


def test_released_job_is_due_although_the_servers_clock_has_stepped_back(rig: ShardRig) -> None:
    back = NOW - 3600
    rig.shard.in_flight.release([("x", None), ("y", None)], back)
    assert handed(rig.shard.in_flight.take(10, back)).keys() == {"x", "y"}


@pytest.mark.parametrize("delay", [2.0**33, 2.0**63, 1e300])
def test_a_release_for_centuries_is_never_and_not_overdue(rig: ShardRig, delay: float) -> None:
    rig.shard.in_flight.release([("x", delay)], LATER)
    assert rig.read("due") == {"x": NEVER}
    assert rig.shard.in_flight.take(10, LATER).jobs == []


def test_released_job_merges_with_a_newer_one(rig: ShardRig) -> None:
    rig.push(job("x", "v1", 0), job("x", "v3", 3, perform_at=NOW + 500))
    rig.shard.in_flight.release([("x", 5.0)], LATER)
    assert rig.read("payloads:x") == {"v1": 0, "v2": 2, "v3": 3}
    assert rig.read("due") == {"x": LATER + 5}


def test_released_job_keeps_retry_count_error_and_solo(rig: ShardRig) -> None:
    shard = rig.shard
    shard.in_flight.fail([retry("x", 4, delay=0), retry("y", delay=60)], LATER)
    shard.in_flight.take(10, LATER)
    shard.in_flight.release([("x", None)], LATER)
    assert rig.read("retries") == {"x": 4, "y": 0}
    assert rig.read("errors") == {"x": "boom", "y": "boom"}
    shard.in_flight.take(10, LATER)
    shard = rig.crash("second", LATER)
    shard.in_flight.take(10, LATER + 1)
    shard.in_flight.release([("x", None)], LATER + 1)
    assert rig.read("solo") == {"x"}
    assert rig.read("crashes") == {"x": "1"}


def test_what_made_its_process_stop_is_counted_as_a_crash(rig: ShardRig) -> None:
    shard = rig.shard
    shard.in_flight.release([("x", 3.0)], LATER, crashed=True)
    shard.in_flight.release([("y", None)], LATER)
    assert rig.read("crashes") == {"x": "1"}
    assert rig.read("solo") == {"x"}
    assert rig.read("due")["x"] == LATER + 3
    assert rig.read("retries") == {}


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
        shard.in_flight.release([("x", 0.0)], LATER, crashed=True)
    (said,) = caplog.messages
    assert "id 'x' is buried as poison: its process died, or its batch exceeded ttr, too often" in said
    assert rig.read("morgue:payloads:x") == {"v1": 1, "v2": 2}
    assert rig.read("morgue") == {"x": LATER}
    assert "3 times" in rig.read("morgue:errors")["x"]
    assert rig.count("buried") == 1
    assert rig.names() == REMAINS | {"morgue", "morgue:errors", "morgue:payloads:x"}


def test_repeated_call_changes_nothing(rig: ShardRig) -> None:
    for delay, crashed in itertools.product(["", "5"], ["", "1"]):
        with case(delay, crashed):
            rig.renew()
            take_both(rig)
            call = (rig.read("lease"), 1, 3, "x", delay, crashed, "y", "", "")
            assert rig.run("release", repr(LATER), *call) == [1, 1]
            before = rig.snapshot()
            assert rig.run("release", repr(LATER + 5), *call) == [0, 0]
            assert rig.snapshot() == before


def test_repeated_call_does_not_touch_the_id_taken_again(rig: ShardRig) -> None:
    call = (rig.read("lease"), 1, 3, "x", "5", "1")
    rig.shard.in_flight.release([("x", None), ("y", None)], LATER)
    assert rig.shard.in_flight.take(10, LATER).number == 2
    before = rig.snapshot()
    assert rig.run("release", repr(LATER), *call) == [0]
    assert rig.snapshot() == before


def test_id_named_twice_counts_once(rig: ShardRig) -> None:
    rig.shard.in_flight.release([("x", 1.0), ("x", 60.0)], LATER, crashed=True)
    assert rig.read("crashes") == {"x": "1"}
    assert rig.read("due") == {"x": LATER + 1}


def test_wrong_token_is_refused(rig: ShardRig) -> None:
    rig.crash("second", LATER)
    before = rig.snapshot()
    for crashed in (False, True):
        with pytest.raises(LeaseLost):
            rig.shard.in_flight.release([("x", None), ("y", 1.0)], LATER, crashed=crashed)
        assert rig.snapshot() == before


def test_release_survives_script_flush(rig: ShardRig) -> None:
    rig.client.command("SCRIPT", "FLUSH")
    rig.shard.in_flight.release([("x", None), ("y", None)], LATER)
    assert rig.read("taken") == {}
