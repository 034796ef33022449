"""Which threads lowq starts for its own work."""

import _thread
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock


@contextmanager
def started_threads() -> Iterator[list[object]]:
    """What runs in the threads that are started meanwhile, but for those of `threading`."""
    started: list[object] = []
    start = _thread.start_new_thread

    def noted(function: Any, *args: Any) -> int:
        started.append(function)
        return start(function, *args)

    with mock.patch("_thread.start_new_thread", noted):
        yield started


def live_threads() -> int:
    """How many threads this process has (Linux), also those that `threading` does not know."""
    return len(list(Path("/proc/self/task").iterdir()))
