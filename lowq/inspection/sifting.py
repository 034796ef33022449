"""Pages of jobs by what is in them. No set in Redis knows that, so jobs are read, a few at a time, and looked at.

A page ends, with a cursor, after so many jobs, however few of them fit: who wants more asks for the next one.
"""

import time
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

#: Jobs that are looked at for a page, about, and in one step.
MAX_LOOKED, STEP = 20_000, 200

#: A position in the order; and what is there.
P = TypeVar("P")
T = TypeVar("T")


class Chunk(NamedTuple, Generic[P, T]):
    """Some of what there is, in order."""

    rows: list[tuple[P, T]]
    #: Where it goes on; None: nothing follows.
    cursor: P | None
    #: How many places were looked at: `rows` lacks those whose job has gone.
    looked: int


class Sifted(NamedTuple, Generic[P, T]):
    """What fits, so far."""

    kept: list[T]
    cursor: P | None
    looked: int


def sift(
    read: Callable[[P | None], Chunk[P, T]],
    admits: Callable[[T], bool],
    limit: int,
    after: P | None,
    interval: float,
) -> Iterator[Sifted[P, T]]:
    """The first ``limit`` that are admitted: what is known, about every ``interval`` seconds; the last one is the
    page.
    """
    kept: list[T] = []
    looked, cursor = 0, after
    yielded_at = time.monotonic()
    while True:
        chunk = read(cursor)
        for position, item in chunk.rows:
            if admits(item):
                kept.append(item)
                if len(kept) == limit:
                    yield Sifted(kept, position, looked + chunk.looked)
                    return
        looked, cursor = looked + chunk.looked, chunk.cursor
        if cursor is None or looked >= MAX_LOOKED:
            yield Sifted(kept, cursor, looked)
            return
        if time.monotonic() - yielded_at >= interval:
            yield Sifted(kept[:], cursor, looked)
            yielded_at = time.monotonic()
