"""`clear` empties a queue, `kick_oldest` brings the first of the morgue back."""

from typing import Any

import pytest

from lowq.errors import ConfigError
from tests.rows import case
from tests.rules.queue_rig import QueueRig
from tests.rules.support import NOW, job

pytestmark = pytest.mark.parametrize("store_url", ["memory"], indirect=True)


def bury(rig: QueueRig, *ids: str) -> None:
    """One after the other, a second apart."""
    for number, job_id in enumerate(ids):
        rig.push(job(job_id))
        assert rig.queue.bury(job_id, now=NOW + number).done == 1


def test_clear_deletes_what_waits_and_what_is_buried(rig: QueueRig) -> None:
    rig.queue.push([{"id": n} for n in range(1202)] + [{"id": "later", "delay": 3600}])
    rig.queue.bury([3, 700])
    assert rig.queue.clear() == 1203
    stats = rig.queue.stats()
    assert (stats.length, stats.morgue_length) == (0, 0)
    assert rig.queue.clear() == 0
    assert rig.queue.push({"id": 1}) == 1


def test_clear_leaves_what_is_in_flight(rig: QueueRig) -> None:
    rig.push(job("a"))
    shard = rig.own("a")
    (taken,) = shard.in_flight.take(1, NOW + 1).jobs
    rig.push(job("a", 2), job("b"))
    assert rig.queue.clear() == 1
    stats = rig.queue.stats()
    assert (stats.length, stats.taken) == (1, 1)
    assert taken.id == "a"


def test_the_oldest_are_kicked_over_all_shards(rig: QueueRig) -> None:
    bury(rig, *"fbdaec")
    assert rig.queue.kick_oldest(0).done == 0
    assert rig.queue.kick_oldest(2).done == 2
    assert {item.id for item in rig.queue.jobs("morgue").jobs} == set("daec")
    assert rig.queue.kick_oldest(100).done == 4
    assert rig.queue.stats().morgue_length == 0
    assert rig.queue.kick_oldest(1).done == 0


def test_more_of_them_than_are_looked_for_at_once(rig: QueueRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowq.queue.OLDEST_TOGETHER", 2)
    bury(rig, *"fbdaec")
    assert rig.queue.kick_oldest(5).done == 5
    assert [item.id for item in rig.queue.jobs("morgue").jobs] == ["c"]


def test_a_count_that_is_none(rig: QueueRig) -> None:
    rows: list[Any] = [-1, True, 1.5, "3", None]
    for count in rows:
        with case(count), pytest.raises(ConfigError, match="count="):
            rig.queue.kick_oldest(count)
