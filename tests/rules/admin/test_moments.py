"""What was asked about is what is done: actions that touch nothing newer than a moment."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lowq.admin import bulk
from lowq.admin.actions import Acted
from lowq.admin.bulk import Step
from lowq.broker.delivery import Failure
from lowq.errors import ConfigError
from tests.rows import case
from tests.rules.queue_rig import QueueRig
from tests.rules.support import NOW, job
from tests.tiers import real_redis_often

pytestmark = real_redis_often


@contextmanager
def empty(store_url: str) -> Iterator[QueueRig]:
    """The queue in an empty store, for a row of a table."""
    rig = QueueRig(store_url)
    try:
        rig.client.command("FLUSHALL")
        yield rig
    finally:
        rig.close()


def last(steps: Iterator[Step]) -> tuple[int, int]:
    """How many it was done to, of how many."""
    step = list(steps)[-1]
    return step.done, step.total


def push(rig: QueueRig, name: str, count: int = 6, **more: Any) -> set[str]:
    """Jobs in all shards, by the server's clock."""
    ids = {f"{name}-{n}" for n in range(count)}
    rig.push(*(job(item, **more) for item in sorted(ids)), now=None)
    return ids


def everything(rig: QueueRig) -> set[str]:
    return set(rig.ids())


@pytest.mark.parametrize("match", [None, "*"])
class TestASnapshot:
    @pytest.mark.parametrize("state", [None, "due"])
    def test_what_is_pushed_later_stays(self, rig: QueueRig, match: str | None, state: Any) -> None:
        push(rig, "old")
        found = rig.queue.snapshot("delete", state, match=match)
        assert found.total == 6
        new = push(rig, "new") | push(rig, "past", perform_at=5.0) | push(rig, "later", delay=60.0)
        assert last(rig.queue.bulk("delete", state, match=match, before=found)) == (6, 6)
        assert everything(rig) == new

    def test_what_is_pushed_for_an_earlier_time_than_others_stays(self, store_url: str, match: str | None) -> None:
        states: list[Any] = [None, "scheduled"]
        actions: list[Any] = ["bury", "delete", "perform_now"]
        for state, action in itertools.product(states, actions):
            with case(state, action), empty(store_url) as rig:
                old = push(rig, "old", delay=3600.0)
                found = rig.queue.snapshot(action, state, match=match)
                new = push(rig, "new", delay=60.0) | push(rig, "again", delay=3600.0)
                rig.queue.delete("old-3")
                push(rig, "old", 4, delay=60.0)  # three wait already, and the fourth is a new job
                assert last(rig.queue.bulk(action, state, match=match, before=found)) == (5, 6)
                waiting = {item for item in everything(rig) if rig.queue.fetch([item])[item].state == "scheduled"}
                assert waiting == new | {"old-3"}
                assert old - waiting == old - {"old-3"}

    def test_what_has_become_due_since_is_still_meant(self, rig: QueueRig, match: str | None) -> None:
        rig.push(*(job(f"old-{n}", delay=3.0) for n in range(6)))
        found = rig.queue.snapshot("bury", "scheduled", match=match, now=NOW)
        assert found.total == 6
        new = {f"new-{n}" for n in range(6)}
        rig.push(*(job(item) for item in new), now=NOW + 4)
        assert last(rig.queue.bulk("bury", "scheduled", match=match, before=found, now=NOW + 4)) == (6, 6)
        assert everything(rig) == new

    @pytest.mark.parametrize("action", ["kick", "delete"])
    def test_what_is_buried_later_stays_buried(self, rig: QueueRig, match: str | None, action: Any) -> None:
        rig.queue.bury(push(rig, "old") | push(rig, "again"))
        found = rig.queue.snapshot(action, "morgue", match=match)
        assert found.total == 12
        rig.queue.kick(f"again-{n}" for n in range(6))
        new = {f"again-{n}" for n in range(6)} | push(rig, "new")
        rig.queue.bury(new)
        assert last(rig.queue.bulk(action, "morgue", match=match, before=found)) == (6, 12)
        assert set(rig.ids(state="morgue")) == new

    def test_what_fails_later_waits_for_its_retry(self, rig: QueueRig, match: str | None) -> None:
        push(rig, "old", 1)
        rig.fail("old-0", delay=900.0, now=None)  # type: ignore[arg-type]  # the server's clock
        shard = rig.own("new", now=None)  # type: ignore[arg-type]
        rig.push(job("new"), now=None)
        assert [item.id for item in shard.in_flight.take(10).jobs] == ["new"]
        found = rig.queue.snapshot("delete", "retrying", match=match)
        assert found.total == 1
        shard.in_flight.fail([Failure("new", "retry", 0, 60.0, b"boom")])
        assert last(rig.queue.bulk("delete", "retrying", match=match, before=found)) == (1, 1)
        assert everything(rig) == {"new"}

    def test_without_memory_of_each_the_time_alone_judges(
        self, rig: QueueRig, match: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(bulk, "MAX_REMEMBERED", 3)
        push(rig, "old", 20, delay=3600.0)
        found = rig.queue.snapshot("delete", None, match=match)
        assert (found.total, found.remembers) == (20, False)
        rig.push(job("new", delay=60.0), now=None)
        mixed = {item for item in everything(rig) if rig.shard_index(item) == rig.shard_index("new")}
        assert last(rig.queue.bulk("delete", None, match=match, before=found)) == (21 - len(mixed), 20)
        assert everything(rig) == mixed


@pytest.mark.parametrize("match", [None, "*"])
class TestATime:
    def at(self, rig: QueueRig) -> float:
        return rig.queue.snapshot("delete").at

    def test_what_was_due_by_then(self, rig: QueueRig, match: str | None) -> None:
        push(rig, "old")
        at = self.at(rig)
        new = push(rig, "new") | push(rig, "later", delay=60.0)
        assert rig.queue.count("delete", None, match=match, before=at) == 6
        assert last(rig.queue.bulk("delete", None, match=match, before=at)) == (6, 6)
        assert everything(rig) == new

    @pytest.mark.parametrize("state", [None, "scheduled"])
    def test_of_shards_that_got_a_push_what_was_not_due_stays(
        self, rig: QueueRig, match: str | None, state: Any
    ) -> None:
        push(rig, "old", 30, delay=3600.0)
        at = self.at(rig)
        rig.push(job("new", delay=60.0), now=None)
        mixed = {item for item in everything(rig) if rig.shard_index(item) == rig.shard_index("new")}
        assert 1 < len(mixed) < 31
        assert rig.queue.count("delete", state, match=match, before=at) == 31 - len(mixed)
        assert last(rig.queue.bulk("delete", state, match=match, before=at)) == (31 - len(mixed), 31 - len(mixed))
        assert everything(rig) == mixed

    def test_a_push_while_it_goes_on_ends_it_in_that_shard(self, rig: QueueRig, match: str | None) -> None:
        rig.queue.push({"id": f"old-{n}", "delay": 3000.0 + n} for n in range(4000))
        steps = rig.queue.bulk("delete", "scheduled", match=match, before=self.at(rig))
        next(step for step in steps if step.done)
        new = push(rig, "new", 9, delay=6500.0)  # ahead of what it has come to
        assert {rig.shard_index(item) for item in new} == {0, 1, 2}
        assert 0 < list(steps)[-1].done < 4000
        assert new <= everything(rig)

    def test_what_was_kicked_since_stays(self, rig: QueueRig, match: str | None) -> None:
        rig.queue.bury(push(rig, "buried"))
        push(rig, "old", delay=3600.0)
        at = self.at(rig)
        rig.queue.kick(f"buried-{n}" for n in range(6))
        assert last(rig.queue.bulk("delete", None, match=match, before=at)) == (6, 6)
        assert everything(rig) == {f"buried-{n}" for n in range(6)}

    def test_what_was_buried_by_then(self, rig: QueueRig, match: str | None) -> None:
        rig.queue.bury(push(rig, "old"))
        at = self.at(rig)
        new = push(rig, "new")
        rig.queue.bury(new)
        assert rig.queue.count("kick", "morgue", match=match, before=at) == 6
        assert last(rig.queue.bulk("kick", "morgue", match=match, before=at)) == (6, 6)
        assert set(rig.ids(state="morgue")) == new


def test_a_time_that_makes_no_sense_is_refused(rig: QueueRig) -> None:
    rig.push(job("a"))
    for before, says in ((NOW + 1, "future"), (float("nan"), "finite"), (float("inf"), "finite")):
        with case(before):
            with pytest.raises(ConfigError, match=says):
                list(rig.queue.bulk("delete", before=before, now=NOW))
            assert rig.queue.stats().length == 1


class TestIds:
    def test_what_something_happened_to_is_left_alone(self, rig: QueueRig) -> None:
        ids = ["due", "later", "buried", "moved", "kicked", "gone", "renewed"]
        rig.push(*(job(item, delay=None if item == "due" else 3600.0) for item in ids), now=None)
        rig.queue.bury(["buried", "kicked"])
        moments = rig.queue.moments([*ids, "nowhere"])
        assert moments["nowhere"] == (None, None)
        assert moments["buried"][0] is None
        assert moments["buried"][1] is not None
        rig.queue.perform_now("moved")
        rig.queue.kick("kicked")
        rig.queue.delete(["gone", "renewed"])
        rig.push(job("renewed", delay=60.0), job("nowhere"), now=None)
        acted = rig.queue.delete([*ids, "nowhere"], unchanged=moments)
        assert acted == Acted(done=3, missing=5)
        assert dict(acted.left) == dict.fromkeys(
            ("moved", "kicked", "gone", "renewed", "nowhere"), "changed since it was looked at, left alone"
        )
        assert set(rig.ids()) == {"moved", "kicked", "renewed", "nowhere"}

    def test_ids_that_nobody_has_looked_at_are_left_alone(self, rig: QueueRig) -> None:
        push(rig, "old", 2)
        moments = rig.queue.moments("old-0")
        assert rig.queue.bury(["old-0", "old-1"], "why not", unchanged=moments) == Acted(done=1, missing=1)
        assert set(rig.ids(state="morgue")) == {"old-0"}
