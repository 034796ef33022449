"""Lists, counts and bulk actions over a queue whose jobs have priorities: times are compared, not scores."""

import itertools
from datetime import timedelta
from typing import Any

import pytest

import lowq
from lowq.queue import Queue
from tests.rows import case
from tests.tiers import real_redis_often

DAY = 86_400
ALL = [f"{number:02}" for number in range(60)]


def filled(app: lowq.Lowq, name: str = "Orders") -> Queue:
    """A queue of sixty jobs over all priorities, half of them due; an id's number tells its place in time."""
    queue = app.queue(name, 3)
    for number, job_id in enumerate(ALL):
        delay = 0 if number < 30 else DAY + number * 60
        queue.push({"id": job_id, "priority": number * 7 % 10, "delay": delay})
    return queue


def ids(queue: Queue, *state: Any, **options: Any) -> list[str]:
    return [job.id for job in queue.jobs(*state, limit=100, **options)]


@real_redis_often
def test_jobs_are_listed_counted_and_explained_by_time(app: lowq.Lowq) -> None:
    queue = filled(app)
    every = queue.jobs(limit=100).jobs
    times = {job.id: job.perform_at or 0.0 for job in every}
    assert [job.state for job in every] == ["due"] * 30 + ["scheduled"] * 30
    assert [job.priority for job in every] == [number * 7 % 10 for number in range(60)]
    assert max(times.values()) < 2e9
    rows: list[tuple[Any, dict[str, Any], list[str]]] = [
        (None, {}, ALL), ("due", {}, ALL[:30]), ("scheduled", {}, ALL[30:]), ("scheduled", {"match": "3*"}, ALL[30:40]),
        ("due", {"match": "*5"}, ["05", "15", "25"]), (None, {"min": times["33"], "max": times["40"]}, ALL[33:41]),
    ]  # fmt: skip
    for (state, options, expected), reverse in itertools.product(rows, (False, True)):
        with case(state, options, reverse):
            found: list[str] = []
            cursor: str | None = None
            while not found or cursor is not None:
                page = queue.jobs(state, limit=7, after=cursor, reverse=reverse, **options)
                found, cursor = found + [job.id for job in page], page.cursor
            assert found == (expected[::-1] if reverse else expected)
    stats = queue.stats()
    assert (stats.length, stats.due, stats.scheduled, stats.oldest_id) == (60, 30, 30, "00")
    assert stats.lag < DAY
    assert queue.why("37").reason == "not_due"
    assert queue.why("37").until == pytest.approx(times["37"])


@pytest.mark.parametrize("limit", [1, 10])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("are_at_once", [False, True], ids=["a tick apart", "at the same time"])
def test_pages_show_each_job_once_though_times_are_coarser_in_lower_priorities(
    app: lowq.Lowq, are_at_once: bool, reverse: bool, limit: int
) -> None:
    """Also where a time is between two that a priority can hold, and of jobs that are for later."""
    names = ["Mail", "Orders"]
    perform_at: dict[str, Any] = {"perform_at": 1_900_000_000.123_456_7} if are_at_once else {}
    for name in names:
        jobs = [{"id": f"{number:03}", "priority": number % 10, **perform_at} for number in range(17)]
        later = [{"id": f"later{number}", "priority": number % 10, "delay": DAY + number * 1e-6} for number in range(7)]
        app.queue(name, 1).push([*jobs, *later])

    def all_pages(read: Any, show: Any) -> list[Any]:
        found: list[Any] = []
        cursor: str | None = None
        while cursor is not None or not found:
            page = read(limit=limit, after=cursor, reverse=reverse)
            found, cursor = found + [show(each) for each in page], page.cursor
            assert len(found) <= 2 * 24, "jobs are shown again"
        return found

    of_queue = all_pages(app.queue("Orders").jobs, lambda job: (job.perform_at, job.id))
    of_all = all_pages(app.jobs, lambda each: (each.job.perform_at, each.queue, each.job.id))
    assert len(of_queue) == len(set(of_queue)) == 24
    assert len(of_all) == len(set(of_all)) == 48
    assert of_queue == sorted(of_queue, reverse=reverse)
    assert of_all == sorted(of_all, reverse=reverse)


def test_bounds_are_times_of_jobs_not_what_a_priority_can_hold_of_them(app: lowq.Lowq) -> None:
    """Bounds between two times that a job of the lowest priority can have."""
    queue = app.queue("Orders", 1)
    start, step = 1_900_000_000.0, 2.0**-16
    queue.push([{"id": f"{number}", "priority": 9, "perform_at": start + number * step} for number in range(10)])
    rows: list[tuple[dict[str, Any], str]] = [
        ({"min": start + 3.25 * step}, "456789"), ({"min": start + 3.75 * step}, "456789"),
        ({"min": start + 4 * step}, "456789"), ({"max": start + 3.25 * step}, "0123"),
        ({"max": start + 3.75 * step}, "0123"), ({"max": start + 4 * step}, "01234"),
    ]  # fmt: skip
    for bounds, expected in rows:
        with case(bounds):
            assert "".join(ids(queue, **bounds)) == expected
            assert queue.count("delete", **bounds) == len(expected)


def test_bulk_actions_leave_no_job_out_whose_time_is_beside_the_moment_when_they_begin(app: lowq.Lowq) -> None:
    start, step = 1_900_000_000.0, 2.0**-16
    for number, part in enumerate((0.25, 0.5, 0.75)):
        with case(part):
            queue = app.queue(f"Orders{number}", 1)
            queue.push([{"id": f"{each}", "priority": 9, "perform_at": start + each * step} for each in range(10)])
            now = start + (4 + part) * step
            assert queue.count("delete", "due", now=now) == len(ids(queue, "due", now=now)) == 5
            assert list(queue.bulk("delete", now=now))[-1].done == 10


