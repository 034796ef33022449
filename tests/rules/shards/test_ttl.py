"""Payloads with a ttl: never handed out when they have expired, and removed then; and how the morgue is bounded."""

import itertools
import math
from dataclasses import replace
from typing import cast

import pytest

from lowq.errors import RedisUnavailable
from lowq.options import QueueOptions
from lowq.shards.shard import Sweeper
from lowq.store import Client
from tests.rows import case
from tests.rules.support import NOW, ShardRig, exhausted, handed, job, report, retry
from tests.tiers import real_redis_often

LONG = "long " * 1000
#: What is left of a shard whose payloads have all expired, or were performed.
LEFT = {"meta", "pushed", "lease"}


@pytest.fixture
def owned(rig: ShardRig) -> ShardRig:
    rig.own()
    return rig


def take(rig: ShardRig, now: float, limit: int = 10) -> dict[str, list[object]]:
    return handed(rig.shard.in_flight.take(limit, now))


def sweep(rig: ShardRig, now: float, size: int = 500, ttl: float | str = "", most: int | str = "") -> list[object]:
    reply: list[object] = rig.run("sweep", repr(now), size, ttl, most)
    return reply


@pytest.mark.parametrize("payload", ["short", LONG])
def test_an_expired_payload_is_not_handed_out_and_nothing_is_left_of_it(owned: ShardRig, payload: str) -> None:
    owned.push(job("a", payload, ttl=10), job("b", payload, ttl=20))
    assert take(owned, NOW + 10) == {"b": [payload]}
    owned.shard.in_flight.finish(["b"])
    assert take(owned, NOW + 11) == {}
    assert owned.names() == LEFT
    assert owned.count("expired") == 1
    assert owned.count("processed") == 1


def test_whoever_pushed_without_a_ttl_gets_it_performed(rig: ShardRig) -> None:
    ttls: list[float | None] = [10, None]
    names: list[list[str]] = [[], ["w"]]
    for first, others in itertools.product(ttls, names):
        with case(first, others):
            rig.renew()
            rig.own()
            rig.push(job("a", "v", 1, ttl=first), *(job("a", other, 2, ttl=10) for other in others))
            rig.push(job("a", "v", 1, ttl=None if first else 10))
            assert take(rig, NOW + 10) == {"a": ["v"]}


def test_what_has_expired_is_not_buried_or_kicked_and_beats_nothing_that_lives(rig: ShardRig) -> None:
    """Though nothing has swept it: payloads that expire at NOW + 10, and what happens at NOW + 11."""
    later, client = repr(NOW + 11), rig.client

    def begun(*, taken: bool, words: str = "") -> ShardRig:
        client.command("FLUSHALL")
        rig = ShardRig(client.url, client=client, max_crash_count=1)
        rig.own()
        rig.push(job("a", "v", 5, ttl=10), job("b", "v", 5, ttl=10), job("b", "w", 6), words=words)
        if taken:
            take(rig, NOW + 1)
        return rig

    rig = begun(taken=False)
    assert rig.run("bury", later, "", "", "", "", "a", "why", 0, "b", "why", 0) == [0, 1]
    assert (rig.read("morgue"), rig.read("morgue:payloads:b")) == ({"b": NOW + 11}, {"w": 6})
    assert rig.names() == LEFT | {"morgue", "morgue:payloads:b", "morgue:errors"}

    rig = begun(taken=True)
    report(rig.shard, "bury", [("a", b"why", ()), ("b", b"why", ())], NOW + 11)
    assert (rig.read("morgue"), rig.read("morgue:payloads:b")) == ({"b": NOW + 11}, {"w": 6})

    rig = begun(taken=True)
    report(rig.shard, "fail", [exhausted("a"), exhausted("b")], NOW + 11)
    assert (rig.read("morgue"), rig.read("morgue:payloads:b")) == ({"b": NOW + 11}, {"w": 6})

    rig = begun(taken=True)
    rig.crash("second", NOW + 11)  # poison
    assert (rig.read("morgue"), rig.read("morgue:payloads:b")) == ({"b": NOW + 11}, {"w": 6})

    rig = begun(taken=True)
    report(rig.shard, "release", [("a", None), ("b", None)], NOW + 11)
    assert (rig.names(), rig.read("payloads:b")) == (LEFT | {"due", "payloads:b"}, {"w": 6})
    assert rig.count("expired") == 2

    # Of two equal payloads the one that lives keeps its own score and time.
    rig = begun(taken=True)
    rig.push(job("a", "v", 1, ttl=5), job("b", "v", 1, ttl=5), job("b", "x", 1), now=NOW + 2)
    report(rig.shard, "fail", [retry("b")], NOW + 8)
    assert rig.read("payloads:b") == {"v": 5, "w": 6, "x": 1}
    assert rig.read("expires:b") == {"v": NOW + 10}

    rig = begun(taken=False)
    rig.run("bury", repr(NOW + 1), "", "", "", "", "a", "why", 0, "b", "why", 0)
    rig.push(job("a", "v", 1, ttl=5), job("b", "v", 1, ttl=5), job("b", "x", 7, ttl=20), now=NOW + 2)
    rig.push(job("b", "w", 6, ttl=20), now=NOW + 2)  # equal to one that is buried, which never expires
    assert rig.run("kick", later, "", "", "a", "b") == [1, 1]
    assert (rig.read("payloads:a"), rig.read("payloads:b")) == ({"v": 5}, {"v": 5, "w": 6, "x": 7})
    assert rig.read("expires:b") == {"x": NOW + 22}  # what waited keeps its ttl
    assert rig.read("expires") == {"b": NOW + 22}

    # With the policy latest one that lives beats one with a higher score that has expired.
    rig = begun(taken=False, words=" merge=latest")
    rig.run("bury", repr(NOW + 1), "", "", "", "", "a", "why", 0)
    rig.push(job("a", "higher", 9, ttl=5), now=NOW + 2, words=" merge=latest")
    assert rig.run("kick", later, "", "", "a") == [1]
    assert take(rig, NOW + 12) == {"a": ["v"], "b": ["w"]}

    rig = begun(taken=True, words=" merge=latest")
    rig.push(job("b", "higher", 9, ttl=5), now=NOW + 2, words=" merge=latest")
    report(rig.shard, "fail", [retry("b", delay=0.0)], NOW + 8)
    assert take(rig, NOW + 12) == {"b": ["w"]}


