"""Looking at a queue changes nothing and tells how things are, over all shards, in order."""

import itertools
import json
import random
from typing import Any

import pytest

from lowq.broker.membership import Identity, Membership
from lowq.errors import ConfigError, JobError, UnknownQueueError
from lowq.inspection.job_filter import ORDERS
from lowq.inspection.queries import UNDECODABLE
from lowq.job import Job
from lowq.store.keys import nodes_key, queues_key
from tests.round_trips import counted_round_trips
from tests.rows import case
from tests.rules.queue_rig import SHARDS, QueueRig
from tests.rules.support import NOW, job

#: For what is put together in Python, which no store sees.
on_memory = pytest.mark.parametrize("store_url", ["memory"], indirect=True)


def peek(rig: QueueRig, job_id: str, *args: Any, now: float = NOW) -> Job:
    found = rig.queue.peek(job_id, *args, now=now)
    assert found is not None
    return found


class TestStats:
    def test_of_an_empty_queue_are_zero(self, rig: QueueRig) -> None:
        stats = rig.queue.stats()
        assert (stats.name, stats.shards_count, stats.length, stats.lag) == ("Orders", SHARDS, 0, 0.0)
        assert (stats.paused, stats.oldest_id, stats.oldest_at) == (False, None, None)

    def test_count_every_state_over_all_shards(self, rig: QueueRig) -> None:
        rig.push(*(job(f"later-{i}", perform_at=NOW + 100) for i in range(5)))
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

    def test_lag_is_that_of_the_oldest_due_job_of_all_shards(self, rig: QueueRig) -> None:
        for i in range(9):
            rig.push(job(f"job-{i}"), now=NOW + i)
        rig.push(job("later", perform_at=NOW + 1000))

        stats = rig.queue.stats(now=NOW + 20)

        assert stats.lag == pytest.approx(20, abs=1e-5)
        assert stats.oldest_id == "job-0"
        assert stats.oldest_at == NOW + 0.000001 or stats.oldest_at == NOW

    def test_what_is_not_due_yet_has_no_lag(self, rig: QueueRig) -> None:
        rig.push(job("later", perform_at=NOW + 1000))
        stats = rig.queue.stats(now=NOW)
        assert (stats.lag, stats.oldest_id, stats.oldest_at) == (0.0, "later", NOW + 1000)

    def test_one_round_trip_has_also_the_capacity(self, rig: QueueRig) -> None:
        entry = json.dumps({"shards_count": SHARDS, "options": {"capacity": 40}})
        rig.client.command("HSET", queues_key("lowq"), "Orders", entry)
        rig.push(*(job(f"job-{i}") for i in range(10)))
        with counted_round_trips() as counted:
            stats = rig.queue.stats()
        assert counted.count == 1
        assert (stats.length, stats.capacity, stats.fill) == (10, 40, 0.25)


