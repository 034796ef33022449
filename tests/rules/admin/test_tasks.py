"""The registry of tasks: what may begin, what a process reports, who cancels it, and what is left of a dead one."""

import json
from dataclasses import replace
from typing import Any

import pytest

import lowq
from lowq.admin import tasks
from lowq.admin.tasks import KEPT, MAX_ENDED, MAX_RUNNING, SILENCE, Task, TooManyTasks
from lowq.store.keys import tasks_key
from tests.rows import case
from tests.rules.queue_rig import QueueRig
from tests.rules.support import NOW

pytestmark = pytest.mark.parametrize("store_url", ["redis"], indirect=True)

KEY = tasks_key("lowq")
FACTS = json.dumps({"who": "ann", "queue": "Orders", "action": "kick", "filter": {}, "owner": "here:1"})


def begin(rig: QueueRig, task_id: str, now: float = NOW) -> tuple[int, Any]:
    entered, value = rig.client.run("task_begin", KEY, repr(now), task_id, FACTS, MAX_RUNNING, MAX_ENDED, SILENCE, KEPT)
    return entered, float(value)


def report(
    rig: QueueRig, task_id: str, state: str, done: int, total: int | str = "", error: str = "", now: float = NOW
) -> tuple[str, int]:
    reply, cancel = rig.client.run("task_report", KEY, repr(now), task_id, state, done, total, error, KEPT)
    return reply.decode(), cancel


def record(rig: QueueRig, task_id: str) -> str:
    raw = rig.client.command("HGET", KEY, task_id)
    return "" if raw is None else raw.decode()


def task(task_id: str = "one", **fields: Any) -> Task:
    return Task(task_id, "ann", "Orders", "delete", lowq.JobFilter(match="4*", min=1.5), "here:1", 0.0, 0.0, **fields)


class TestBegin:
    def test_it_is_there_for_all_as_it_was_given(self, rig: QueueRig) -> None:
        given = tasks.begin(rig.app, task(reason="caf\udce9", exact=True))
        assert given.began_at == given.heartbeat_at > 1_700_000_000
        assert tasks.find_task(rig.app, "one") == given
        assert tasks.all_tasks(rig.app) == [given]
        assert tasks.find_task(rig.app, "two") is None
        assert tasks.find_task(rig.app, "\udce9 {}") is None

    def test_a_bound_that_could_not_be_read_back_is_refused(self, rig: QueueRig) -> None:
        for name in ("min", "max", "before"):
            for bound in (2**53 + 2, -1e300, 1e16, *([float("inf")] if name != "before" else [])):
                with (
                    case(name, bound),
                    pytest.raises(lowq.ConfigError, match=f"^{name}=.*: a bound of a task is a number from -9"),
                ):
                    tasks.begin(rig.app, replace(task(), filter=lowq.JobFilter(**{name: bound})))  # type: ignore[arg-type]  # a name of three
            assert tasks.all_tasks(rig.app) == [], name
            for bound in (2**53, -(2.0**53)):
                with case(name, bound):
                    given = replace(task("of-that"), filter=lowq.JobFilter(**{name: bound}))  # type: ignore[arg-type]  # a name of three
                    tasks.begin(rig.app, given)
                    found = tasks.find_task(rig.app, "of-that")
                    assert found is not None
                    assert found.filter == given.filter
                    tasks.forget(rig.app, "of-that")

    def test_a_repeated_call_changes_nothing(self, rig: QueueRig) -> None:
        assert begin(rig, "one") == (1, NOW)
        report(rig, "one", "running", 5, 7)
        before = record(rig, "one")
        assert begin(rig, "one", NOW + 3) == (1, NOW)
        assert record(rig, "one") == before

    def test_a_repeated_call_is_not_refused_for_itself(self, rig: QueueRig) -> None:
        for number in range(MAX_RUNNING):
            begin(rig, str(number))
        assert begin(rig, "0") == (1, NOW)

    def test_only_so_many_run(self, rig: QueueRig) -> None:
        for number in range(MAX_RUNNING):
            assert begin(rig, str(number))[0] == 1
        assert begin(rig, "late") == (0, MAX_RUNNING)
        assert record(rig, "late") == ""
        report(rig, "1", "done", 0, 0)
        assert begin(rig, "late")[0] == 1

    def test_only_so_many_run_of_all_applications(self, rig: QueueRig) -> None:
        for number in range(MAX_RUNNING):
            tasks.begin(rig.app, task(str(number)))
        with pytest.raises(TooManyTasks, match="4 tasks are running already"):
            tasks.begin(rig.app, task("late"))

    @pytest.mark.parametrize("later", [SILENCE + 1, -SILENCE - 1], ids=["later", "the clock stepped back"])
    def test_one_that_is_silent_takes_no_room(self, rig: QueueRig, later: float) -> None:
        for number in range(MAX_RUNNING):
            begin(rig, str(number))
        report(rig, "2", "running", 0, now=NOW + later)
        for name in ("a", "b", "c"):
            assert begin(rig, name, NOW + later)[0] == 1
        assert begin(rig, "d", NOW + later) == (0, MAX_RUNNING)

    def test_the_latest_of_the_others_are_kept(self, rig: QueueRig) -> None:
        for number in range(MAX_ENDED + 3):
            begin(rig, str(number), NOW + number)
            report(rig, str(number), "done", 0, 0, now=NOW + number)
        begin(rig, "now", NOW + MAX_ENDED + 3)
        assert len(rig.client.command("HKEYS", KEY)) == MAX_ENDED + 1
        assert [record(rig, str(number)) == "" for number in range(4)] == [True, True, True, False]

    def test_the_registry_expires(self, rig: QueueRig) -> None:
        begin(rig, "one")
        assert 0 < rig.client.command("TTL", KEY) <= KEPT
        rig.client.command("PERSIST", KEY)
        report(rig, "one", "running", 1)
        assert 0 < rig.client.command("TTL", KEY) <= KEPT

    def test_what_is_no_record_goes(self, rig: QueueRig) -> None:
        for name, value in (
            ("a", "x"),
            ("b", ""),
            ("c", b"\xff"),
            ("d", "running nan nan - 0 - 0 5 {}"),
            ("e", "9" * 99),
        ):
            rig.client.command("HSET", KEY, name, value)
        begin(rig, "one")
        assert rig.client.command("HKEYS", KEY) == [b"one"]


