"""A payload that has been taken in advance is not handed over once its ttl has passed."""

import asyncio
import time
from typing import Any

import pytest

import lowq
from tests.processes.node.conftest import Start
from tests.waiting import until

#: Seconds.
TTL = 0.5


@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "loop"])
@pytest.mark.parametrize("per_id", [False, True], ids=["batches", "ids"])
def test_what_expires_behind_a_slow_job_is_dropped(app: lowq.Lowq, start: Start, is_async: bool, per_id: bool) -> None:
    performed: list[str] = []
    #: Slow jobs that had another one behind them which expired in this node's hand.
    shown: list[str] = []

    def seconds(job_id: str) -> float:
        performed.append(job_id)
        if not job_id.startswith("slow"):
            return 0.0
        behind = app.queue("orders").peek(f"behind {job_id}")
        if behind is None or behind.state != "taken":
            return 0.0
        shown.append(job_id)
        return TTL + 0.1  # it was pushed before

    if per_id and is_async:

        class Orders(lowq.Worker[Any]):
            async def perform_one(self, job_id: str, payloads: list[Any]) -> None:
                await asyncio.sleep(seconds(job_id))

    elif per_id:

        class Orders(lowq.Worker[Any]):  # type: ignore[no-redef]
            def perform_one(self, job_id: str, payloads: list[Any]) -> None:
                time.sleep(seconds(job_id))

    elif is_async:

        class Orders(lowq.Worker[Any]):  # type: ignore[no-redef]
            async def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
                await asyncio.sleep(seconds(*payloads_by_id))

    else:

        class Orders(lowq.Worker[Any]):  # type: ignore[no-redef]
            def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
                time.sleep(seconds(*payloads_by_id))

    worker = app.worker(shards_count=1, queue_name="orders", batch_size=2 if per_id else 1)(Orders)
    start(threads=1)

    def is_idle() -> bool:
        stats = worker.queue.stats()
        return stats.length == stats.taken == 0

    number = 0
    while not shown:  # on a busy machine it may expire before it is taken
        number += 1
        worker.perform_async({"id": f"{number}.{n}"} for n in range(100))  # quick ones: so it takes in advance
        until(is_idle, "an idle queue")
        worker.perform_async(
            [
                {"id": f"slow {number}"},
                {"id": f"behind slow {number}", "payload": 1, "ttl": TTL},
                {"id": f"last {number}"},
            ]
        )
        until(is_idle, "the end of all jobs")
    assert f"last {number}" in performed
    assert f"behind {shown[0]}" not in performed
    assert worker.queue.stats().expired >= 1