class TestPeek:
    def test_takes_every_kind_of_id_and_tells_nothing_of_one_that_is_nowhere(self, rig: QueueRig) -> None:
        rig.push(job("42"))
        assert rig.queue.peek(42) == rig.queue.peek("42") is not None
        assert rig.queue.peek("nobody") is None
        with pytest.raises(JobError):
            rig.queue.peek(True)

    def test_state_follows_time(self, rig: QueueRig) -> None:
        rig.push(job("a", perform_at=NOW + 10))
        states = [peek(rig, "a", now=NOW + seconds).state for seconds in (0, 9.999, 10)]
        assert states == ["scheduled", "scheduled", "due"]
        assert peek(rig, "a").perform_at == NOW + 10

    def test_state_goes_by_the_servers_clock_also_when_that_of_the_shard_is_ahead(self, rig: QueueRig) -> None:
        rig.push(job("a", perform_at=NOW + 10))
        rig.client.command("HSET", rig.prefix_of("a") + "meta", "clock", repr(NOW + 10))
        assert peek(rig, "a", now=NOW).state == "scheduled"
        assert rig.queue.stats(now=NOW).due == 0
        assert rig.queue.stats(now=NOW).lag == 0
        assert rig.ids(state="scheduled", now=NOW) == ["a"]
        assert rig.queue.why("a", now=NOW).reason == "not_due"
        assert peek(rig, "a", now=NOW + 10).state == "due"

    def test_what_was_pushed_for_now_is_due_also_when_the_clock_of_the_shard_is_ahead(self, rig: QueueRig) -> None:
        rig.client.command("HSET", rig.prefix_of("a") + "meta", "clock", repr(NOW + 86_400))
        rig.push(job("a"))
        assert peek(rig, "a", now=NOW).state == "due"
        assert rig.ids(state="due", now=NOW) == ["a"]

    def test_a_failed_job_is_retrying_until_it_is_due(self, rig: QueueRig) -> None:
        rig.push(job("a"))
        rig.fail("a", retry_count=2, delay=10.0, error=b"division by zero")
        waiting = peek(rig, "a")
        assert (waiting.state, waiting.retry_count, waiting.error) == ("retrying", 2, "division by zero")
        assert waiting.perform_at == NOW + 10
        assert peek(rig, "a", now=NOW + 10).state == "due"

    def test_of_a_taken_job_shows_what_is_in_flight(self, rig: QueueRig) -> None:
        rig.push(job("a", "old", 1.0))
        rig.take("a")
        rig.push(job("a", "new", 2.0))
        assert (peek(rig, "a").state, peek(rig, "a").payloads) == ("taken", [("old", 1.0)])
        assert peek(rig, "a", "due").payloads == [("new", 2.0)]

    def test_prefers_the_waiting_job_to_the_buried_one(self, rig: QueueRig) -> None:
        rig.push(job("a", "old", 1.0))
        rig.queue.bury("a", reason="hopeless", now=NOW + 1)
        rig.push(job("a", "new", 2.0), now=NOW + 2)
        assert peek(rig, "a", now=NOW + 2).payloads == [("new", 2.0)]
        buried = peek(rig, "a", "morgue")
        assert (buried.state, buried.payloads, buried.error) == ("morgue", [("old", 1.0)], "hopeless")
        assert (buried.buried_at, buried.perform_at, buried.retry_count) == (NOW + 1, None, -1)

    def test_finds_nothing_in_another_state(self, rig: QueueRig) -> None:
        rig.push(job("a"))
        assert rig.queue.peek("a", "scheduled", now=NOW) is None
        assert rig.queue.peek("a", "morgue", now=NOW) is None
        with pytest.raises(ConfigError, match="scheduled, due, retrying, taken, morgue"):
            rig.queue.peek("a", "waiting")  # type: ignore[arg-type]  # that is the point

    def test_an_undecodable_payload_does_not_break_looking(self, rig: QueueRig) -> None:
        rig.push(job("a", b"\xffnot json", 1.0), job("a", "fine", 2.0))
        assert peek(rig, "a").payloads == [(UNDECODABLE + "\\xffnot json", 1.0), ("fine", 2.0)]

    def test_an_error_that_cannot_be_loaded_is_shown_raw(self, rig: QueueRig) -> None:
        rig.push(job("a"))
        rig.fail("a", error=b"\xff\xfe")
        assert peek(rig, "a").error == "\\xff\\xfe"

    def test_tells_crashes(self, rig: QueueRig) -> None:
        rig.push(job("a"))
        rig.take("a").in_flight.release([("a", None)], NOW, crashed=True)
        assert peek(rig, "a").crashes == 1

    def test_shows_payloads_by_score_and_cuts_long_lists(self, rig: QueueRig) -> None:
        rig.push(*(job("a", i, float(i)) for i in reversed(range(1100))))
        found = peek(rig, "a")
        assert found.payloads == [(i, float(i)) for i in range(1000)]
        assert found.payloads_count == 1100

    def test_cuts_large_payloads_at_about_a_mebibyte_and_shows_one_of_any_size(self, rig: QueueRig) -> None:
        rig.push(*(job("a", str(i) * 300_000, float(i)) for i in range(9)))
        found = peek(rig, "a")
        assert [payload[0] for payload, _ in found.payloads] == ["0", "1", "2"]
        assert found.payloads_count == 9
        rig.push(job("b", "x" * 2**21), job("b", "y" * 2**21))
        assert [len(payload) for payload, _ in peek(rig, "b").payloads] == [2**21]


