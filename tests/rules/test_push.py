"""push: payloads merge, ids become due, times come from the shard's own clock."""

import time
from collections.abc import Iterator

import pytest

from lowq.codec import load_payload
from lowq.errors import LeaseLost, RedisFull
from lowq.store import Refusal
from tests.redis_server import RedisServer
from tests.rows import case
from tests.rules.support import NOW, TICK, TTL, Channel, ShardRig, emptied_rig, handed, job, retry

# --- merging ---


def test_payloads_keep_their_bytes(rig: ShardRig) -> None:
    data = bytes(range(256))
    rig.push(job("x", data, 1))
    assert rig.client.command("GET", rig.prefix + "payloads:x") == b"1 " + data
    rig.push(job("x", data + b" ", 2))
    assert rig.client.command("ZRANGE", rig.prefix + "payloads:x", 0, -1) == [data, data + b" "]


def test_an_id_may_be_any_text(rig: ShardRig) -> None:
    for job_id in ("a:b", "{x}", " ", "héllo \N{SNOWMAN}", "\r\n\0", "*?[x]"):
        rig.push(job(job_id, "v1", 1))
        assert rig.read(f"payloads:{job_id}") == {"v1": 1}
    shard = rig.own()
    delivery = shard.in_flight.take(10, NOW + 1)
    assert len(delivery.jobs) == 6
    shard.in_flight.finish(handed(delivery))
    shard.in_flight.take(0, NOW + 1)
    assert rig.read("taken") == {}


# --- an id that waits already ---


@pytest.mark.parametrize("others", [5, 40])
def test_of_two_times_of_an_id_in_one_call_the_first_counts(rig: ShardRig, others: int) -> None:
    rig.push(
        job("x", "v1"), *(job(f"id{number}", "v1") for number in range(others)), job("x", "v2", delay=3600),
        job("later", "v1", delay=3600), job("later", "v2"),
    )  # fmt: skip
    due = rig.read("due")
    assert due["x"] == NOW
    assert due["later"] > NOW + 3000
    assert len(due) == others + 2


# --- times ---


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


def test_two_pushes_within_a_microsecond_keep_their_order(rig: ShardRig) -> None:
    ahead = rig.server_time() + 3600  # as after many pushes within one microsecond
    rig.push(job("x", "first"), now=None)
    rig.set_clock(ahead)
    rig.push(job("x", "v9"), now=None)
    rig.push(job("x", "v1"), job("x", "v5"), now=None)
    rig.push(job("x", "v3"), now=None)
    scores = rig.read("payloads:x")
    assert list(scores) == ["first", "v9", "v1", "v5", "v3"]
    assert [scores["v9"], scores["v1"]] == [ahead + TICK, ahead + TICK + TICK]
    assert float(rig.meta("clock") or 0) == scores["v3"]


def test_order_survives_a_server_clock_that_steps_back(rig: ShardRig) -> None:
    rig.own(now=None)
    rig.push(job("y", "v1"), now=None)
    ahead = rig.server_time() + 3600  # the server's clock was there before it stepped back
    rig.set_clock(ahead)
    rig.push(job("x", "v1"), now=None)
    rig.push(job("x", "v2"), job("z", "v1"), now=None)
    delivery = rig.shard.in_flight.take(10)
    assert handed(delivery) == {"y": ["v1"], "x": ["v1", "v2"], "z": ["v1"]}


def test_explicit_now_does_not_move_the_clock(rig: ShardRig) -> None:
    rig.push(job("x", "v1"), now=NOW + 1000)
    assert rig.meta("clock") is None
    rig.push(job("x", "v2"), now=None)
    clock = rig.meta("clock")
    assert clock is not None
    assert abs(float(clock) - rig.server_time()) < 60
    rig.push(job("x", "v3"), now=NOW + 1000)
    assert rig.meta("clock") == clock


def test_explicit_now_is_kept_monotonic_by_the_clock(rig: ShardRig) -> None:
    rig.set_clock(NOW)
    rig.push(job("x", "v1"), now=NOW - 100)
    assert rig.read("payloads:x") == {"v1": NOW + TICK}


def test_jobs_of_one_call_get_scores_in_their_order(rig: ShardRig) -> None:
    rig.push(*(job("x", f"v{n}") for n in (3, 1, 2)))
    assert list(rig.read("payloads:x")) == ["v3", "v1", "v2"]


def test_perform_at_in_the_past_is_clamped_to_now(store_url: str) -> None:
    for ago in (0.5, 3600.0, NOW - 1e9):
        with case(ago), emptied_rig(store_url) as rig:
            rig.push(job("x", "v1", 1, perform_at=NOW - ago))
            assert rig.read("due") == {"x": NOW}


def test_delay_counts_from_now(rig: ShardRig) -> None:
    rig.push(job("x", "v1", 1, delay=90.5), job("y", "v1", 1, delay=0.0))
    assert rig.read("due") == pytest.approx({"x": NOW + 90.5, "y": NOW}, abs=1e-5, rel=0)