class TestReport:
    def test_progress_is_seen(self, rig: QueueRig) -> None:
        tasks.begin(rig.app, task())
        assert tasks.report(rig.app, "one", "running", 0, None) == ("running", False)
        found = tasks.find_task(rig.app, "one")
        assert found is not None
        assert (found.state, found.done, found.total) == ("running", 0, None)
        tasks.report(rig.app, "one", "running", 5, 9)
        tasks.report(rig.app, "one", "failed", 7, 9, "Redis: \udce9" + "x" * 5000)
        found = tasks.find_task(rig.app, "one")
        assert found is not None
        assert (found.state, found.done, found.total, found.ended_at) == ("failed", 7, 9, found.heartbeat_at)
        assert found.error is not None
        assert found.error.startswith("Redis: \\udce9xxx")
        assert len(found.error) == tasks.MAX_TEXT

    def test_texts_have_a_length_in_characters(self, rig: QueueRig) -> None:
        long = "€" * (tasks.MAX_TEXT + 5)
        tasks.begin(rig.app, replace(task(reason=long), who=long))
        tasks.report(rig.app, "one", "failed", 0, 0, long)
        found = tasks.find_task(rig.app, "one")
        assert found is not None
        assert (found.who, found.reason, found.error) == (long[:-5], long[:-5], long[:-5])

    def test_a_late_one_does_not_take_anything_back(self, rig: QueueRig) -> None:
        begin(rig, "one")
        assert report(rig, "one", "running", 5, 9) == ("running", 0)
        assert report(rig, "one", "running", 3) == ("running", 0)
        assert record(rig, "one").split(" ")[4:6] == ["5", "9"]

    def test_a_late_one_from_the_time_of_counting_leaves_the_total(self, rig: QueueRig) -> None:
        begin(rig, "one")
        for total in ("", 9, ""):
            report(rig, "one", "running", 0, total)
        assert record(rig, "one").split(" ")[4:6] == ["0", "9"]
        report(rig, "one", "failed", 3)
        assert record(rig, "one").split(" ")[4:6] == ["3", "9"]

    def test_what_has_ended_stays_as_it_is(self, rig: QueueRig) -> None:
        begin(rig, "one")
        assert report(rig, "one", "failed", 5, 9, "full", NOW + 1) == ("failed", 0)
        before = record(rig, "one")
        for state in ("running", "done", "failed"):
            assert report(rig, "one", state, 8, 9, "more", NOW + 2) == ("failed", 0)
        assert record(rig, "one") == before

    def test_one_of_a_task_that_is_gone_says_so(self, rig: QueueRig) -> None:
        assert report(rig, "one", "running", 5) == ("", 0)
        assert rig.client.command("EXISTS", KEY) == 0
        tasks.begin(rig.app, task())
        tasks.forget(rig.app, "one")
        assert tasks.report(rig.app, "one", "done", 5, 5) == ("", False)