class TestFetch:
    def test_keeps_the_order_and_leaves_out_what_is_nowhere(self, rig: QueueRig) -> None:
        rig.push(*(job(f"job-{i}") for i in range(20)))
        wanted = [f"job-{i}" for i in (7, 3, 99, 12, 3)]
        assert list(rig.queue.fetch(wanted)) == ["job-7", "job-3", "job-12"]
        assert rig.queue.fetch([]) == {}

    def test_reads_many_large_jobs_in_several_replies(self, rig: QueueRig) -> None:
        ids = [f"job-{i}" for i in range(12)]
        rig.push(*(job(job_id, job_id + "x" * 400_000) for job_id in ids))
        rig.push(*(job("many", i, 1e9 + i) for i in range(1000)))
        found = rig.queue.fetch(["job-0", "many", *ids])
        assert all(found[job_id].payloads[0][0].startswith(job_id) for job_id in ids)
        assert len(found["many"].payloads) == 1000


class TestJobs:
    def test_waiting_jobs_come_by_perform_at_over_all_shards_in_pages_both_ways(self, rig: QueueRig) -> None:
        times = random.Random(7).sample(range(1000), 60)
        rig.push(*(job(f"job-{time}", perform_at=NOW + time) for time in times))
        in_order = [f"job-{time}" for time in sorted(times)]
        assert rig.ids(limit=60, now=NOW) == in_order
        for order_by, expected in (("perform_at", in_order), ("id", sorted(in_order))):
            assert rig.ids(order_by=order_by, limit=7, now=NOW) == expected
            assert rig.ids(order_by=order_by, limit=7, now=NOW, reverse=True) == expected[::-1]

    def test_the_last_page_has_no_cursor(self, rig: QueueRig) -> None:
        rig.push(*(job(f"job-{i}", perform_at=NOW + i) for i in range(6)))
        first = rig.queue.jobs(limit=3, now=NOW)
        assert (len(first), first.cursor is None) == (3, False)
        assert rig.queue.jobs(limit=3, after=first.cursor, now=NOW).cursor is None
        assert rig.queue.jobs(limit=6, now=NOW).cursor is None

    def test_equal_times_are_ordered_by_the_bytes_of_the_ids(self, rig: QueueRig) -> None:
        ids = ["B", "a", "Ä", "_", "aa", "a1", "10", "9", "é", "Z", "a\x00b", "~" * 200, "~" * 199]
        rig.push(*(job(job_id, perform_at=NOW + 5) for job_id in ids))
        in_order = sorted(ids, key=str.encode)
        assert rig.ids(limit=2, now=NOW) == in_order
        assert rig.ids(limit=2, now=NOW, reverse=True) == in_order[::-1]

    def test_paging_goes_on_where_the_last_job_was_when_it_is_gone(self, rig: QueueRig) -> None:
        ids = [f"job-{i:02}" for i in range(20)]
        rig.push(*(job(job_id, perform_at=NOW + 5) for job_id in ids))
        page, back = (rig.queue.jobs(limit=5, now=NOW, reverse=reverse) for reverse in (False, True))
        rig.queue.delete([*ids[:5], *ids[15:]])
        rig.push(job("job-00", perform_at=NOW + 5), job("job-045", perform_at=NOW + 5))
        rest = rig.queue.jobs(limit=50, after=page.cursor, now=NOW)
        assert [item.id for item in rest] == ["job-045", *ids[5:15]]
        rest = rig.queue.jobs(limit=50, after=back.cursor, now=NOW, reverse=True)
        assert [item.id for item in rest] == [*ids[14:4:-1], "job-045", "job-00"]

    def test_state_selects(self, rig: QueueRig) -> None:
        rig.push(job("bad-1"), job("bad-2"), job("dead"))
        for job_id in ("bad-1", "bad-2"):
            rig.fail(job_id, delay=1000.0)
        rig.queue.bury("dead", now=NOW)
        rig.push(job("now", perform_at=NOW), job("soon", perform_at=NOW + 5))
        assert rig.ids(state="due", now=NOW) == ["now"]
        assert rig.ids(state="scheduled", now=NOW) == ["soon"]
        assert sorted(rig.ids(state="retrying", now=NOW)) == ["bad-1", "bad-2"]
        assert rig.ids(state="morgue", now=NOW) == ["dead"]
        assert rig.ids(state="taken", now=NOW) == []
        assert sorted(rig.ids(now=NOW)) == ["bad-1", "bad-2", "now", "soon"]
        assert sorted(rig.ids(state="due", now=NOW + 2000)) == ["bad-1", "bad-2", "now", "soon"]
        for state in ("due", "scheduled", "retrying", "morgue"):
            assert all(item.state == state for item in rig.queue.jobs(state, now=NOW))

    def test_taken_jobs_are_listed(self, rig: QueueRig) -> None:
        rig.push(job("a", "old", 1.0))
        rig.take("a")
        rig.push(job("a", "new", 2.0))
        (taken,), (waiting,) = rig.queue.jobs("taken", now=NOW), rig.queue.jobs(now=NOW)
        assert (taken.state, taken.payloads) == ("taken", [("old", 1.0)])
        assert (waiting.state, waiting.payloads) == ("due", [("new", 2.0)])

    @pytest.mark.parametrize("failing", [1, 12], ids=["few-fail", "most-fail"])
    def test_retrying_jobs_come_by_perform_at(self, rig: QueueRig, failing: int) -> None:
        ids = [f"bad-{i}" for i in range(failing)]
        rig.push(*(job(job_id) for job_id in ids))
        for i, job_id in enumerate(ids):
            rig.fail(job_id, delay=100.0 - i)
        rig.push(*(job(f"later-{i}", perform_at=NOW + 50 + i) for i in range(12)))
        waits = {job_id: 100.0 - i for i, job_id in enumerate(ids)}
        assert rig.ids(state="retrying", limit=5, now=NOW) == sorted(ids, key=lambda item: waits[item])

    def test_by_retry_count_fresh_ones_count_as_minus_one(self, rig: QueueRig) -> None:
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

    def test_buried_jobs_come_by_the_time_of_burial(self, rig: QueueRig) -> None:
        ids = [f"job-{i}" for i in range(10)]
        rig.push(*(job(job_id) for job_id in ids))
        for i, job_id in enumerate(reversed(ids)):
            rig.queue.bury(job_id, now=NOW + i)
        assert rig.ids(state="morgue", limit=3) == ids[::-1]
        assert rig.ids(state="morgue", limit=3, reverse=True) == ids
        assert rig.ids(state="morgue", order_by="id", limit=3) == ids
        assert rig.ids(state="morgue", min=NOW + 2, max=NOW + 4) == ["job-7", "job-6", "job-5"]

    def test_bounds_are_included_and_bound_the_order_value(self, rig: QueueRig) -> None:
        rig.push(*(job(f"job-{i}", perform_at=NOW + i) for i in range(10)))
        assert rig.ids(min=NOW + 3, max=NOW + 5, now=NOW) == ["job-3", "job-4", "job-5"]
        assert rig.ids(min=NOW + 8, reverse=True, limit=1, now=NOW) == ["job-9", "job-8"]
        assert rig.ids(order_by="id", min="job-7", max="job-8", now=NOW) == ["job-7", "job-8"]
        assert rig.ids(min=NOW + 99, now=NOW) == []

    def test_match_is_a_pattern_of_ids(self, rig: QueueRig) -> None:
        rig.push(*(job(str(i), perform_at=NOW + 100 - i) for i in range(100)))
        assert rig.ids(match="4*", now=NOW, limit=4) == [str(i) for i in (49, 48, 47, 46, 45, 44, 43, 42, 41, 40, 4)]
        assert rig.ids(match="[12]5", order_by="id", now=NOW) == ["15", "25"]
        assert rig.ids(match="nothing*", now=NOW) == []
        assert rig.ids(match="4?", state="due", now=NOW + 55) == ["49", "48", "47", "46", "45"]

    def test_what_makes_no_sense_is_refused_and_told(self, rig: QueueRig) -> None:
        rows: list[tuple[dict[str, Any], str]] = [
            ({"state": "waiting"}, "scheduled, due, retrying, taken, morgue"),
            ({"order_by": "age"}, "perform_at, retry_count, id"),
            ({"order_by": "buried_at"}, "perform_at, retry_count, id"),
            ({"state": "morgue", "order_by": "perform_at"}, "buried_at, id"),
            ({"limit": 0}, "1 to 1000"),
            ({"limit": 1001}, "1 to 1000"),
            ({"limit": True}, "1 to 1000"),
            ({"min": "4"}, "number"),
            ({"max": float("nan")}, "number"),
            ({"order_by": "id", "min": 4}, "str"),
            ({"match": 4}, "pattern"),
            ({"after": "42"}, "cursor"),
            ({"after": "not base64!"}, "cursor"),
        ]
        for options, says in rows:
            with case(options), pytest.raises(ConfigError, match=says):
                rig.queue.jobs(**options)

    def test_a_cursor_of_another_order_is_refused(self, rig: QueueRig) -> None:
        rig.push(job("a"), job("b"))
        cursor = rig.queue.jobs(limit=1).cursor
        for options in ({"order_by": "id"}, {"reverse": True}, {"order_by": ORDERS[1]}):
            with pytest.raises(ConfigError, match="another order"):
                rig.queue.jobs(after=cursor, **options)

    def test_looking_changes_nothing(self, rig: QueueRig) -> None:
        rig.push(job("a"), job("b", perform_at=NOW + 5))
        before = {key: rig.client.command("DUMP", key) for key in rig.all_keys()}
        for state in (None, "scheduled", "due", "retrying", "taken", "morgue"):
            for order_by in (None, "id"):
                rig.ids(state=state, order_by=order_by)
        rig.queue.stats(), rig.queue.peek("a"), rig.queue.why("a"), rig.app.shards(rig.queue)
        assert {key: rig.client.command("DUMP", key) for key in rig.all_keys()} == before


