"""RQ with its simple worker: one job at a time, in the worker's own process. `enqueue_many` takes them all."""

from typing import Any

import redis
import rq

from benchmarks.peers.adapter import Adapter, chunks, main


class RqAdapter(Adapter):
    packages = ("rq", "redis", "hiredis")

    def __init__(self, url: str, settings: dict[str, str], *, pings: bool) -> None:
        super().__init__(url, settings, pings=pings)
        self.queue = rq.Queue("bench", connection=redis.Redis.from_url(url))

    def one(self, payload: dict[str, Any]) -> None:
        self.queue.enqueue(self.handle, payload, result_ttl=0)

    def many(self, payloads: list[dict[str, Any]]) -> None:
        for part in chunks(payloads, 1000):
            self.queue.enqueue_many([rq.Queue.prepare_data(self.handle, (payload,), result_ttl=0) for payload in part])

    def work(self) -> None:
        rq.SimpleWorker([self.queue], connection=self.queue.connection).work(logging_level="ERROR")


if __name__ == "__main__":
    main(RqAdapter)
