"""take: acknowledges the previous batch and takes the next, in one delivery."""

from collections.abc import Sequence
from typing import Any

import pytest

from lowq.broker.in_flight import MAX_DELIVERY_BYTES, MAX_DELIVERY_JOBS
from lowq.broker.shard import Shard
from lowq.codec import load_payload
from lowq.errors import LeaseLost
from tests.contract.support import NEVER, NOW, REMAINS, TICK, TTL, Channel, ShardRig, handed, job, jobs_of, retry, solo
from tests.rows import case
from tests.tiers import real_redis_often

MIB = 2**20


def take(
    rig: ShardRig,
    shard: Shard,
    limit: int,
    *,
    now: float = NOW,
    last: int = 0,
    acks: tuple[int, Sequence[str]] = (0, ()),
    max_payloads: int = 1000,
    max_bytes: int = MAX_DELIVERY_BYTES,
) -> list[Any]:
    """The script's reply: [delivery, delay, paused, acknowledged, job...]."""
    assert shard.lease.current is not None
    delivery, ids = acks
    reply: list[Any] = rig.run(
        "ack_and_take", repr(now), shard.lease.token, last, limit, max_payloads, max_bytes, delivery, *ids
    )
    return [*reply[:4], *jobs_of(reply)]


def ids_of(reply: list[Any]) -> list[str]:
    return [raw[0].decode() for raw in reply[4:]]


# --- what is taken ---


def test_due_jobs_are_taken_oldest_first(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("late", "v1", 1, perform_at=NOW + 2), job("early", "v1", 1, perform_at=NOW + 1))
    assert list(handed(shard.in_flight.take(10, NOW + 3))) == ["early", "late"]


def test_payloads_come_lowest_score_first(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v10", 10), job("x", "v9", 9), job("x", "v-1", -1), job("x", "v9.5", 9.5))
    assert handed(shard.in_flight.take(1, NOW)) == {"x": ["v-1", "v9", "v9.5", "v10"]}


def test_jobs_of_later_are_not_taken(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1, perform_at=NOW + 60))
    assert shard.in_flight.take(10, NOW + 60 - TICK).jobs == []
    assert handed(shard.in_flight.take(10, NOW + 60)) == {"x": ["v1"]}


def test_taken_job_moves_whole_and_its_record_says_all_that_restore_needs(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1), job("x", "v2", 2))
    shard.in_flight.take(1, NOW + 5)
    left = rig.snapshot()
    assert left["taken"] == {"x": (1, NOW, -1, 0, NOW + 5)}
    assert left["taken:payloads:x"] == {"v1": 1, "v2": 2}
    assert "due" not in left
    assert "payloads:x" not in left


def test_limit_bounds_the_jobs_of_a_trip(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(*(job(name, "v1", 1) for name in "abcde"))
    assert list(handed(shard.in_flight.take(3, NOW + 1))) == ["a", "b", "c"]
    assert set(rig.read("due")) == {"d", "e"}


def test_every_delivery_has_a_number_of_its_own(rig: ShardRig) -> None:
    shard = rig.own()
    deliveries = []
    for version in range(3):
        rig.push(job("x", f"v{version}", version))
        delivery = shard.in_flight.take(1, NOW)
        shard.in_flight.finish(handed(delivery))
        deliveries.append(delivery.number)
    assert deliveries == [1, 2, 3]
    shard.in_flight.take(0, NOW)
    assert rig.meta("delivery") == "3"


def test_job_keeps_its_place_by_due_time_not_by_time_of_push(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("b", "v1", 1, perform_at=NOW + 2))
    rig.push(job("a", "v1", 1, perform_at=NOW + 1), now=NOW + 1)
    assert list(handed(shard.in_flight.take(1, NOW + 5))) == ["a"]


# --- acknowledging ---


def test_ack_ends_a_job_and_the_next_comes_in_the_same_trip(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1))
    rig.push(job("y", "v1", 1), now=NOW + 1)
    shard.in_flight.finish(handed(shard.in_flight.take(1, NOW + 1)))
    assert handed(shard.in_flight.take(1, NOW + 1)) == {"y": ["v1"]}
    assert set(rig.read("taken")) == {"y"}
    assert "taken:payloads:x" not in rig.names()
    assert rig.count("processed") == 1


