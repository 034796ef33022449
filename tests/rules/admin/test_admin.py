"""What people do to a queue by hand, to single jobs, to many, to the whole of it."""

from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest

from lowq.admin.actions import ACTIONS, Acted
from lowq.admin.bulk import Step
from lowq.errors import ConfigError, JobError, QueueInUse, UnknownQueueError
from lowq.job import Job
from lowq.sharding import shard_of
from lowq.store.keys import shard_prefix
from tests.leases import run_out
from tests.rows import case
from tests.rules.queue_rig import SHARDS, QueueRig
from tests.rules.support import NOW, REMAINS, job
from tests.tiers import real_redis_often

pytestmark = real_redis_often


def states(rig: QueueRig, *ids: str, now: float = NOW) -> list[str | None]:
    jobs = rig.queue.fetch(ids, now=now)
    return [jobs[item].state if item in jobs else None for item in ids]


def looked_up(rig: QueueRig, job_id: str, now: float | None = None) -> Job:
    found = rig.queue.peek(job_id, now=now)
    assert found is not None
    return found


def numbers(count: int, name: str = "job") -> list[str]:
    return [f"{name}-{i:04}" for i in range(count)]


def become_due(rig: QueueRig, ids: list[str]) -> None:
    """Their time comes, as if it had passed since they were pushed."""
    for item in ids:
        due = rig.prefix_of(item) + "due"
        now = rig.client.command("TIME")
        rig.client.command("ZADD", due, "XX", f"{int(now[0])}.{int(now[1]):06}", item)
    assert rig.queue.stats().due == len(ids)


