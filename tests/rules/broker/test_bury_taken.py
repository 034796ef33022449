"""bury, of jobs in flight: whole, or some of their payloads."""

import pytest

from tests.rows import case
from tests.rules.support import NOW, REMAINS, ShardRig, handed, job

LATER = NOW + 2
BURIED = REMAINS | {"morgue", "morgue:errors", "morgue:payloads:x"}


def take_both(rig: ShardRig) -> None:
    """x (three payloads) and y are in flight, under delivery 1."""
    shard = rig.own()
    rig.push(*(job("x", f"v{n}", n) for n in (1, 2, 3)), job("y", "v1", 1))
    assert handed(shard.in_flight.take(10, NOW + 1)) == {"x": ["v1", "v2", "v3"], "y": ["v1"]}


@pytest.fixture
def rig(rig: ShardRig) -> ShardRig:
    take_both(rig)
    return rig


def test_whole_or_in_part_and_a_repeat_changes_nothing(rig: ShardRig) -> None:
    rows: list[tuple[list[str], dict[str, float], int]] = [
        ([], {"v1": 1, "v2": 2, "v3": 3}, 1),
        (['"v2"'], {"v2": 2}, 2),
        (['"v1"', '"v2"', '"v3"'], {"v1": 1, "v2": 2, "v3": 3}, 1),
    ]
    for payloads, buried, performed in rows:
        with case(payloads):
            rig.renew()
            take_both(rig)
            call = (rig.read("lease"), 1, "", "", "x", "bad", len(payloads), *payloads)
            rig.run("bury", repr(LATER), *call)
            assert (rig.read("morgue:payloads:x"), rig.read("morgue")) == (buried, {"x": LATER})
            assert rig.read("morgue:errors") == {"x": "bad"}
            assert set(rig.read("taken")) == ({"x", "y"} if performed == 2 else {"y"})
            rig.push(job("x", "v4", 4))
            before = rig.snapshot()
            assert rig.run("bury", repr(LATER + 1), *call) == [0]
            assert rig.snapshot() == before
            rig.shard.in_flight.finish(["x", "y"])
            rig.shard.in_flight.finish(handed(rig.shard.in_flight.take(1, LATER)))
            if performed == 1:
                assert rig.run("bury", repr(LATER + 1), *call) == [0], "it is taken again"
            rig.shard.in_flight.take(0, LATER)
            assert (rig.count("processed"), rig.names()) == (performed + 1, BURIED)


def test_what_is_not_in_flight_is_not_buried(rig: ShardRig) -> None:
    rig.push(job("x", "v4", 4))
    before = rig.snapshot()
    rig.shard.in_flight.bury([("x", b"undecodable", [b'"v4"', b'"v5"']), ("z", b"bad", [])], LATER)
    assert rig.snapshot() == before
