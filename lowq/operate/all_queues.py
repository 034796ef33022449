"""Jobs of all queues in one order: by their value, such as a time, then by queue and id.

Each queue is walked by itself, as far as it is needed, so a page costs Redis a few ids of each queue and what is shown.
"""

import base64
import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from lowq.errors import ConfigError, ScriptError
from lowq.job import Job
from lowq.operate.job_filter import JobFilter
from lowq.operate.jobs import MAX_PAGE_BYTES, Queries, listed
from lowq.operate.paging import STEP, Chunk, check_limit, order_kind, sift
from lowq.store import untrusted
from lowq.store.shard_replies import Position

#: (order value, queue, id): where something is in the order of all queues.
Place = tuple[float, str, bytes]


@dataclass(frozen=True, slots=True)
class FoundJob:
    """A job, and the queue that it is in."""

    queue: str
    job: Job


@dataclass(frozen=True, slots=True)
class FoundPage:
    """Some jobs of several queues, in order."""

    #: May be fewer than asked for, even none, before the end: jobs move while one looks.
    found: list[FoundJob]
    #: Give it as ``after`` for the next page; None: this was the last.
    cursor: str | None
    #: How many jobs were looked at, where the filter asks what is in them.
    looked: int | None = None

    def __iter__(self) -> Iterator[FoundJob]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)


def pages_of_all(
    queues: Sequence[Queries],
    wanted: JobFilter,
    *,
    limit: int,
    after: str | None,
    interval: float = math.inf,
    now: float | None = None,
    redact: Callable[[Any], Any] | None = None,
) -> Iterator[FoundPage]:
    """The page as far as it is known, about every ``interval`` seconds. The last one is complete.

    Raises:
        ConfigError: it names what is allowed.
    """
    wanted = listed(wanted)
    if wanted.shard is not None:
        raise ConfigError(f"shard={wanted.shard!r}: which one is only a question within one queue")
    check_limit(limit)
    by_name = {queue.name: queue for queue in queues}
    place = None if after is None else decode_place(wanted, after)
    return _pages(by_name, wanted, limit, place, interval, now, redact)


def _pages(
    by_name: Mapping[str, Queries],
    wanted: JobFilter,
    limit: int,
    after: Place | None,
    interval: float,
    now: float | None,
    redact: Callable[[Any], Any] | None,
) -> Iterator[FoundPage]:
    def read(place: Place | None) -> Chunk[Place, FoundJob]:
        places, more = _places(by_name, wanted, STEP if wanted.looks_inside else limit, place, now)
        return _jobs_at(by_name, wanted, places, more, now)

    if not wanted.looks_inside:
        chunk = read(after)
        yield FoundPage([found for _, found in chunk.rows], _encoded(wanted, chunk.cursor))
        return
    for kept, cursor, looked in sift(read, lambda found: wanted.admits(found.job, redact), limit, after, interval):
        yield FoundPage(kept, _encoded(wanted, cursor), looked)


# --- where they are ---


class _Stream:
    """The positions of one queue."""

    def __init__(self, queue: Queries, after: Position | None) -> None:
        self.queue = queue
        self._after = after
        self._more = True
        #: The next one last.
        self.ready: list[Position] = []

    def fill(self, wanted: JobFilter, batch: int, now: float | None) -> None:
        """Unless it is at its end."""
        if not self._more:
            return
        try:
            found, self._more = self.queue.positions(wanted, batch, self._after, now)
        except ScriptError as error:  # a key of the wrong type: the other queues are listed all the same
            untrusted.log_skipped("queue", self.queue.name, str(error))
            found, self._more = [], False
        if found:
            self._after = found[-1]
        self.ready = found[::-1]


def _places(
    by_name: Mapping[str, Queries], wanted: JobFilter, count: int, after: Place | None, now: float | None
) -> tuple[list[Place], bool]:
    """The next places after one, over all queues, and whether there are more."""
    # What is scanned is scanned whole for each batch: then all that may be needed comes with the first.
    batch = count + 1 if wanted.scanned else min(max(2 * count // max(len(by_name), 1), 8), count + 1)
    streams = {name: _Stream(queue, _after_in(name, after)) for name, queue in by_name.items()}
    heads: list[tuple[_Key, _Stream]] = []

    def push(stream: _Stream) -> None:
        if not stream.ready:
            stream.fill(wanted, batch, now)
        if stream.ready:
            value, job_id = stream.ready.pop()
            heapq.heappush(heads, (_Key((value, stream.queue.name, job_id), wanted.reverse), stream))

    for stream in streams.values():
        push(stream)
    found: list[Place] = []
    while heads and len(found) < count:
        key, stream = heapq.heappop(heads)
        found.append(key.place)
        push(stream)
    return found, bool(heads)


class _Key:
    """Orders places forwards or backwards; no two are equal."""

    __slots__ = ("place", "reverse")

    def __init__(self, place: Place, reverse: bool) -> None:
        self.place = place
        self.reverse = reverse

    def __lt__(self, other: "_Key") -> bool:
        return other.place < self.place if self.reverse else self.place < other.place


def _after_in(name: str, place: Place | None) -> Position | None:
    """The position in that queue after which it goes on: with the same value, queues come in the order of names."""
    if place is None:
        return None
    value, queue, job_id = place
    if name == queue:
        return value, job_id
    # Before all ids with this value, or behind them.
    ahead = name > queue
    return (value if ahead else math.nextafter(value, math.inf)), b""


# --- what they are ---


def _jobs_at(
    by_name: Mapping[str, Queries], wanted: JobFilter, places: list[Place], more: bool, now: float | None
) -> Chunk[Place, FoundJob]:
    positions: dict[str, list[Position]] = defaultdict(list)
    for value, name, job_id in places:
        positions[name].append((value, job_id))
    jobs: dict[Place, Job] = {}
    left: set[tuple[str, bytes]] = set()
    for name, asked in positions.items():
        room = max(MAX_PAGE_BYTES // len(positions), 2**16)
        rows, missing = by_name[name].jobs_at(wanted, asked, now, room)
        jobs |= {(value, name, job_id): job for (value, job_id), job in rows}
        left |= {(name, job_id) for job_id in missing}
    if left:  # the page ends before the first of them
        most = next(i for i, (_, name, job_id) in enumerate(places) if (name, job_id) in left)
        places, more = places[:most], True
    found = [(place, FoundJob(place[1], jobs[place])) for place in places if place in jobs]
    return Chunk(found, places[-1] if more and places else None, len(places))


# --- cursors ---


def _encoded(wanted: JobFilter, place: Place | None) -> str | None:
    if place is None:
        return None
    value, queue, job_id = place
    head = f"{order_kind(wanted)}{value!r} {quote(queue, safe='')} ".encode()
    return base64.urlsafe_b64encode(head + job_id).decode().rstrip("=")


def decode_place(wanted: JobFilter, cursor: str) -> Place:
    """
    Raises:
        ConfigError: it is no cursor, or one of a list in another order.
    """
    try:
        data = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        head, queue, job_id = data.split(b" ", 2)
        kind, value = head[:2].decode(), float(head[2:])
        name = unquote(queue.decode(), errors="strict")
        if not job_id or not name or math.isnan(value):
            raise ValueError
    except (ValueError, TypeError):
        raise ConfigError(f"after={cursor!r:.100} is no cursor; give the one that came with a page") from None
    if kind != order_kind(wanted):
        raise ConfigError(
            "after: the cursor is of a page in another order; order_by and reverse must be the same for all pages"
        )
    return value, name, job_id
