"""Trace contexts: beside the payloads of an id from its push until it is done with, and nothing is left of them."""

from collections.abc import Callable

import pytest

from tests.rows import case
from tests.rules.support import NOW, REMAINS, ShardRig, exhausted, handed, job, report, retry, solo

LATER = NOW + 1000
WEEK = 7 * 86400


@pytest.fixture
def owned(rig: ShardRig) -> ShardRig:
    rig.own()
    return rig


def push(rig: ShardRig, job_id: str, context: str, payload: str = "v", score: float = 1) -> None:
    rig.push(job(job_id, payload, score), words=f" trace={context}")


def take(rig: ShardRig, now: float = NOW, limit: int = 10) -> dict[str, tuple[str, ...]]:
    """The contexts of what is handed out."""
    jobs = rig.shard.in_flight.take(limit, now).jobs
    return {item.id: rig.shard.in_flight.traces_of(item.id) for item in jobs}


def traces(rig: ShardRig) -> set[str]:
    """The names of keys that hold contexts."""
    return {name for name in rig.names() if "traces:" in name}


def test_a_context_is_handed_out_with_its_id_and_gone_with_the_acknowledgement(owned: ShardRig) -> None:
    push(owned, "a", "one")
    owned.push(job("b", "v", 1))
    assert traces(owned) == {"traces:a"}
    assert WEEK - 60 < owned.client.command("TTL", owned.prefix + "traces:a") <= WEEK
    assert take(owned) == {"a": ("one",), "b": ()}
    assert traces(owned) == {"taken:traces:a"}
    assert WEEK - 60 < owned.client.command("TTL", owned.prefix + "taken:traces:a") <= WEEK
    owned.shard.in_flight.finish(["a", "b"])
    assert take(owned) == {}
    assert owned.names() == REMAINS
    assert owned.shard.in_flight.traces_of("a") == ("one",), "until the next delivery"


def test_the_contexts_of_all_pushes_that_merge_are_kept_each_once_oldest_first(owned: ShardRig) -> None:
    push(owned, "a", "one")
    push(owned, "a", "x" * 257)  # which is too long, and is not kept
    push(owned, "a", "two")  # an equal payload
    push(owned, "a", "three", "w", 2)
    push(owned, "a", "one", "x", 3)
    owned.push(job("a", "y", 4), job("a", "z", 5), job("b", "v", 1), words=" trace=four")
    assert handed(owned.shard.in_flight.take(10, LATER)) == {"a": ["v", "w", "x", "y", "z"], "b": ["v"]}
    assert owned.shard.in_flight.traces_of("a") == ("one", "two", "three", "four")
    assert owned.shard.in_flight.traces_of("b") == ("four",)


@pytest.mark.parametrize("long", [False, True])
def test_retries_releases_and_crashes_keep_them_with_what_came_meanwhile(owned: ShardRig, long: bool) -> None:
    push(owned, "a", "one", "v" * 5000 if long else "v")
    assert take(owned) == {"a": ("one",)}
    report(owned.shard, "fail", [retry("a", 0, 10)], NOW)
    push(owned, "a", "two", "w", 2)
    assert take(owned, LATER) == {"a": ("one", "two")}
    push(owned, "a", "three", "x", 3)
    report(owned.shard, "fail", [solo("a")], LATER)
    assert take(owned, LATER) == {"a": ("one", "two", "three")}
    report(owned.shard, "release", [("a", 5.0)], LATER)
    assert take(owned, LATER + 5) == {"a": ("one", "two", "three")}
    second = owned.crash("second", LATER + 10)
    jobs = second.in_flight.take(10, LATER + 20).jobs
    assert [item.id for item in jobs] == ["a"]
    assert second.in_flight.traces_of("a") == ("one", "two", "three")
    second.in_flight.finish(["a"])
    second.in_flight.take(10, LATER + 20)
    assert traces(owned) == set()


def test_of_an_id_that_is_taken_in_parts_every_part_has_them(rig: ShardRig) -> None:
    shard = rig.own("parts", max_payloads=2)
    for number in range(5):
        push(rig, "a", f"c{number}", f"v{number}", number)
    for count in (2, 2, 1):
        (found,) = shard.in_flight.take(10, NOW).jobs
        assert len(found.payloads) == count
        assert shard.in_flight.traces_of("a") == ("c0", "c1", "c2", "c3", "c4")
        shard.in_flight.finish(["a"])
    shard.in_flight.take(10, NOW)
    assert traces(rig) == set()


# --- bounds ---


def test_the_latest_32_are_kept(owned: ShardRig) -> None:
    for number in range(40):
        push(owned, "a", f"c{number}")
    assert take(owned) == {"a": tuple(f"c{number}" for number in range(8, 40))}
    for number in range(40, 50):
        push(owned, "a", f"c{number}")
    report(owned.shard, "release", [("a", None)], NOW)
    assert take(owned) == {"a": tuple(f"c{number}" for number in range(18, 50))}


