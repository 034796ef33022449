"""What people do to a queue by hand, to single jobs, to many, to the whole of it."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any
from uuid import UUID

import pytest

from lowq.errors import ConfigError, JobError, QueueInUse, UnknownQueueError
from lowq.job import Job
from lowq.operate.actions import ACTIONS, Acted
from lowq.operate.bulk import Step
from lowq.shards.delivery import Failure
from lowq.store.keys import shard_prefix
from tests.leases import run_out
from tests.rows import case
from tests.rules.queue_rig import SHARDS, QueueRig
from tests.rules.support import NOW, REMAINS, job, report
from tests.tiers import real_redis_often

pytestmark = real_redis_often


def looked_up(rig: QueueRig, job_id: str, *state: Any, now: float | None = None) -> Job:
    found = rig.queue.peek(job_id, *state, now=now)
    assert found is not None
    return found


def numbers(count: int, name: str = "job") -> list[str]:
    return [f"{name}-{i:04}" for i in range(count)]


# --- single ids ---------------------------------------------------------------------------------------------------


def test_perform_now_makes_a_job_due_and_keeps_its_retry_count(rig: QueueRig) -> None:
    rig.push(job("failed"))
    rig.fail("failed", retry_count=4)
    rig.push(job("a", perform_at=NOW + 50), job("b", perform_at=NOW + 50))
    assert rig.queue.perform_now(["a", "failed"], now=NOW + 1) == Acted(done=2)
    assert rig.ids(state="due", now=NOW + 1) == ["a", "failed"]
    assert looked_up(rig, "a").perform_at == NOW + 1
    assert looked_up(rig, "failed").retry_count == 4


def test_bury_moves_waiting_jobs_to_the_morgue_with_the_reason_or_the_last_error(rig: QueueRig) -> None:
    rows: list[tuple[str | None, str | None, str | None]] = [
        ("obsolete", "division by zero", "obsolete"), ("caf\udce9", None, "caf\\udce9"),
        (None, "division by zero", "division by zero"), (None, None, None),
    ]  # fmt: skip
    for number, (reason, error, shown) in enumerate(rows):
        with case(reason, error):
            job_id = f"job-{number}"
            rig.push(job(job_id, 1, 1.0))
            if error:
                rig.fail(job_id, error=error.encode())
            assert rig.queue.bury(job_id, reason=reason, now=NOW) == Acted(done=1)
            found = looked_up(rig, job_id)
            assert (found.state, found.payloads, found.error) == ("morgue", [(1, 1.0)], shown)


def test_a_reason_that_is_no_text_is_refused(rig: QueueRig) -> None:
    rig.push(job("a"))
    for reason in (5, b"obsolete", ValueError("obsolete")):
        with case(reason), pytest.raises(ConfigError, match="it is a text"):
            rig.queue.bury("a", reason)  # type: ignore[arg-type]  # that is the point
        with case(reason), pytest.raises(ConfigError, match="it is a text"):
            rig.queue.bulk("bury", reason=reason)  # type: ignore[arg-type]
    assert rig.ids() == ["a"]


def test_kick_makes_buried_jobs_wait_again_afresh_and_due(rig: QueueRig) -> None:
    rig.push(job("a", "old", 1.0))
    rig.queue.bury("a", now=NOW)
    rig.push(job("a", "new", 2.0, perform_at=NOW + 99))
    assert rig.queue.kick("a", now=NOW + 1) == Acted(done=1)
    found = looked_up(rig, "a", now=NOW + 1)
    assert (found.state, found.payloads) == ("due", [("old", 1.0), ("new", 2.0)])
    assert (found.perform_at, found.retry_count, found.error) == (NOW + 1, -1, None)
    assert rig.queue.peek("a", "morgue") is None


def test_delete_removes_waiting_and_buried_jobs_alike(rig: QueueRig) -> None:
    rig.push(job("a"), job("b"))
    rig.queue.bury(["a", "b"], now=NOW)
    rig.push(job("a", "again"), job("c"))
    assert rig.queue.delete(["a", "b", "c", "d"]) == Acted(done=3, missing=1)
    assert {key.rpartition(":")[2] for key in rig.all_keys()} <= REMAINS


def test_ids_in_flight_and_what_waits_of_them_are_left_alone_and_told(rig: QueueRig) -> None:
    rig.push(job("a", "old"))
    rig.take("a")
    for action in (rig.queue.perform_now, rig.queue.bury, rig.queue.delete):
        assert action("a") == Acted(in_flight=1)
    assert rig.queue.kick("a") == Acted(missing=1)
    assert looked_up(rig, "a").state == "taken"
    rig.push(job("a", "new"))
    assert rig.queue.delete("a") == Acted(in_flight=1)
    steps = list(rig.queue.bulk("delete", now=NOW))
    assert (steps[0].total, steps[-1].done) == (1, 0)
    assert looked_up(rig, "a", "due", now=NOW).payloads[0][0] == "new"


def test_cancel_deletes_what_waits_and_what_is_in_flight_ends_with_its_next_outcome(rig: QueueRig) -> None:
    rig.push(job("retries", 1, 1.0), job("later", 1, 1.0, perform_at=NOW + 50), job("dead", 1, 1.0))
    rig.fail("retries", retry_count=4)
    rig.queue.bury("dead", now=NOW)
    outcomes: list[tuple[str, list[Any]]] = [
        ("fail", [Failure("runs", "retry", 0, 10.0, b"boom")]),
        ("fail", [Failure("runs", "exhausted", 0, 0.0, b"boom")]),
        ("fail", [Failure("runs", "solo", 0, 0.0, b"boom")]),
        ("release", [("runs", 5.0)]),
    ]
    for number, (outcome, jobs) in enumerate(outcomes):
        with case(outcome, jobs):
            rig.push(job("runs", "old", 1.0))
            shard = rig.take("runs")
            rig.push(job("runs", "dropped", 2.0))
            for _ in range(2):  # as if the reply had been lost
                acted = rig.queue.cancel("runs")
                assert (acted, acted.running) == (Acted(done=1, signalled=1), ("runs",))
            assert rig.queue.peek("runs", "due", now=NOW) is None
            assert "it was cancelled, and has not ended yet" in rig.queue.why("runs").detail
            rig.push(job("runs", "newer", 3.0))
            report(shard, outcome, jobs, NOW)
            found = looked_up(rig, "runs", now=NOW)
            assert (found.state, found.payloads, found.retry_count) == ("due", [("newer", 3.0)], -1)
            assert rig.queue.cancel("runs") == Acted(done=1)
            assert rig.queue.stats().cancelled == 3 * (number + 1)
    assert rig.queue.cancel(["retries", "later", "dead", "nobody"]) == Acted(done=2, missing=2)
    assert rig.ids(state="morgue") == ["dead"]
    assert (rig.queue.stats().failed, rig.queue.statistics().tasks.done) == (1, rig.queue.stats().cancelled)


def test_what_a_dead_holder_had_of_a_cancelled_job_is_removed(rig: QueueRig) -> None:
    rig.push(job("a", "old"))
    shard = rig.take("a")
    assert rig.queue.cancel("a").signalled == 1
    run_out(rig.client, shard.prefix)
    assert "removes it, as it was cancelled" in rig.queue.why("a").detail
    rig.push(job("a", "newer"))
    rig.queue.release_all()
    found = looked_up(rig, "a")
    assert ([payload for payload, _ in found.payloads], found.crashes) == (["newer"], 0)


def test_what_is_nowhere_is_missing_and_told_of_the_first_thousand(rig: QueueRig) -> None:
    for action in ACTIONS:
        with case(action):
            acted = getattr(rig.queue, action)(["x", "y"])
            assert (acted.missing, int(acted), bool(acted)) == (2, 0, False)
            assert getattr(rig.queue, action)([]) == Acted()
    acted = rig.queue.kick(numbers(1500))
    assert (acted.missing, len(acted.left)) == (1500, 1000)
    assert set(acted.left) <= {(job_id, "not in the morgue") for job_id in numbers(1500)}


def test_ids_are_given_as_one_or_many_of_any_kind(rig: QueueRig) -> None:
    uuid = UUID(int=7)
    rig.push(job("abc"), job("42"), job(str(uuid)))
    assert [rig.queue.bury(item).done for item in ("abc", 42, uuid)] == [1, 1, 1]
    assert rig.queue.kick(item for item in ("abc", 42, uuid)) == Acted(done=3)
    with pytest.raises(JobError):
        rig.queue.delete([None])  # type: ignore[list-item]  # that is the point


def test_bytes_and_dicts_are_not_taken_for_the_numbers_and_keys_that_they_iterate_over(rig: QueueRig) -> None:
    rig.push(job("42"), job("52"), job("50"))
    wrong: list[Any] = [b"42", bytearray(b"42"), memoryview(b"42"), [b"42"], None, 4.2, {"42": 1}, [{"id": "42"}]]
    for action in (*ACTIONS, "moments", "fetch", "describe_all"):
        for ids in wrong:
            with case(action, ids), pytest.raises(JobError, match="an id is a str, an int or a UUID"):
                getattr(rig.queue, action)(ids)
    assert set(rig.ids()) == {"42", "50", "52"}


def test_many_ids_are_streamed(rig: QueueRig) -> None:
    ids = numbers(1500)
    rig.push(*(job(item) for item in ids))

    def source() -> Iterator[str]:
        yield from ids[:1200]
        assert rig.queue.stats().morgue_length > 0, "nothing was done before all ids were read"
        yield from ids[1200:]

    assert rig.queue.bury(source()) == Acted(done=1500)


def test_a_job_of_many_payloads_is_moved_whole(rig: QueueRig) -> None:
    for names in ("a", "b"):
        rig.push(*(job("x", f"{names}{i}", float(i)) for i in range(1300)))
        assert rig.queue.bury("x", now=NOW) == Acted(done=1)
    assert (looked_up(rig, "x").state, looked_up(rig, "x").payloads_count) == ("morgue", 2600)
    assert rig.queue.stats().buried == 2
    rig.push(job("x", "c", 2000.0))
    assert rig.queue.kick("x", now=NOW) == Acted(done=1)
    found = looked_up(rig, "x", now=NOW)
    assert (found.state, found.payloads_count, rig.queue.stats().morgue_length) == ("due", 2601, 0)


def test_actions_may_be_repeated_after_a_lost_reply(rig: QueueRig) -> None:
    rig.push(job("a", 1, 1.0))
    for action in ("bury", "kick", "perform_now", "bury", "kick"):
        for _ in range(2):
            getattr(rig.queue, action)("a", now=NOW)
    found = looked_up(rig, "a", now=NOW)
    assert (found.state, found.payloads) == ("due", [(1, 1.0)])


# --- many ---------------------------------------------------------------------------------------------------------


def begin(steps: Iterator[Step]) -> Step:
    """Iterates until all are counted."""
    return next(step for step in steps if not step.counting)


def done(steps: Iterator[Step]) -> tuple[int, int]:
    """How many there were when it began, and to how many it was done."""
    counted = [step for step in steps if not step.counting]
    return counted[0].total, counted[-1].done


def test_kick_empties_the_morgue_step_by_step(rig: QueueRig) -> None:
    ids = numbers(700)
    rig.push(*(job(item) for item in ids))
    rig.queue.bury(ids, now=NOW)
    bulk = rig.queue.bulk("kick", now=NOW + 1)
    assert rig.queue.stats().morgue_length == 700, "nothing happens before it is iterated over"
    steps = list(bulk)
    assert (steps[0].done, steps[0].total) == (0, 700)
    assert (steps[-1].done, steps[-1].total) == (700, 700)
    assert [step.done for step in steps] == sorted(step.done for step in steps)
    assert len(steps) > 3
    assert (rig.queue.stats(now=NOW + 1).due, rig.queue.stats().morgue_length) == (700, 0)


def test_states_patterns_and_bounds_select(store_url: str) -> None:
    everything = [f"{name}-{n}" for name in ("bad", "due", "later") for n in range(6)]
    rows: list[tuple[str, dict[str, Any], list[str]]] = [
        ("delete", {}, everything),
        ("delete", {"state": "retrying"}, everything[:6]),
        ("delete", {"state": "due"}, everything[6:12]),
        ("bury", {"state": "scheduled"}, everything[12:]),
        ("bury", {"match": "*-[34]"}, [item for item in everything if item[-1] in "34"]),
        ("delete", {"min": NOW + 52, "max": NOW + 54}, everything[14:17]),
        ("delete", {"match": "*", "max": NOW}, everything[6:12]),
        ("perform_now", {}, [*everything[:6], *everything[12:]]),
        ("perform_now", {"state": "due"}, []),
    ]
    for action, wanted, expected in rows:
        with case(action, wanted), closing(QueueRig(store_url)) as rig:
            rig.client.command("FLUSHALL")
            rig.push(*(job(item) for item in everything[:6]))
            for item in everything[:6]:
                rig.fail(item, delay=100.0)
            rig.push(*(job(item) for item in everything[6:12]))
            rig.push(*(job(item, perform_at=NOW + 50 + n) for n, item in enumerate(everything[12:])))
            bulk: Any = rig.queue.bulk
            assert done(bulk(action, now=NOW, **wanted)) == (len(expected), len(expected))
            if action == "perform_now":
                assert set(rig.ids(state="due", now=NOW)) == {*expected, *everything[6:12]}
            else:
                assert set(rig.ids(now=NOW)) == {*everything} - {*expected}
                assert set(rig.ids(state="morgue")) == ({*expected} if action == "bury" else set())


def test_delete_of_the_morgue_leaves_what_waits_and_the_other_way_round(rig: QueueRig) -> None:
    for state, left in (("morgue", "due"), (None, "morgue")):
        with case(state):
            rig.push(job("a", "old"))
            rig.queue.bury("a", now=NOW)
            rig.push(job("a", "new"))
            bulk: Any = rig.queue.bulk
            assert done(bulk("delete", state, now=NOW))[1] == 1
            assert looked_up(rig, "a", now=NOW).state == left


def test_what_is_buried_after_it_began_stays_buried(rig: QueueRig) -> None:
    ids = numbers(600)
    rig.push(*(job(item) for item in ids), now=None)
    rig.queue.bury(ids)
    steps = []
    for step in rig.queue.bulk("kick"):
        rig.queue.bury(ids)  # kicked jobs fail for good at once, as fast as they are kicked
        steps.append(step)
        assert len(steps) < 100, "it runs after its own tail"
    assert steps[-1] == Step(600, 600)
    assert rig.queue.stats().morgue_length == 600


@pytest.mark.parametrize("match", [None, "*"])
def test_delete_ends_while_producers_push_and_leaves_the_new_jobs(rig: QueueRig, match: str | None) -> None:
    rig.push(*(job(item) for item in numbers(600, "old")), now=None)
    pushed = done = 0
    for step in rig.queue.bulk("delete", match=match):
        rig.push(*(job(f"new-{pushed + i}") for i in range(300)), now=None)
        pushed += 300
        done = step.done
        assert pushed < 30_000, "it runs after what is pushed"
    assert done == 600
    assert rig.queue.stats().length == pushed


def test_an_id_that_comes_back_after_it_began_is_new(rig: QueueRig) -> None:
    ids = numbers(900)
    rig.push(*(job(item, "old") for item in ids), now=None)
    steps = rig.queue.bulk("delete")
    next(steps)
    rig.queue.delete(ids)
    rig.push(*(job(item, "new") for item in ids), now=None)
    assert max((step.done for step in steps), default=0) == 0
    assert rig.queue.stats().length == 900


def test_it_ends_while_jobs_are_pushed_for_later(rig: QueueRig) -> None:
    rig.push(*(job(item, delay=3600.0) for item in numbers(600, "old")), now=None)
    steps = rig.queue.bulk("delete", "scheduled")
    begin(steps)
    done = [0]
    for step in steps:
        rig.push(*(job(f"new-{len(done)}-{i}", delay=3000.0) for i in range(300)), now=None)
        done.append(step.done)
        assert len(done) < 200, "it runs after what is pushed"
    assert done[-1] >= 600
    assert rig.ids(match="old*") == []


@pytest.mark.parametrize("are_pushed", [False, True])
def test_scheduled_jobs_that_became_due_are_done_too_unless_others_are_pushed(rig: QueueRig, are_pushed: bool) -> None:
    ids = numbers(30)
    rig.push(*(job(item, delay=3600.0) for item in ids), now=None)
    steps = rig.queue.bulk("bury", "scheduled")
    assert begin(steps).total == 30
    seconds, micros = rig.client.command("TIME")
    for item in ids:  # their time comes, as if it had passed since they were pushed
        rig.client.command("ZADD", rig.prefix_of(item) + "due", "XX", f"{int(seconds)}.{int(micros):06}", item)
    if are_pushed:
        rig.push(*(job(item) for item in numbers(50, "new")), now=None)
        assert list(steps) == []
        assert rig.queue.stats().length == 80
    else:
        assert list(steps)[-1].done == 30


@pytest.mark.parametrize("state", [None, "retrying", "morgue"])
def test_it_can_be_left_while_nothing_fits(rig: QueueRig, state: Any) -> None:
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
    assert sum(step.counting for step in idle) >= (1 if state == "retrying" else 2)
    assert sum(not step.counting for step in idle) > 3, "it looks at 4,000 ids in one step"
    assert [step.counting for step in steps] == sorted((step.counting for step in steps), reverse=True)
    assert {step.done for step in steps if step.counting} == {0}


def test_what_makes_no_sense_is_refused_at_once(rig: QueueRig) -> None:
    rows: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        (("burn",), {}, "perform_now, bury, kick, delete"),
        (("kick", "due"), {}, "morgue"),
        (("perform_now", "morgue"), {}, "scheduled, due, retrying"),
        (("delete", "taken"), {}, "scheduled, due, retrying, morgue"),
        (("delete",), {"match": 4}, "pattern"),
        (("delete",), {"min": "x"}, "number"),
        (("delete",), {"reason": "why not"}, "only bury"),
    ]
    for args, options, says in rows:
        with case(args, options), pytest.raises(ConfigError, match=says):
            rig.queue.bulk(*args, **options)


# --- the whole queue ----------------------------------------------------------------------------------------------


def test_paused_shards_hand_out_nothing_until_resumed(rig: QueueRig) -> None:
    rig.push(job("a"))
    assert [rig.queue.resume(), rig.queue.pause(now=NOW), rig.queue.pause(now=NOW + 60)] == [False, True, False]
    assert "paused for 1 min 30 s" in rig.queue.why("a", now=NOW + 90).detail
    assert rig.queue.stats().paused
    assert all(info.paused for info in rig.app.shards(rig.queue))
    shard = rig.own("a")
    assert shard.in_flight.take(10, NOW).jobs == []
    assert rig.queue.resume()
    assert [item.id for item in shard.in_flight.take(10, NOW).jobs] == ["a"]
    assert not rig.queue.stats().paused


def test_a_queue_is_dropped_when_no_node_holds_a_shard_any_more(rig: QueueRig) -> None:
    rig.app.registrations.enter("Orders", SHARDS)
    rig.app.queue("Bills", 2).push([{"id": 1}])
    others = {key for key in rig.all_keys() if "Orders" not in key}
    rig.push(*(job(f"bad-{i}") for i in range(3)), job("crashed"), job("flying"))
    for i in range(3):
        rig.fail(f"bad-{i}")
    report(rig.take("crashed"), "release", [("crashed", None)], NOW, crashed=True)
    rig.take("flying")
    rig.push(*(job(item) for item in numbers(1200)), *(job(item) for item in numbers(30, "dead")))
    rig.queue.bury(numbers(30, "dead"), now=NOW)
    rig.queue.pause()
    before = rig.queue.stats()
    with pytest.raises(QueueInUse, match="'Orders'"):
        rig.queue.drop()
    assert rig.queue.stats() == before
    for index in range(SHARDS):
        run_out(rig.client, shard_prefix("lowq", "Orders", index))
    assert rig.queue.drop() == 1235
    assert rig.all_keys() == others
    assert [info.name for info in rig.app.queues()] == ["Bills"]
    with pytest.raises(UnknownQueueError):
        rig.app.queue("Orders").stats()
    rig.queue.push([{"id": 2}])  # it may be used anew
    assert [info.name for info in rig.app.queues()] == ["Bills", "Orders"]
    assert rig.ids() == ["2"]
