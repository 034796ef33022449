"""What was asked about is what is done: actions that touch nothing newer than a moment."""

import itertools
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from lowq.errors import ConfigError
from lowq.operate import bulk
from lowq.operate.actions import Acted
from lowq.operate.bulk import Step
from lowq.shards.delivery import Failure
from tests.rows import case
from tests.rules.queue_rig import QueueRig
from tests.rules.support import NOW, job, report
from tests.tiers import real_redis_often

pytestmark = real_redis_often

#: All that wait are listed either way: in the sets' own order, or id by id.
both_ways = pytest.mark.parametrize("match", [None, "*"])


@contextmanager
def emptied(store_url: str) -> Iterator[QueueRig]:
    with closing(QueueRig(store_url)) as rig:
        rig.client.command("FLUSHALL")
        yield rig


def last(steps: Iterator[Step]) -> tuple[int, int]:
    """How many it was done to, of how many."""
    step = list(steps)[-1]
    return step.done, step.total


def push(rig: QueueRig, name: str, count: int = 6, **more: Any) -> set[str]:
    """Jobs in all shards, by the server's clock."""
    ids = {f"{name}-{n}" for n in range(count)}
    rig.push(*(job(item, **more) for item in sorted(ids)), now=None)
    return ids


def in_the_shard_of(rig: QueueRig, job_id: str) -> set[str]:
    return {item for item in rig.ids() if rig.shard_index(item) == rig.shard_index(job_id)}


# --- a snapshot ---------------------------------------------------------------------------------------------------


@both_ways
def test_what_is_pushed_after_a_snapshot_stays(store_url: str, match: str | None) -> None:
    rows: list[tuple[Any, Any]] = [*itertools.product((None, "scheduled"), ("bury", "delete", "perform_now"))]
    for state, action in rows:
        with case(state, action), emptied(store_url) as rig:
            push(rig, "old", delay=3600.0)
            due = set() if state or action == "perform_now" else push(rig, "due")
            found = rig.queue.snapshot(action, state, match=match)
            assert found.total == 6 + len(due)
            new = push(rig, "new", delay=60.0) | push(rig, "again", delay=3600.0) | push(rig, "past", perform_at=5.0)
            rig.queue.delete("old-3")
            push(rig, "old", 4, delay=60.0)  # three wait already, and the fourth is a new job
            assert last(rig.queue.bulk(action, state, match=match, before=found)) == (5 + len(due), 6 + len(due))
            new_scheduled = {item for item in new if not item.startswith("past")} | {"old-3"}
            assert set(rig.ids(state="scheduled")) == new_scheduled
            if action != "perform_now":
                assert set(rig.ids()) == new | {"old-3"}


@both_ways
def test_what_has_become_due_since_a_snapshot_is_still_meant(rig: QueueRig, match: str | None) -> None:
    rig.push(*(job(f"old-{n}", delay=3.0) for n in range(6)))
    found = rig.queue.snapshot("bury", "scheduled", match=match, now=NOW)
    assert found.total == 6
    new = {f"new-{n}" for n in range(6)}
    rig.push(*(job(item) for item in new), now=NOW + 4)
    assert last(rig.queue.bulk("bury", "scheduled", match=match, before=found, now=NOW + 4)) == (6, 6)
    assert set(rig.ids()) == new


@both_ways
@pytest.mark.parametrize("action", ["kick", "delete"])
def test_what_is_buried_after_a_snapshot_stays_buried(rig: QueueRig, match: str | None, action: Any) -> None:
    rig.queue.bury(push(rig, "old") | push(rig, "again"))
    found = rig.queue.snapshot(action, "morgue", match=match)
    assert found.total == 12
    rig.queue.kick(f"again-{n}" for n in range(6))
    new = {f"again-{n}" for n in range(6)} | push(rig, "new")
    rig.queue.bury(new)
    assert last(rig.queue.bulk(action, "morgue", match=match, before=found)) == (6, 12)
    assert set(rig.ids(state="morgue")) == new


@both_ways
def test_what_fails_after_a_snapshot_waits_for_its_retry(rig: QueueRig, match: str | None) -> None:
    push(rig, "old", 1)
    rig.fail("old-0", delay=900.0, now=None)  # type: ignore[arg-type]  # the server's clock
    shard = rig.own("new", now=None)  # type: ignore[arg-type]
    rig.push(job("new"), now=None)
    assert [item.id for item in shard.in_flight.take(10).jobs] == ["new"]
    found = rig.queue.snapshot("delete", "retrying", match=match)
    assert found.total == 1
    report(shard, "fail", [Failure("new", "retry", 0, 60.0, b"boom")])
    assert last(rig.queue.bulk("delete", "retrying", match=match, before=found)) == (1, 1)
    assert rig.ids() == ["new"]


