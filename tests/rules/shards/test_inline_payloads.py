"""A single short payload of an id is kept in a hash, several as a sorted set: nobody can tell the difference."""

import itertools
import json
from typing import Any

import pytest

from lowq.codec import load_payload
from lowq.shards.shard import Shard
from tests.rows import case
from tests.rules.support import NOW, REMAINS, ShardRig, as_redis_answers, exhausted, handed, job, jobs_of, report, retry

#: The longest payload that is kept inline, and the shortest that is not: JSON texts.
LONGEST = b'"%s"' % (b"x" * 4094)
TOO_LONG = b'"%s"' % (b"x" * 4095)
#: Text of JSON that holds spaces, what looks like a score, and all that is not ASCII as it is.
ODD = [b'" 1 2 "', b'{"a b": [1, 2, " "]}', '"\N{SNOWMAN} \0 \x7f"'.encode(), b"1 2 3", b"-7", b'""']
SCORES = [0.0, -1.5, 2.0**53, -(2.0**53), 1e308, -1e308, 5e-324, NOW, 1_800_000_000.1234567, 0.1 + 0.2, -1e-7]


def take(rig: ShardRig, shard: Shard, limit: int = 10) -> dict[str, list[tuple[Any, float]]]:
    """What a delivery brings: id -> payloads with their scores."""
    return {item.id: item.job(load_payload).payloads for item in shard.in_flight.take(limit, NOW + 1).jobs}


def test_one_is_inline_all_the_way_and_the_second_makes_it_a_set(rig: ShardRig) -> None:
    rig.push(job("x", "v1", 7))
    assert (rig.form("payloads:x"), rig.read("payloads:x")) == ("inline", {"v1": 7})
    shard = rig.own()
    assert take(rig, shard) == {"x": [("v1", 7)]}
    assert rig.form("taken:payloads:x") == "record"
    report(shard, "fail", [retry("x")], NOW)
    assert (rig.form("payloads:x"), rig.read("payloads:x")) == ("inline", {"v1": 7})
    shard.in_flight.take(10, NOW + 60)
    report(shard, "fail", [exhausted("x")], NOW)
    for payload, score, form, buried in (
        ("v1", 0, "zset", {"v1": 0}), ("v2", 2, "zset", {"v1": 0, "v2": 2}),
    ):  # fmt: skip
        rig.push(job("x", payload, score))
        assert rig.run("bury", "", "", "", "", "", "x", "", 0) == [1]
        assert (rig.form("morgue:payloads:x"), rig.read("morgue:payloads:x")) == (form, buried)
    rig.push(job("x", "v3", 3))
    assert rig.run("kick", "", "", "", "x") == [1]
    assert rig.read("payloads:x") == {"v1": 0, "v2": 2, "v3": 3}
    assert rig.run("delete", "", "", "", "", "x") == [1]
    assert rig.names() == REMAINS


def test_equal_ones_stay_inline_with_the_lowest_score(rig: ShardRig) -> None:
    for first, second in ((2, 1), (9, 10), (10, 9), (-1, 0), (1e-7, 2)):
        with case(first, second):
            rig.renew()
            rig.push(job("x", "v1", first))
            rig.push(job("x", "v1", second))
            rig.push(job("y", "v1", first), job("y", "v1", second))
            for key in ("payloads:x", "payloads:y"):
                assert (rig.form(key), rig.read(key)) == ("inline", {"v1": min(first, second)})


def test_scores_are_kept_to_the_last_digit_and_payloads_may_be_any_bytes(rig: ShardRig) -> None:
    for score, data in zip(SCORES, itertools.cycle(ODD), strict=False):
        with case(score, data):
            rig.renew()
            rig.push(job("x", data, score), job("y", "v1", score), job("y", data, score))
            written, payload = rig.inline("payloads:x").split(b" ", 1)
            assert (float(written), payload) == (score, data)
            assert data in rig.client.command("ZRANGE", rig.prefix + "payloads:y", 0, -1)
            assert ("v1", score) in take(rig, rig.own())["y"]


