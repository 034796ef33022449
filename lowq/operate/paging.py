"""Pages of jobs of one queue or several, in one order, a bounded number of jobs and bytes each.

A page is the next one after a place in the order, not after a number of jobs. A filter that asks what is in jobs has
them read a few at a time, as no set in Redis knows that: such a page ends, with a cursor, after so many jobs, however
few of them fit.
"""

import base64
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import quote, unquote

from lowq.errors import ConfigError
from lowq.job import Job
from lowq.operate.job_filter import JobFilter
from lowq.operate.jobs import MAX_PAGE_BYTES, look_up
from lowq.operate.queues import QueueShards
from lowq.operate.search import Place, Search

#: Most jobs of a page.
MAX_LIMIT = 1000
#: Jobs that are looked at for a page by what is in them, about, and in one step.
MAX_LOOKED, STEP = 20_000, 200


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


@dataclass(frozen=True, slots=True)
class FoundJob:
    """A job, and the queue that it is in."""

    queue: str
    job: Job


@dataclass(frozen=True, slots=True)
class FoundPage:
    """Some jobs of several queues, in order."""

    #: As `Page.jobs`.
    found: list[FoundJob]
    cursor: str | None
    looked: int | None = None

    def __iter__(self) -> Iterator[FoundJob]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)


def pages_of_queue(
    queue: QueueShards,
    wanted: JobFilter,
    *,
    limit: int,
    after: str | None,
    interval: float = math.inf,
    now: float | None = None,
    redact: Callable[[Any], Any] | None = None,
) -> Iterator[Page]:
    """The page as far as it is known, at once and about every ``interval`` seconds; the last one is complete. While
    nothing new is found the same page comes again. ``redact``: from a payload to what may be seen of it.

    Raises:
        ConfigError: it names what is allowed.
    """

    def page(rows: _Rows) -> Page:
        cursor = None if rows.after is None else _encode_cursor(wanted, rows.after[0], rows.after[2])
        return Page([job for _, job in rows.jobs], cursor, rows.looked)

    _check(wanted, limit)
    place = None
    if after is not None:
        value, job_id = _decode_cursor(wanted, after)
        place = value, queue.name, job_id
    return _Listing([queue], wanted, now, redact, page).pages(limit, place, interval)


def pages_of_all(
    queues: Sequence[QueueShards],
    wanted: JobFilter,
    *,
    limit: int,
    after: str | None,
    interval: float = math.inf,
    now: float | None = None,
    redact: Callable[[Any], Any] | None = None,
) -> Iterator[FoundPage]:
    """As `pages_of_queue`, of several queues. One with a key of the wrong type is left out.

    Raises:
        ConfigError: it names what is allowed.
    """

    def page(rows: _Rows) -> FoundPage:
        cursor = None
        if rows.after is not None:
            value, queue, job_id = rows.after
            cursor = _encode_cursor(wanted, value, b"%b %b" % (quote(queue, safe="").encode(), job_id))
        return FoundPage([FoundJob(place[1], job) for place, job in rows.jobs], cursor, rows.looked)

    _check(wanted, limit)
    if wanted.shard is not None:
        raise ConfigError(f"shard={wanted.shard!r}: which one is only a question within one queue")
    place = None
    if after is not None:
        value, rest = _decode_cursor(wanted, after)
        queue, _, job_id = rest.partition(b" ")
        try:
            place = value, unquote(queue.decode(), errors="strict"), job_id
        except ValueError:
            raise _no_cursor(after) from None
        if not place[1] or not job_id:
            raise _no_cursor(after)
    return _Listing(queues, wanted, now, redact, page, is_lenient=True).pages(limit, place, interval)


def _check(wanted: JobFilter, limit: object) -> None:
    if wanted.before is not None:
        raise ConfigError("before: it bounds bulk actions, not listings")
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_LIMIT:
        raise ConfigError(f"limit={limit!r}: a page holds 1 to {MAX_LIMIT} jobs")


# --- cursors ---


def _encode_cursor(wanted: JobFilter, value: float, rest: bytes) -> str:
    """A place as text that people carry from page to page: its order, the value, and what follows that."""
    return base64.urlsafe_b64encode(f"{_order_kind(wanted)}{value!r} ".encode() + rest).decode().rstrip("=")


def _decode_cursor(wanted: JobFilter, cursor: str) -> tuple[float, bytes]:
    """The counterpart of `_encode_cursor`.

    Raises:
        ConfigError: it is no cursor, or one of a page in another order.
    """
    try:
        data = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        head, _, rest = data.partition(b" ")
        kind, value = head[:2].decode(), float(head[2:])
        if not rest or math.isnan(value):
            raise ValueError
    except (ValueError, TypeError):
        raise _no_cursor(cursor) from None
    if kind != _order_kind(wanted):
        raise ConfigError(
            "after: the cursor is of a page in another order; order_by and reverse must be the same for all pages"
        )
    return value, rest