# --- a time -------------------------------------------------------------------------------------------------------


@both_ways
def test_what_was_due_or_buried_by_then(rig: QueueRig, match: str | None) -> None:
    rig.queue.bury(push(rig, "dead") | push(rig, "kicked"))
    push(rig, "old")
    at = rig.queue.snapshot("delete").at
    new, dead = push(rig, "new") | push(rig, "later", delay=60.0), push(rig, "dead-since")
    rig.queue.bury(dead)
    kicked = {f"kicked-{n}" for n in range(6)}
    rig.queue.kick(kicked)
    rows: list[tuple[Any, Any]] = [("delete", None), ("kick", "morgue")]
    for action, state in rows:
        bounds: Any = {"state": state, "match": match, "before": at}
        assert rig.queue.count(action, **bounds) == 6
        assert last(rig.queue.bulk(action, **bounds)) == (6, 6)
    assert set(rig.ids()) == new | kicked | {f"dead-{n}" for n in range(6)}
    assert set(rig.ids(state="morgue")) == dead


@both_ways
@pytest.mark.parametrize("how", ["all", "scheduled", "a snapshot too large to remember each"])
def test_of_shards_that_got_a_push_what_was_not_due_stays(
    rig: QueueRig, match: str | None, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "MAX_REMEMBERED", 3)
    push(rig, "old", 30, delay=3600.0)
    found = rig.queue.snapshot("delete", None, match=match)
    assert (found.total, found.remembers) == (30, False)
    rig.push(job("new", delay=60.0), now=None)
    mixed = in_the_shard_of(rig, "new")
    assert 1 < len(mixed) < 31
    if how.startswith("a snapshot"):
        assert last(rig.queue.bulk("delete", match=match, before=found)) == (31 - len(mixed), 30)
    else:
        bounds: Any = {"state": "scheduled" if how == "scheduled" else None, "match": match, "before": found.at}
        assert rig.queue.count("delete", **bounds) == 31 - len(mixed)
        assert last(rig.queue.bulk("delete", **bounds)) == (31 - len(mixed), 31 - len(mixed))
    assert set(rig.ids()) == mixed


@both_ways
def test_a_push_while_it_goes_on_ends_it_in_that_shard(rig: QueueRig, match: str | None) -> None:
    rig.queue.push({"id": f"old-{n}", "delay": 3000.0 + n} for n in range(4000))
    steps = rig.queue.bulk("delete", "scheduled", match=match, before=rig.queue.snapshot("delete").at)
    next(step for step in steps if step.done)
    new = push(rig, "new", 9, delay=6500.0)  # ahead of what it has come to
    assert {rig.shard_index(item) for item in new} == {0, 1, 2}
    assert 0 < list(steps)[-1].done < 4000
    assert new <= set(rig.ids())


def test_a_time_that_makes_no_sense_is_refused(rig: QueueRig) -> None:
    rig.push(job("a"))
    for before, says in ((NOW + 1, "future"), (float("nan"), "finite")):
        with case(before), pytest.raises(ConfigError, match=says):
            list(rig.queue.bulk("delete", before=before, now=NOW))
    assert rig.queue.stats().length == 1


# --- single ids ---------------------------------------------------------------------------------------------------


def test_what_something_happened_to_or_nobody_has_looked_at_is_left_alone(rig: QueueRig) -> None:
    ids = ["due", "later", "buried", "moved", "kicked", "gone", "renewed"]
    rig.push(*(job(item, delay=None if item == "due" else 3600.0) for item in [*ids, "unseen"]), now=None)
    rig.queue.bury(["buried", "kicked"])
    moments = rig.queue.moments([*ids, "nowhere"])
    assert moments["nowhere"] == (None, None)
    assert [at is None for at in moments["buried"]] == [True, False]
    rig.queue.perform_now("moved")
    rig.queue.kick("kicked")
    rig.queue.delete(["gone", "renewed"])
    rig.push(job("renewed", delay=60.0), job("nowhere"), now=None)
    acted = rig.queue.delete([*ids, "nowhere", "unseen"], unchanged=moments)
    assert acted == Acted(done=3, missing=6)
    left = ("moved", "kicked", "gone", "renewed", "nowhere", "unseen")
    assert dict(acted.left) == dict.fromkeys(left, "changed since it was looked at, left alone")
    assert set(rig.ids()) == {*left} - {"gone"}
