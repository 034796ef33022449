"""take: acknowledges the previous batch and takes the next, in one delivery."""

import pytest

from lowq.codec import load_payload
from lowq.shards.delivery import MAX_DELIVERY_BYTES, MAX_DELIVERY_JOBS, Failure
from tests.rows import case
from tests.rules.support import NEVER, NOW, REMAINS, ShardRig, handed, job, report, retry, solo
from tests.tiers import real_redis_often

MIB = 2**20


# --- acknowledging ---


def test_ack_cites_id_and_delivery(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1))
    shard.in_flight.take(1, NOW)
    before = rig.snapshot()

    def acknowledge(delivery: int, *ids: str) -> int:
        reply: list[int] = rig.run("ack_and_take", repr(NOW), shard.lease.token, 1, 0, 1000, MIB, delivery, *ids)
        return reply[3]

    for delivery, ids in ((2, "x"), (0, "x"), (1, "y"), (1, "X")):
        assert acknowledge(delivery, ids) == 0
        assert rig.snapshot() == before
    assert acknowledge(1, "x", "x") == 1, "twice in one call counts once"
    assert rig.count("processed") == 1
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


# --- lost replies ---


@pytest.mark.parametrize("outcome", [retry("x", 0, delay=0), solo("x")], ids=["retrying", "solo"])
def test_retrying_and_solo_ids_come_alone_behind_those_before_them(rig: ShardRig, outcome: Failure) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1))
    shard.in_flight.take(1, NOW)
    rig.push(job("z", "v1", 1), now=NOW - 1)
    report(shard, "fail", [outcome], NOW)
    rig.push(job("y", "v1", 1), now=NOW + 1)
    for expected in ("z", "x", "y"):
        delivery = shard.in_flight.take(10, NOW + 1)
        assert list(handed(delivery)) == [expected]
        assert (delivery.delay is None) == (expected == "y"), "else it is due now"
        shard.in_flight.finish([expected])


# --- many payloads, large payloads ---


def test_every_max_payloads_is_exact(rig: ShardRig) -> None:
    for count in (1, 2, 18, 35):
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


def test_delay_is_never_too_short(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1, perform_at=NOW + 60.0000004))
    delay = shard.in_flight.take(1, NOW).delay
    assert delay is not None
    assert list(handed(shard.in_flight.take(1, NOW + delay))) == ["x"]


def test_a_time_beyond_the_bounds_is_never_or_now(rig: ShardRig) -> None:
    for score in ("1e300", "+inf", "8589934592", "-inf"):
        with case(score):
            rig.renew()
            shard = rig.own()
            rig.push(job("x", "v1", 1))
            rig.client.command("ZADD", rig.prefix + "due", score, "x")  # by a foreign hand
            delivery = shard.in_flight.take(10, NOW + 1e6)
            assert list(handed(delivery)) == (["x"] if score == "-inf" else [])
            assert delivery.delay == (None if score == "-inf" else pytest.approx(NEVER - NOW - 1e6))


# --- what must not stop a shard ---


def test_orphans_without_payloads_stop_nobody_and_hide_nothing(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(*(job(name, "v1", 1) for name in "abcdef"))
    shard.in_flight.take(1, NOW)
    report(shard, "fail", [retry("a", 0, delay=0)], NOW)
    for name in "abcde":
        rig.client.command("HDEL", rig.prefix + "payloads", name)
    found: list[str] = []
    for _ in range(5):
        delivery = shard.in_flight.take(1, NOW + 1)
        found += handed(delivery)
        assert found or delivery.delay == 0, "look again"
        shard.in_flight.finish(handed(delivery))
    assert found == ["f"]
    assert rig.names() == REMAINS


def test_undecodable_payloads_are_told_apart_and_can_be_buried_singly(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1), job("x", b"{not json", 2), job("x", "v3", 3), job("y", b"\xff", 1))
    delivery = shard.in_flight.take(10, NOW + 1)
    assert handed(delivery) == {"x": ["v1", "v3"], "y": []}
    assert delivery.jobs[0].job(load_payload).payloads == [("v1", 1), ("v3", 3)]
    assert [(item.id, item.payload) for item in delivery.undecodable] == [("x", b"{not json"), ("y", b"\xff")]
    report(shard, "bury", [(item.id, item.reason.encode(), [item.payload]) for item in delivery.undecodable], NOW + 1)
    assert rig.read("morgue:payloads:x") == {b"{not json": 2}
    assert rig.read("morgue:payloads:y") == {b"\xff": 1}
    assert rig.read("taken:payloads:x") == {"v1": 1, "v3": 3}
    assert set(rig.read("taken")) == {"x"}
    shard.in_flight.finish(["x"])
    shard.in_flight.in_hand.clear()
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
    shard.in_flight.in_hand.clear()
    call = shard.in_flight.take_call(1, NOW)
    rig.lose_reply(call)
    (reply,) = rig.client.run_many([call])  # it acknowledges what was taken before, and not what it has just taken
    delivery = shard.in_flight.read_delivery(reply)
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
