"""push: payloads merge, ids become due, times come from the shard's own clock."""

import time
from collections.abc import Iterator

import pytest

from lowq.codec import EncodedJob, load_payload
from lowq.errors import LeaseLost, RedisFull
from lowq.store import Refusal
from lowq.store.shard import RenewReply
from tests.redis_server import RedisServer
from tests.rows import case
from tests.rules.support import NOW, TICK, TTL, Channel, ShardRig, emptied_rig, handed, job, report, retry, run_script

# --- ids, payloads and times ---


def test_payloads_keep_their_bytes_and_an_id_may_be_any_text(rig: ShardRig) -> None:
    data = bytes(range(256))
    ids = ("x", "a:b", "{x}", " ", "héllo \N{SNOWMAN}", "\r\n\0", "*?[x]")
    for job_id in ids:
        rig.push(job(job_id, data, 1))
        assert rig.client.command("HGET", f"{rig.prefix}payloads", job_id) == b"1 " + data
    rig.push(job("x", data + b" ", 2))
    assert rig.client.command("ZRANGE", rig.prefix + "payloads:x", 0, -1) == [data, data + b" "]
    shard = rig.own()
    delivery = shard.in_flight.take(10, NOW + 1)
    assert len(delivery.jobs) == len(ids)
    shard.in_flight.finish(handed(delivery))
    shard.in_flight.take(0, NOW + 1)
    assert rig.read("taken") == {}


def test_jobs_of_one_call_get_scores_in_their_order_and_of_two_times_of_an_id_the_first_counts(rig: ShardRig) -> None:
    rig.push(*(job("z", f"v{n}") for n in (3, 1, 2)))
    assert list(rig.read("payloads:z")) == ["v3", "v1", "v2"]
    for others in (5, 40):
        rig.push(
            job(f"x{others}", "v1"), *(job(f"id{number}", "v1") for number in range(others)),
            job(f"x{others}", "v2", delay=3600), job(f"later{others}", "v1", delay=3600), job(f"later{others}", "v2"),
        )  # fmt: skip
        due = rig.read("due")
        assert due[f"x{others}"] <= NOW + 1
        assert due[f"later{others}"] > NOW + 3000