def jobs_of_one_shard(rig: QueueRig, count: int) -> list[str]:
    """Ids that share a shard."""
    found = (f"id-{number}" for number in itertools.count() if rig.shard_index(f"id-{number}") == 0)
    return list(itertools.islice(found, count))


def tell_of_activities(rig: QueueRig, *activities: dict[str, object] | None) -> None:
    """The heartbeat of the node that holds the rig's shards."""
    identity = Identity("tester", {"Orders": SHARDS}, len(activities), "1.0", host="host", pid=7)
    call = Membership(identity, "lowq", silence=60.0, shares=True).heartbeat_call({"performing": activities})
    rig.client.run(call.script, call.key, *call.args)


@on_memory
class TestWhy:
    def test_of_jobs_that_are_not_due(self, rig: QueueRig) -> None:
        options = json.dumps({"shards_count": SHARDS, "options": {"max_retry_count": 7}})
        rig.client.command("HSET", queues_key("lowq"), "Orders", options)
        rig.push(job("buried"), job("failed"), job("later", perform_at=NOW + 250))
        rig.queue.bury("buried", now=NOW - 90)
        rig.fail("failed", retry_count=2, delay=250.0)
        rows: list[tuple[str, str | None, str, float | None, str]] = [
            ("nobody", None, "absent", None, ""),
            ("buried", "morgue", "buried", None, "1 min 30 s ago"),
            ("later", "scheduled", "not_due", NOW + 250, "due in 4 min 10 s"),
            ("failed", "retrying", "retry_wait", NOW + 250, "retry 3 of 7, due in 4 min 10 s"),
        ]
        for job_id, state, reason, until, detail in rows:
            with case(job_id):
                why = rig.queue.why(job_id, now=NOW)
                assert (why.state, why.reason, why.until) == (state, reason, until)
                assert detail in why.detail

    def test_no_owner_yet_or_any_more(self, rig: QueueRig) -> None:
        rig.push(job("a"))
        nobody = f"shard {rig.shard_index('a')} is leased to nobody"
        why = rig.queue.why("a", now=NOW)
        assert (why.state, why.reason) == ("due", "no_owner")
        assert nobody in why.detail
        rig.client.run("surrender", rig.prefix_of("a"), repr(NOW + 10), rig.own("a").lease.token, "")
        assert f"{nobody} for 1 min 30 s now" in rig.queue.why("a", now=NOW + 100).detail

    def test_in_flight_and_its_owner_alive_or_dead(self, rig: QueueRig) -> None:
        rig.push(job("a"))
        rig.take("a")
        rig.push(job("a", b'"newer"'), now=NOW + 1)
        why = rig.queue.why("a", now=NOW + 3)
        assert (why.state, why.reason, why.in_flight) == ("taken", "performing", 0)
        assert "3.0 s ago" in why.detail
        assert "tester" in why.detail
        rig.client.command("DEL", rig.prefix_of("a") + "lease")
        rig.client.command("HSET", rig.prefix_of("a") + "meta", "leased_until", repr(NOW))
        assert rig.queue.why("a", now=NOW).reason == "no_owner"

    def test_paused(self, rig: QueueRig) -> None:
        rig.push(job("a"))
        rig.own("a")
        rig.queue.pause(now=NOW)
        why = rig.queue.why("a", now=NOW + 5)
        assert (why.state, why.reason) == ("due", "paused")
        rig.queue.resume()
        assert rig.queue.why("a", now=NOW).reason == "next"

    def test_behind_counts_the_older_jobs_of_its_shard(self, rig: QueueRig) -> None:
        first, *others, last = jobs_of_one_shard(rig, 12)
        for number, job_id in enumerate([first, *others, last]):
            rig.push(job(job_id), now=NOW + number)
        rig.own(last)
        why = rig.queue.why(last, now=NOW + 100)
        assert (why.state, why.reason) == ("due", "behind")
        assert why.detail == f"behind 11 older jobs of shard {rig.shard_index(last)}"
        assert rig.queue.why(first, now=NOW + 100).reason == "next"

    def test_busy_says_with_what_and_since_when(self, rig: QueueRig) -> None:
        old, *others = jobs_of_one_shard(rig, 6)
        for number, job_id in enumerate([old, *others]):
            rig.push(job(job_id), now=NOW + number / 100)
        rig.own(old).in_flight.take(5, NOW + 1)
        why = rig.queue.why(others[-1], now=NOW + 305)
        assert (why.state, why.reason, why.ahead) == ("due", "busy", 0)
        assert (why.in_flight, why.in_flight_since) == (5, NOW + 1)
        first = sorted([old, *others[:-1]])[:3]
        assert why.in_flight_ids == tuple(first)
        shard = rig.shard_index(old)
        assert why.detail == (
            f"next of shard {shard}, which owner tester has been busy with for 5 min 4 s: {', '.join(first)} and 2 more"
        )

    def test_busy_names_the_thread_and_who_else_is_ahead(self, rig: QueueRig) -> None:
        stuck, older, mine = jobs_of_one_shard(rig, 3)
        rig.push(job(stuck))
        rig.take(stuck)
        rig.push(job(older), now=NOW + 1)
        rig.push(job(mine), now=NOW + 2)
        shard = rig.shard_index(mine)
        tell_of_activities(rig, None, {"queue": "Orders", "shard": shard, "ids": [stuck], "count": 1, "seconds": 5.0})
        why = rig.queue.why(mine, now=NOW + 10)
        assert (why.reason, why.ahead, why.thread, why.in_flight_ids) == ("busy", 1, 1, (stuck,))
        assert why.detail == (
            f"behind 1 older job of shard {shard}, which thread 1 of node {why.node} has been busy with for 10 s: "
            + stuck
        )

    def test_busy_is_looked_up_in_long_flights_too(self, rig: QueueRig) -> None:
        *many, last = jobs_of_one_shard(rig, 401)
        rig.push(*map(job, many))
        rig.own(last).in_flight.take(400, NOW + 1)
        rig.push(job(last), now=NOW + 1)
        why = rig.queue.why(last, now=NOW + 4)
        assert (why.reason, why.in_flight, why.in_flight_since, len(why.in_flight_ids)) == ("busy", 400, NOW + 1, 3)
        assert set(why.in_flight_ids) <= set(many)

    def test_no_thread_is_free(self, rig: QueueRig) -> None:
        rig.push(job("a"))
        rig.own("a")
        other = {"queue": "Mail", "shard": 0, "ids": ["x"], "count": 1, "seconds": 0.1}
        tell_of_activities(rig, other, None)
        assert rig.queue.why("a", now=NOW + 1).reason == "next"
        tell_of_activities(rig, other, other)
        why = rig.queue.why("a", now=NOW + 1)
        assert why.reason == "no_thread"
        shard = rig.shard_index("a")
        assert why.detail == f"next of shard {shard}; no thread of node {why.node} is free (2 of 2 busy)"