def push_many(rig: ShardRig, count: int, job_id: str = "", words: str = "") -> None:
    """So many payloads that expire at NOW + 10: of one id, or each of its own."""
    for start in range(0, count, 500):
        numbers = range(start, min(start + 500, count))
        rig.push(*(job(job_id or f"{n}", f"v{n}", ttl=10, priority=5) for n in numbers), words=words)


def test_more_than_one_take_sweeps_has_expired(owned: ShardRig) -> None:
    push_many(owned, 1000)
    owned.push(job("alive", "v", priority=5), now=NOW + 1)
    found: dict[str, list[object]] = {}
    takes = 0
    while not found:
        delivery = owned.shard.in_flight.take(10, NOW + 10)
        found, takes = handed(delivery), takes + 1
        assert found or delivery.delay == 0, "it is to be asked again at once"
    assert (found, owned.count("expired")) == ({"alive": ["v"]}, 1000)
    assert takes < 12


@real_redis_often
@pytest.mark.parametrize("count", [1, 2, 3000])
def test_what_never_reached_its_taker_is_not_handed_out_again_when_it_has_expired(rig: ShardRig, count: int) -> None:
    shard = rig.own("many", max_payloads=3000)
    push_many(rig, count, "a")
    rig.push(job("a", "lives", NOW + 1, ttl=100))
    rig.lose_reply(shard.in_flight.take_call(1, NOW + 1))
    assert list(handed(shard.in_flight.take(1, NOW + 60)).values()) in ([], [["lives"]])
    assert rig.count("expired") == count


# --- the dead and the living ---


def test_the_dead_that_nobody_has_swept_take_no_room(owned: ShardRig) -> None:
    push_many(owned, 1000, words=" capacity=1000")
    fresh = [job(f"fresh {number}", "v") for number in range(1000)]
    assert owned.push(*fresh, now=NOW + 60, words=" capacity=1000") == 1000
    assert owned.count("expired") == 1000


@pytest.mark.parametrize("others", [[], ["w"]])
def test_an_equal_payload_does_not_join_one_that_has_expired(owned: ShardRig, others: list[str]) -> None:
    owned.push(job("a", "v", 1, ttl=10, perform_at=NOW + 3600), *(job("a", other, 2, ttl=10) for other in others))
    owned.push(job("a", "v", 1, ttl=100), now=NOW + 60)
    assert take(owned, NOW + 61) == {"a": ["v"]}  # nor does it wait for as long as that one would have
    assert owned.count("expired") == 1 + len(others)


# --- sweeping ---


def test_a_sweep_removes_a_bounded_number_of_payloads_of_one_id(owned: ShardRig) -> None:
    push_many(owned, 1000, "a")
    more: object = 1
    while more:
        before = owned.count("expired")
        _, _, more, *_ = sweep(owned, NOW + 10, 100)
        assert owned.count("expired") - before <= 150
    assert owned.count("expired") == 1000
    assert owned.names() == LEFT


def test_a_sweep_removes_a_bounded_number_of_those_that_expired_first(owned: ShardRig) -> None:
    owned.push(*(job(f"{number}", "v", ttl=10 + number) for number in range(10)))
    assert sweep(owned, NOW + 100, 4) == [4, 0, 1, [b"0", 1, b"1", 1, b"2", 1, b"3", 1], []]
    assert owned.read("due").keys() == {"4", "5", "6", "7", "8", "9"}
    assert sweep(owned, NOW + 15, 100) == [2, 0, 0, [b"4", 1, b"5", 1], []]