def test_ack_cites_id_and_delivery(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1))
    take(rig, shard, 1)
    before = rig.snapshot()
    for delivery, ids in ((2, ["x"]), (0, ["x"]), (1, ["y"]), (1, ["X"])):
        assert take(rig, shard, 0, last=1, acks=(delivery, ids))[3] == 0
        assert rig.snapshot() == before
    assert take(rig, shard, 0, last=1, acks=(1, ["x"]))[3] == 1
    assert rig.names() == REMAINS


def test_repeated_ack_does_not_acknowledge_what_came_meanwhile(rig: ShardRig) -> None:
    """The case of the design: v1 is performed, v2 arrives, `take(ack v1)` takes v2 and its reply is lost."""
    shard = rig.own()
    rig.push(job("x", "v1", 1))
    shard.in_flight.finish(handed(shard.in_flight.take(1, NOW)))
    rig.push(job("x", "v2", 2))
    rig.lose_reply(shard.in_flight.take_call(1, NOW))
    assert rig.read("taken:payloads:x") == {"v2": 2}

    delivery = shard.in_flight.take(1, NOW)
    assert handed(delivery) == {"x": ["v2"]}
    assert rig.read("taken:payloads:x") == {"v2": 2}
    assert rig.count("processed") == 1
    shard.in_flight.finish(handed(delivery))
    shard.in_flight.take(0, NOW)
    assert rig.count("processed") == 2
    assert rig.names() == REMAINS


def test_id_acknowledged_twice_in_one_call_counts_once(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1))
    take(rig, shard, 1)
    assert take(rig, shard, 0, acks=(1, ["x", "x"]))[3] == 1
    assert rig.count("processed") == 1


def test_payload_that_arrives_in_flight_is_kept_even_when_equal(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1))
    shard.in_flight.finish(handed(shard.in_flight.take(1, NOW)))
    rig.push(job("x", "v1", 1))
    assert handed(shard.in_flight.take(1, NOW)) == {"x": ["v1"]}
    assert rig.count("processed") == 1


def test_ack_clears_what_is_known_of_failures(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1), job("y", "v1", 1))
    shard.in_flight.take(1, NOW)
    shard.in_flight.fail([retry("x", 4, delay=0)], NOW)
    shard = rig.crash("second")
    shard.in_flight.take(10, NOW + 1)
    shard = rig.crash("third", NOW + 1)
    assert rig.read("crashes")
    for _ in range(2):
        shard.in_flight.finish(handed(shard.in_flight.take(10, NOW + 10)))
    shard.in_flight.take(0, NOW + 10)
    assert rig.names() == REMAINS


def test_limit_0_only_acknowledges(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1), job("y", "v1", 1, perform_at=NOW + 7))
    shard.in_flight.finish(handed(shard.in_flight.take(1, NOW)))
    rig.push(job("z", "v1", 1), now=NOW + 1)
    before = {key: value for key, value in rig.snapshot().items() if "taken" not in key and key != "meta"}
    assert take(rig, shard, 0, now=NOW + 3, acks=(1, ["x"])) == [2, -2_000_000, 0, 1]
    assert {key: value for key, value in rig.snapshot().items() if key != "meta"} == before


def test_part_of_a_batch_may_be_acknowledged(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(*(job(name, "v1", 1) for name in "abc"))
    shard.in_flight.take(3, NOW + 1)
    shard.in_flight.finish(["b"])
    assert shard.in_flight.take(0, NOW + 1).jobs == []
    assert set(rig.read("taken")) == {"a", "c"}
    shard.in_flight.finish(["a", "c"])
    shard.in_flight.take(0, NOW + 1)
    assert rig.names() == REMAINS


# --- in flight ---


def test_id_in_flight_is_not_taken_a_second_time(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1))
    take(rig, shard, 1)
    rig.push(job("x", "v2", 2), job("y", "v1", 1))
    reply = take(rig, shard, 10, now=NOW + 1, last=1)
    assert ids_of(reply) == ["y"]
    assert rig.read("taken:payloads:x") == {"v1": 1}
    assert rig.read("payloads:x") == {"v2": 2}
    assert ids_of(take(rig, shard, 10, now=NOW + 1, last=2, acks=(1, ["x"]))) == ["x"]


