"""lowq. Settings: batch_size, shards, threads, concurrency, prefetch=off, middleware=on, scheduler=seq, work and slow
(see `work`), first (the first id), queues (so many alike), weight, max_threads of the slow one, type (see `_TYPES`),
and of a queue's options merge, ttl, priority, capacity, debounce and max_wait.

A worker that runs is told on its stdin to count anew: ``expect N``; it says 'expecting'.
"""

import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import msgspec

import lowq
from benchmarks.peers import handler
from benchmarks.peers.adapter import CONCURRENCY, Adapter, main
from benchmarks.peers.work import QUEUE, SLOW, work
from lowq.node.node import Node
from lowq.shards.scheduler import SeqScheduler

#: Options of a queue -> how they are read.
_OPTIONS: dict[str, Callable[[str], Any]] = {
    "merge": str, "ttl": float, "priority": int, "capacity": int, "debounce": float, "max_wait": float
}  # fmt: skip


class _Struct(msgspec.Struct):
    v: int
    p: str = ""


class _TypedDict(TypedDict):
    v: int
    p: NotRequired[str]


@dataclass
class _Dataclass:
    v: int
    p: str = ""


#: What payloads are declared to be.
_TYPES: dict[str, Any] = {"dict": Any, "struct": _Struct, "typeddict": _TypedDict, "dataclass": _Dataclass}


class LowqAdapter(Adapter):
    packages = ("lowq", "redis", "hiredis")

    def __init__(self, url: str, settings: dict[str, str], *, pings: bool) -> None:
        super().__init__(url, settings, pings=pings)
        self.app = lowq.Lowq(redis_url=url)
        if settings.get("middleware") == "on":
            self.app.config.server_middlewares = [_pass_on]
        if settings.get("scheduler") == "seq":
            self.app.config.build_scheduler = SeqScheduler
        self.app.config.concurrency = self.concurrency
        self.type = _TYPES[settings.get("type", "dict")]
        self.workers = [
            self.app.worker(
                queue_name=f"{QUEUE}{number or ''}",
                batch_size=int(settings.get("batch_size", 1)),
                shards_count=int(settings.get("shards", 5)),
                weight=float(settings.get("weight", 1)),
                **{name: kind(settings[name]) for name, kind in _OPTIONS.items() if name in settings},
            )(self._of_type(self._perform(settings.get("work", "blank"))))
            for number in range(int(settings.get("queues", 1)))
        ]
        self.worker = self.workers[0]
        if "slow" in settings:
            slow = work(settings["slow"])
            most = int(settings["max_threads"]) if "max_threads" in settings else None

            @self.app.worker(queue_name=SLOW, max_threads=most)
            def perform_slowly(_payloads_by_id: dict[str, list[Any]]) -> None:
                slow()

    def _of_type(self, perform: Callable[[dict[str, list[Any]]], Any]) -> Any:
        if self.type is Any:
            return perform

        class Typed(lowq.Worker[self.type]):  # type: ignore[name-defined]  # known at run time
            def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
                perform(payloads_by_id)

        return Typed

    def _perform(self, name: str) -> Callable[[dict[str, list[Any]]], Any]:
        handle, afterwards = self.handle, work(name)

        def perform(payloads_by_id: dict[str, list[Any]]) -> None:
            for payloads in payloads_by_id.values():
                for payload in payloads:
                    handle(payload)

        def perform_and_work(payloads_by_id: dict[str, list[Any]]) -> None:
            perform(payloads_by_id)
            afterwards()

        async def aperform(payloads_by_id: dict[str, list[Any]]) -> None:
            for payloads in payloads_by_id.values():
                for payload in payloads:
                    await ahandle(payload)

        ahandle = self.ahandle
        if name.startswith("await") or name == "async":
            return aperform
        return perform if afterwards is None else perform_and_work

    def one(self, payload: dict[str, Any]) -> None:
        self.worker.perform_async({"id": payload["v"], "payload": self._value_of(payload)})

    def many(self, payloads: list[dict[str, Any]]) -> None:
        first = int(self.settings.get("first", 200_000))
        values = payloads if self.type is Any else [self._value_of(payload) for payload in payloads]
        self.worker.perform_async({"id": number, "payload": value} for number, value in enumerate(values, first))

    def _value_of(self, payload: dict[str, Any]) -> Any:
        return payload if self.type is Any else self.type(**payload)

    def work(self) -> None:
        threading.Thread(target=_obey, daemon=True).start()
        threads = int(self.settings.get("threads", CONCURRENCY))
        Node(self.app, threads=threads, prefetch=self.settings.get("prefetch") != "off").run()


def _pass_on(_worker: lowq.Worker[Any], _batch: Mapping[str, list[Any]], call_next: Callable[[], None]) -> None:
    call_next()


def _obey() -> None:
    for line in sys.stdin:
        handler.count.begin(int(line.split()[1]))
        handler.say("expecting")


if __name__ == "__main__":
    main(LowqAdapter)