def test_default_times_are_the_servers_whatever_the_producers_clock_says(
    rig: ShardRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = rig.server_time()
    for version, skew in enumerate((3600.0, -3600.0)):
        if rig.client.url.startswith("redis://"):  # the embedded store has the producer's clock
            skewed = time.time() + skew
            monkeypatch.setattr(time, "time", lambda skewed=skewed: skewed)
        rig.push(job("x", f"v{version}"), now=None)
        monkeypatch.undo()
    scores = rig.read("payloads:x")
    assert before <= scores["v0"] < scores["v1"] <= rig.server_time() + TICK
    assert rig.read("due") == {"x": scores["v0"]}


def test_order_survives_pushes_within_a_microsecond_and_a_server_clock_that_steps_back(rig: ShardRig) -> None:
    ahead = rig.server_time() + 3600  # the server's clock was there before it stepped back
    rig.push(job("x", "first"), now=None)
    rig.set_clock(ahead)
    rig.push(job("x", "v9"), now=None)
    rig.push(job("x", "v1"), job("x", "v5"), now=None)
    rig.push(job("x", "v3"), now=None)
    scores = rig.read("payloads:x")
    assert list(scores) == ["first", "v9", "v1", "v5", "v3"]
    assert [scores["v9"], scores["v1"]] == [ahead + TICK, ahead + TICK + TICK]
    assert float(rig.meta("clock") or 0) == scores["v3"]
    assert handed(rig.own(now=None).in_flight.take(10)) == {"x": ["first", "v9", "v1", "v5", "v3"]}


def test_explicit_now_does_not_move_the_clock_and_is_kept_monotonic_by_it(rig: ShardRig) -> None:
    rig.push(job("x", "v1"), now=NOW + 1000)
    assert rig.meta("clock") is None
    rig.push(job("x", "v2"), now=None)
    clock = rig.meta("clock")
    assert clock is not None
    rig.push(job("x", "v3"), now=NOW + 1000)
    assert rig.meta("clock") == clock
    rig.set_clock(NOW)
    rig.push(job("y", "v1"), now=NOW - 100)
    assert rig.read("payloads:y") == {"v1": NOW + TICK}


def test_a_job_is_due_when_it_says_to_the_microsecond_and_not_in_the_past(rig: ShardRig) -> None:
    at = NOW + 60.000001
    rig.push(job("x", "v1", at - 1, perform_at=at), job("y", "v1"))
    rig.push(job("past", "v1", perform_at=NOW - 3600), job("delayed", "v1", delay=90.5))
    due = rig.read("due")
    assert (due["x"], due["y"]) == (at, NOW + TICK)
    assert (due["past"], due["delayed"]) == pytest.approx((NOW, NOW + 90.5), abs=1e-5, rel=0)
    assert rig.read("payloads:x") == {"v1": at - 1}
    shard = rig.own()
    jobs = {item.id: item.job(load_payload) for item in shard.in_flight.take(10, at).jobs}
    assert (jobs["x"].perform_at, jobs["y"].payloads) == (at, [("v1", NOW + TICK)])
    assert rig.read("taken")["x"][1:] == (at, -1, "0", at)
    report(shard, "release", [("x", None), ("y", 1.0)], at)
    assert (rig.read("due")["x"], rig.read("due")["y"]) == (at, at + 1)


# --- wake-ups ---


def test_a_push_that_moves_the_head_wakes_with_the_delay_to_it_and_no_other_does(rig: ShardRig, wake: Channel) -> None:
    rows: list[tuple[list[EncodedJob], float, list[float]]] = [
        ([job("x", "v1", 1, perform_at=NOW + 60), job("y", "v1", 1, perform_at=NOW + 30)], NOW, [30]),
        ([job("z", "v1", 1, perform_at=NOW + 10)], NOW + 5, [5]),
        ([job("behind", "v1", 1, perform_at=NOW + 61)], NOW + 5, []),
        ([job("z", "v2", 2)], NOW + 5, []),  # it keeps its time
        ([job("z", "v3", 3), job("now", "v1", 1)], NOW + 5, [0]),
    ]
    for number, (jobs, now, delays) in enumerate(rows):
        with case(number):
            rig.push(*jobs, now=now)
            assert [float(delay) for delay in wake.messages()] == pytest.approx(delays, abs=1e-5)


def test_wake_up_is_for_now_when_the_servers_clock_has_stepped_back(rig: ShardRig, wake: Channel) -> None:
    rig.set_clock(NOW)
    rig.push(job("x", "v1", 1), now=NOW - 3600)
    assert [float(delay) for delay in wake.messages()] == [0]


# --- repeats ---


def test_repeat_of_a_push_whose_reply_was_lost_changes_nothing(rig: ShardRig, wake: Channel) -> None:
    jobs = [job("x", "v1", 1), job("y", "v1", 1)]
    assert rig.push(*jobs, token="t") == 2
    before, _ = rig.snapshot(), wake.messages()
    assert rig.push(*jobs, token="t", repeat=True, now=NOW + 1) == 2
    assert rig.snapshot() == {**before, "meta": {**before["meta"], "repeated": "1"}, "repeated": {"t": 1}}
    assert wake.messages() == []


#: Seconds for which the calls of these tests are to be remembered.
KEEP = 15


def push_many(rig: ShardRig, count: int, now: float, word: str) -> None:
    """As so many calls would leave it."""
    rig.push(job("x", "v1", 1), token=f"{word}0", now=now, keep=KEEP)
    if count > 1:
        rig.client.command("LPUSH", rig.prefix + "pushed", *(f"{word}{number}" for number in range(1, count)))


def is_known(rig: ShardRig, token: str, now: float) -> bool:
    """Whether a repeat of the call changes nothing. Its payload comes again if it does."""
    before = rig.read("payloads:x")
    rig.push(job("x", f"repeat of {token}", 1), token=token, repeat=True, now=now, keep=KEEP)
    return bool(rig.read("payloads:x") == before)


def test_a_call_is_known_for_as_long_as_it_wants_however_many_there_are_meanwhile(store_url: str) -> None:
    for after in (0.0, KEEP, 2 * KEEP - 1.0):
        with case(after), emptied_rig(store_url) as rig:
            push_many(rig, 1, NOW, "t")
            for share in (0.5, 1.0):
                push_many(rig, 600, NOW + after * share, f"at {share}: ")
            assert is_known(rig, "t0", NOW + after)


def test_older_calls_are_forgotten_but_for_the_latest_thousand(rig: ShardRig) -> None:
    for number in range(1, 20):
        push_many(rig, 50, NOW + number * 10 * KEEP, f"{number}: ")
    assert is_known(rig, "1: 0", NOW + 300 * KEEP)
    for number in range(400, 408):
        push_many(rig, 600, NOW + number * KEEP, f"{number}: ")
    assert len(rig.read("pushed")) == 3 * 600  # of this slot and the two before
    assert [is_known(rig, f"{number}: 0", NOW + 407 * KEEP) for number in (404, 405, 406, 407)] == [
        False,
        True,
        True,
        True,
    ]


def test_a_step_of_the_servers_clock_forgets_nothing_before_its_time(store_url: str) -> None:
    for step in (KEEP, 86400.0, -100.0):
        with case(step), emptied_rig(store_url) as rig:
            push_many(rig, 600, NOW, "first")
            push_many(rig, 600, NOW + 2 * KEEP, "before")
            push_many(rig, 1200, NOW + 2 * KEEP + step, "after")  # a moment later
            assert is_known(rig, "before0", NOW + 2 * KEEP + step)
            push_many(rig, 1200, NOW + 3 * KEEP + step - 1, "later")
            assert is_known(rig, "before0", NOW + 3 * KEEP + step - 1)


def test_who_asks_for_the_longest_time_is_remembered_for_as_long(rig: ShardRig) -> None:
    rig.push(job("x", "v1", 1), token="t", now=NOW, keep=10 * KEEP)
    for number in range(10):
        push_many(rig, 200, NOW + number * KEEP, f"{number}: ")
    assert is_known(rig, "t", NOW + 10 * KEEP - 1)


@pytest.mark.parametrize("store_url", ["redis"], indirect=True)  # fakeredis takes minutes for so long a list
def test_a_bounded_number_of_calls_is_known(rig: ShardRig) -> None:
    push_many(rig, 1, NOW, "t")
    for number in range(5):  # older than that one
        rig.client.command("RPUSH", rig.prefix + "pushed", *(f"{number}:{i}" for i in range(100_000)))
    push_many(rig, 1, NOW, "last")
    assert rig.client.command("LLEN", rig.prefix + "pushed") == 450_000
    assert is_known(rig, "t0", NOW)


def test_a_repeated_call_is_known_for_as_long_when_the_first_comes_late(rig: ShardRig) -> None:
    for number in range(100):
        rig.push(job("x", "v1", 1), token=f"t{number}", repeat=True, keep=KEEP)
    later = NOW + 2 * KEEP - 1
    push_many(rig, 600, later, "between")
    before = rig.snapshot()
    for number in range(100):
        assert rig.push(job("x", "late", 1), token=f"t{number}", now=later, keep=KEEP) == 1
    assert rig.snapshot() == before


def test_repeated_calls_are_forgotten_and_cost_nothing_then(rig: ShardRig) -> None:
    rig.push(job("x", "v1", 1), token="t", repeat=True, keep=KEEP)
    assert (rig.read("repeated"), rig.meta("repeated")) == ({"t": 1}, "1")
    for number in range(1, 4):
        push_many(rig, 1, NOW + number * KEEP, f"{number}: ")
    assert (rig.names(), rig.meta("repeated")) == ({"meta", "pushed", "due", "payloads:x"}, None)


def test_a_bounded_number_of_repeated_calls_is_known(rig: ShardRig) -> None:
    rig.push(job("x", "v1", 1), token="t", repeat=True)
    rig.client.command("ZADD", rig.prefix + "repeated", *(item for i in range(9_999) for item in (0, f"r{i}")))
    rig.push(job("x", "v1", 1), token="u", repeat=True)
    assert len(rig.read("repeated")) == 10_000
    assert {"t", "u"} <= rig.read("repeated").keys()


# --- a sequence of calls ---


def test_a_call_that_comes_before_its_turn_is_refused_and_nothing_is_written(rig: ShardRig) -> None:
    rig.push(job("x", "v1"), token="other")
    before = rig.snapshot()
    with pytest.raises(Refusal) as refused:
        rig.push(job("x", "v3"), token="third", after="second", now=None)
    assert (refused.value.code, refused.value.detail) == ("OUTOFTURN", "second")
    assert rig.snapshot() == before
    rig.push(job("x", "v2"), token="second", after="other")
    assert rig.push(job("x", "v3"), token="third", after="second") == 1
    assert list(rig.read("payloads:x")) == ["v1", "v2", "v3"]


def test_call_that_arrives_after_its_own_repeat_changes_nothing(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1"), token="t", repeat=True)
    rig.push(job("x", "v2"))
    assert handed(shard.in_flight.take(1, NOW + 1)) == {"x": ["v1", "v2"]}
    shard.in_flight.finish(["x"])
    shard.in_flight.take(0, NOW + 1)
    assert rig.push(job("x", "v1"), token="t", now=NOW + 2) == 1
    assert shard.in_flight.take(1, NOW + 3).jobs == []


def test_another_shards_count_is_refused_before_anything_is_written(rig: ShardRig) -> None:
    rig.push(job("x", "v1", 1), shards_count=5)
    before = rig.snapshot()
    with pytest.raises(Refusal) as refused:
        rig.push(job("y", "v1", 1), now=None, shards_count=6)
    assert (refused.value.code, refused.value.detail) == ("SHARDSCOUNT", "5")
    assert rig.snapshot() == before


# --- limits of the server ---


def test_push_survives_script_flush(rig: ShardRig) -> None:
    rig.push(job("x", "v1", 1))
    rig.client.command("SCRIPT", "FLUSH")
    rig.push(job("x", "v2", 2))
    assert rig.read("payloads:x") == {"v1": 1, "v2": 2}


@pytest.fixture
def full_rig() -> Iterator[ShardRig]:
    """A shard on a server of its own, which may use up its memory."""
    with RedisServer(maxmemory_policy="noeviction") as server:
        rig = ShardRig(server.url)
        yield rig
        rig.close()


def test_a_full_server_refuses_pushes_and_everything_else_works(full_rig: ShardRig) -> None:
    rig = full_rig
    shard = rig.own()
    rig.push(*(job(name, "v1", 1) for name in "abcdef"))
    before = rig.snapshot()
    rig.client.command("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(RedisFull):
        rig.push(job("x", "v1", 1))
    assert rig.snapshot() == before

    later = NOW + 1
    assert sorted(handed(shard.in_flight.take(6, later))) == list("abcdef")
    shard.in_flight.finish(["a", "b"])
    report(shard, "fail", [retry("c")], later)
    report(shard, "release", [("d", 1.0)], later)
    report(shard, "bury", [("e", b"no", [])], later)
    assert shard.in_flight.take(0, later).jobs == []
    run_script(rig.client, "heartbeat", "lowq:v1:nodes", "", "node", "", "{}", 60)
    (renewed,) = rig.client.run_many([shard.lease.renew_call(TTL)])
    assert isinstance(renewed, RenewReply), renewed
    other = rig.crash("second", later)
    assert other.lease.surrender()
    with pytest.raises(LeaseLost):
        shard.in_flight.take(1, later)


def test_a_process_that_starts_while_the_server_is_full_can_drain(full_rig: ShardRig) -> None:
    full_rig.push(job("x", "v1", 1))
    full_rig.client.command("SCRIPT", "FLUSH")
    full_rig.client.command("CONFIG", "SET", "maxmemory", "1")
    fresh = ShardRig(full_rig.client.url)
    assert handed(fresh.own().in_flight.take(1, NOW)) == {"x": ["v1"]}
    with pytest.raises(RedisFull):
        fresh.push(job("y", "v1", 1))
    fresh.close()