def test_long_ones_are_never_inline(rig: ShardRig) -> None:
    huge = b'"%s"' % (b"y" * (2**20 - 2))
    rig.push(job("fits", LONGEST, 1), job("long", TOO_LONG, 1), job("huge", huge, 1))
    assert [rig.form(f"payloads:{name}") for name in ("fits", "long", "huge")] == ["inline", "zset", "zset"]
    rig.push(job("fits", huge, 0), job("huge", LONGEST, 2))
    shard = rig.own()
    expected = {"fits": [huge, LONGEST], "long": [TOO_LONG], "huge": [huge, LONGEST]}
    for job_id, payloads in expected.items():
        found: list[str] = []
        while len(found) < len(payloads):  # a reply has no room for more than one that is huge
            delivery = handed(shard.in_flight.take(1, NOW + 1))
            found += delivery[job_id]
            shard.in_flight.finish([job_id])
        assert found == [json.loads(data) for data in payloads]


def test_in_its_record_it_may_be_any_bytes(rig: ShardRig) -> None:
    for data in (*ODD, b"", b" ", b"\n", b"1 2\n", b"a\n\n b "):
        with case(data):
            rig.renew()
            rig.push(job("x", data, 1.5))
            shard = rig.own()
            call = shard.in_flight.take_call(1, NOW)
            (first,) = jobs_of(rig.client.run_many([as_redis_answers(call)])[0])
            (again,) = jobs_of(rig.client.run_many([as_redis_answers(call)])[0])
            assert first[3:] == again[3:] == [data, b"1.5"]
            rig.crash("second")
            assert rig.inline("payloads:x") == b"1.5 " + data


def test_what_is_no_payload_of_ours_is_not_lost_on_the_way(rig: ShardRig) -> None:
    for text in (b" p", b"1\t2 p", b"1\n p", b"x p"):
        with case(text):
            rig.renew()
            rig.push(job("x", "v1", 1))
            rig.client.command("HSET", rig.prefix + "payloads", "x", text)
            shard = rig.own()
            call = shard.in_flight.take_call(1, NOW)
            rig.lose_reply(call)
            rig.crash("second")
            assert rig.inline("payloads:x") == text


@pytest.mark.parametrize("store_url", ["redis"], indirect=True)
def test_a_job_of_100_bytes_takes_less_than_320(rig: ShardRig) -> None:
    def used() -> int:
        rig.client.command("SCRIPT", "FLUSH", "SYNC")  # newer servers count what Lua has left behind
        return int(rig.client.server_info()["used_memory"])

    rig.push(job("warm"))
    before = used()
    for first in range(0, 20_000, 1000):
        rig.push(*(job(f"order-{n}", b'"%098d"' % n) for n in range(first, first + 1000)))
    assert (used() - before) / 20_000 < 320


@pytest.mark.parametrize("store_url", ["redis"], indirect=True)
def test_no_form_is_found_out_by_an_error(rig: ShardRig) -> None:
    rig.client.command("CONFIG", "RESETSTAT")
    rig.push(job("x", "v1", 1), job("y", "v1", 1), job("y", "v2", 2))
    rig.push(job("x", "v2", 2), job("y", "v3", 3))
    shard = rig.own()
    shard.in_flight.take(10, NOW + 1)
    rig.push(job("x", "v1", 1), job("y", "v1", 1))
    report(shard, "fail", [exhausted("x"), retry("y")], NOW)
    rig.run("fetch_jobs", "", "", 10, 1000, "x", "y")
    rig.run("bury", "", "", "", "", "", "x", "", 0, "y", "", 0)
    rig.run("delete", "", "", "", "", "x", "y")
    assert [name for name in rig.client.server_info() if name.startswith("errorstat_")] == []
