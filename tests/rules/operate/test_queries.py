"""Looking at a queue changes nothing and tells how things are, over all shards, in order."""

import itertools
import json
import random
from typing import Any

import pytest

from lowq.errors import ConfigError, JobError, UnknownQueueError
from lowq.job import Job
from lowq.operate.jobs import UNDECODABLE
from lowq.store.keys import nodes_key, queues_key
from tests.round_trips import counted_round_trips
from tests.rows import case
from tests.rules.operate.conftest import tell_of_activities
from tests.rules.queue_rig import SHARDS, QueueRig
from tests.rules.support import NOW, job, report, run_script
from tests.tiers import real_redis_often

#: For what is put together in Python, which no store sees.
on_memory = pytest.mark.parametrize("store_url", ["memory"], indirect=True)


def peek(rig: QueueRig, job_id: str, *args: Any, now: float = NOW) -> Job:
    found = rig.queue.peek(job_id, *args, now=now)
    assert found is not None
    return found


# --- figures ------------------------------------------------------------------------------------------------------


def test_stats_count_every_state_over_all_shards(rig: QueueRig) -> None:
    stats = rig.queue.stats()
    assert (stats.name, stats.shards_count, stats.length, stats.lag) == ("Orders", SHARDS, 0, 0.0)
    assert (stats.paused, stats.oldest_id, stats.oldest_at) == (False, None, None)
    rig.push(*(job(f"later-{i}", perform_at=NOW + 100) for i in range(5)))
    stats = rig.queue.stats(now=NOW)
    assert (stats.lag, stats.oldest_id, stats.oldest_at) == (0.0, "later-0", NOW + 100)
    rig.push(job("failing"))
    rig.fail("failing", delay=50.0)
    rig.push(*(job(f"buried-{i}") for i in range(3)))
    rig.queue.bury([f"buried-{i}" for i in range(3)], now=NOW)
    rig.push(job("flying"))
    rig.take("flying")
    rig.push(*(job(f"now-{i}") for i in range(4)))
    stats = rig.queue.stats(now=NOW)
    assert (stats.length, stats.due, stats.scheduled) == (10, 4, 6)
    assert (stats.fresh, stats.retries, stats.taken, stats.morgue_length) == (9, 1, 1, 3)
    assert (stats.failed, stats.buried, stats.processed) == (1, 3, 0)


def test_lag_is_that_of_the_oldest_due_job_of_all_shards(rig: QueueRig) -> None:
    for i in range(9):
        rig.push(job(f"job-{i}"), now=NOW + i)
    rig.push(job("later", perform_at=NOW + 1000))
    stats = rig.queue.stats(now=NOW + 20)
    assert stats.oldest_id == "job-0"
    assert stats.lag == pytest.approx(20, abs=1e-5)
    assert stats.oldest_at == pytest.approx(NOW, abs=1e-5)


def test_one_round_trip_has_also_the_capacity(rig: QueueRig) -> None:
    entry = json.dumps({"shards_count": SHARDS, "options": {"capacity": 40}})
    rig.client.command("HSET", queues_key("lowq"), "Orders", entry)
    rig.push(*(job(f"job-{i}") for i in range(10)))
    with counted_round_trips() as counted:
        stats = rig.queue.stats()
    assert (counted.count, stats.length, stats.capacity, stats.fill) == (1, 10, 40, 0.25)


# --- single ids ---------------------------------------------------------------------------------------------------


def test_peek_takes_every_kind_of_id_and_finds_nothing_elsewhere(rig: QueueRig) -> None:
    rig.push(job("42"))
    assert rig.queue.peek(42) == rig.queue.peek("42") is not None
    assert rig.queue.peek("nobody") is None
    assert [rig.queue.peek("42", state, now=NOW) for state in ("scheduled", "morgue")] == [None, None]
    with pytest.raises(JobError):
        rig.queue.peek(True)
    with pytest.raises(ConfigError, match="scheduled, due, retrying, taken, morgue"):
        rig.queue.peek("42", "waiting")  # type: ignore[arg-type]  # that is the point


