"""The handler of all queue systems: it does nothing but count.

Some of them import it by name, so it is a function of a module.
"""

import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

Job = Mapping[str, Any]


class Count:
    """What is expected of this process. Owned by whichever thread performs: the number it drew is its own."""

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, expected: int) -> None:
        """Says 'first' at the next job, and 'last' at the one that makes it so many."""
        self.expected = expected
        self.numbers: Iterator[int] = itertools.count(1)  # drawing one is atomic
        self.first = 0.0
        self.delays: list[float] = []


count = Count()


def handle(_job: Job) -> None:
    """A blank job."""
    number = next(count.numbers)
    if number == 1:
        count.first = time.monotonic()
        say("first", at=count.first)
    if number == count.expected:
        now = time.monotonic()
        say("last", at=now, seconds=now - count.first)


def handle_ping(job: Job) -> None:
    """A job that carries the moment at which it was sent, or was to be sent; 0: the ping before the first. Others
    are not counted.
    """
    now = time.monotonic()
    sent = job.get("sent")
    if sent is None:
        return
    if sent == 0:
        say("first", at=now)
        return
    count.delays.append(now - sent)
    if next(count.numbers) == count.expected:
        say("delays", delays=[round(delay, 6) for delay in count.delays])


async def ahandle(job: Job) -> None:
    """For those that want a coroutine."""
    handle(job)


async def ahandle_ping(job: Job) -> None:
    """For those that want a coroutine."""
    handle_ping(job)


def say(event: str, **details: Any) -> None:
    """A line to who measures, past all buffers."""
    os.write(1, (json.dumps({"event": event, **details}) + "\n").encode())