@on_memory
class TestRegistries:
    def test_a_handle_without_shards_count_looks_it_up_once_known(self, rig: QueueRig) -> None:
        queue = rig.app.queue("Orders")
        with pytest.raises(UnknownQueueError, match="no queue is known"):
            queue.jobs()
        rig.app.register("Orders", SHARDS)
        assert queue.shards_count == SHARDS
        assert queue.jobs().jobs == []
        with pytest.raises(UnknownQueueError, match=r"'Order' .*did you mean 'Orders'"):
            rig.app.queue("Order").stats()

    def test_queues_are_listed_with_their_options(self, rig: QueueRig) -> None:
        rig.app.register("Orders", SHARDS)
        options = json.dumps({"shards_count": 2, "options": {"max_retry_count": 3}})
        rig.client.command("HSET", queues_key("lowq"), "Bills", options)
        bills, orders = rig.app.queues()
        assert (bills.name, bills.shards_count, bills.options) == ("Bills", 2, {"max_retry_count": 3})
        assert (orders.name, orders.shards_count, orders.options) == ("Orders", SHARDS, {})
        for name, found, retries in (("Orders", {}, 25), ("Bills", {"max_retry_count": 3}, 3)):
            queue = rig.app.queue(name)
            assert (queue.options, queue.max_retry_count) == (found, retries)

    def test_nodes_tell_what_they_say_and_forgive_what_they_do_not(self, rig: QueueRig) -> None:
        says = {"host": "h", "pid": 7, "threads": 5, "shards": {"Orders": [0, 2]}, "queues": ["Orders"], "news": 1}
        for name, text in (("b", json.dumps(says)), ("a", "{}"), ("c", "no json")):
            rig.client.run("heartbeat", nodes_key("lowq"), "", name, "", text, 60)
        rig.client.run("heartbeat", nodes_key("lowq"), "", "silent", "", "{}", 1e9)
        rig.client.command("HSET", nodes_key("lowq"), "silent", "1000000000.5 60 0 {}")
        a, b, *_ = rig.app.nodes()
        assert (a.name, a.host, a.pid, a.queues, a.shards, a.started_at) == ("a", "", 0, (), {}, None)
        assert (b.host, b.pid, b.threads, b.queues, b.shards) == ("h", 7, 5, ("Orders",), {"Orders": [0, 2]})
        assert 0 <= b.seconds_ago < 60
        assert "silent" not in [node.name for node in rig.app.nodes()]

    def test_a_node_of_an_older_version_does_not_say_how_many_ids(self, rig: QueueRig) -> None:
        tell_of_activities(rig, {"queue": "Orders", "shard": 1, "ids": ["a", "b"], "seconds": 1.0}, None)
        (node,) = rig.app.nodes()
        assert node.performing == ({"queue": "Orders", "shard": 1, "ids": ["a", "b"], "count": 2, "seconds": 1.0}, None)

    def test_shards_tell_their_owner_and_length(self, rig: QueueRig) -> None:
        rig.push(job("a"), now=NOW - 5)
        shard = rig.own("a")
        mine = rig.shard_index("a")
        infos = rig.app.shards(rig.queue)
        assert [info.index for info in infos] == [0, 1, 2]
        info = infos[mine]
        assert shard.lease.current is not None
        assert (info.owner, info.fence, info.length, info.oldest_id) == ("tester", shard.lease.current.fence, 1, "a")
        assert info.lease_seconds is not None
        assert 0 < info.lease_seconds <= 600
        others = [other for other in infos if other.index != mine]
        assert all((other.owner, other.fence, other.lease_seconds) == (None, None, None) for other in others)
        rig.client.run("heartbeat", nodes_key("lowq"), "", "host:7:tester", "", "{}", 60)
        assert rig.app.shards(rig.queue)[mine].owner == "host:7:tester"
