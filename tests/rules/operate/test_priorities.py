"""Lists, counts and bulk actions over a queue whose jobs have priorities: times are compared, not scores."""

import itertools
from typing import Any

import pytest

import lowq
from lowq.queue import Queue
from tests.rows import case

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