def test_many_ids_in_flight_do_not_hide_the_next_one(rig: ShardRig) -> None:
    shard = rig.own()
    names = [f"a{n:03}" for n in range(100)]
    rig.push(*(job(name, "v1", 1) for name in names))
    take(rig, shard, 100, now=NOW + 1)
    rig.push(*(job(name, "v2", 2) for name in names))
    rig.push(job("z", "v1", 1), now=NOW + 1)
    assert take(rig, shard, 0, now=NOW + 2, last=1)[1] == -1_000_000
    assert ids_of(take(rig, shard, 1, now=NOW + 2, last=1)) == ["z"]


# --- lost replies ---


def test_what_a_lost_reply_held_is_handed_out_again_and_first(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1, perform_at=NOW + 1), job("x", "v2", 2))
    rig.lose_reply(shard.in_flight.take_call(1, NOW + 1))
    rig.push(job("older", "v1", 1), job("x", "v3", 3))
    delivery = shard.in_flight.take(2, NOW + 1)
    assert handed(delivery) == {"x": ["v1", "v2"], "older": ["v1"]}
    assert rig.read("taken")["x"] == (2, NOW + 1, -1, 0, NOW + 1)
    shard.in_flight.finish(handed(delivery))
    assert handed(shard.in_flight.take(2, NOW + 1)) == {"x": ["v3"]}


def test_what_was_handed_out_again_answers_to_its_new_delivery_only(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1))
    take(rig, shard, 1)
    assert ids_of(take(rig, shard, 1)) == ["x"]
    assert take(rig, shard, 0, last=2, acks=(1, ["x"]))[3] == 0
    assert take(rig, shard, 0, last=2, acks=(2, ["x"]))[3] == 1


def test_delivery_that_the_caller_has_is_not_handed_out_again(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1))
    take(rig, shard, 1)
    assert ids_of(take(rig, shard, 1, last=1)) == []


def test_lost_jobs_that_do_not_fit_come_with_the_next_trip(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(*(job(name, "v1", 1) for name in "abc"))
    rig.push(job("d", "v1", 1), now=NOW + 1)
    rig.lose_reply(shard.in_flight.take_call(3, NOW + 1))
    delivery = shard.in_flight.take(2, NOW + 1)
    assert list(handed(delivery)) == ["a", "b"]
    assert delivery.delay == 0
    shard.in_flight.finish(handed(delivery))
    assert list(handed(shard.in_flight.take(2, NOW + 1))) == ["c", "d"]


def test_limit_0_says_that_a_lost_delivery_waits(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1))
    take(rig, shard, 1)
    assert take(rig, shard, 0, now=NOW + 5)[1:] == [0, 0, 0]


def test_lost_delivery_keeps_retry_count_and_comes_alone_again(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1))
    shard.in_flight.take(1, NOW)
    shard.in_flight.fail([retry("x", 3, delay=0)], NOW)
    rig.push(job("y", "v1", 1))
    rig.lose_reply(shard.in_flight.take_call(5, NOW))
    delivery = shard.in_flight.take(5, NOW)
    assert [(item.id, item.retry_count) for item in delivery.jobs] == [("x", 3)]
    shard.in_flight.finish(handed(delivery))
    assert list(handed(shard.in_flight.take(5, NOW))) == ["y"]


# --- alone ---


@pytest.mark.parametrize("outcome", [retry("x", 0, delay=0), solo("x")], ids=["retrying", "solo"])
def test_retrying_and_solo_ids_come_alone(rig: ShardRig, outcome: Any) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1))
    shard.in_flight.take(1, NOW)
    shard.in_flight.fail([outcome], NOW)
    rig.push(job("y", "v1", 1), now=NOW + 1)
    delivery = shard.in_flight.take(10, NOW + 1)
    assert list(handed(delivery)) == ["x"]
    assert delivery.delay == 0
    shard.in_flight.finish(handed(delivery))
    assert list(handed(shard.in_flight.take(10, NOW + 1))) == ["y"]


