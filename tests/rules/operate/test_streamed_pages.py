"""What takes a while to look through is told step by step, and whoever stops asking stops the looking."""

from collections import defaultdict
from typing import Any

import pytest

from lowq.store import Client
from tests.rows import case
from tests.rules.queue_rig import QueueRig
from tests.rules.support import NOW
from tests.tiers import real_redis_often
from tests.waiting import NEVER

FRESH, FAILED = 600, 6000


def fill(rig: QueueRig) -> None:
    """Jobs that wait for a retry and, after all of these, some that never failed. Without payloads: what counts is how
    many they are.
    """
    sets: dict[str, list[float | str]] = defaultdict(list)
    for number in range(FAILED):
        name = f"bad-{number:04d}"
        sets[rig.prefix_of(name) + "due"] += [NOW + 10 + number, name]
        sets[rig.prefix_of(name) + "retries"] += [number % 7, name]
    for number in range(FRESH):
        name = f"new-{number:04d}"
        sets[rig.prefix_of(name) + "due"] += [NOW + 9000 + number, name]
    for key, pairs in sets.items():
        rig.client.command("ZADD", key, *pairs)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many calls each delivery took."""
    monkeypatch.setattr("lowq.operate.queues.READ_AGAIN", NEVER)  # else a slow machine reads the registry besides
    deliveries: list[int] = []
    run_many = Client.run_many

    def counted(self: Client, calls: Any, **options: Any) -> Any:
        deliveries.append(len(calls))
        return run_many(self, calls, **options)

    monkeypatch.setattr(Client, "run_many", counted)
    return deliveries


@real_redis_often
def test_what_is_found_comes_before_the_end_and_the_page_at_last(rig: QueueRig, calls: list[int]) -> None:
    rows: list[dict[str, Any]] = [
        {"match": "*7", "reverse": True}, {"order_by": "id", "reverse": True}, {"order_by": "retry_count"},
        {"order_by": "retry_count", "max": 2.0}, {"order_by": "retry_count", "reverse": True, "max": -1.0},
        {"state": "scheduled"}, {"state": "scheduled", "order_by": "retry_count"},
    ]  # fmt: skip
    fill(rig)
    for options in rows:
        with case(options):
            whole = rig.queue.jobs(limit=20, now=NOW, **options)
            assert len(whole) == 20
            calls.clear()
            steps = rig.queue.jobs_in_steps(limit=20, interval=0.0, now=NOW, **options)
            next(steps)
            first = sum(calls)
            *_, last = steps
            assert (last.jobs, last.cursor) == (whole.jobs, whole.cursor)
            assert first < sum(calls) / 2, "the first rows come when nearly all was looked at"


def test_who_stops_iterating_stops_the_looking_though_nothing_is_found(rig: QueueRig, calls: list[int]) -> None:
    fill(rig)
    rows: list[dict[str, Any]] = [{"match": "nothing*"}, {"state": "scheduled", "max": NOW + 8000}]
    for options in rows:
        with case(options):
            calls.clear()
            empty = list(rig.queue.jobs_in_steps(interval=0.0, now=NOW, **options))
            whole = sum(calls)
            assert len(empty) > 2
            assert not any(page.jobs for page in empty)
            assert empty[-1].cursor is None
            calls.clear()
            next(rig.queue.jobs_in_steps(interval=0.0, now=NOW, **options))
            assert sum(calls) < whole / 2
    calls.clear()
    assert rig.queue.count("delete", match="nothing*", now=NOW) == 0
    whole = sum(calls)
    calls.clear()
    assert next(rig.queue.bulk("delete", match="nothing*", now=NOW)).counting
    assert sum(calls) < whole / 2 + 3


def test_a_page_is_fetched_again_only_when_it_has_changed_and_a_sorted_one_comes_at_once(rig: QueueRig) -> None:
    fill(rig)
    pages = list(rig.queue.jobs_in_steps(match="new-0007", interval=0.0, now=NOW))
    assert [item.id for item in pages[-1]] == ["new-0007"]
    assert len({id(page) for page in pages}) == 1 + (not pages[0].jobs)
    rows: list[dict[str, Any]] = [
        {}, {"reverse": True}, {"state": "due"}, {"order_by": "retry_count", "min": 0},
        {"order_by": "retry_count", "state": "retrying"},
    ]  # fmt: skip
    for options in rows:
        with case(options):
            assert len(list(rig.queue.jobs_in_steps(limit=20, interval=60.0, now=NOW, **options))) == 1