def test_microseconds_survive(rig: ShardRig) -> None:
    at = NOW + 60.000001
    rig.push(job("x", "v1", at - 1, perform_at=at), job("y", "v1"))
    assert rig.read("due") == {"x": at, "y": NOW + TICK}
    assert rig.read("payloads:x") == {"v1": at - 1}
    shard = rig.own()
    delivery = shard.in_flight.take(10, at)
    assert [item.job(load_payload).perform_at for item in delivery.jobs] == [NOW + TICK, at]
    assert [item.job(load_payload).payloads for item in delivery.jobs] == [[("v1", NOW + TICK)], [("v1", at - 1)]]
    assert rig.read("taken")["x"] == (1, at, -1, 0, at)
    shard.in_flight.release([("x", None), ("y", 1.0)], at)
    assert rig.read("due") == {"x": at, "y": at + 1}


# --- wake-ups ---


def test_first_job_wakes_the_shard(rig: ShardRig, wake: Channel) -> None:
    rig.push(job("x", "v1", 1))
    assert [float(delay) for delay in wake.messages()] == [0]


def test_wake_up_says_the_delay_to_the_new_head(rig: ShardRig, wake: Channel) -> None:
    rig.push(job("x", "v1", 1, perform_at=NOW + 60), job("y", "v1", 1, perform_at=NOW + 30))
    assert [float(delay) for delay in wake.messages()] == pytest.approx([30], abs=1e-5)
    rig.push(job("z", "v1", 1, perform_at=NOW + 10), now=NOW + 5)
    assert [float(delay) for delay in wake.messages()] == pytest.approx([5], abs=1e-5)


def test_job_behind_the_head_does_not_wake(rig: ShardRig, wake: Channel) -> None:
    rig.push(job("x", "v1", 1, perform_at=NOW + 60))
    wake.messages()
    rig.push(job("y", "v1", 1, perform_at=NOW + 61))
    rig.push(job("x", "v2", 2, perform_at=NOW + 62))
    assert wake.messages() == []


def test_id_that_keeps_its_perform_at_does_not_wake(rig: ShardRig, wake: Channel) -> None:
    rig.push(job("x", "v1", 1, perform_at=NOW + 60))
    wake.messages()
    rig.push(job("x", "v2", 2))
    assert wake.messages() == []
    rig.push(job("x", "v3", 3), job("y", "v1", 1, perform_at=NOW + 20))
    assert [float(delay) for delay in wake.messages()] == pytest.approx([20], abs=1e-5)


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


def test_repeat_does_not_bring_back_what_was_performed_meanwhile(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1), token="t")
    shard.in_flight.take(1, NOW)
    shard.in_flight.finish(["x"])
    shard.in_flight.take(0, NOW)
    assert rig.push(job("x", "v1", 1), token="t", repeat=True) == 1
    assert rig.names() == {"meta", "pushed", "repeated", "lease"}


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
    for after in (0.0, KEEP - 1.0, KEEP, 2 * KEEP - 1.0):
        with case(after), emptied_rig(store_url) as rig:
            push_many(rig, 1, NOW, "t")
            for share in (0.5, 1.0):
                push_many(rig, 600, NOW + after * share, f"at {share}: ")
            assert is_known(rig, "t0", NOW + after)


def test_the_latest_thousand_calls_are_known_for_ever(rig: ShardRig) -> None:
    push_many(rig, 1, NOW, "t")
    for number in range(1, 20):
        push_many(rig, 50, NOW + number * 10 * KEEP, f"{number}: ")
    assert is_known(rig, "t0", NOW + 1e6)


def test_older_calls_are_forgotten(rig: ShardRig) -> None:
    for number in range(8):
        push_many(rig, 600, NOW + number * KEEP, f"{number}: ")
    assert len(rig.read("pushed")) == 3 * 600  # of this slot and the two before
    assert [is_known(rig, f"{number}: 0", NOW + 7 * KEEP) for number in (4, 5, 6, 7)] == [False, True, True, True]


def test_a_step_of_the_servers_clock_forgets_nothing_before_its_time(store_url: str) -> None:
    for step in (KEEP, 100.0, 86400.0, -100.0):
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


def test_a_repeat_of_a_call_that_is_in_need_not_wait_for_its_turn(rig: ShardRig) -> None:
    rig.push(job("x", "v1"), token="first")
    rig.push(job("x", "v2"), token="second", after="first")
    before = rig.read("payloads:x")
    assert rig.push(job("x", "v1"), token="first", repeat=True) == 1
    assert rig.push(job("x", "v2"), token="second", after="first", repeat=True) == 1
    assert rig.read("payloads:x") == before


def test_call_that_arrives_after_its_own_repeat_changes_nothing(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1"), token="t", repeat=True)
    rig.push(job("x", "v2"))
    assert handed(shard.in_flight.take(1, NOW + 1)) == {"x": ["v1", "v2"]}
    shard.in_flight.finish(["x"])
    shard.in_flight.take(0, NOW + 1)
    assert rig.push(job("x", "v1"), token="t", now=NOW + 2) == 1
    assert shard.in_flight.take(1, NOW + 3).jobs == []


# --- refusals ---


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
    shard.in_flight.fail([retry("c")], later)
    shard.in_flight.release([("d", 1.0)], later)
    shard.in_flight.bury([("e", b"no", [])], later)
    assert shard.in_flight.take(0, later).jobs == []
    rig.client.run("heartbeat", "lowq:v1:nodes", "", "node", "", "{}", 60)
    (renewed,) = rig.client.run_many([shard.lease.renew_call(TTL)])
    assert isinstance(renewed, list), renewed
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