def test_retrying_id_waits_until_those_before_it_are_taken(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1))
    shard.in_flight.take(1, NOW)
    shard.in_flight.fail([retry("x", 0, delay=5)], NOW)
    rig.push(job("y", "v1", 1), job("z", "v1", 1))
    rig.push(job("last", "v1", 1), now=NOW + 6)
    for expected in (["y", "z"], ["x"], ["last"]):
        delivery = shard.in_flight.take(10, NOW + 6)
        assert list(handed(delivery)) == expected
        shard.in_flight.finish(handed(delivery))


def test_success_ends_solo(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1))
    shard.in_flight.take(1, NOW)
    shard.in_flight.fail([solo("x")], NOW)
    shard.in_flight.finish(handed(shard.in_flight.take(1, NOW)))
    shard.in_flight.take(0, NOW)
    rig.push(job("x", "v2", 2))
    rig.push(job("y", "v1", 1), now=NOW + TICK)
    assert list(handed(shard.in_flight.take(10, NOW + 1))) == ["x", "y"]


def test_success_ends_solo_for_what_is_taken_in_the_same_trip(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1))
    shard.in_flight.take(1, NOW)
    shard.in_flight.fail([solo("x")], NOW)
    shard.in_flight.finish(handed(shard.in_flight.take(1, NOW)))
    rig.push(job("x", "v2", 2))
    rig.push(job("y", "v1", 1), now=NOW + 1)
    assert list(handed(shard.in_flight.take(10, NOW + 1))) == ["x", "y"]


# --- many payloads, large payloads ---


def test_at_most_max_payloads_of_an_id_the_lowest_and_the_rest_keeps_its_place(rig: ShardRig) -> None:
    shard = rig.own("few", max_payloads=3)
    rig.push(*(job("x", f"v{n}", n) for n in (5, 3, 1, 2, 4, 7, 6)))
    rig.push(job("y", "v1", 1), now=NOW + 1)
    deliveries = []
    for _ in range(3):
        delivery = shard.in_flight.take(1, NOW + 1)
        assert rig.read("due").get("x", NOW) == NOW
        deliveries.append(handed(delivery))
        shard.in_flight.finish(handed(delivery))
    assert deliveries == [{"x": ["v1", "v2", "v3"]}, {"x": ["v4", "v5", "v6"]}, {"x": ["v7"]}]
    assert handed(shard.in_flight.take(1, NOW + 1)) == {"y": ["v1"]}


def test_every_max_payloads_is_exact(rig: ShardRig) -> None:
    for count in (1, 2, 3, 17, 18, 19, 35):
        with case(count):
            rig.renew()
            shard = rig.own("few", max_payloads=count)
            rig.push(*(job("x", f"v{n}", n) for n in range(count + 1)), job("y", "v1", 1))
            delivery = shard.in_flight.take(2, NOW + 1)
            assert [len(payloads) for payloads in handed(delivery).values()] == [count, 1]
            assert rig.read("payloads:x") == {f"v{count}": count}
            shard.in_flight.finish(handed(delivery))
            assert handed(shard.in_flight.take(2, NOW + 1)) == {"x": [f"v{count}"]}
            assert "payloads:x" not in rig.names()


def test_lower_score_that_arrives_for_a_parted_id_comes_in_a_later_run(rig: ShardRig) -> None:
    shard = rig.own("few", max_payloads=2)
    rig.push(*(job("x", f"v{n}", n) for n in (2, 3, 4)))
    shard.in_flight.finish(handed(shard.in_flight.take(1, NOW)))
    rig.push(job("x", "v1", 1))
    assert handed(shard.in_flight.take(1, NOW)) == {"x": ["v1", "v4"]}


def test_bytes_of_a_reply_are_bounded(rig: ShardRig) -> None:
    shard = rig.own()
    for name in "abc":
        rig.push(job(name, name * (MIB - 2), 1))
    for name in "abc":
        delivery = shard.in_flight.take(10, NOW)
        assert list(handed(delivery)) == [name]
        shard.in_flight.finish(handed(delivery))


def test_one_payload_always_fits(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "1" * (3 * MIB), 1))
    rig.push(job("x", "2" * MIB, 2))
    for first in "12":
        delivery = shard.in_flight.take(1, NOW)
        ((payload,),) = handed(delivery).values()
        assert payload[0] == first
        shard.in_flight.finish(handed(delivery))
    shard.in_flight.take(0, NOW)
    assert rig.names() == REMAINS


