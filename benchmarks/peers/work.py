"""What a perform of lowq does besides being counted, where a figure wants more than blank jobs."""

import time
from collections.abc import Callable

#: The queue that is measured, and one beside it.
QUEUE, SLOW = "Bench", "Slow"


def work(name: str) -> Callable[[], None] | None:
    """``blank``; ``spin:0.0002``: processor seconds, holding the GIL as a computation does; ``wait:0.05``: seconds.
    ``await:0.05`` and ``async``, which is blank, are for async workers, and nothing here.
    """
    kind, _, seconds = name.partition(":")
    if kind == "spin":
        return lambda: _spin(float(seconds))
    if kind == "wait":
        return lambda: time.sleep(float(seconds))
    return None


def _spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
