"""Cancel of all jobs that match, waiting and in flight."""

from collections.abc import Iterator
from typing import Any

import pytest

from lowq.errors import ConfigError
from lowq.operate.bulk import Step
from tests.rules.queue_rig import QueueRig
from tests.rules.support import NOW, job
from tests.tiers import real_redis_often

pytestmark = real_redis_often


def last(steps: Iterator[Step]) -> tuple[int, int]:
    *_, step = steps
    return step.done, step.total


@pytest.fixture
def busy(rig: QueueRig) -> QueueRig:
    """Two jobs in flight, one of which has a newer payload; others wait, are scheduled, failed, or dead."""
    rig.push(job("dead"))
    rig.queue.bury("dead", now=NOW)
    rig.push(job("b-fails"))
    rig.fail("b-fails", error=b"TimeoutError")
    for name in ("a-runs", "b-runs"):
        rig.push(job(name, {"of": name}))
        rig.take(name)
    rig.push(job("b-runs", "newer", perform_at=NOW + 60), job("a-waits"), job("b-later", perform_at=NOW + 60))
    return rig


def cancelled(rig: QueueRig) -> set[str]:
    """Those in flight that are to end."""
    return {name for name in ("a-runs", "b-runs", "new") if "was cancelled" in rig.queue.why(name).detail}


ROWS: list[tuple[dict[str, Any], int, set[str], set[str]]] = [
    ({}, 6, {"a-runs", "b-runs"}, set()),
    ({"state": "taken"}, 2, {"a-runs", "b-runs"}, {"a-waits", "b-fails", "b-later", "b-runs"}),
    ({"match": "a*"}, 2, {"a-runs"}, {"b-fails", "b-later", "b-runs"}),
    ({"state": "taken", "payload": "of:a-runs"}, 1, {"a-runs"}, {"a-waits", "b-fails", "b-later", "b-runs"}),
    ({"state": "taken", "max": NOW - 1}, 0, set(), {"a-waits", "b-fails", "b-later", "b-runs"}),
    ({"state": "due"}, 1, set(), {"b-fails", "b-later", "b-runs"}),
    # An id that matches is cancelled wherever it is, up to the time of what matched.
    ({"state": "scheduled", "match": "b-r*"}, 1, {"b-runs"}, {"a-waits", "b-fails", "b-later"}),
    ({"error": "Timeout"}, 1, set(), {"a-waits", "b-later", "b-runs"}),
    # Jobs in flight have none.
    ({"priority": 0}, 4, {"b-runs"}, set()),
]


@pytest.mark.parametrize(("wanted", "total", "told", "left"), ROWS)
def test_what_matches_is_cancelled_waiting_and_in_flight(
    busy: QueueRig, wanted: dict[str, Any], total: int, told: set[str], left: set[str]
) -> None:
    assert busy.queue.count("cancel", now=NOW, **wanted) == total
    assert last(busy.queue.bulk("cancel", now=NOW, **wanted)) == (total, total)
    assert cancelled(busy) == told
    assert set(busy.ids(now=NOW)) == left
    assert busy.ids(state="morgue") == ["dead"]
    figures = busy.queue.stats()
    assert (figures.cancelled, figures.taken) == (4 - len(left), 2)


def test_what_comes_after_the_snapshot_is_left_alone(busy: QueueRig) -> None:
    found = busy.queue.snapshot("cancel", now=NOW + 1)
    assert found.total == 6
    busy.push(job("new", perform_at=NOW + 2), now=NOW + 2)
    busy.take("new", NOW + 2)
    busy.push(job("newest", perform_at=NOW + 2), now=NOW + 2)
    assert last(busy.queue.bulk("cancel", now=NOW + 3, before=found)) == (6, 6)
    assert (cancelled(busy), busy.ids(now=NOW + 3)) == ({"a-runs", "b-runs"}, ["newest"])


def test_what_is_taken_meanwhile_is_met(busy: QueueRig) -> None:
    steps = busy.queue.bulk("cancel", now=NOW)
    while next(steps).counting:
        pass
    busy.take("a-waits")
    assert last(steps) == (6, 6)
    assert "was cancelled" in busy.queue.why("a-waits").detail


def test_it_is_refused_for_the_morgue(rig: QueueRig) -> None:
    with pytest.raises(ConfigError, match="state is one of: scheduled, due, retrying, taken; without"):
        rig.queue.bulk("cancel", "morgue")