def test_large_payloads_of_one_id_come_in_parts_and_in_order(rig: ShardRig) -> None:
    shard = rig.own()
    for version in range(10):
        rig.push(job("x", f"{version}" * (300 * 1024), version))
    seen, deliveries = "", 0
    while jobs := shard.in_flight.take(10, NOW).jobs:
        (taken,) = jobs
        assert sum(map(len, taken.payloads)) <= MIB
        seen += "".join(payload[0] for payload in taken.payloads)
        deliveries += 1
        shard.in_flight.finish(["x"])
    assert (seen, deliveries) == ("0123456789", 4)


def test_job_that_does_not_fit_beside_others_waits_whole(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("small", "v1", 1))
    rig.push(job("big", "1" * (MIB // 2 - 150), 1), now=NOW + 1)
    rig.push(job("big", "2" * (MIB // 2 - 150), 2), now=NOW + 1)
    rig.push(job("after", "v1", 1), now=NOW + 2)
    delivery = shard.in_flight.take(10, NOW + 2)
    assert list(handed(delivery)) == ["small"]
    assert len(rig.read("payloads:big")) == 2
    shard.in_flight.finish(handed(delivery))
    assert list(handed(shard.in_flight.take(10, NOW + 2))) == ["big"]


@real_redis_often
def test_small_payloads_are_bounded_too(rig: ShardRig) -> None:
    """A payload of a few bytes costs its score and about a microsecond of Redis."""
    shard = rig.own()
    for name in range(20):
        rig.push(*(job(f"x{name:02}", n, n) for n in range(1000)))
    delivery = shard.in_flight.take(1000, NOW + 1)
    assert 5_000 < sum(map(len, handed(delivery).values())) <= MAX_DELIVERY_BYTES / 100
    assert list(handed(delivery)) == sorted(handed(delivery))


# --- the delay to the next job ---


def test_reply_says_the_delay_to_the_next_due_job(rig: ShardRig) -> None:
    shard = rig.own()
    assert take(rig, shard, 1)[1] is None
    rig.push(job("x", "v1", 1, perform_at=NOW + 60))
    assert take(rig, shard, 1)[1] == 60_000_000
    assert take(rig, shard, 0, now=NOW + 70)[1] == -10_000_000
    rig.push(job("y", "v1", 1, perform_at=NOW + 65))
    reply = take(rig, shard, 1, now=NOW + 70)
    assert (ids_of(reply), reply[1]) == (["x"], -5_000_000)


def test_rest_of_a_parted_id_is_the_next_due(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1), job("x", "v2", 2), job("y", "v1", 1, perform_at=NOW + 60))
    assert take(rig, shard, 1, now=NOW + 3, max_payloads=1)[1] == -3_000_000


def test_delay_is_never_too_short(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1, perform_at=NOW + 60.0000004))
    delay = take(rig, shard, 1)[1]
    assert ids_of(take(rig, shard, 1, now=NOW + delay / 1e6)) == ["x"]


def test_a_time_without_bounds_is_never_and_not_overdue(rig: ShardRig) -> None:
    for score in ("1e300", "+inf", "8589934592"):
        with case(score):
            rig.renew()
            shard = rig.own()
            rig.push(job("x", "v1", 1))
            rig.client.command("ZADD", rig.prefix + "due", score, "x")  # by a foreign hand
            reply = take(rig, shard, 10, now=NOW + 1e6)
            assert ids_of(reply) == []
            assert reply[1] == pytest.approx((NEVER - NOW - 1e6) * 1e6)


def test_a_time_below_all_bounds_is_due(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1))
    rig.client.command("ZADD", rig.prefix + "due", "-inf", "x")
    assert take(rig, shard, 0)[1] <= 0
    assert ids_of(take(rig, shard, 1)) == ["x"]


# --- paused ---


def test_paused_shard_acknowledges_and_says_so(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1), job("y", "v1", 1))
    shard.in_flight.finish(handed(shard.in_flight.take(1, NOW)))
    rig.run("pause", repr(NOW), "", "1")
    delivery = shard.in_flight.take(10, NOW + 1)
    assert (delivery.jobs, delivery.paused) == ([], True)
    assert rig.read("taken") == {}
    assert rig.count("processed") == 1
    rig.run("pause", repr(NOW), "", "")
    delivery = shard.in_flight.take(10, NOW + 1)
    assert (list(handed(delivery)), delivery.paused) == (["y"], False)


def test_lost_delivery_waits_while_paused(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1))
    rig.lose_reply(shard.in_flight.take_call(1, NOW))
    rig.run("pause", repr(NOW), "", "1")
    assert shard.in_flight.take(1, NOW).jobs == []
    rig.run("pause", repr(NOW), "", "")
    assert handed(shard.in_flight.take(1, NOW)) == {"x": ["v1"]}


# --- fencing ---


@pytest.mark.parametrize("limit", [0, 1])
def test_wrong_token_is_refused(rig: ShardRig, limit: int) -> None:
    old = rig.own()
    rig.push(job("x", "v1", 1), job("y", "v1", 1))
    old.in_flight.take(1, NOW)
    old.in_flight.finish(["x"])
    rig.crash("second")
    before = rig.snapshot()
    with pytest.raises(LeaseLost):
        old.in_flight.take(limit, NOW + 1)
    assert rig.snapshot() == before
    assert old.lease.current is None
    assert not old.in_flight.unacknowledged


def test_token_is_refused_when_the_lease_has_run_out(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1))
    rig.lease_runs_out()
    before = rig.snapshot()
    with pytest.raises(LeaseLost):
        shard.in_flight.take(1, NOW)
    assert rig.snapshot() == before