def test_a_sweep_reads_and_frees_a_bounded_number_of_bytes(owned: ShardRig) -> None:
    large = "x" * 2**20
    owned.push(*(job(f"whole {number}", large, ttl=10) for number in range(8)))
    for number in range(8):
        owned.push(job("in part", f"{number}{large}", ttl=10))
    owned.push(job("in part", "lives"))
    sweeps: list[tuple[int, int]] = []
    while not sweeps or sweeps[-1][1]:
        count, _, more, *_ = sweep(owned, NOW + 10)
        assert isinstance(count, int)
        assert isinstance(more, int)
        sweeps.append((count, more))
    assert sum(count for count, _ in sweeps) == 16
    assert max(count for count, _ in sweeps) == 4, "of a mebibyte each"
    assert owned.read("due").keys() == {"in part"}
    assert take(owned, NOW + 10) == {"in part": ["lives"]}


def test_a_push_for_an_id_with_any_number_of_expired_payloads_looks_only_for_equal_ones(owned: ShardRig) -> None:
    owned.push(*(job("a", f"v{number}", number, ttl=10) for number in range(300)), job("a", "lives", 1000))
    owned.push(job("a", "v7", 7), job("a", "new", 2000), now=NOW + 10)
    assert owned.count("expired") == 1
    assert len(owned.read("payloads:a")) == 302
    assert take(owned, NOW + 10) == {}, "a take sweeps first, and so many steps at once"
    while sweep(owned, NOW + 10)[2]:
        pass
    assert take(owned, NOW + 10) == {"a": ["v7", "lives", "new"]}


@pytest.mark.parametrize("store_url", ["redis"], indirect=True)
def test_while_nothing_has_expired_a_sweep_costs_one_look(owned: ShardRig) -> None:
    owned.push(*(job(f"{number}", "v", ttl=10) for number in range(100)))
    sweep(owned, NOW)
    owned.client.command("CONFIG", "RESETSTAT")
    assert sweep(owned, NOW) == [0, 0, 0, [], []]
    stats = owned.client.command("INFO", "commandstats").decode()
    names = {line.split(":")[0] for line in stats.split() if line.startswith("cmdstat_")}
    assert names - {"cmdstat_config|resetstat", "cmdstat_info", "cmdstat_evalsha", "cmdstat_hello"} == {
        "cmdstat_zrange"
    }


def bury(rig: ShardRig, *ids: str) -> None:
    for number, job_id in enumerate(ids):
        rig.push(job(job_id, "v"))
        assert rig.run("bury", repr(NOW + number), "", "", "", "", job_id, "", 0) == [1]


def test_what_lies_in_the_morgue_for_too_long_or_is_too_much_for_it_is_removed_oldest_first(owned: ShardRig) -> None:
    bury(owned, *"ABCabcdef")
    assert sweep(owned, NOW + 62, ttl=60) == [0, 3, 0, [], [b"A", b"B", b"C"]]
    assert "morgue:payloads:A" not in owned.names()
    assert sweep(owned, NOW + 10, most=4) == [0, 2, 0, [], [b"a", b"b"]]
    assert sweep(owned, NOW + 10, most=4) == [0, 0, 0, [], []]
    assert sweep(owned, NOW + 10, 3, most=0) == [0, 3, 1, [], [b"c", b"d", b"e"]]
    assert owned.read("morgue").keys() == owned.read("morgue:errors").keys() == {"f"}


# --- the sweeper ---


def test_the_sweeper_goes_on_until_nothing_has_expired_also_after_an_outage(rig: ShardRig) -> None:
    shard = rig.own(now=None)
    rig.push(*(job(f"{number}", "v", ttl=0.001) for number in range(350)), now=rig.server_time() - 1)
    sweeper = Sweeper(lambda: [shard], [], 1)
    assert sweeper.sweep(rig.client, 100.0) == math.inf, "nobody has told that there is a ttl"
    shard.in_flight.take(0, rig.server_time() - 1)
    assert sweeper.sweep(rig.client, 100.5) == math.inf

    class Away:
        def run_many(self, _calls: object) -> list[object]:
            return [RedisUnavailable("away")]

    with pytest.raises(RedisUnavailable):
        sweeper.sweep(cast(Client, Away()), 101.0)
    now = 102.0
    assert sweeper.sweep(rig.client, now) == now  # so many writes, and then it is the turn of something else
    assert 0 < rig.count("expired") < 350
    while sweeper.sweep(rig.client, now) == now:
        pass
    assert (rig.count("expired"), rig.read("due")) == (350, {})
    assert sweeper.sweep(rig.client, now + 0.1) == now + 1


def test_the_sweeper_bounds_the_morgue_by_shard(rig: ShardRig) -> None:
    shard = rig.own(now=None)
    bury(rig, *"abcdef")
    options = QueueOptions(rig.queue, rig.shards_count)

    def left(options: QueueOptions) -> str:
        Sweeper(lambda: [shard], [options], 500).sweep(rig.client, 1.0)
        return "".join(sorted(rig.read("morgue")))

    assert left(options) == "abcdef"
    assert left(replace(options, queue_name="another", morgue_max=1)) == "abcdef"
    assert left(replace(options, morgue_max=2 * rig.shards_count - 1)) == "ef"
    assert left(replace(options, morgue_ttl=3600.0)) == "ef"  # they were buried in the future
    assert left(replace(options, morgue_max=1)) == "f"
