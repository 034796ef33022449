"""How all tests wait: for a condition, with a limit that only what went wrong ever reaches."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

#: Seconds that a test waits for what should happen soon. So many that a busy machine needs a small part of them.
PATIENCE = 60.0
#: Seconds: longer than any test. For an interval or a lease that must not be what makes something happen: when it
#: happens all the same, it happened for the reason that the test is about.
NEVER = 3600.0

T = TypeVar("T")


def until(condition: Callable[[], T], what: str = "what was waited for", timeout: float = PATIENCE) -> T:
    """Waits until the condition gives something true, and returns that.

    Raises:
        AssertionError: it did not within ``timeout`` seconds; the message names ``what``.
    """
    give_up_at = time.monotonic() + timeout
    while True:
        result = condition()
        if result:
            return result
        assert time.monotonic() < give_up_at, f"after {timeout:g} s there was still no: {what}"
        time.sleep(0.005)


async def auntil(condition: Callable[[], object], what: str, timeout: float = PATIENCE) -> None:
    """`until` in a coroutine: the loop goes on meanwhile."""
    give_up_at = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < give_up_at, f"after {timeout:g} s there was still no: {what}"
        await asyncio.sleep(0.005)