def test_state_follows_the_servers_time_also_when_the_clock_of_the_shard_is_ahead(rig: QueueRig) -> None:
    rig.push(job("a", perform_at=NOW + 10))
    states = [peek(rig, "a", now=NOW + seconds).state for seconds in (0, 9.999, 10)]
    assert states == ["scheduled", "scheduled", "due"]
    rig.client.command("HSET", rig.prefix_of("a") + "meta", "clock", repr(NOW + 10))
    assert [peek(rig, "a", now=NOW + seconds).state for seconds in (0, 10)] == ["scheduled", "due"]
    assert (rig.queue.stats(now=NOW).due, rig.queue.stats(now=NOW).lag) == (0, 0)
    assert rig.ids(state="scheduled", now=NOW) == ["a"]
    assert rig.queue.why("a", now=NOW).reason == "not_due"
    rig.queue.delete("a")
    rig.client.command("HSET", rig.prefix_of("a") + "meta", "clock", repr(NOW + 86_400))
    rig.push(job("a"))  # for now
    assert peek(rig, "a", now=NOW).state == "due"
    assert rig.ids(state="due", now=NOW) == ["a"]


def test_a_failed_job_is_retrying_until_it_is_due_and_tells_error_and_crashes(rig: QueueRig) -> None:
    rig.push(job("a"))
    report(rig.take("a"), "release", [("a", None)], NOW, crashed=True)
    assert peek(rig, "a").crashes == 1
    rig.fail("a", retry_count=2, delay=10.0, error=b"no \xff")
    waiting = peek(rig, "a")
    assert (waiting.state, waiting.retry_count, waiting.error) == ("retrying", 2, "no \\xff")
    assert waiting.perform_at == NOW + 10
    assert peek(rig, "a", now=NOW + 10).state == "due"


def test_of_an_id_in_several_states_what_is_in_flight_comes_first_then_what_waits(rig: QueueRig) -> None:
    rig.push(job("a", "oldest", 1.0))
    rig.queue.bury("a", reason="hopeless", now=NOW + 1)
    rig.push(job("a", "old", 2.0), now=NOW + 2)
    assert peek(rig, "a", now=NOW + 2).payloads == [("old", 2.0)]
    rig.take("a", NOW + 2)
    rig.push(job("a", "new", 3.0), now=NOW + 3)
    assert (peek(rig, "a").state, peek(rig, "a").payloads) == ("taken", [("old", 2.0)])
    assert peek(rig, "a", "due", now=NOW + 3).payloads == [("new", 3.0)]
    buried = peek(rig, "a", "morgue")
    assert (buried.state, buried.payloads, buried.error) == ("morgue", [("oldest", 1.0)], "hopeless")
    assert (buried.buried_at, buried.perform_at, buried.retry_count) == (NOW + 1, None, -1)
    listed = [[item.payloads for item in rig.queue.jobs(state, now=NOW + 3)] for state in ("taken", "due", "morgue")]
    assert listed == [[[("old", 2.0)]], [[("new", 3.0)]], [[("oldest", 1.0)]]]


@real_redis_often
def test_payloads_are_shown_by_score_up_to_a_number_and_about_a_mebibyte(rig: QueueRig) -> None:
    rig.push(job("raw", b"\xffnot json", 1.0), job("raw", "fine", 2.0))
    assert peek(rig, "raw").payloads == [(UNDECODABLE + "\\xffnot json", 1.0), ("fine", 2.0)]
    rig.push(*(job("many", i, float(i)) for i in reversed(range(1100))))
    assert peek(rig, "many").payloads == [(i, float(i)) for i in range(1000)]
    assert peek(rig, "many").payloads_count == 1100
    rig.push(*(job("large", str(i) * 300_000, float(i)) for i in range(9)))
    assert [payload[0] for payload, _ in peek(rig, "large").payloads] == ["0", "1", "2"]
    assert peek(rig, "large").payloads_count == 9
    rig.push(job("one", "x" * 2**21, 1.0), job("one", "y" * 2**21, 2.0))
    assert [len(payload) for payload, _ in peek(rig, "one").payloads] == [2**21]


@real_redis_often
def test_fetch_keeps_the_order_and_reads_large_jobs_in_several_replies(rig: QueueRig) -> None:
    ids = [f"job-{i}" for i in range(12)]
    rig.push(*(job(job_id, job_id + "x" * 400_000) for job_id in ids))
    rig.push(*(job("many", i, 1e9 + i) for i in range(1000)))
    found = rig.queue.fetch(["job-7", "many", "nowhere", *ids])
    assert list(found) == ["job-7", "many", *(job_id for job_id in ids if job_id != "job-7")]
    assert all(found[job_id].payloads[0][0].startswith(job_id) for job_id in ids)
    assert len(found["many"].payloads) == 1000
    assert rig.queue.fetch([]) == {}


