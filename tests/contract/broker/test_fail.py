"""fail: the outcome of a batch that failed, in one step."""

import pytest

from lowq.broker.delivery import Failure
from lowq.errors import LeaseLost
from tests.contract.support import NEVER, NOW, REMAINS, Channel, ShardRig, exhausted, handed, job, retry, solo

LATER = NOW + 2


@pytest.fixture
def rig(rig: ShardRig) -> ShardRig:
    """x (two payloads) and y are in flight, under delivery 1."""
    shard = rig.own()
    rig.push(job("x", "v2", 2), job("x", "v1", 1), job("y", "v1", 1))
    assert handed(shard.in_flight.take(10, NOW + 1)) == {"x": ["v1", "v2"], "y": ["v1"]}
    return rig


# --- retry ---


def test_retry_waits_for_its_delay_with_the_new_retry_count(rig: ShardRig) -> None:
    rig.shard.in_flight.fail([retry("x", 4, delay=30.5)], LATER)
    assert rig.read("due") == {"x": LATER + 30.5}
    assert rig.read("retries") == {"x": 4}
    assert rig.read("errors") == {"x": "boom"}
    assert rig.read("payloads:x") == {"v1": 1, "v2": 2}
    assert set(rig.read("taken")) == {"y"}
    assert "taken:payloads:x" not in rig.names()
    assert (rig.count("failed"), rig.count("buried"), rig.count("processed")) == (1, 0, 0)


def test_retry_is_handed_out_with_its_retry_count(rig: ShardRig) -> None:
    rig.shard.in_flight.fail([retry("x", 4), retry("y", 0, delay=60)], LATER)
    assert rig.shard.in_flight.take(10, LATER + 9).jobs == []
    (taken,) = rig.shard.in_flight.take(10, LATER + 10).jobs
    assert (taken.id, taken.payloads, taken.retry_count) == ("x", ["v1", "v2"], 4)


def test_delay_of_a_retry_is_waited_for_when_the_servers_clock_has_stepped_back(rig: ShardRig) -> None:
    rig.set_clock(LATER, NOW - 100_000)
    back = LATER - 3600
    rig.shard.in_flight.fail([retry("x", 0, delay=10), retry("y", 0, delay=20)], back)
    delivery = rig.shard.in_flight.take(10, back)
    assert delivery.jobs == []
    assert delivery.delay == pytest.approx(10)
    assert handed(rig.shard.in_flight.take(10, back + 10)) == {"x": ["v1", "v2"]}


@pytest.mark.parametrize("delay", [2.0**33, 2.0**63, 1e300])
def test_a_retry_in_centuries_is_never_and_not_overdue(rig: ShardRig, delay: float) -> None:
    rig.shard.in_flight.fail([retry("x", 0, delay=delay)], LATER)
    assert rig.read("due") == {"x": NEVER}
    delivery = rig.shard.in_flight.take(10, LATER)
    assert delivery.jobs == []
    assert delivery.delay == pytest.approx(NEVER - LATER)


@pytest.mark.parametrize("newer", [-500.0, 0.0, 500.0])
def test_failed_job_wins_over_a_newer_one_of_its_id(rig: ShardRig, newer: float) -> None:
    rig.push(job("x", "v3", 3, perform_at=LATER + 30 + newer), job("x", "v1", 0))
    rig.shard.in_flight.fail([retry("x", 4, delay=30)], LATER)
    assert rig.read("payloads:x") == {"v1": 0, "v2": 2, "v3": 3}
    assert rig.read("due") == {"x": LATER + 30}
    assert rig.read("retries") == {"x": 4}


def test_retry_of_a_parted_id_merges_with_the_rest_and_keeps_the_order(rig: ShardRig) -> None:
    rig.crash("few")
    shard = rig.own("few", now=LATER, max_payloads=2)
    rig.push(*(job("z", f"v{n}", n) for n in (1, 2, 3)))
    assert handed(shard.in_flight.take(1, LATER)) == {"z": ["v1", "v2"]}
    rig.push(job("z", "v0", 0), now=LATER)
    shard.in_flight.fail([retry("z", delay=0)], LATER)
    assert rig.read("payloads:z") == {"v0": 0, "v1": 1, "v2": 2, "v3": 3}


# --- solo ---


def test_solo_is_not_charged_and_keeps_its_place(rig: ShardRig) -> None:
    rig.shard.in_flight.fail([solo("x"), solo("y")], LATER)
    assert set(rig.read("due")) == {"x", "y"}
    assert rig.read("due")["x"] == NOW
    assert rig.read("retries") == {}
    assert rig.read("solo") == {"x", "y"}
    assert rig.read("errors") == {"x": "in company", "y": "in company"}
    assert (rig.count("failed"), rig.count("buried")) == (0, 0)