@real_redis_often
def test_bulk_actions_are_done_to_all_priorities(app: lowq.Lowq) -> None:
    rows: list[tuple[Any, list[str]]] = [(None, []), ("due", ALL[30:]), ("scheduled", ALL[:30])]
    for number, ((state, left), match) in enumerate(itertools.product(rows, (None, "*"))):
        with case(state, match):
            queue = filled(app, f"Orders{number}")
            assert queue.count("delete", state, match=match) == 60 - len(left)
            steps = list(queue.bulk("delete", state, match=match))
            assert steps[-1].done == steps[-1].total == 60 - len(left)
            assert ids(queue) == left
            assert queue.clear() == len(left)


def test_what_was_shown_is_done_and_nothing_that_came_since(app: lowq.Lowq) -> None:
    queue = filled(app)
    found = queue.snapshot("delete")
    assert found.total == 60
    queue.push([{"id": f"new{level}", "priority": level} for level in range(10)])
    queue.push([{"id": f"newer{level}", "priority": level, "delay": DAY} for level in range(10)])
    assert list(queue.bulk("delete", before=found))[-1].done == 60
    assert queue.stats().length == 20


def test_what_is_made_due_keeps_its_priority_and_counts_as_changed(app: lowq.Lowq) -> None:
    queue = filled(app)
    moments = queue.moments(ALL)
    assert list(queue.bulk("perform_now", "scheduled"))[-1].done == 30
    assert {job.id: job.priority for job in queue.jobs("due", limit=100)} == {
        f"{number:02}": number * 7 % 10 for number in range(60)
    }
    assert queue.delete(ALL, unchanged=moments).done == 30
    assert sorted(ids(queue)) == ALL[30:]


@real_redis_often
def test_jobs_of_a_priority_and_of_an_age_are_listed_and_acted_on(app: lowq.Lowq) -> None:
    rows: list[tuple[dict[str, Any], list[str]]] = [
        ({"priority": 3}, [f"{number:02}" for number in range(60) if number * 7 % 10 == 3]),
        ({"priority": 0, "state": "due"}, ["00", "10", "20"]),
        ({"priority": 0, "state": "scheduled"}, ["30", "40", "50"]),
        ({"priority": 7, "match": "?1"}, ["01", "11", "21", "31", "41", "51"]),
        ({"priority": 7, "match": "?2"}, []),
        ({"priority": 7, "state": "retrying"}, []),
        ({"priority": 7, "order_by": "id", "min": "30"}, ["31", "41", "51"]),
        ({"older_than": 0}, ALL[:30]),
        ({"older_than": 3600}, []),
        ({"newer_than": 3600, "priority": 7}, ["01", "11", "21", "31", "41", "51"]),
        ({"newer_than": timedelta(hours=1), "older_than": 0, "priority": 7}, ["01", "11", "21"]),
    ]
    for number, (options, expected) in enumerate(rows):
        with case(options):
            queue = filled(app, f"Orders-{number}")
            assert ids(queue, **options) == expected
            if "order_by" in options:
                continue
            assert queue.count("delete", **options) == len(expected)
            assert queue.snapshot("delete", **options).total == len(expected)
            assert [step.done for step in queue.bulk("delete", **options)][-1] == len(expected)
            assert ids(queue) == [job_id for job_id in ALL if job_id not in expected]


def test_a_queue_without_priorities_has_jobs_of_the_usual_one_alone(app: lowq.Lowq) -> None:
    queue = app.queue("plain", 2)
    queue.push({"id": number} for number in range(5))
    assert (len(ids(queue, priority=0)), ids(queue, priority=9)) == (5, [])
    assert queue.count("bury", priority=9) == 0
    assert [step.done for step in queue.bulk("bury", priority=9)][-1] == 0
    assert queue.count("bury", priority=0) == 5


def test_a_backfill_is_undone_and_what_had_waited_before_stays(app: lowq.Lowq) -> None:
    queue = app.queue("Orders", 3)
    queue.push({"id": number, "payload": "live"} for number in range(5))
    queue.push({"id": number, "payload": "backfill", "priority": 9} for number in range(3, 50))
    assert queue.count("delete", priority=9, newer_than=timedelta(hours=1)) == 45
    *_, step = queue.bulk("delete", priority=9, newer_than=timedelta(hours=1))
    assert step.done == 45
    assert sorted(ids(queue)) == ["0", "1", "2", "3", "4"]  # the more urgent of two pushes counts


def test_a_priority_or_an_age_that_makes_no_sense_is_refused(app: lowq.Lowq) -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"priority": 10}, "priority=10: it is a whole number from 0, the most urgent, to 9"),
        ({"priority": True}, "priority=True: it is a whole number"),
        ({"priority": 3, "state": "morgue"}, "jobs in the morgue have none"),
        ({"priority": 3, "state": "taken"}, "jobs in flight have none"),
        ({"older_than": -1}, "older_than=-1 must be seconds, or a timedelta, of 0 or more"),
        ({"newer_than": "2h"}, "newer_than='2h' must be seconds"),
        ({"newer_than": 5, "order_by": "id"}, "newer_than=5.0: it goes by the time, and not in the order of id"),
    ]
    for options, said in rows:
        with case(options), pytest.raises(lowq.ConfigError) as refused:
            app.queue("Orders", 3).jobs(**options)
        assert said in str(refused.value)