def test_a_reply_has_64_kib_of_them_and_nothing_is_left_of_the_others_either(owned: ShardRig) -> None:
    ids = [f"id{number:02}" for number in range(20)]
    for number in range(16):
        owned.push(*(job(job_id, "v") for job_id in ids), words=f" trace={number:0256}")
    found = take(owned, LATER, limit=100)
    assert [job_id for job_id in ids if found[job_id]] == ids[:15], "4 KiB each, and newlines"
    assert len(traces(owned)) == 20
    owned.shard.in_flight.finish(ids)
    assert take(owned, LATER) == {}
    assert traces(owned) == set()


@pytest.mark.parametrize("foreign", ["x", "\n", "x\n"])
def test_what_somebody_else_wrote_is_replaced_and_holds_nobody_up(owned: ShardRig, foreign: str) -> None:
    text = foreign * 1_000_000  # whose lines, if each were cut off by itself, would take minutes
    push(owned, "a", "one")
    owned.client.command("SET", owned.prefix + "traces:a", text)
    push(owned, "a", "two", "w")
    assert take(owned) == {"a": ("two",)}
    owned.client.command("SET", owned.prefix + "taken:traces:a", text)
    push(owned, "a", "three", "x")
    report(owned.shard, "release", [("a", None)], NOW)
    assert take(owned) == {"a": ("three",)}


def test_a_key_of_another_type_holds_nobody_up_either(owned: ShardRig) -> None:
    def spoil(name: str) -> None:
        owned.client.command("DEL", owned.prefix + name)
        owned.client.command("LPUSH", owned.prefix + name, "x")

    spoil("traces:a")
    push(owned, "a", "one")
    assert take(owned) == {"a": ("one",)}
    spoil("taken:traces:a")
    push(owned, "a", "two", "w")
    report(owned.shard, "release", [("a", None)], NOW)
    assert take(owned) == {"a": ("two",)}
    report(owned.shard, "release", [("a", None)], NOW)
    spoil("traces:a")
    assert take(owned) == {"a": ()}


# --- the ends of jobs ---


def test_nothing_is_left_of_them_when_an_id_is_buried_deleted_dropped_or_expires(rig: ShardRig) -> None:
    def buried(rig: ShardRig) -> None:
        assert rig.run("bury", repr(NOW), "", "", "", "", "a", "why", 0) == [1]
        rig.run("kick", repr(NOW), "", "", "a")

    def buried_in_flight(rig: ShardRig) -> None:
        take(rig)
        report(rig.shard, "bury", [("a", b"one of them", (b'"v"',))], NOW)
        assert traces(rig) == {"taken:traces:a"}
        report(rig.shard, "bury", [("a", b"all", ())], NOW)

    def exhausted_but_for_one(rig: ShardRig) -> None:
        for payloads_left in (1, 0):
            take(rig)
            report(rig.shard, "fail", [exhausted("a")], NOW)
            assert traces(rig) == ({"traces:a"} if payloads_left else set())

    def poison(rig: ShardRig) -> None:
        shard = rig.shard
        for number in range(3):
            assert [item.id for item in shard.in_flight.take(1, NOW + 10 * number).jobs] == ["a"]
            shard = rig.crash(f"owner {number}", NOW + 10 * number)

    def expired_in_flight(rig: ShardRig) -> None:
        rig.lose_reply(rig.shard.in_flight.take_call(1, NOW))
        assert take(rig, NOW + 5000) == {}

    def dropped(rig: ShardRig) -> None:
        rig.lease_runs_out()
        assert rig.run("drop", "", "", 100, "") == [0, 1]

    ends: list[Callable[[ShardRig], object]] = [
        buried, buried_in_flight, exhausted_but_for_one, poison, dropped,
        lambda rig: rig.run("delete", "", "", "", "", "a"),
        lambda rig: rig.run("sweep", repr(NOW + 5000), 500, "", ""),
        expired_in_flight,
    ]  # fmt: skip
    for end in ends:
        with case(end):
            rig.renew()
            rig.own()
            rig.push(job("a", "v", 1, ttl=4000), job("a", "w", 2, ttl=4000), words=" trace=one")
            end(rig)
            assert traces(rig) == set()


def test_the_doctor_removes_what_is_left_behind(owned: ShardRig) -> None:
    push(owned, "a", "one")
    take(owned)
    push(owned, "a", "two")
    for name in ("traces:lost", "taken:traces:lost"):
        owned.client.command("SET", owned.prefix + name, "x\n")
    for what in ("traces:", "taken:traces:"):
        assert owned.run("examine", "", what, "", "a", "lost") == [b"0", [b"a", b"lost"], b"lost", b"leftovers"]
        assert owned.run("repair", "", what, "a", "lost") == [0, 1]
    assert traces(owned) == {"traces:a", "taken:traces:a"}
