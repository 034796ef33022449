"""Lists, counts and bulk actions over a queue whose jobs have priorities: times are compared, not scores."""

import itertools
from typing import Any

import pytest

import lowq
from lowq.queue import Queue
from tests.rows import case

DAY = 86_400


@pytest.fixture
def queue(app: lowq.Lowq) -> Queue:
    return filled(app, "Orders")


def filled(app: lowq.Lowq, name: str) -> Queue:
    """A queue of sixty jobs over all priorities, half of them due; an id's number tells its place in time."""
    queue = app.queue(name, 3)
    for number in range(60):
        delay = 0 if number < 30 else DAY + number * 60
        queue.push({"id": f"{number:02}", "priority": number * 7 % 10, "delay": delay})
    return queue


def ids(jobs: object) -> list[str]:
    assert isinstance(jobs, lowq.Page)
    return [job.id for job in jobs]


ALL = [f"{number:02}" for number in range(60)]


def test_pages_are_in_the_order_of_time(queue: Queue) -> None:
    rows: list[tuple[Any, list[str]]] = [(None, ALL), ("due", ALL[:30]), ("scheduled", ALL[30:])]
    for (state, expected), reverse in itertools.product(rows, (False, True)):
        found: list[str] = []
        cursor = None
        while True:
            page = queue.jobs(state, limit=7, after=cursor, reverse=reverse)
            found += ids(page)
            cursor = page.cursor
            if cursor is None:
                break
        assert found == (expected[::-1] if reverse else expected), (state, reverse)


def test_a_page_is_bounded_by_times(queue: Queue) -> None:
    every = queue.jobs(limit=100).jobs
    low, high = every[33].perform_at, every[40].perform_at
    assert ids(queue.jobs(min=low, max=high)) == ALL[33:41]


def test_a_job_says_its_priority_and_time(queue: Queue) -> None:
    for job in queue.jobs(limit=100):
        assert job.priority == int(job.id) * 7 % 10
        assert job.state == ("due" if int(job.id) < 30 else "scheduled")
        assert job.perform_at is not None
        assert job.perform_at < 2e9


def test_figures_count_by_time(queue: Queue) -> None:
    stats = queue.stats()
    assert (stats.length, stats.due, stats.scheduled, stats.oldest_id) == (60, 30, 30, "00")
    assert stats.lag < DAY


def test_patterns_find_all_priorities(queue: Queue) -> None:
    assert ids(queue.jobs("scheduled", match="3*")) == ALL[30:40]
    assert ids(queue.jobs("due", match="*5")) == ["05", "15", "25"]


def test_bulk_actions_are_done_to_all_priorities(app: lowq.Lowq) -> None:
    rows: list[tuple[Any, list[str]]] = [(None, []), ("due", ALL[30:]), ("scheduled", ALL[:30])]
    for number, ((state, left), match) in enumerate(itertools.product(rows, (None, "*"))):
        with case(state, match):
            queue = filled(app, f"Orders{number}")
            assert queue.count("delete", state, match=match) == 60 - len(left)
            steps = list(queue.bulk("delete", state, match=match))
            assert steps[-1].done == steps[-1].total == 60 - len(left)
            assert ids(queue.jobs(limit=100)) == left


def test_what_was_shown_is_done_and_nothing_that_came_since(queue: Queue) -> None:
    found = queue.snapshot("delete")
    assert found.total == 60
    queue.push([{"id": f"new{level}", "priority": level} for level in range(10)])
    queue.push([{"id": f"newer{level}", "priority": level, "delay": DAY} for level in range(10)])
    assert list(queue.bulk("delete", before=found))[-1].done == 60
    assert queue.stats().length == 20


def test_all_are_made_due_now_and_keep_their_priority(queue: Queue) -> None:
    assert list(queue.bulk("perform_now", "scheduled"))[-1].done == 30
    assert queue.stats().due == 60
    assert {job.id: job.priority for job in queue.jobs(limit=100)} == {
        f"{number:02}": number * 7 % 10 for number in range(60)
    }


def test_only_those_that_nothing_has_happened_to_are_touched(queue: Queue) -> None:
    moments = queue.moments(ALL)
    queue.perform_now("45")
    acted = queue.delete(ALL, unchanged=moments)
    assert acted.done == 59
    assert ids(queue.jobs()) == ["45"]


def test_why_knows_what_comes_first(queue: Queue) -> None:
    assert queue.why("37").reason == "not_due"
    assert queue.why("37").until == pytest.approx(queue.fetch(["37"])["37"].perform_at)


def test_a_queue_is_cleared(queue: Queue) -> None:
    assert queue.clear() == 60
    assert queue.stats().length == 0