# --- lists --------------------------------------------------------------------------------------------------------


def test_waiting_jobs_come_by_time_then_by_the_bytes_of_ids_over_all_shards_both_ways(rig: QueueRig) -> None:
    times = random.Random(7).sample(range(1000), 50)
    rig.push(*(job(f"job-{time}", perform_at=NOW + time) for time in times))
    alike = ["B", "a", "Ä", "_", "aa", "a1", "10", "9", "é", "Z", "a\x00b", "~" * 200, "~" * 199]
    rig.push(*(job(job_id, perform_at=NOW + 2000) for job_id in alike))
    in_order = [f"job-{time}" for time in sorted(times)] + sorted(alike, key=str.encode)
    for order_by, expected in (("perform_at", in_order), ("id", sorted(in_order, key=str.encode))):
        for limit in (7, 63):
            assert rig.ids(order_by=order_by, limit=limit, now=NOW) == expected
            assert rig.ids(order_by=order_by, limit=limit, now=NOW, reverse=True) == expected[::-1]
    first = rig.queue.jobs(limit=62, now=NOW)
    assert (len(first), first.cursor is None) == (62, False)
    assert rig.queue.jobs(limit=1, after=first.cursor, now=NOW).cursor is None
    assert rig.queue.jobs(limit=63, now=NOW).cursor is None


def test_paging_goes_on_where_the_last_job_was_when_it_is_gone(rig: QueueRig) -> None:
    ids = [f"job-{i:02}" for i in range(20)]
    rig.push(*(job(job_id, perform_at=NOW + 5) for job_id in ids))
    page, back = (rig.queue.jobs(limit=5, now=NOW, reverse=reverse) for reverse in (False, True))
    rig.queue.delete([*ids[:5], *ids[15:]])
    rig.push(job("job-00", perform_at=NOW + 5), job("job-045", perform_at=NOW + 5))
    rest = rig.queue.jobs(limit=50, after=page.cursor, now=NOW)
    assert [item.id for item in rest] == ["job-045", *ids[5:15]]
    rest = rig.queue.jobs(limit=50, after=back.cursor, now=NOW, reverse=True)
    assert [item.id for item in rest] == [*ids[14:4:-1], "job-045", "job-00"]


def test_state_selects_and_looking_changes_nothing(rig: QueueRig) -> None:
    rig.push(job("bad-1"), job("bad-2"), job("dead"))
    for job_id in ("bad-1", "bad-2"):
        rig.fail(job_id, delay=1000.0)
    rig.queue.bury("dead", now=NOW)
    rig.push(job("now", perform_at=NOW), job("soon", perform_at=NOW + 5))
    before = {key: rig.client.command("DUMP", key) for key in rig.all_keys()}
    found = {"due": ["now"], "scheduled": ["soon"], "retrying": ["bad-1", "bad-2"], "morgue": ["dead"], "taken": []}
    for state, ids in found.items():
        with case(state):
            assert sorted(rig.ids(state=state, now=NOW)) == rig.ids(state=state, order_by="id", now=NOW) == ids
            assert all(item.state == state for item in rig.queue.fetch(ids, now=NOW).values())
    assert sorted(rig.ids(now=NOW)) == sorted(rig.ids(state="due", now=NOW + 2000)) == ["bad-1", "bad-2", "now", "soon"]
    rig.queue.stats(), rig.queue.peek("now"), rig.queue.why("now"), rig.app.shards(rig.queue)
    assert {key: rig.client.command("DUMP", key) for key in rig.all_keys()} == before


@pytest.mark.parametrize("failing", [1, 12], ids=["few-fail", "most-fail"])
def test_retrying_jobs_come_by_perform_at(rig: QueueRig, failing: int) -> None:
    ids = [f"bad-{i}" for i in range(failing)]
    rig.push(*(job(job_id) for job_id in ids))
    for i, job_id in enumerate(ids):
        rig.fail(job_id, delay=100.0 - i)
    rig.push(*(job(f"later-{i}", perform_at=NOW + 50 + i) for i in range(12)))
    assert rig.ids(state="retrying", limit=5, now=NOW) == ids[::-1]


