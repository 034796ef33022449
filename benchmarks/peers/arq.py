"""arq, with a poll delay of 10 ms instead of 500. It has no bulk call: some jobs at once are gathered."""

import asyncio
from typing import Any

from arq import create_pool
from arq.connections import RedisSettings
from arq.worker import Worker, func

from benchmarks.peers.adapter import Adapter, chunks, main


class ArqAdapter(Adapter):
    packages = ("arq", "redis", "hiredis")

    def __init__(self, url: str, settings: dict[str, str], *, pings: bool) -> None:
        super().__init__(url, settings, pings=pings)
        self.redis = RedisSettings.from_dsn(url)
        self._pool: Any = None

    async def one(self, payload: dict[str, Any]) -> None:
        if self._pool is None:
            self._pool = await create_pool(self.redis)
        await self._pool.enqueue_job("bench", payload)

    async def many(self, payloads: list[dict[str, Any]]) -> None:
        for part in chunks(payloads, 50):
            await asyncio.gather(*(self.one(payload) for payload in part))

    def work(self) -> None:
        ahandle = self.ahandle

        async def bench(_context: dict[Any, Any], payload: dict[str, Any]) -> None:
            await ahandle(payload)

        Worker(
            [func(bench, name="bench")],
            redis_settings=self.redis,
            max_jobs=self.concurrency,
            poll_delay=0.01,
            keep_result=0,
        ).run()


if __name__ == "__main__":
    main(ArqAdapter)