def _no_cursor(cursor: str) -> ConfigError:
    return ConfigError(f"after={cursor!r:.100} is no cursor; give the one that came with a page")


def _order_kind(wanted: JobFilter) -> str:
    return f"{wanted.order[0]}{'-' if wanted.reverse else '+'}"


# --- a listing ---


class _Rows(NamedTuple):
    """Jobs at their places, in order."""

    jobs: list[tuple[Place, Job]]
    #: Where it goes on; None: nothing follows.
    after: Place | None
    #: How many places were looked at, where the filter asks what is in jobs.
    looked: int | None = None


#: A page.
T = TypeVar("T")


class _Listing(Generic[T]):
    """Jobs of some queues in one order. ``make``: a page of some rows."""

    def __init__(
        self,
        queues: Sequence[QueueShards],
        wanted: JobFilter,
        now: float | None,
        redact: Callable[[Any], Any] | None,
        make: Callable[[_Rows], T],
        *,
        is_lenient: bool = False,
    ) -> None:
        self._queues = {queue.name: queue for queue in queues}
        self._wanted = wanted
        self._now = now
        self._redact = redact
        self._make = make
        self._is_lenient = is_lenient

    def pages(self, limit: int, after: Place | None, interval: float) -> Iterator[T]:
        if self._wanted.looks_inside:
            return self._look_inside(limit, after, interval)
        return self._plain_pages(limit, after, interval)

    def _plain_pages(self, limit: int, after: Place | None, interval: float) -> Iterator[T]:
        shown: tuple[list[Place], bool] | None = None
        found: list[Place] = []
        more, page = False, self._make(_Rows([], None))
        yielded_at = time.monotonic()
        is_watched = interval < math.inf
        for found, more in self._search(limit, after, is_watched=is_watched):
            if is_watched and (time.monotonic() - yielded_at >= interval or (found and shown is None)):
                if found and (found, more) != shown:
                    page, shown = self._make(self._read(found, more)[0]), (found, more)
                yield page
                yielded_at = time.monotonic()
        if (found, more) != shown:
            yield self._make(self._read(found, more)[0])

    def _look_inside(self, limit: int, after: Place | None, interval: float) -> Iterator[T]:
        """The first ``limit`` jobs that the filter admits, after some 20,000 that were looked at at the latest."""
        kept: list[tuple[Place, Job]] = []
        looked = 0
        yielded_at = time.monotonic()
        while True:
            rows, count = self._read(*deque(self._search(STEP, after), 1).pop())
            looked, after = looked + count, rows.after
            for place, job in rows.jobs:
                if self._wanted.admits(job, self._redact):
                    kept.append((place, job))
                    if len(kept) == limit:
                        yield self._make(_Rows(kept, place, looked))
                        return
            if after is None or looked >= MAX_LOOKED:
                yield self._make(_Rows(kept, after, looked))
                return
            if time.monotonic() - yielded_at >= interval:
                yield self._make(_Rows(kept, after, looked))
                yielded_at = time.monotonic()

    def _search(
        self, limit: int, after: Place | None, *, is_watched: bool = False
    ) -> Iterator[tuple[list[Place], bool]]:
        """The first places after one, as far as they are known, and whether there are more."""
        if not self._queues:
            yield [], False
            return
        client = next(iter(self._queues.values())).client
        prefixes = {name: queue.prefixes_for(self._wanted) for name, queue in self._queues.items()}
        search = Search(
            client, prefixes, self._wanted, limit + 1, after, self._now, is_lenient=self._is_lenient,
            is_watched=is_watched,
        )  # fmt: skip
        for found in search.find():
            yield found[:limit], len(found) > limit

    def _read(self, places: list[Place], more: bool) -> tuple[_Rows, int]:
        """The jobs at these places that are still there, as far as they fit into a page, and how many of the places
        were looked at.
        """
        ids: dict[str, list[bytes]] = defaultdict(list)
        for _, queue, job_id in places:
            ids[queue].append(job_id)
        room = max(MAX_PAGE_BYTES // max(len(ids), 1), 2**16)
        jobs: dict[tuple[str, bytes], Job] = {}
        left: set[tuple[str, bytes]] = set()
        for queue, some in ids.items():
            found, missing = look_up(self._queues[queue], some, self._wanted.where, self._now, room)
            jobs |= {(queue, job_id): job for job_id, job in found.items()}
            left |= {(queue, job_id) for job_id in missing}
        if left:  # the page ends before the first of them
            most = next(i for i, (_, *key) in enumerate(places) if tuple(key) in left)
            places, more = places[:most], True
        rows: list[tuple[Place, Job]] = []
        for place in places:
            # Once each: one that moved while it was looked for was found at both places.
            job = jobs.pop((place[1], place[2]), None)
            if job is not None and self._wanted.state in (None, job.state):
                rows.append((place, job))
        return _Rows(rows, places[-1] if more and places else None), len(places)
