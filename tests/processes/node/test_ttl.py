"""A payload that has been taken in advance is not handed over once its ttl has passed."""

import asyncio
from typing import Any

import lowq
from tests.processes.node.conftest import Start, is_idle
from tests.waiting import until

#: Seconds.
TTL = 0.5


def test_what_expires_behind_a_slow_task_is_dropped(app: lowq.Lowq, start: Start) -> None:
    """So it is in threads: tests/rules/node/test_prefetched."""
    performed: list[str] = []
    #: Slow jobs that had another one behind them which expired in this node's hand.
    shown: list[str] = []

    @app.worker(shards_count=1)
    async def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        (job_id,) = payloads_by_id
        performed.append(job_id)
        if job_id.startswith("slow"):
            behind = orders.queue.peek(f"behind {job_id}")
            if behind is not None and behind.state == "taken":
                shown.append(job_id)
                await asyncio.sleep(TTL + 0.1)  # it was pushed before

    start()
    number = 0
    while not shown:  # on a busy machine it may expire before it is taken
        number += 1
        orders.perform_async({"id": f"{number}.{n}"} for n in range(100))  # quick ones: so it takes in advance
        until(lambda: is_idle(orders), "an idle queue")
        orders.perform_async(
            [
                {"id": f"slow {number}"},
                {"id": f"behind slow {number}", "payload": 1, "ttl": TTL},
                {"id": f"last {number}"},
            ]
        )
        until(lambda: is_idle(orders), "the end of all jobs")
    assert f"last {number}" in performed
    assert f"behind {shown[0]}" not in performed
    assert orders.queue.stats().expired >= 1