class TestCancel:
    def test_the_process_learns_it_from_its_next_report(self, rig: QueueRig) -> None:
        begin(rig, "one")
        assert [tasks.cancel(rig.app, "one") for _ in range(2)] == [True, True]
        assert report(rig, "one", "running", 5) == ("running", 1)
        assert report(rig, "one", "cancelled", 5) == ("cancelled", 1)

    def test_what_has_ended_is_not_cancelled(self, rig: QueueRig) -> None:
        begin(rig, "one")
        report(rig, "one", "done", 5, 5)
        before = record(rig, "one")
        assert not tasks.cancel(rig.app, "one")
        assert not tasks.cancel(rig.app, "two")
        assert record(rig, "one") == before


@pytest.mark.parametrize("away", [SILENCE + 1, -SILENCE - 60], ids=["silent", "ahead of the clock"])
def test_one_whose_process_is_silent_is_interrupted_and_goes_on_when_it_reports(rig: QueueRig, away: float) -> None:
    (seconds, _) = rig.client.command("TIME")
    now = float(seconds)
    begin(rig, "one", now - away)
    report(rig, "one", "running", 3, 9, now=now - away)
    found = tasks.find_task(rig.app, "one")
    assert found is not None
    assert (found.state, found.done, found.ended_at) == ("interrupted", 3, None)
    tasks.report(rig.app, "one", "running", 4, 9)
    found = tasks.find_task(rig.app, "one")
    assert found is not None
    assert (found.state, found.done) == ("running", 4)


#: Instead of what the facts of a record should be.
FORGED_FACTS: list[dict[str, Any]] = [
    {"queue": ""}, {"queue": "a b"}, {"queue": None}, {"action": "explode"}, {"action": []}, {"who": 3}, {"owner": {}},
    {"filter": []}, {"filter": {"state": "dead"}}, {"filter": {"state": {}}}, {"filter": {"min": "1"}},
    {"filter": {"min": 10**400}}, {"filter": {"max": -(10**400)}}, {"filter": {"before": 10**400}},
    {"filter": {"before": True}}, {"filter": {"state": "morgue", "min": 10**400}},
    {"filter": {"before": float("nan")}}, {"filter": {"match": "x" * 9999}}, {"filter": {"match": "\ud800"}},
]  # fmt: skip
FORGED = [
    b"", b"\xff", b"running", b"done 1 1 1 1 1 0 2 []", b"done 1 1 1 1 1 0 999 {}", b"done nan 1 1 1 1 0 0 ",
    b"done 1 1 1 " + b"9" * 400 + b" 1 0 0 ", f"gone 1 1 1 1 1 0 {len(FACTS)} {FACTS}".encode(),
    *(
        f"done 1 1 1 1 1 0 {len(text)} {text}".encode()
        for text in (json.dumps(json.loads(FACTS) | facts) for facts in FORGED_FACTS)
    ),
]  # fmt: skip


def test_a_forged_record_costs_its_own_row(rig: QueueRig) -> None:
    for forged in FORGED:
        with case(forged):
            rig.client.command("DEL", KEY)
            tasks.begin(rig.app, task())
            rig.client.command("HSET", KEY, "forged", forged)
            rig.client.command("HSET", KEY, "../x", f"done 1 1 1 1 1 0 {len(FACTS)} {FACTS}")
            assert [found.id for found in tasks.all_tasks(rig.app)] == ["one"]
            assert tasks.find_task(rig.app, "forged") is None
            assert tasks.report(rig.app, "forged", "running", 1, None).cancel is False
            tasks.cancel(rig.app, "forged")
            tasks.begin(rig.app, task("two"))
            assert [found.id for found in tasks.all_tasks(rig.app)] == ["two", "one"]


def test_the_doctor_has_nothing_to_say_of_it(rig: QueueRig) -> None:
    rig.queue.push([{"id": 1}])
    before = [finding.code for finding in rig.app.examine(patience=0.0)]
    tasks.begin(rig.app, task())
    assert [finding.code for finding in rig.app.examine(patience=0.0)] == before
