"""Celery with its pool of threads. It has no bulk call: `group` sends one by one."""

from typing import Any

import celery

from benchmarks.peers.adapter import CONCURRENCY, Adapter, main


class CeleryAdapter(Adapter):
    packages = ("celery", "redis", "hiredis")

    def __init__(self, url: str, settings: dict[str, str], *, pings: bool) -> None:
        super().__init__(url, settings, pings=pings)
        self.app = celery.Celery("bench", broker=url)
        self.app.conf.update(task_ignore_result=True, worker_hijack_root_logger=False)
        self.task = self.app.task(name="bench")(self.handle)

    def one(self, payload: dict[str, Any]) -> None:
        self.task.delay(payload)

    def many(self, payloads: list[dict[str, Any]]) -> None:
        celery.group(self.task.s(payload) for payload in payloads).apply_async()

    def work(self) -> None:
        options = ["--pool=threads", f"--concurrency={CONCURRENCY}", "--loglevel=ERROR"]
        self.app.worker_main(["worker", *options, "--without-gossip", "--without-mingle"])


if __name__ == "__main__":
    main(CeleryAdapter)