def test_by_retry_count_fresh_ones_count_as_minus_one(rig: QueueRig) -> None:
    for job_id, retry_count in (("x", 3), ("y", 0), ("z", 3)):
        rig.push(job(job_id))
        rig.fail(job_id, retry_count=retry_count)
    rig.push(*(job(f"fresh-{i}", perform_at=NOW + 3) for i in range(4)))
    in_order = ["fresh-0", "fresh-1", "fresh-2", "fresh-3", "y", "x", "z"]
    for limit in (1, 3, 4, 100):
        assert rig.ids(order_by="retry_count", limit=limit, now=NOW) == in_order
        assert rig.ids(order_by="retry_count", limit=limit, now=NOW, reverse=True) == in_order[::-1]
    assert rig.ids(order_by="retry_count", min=0, now=NOW) == ["y", "x", "z"]
    assert rig.ids(order_by="retry_count", max=0, reverse=True, now=NOW) == in_order[4::-1]
    assert rig.ids(state="retrying", order_by="retry_count", now=NOW) == ["y", "x", "z"]
    assert rig.ids(state="scheduled", order_by="retry_count", now=NOW) == in_order[:4]


def test_buried_jobs_come_by_the_time_of_burial(rig: QueueRig) -> None:
    ids = [f"job-{i}" for i in range(10)]
    rig.push(*(job(job_id) for job_id in ids))
    for i, job_id in enumerate(reversed(ids)):
        rig.queue.bury(job_id, now=NOW + i)
    assert rig.ids(state="morgue", limit=3) == ids[::-1]
    assert rig.ids(state="morgue", limit=3, reverse=True) == ids
    assert rig.ids(state="morgue", order_by="id", limit=3) == ids
    assert rig.ids(state="morgue", min=NOW + 2, max=NOW + 4) == ["job-7", "job-6", "job-5"]


def test_bounds_are_included_and_match_is_a_pattern_of_ids(rig: QueueRig) -> None:
    rig.push(*(job(str(i), perform_at=NOW + 100 - i) for i in range(100)))
    rows: list[tuple[dict[str, Any], list[int]]] = [
        ({"min": NOW + 3, "max": NOW + 5}, [97, 96, 95]), ({"min": NOW + 999}, []),
        ({"min": NOW + 99, "reverse": True, "limit": 1}, [0, 1]),
        ({"order_by": "id", "min": "7", "max": "71"}, [7, 70, 71]),
        ({"match": "4*", "limit": 4}, [*range(49, 39, -1), 4]), ({"match": "[12]5", "order_by": "id"}, [15, 25]),
        ({"match": "nothing*"}, []),
    ]  # fmt: skip
    for options, expected in rows:
        with case(options):
            assert rig.ids(now=NOW, **options) == list(map(str, expected))
    assert rig.ids(match="4?", state="due", now=NOW + 55) == ["49", "48", "47", "46", "45"]


def test_what_makes_no_sense_is_refused_and_told(rig: QueueRig) -> None:
    rig.push(job("a"), job("b"))
    cursor = rig.queue.jobs(limit=1).cursor
    rows: list[tuple[dict[str, Any], str]] = [
        ({"state": "waiting"}, "scheduled, due, retrying, taken, morgue"), ({"limit": 0}, "1 to 1000"),
        ({"limit": 1001}, "1 to 1000"), ({"limit": True}, "1 to 1000"), ({"after": "42"}, "cursor"),
        ({"after": "not base64!"}, "cursor"), ({"after": cursor, "order_by": "id"}, "another order"),
        ({"after": cursor, "reverse": True}, "another order"),
        ({"after": cursor, "order_by": "retry_count"}, "another order"),
    ]  # fmt: skip
    for options, says in rows:
        with case(options), pytest.raises(ConfigError, match=says):
            rig.queue.jobs(**options)
    with pytest.raises(ConfigError):
        rig.queue.jobs_in_steps(limit=0)  # before the first step


# --- why an id is not performed -----------------------------------------------------------------------------------


def ids_of_one_shard(rig: QueueRig, count: int) -> list[str]:
    found = (f"id-{number}" for number in itertools.count() if rig.shard_index(f"id-{number}") == 0)
    return list(itertools.islice(found, count))