# --- what must not stop a shard ---


def test_orphan_without_payloads_does_not_stop_the_shard(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1))
    shard.in_flight.take(1, NOW)
    shard.in_flight.fail([retry("x", 0, delay=0)], NOW)
    rig.push(job("y", "v1", 1), now=NOW + 1)
    rig.client.command("DEL", rig.prefix + "payloads:x")
    assert handed(shard.in_flight.take(10, NOW + 1)) == {"y": ["v1"]}
    shard.in_flight.finish(["y"])
    shard.in_flight.take(0, NOW + 1)
    assert rig.names() == REMAINS


def test_of_an_orphan_nothing_is_left_that_would_expire(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1, ttl=60))
    rig.client.command("DEL", rig.prefix + "payloads:x")
    assert shard.in_flight.take(10, NOW + 1).jobs == []
    assert rig.names() == REMAINS


def test_many_orphans_do_not_hide_what_is_behind_them(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(*(job(name, "v1", 1) for name in "abcdef"))
    for name in "abcde":
        rig.client.command("DEL", rig.prefix + f"payloads:{name}")
    reply = take(rig, shard, 1, now=NOW + 1)
    for _ in range(4):
        if len(reply) == 4:
            assert reply[1] == 0  # look again
            reply = take(rig, shard, 1, now=NOW + 1)
    assert ids_of(reply) == ["f"]


def test_undecodable_payloads_are_told_apart_and_can_be_buried_singly(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1), job("x", b"{not json", 2), job("x", "v3", 3), job("y", b"\xff", 1))
    delivery = shard.in_flight.take(10, NOW + 1)
    assert handed(delivery) == {"x": ["v1", "v3"], "y": []}
    assert delivery.jobs[0].job(load_payload).payloads == [("v1", 1), ("v3", 3)]
    assert [(item.id, item.payload) for item in delivery.undecodable] == [("x", b"{not json"), ("y", b"\xff")]
    shard.in_flight.bury([(item.id, item.reason.encode(), [item.payload]) for item in delivery.undecodable], NOW + 1)
    assert rig.read("morgue:payloads:x") == {b"{not json": 2}
    assert rig.read("morgue:payloads:y") == {b"\xff": 1}
    assert rig.read("taken:payloads:x") == {"v1": 1, "v3": 3}
    assert set(rig.read("taken")) == {"x"}
    shard.in_flight.finish(["x"])
    shard.in_flight.keep_finished()
    shard.in_flight.take(0, NOW + 1)
    assert rig.count("processed") == 1
    assert rig.names() == REMAINS | {"morgue", "morgue:errors", "morgue:payloads:x", "morgue:payloads:y"}