class TestSingleActions:
    def test_perform_now_makes_a_scheduled_job_due(self, rig: QueueRig) -> None:
        rig.push(job("a", perform_at=NOW + 50), job("b", perform_at=NOW + 50))
        assert rig.queue.perform_now("a", now=NOW + 1) == Acted(done=1)
        found = looked_up(rig, "a", now=NOW + 1)
        assert (found.state, found.perform_at) == ("due", NOW + 1)
        assert states(rig, "b") == ["scheduled"]

    def test_perform_now_keeps_the_retry_count(self, rig: QueueRig) -> None:
        rig.push(job("a"))
        rig.fail("a", retry_count=4)
        rig.queue.perform_now("a", now=NOW + 1)
        found = looked_up(rig, "a", now=NOW + 1)
        assert (found.state, found.retry_count) == ("due", 4)

    def test_bury_moves_waiting_jobs_to_the_morgue_with_the_reason(self, rig: QueueRig) -> None:
        rig.push(job("a", 1, 1.0), job("b"))
        assert rig.queue.bury(["a", "b"], reason="obsolete", now=NOW) == Acted(done=2)
        found = looked_up(rig, "a")
        assert (found.state, found.payloads, found.error) == ("morgue", [(1, 1.0)], "obsolete")

    def test_a_reason_that_utf_8_does_not_have_is_escaped(self, rig: QueueRig) -> None:
        rig.push(job("a"))
        rig.queue.bury("a", reason="caf\udce9", now=NOW)
        found = looked_up(rig, "a")
        assert found.error == "caf\\udce9"

    def test_bury_without_a_reason_keeps_the_last_error(self, rig: QueueRig) -> None:
        rig.push(job("a"), job("b"))
        rig.fail("a", error=b"division by zero")
        rig.queue.bury(["a", "b"], now=NOW)
        errors = [item.error for item in rig.queue.fetch(["a", "b"]).values()]
        assert errors == ["division by zero", None]

    def test_kick_makes_buried_jobs_wait_again_afresh_and_due(self, rig: QueueRig) -> None:
        rig.push(job("a", "old", 1.0))
        rig.queue.bury("a", now=NOW)
        rig.push(job("a", "new", 2.0, perform_at=NOW + 99))
        assert rig.queue.kick("a", now=NOW + 1) == Acted(done=1)
        found = looked_up(rig, "a", now=NOW + 1)
        assert (found.state, found.payloads) == ("due", [("old", 1.0), ("new", 2.0)])
        assert (found.perform_at, found.retry_count, found.error) == (NOW + 1, -1, None)
        assert rig.queue.peek("a", "morgue") is None

    def test_delete_removes_waiting_and_buried_jobs_alike(self, rig: QueueRig) -> None:
        rig.push(job("a"), job("b"))
        rig.queue.bury(["a", "b"], now=NOW)
        rig.push(job("a", "again"), job("c"))
        assert rig.queue.delete(["a", "b", "c", "d"]) == Acted(done=3, missing=1)
        left = {key.rpartition(":")[2] for key in rig.all_keys()}
        assert left <= REMAINS

    def test_ids_in_flight_are_left_alone_and_told(self, rig: QueueRig) -> None:
        rig.push(job("a"))
        rig.take("a")
        assert rig.queue.perform_now("a") == Acted(in_flight=1)
        assert rig.queue.bury("a") == Acted(in_flight=1)
        assert rig.queue.delete("a") == Acted(in_flight=1)
        assert rig.queue.kick("a") == Acted(missing=1)
        assert states(rig, "a") == ["taken"]

    def test_which_ids_were_left_is_told_of_the_first_thousand(self, rig: QueueRig) -> None:
        ids = [f"gone-{n}" for n in range(1500)]
        acted = rig.queue.kick(ids)
        assert (acted.missing, len(acted.left)) == (1500, 1000)
        assert set(acted.left) <= {(job_id, "not in the morgue") for job_id in ids}

    def test_what_waits_of_an_id_in_flight_stays_too(self, rig: QueueRig) -> None:
        rig.push(job("a", "old"))
        rig.take("a")
        rig.push(job("a", "new"))
        assert rig.queue.delete("a") == Acted(in_flight=1)
        assert rig.queue.peek("a", "due", now=NOW) is not None

    def test_what_is_nowhere_is_missing(self, rig: QueueRig) -> None:
        for action in ACTIONS:
            with case(action):
                acted = getattr(rig.queue, action)(["x", "y"])
                assert (acted.missing, int(acted), bool(acted)) == (2, 0, False)
                assert getattr(rig.queue, action)([]) == Acted()

    def test_a_second_time_nothing_is_found_to_do(self, rig: QueueRig) -> None:
        for action in ("bury", "kick", "delete"):
            with case(action):
                rig.push(job(f"to-{action}"))
                if action == "kick":
                    rig.queue.bury("to-kick")
                act = getattr(rig.queue, action)
                assert (int(act(f"to-{action}")), int(act(f"to-{action}"))) == (1, 0)

    def test_ids_are_given_as_one_or_many_of_any_kind(self, rig: QueueRig) -> None:
        uuid = UUID(int=7)
        rig.push(job("abc"), job("42"), job(str(uuid)))
        assert rig.queue.bury("abc") == Acted(done=1)
        assert rig.queue.bury(42) == Acted(done=1)
        assert rig.queue.bury(uuid) == Acted(done=1)
        assert rig.queue.kick(item for item in ("abc", 42, uuid)) == Acted(done=3)
        with pytest.raises(JobError):
            rig.queue.delete([None])  # type: ignore[list-item]  # that is the point

    def test_many_ids_are_streamed(self, rig: QueueRig) -> None:
        ids = numbers(1500)
        rig.push(*(job(item) for item in ids))
        read = 0

        def source() -> Iterator[str]:
            nonlocal read
            for item in ids:
                read += 1
                if read == 1200:
                    assert rig.queue.stats().morgue_length > 0, "nothing was done before all ids were read"
                yield item

        assert rig.queue.bury(source()) == Acted(done=1500)

    def test_a_job_of_many_payloads_is_moved_whole(self, rig: QueueRig) -> None:
        for names in ("a", "b"):
            rig.push(*(job("x", f"{names}{i}", float(i)) for i in range(1300)))
            assert rig.queue.bury("x", now=NOW) == Acted(done=1)
        found = looked_up(rig, "x")
        assert (found.state, found.payloads_count) == ("morgue", 2600)
        assert rig.queue.stats().buried == 2
        rig.push(job("x", "c", 2000.0))
        assert rig.queue.kick("x", now=NOW) == Acted(done=1)
        found = looked_up(rig, "x", now=NOW)
        assert (found.state, found.payloads_count) == ("due", 2601)
        assert rig.queue.stats().morgue_length == 0


def begin(steps: Iterator[Step]) -> Step:
    """Iterates until all are counted."""
    return next(step for step in steps if not step.counting)


def done(steps: Iterator[Step]) -> list[Step]:
    """All steps but those that only count."""
    return [step for step in steps if not step.counting]


