"""Batches that have to end in time, as pushes of their handlers see them."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lowq.store import caller_limit


class Batch:
    """``seconds`` are counted from each time that they are asked for, however late a busy machine does."""

    def __init__(self, seconds: float) -> None:
        self.seconds: float | None = seconds
        self.thread = 0
        self.at_end: dict[object, Callable[[], object]] = {}

    @property
    def deadline(self) -> float | None:
        return None if self.seconds is None else time.monotonic() + self.seconds


@contextmanager
def within_batch(seconds: float) -> Iterator[Batch]:
    """What is begun in the block, tasks too, belongs to a batch that has so many seconds left."""
    batch = Batch(seconds)
    token = caller_limit.set(batch)
    try:
        yield batch
    finally:
        caller_limit.reset(token)
