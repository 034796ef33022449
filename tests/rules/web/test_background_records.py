"""Records of background actions: what may begin, what a process reports, who cancels it, what a dead one leaves."""

import json
from dataclasses import replace
from typing import Any

import pytest

import lowq
from lowq import inspection
from lowq.operate.deploy import TASK_SILENCE
from lowq.store.keys import tasks_key
from lowq_web import background
from lowq_web.background import KEPT, MAX_ENDED, MAX_RUNNING, BackgroundAction, TooManyTasks
from tests.rows import case
from tests.rules.queue_rig import QueueRig
from tests.rules.support import NOW, run_script

pytestmark = pytest.mark.parametrize("store_url", ["redis"], indirect=True)

KEY = tasks_key("lowq")
FACTS = json.dumps({"who": "ann", "queue": "Orders", "action": "kick", "filter": {}, "owner": "here:1"})


def begin(rig: QueueRig, task_id: str, now: float = NOW) -> tuple[int, Any]:
    entered, value = run_script(
        rig.client, "task_begin", KEY, repr(now), task_id, FACTS, MAX_RUNNING, MAX_ENDED, TASK_SILENCE, KEPT
    )
    return entered, float(value)


def report(
    rig: QueueRig, task_id: str, state: str, done: int, total: int | str = "", error: str = "", now: float = NOW
) -> tuple[str, int]:
    reply, cancel = run_script(rig.client, "task_report", KEY, repr(now), task_id, state, done, total, error, KEPT)
    return reply.decode(), cancel


def record(rig: QueueRig, task_id: str) -> str:
    raw = rig.client.command("HGET", KEY, task_id)
    return "" if raw is None else raw.decode()


def find(rig: QueueRig, task_id: str = "one") -> BackgroundAction:
    found = background.find_action(rig.app, task_id)
    assert found is not None
    return found


def task(task_id: str = "one", **fields: Any) -> BackgroundAction:
    return BackgroundAction(
        task_id, "ann", "Orders", "delete", inspection.JobFilter(match="4*", min=1.5), "here:1", 0.0, 0.0, **fields
    )


# --- a task begins ------------------------------------------------------------------------------------------------


def test_a_task_is_there_for_all_as_it_was_given(rig: QueueRig) -> None:
    given = background.begin(rig.app, task(reason="caf\udce9", exact=True))
    assert given.began_at == given.heartbeat_at > 1_700_000_000
    assert find(rig) == given
    assert background.read_actions(rig.app) == [given]
    assert background.find_action(rig.app, "two") is None


def test_a_bound_that_could_not_be_read_back_is_refused(rig: QueueRig) -> None:
    for name in ("min", "max", "before"):
        for bound in (2**53 + 2, -1e300, 2**53):
            wanted: dict[str, Any] = {name: bound}
            given = replace(task("of-that"), filter=inspection.JobFilter(**wanted))
            with case(name, bound):
                if bound == 2**53:
                    background.begin(rig.app, given)
                    assert find(rig, "of-that").filter == given.filter
                    background.forget(rig.app, "of-that")
                else:
                    with pytest.raises(lowq.ConfigError, match=f"^{name}=.*: a bound of a task is a number from -9"):
                        background.begin(rig.app, given)


def test_a_repeated_beginning_changes_nothing(rig: QueueRig) -> None:
    for number in range(MAX_RUNNING):
        assert begin(rig, str(number)) == (1, NOW)
    report(rig, "0", "running", 5, 7)
    before = record(rig, "0")
    assert begin(rig, "0", NOW + 3) == (1, NOW)
    assert record(rig, "0") == before


def test_only_so_many_run_of_all_applications(rig: QueueRig) -> None:
    for number in range(MAX_RUNNING):
        background.begin(rig.app, task(str(number)))
    with pytest.raises(TooManyTasks, match="4 tasks are running already"):
        background.begin(rig.app, task("late"))
    assert record(rig, "late") == ""
    background.report(rig.app, "1", "done", 0, 0)
    background.begin(rig.app, task("late"))


@pytest.mark.parametrize("later", [TASK_SILENCE + 1, -TASK_SILENCE - 1], ids=["later", "the clock stepped back"])
def test_one_that_is_silent_takes_no_room(rig: QueueRig, later: float) -> None:
    for number in range(MAX_RUNNING):
        begin(rig, str(number))
    report(rig, "2", "running", 0, now=NOW + later)
    for name in ("a", "b", "c"):
        assert begin(rig, name, NOW + later)[0] == 1
    assert begin(rig, "d", NOW + later) == (0, MAX_RUNNING)