class TestBulk:
    def test_kick_empties_the_morgue(self, rig: QueueRig) -> None:
        ids = numbers(700)
        rig.push(*(job(item) for item in ids))
        rig.queue.bury(ids, now=NOW)
        steps = list(rig.queue.bulk("kick", now=NOW + 1))
        assert (steps[0].done, steps[0].total) == (0, 700)
        assert (steps[-1].done, steps[-1].total) == (700, 700)
        assert [step.done for step in steps] == sorted(step.done for step in steps)
        assert len(steps) > 3
        stats = rig.queue.stats(now=NOW + 1)
        assert (stats.due, stats.morgue_length) == (700, 0)

    def test_nothing_happens_before_it_is_iterated_over(self, rig: QueueRig) -> None:
        rig.push(job("a"))
        rig.queue.bulk("delete")
        assert states(rig, "a") == ["due"]

    def test_states_select(self, rig: QueueRig) -> None:
        def fill() -> None:
            list(rig.queue.bulk("delete", now=NOW + 9999))
            rig.push(job("bad-1"), job("bad-2"))
            for item in ("bad-1", "bad-2"):
                rig.fail(item, delay=100.0)
            rig.push(job("due-1"), job("due-2"), job("due-3"), job("later-1", perform_at=NOW + 50))

        gone = {"due": {"due-1", "due-2", "due-3"}, "scheduled": {"later-1"}, "retrying": {"bad-1", "bad-2"}}
        everything = set().union(*gone.values())
        for state in (None, "due", "scheduled", "retrying"):
            fill()
            steps = done(rig.queue.bulk("delete", state, now=NOW))
            expected = gone.get(state or "", everything)
            assert (steps[0].total, steps[-1].done) == (len(expected), len(expected))
            assert set(rig.ids(now=NOW)) == everything - expected

    def test_match_selects_and_counts_beforehand(self, rig: QueueRig) -> None:
        rig.push(*(job(str(i), perform_at=NOW + i) for i in range(100)))
        steps = done(rig.queue.bulk("bury", match="4*", reason="fours", now=NOW + 45))
        assert (steps[0].total, steps[-1].done) == (11, 11)
        assert sorted(rig.ids(state="morgue")) == sorted(["4", *(str(i) for i in range(40, 50))])
        steps = done(rig.queue.bulk("delete", "morgue", match="?", now=NOW + 50))
        assert steps[-1].done == 1

    def test_bounds_select(self, rig: QueueRig) -> None:
        rig.push(*(job(str(i), perform_at=NOW + i) for i in range(20)))
        steps = done(rig.queue.bulk("delete", min=NOW + 3, max=NOW + 12, now=NOW + 7))
        assert (steps[0].total, steps[-1].done) == (10, 10)
        assert rig.ids(now=NOW) == [str(i) for i in (*range(3), *range(13, 20))]
        steps = done(rig.queue.bulk("delete", match="*", max=NOW + 14, now=NOW))
        assert (steps[0].total, steps[-1].done) == (5, 5)

    def test_perform_now_is_for_what_is_not_due(self, rig: QueueRig) -> None:
        rig.push(job("a"), *(job(item, perform_at=NOW + 50) for item in numbers(500)))
        steps = list(rig.queue.bulk("perform_now", now=NOW + 1))
        assert (steps[0].total, steps[-1].done) == (500, 500)
        assert rig.queue.stats(now=NOW + 1).due == 501
        assert [step.done for step in rig.queue.bulk("perform_now", "due", now=NOW + 1)] == [0]

    def test_delete_of_the_morgue_leaves_what_waits(self, rig: QueueRig) -> None:
        rig.push(job("a", "old"))
        rig.queue.bury("a", now=NOW)
        rig.push(job("a", "new"))
        assert list(rig.queue.bulk("delete", "morgue", now=NOW))[-1].done == 1
        assert states(rig, "a") == ["due"]
        rig.queue.bury("a", now=NOW)
        rig.push(job("a", "newer"))
        assert list(rig.queue.bulk("delete", now=NOW))[-1].done == 1
        assert states(rig, "a") == ["morgue"]

    def test_ids_in_flight_are_left_alone(self, rig: QueueRig) -> None:
        rig.push(job("a", "old"))
        rig.take("a")
        rig.push(job("a", "new"))
        steps = list(rig.queue.bulk("delete", now=NOW))
        assert (steps[0].total, steps[-1].done) == (1, 0)
        assert rig.queue.peek("a", "due", now=NOW) is not None

    def test_what_is_buried_after_it_began_stays_buried(self, rig: QueueRig) -> None:
        ids = numbers(600)
        rig.push(*(job(item) for item in ids), now=None)
        rig.queue.bury(ids)
        last = None
        for number, step in enumerate(rig.queue.bulk("kick")):
            # Kicked jobs fail for good at once, as fast as they are kicked.
            rig.queue.bury(ids)
            assert number < 100, "it runs after its own tail"
            last = step
        assert last is not None
        assert last.done == last.total == 600
        assert rig.queue.stats().morgue_length == 600

    @pytest.mark.parametrize("match", [None, "*"])
    def test_delete_ends_while_producers_push_and_leaves_the_new_jobs(self, rig: QueueRig, match: str | None) -> None:
        rig.push(*(job(item) for item in numbers(600, "old")), now=None)
        pushed: list[str] = []
        last = None
        for step in rig.queue.bulk("delete", match=match):
            new = [f"new-{len(pushed) + i}" for i in range(300)]
            rig.push(*(job(item) for item in new), now=None)
            pushed += new
            assert len(pushed) < 30_000, "it runs after what is pushed"
            last = step
        assert last is not None
        assert last.done == last.total == 600
        assert rig.queue.stats().length == len(pushed)

    def test_an_id_that_comes_back_after_it_began_is_new(self, rig: QueueRig) -> None:
        ids = numbers(900)
        rig.push(*(job(item, "old") for item in ids), now=None)
        steps = rig.queue.bulk("delete")
        next(steps)
        rig.queue.delete(ids)
        rig.push(*(job(item, "new") for item in ids), now=None)
        assert max((step.done for step in steps), default=0) == 0
        assert rig.queue.stats().length == 900

    def test_it_ends_while_jobs_are_pushed_for_later(self, rig: QueueRig) -> None:
        rig.push(*(job(item, delay=3600.0) for item in numbers(600, "old")), now=None)
        last = None
        steps = rig.queue.bulk("delete", "scheduled")
        begin(steps)
        for number, step in enumerate(steps):
            rig.push(*(job(f"new-{number}-{i}", delay=3000.0) for i in range(300)), now=None)
            assert number < 200, "it runs after what is pushed"
            last = step
        assert last is not None
        assert last.done >= 600
        assert rig.ids(match="old*") == []

    def test_scheduled_jobs_that_became_due_are_done_too_while_nothing_is_pushed(self, rig: QueueRig) -> None:
        rig.push(*(job(item, delay=3600.0) for item in numbers(30)), now=None)
        steps = rig.queue.bulk("bury", "scheduled")
        assert begin(steps).total == 30
        become_due(rig, numbers(30))
        assert list(steps)[-1].done == 30

    def test_scheduled_jobs_that_became_due_are_left_while_others_are_pushed(self, rig: QueueRig) -> None:
        rig.push(*(job(item, delay=3600.0) for item in numbers(30)), now=None)
        steps = rig.queue.bulk("bury", "scheduled")
        assert begin(steps).total == 30
        become_due(rig, numbers(30))
        rig.push(*(job(item) for item in numbers(50, "new")), now=None)
        assert list(steps) == []
        assert rig.queue.stats().length == 80

    @pytest.mark.parametrize("state", [None, "retrying", "morgue"])
    def test_it_can_be_left_while_nothing_fits(self, rig: QueueRig, state: Any) -> None:
        ids = numbers(4000)
        rig.push(*(job(item, perform_at=NOW + 50) for item in ids))
        match = None if state == "retrying" else "nothing*"
        if state == "morgue":
            rig.queue.bury(ids, now=NOW)
        elif state == "retrying":  # of a shard where one job failed every other would have to be looked at
            rig.push(job("failing"))
            rig.fail("failing", delay=9000.0)
        steps = list(rig.queue.bulk("delete", state, match=match, now=NOW))
        total = 1 if state == "retrying" else 0
        assert (steps[-1].done, steps[-1].total) == (total, total)
        idle = [step for step in steps if not step.done]
        assert sum(step.counting for step in idle) >= 2
        assert sum(not step.counting for step in idle) > 3, "it looks at 4,000 ids in one step"
        assert [step.counting for step in steps] == sorted((step.counting for step in steps), reverse=True)
        assert {step.done for step in steps if step.counting} == {0}

    def test_what_makes_no_sense_is_refused_at_once(self, rig: QueueRig) -> None:
        rows: list[tuple[Any, str]] = [
            (("burn",), "perform_now, bury, kick, delete"),
            (("kick", "due"), "morgue"),
            (("perform_now", "morgue"), "scheduled, due, retrying"),
            (("bury", "taken"), "scheduled, due, retrying"),
            (("delete", "taken"), "scheduled, due, retrying, morgue"),
        ]
        for args, says in rows:
            with case(args), pytest.raises(ConfigError, match=says):
                rig.queue.bulk(*args)

    def test_a_filter_that_makes_no_sense_is_refused_at_once(self, rig: QueueRig) -> None:
        rows: list[tuple[dict[str, Any], str]] = [({"match": 4}, "pattern"), ({"min": "x"}, "number")]
        for options, says in rows:
            with case(options), pytest.raises(ConfigError, match=says):
                rig.queue.bulk("delete", **options)

    def test_a_reason_is_for_bury(self, rig: QueueRig) -> None:
        with pytest.raises(ConfigError, match="only bury"):
            rig.queue.bulk("delete", reason="why not")


