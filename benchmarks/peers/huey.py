"""Huey: threads. It has no bulk call; `map` enqueues one by one."""

from typing import Any

from huey import RedisHuey

from benchmarks.peers.adapter import CONCURRENCY, Adapter, main


class HueyAdapter(Adapter):
    packages = ("huey", "redis", "hiredis")

    def __init__(self, url: str, settings: dict[str, str], *, pings: bool) -> None:
        super().__init__(url, settings, pings=pings)
        self.huey = RedisHuey(url=url, results=False)
        self.task = self.huey.task()(self.handle)

    def one(self, payload: dict[str, Any]) -> None:
        self.task(payload)

    def many(self, payloads: list[dict[str, Any]]) -> None:
        self.task.map(payloads)

    def work(self) -> None:
        self.huey.create_consumer(workers=CONCURRENCY, worker_type="thread").run()


if __name__ == "__main__":
    main(HueyAdapter)
