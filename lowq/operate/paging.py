"""Pages of jobs: a bounded number of them, in order, with a cursor for the next page.

A filter that asks what is in a job has jobs read a few at a time, as no set in Redis knows that. Such a page ends, with
a cursor, after so many jobs, however few of them fit.
"""

import base64
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from lowq.errors import ConfigError
from lowq.job import Job
from lowq.operate.job_filter import JobFilter
from lowq.store.shard_replies import Position

#: Most jobs of a page.
MAX_LIMIT = 1000


@dataclass(frozen=True, slots=True)
class Page:
    """Some jobs of a queue, in order."""

    #: May be fewer than asked for, even none, before the end: jobs move while one looks.
    jobs: list[Job]
    #: Give it as ``after`` for the next page; None: this was the last.
    cursor: str | None
    #: How many jobs were looked at, where the filter asks what is in them.
    looked: int | None = None

    def __iter__(self) -> Iterator[Job]:
        return iter(self.jobs)

    def __len__(self) -> int:
        return len(self.jobs)


def check_limit(limit: object) -> int:
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_LIMIT:
        raise ConfigError(f"limit={limit!r}: a page holds 1 to {MAX_LIMIT} jobs")
    return limit


# --- cursors -------------------------------------------------------------------------------------------------


def encode_cursor(wanted: JobFilter, position: Position) -> str:
    """A position as text that people carry from page to page."""
    head = f"{order_kind(wanted)}{position[0]!r} ".encode()
    return base64.urlsafe_b64encode(head + position[1]).decode().rstrip("=")


def decode_cursor(wanted: JobFilter, cursor: str) -> Position:
    """The counterpart of `encode_cursor`.

    Raises:
        ConfigError: it is no cursor, or one of a page in another order.
    """
    try:
        data = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        head, _, job_id = data.partition(b" ")
        kind, value = head[:2].decode(), float(head[2:])
        if not job_id or math.isnan(value):
            raise ValueError
    except (ValueError, TypeError):
        raise ConfigError(f"after={cursor!r:.100} is no cursor; give the one that came with a page") from None
    if kind != order_kind(wanted):
        raise ConfigError(
            "after: the cursor is of a page in another order; order_by and reverse must be the same for all pages"
        )
    return value, job_id


def order_kind(wanted: JobFilter) -> str:
    """What a cursor says of its order."""
    return f"{wanted.order[0]}{'-' if wanted.reverse else '+'}"


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