@on_memory
def test_why_of_jobs_that_are_not_due(rig: QueueRig) -> None:
    options = json.dumps({"shards_count": SHARDS, "options": {"max_retry_count": 7}})
    rig.client.command("HSET", queues_key("lowq"), "Orders", options)
    rig.push(job("buried"), job("failed"), job("later", perform_at=NOW + 250))
    rig.queue.bury("buried", now=NOW - 90)
    rig.fail("failed", retry_count=2, delay=250.0)
    rows: list[tuple[str, str | None, str, float | None, str]] = [
        ("nobody", None, "absent", None, ""),
        ("buried", "morgue", "buried", None, "1 min 30 s ago"),
        ("later", "scheduled", "not_due", NOW + 250, "due in 4 min 10 s"),
        ("failed", "retrying", "retry_wait", NOW + 250, "attempt 4 of 8, due in 4 min 10 s"),
    ]
    for job_id, state, reason, until, detail in rows:
        with case(job_id):
            why = rig.queue.why(job_id, now=NOW)
            assert (why.state, why.reason, why.until) == (state, reason, until)
            assert detail in why.detail


@on_memory
def test_why_of_what_is_due_or_in_flight_names_the_owner_alive_gone_or_dead(rig: QueueRig) -> None:
    rig.push(job("a"))
    nobody = f"shard {rig.shard_index('a')} is leased to nobody"
    why = rig.queue.why("a", now=NOW)
    assert (why.state, why.reason, nobody in why.detail) == ("due", "no_owner", True)
    run_script(rig.client, "surrender", rig.prefix_of("a"), repr(NOW + 10), rig.own("a").lease.token, "")
    assert f"{nobody} for 1 min 30 s now" in rig.queue.why("a", now=NOW + 100).detail
    rig.own("a").lease.lose()
    rig.take("a")
    rig.push(job("a", b'"newer"'), now=NOW + 1)
    why = rig.queue.why("a", now=NOW + 3)
    assert (why.state, why.reason, why.in_flight) == ("taken", "performing", 0)
    assert "3.0 s ago" in why.detail
    assert "tester" in why.detail
    rig.client.command("DEL", rig.prefix_of("a") + "lease")
    rig.client.command("HSET", rig.prefix_of("a") + "meta", "leased_until", repr(NOW))
    assert rig.queue.why("a", now=NOW).reason == "no_owner"


@on_memory
def test_why_tells_how_many_are_ahead_or_that_the_queue_is_paused(rig: QueueRig) -> None:
    ids = ids_of_one_shard(rig, 12)
    for number, job_id in enumerate(ids):
        rig.push(job(job_id), now=NOW + number)
    rig.own(ids[0])
    why = rig.queue.why(ids[-1], now=NOW + 100)
    assert (why.state, why.reason, why.detail) == ("due", "behind", "behind 11 older jobs of shard 0")
    assert rig.queue.why(ids[0], now=NOW + 100).reason == "next"
    rig.queue.pause(now=NOW)
    assert rig.queue.why(ids[0], now=NOW + 5).reason == "paused"


@on_memory
@pytest.mark.parametrize("count", [5, 400])
def test_busy_says_with_what_and_since_when_also_in_long_flights(rig: QueueRig, count: int) -> None:
    *many, last = ids_of_one_shard(rig, count + 1)
    rig.push(*map(job, many))
    rig.own(last).in_flight.take(count, NOW + 1)
    rig.push(job(last), now=NOW + 1)
    why = rig.queue.why(last, now=NOW + 305)
    assert (why.state, why.reason, why.ahead, why.in_flight) == ("due", "busy", 0, count)
    assert (why.in_flight_since, len(why.in_flight_ids)) == (NOW + 1, 3)
    assert set(why.in_flight_ids) <= set(many)
    names = ", ".join(why.in_flight_ids)
    assert why.detail == (
        f"next of shard 0, which owner tester has been busy with for 5 min 4 s: {names} and {count - 3} more"
    )


@on_memory
def test_busy_names_the_thread_and_who_else_is_ahead(rig: QueueRig) -> None:
    stuck, older, mine = ids_of_one_shard(rig, 3)
    rig.push(job(stuck))
    rig.take(stuck)
    rig.push(job(older), now=NOW + 1)
    rig.push(job(mine), now=NOW + 2)
    tell_of_activities(rig, None, {"queue": "Orders", "shard": 0, "ids": [stuck], "count": 1, "seconds": 5.0})
    why = rig.queue.why(mine, now=NOW + 10)
    assert (why.reason, why.ahead, why.thread, why.in_flight_ids) == ("busy", 1, 1, (stuck,))
    assert why.detail == (
        f"behind 1 older job of shard 0, which thread 1 of node {why.node} has been busy with for 10 s: {stuck}"
    )


