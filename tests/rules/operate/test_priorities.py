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
