"""streaq. `enqueue_many` sends a thousand at once."""

from typing import Any

from streaq import Worker

from benchmarks.peers.adapter import Adapter, chunks, main


class StreaqAdapter(Adapter):
    packages = ("streaq", "coredis", "hiredis")

    def __init__(self, url: str, settings: dict[str, str], *, pings: bool) -> None:
        super().__init__(url, settings, pings=pings)
        self.worker: Worker[None] = Worker(redis_url=url, concurrency=self.concurrency)
        self.task = self.worker.task(ttl=0, name="bench")(self.ahandle)
        self._entered = False

    async def one(self, payload: dict[str, Any]) -> None:
        await self._enter()
        await self.task.enqueue(payload)

    async def many(self, payloads: list[dict[str, Any]]) -> None:
        for part in chunks(payloads, 1000):
            await self.worker.enqueue_many([self.task.enqueue(payload) for payload in part])

    async def _enter(self) -> None:
        if not self._entered:
            self._entered = True
            await self.worker.__aenter__()

    def work(self) -> None:
        self.worker.run_sync()


if __name__ == "__main__":
    main(StreaqAdapter)
