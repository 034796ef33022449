"""Priorities hold over all shards that a node works, not only within one."""

from typing import Any

import pytest

import lowq
from lowq.sharding import shard_of
from tests.processes.node.conftest import Start
from tests.waiting import until


@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "loop"])
def test_an_urgent_job_does_not_wait_for_the_backlog_of_another_shard(
    app: lowq.Lowq, start: Start, is_async: bool
) -> None:
    performed: list[str] = []
    app.config.concurrency = 1

    if is_async:

        @app.worker(shards_count=2)
        async def orders(payloads_by_id: dict[str, list[Any]]) -> None:
            performed.extend(payloads_by_id)

    else:

        @app.worker(shards_count=2)
        def orders(payloads_by_id: dict[str, list[Any]]) -> None:
            performed.extend(payloads_by_id)

    def ids(shard: int, count: int) -> list[str]:
        return [name for name in map(str, range(1000)) if shard_of(name.encode(), 2) == shard][:count]

    # Both shards have waited, and the other one for longer.
    orders.perform_async({"id": name, "priority": 9} for name in ids(0, 60))
    orders.perform_async({"id": name, "priority": 9} for name in ids(1, 60))
    urgent = ids(1, 65)[60:]
    orders.perform_async({"id": name, "priority": 0} for name in urgent)
    start(threads=1, prefetch=False)
    until(lambda: len(performed) == 125, "the end of all jobs")
    assert max(performed.index(name) for name in urgent) < 30, performed