def test_id_that_is_no_text_comes_back_as_it_went_in(rig: ShardRig) -> None:
    raw = b"\xff\xfe"
    rig.push((raw, b"1", b"1", b""))
    shard = rig.own()
    (taken,) = shard.in_flight.take(1, NOW).jobs
    shard.in_flight.finish([taken.id])
    shard.in_flight.take(0, NOW)
    assert rig.names() == REMAINS


def test_take_survives_script_flush(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1))
    rig.client.command("SCRIPT", "FLUSH")
    assert handed(shard.in_flight.take(1, NOW)) == {"x": ["v1"]}


def test_jobs_of_a_trip_are_bounded_whatever_the_limit(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(*(job(f"x{n}", "v1", 1) for n in range(MAX_DELIVERY_JOBS)))
    rig.push(job("last", "v1", 1))
    delivery = shard.in_flight.take(10 * MAX_DELIVERY_JOBS, NOW + 1)
    assert len(delivery.jobs) == MAX_DELIVERY_JOBS
    shard.in_flight.finish(handed(delivery))
    shard.in_flight.finish(handed(shard.in_flight.take(10 * MAX_DELIVERY_JOBS, NOW + 1)))
    shard.in_flight.take(0, NOW + 1)
    assert rig.count("processed") == MAX_DELIVERY_JOBS + 1
    assert rig.names() == REMAINS


def test_fence_of_a_trip_is_that_of_its_lease(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1))
    delivery = shard.in_flight.take(1, NOW)
    assert delivery.lease is shard.lease.current
    rig.lease_runs_out()
    shard.lease.acquire(TTL, NOW)
    assert shard.lease.current is not None
    assert shard.lease.current.fence == delivery.lease.fence


def test_taking_wakes_nobody(rig: ShardRig, wake: Channel) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1))
    wake.messages()
    shard.in_flight.finish(handed(shard.in_flight.take(1, NOW)))
    shard.in_flight.take(0, NOW)
    assert wake.messages() == []


def test_a_delivery_is_not_numbered_as_an_earlier_one_when_redis_lost_the_count(rig: ShardRig) -> None:
    """Redis came back without its last second, in which the jobs in hand were taken."""
    shard = rig.own()
    rig.push(job("x", "v1", 1))
    before = rig.client.command("HGETALL", rig.prefix + "meta")
    shard.in_flight.take(1, NOW)
    rig.client.command("DEL", rig.prefix + "meta", rig.prefix + "taken", rig.prefix + "taken:payloads:x")
    rig.client.command("HSET", rig.prefix + "meta", *before)
    rig.push(job("x", "v1", 1), job("x", "v2", 2))
    shard.in_flight.finish(["x"])
    shard.in_flight.keep_finished()
    call = shard.in_flight.take_call(1, NOW)
    rig.lose_reply(call)
    (reply,) = rig.client.run_many([call])  # it acknowledges what was taken before, and not what it has just taken
    delivery = shard.in_flight.took(reply)
    assert handed(delivery) == {"x": ["v1", "v2"]}


def test_of_a_lost_reply_nothing_stays_behind_when_fewer_are_asked_for_and_not_all_are_finished(rig: ShardRig) -> None:
    """As a consumer does it, which has several deliveries in hand."""
    rig.push(*(job(name) for name in "abcde"))
    shard = rig.own()
    rig.lose_reply(shard.in_flight.take_call(4, NOW + 1))
    got = [*handed(shard.in_flight.take(1, NOW + 1))]
    got += handed(shard.in_flight.take(2, NOW + 1))
    rig.lose_reply(shard.in_flight.take_call(1, NOW + 1))
    got += handed(shard.in_flight.take(10, NOW + 1))
    assert sorted(got) == list("abcde")
    assert len(rig.read("taken")) == 5
    assert handed(shard.in_flight.take(10, NOW + 1)) == {}
    deliveries = {name: record[0] for name, record in rig.read("taken").items()}
    for name, delivery in deliveries.items():
        shard.in_flight.write([shard.in_flight.ack_report([name], delivery)])
    assert rig.read("taken") == {}
    assert rig.count("processed") == 5
