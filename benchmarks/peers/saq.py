"""SAQ. It has no bulk call: some jobs at once are gathered."""

import asyncio
from typing import Any

from saq import Queue, Worker

from benchmarks.peers.adapter import Adapter, chunks, main


class SaqAdapter(Adapter):
    packages = ("saq", "redis", "hiredis")

    def __init__(self, url: str, settings: dict[str, str], *, pings: bool) -> None:
        super().__init__(url, settings, pings=pings)
        self.queue = Queue.from_url(url)

    async def one(self, payload: dict[str, Any]) -> None:
        await self.queue.enqueue("bench", payload=payload)

    async def many(self, payloads: list[dict[str, Any]]) -> None:
        for part in chunks(payloads, 50):
            await asyncio.gather(*(self.one(payload) for payload in part))

    def work(self) -> None:
        ahandle = self.ahandle

        async def bench(_context: dict[str, Any], *, payload: dict[str, Any]) -> None:
            await ahandle(payload)

        asyncio.run(Worker(self.queue, [("bench", bench)], concurrency=self.concurrency).start())


if __name__ == "__main__":
    main(SaqAdapter)