def test_ids_of_a_failed_batch_are_tried_one_by_one_and_only_the_guilty_is_charged(rig: ShardRig) -> None:
    shard = rig.shard
    shard.in_flight.fail([solo("x"), solo("y")], LATER)
    assert handed(shard.in_flight.take(10, LATER)) == {"x": ["v1", "v2"]}
    shard.in_flight.fail([retry("x", 0, delay=60)], LATER)
    assert handed(shard.in_flight.take(10, LATER)) == {"y": ["v1"]}
    shard.in_flight.finish(["y"])
    shard.in_flight.take(0, LATER)
    assert rig.read("due") == {"x": LATER + 60}
    assert rig.read("retries") == {"x": 0}
    assert rig.read("solo") == set()
    assert rig.read("errors") == {"x": "boom"}
    assert (rig.count("failed"), rig.count("processed")) == (1, 1)


def test_solo_keeps_the_retry_count_it_had(rig: ShardRig) -> None:
    shard = rig.shard
    shard.in_flight.fail([retry("x", 4, delay=0), retry("y", 0, delay=60)], LATER)
    shard.in_flight.take(10, LATER)
    shard.in_flight.fail([solo("x")], LATER)
    assert rig.read("retries") == {"x": 4, "y": 0}


def test_charged_retry_ends_solo(rig: ShardRig) -> None:
    shard = rig.shard
    shard.in_flight.fail([solo("x"), retry("y", delay=60)], LATER)
    shard.in_flight.take(10, LATER)
    shard.in_flight.fail([retry("x")], LATER)
    assert rig.read("solo") == set()


# --- exhausted ---


def test_rest_of_an_exhausted_job_starts_afresh_and_now(rig: ShardRig) -> None:
    shard = rig.shard
    shard.in_flight.fail([retry("x", 4, delay=0), retry("y", 0, delay=60)], LATER)
    shard.in_flight.take(1, LATER)
    shard.in_flight.fail([exhausted("x")], LATER + 1)
    assert rig.read("due") == {"x": LATER + 1, "y": LATER + 60}
    assert rig.read("retries") == {"y": 0}
    assert [(item.payloads, item.retry_count) for item in shard.in_flight.take(10, LATER + 1).jobs] == [(["v2"], -1)]


def test_exhausted_buries_the_lowest_of_what_was_taken(rig: ShardRig) -> None:
    rig.push(job("x", "v0", 0), now=NOW + 1)  # lower, but newer than the batch
    rig.shard.in_flight.fail([exhausted("x")], LATER)
    assert rig.read("morgue:payloads:x") == {"v1": 1}
    assert rig.read("morgue") == {"x": LATER}
    assert rig.read("morgue:errors") == {"x": "given up"}
    assert rig.read("payloads:x") == {"v0": 0, "v2": 2}
    assert rig.read("due") == {"x": LATER}
    assert (rig.count("failed"), rig.count("buried")) == (1, 1)


def test_exhausted_merges_the_rest_with_an_equal_newer_payload(rig: ShardRig) -> None:
    rig.push(job("x", "v1", 7), job("x", "v2", 0))
    rig.shard.in_flight.fail([exhausted("x")], LATER)
    assert rig.read("morgue:payloads:x") == {"v1": 1}
    assert rig.read("payloads:x") == {"v1": 7, "v2": 0}


def test_exhausted_job_of_one_payload_goes_whole(rig: ShardRig) -> None:
    rig.shard.in_flight.fail([exhausted("y"), exhausted("x")], LATER)
    rig.shard.in_flight.finish(handed(rig.shard.in_flight.take(1, LATER)))
    rig.shard.in_flight.take(0, LATER)
    assert rig.names() == REMAINS | {
        "morgue",
        "morgue:errors",
        "morgue:payloads:x",
        "morgue:payloads:y",
    }


def test_newer_job_keeps_its_time_when_nothing_of_the_exhausted_one_is_left(rig: ShardRig) -> None:
    rig.push(job("y", "v2", 2, perform_at=NOW + 60))
    rig.shard.in_flight.fail([exhausted("y")], LATER)
    assert rig.read("due") == {"y": NOW + 60}
    assert rig.read("payloads:y") == {"v2": 2}


def test_exhausted_meets_what_the_morgue_holds_already(rig: ShardRig) -> None:
    shard = rig.shard
    shard.in_flight.fail([exhausted("x"), exhausted("y")], LATER)
    shard.in_flight.take(1, LATER)
    rig.push(job("x", "v1", 0), now=LATER)
    shard.in_flight.fail([exhausted("x", b"again")], LATER + 1)
    shard.in_flight.take(1, LATER + 1)
    shard.in_flight.fail([exhausted("x", b"and again")], LATER + 2)
    assert rig.read("morgue:payloads:x") == {"v1": 0, "v2": 2}
    assert rig.read("morgue:errors")["x"] == "and again"
    assert rig.read("morgue")["x"] == LATER + 2
    assert rig.read("due") == {}


