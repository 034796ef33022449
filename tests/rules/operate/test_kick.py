"""kick: what becomes of what is known of an id's past."""

from collections.abc import Iterator

import pytest

from tests.rules.support import NOW, ShardRig, emptied_rig, exhausted, handed, job, report, retry, solo

pytestmark = pytest.mark.parametrize("store_url", ["redis"], indirect=True)


@pytest.fixture
def rig(store_url: str) -> Iterator[ShardRig]:
    """Of x an older payload is in the morgue, and a newer one is in flight."""
    with emptied_rig(store_url) as rig:
        shard = rig.own()
        rig.push(job("x", "old", 1))
        shard.in_flight.take(1, NOW)
        report(shard, "fail", [exhausted("x")], NOW)
        rig.push(job("x", "new", 2))
        shard.in_flight.take(1, NOW)
        yield rig


def kick(rig: ShardRig) -> None:
    assert rig.run("kick", repr(NOW + 9), "", "", "x") == [1]


def test_crashes_of_an_id_in_flight_stay(rig: ShardRig) -> None:
    second = rig.crash("second")
    assert handed(second.in_flight.take(1, NOW + 1)) == {"x": ["new"]}
    kick(rig)
    assert (rig.read("crashes"), rig.read("solo")) == ({"x": "1"}, {"x"})
    # It kills its process once more, which makes it poison one crash earlier than if that were forgotten.
    rig.crash("third", NOW + 10).in_flight.take(1, NOW + 11)
    rig.lease_runs_out()
    lease = rig.owner("fourth").lease.acquire(60, NOW + 12)
    assert getattr(lease, "poisoned", ()) == ("x",)


def test_solo_mark_error_and_retry_count_of_an_id_in_flight_stay(rig: ShardRig) -> None:
    report(rig.shard, "fail", [retry("x", 4, delay=0)], NOW)
    rig.shard.in_flight.take(1, NOW)
    report(rig.shard, "fail", [solo("x", b"in company")], NOW)
    assert rig.shard.in_flight.take(1, NOW).jobs[0].retry_count == 4
    kick(rig)
    assert (rig.read("solo"), rig.read("errors")) == ({"x"}, {"x": "in company"})
    report(rig.shard, "release", [("x", None)], NOW + 9)
    assert rig.read("retries") == {"x": 4}
    assert rig.read("payloads:x") == {"old": 1, "new": 2}


@pytest.mark.parametrize("is_crashed", [False, True])
def test_an_id_that_waits_starts_afresh(rig: ShardRig, is_crashed: bool) -> None:
    if is_crashed:
        rig.crash("second")
        assert rig.read("crashes") == {"x": "1"}
    else:
        report(rig.shard, "fail", [retry("x", 4, delay=500)], NOW)
        rig.shard.in_flight.take(0, NOW)
    kick(rig)
    assert not rig.names() & {"retries", "errors", "solo", "crashes"}
    assert rig.read("due") == {"x": NOW + 9}
    (taken,) = rig.crash("third", NOW + 9).in_flight.take(1, NOW + 9).jobs
    assert (taken.payloads, taken.retry_count) == (["old", "new"], -1)
