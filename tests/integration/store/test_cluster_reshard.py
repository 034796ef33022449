"""A queue of a cluster gets another number of shards: its jobs go from primary to primary."""

import logging
from collections.abc import Sequence
from typing import Any

import pytest

import lowq
from lowq.store import Call
from lowq.store.durability import Wait
from tests.redis_cluster import RedisCluster
from tests.waiting import PATIENCE


@pytest.mark.parametrize("replicas", [1, 0])
def test_jobs_are_deleted_once_a_replica_of_where_they_came_to_has_them(
    replicas: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two primaries one may fail over and lose what it was given, while the other has deleted it."""
    if replicas:  # they may be slow, and confirm it all the same
        monkeypatch.setattr("lowq.admin.reshard.CONFIRMATION", Wait("replicated", PATIENCE))
    with RedisCluster(replicas=replicas) as cluster:
        app = lowq.Lowq(redis_url=cluster.url)
        queue = app.queue("Orders", 5)
        queue.push({"id": str(number), "payload": number} for number in range(500))
        start, confirmed = app.client.start, set[str]()

        def start_noted(calls: Sequence[Call], **options: Any) -> Any:
            if options.get("wait") is not None:
                confirmed.update(call.script for call in calls)
            return start(calls, **options)

        monkeypatch.setattr(app.client, "start", start_noted)
        with caplog.at_level(logging.WARNING, "lowq.reshard"):
            queue.reshard(7)
        assert queue.stats().length == 500
        assert len(queue.fetch(str(number) for number in range(500))) == 500
        stats: list[Any] = [RedisCluster.ask(server, "INFO", "commandstats") for server in cluster.primaries()]
        waits = [int(one.get("cmdstat_wait", {"calls": 0})["calls"]) for one in stats]
        if replicas:
            assert all(waits), "each primary was given jobs"
            assert confirmed == {"prepare_shard", "seal", "move_in"}
            assert not caplog.records
        else:
            assert any(waits)
            assert "no replica has confirmed" in caplog.text
        app.close()
