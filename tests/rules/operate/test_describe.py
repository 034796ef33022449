"""Everything that is known of an id, in one round trip or two."""

import json

import pytest

from lowq.errors import JobError, ScriptError, UnknownQueueError
from lowq.store.keys import queues_key
from tests.round_trips import counted_round_trips
from tests.rules.operate.conftest import tell_of_activities
from tests.rules.queue_rig import SHARDS, QueueRig
from tests.rules.support import NOW, job
from tests.waiting import NEVER

#: What is known is put together in Python; the scripts that it asks are tested on both stores in test_queries.py.
pytestmark = pytest.mark.parametrize("store_url", ["memory"], indirect=True)


def everywhere(rig: QueueRig) -> None:
    """The id "a" is in flight, has newer payloads that wait, and older ones in the morgue."""
    entry = json.dumps({"shards_count": SHARDS, "options": {"max_retry_count": 7}})
    rig.client.command("HSET", queues_key("lowq"), "Orders", entry)
    rig.push(job("a", b'"oldest"'))
    rig.queue.bury("a", reason="poisoned", now=NOW)
    rig.push(job("a", b'"older"'))
    rig.take("a")
    rig.push(job("a", b'"newer"'))


def test_all_places_of_an_id_its_shard_and_its_node(rig: QueueRig) -> None:
    everywhere(rig)
    index = rig.shard_index("a")
    tell_of_activities(rig, None, {"queue": "Orders", "shard": index, "ids": ["a"], "count": 1, "seconds": 4.0})
    found = rig.queue.describe("a", now=NOW + 30)
    assert (found.queue, found.id, found.at, found.max_retry_count) == ("Orders", "a", NOW + 30, 7)
    assert [item.state for item in found.jobs] == ["taken", "due", "morgue"]
    assert found.jobs == (found.taken, found.waiting, found.buried)
    assert [item.payloads[0][0] for item in found.jobs] == ["older", "newer", "oldest"]
    assert found.buried is not None
    assert (found.buried.error, found.buried.buried_at) == ("poisoned", NOW)
    assert (found.state, found.why) == ("taken", rig.queue.why("a", now=NOW + 30))
    assert (found.why.reason, found.why.node, found.why.thread) == ("performing", "host:7:tester", 1)
    again = rig.queue.shard(index, now=NOW + 30)
    assert (found.shard.lease_seconds or 0) >= (again.lease_seconds or 0) > 0
    assert (found.shard.index, found.shard.owner, found.shard.fence) == (again.index, again.owner, again.fence)
    assert found.node is not None
    assert (found.node.name, found.node.pid) == ("host:7:tester", 7)


def test_an_id_that_is_nowhere(rig: QueueRig) -> None:
    found = rig.queue.describe("nobody")
    assert (found.jobs, found.taken, found.waiting, found.buried) == ((), None, None, None)
    assert (found.state, found.why.reason, found.node, found.max_retry_count) == (None, "absent", None, 25)
    assert (found.shard.index, found.shard.owner) == (rig.shard_index("nobody"), None)


def test_a_paused_queue_a_failed_job_and_a_holder_that_is_in_no_registry(rig: QueueRig) -> None:
    rig.push(job("a"))
    rig.fail("a", retry_count=2, delay=50.0)
    assert rig.queue.describe("a", now=NOW + 50).why.detail.endswith("owner tester works")
    rig.queue.pause(by="ann", now=NOW)
    found = rig.queue.describe("a", now=NOW + 60)
    assert (found.node, found.shard.owner) == (None, "tester")
    assert (found.why.reason, found.why.paused_by, found.shard.paused) == ("paused", "ann", True)
    assert found.waiting is not None
    assert (found.waiting.retry_count, found.waiting.error) == (2, "boom")


def test_it_takes_one_round_trip_where_the_number_of_shards_is_known_and_two_elsewhere(
    rig: QueueRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowq.operate.queues.READ_AGAIN", NEVER)  # else a slow machine reads the registry besides
    everywhere(rig)
    rig.queue.stats()
    with counted_round_trips() as counted:
        known = rig.queue.describe("a", now=NOW)
        assert counted.count == 1
        assert len(rig.queue.places("a")) == 3
        assert rig.queue.why("a").state == "taken"
        assert counted.count == 3
    rig.app.registrations.forget()
    with counted_round_trips() as counted:
        asked = rig.app.queue("Orders").describe("a", now=NOW)
    assert counted.count == 2
    assert asked.jobs == known.jobs


def test_what_it_refuses(rig: QueueRig) -> None:
    with pytest.raises(JobError):
        rig.queue.describe("")
    with pytest.raises(UnknownQueueError, match="Ordres"):
        rig.app.queue("Ordres").describe("a")
    rig.client.command("SET", rig.prefix_of("a") + "morgue", "no sorted set")
    with pytest.raises(ScriptError) as caught:
        rig.queue.describe("a")
    assert caught.value.key == rig.prefix_of("a")
