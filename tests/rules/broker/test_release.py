"""release: taken jobs wait again, and nobody is charged a retry."""

import pytest

from tests.rows import case
from tests.rules.support import NEVER, NOW, REMAINS, ShardRig, handed, job

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


def test_released_jobs_wait_and_what_made_its_process_stop_is_charged_with_a_crash(rig: ShardRig) -> None:
    rows: list[tuple[str, float, bool]] = [
        ("", NOW, False), ("0", LATER, False), ("5", LATER + 5, False), ("5", LATER + 5, True), ("", LATER, True),
    ]  # fmt: skip
    for delay, due, crashed in rows:
        with case(delay, crashed):
            rig.renew()
            take_both(rig)
            call = (rig.read("lease"), 1, 3, "x", delay, "1" if crashed else "", "y", "0", "")
            assert rig.run("release", repr(LATER), *call) == [1, 1]
            assert rig.read("due") == {"x": due, "y": LATER}
            assert rig.read("payloads:x") == {"v1": 1, "v2": 2}
            assert rig.read("crashes") == ({"x": "1"} if crashed else {})
            assert rig.read("solo") == ({"x"} if crashed else set())
            assert not rig.names() & {"retries", "errors", "taken", "taken:payloads:x"}
            assert (rig.count("failed"), rig.count("processed"), rig.count("buried")) == (0, 0, 0)
            left = rig.snapshot()
            assert rig.run("release", repr(LATER + 5), *call) == [0, 0]
            assert rig.snapshot() == left
            again = [job_id for _ in range(2) for job_id in handed(rig.shard.in_flight.take(10, LATER + 5))]
            assert sorted(again) == ["x", "y"]
            left = rig.snapshot()
            assert rig.run("release", repr(LATER + 5), *call) == [0, 0], "it is taken again"
            assert rig.snapshot() == left


def test_a_release_for_centuries_is_never_and_not_overdue(rig: ShardRig) -> None:
    for delay in (2.0**33, 2.0**63, 1e300):
        with case(delay):
            rig.renew()
            take_both(rig)
            rig.shard.in_flight.release([("x", delay)], LATER)
            assert rig.read("due") == {"x": NEVER}
            assert rig.shard.in_flight.take(10, LATER).jobs == []


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
    assert (rig.read("morgue:payloads:x"), rig.read("morgue")) == ({"v1": 1, "v2": 2}, {"x": LATER})
    assert "3 times" in rig.read("morgue:errors")["x"]
    assert rig.count("buried") == 1
    assert rig.names() == REMAINS | {"morgue", "morgue:errors", "morgue:payloads:x"}