@on_memory
def test_no_thread_is_free(rig: QueueRig) -> None:
    rig.push(job("a"))
    rig.own("a")
    other = {"queue": "Mail", "shard": 0, "ids": ["x"], "seconds": 0.1}  # of an older version: without a count
    tell_of_activities(rig, other, None)
    assert rig.queue.why("a", now=NOW + 1).reason == "next"
    assert rig.app.nodes()[0].performing == ({**other, "count": 1}, None)
    tell_of_activities(rig, other, other)
    why = rig.queue.why("a", now=NOW + 1)
    shard = rig.shard_index("a")
    assert why.reason == "no_thread"
    assert why.detail == f"next of shard {shard}; no thread of node {why.node} is free (2 of 2 busy)"


# --- registries ---------------------------------------------------------------------------------------------------


@on_memory
def test_a_handle_without_shards_count_looks_it_up_once_known(rig: QueueRig) -> None:
    queue = rig.app.queue("Orders")
    with pytest.raises(UnknownQueueError, match="no queue is known"):
        queue.jobs()
    rig.app.registrations.enter("Orders", SHARDS)
    assert (queue.shards_count, queue.jobs().jobs) == (SHARDS, [])
    with pytest.raises(UnknownQueueError, match=r"'Order' .*did you mean 'Orders'"):
        rig.app.queue("Order").stats()


@on_memory
def test_queues_are_listed_with_their_options(rig: QueueRig) -> None:
    rig.app.registrations.enter("Orders", SHARDS)
    options = json.dumps({"shards_count": 2, "options": {"max_retry_count": 3}})
    rig.client.command("HSET", queues_key("lowq"), "Bills", options)
    found = [(info.name, info.shards_count, info.options) for info in rig.app.queues()]
    assert found == [("Bills", 2, {"max_retry_count": 3}), ("Orders", SHARDS, {})]
    for (name, _, options_of), retries in zip(found, (3, 25), strict=True):
        queue = rig.app.queue(name)
        assert (queue.options, queue.max_retry_count) == (options_of, retries)


@on_memory
def test_nodes_tell_what_they_say_and_forgive_what_they_do_not(rig: QueueRig) -> None:
    says = {"host": "h", "pid": 7, "threads": 5, "shards": {"Orders": [0, 2]}, "queues": ["Orders"], "news": 1}
    for name, text in (("b", json.dumps(says)), ("a", "{}"), ("c", "no json")):
        run_script(rig.client, "heartbeat", nodes_key("lowq"), "", name, "", text, 60)
    rig.client.command("HSET", nodes_key("lowq"), "silent", "1000000000.5 60 0 {}")
    a, b, *_ = rig.app.nodes()
    assert (a.name, a.host, a.pid, a.queues, a.shards, a.started_at) == ("a", "", 0, (), {}, None)
    assert (b.host, b.pid, b.threads, b.queues, b.shards) == ("h", 7, 5, ("Orders",), {"Orders": [0, 2]})
    assert b.seconds_ago >= 0
    assert "silent" not in [node.name for node in rig.app.nodes()]


@on_memory
def test_shards_tell_their_owner_and_length(rig: QueueRig) -> None:
    rig.push(job("a"), now=NOW - 5)
    lease, mine = rig.own("a").lease.current, rig.shard_index("a")
    assert lease is not None
    infos = rig.app.shards(rig.queue)
    assert [info.index for info in infos] == [0, 1, 2]
    info = infos.pop(mine)
    assert (info.owner, info.fence, info.length, info.oldest_id) == ("tester", lease.fence, 1, "a")
    assert 0 < (info.lease_seconds or 0) <= 600
    assert all((other.owner, other.fence, other.lease_seconds) == (None, None, None) for other in infos)
    run_script(rig.client, "heartbeat", nodes_key("lowq"), "", "host:7:tester", "", "{}", 60)
    assert rig.app.shards(rig.queue)[mine].owner == "host:7:tester"
