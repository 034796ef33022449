"""Dramatiq: threads. Settings: prefetch. It has no bulk call: `group` enqueues one by one."""

import os
import threading
from typing import Any

from benchmarks.peers.adapter import CONCURRENCY, Adapter, main


class DramatiqAdapter(Adapter):
    packages = ("dramatiq", "redis", "hiredis")

    def __init__(self, url: str, settings: dict[str, str], *, pings: bool) -> None:
        super().__init__(url, settings, pings=pings)
        if "prefetch" in settings:
            os.environ["dramatiq_queue_prefetch"] = settings["prefetch"]  # noqa: SIM112 - read so by its import
        import dramatiq
        from dramatiq.brokers.redis import RedisBroker

        self.dramatiq = dramatiq
        self.broker = RedisBroker(url=url)
        dramatiq.set_broker(self.broker)
        self.actor = dramatiq.actor(self.handle, actor_name="bench")

    def one(self, payload: dict[str, Any]) -> None:
        self.actor.send(payload)

    def many(self, payloads: list[dict[str, Any]]) -> None:
        self.dramatiq.group(self.actor.message(payload) for payload in payloads).run()

    def work(self) -> None:
        self.dramatiq.Worker(self.broker, worker_threads=CONCURRENCY).start()
        threading.Event().wait()


if __name__ == "__main__":
    main(DramatiqAdapter)