class TestPause:
    def test_paused_shards_hand_out_nothing_until_resumed(self, rig: QueueRig) -> None:
        rig.push(job("a"))
        assert rig.queue.pause(now=NOW)
        assert rig.queue.stats().paused
        assert all(info.paused for info in rig.app.shards(rig.queue))
        shard = rig.own("a")
        assert shard.in_flight.take(10, NOW).jobs == []
        assert rig.queue.resume()
        assert [item.id for item in shard.in_flight.take(10, NOW).jobs] == ["a"]
        assert not rig.queue.stats().paused

    def test_they_say_whether_they_changed_anything(self, rig: QueueRig) -> None:
        assert [rig.queue.resume(), rig.queue.pause(), rig.queue.pause(), rig.queue.resume()] == [
            False, True, False, True,
        ]  # fmt: skip

    def test_the_time_of_the_first_pause_is_kept(self, rig: QueueRig) -> None:
        rig.push(job("a"))
        rig.queue.pause(now=NOW)
        rig.queue.pause(now=NOW + 60)
        assert "paused for 1 min 30 s" in rig.queue.why("a", now=NOW + 90).detail


class TestDrop:
    def fill(self, rig: QueueRig) -> None:
        rig.app.register("Orders", SHARDS)
        rig.push(*(job(f"bad-{i}") for i in range(3)), job("flying"))
        for i in range(3):
            rig.fail(f"bad-{i}")
        rig.take("flying").in_flight.release([("flying", None)], NOW, crashed=True)
        rig.push(*(job(item) for item in numbers(1200)), *(job(item) for item in numbers(30, "dead")))
        rig.queue.bury(numbers(30, "dead"), now=NOW)
        rig.queue.pause()

    def leases_run_out(self, rig: QueueRig) -> None:
        for info in rig.app.shards(rig.queue):
            run_out(rig.client, shard_prefix("lowq", "Orders", info.index))

    def test_leaves_no_key(self, rig: QueueRig) -> None:
        self.fill(rig)
        self.leases_run_out(rig)
        assert rig.queue.drop() == 1234
        assert not any("Orders" in key for key in rig.all_keys())
        assert rig.app.queues() == []
        with pytest.raises(UnknownQueueError):
            rig.app.queue("Orders").stats()

    def test_removes_what_a_dead_owner_left_in_flight(self, rig: QueueRig) -> None:
        rig.push(job("a"))
        rig.take("a")
        self.leases_run_out(rig)
        assert rig.queue.drop() == 1
        assert rig.all_keys() == set()

    def test_is_refused_while_a_node_holds_a_shard(self, rig: QueueRig) -> None:
        self.fill(rig)
        before = rig.queue.stats()
        with pytest.raises(QueueInUse, match="'Orders'"):
            rig.queue.drop()
        assert rig.queue.stats() == before
        assert [info.name for info in rig.app.queues()] == ["Orders"]

    def test_other_queues_stay(self, rig: QueueRig) -> None:
        rig.push(job("a"))
        other = rig.app.queue("Bills", 2)
        other.push([{"id": 1}])
        rig.queue.drop()
        assert other.stats().length == 1
        assert [info.name for info in rig.app.queues()] == ["Bills"]

    def test_the_queue_may_be_used_anew(self, rig: QueueRig) -> None:
        rig.queue.push([{"id": 1}])
        rig.queue.drop()
        rig.queue.push([{"id": 2}])
        assert [info.name for info in rig.app.queues()] == ["Orders"]
        assert rig.ids() == ["2"]


def test_actions_may_be_repeated_after_a_lost_reply(rig: QueueRig) -> None:
    rig.push(job("a", 1, 1.0))
    for action in ("bury", "kick", "perform_now", "bury", "kick"):
        getattr(rig.queue, action)("a", now=NOW)
        getattr(rig.queue, action)("a", now=NOW)
    found = looked_up(rig, "a", now=NOW)
    assert (found.state, found.payloads) == ("due", [(1, 1.0)])


def test_every_id_goes_to_its_own_shard(rig: QueueRig) -> None:
    ids = numbers(30)
    rig.queue.push([{"id": item} for item in ids])
    lengths = [info.length for info in rig.app.shards(rig.queue)]
    assert lengths == [sum(shard_of(item.encode(), SHARDS) == index for item in ids) for index in range(SHARDS)]