def test_the_latest_that_ended_are_kept_for_a_while_and_what_is_no_record_goes(rig: QueueRig) -> None:
    for name, value in (("a", "x"), ("b", b"\xff"), ("c", "running nan nan - 0 - 0 5 {}"), ("d", "9" * 99)):
        rig.client.command("HSET", KEY, name, value)
    for number in range(MAX_ENDED + 3):
        begin(rig, str(number), NOW + number)
        report(rig, str(number), "done", 0, 0, now=NOW + number)
    begin(rig, "now", NOW + MAX_ENDED + 3)
    assert {*rig.client.command("HKEYS", KEY)} == {b"now", *(b"%d" % number for number in range(3, MAX_ENDED + 3))}
    assert 0 < rig.client.command("TTL", KEY) <= KEPT
    rig.client.command("PERSIST", KEY)
    report(rig, "now", "running", 1)
    assert 0 < rig.client.command("TTL", KEY) <= KEPT


# --- it goes on, and ends -----------------------------------------------------------------------------------------


def test_progress_is_seen_and_texts_have_a_length_in_characters(rig: QueueRig) -> None:
    long = "€\udce9" + "x" * (background.MAX_TEXT + 5)
    background.begin(rig.app, replace(task(reason=long), who=long))
    assert background.report(rig.app, "one", "running", 0, None) == ("running", False)
    assert (find(rig).state, find(rig).done, find(rig).total) == ("running", 0, None)
    background.report(rig.app, "one", "running", 5, 9)
    background.report(rig.app, "one", "failed", 7, 9, long)
    found = find(rig)
    assert (found.state, found.done, found.total, found.ended_at) == ("failed", 7, 9, found.heartbeat_at)
    assert found.error == ("€\\udce9" + long[2:])[: background.MAX_TEXT]
    assert [len(text or "") for text in (found.who, found.reason)] == [background.MAX_TEXT] * 2


def test_a_late_report_takes_nothing_back(rig: QueueRig) -> None:
    begin(rig, "one")
    assert report(rig, "one", "running", 5, 9) == ("running", 0)
    assert report(rig, "one", "running", 3) == ("running", 0)  # of the time when it counted: it knows no total
    assert record(rig, "one").split(" ")[4:6] == ["5", "9"]
    assert report(rig, "one", "failed", 6, error="full", now=NOW + 1) == ("failed", 0)
    before = record(rig, "one")
    assert before.split(" ")[4:6] == ["6", "9"]
    for state in ("running", "done", "failed"):
        assert report(rig, "one", state, 8, 9, "more", NOW + 2) == ("failed", 0)
    assert not background.cancel(rig.app, "one")
    assert record(rig, "one") == before


def test_a_report_or_cancel_of_a_task_that_is_gone_says_so(rig: QueueRig) -> None:
    background.begin(rig.app, task())
    background.forget(rig.app, "one")
    assert background.report(rig.app, "one", "done", 5, 5) == ("", False)
    assert not background.cancel(rig.app, "one")
    assert rig.client.command("EXISTS", KEY) == 0


def test_the_process_learns_that_it_is_cancelled_from_its_next_report(rig: QueueRig) -> None:
    begin(rig, "one")
    assert [background.cancel(rig.app, "one") for _ in range(2)] == [True, True]
    assert report(rig, "one", "running", 5) == ("running", 1)
    assert report(rig, "one", "cancelled", 5) == ("cancelled", 1)


@pytest.mark.parametrize("away", [TASK_SILENCE + 1, -TASK_SILENCE - 60], ids=["silent", "ahead of the clock"])
def test_one_whose_process_is_silent_is_interrupted_and_goes_on_when_it_reports(rig: QueueRig, away: float) -> None:
    now = float(rig.client.command("TIME")[0])
    begin(rig, "one", now - away)
    report(rig, "one", "running", 3, 9, now=now - away)
    assert (find(rig).state, find(rig).done, find(rig).ended_at) == ("interrupted", 3, None)
    background.report(rig.app, "one", "running", 4, 9)
    assert (find(rig).state, find(rig).done) == ("running", 4)


#: Instead of what the facts of a record should be.
FORGED_FACTS: list[dict[str, Any]] = [
    {"queue": "a b"}, {"queue": None}, {"action": "explode"}, {"action": []}, {"who": 3}, {"owner": {}},
    {"filter": []}, {"filter": {"state": {}}}, {"filter": {"min": "1"}}, {"filter": {"max": -(10**400)}},
    {"filter": {"before": True}}, {"filter": {"before": float("nan")}}, {"filter": {"match": "\ud800"}},
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
            background.begin(rig.app, task())
            rig.client.command("HSET", KEY, "forged", forged, "../x", f"done 1 1 1 1 1 0 {len(FACTS)} {FACTS}")
            assert [found.id for found in background.read_actions(rig.app)] == ["one"]
            assert background.find_action(rig.app, "forged") is None
            assert background.report(rig.app, "forged", "running", 1, None).is_cancelled is False
            background.cancel(rig.app, "forged")
            background.begin(rig.app, task("two"))
            assert [found.id for found in background.read_actions(rig.app)] == ["two", "one"]
