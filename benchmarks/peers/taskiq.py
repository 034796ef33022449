"""taskiq on a Redis stream. It has no bulk call: a thousand at once are gathered."""

import asyncio
from typing import Any

from taskiq.api import run_receiver_task
from taskiq_redis import RedisStreamBroker

from benchmarks.peers.adapter import Adapter, chunks, main


class TaskiqAdapter(Adapter):
    packages = ("taskiq", "taskiq-redis", "redis", "hiredis")

    def __init__(self, url: str, settings: dict[str, str], *, pings: bool) -> None:
        super().__init__(url, settings, pings=pings)
        self.broker = RedisStreamBroker(url=url, max_connection_pool_size=50)
        # From the beginning of the stream: what was enqueued before the worker came is there too.
        self.broker.consumer_id = "0"
        self.task = self.broker.register_task(self.ahandle, "bench")
        self._started = False

    async def one(self, payload: dict[str, Any]) -> None:
        await self._start()
        await self.task.kiq(payload)

    async def many(self, payloads: list[dict[str, Any]]) -> None:
        for part in chunks(payloads, 50):  # as many as there are connections: more would have to wait for one
            await asyncio.gather(*(self.task.kiq(payload) for payload in part))

    async def _start(self) -> None:
        if not self._started:
            self._started = True
            await self.broker.startup()

    def work(self) -> None:
        asyncio.run(self._work())

    async def _work(self) -> None:
        await run_receiver_task(self.broker, max_async_tasks=self.concurrency, run_startup=True)


if __name__ == "__main__":
    main(TaskiqAdapter)
