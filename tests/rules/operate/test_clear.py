"""`clear` empties a queue, `kick_oldest` brings the first of the morgue back."""

from typing import Any

import pytest

from lowq.errors import ConfigError
from tests.rows import case
from tests.rules.queue_rig import QueueRig
from tests.rules.support import NOW, job

pytestmark = pytest.mark.parametrize("store_url", ["memory"], indirect=True)


def test_clear_deletes_what_waits_and_what_is_buried_and_leaves_what_is_in_flight(rig: QueueRig) -> None:
    rig.push(job("taken"))
    rig.take("taken")
    rig.queue.push([{"id": n} for n in range(1202)] + [{"id": "later", "delay": 3600}])
    rig.queue.bury([3, 700])
    rig.push(job("taken", 2))
    assert rig.queue.clear() == 1203
    stats = rig.queue.stats()
    assert (stats.length, stats.morgue_length, stats.taken) == (1, 0, 1)
    assert rig.queue.clear() == 0
    assert rig.queue.push({"id": 1}) == 1


def test_the_oldest_are_kicked_over_all_shards(rig: QueueRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowq.operate.commands.OLDEST_TOGETHER", 2)
    for number, job_id in enumerate("fbdaec"):
        rig.push(job(job_id))
        rig.queue.bury(job_id, now=NOW + number)
    counts: list[Any] = [-1, True, 1.5, "3", None]
    for count in counts:
        with case(count), pytest.raises(ConfigError, match="count="):
            rig.queue.kick_oldest(count)
    for count, done, left in ((0, 0, "fbdaec"), (1, 1, "bdaec"), (4, 4, "c"), (100, 1, ""), (1, 0, "")):
        with case(count):
            assert rig.queue.kick_oldest(count).done == done
            assert "".join(rig.ids(state="morgue")) == left
