"""What the process of a queue system in Python does when it is measured: the same for all of them.

python -m benchmarks.peers.huey VERB --url URL [--count N] [--size BYTES] [--set name=value]

versions    says what is installed
bulk        enqueues N jobs by the fastest documented way; says 'done' with the seconds
single      enqueues N jobs one by one
send        pings, a few ms apart: first until it is told that they arrive, then N
work        a worker with 5 threads, or a concurrency of 5; says 'first', and 'last' at the Nth job
receive     the same, for pings; says 'first' and, at the Nth, 'delays'
"""

import argparse
import asyncio
import importlib.metadata
import os
import random
import selectors
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from benchmarks.peers import handler
from benchmarks.peers.jobs import payloads

CONCURRENCY = 5
#: Seconds between two pings, at least and at most: far apart enough for the worker to be idle again, and never in
#: step with somebody who polls.
PAUSES = (0.010, 0.025)


class Adapter:
    """One queue system. `pings`: the handler is to be `handle_ping`."""

    #: What is named in the results, with its version: distributions.
    packages: tuple[str, ...] = ()

    def __init__(self, url: str, settings: dict[str, str], *, pings: bool) -> None:
        self.url = url
        self.settings = settings
        self.handle = handler.handle_ping if pings else handler.handle
        self.ahandle = handler.ahandle_ping if pings else handler.ahandle
        #: Jobs at once.
        self.concurrency = int(settings.get("concurrency", CONCURRENCY))
        kind, _, seconds = settings.get("work", "").partition(":")
        if kind == "await":
            self.ahandle = _waiting(self.ahandle, float(seconds))

    def one(self, payload: dict[str, Any]) -> Any:
        """Enqueues a job. May be a coroutine function."""
        raise NotImplementedError

    def many(self, payloads: list[dict[str, Any]]) -> Any:
        """Enqueues jobs by the fastest documented way. May be a coroutine function."""
        raise NotImplementedError

    def work(self) -> None:
        """Works until the process is killed."""
        raise NotImplementedError


def _waiting(ahandle: Callable[[Any], Awaitable[None]], seconds: float) -> Callable[[Any], Awaitable[None]]:
    async def wait_and_handle(payload: Any) -> None:
        await asyncio.sleep(seconds)
        await ahandle(payload)

    return wait_and_handle


def main(kind: type[Adapter]) -> None:
    """The command line of an adapter's module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["versions", "bulk", "single", "send", "work", "receive"])
    parser.add_argument("--url", default="")
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--size", type=int, default=20)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    if options.verb == "versions":
        handler.say("versions", text=", ".join(_version(name) for name in kind.packages))
        return
    settings = dict(item.split("=", 1) for item in options.set)
    handler.count.begin(options.count)
    adapter = kind(options.url, settings, pings=options.verb in ("send", "receive"))
    if options.verb in ("work", "receive"):
        adapter.work()
    else:
        enqueue = {"bulk": _bulk, "single": _single, "send": _send}[options.verb]
        asyncio.run(enqueue(adapter, options.count, options.size))
    sys.stdout.flush()
    os._exit(0)  # whatever threads a library has left


async def _bulk(adapter: Adapter, count: int, size: int) -> None:
    await _done(adapter.one(payloads(1, size)[0]))  # connects
    jobs = payloads(count, size, start=200_000)
    start = time.monotonic()
    await _done(adapter.many(jobs))
    handler.say("done", seconds=time.monotonic() - start)


async def _single(adapter: Adapter, count: int, size: int) -> None:
    await _done(adapter.one(payloads(1, size)[0]))
    jobs = payloads(count, size, start=200_000)
    start = time.monotonic()
    if asyncio.iscoroutinefunction(adapter.one):
        for job in jobs:
            await adapter.one(job)
    else:
        for job in jobs:
            adapter.one(job)
    handler.say("done", seconds=time.monotonic() - start)


async def _send(adapter: Adapter, count: int, _size: int) -> None:
    number = 0
    told = selectors.PollSelector()
    told.register(sys.stdin, selectors.EVENT_READ)
    while not told.select(0.1):
        await _done(adapter.one({"v": number, "sent": 0}))
        number += 1
    await asyncio.sleep(0.3)
    for number in range(count):
        await asyncio.sleep(random.uniform(*PAUSES))
        await _done(adapter.one({"v": number, "sent": time.monotonic()}))
    handler.say("done")


async def _done(result: Any) -> Any:
    return await result if isinstance(result, Awaitable) else result


def chunks(items: list[Any], size: int) -> Iterable[list[Any]]:
    """The items, `size` at a time."""
    return (items[start : start + size] for start in range(0, len(items), size))


def _version(name: str) -> str:
    return f"{name} {importlib.metadata.version(name)}"