def test_exhausted_clears_the_jobs_past(rig: ShardRig) -> None:
    shard = rig.shard
    shard.in_flight.fail([retry("x", 4, delay=0)], LATER)
    shard.in_flight.release([("y", 60.0)], LATER)
    shard.in_flight.take(1, LATER)
    shard = rig.crash("second", LATER)
    assert handed(shard.in_flight.take(10, LATER + 1)) == {"x": ["v1", "v2"]}
    shard.in_flight.fail([exhausted("x")], LATER + 1)
    left = rig.names()
    assert not left & {"retries", "errors", "solo", "crashes"}
    assert handed(shard.in_flight.take(1, LATER + 1)) == {"x": ["v2"]}
    assert rig.read("taken")["x"][2] == -1


def test_exhausted_id_whose_payloads_were_removed_by_hand_does_not_stop_the_shard(rig: ShardRig) -> None:
    rig.client.command("DEL", rig.prefix + "taken:payloads:x")
    rig.shard.in_flight.fail([exhausted("x"), retry("y", delay=0)], LATER)
    assert rig.read("morgue") == {}
    assert rig.read("taken") == {}
    assert rig.read("due") == {"y": LATER}


# --- one step ---


def test_a_batch_of_all_verdicts_is_one_step(rig: ShardRig) -> None:
    shard = rig.shard
    rig.push(job("z", "v1", 1))
    shard.in_flight.release([("x", None), ("y", None)], LATER)
    assert set(handed(shard.in_flight.take(10, LATER))) == {"x", "y", "z"}
    shard.in_flight.fail([retry("x", 0, delay=60), solo("y"), exhausted("z")], LATER)
    assert rig.read("taken") == {}
    assert rig.read("due") == {"x": LATER + 60, "y": rig.read("due")["y"]}
    assert rig.read("morgue") == {"z": LATER}
    assert (rig.count("failed"), rig.count("buried")) == (2, 1)


@pytest.mark.parametrize("outcome", [retry("x", 4), solo("x"), exhausted("x")], ids=["retry", "solo", "exhausted"])
def test_repeated_call_changes_nothing(rig: ShardRig, outcome: Failure) -> None:
    call = (rig.shard.lease.token, 1, *outcome[:3], repr(outcome.delay), outcome.error)
    assert rig.run("fail", repr(LATER), *call) == [1]
    rig.push(job("x", "v9", 9), now=LATER)
    before = rig.snapshot()
    assert rig.run("fail", repr(LATER + 5), *call) == [0]
    assert rig.snapshot() == before


def test_repeated_call_does_not_touch_the_id_taken_again(rig: ShardRig) -> None:
    shard = rig.shard
    shard.in_flight.fail([exhausted("x"), retry("y", delay=60)], LATER)
    delivery = shard.in_flight.take(10, LATER)
    assert (delivery.number, handed(delivery)) == (2, {"x": ["v2"]})
    before = rig.snapshot()
    assert rig.run("fail", repr(LATER), delivery.lease.token, 1, "x", "exhausted", 0, "0", b"given up") == [0]
    assert rig.snapshot() == before


def test_id_named_twice_counts_once(rig: ShardRig) -> None:
    rig.shard.in_flight.fail([exhausted("x"), exhausted("x"), retry("x")], LATER)
    assert rig.read("morgue:payloads:x") == {"v1": 1}
    assert rig.read("retries") == {}
    assert (rig.count("failed"), rig.count("buried")) == (1, 1)


def test_wrong_token_is_refused(rig: ShardRig) -> None:
    rig.crash("second", LATER)
    before = rig.snapshot()
    with pytest.raises(LeaseLost):
        rig.shard.in_flight.fail([retry("x"), exhausted("y")], LATER)
    assert rig.snapshot() == before
    assert rig.shard.lease.current is None


def test_fail_survives_script_flush(rig: ShardRig) -> None:
    rig.client.command("SCRIPT", "FLUSH")
    rig.shard.in_flight.fail([retry("x"), retry("y")], LATER)
    assert rig.read("retries") == {"x": 0, "y": 0}


def test_failing_wakes_nobody_since_its_owner_asks_anyway(rig: ShardRig, wake: Channel) -> None:
    rig.shard.in_flight.fail([retry("x"), solo("y")], LATER)
    assert wake.messages() == []
