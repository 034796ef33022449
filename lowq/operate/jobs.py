"""Jobs by their ids, and pages of jobs of one queue or several, in bounded replies.

A page is the next one after a place in the order, not after a number of jobs. No set in Redis knows the contents of
jobs, so a filter that asks for them reads jobs a few at a time. Such a page ends, with a cursor, after `MAX_LOOKED`
jobs, however few of them match.
"""

import base64
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import quote, unquote

from lowq.codec import MAX_PAYLOAD_DEPTH, decode_id, original_payload
from lowq.errors import ConfigError
from lowq.job import Job
from lowq.operate.job_filter import JobFilter
from lowq.operate.queues import QueueShards
from lowq.operate.walk import JobPlace, Search, ask
from lowq.settings import Config
from lowq.sharding import Layouts
from lowq.store import Call, untrusted
from lowq.store.shard_operations import ShardOperations

#: Payloads, and bytes of payloads and errors, of one reply; a single payload always fits.
MAX_PAYLOADS = 1000
MAX_BYTES = 2**20
#: Ids that one call looks up.
MAX_IDS = 200
#: Such calls that go out together: each takes up to 2 or 3 ms.
LOOKS_TOGETHER = 3
#: Bytes of payloads and errors after which a page ends, each payload counted as PAYLOAD_BYTES more: what it takes here.
MAX_PAGE_BYTES, PAYLOAD_BYTES = 4 * 2**20, 100
#: Most jobs of a page.
MAX_LIMIT = 1000
#: Jobs that are read for a page whose filter asks for contents, about, and in one step.
MAX_LOOKED, STEP = 20_000, 200
#: A payload that can't be decoded is shown as this and its raw bytes, others than text escaped.
UNDECODABLE = "undecodable payload: "


def look_up(
    shards: QueueShards, ids: Sequence[bytes], where: str, now: float | None, room: float = math.inf
) -> tuple[dict[bytes, Job], set[bytes]]:
    """The jobs of these ids until about ``room`` bytes have come, and the ids that were not looked up any more; at
    least one is looked up. Shards take turns, so these are about the first ids. ``where``: taken, waiting or morgue;
    "": the first of these in which the id is.
    """
    pending: dict[str, list[bytes]] = defaultdict(list)
    for job_id in dict.fromkeys(ids):
        for prefix in shards.prefixes_of(job_id):
            pending[prefix].append(job_id)
    found: dict[bytes, Job] = {}
    while pending and room > 0:
        some = list(pending)[:LOOKS_TOGETHER]
        calls = [fetch_call(prefix, where, pending[prefix][:MAX_IDS], now) for prefix in some]
        for prefix, reply in zip(some, ask(shards.client, calls, LOOKS_TOGETHER), strict=True):
            asked = pending.pop(prefix)
            for job_id, raw in zip(asked, reply, strict=False):
                if raw is not None and job_id not in found:
                    found[job_id] = decode_job(shards.backend.config, job_id, raw)
                    room -= sum(PAYLOAD_BYTES / 2 + len(part) for part in raw if isinstance(part, bytes))
            if len(reply) < len(asked):
                pending[prefix] = asked[len(reply) :]
    return found, {job_id for left in pending.values() for job_id in left}


def fetch_call(prefix: str, where: str, ids: Sequence[bytes], now: float | None) -> Call[list[Any]]:
    """Asks for jobs, as many as fit into a reply."""
    return ShardOperations(prefix).fetch_jobs(ids, where, MAX_PAYLOADS, MAX_BYTES, now)


# --- an id, everywhere ---


def everywhere_calls(shards: QueueShards, job_id: bytes, now: float | None, layouts: Layouts) -> list[Call[Any]]:
    """Asks for the jobs of an id in flight, waiting, and in the morgue; see `jobs_everywhere`."""
    # In this order a job that moves on meanwhile is met twice rather than never.
    return [
        fetch_call(prefix, where, [job_id], now)
        for prefix in shards.prefixes_of(job_id, layouts)
        for where in ("waiting", "taken", "morgue")
    ]


def jobs_everywhere(shards: QueueShards, job_id: bytes, replies: Iterable[Any]) -> list[Job]:
    """The jobs from these replies: in flight, waiting, buried; at most one each."""
    jobs: list[Job] = []
    for (raw,) in replies:
        if raw is not None:
            job = decode_job(shards.backend.config, job_id, raw)
            if all(job.state != other.state for other in jobs):  # of the shard that it leaves, if it is in both
                jobs.append(job)
    return sorted(jobs, key=lambda job: {"taken": 0, "morgue": 2}.get(job.state, 1))


# --- decoding ---


def decode_job(config: Config, job_id: bytes, raw: list[Any]) -> Job:
    """A job from what `fetch_jobs` has of it."""
    state, time, retry_count, error, crashes, payloads_count, *pairs = raw
    # perform_at or the time of burial, the priority, and when the first payload expires.
    at, level, expires = (*(time or b"").split(), None, None, None)[:3]
    buried = state == b"morgue"
    return Job(
        id=decode_id(job_id),
        state=state.decode(),
        payloads=[
            (_decode_payload(config, data), untrusted.figure(score, math.nan))
            for data, score in zip(pairs[::2], pairs[1::2], strict=True)
        ],
        perform_at=None if buried else untrusted.finite(at),
        retry_count=max(retry_count, -1),
        error=_decode_error(config, error) if error else None,
        crashes=untrusted.count(crashes),
        buried_at=untrusted.finite(at) if buried else None,
        payloads_count=payloads_count,
        priority=untrusted.count(level),
        expires_at=untrusted.finite(expires),
    )


def _decode_payload(config: Config, data: bytes) -> Any:
    try:
        payload = config.load_payload(original_payload(data))
    except Exception:
        return UNDECODABLE + data.decode("utf-8", "backslashreplace")
    # Nobody could push it, and not everybody could show it.
    if isinstance(payload, dict | list) and untrusted.deeper_than(payload, MAX_PAYLOAD_DEPTH + 1):
        return UNDECODABLE + data.decode("utf-8", "backslashreplace")
    return payload


def _decode_error(config: Config, data: bytes) -> str:
    try:
        return config.load_error(data)
    except Exception:
        return data.decode("utf-8", "backslashreplace")


# --- pages ---


@dataclass(frozen=True, slots=True)
class FoundJob:
    """A job, and the queue that it is in."""

    queue: str
    job: Job


T = TypeVar("T", Job, FoundJob)


@dataclass(frozen=True, slots=True)
class _Page(Generic[T]):
    #: May be fewer than asked for, even none, before the end: jobs move while one looks.
    jobs: list[T]
    #: Give it as ``after`` for the next page; None: this was the last.
    cursor: str | None
    #: How many jobs were read, where the filter asks for their contents.
    looked: int | None = None

    def __iter__(self) -> Iterator[T]:
        return iter(self.jobs)

    def __len__(self) -> int:
        return len(self.jobs)


class Page(_Page[Job]):
    """Some jobs of a queue, in order."""

    __slots__ = ()


class FoundPage(_Page[FoundJob]):
    """Some jobs of several queues, in order."""

    __slots__ = ()

    @property
    def found(self) -> list[FoundJob]:
        """The jobs, each with its queue."""
        return self.jobs


#: Jobs at their places, in order.
_Rows = list[tuple[JobPlace, Job]]


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
    nothing new is found the same page comes again. ``redact``: returns the part of a payload that may be seen.

    Raises:
        ConfigError: it names what is allowed.
    """

    def page(rows: _Rows, cursor: str | None, looked: int | None) -> Page:
        return Page([job for _, job in rows], cursor, looked)

    listing = _Listing({queue.name: queue}, wanted, limit, now, redact, page, is_lenient=False)
    return listing.pages(after, interval)


def pages_of_all(
    queues: Sequence[QueueShards],
    wanted: JobFilter,
    *,
    limit: int,
    after: str | None,
    interval: float = math.inf,
    redact: Callable[[Any], Any] | None = None,
) -> Iterator[FoundPage]:
    """As `pages_of_queue`, of several queues. One with a key of the wrong type is left out.

    Raises:
        ConfigError: it names what is allowed.
    """
    if wanted.shard is not None:
        raise ConfigError(f"shard={wanted.shard!r}: which one is only a question within one queue")

    def page(rows: _Rows, cursor: str | None, looked: int | None) -> FoundPage:
        return FoundPage([FoundJob(place[1], job) for place, job in rows], cursor, looked)

    by_name = {queue.name: queue for queue in queues}
    listing = _Listing(by_name, wanted, limit, None, redact, page, is_lenient=True)
    return listing.pages(after, interval)


def _encode_cursor(wanted: JobFilter, place: JobPlace) -> str:
    """A place as text that people carry from page to page."""
    value, queue, job_id = place
    head = f"{_order_kind(wanted)}{value!r} {quote(queue, safe='')} "
    return base64.urlsafe_b64encode(head.encode() + job_id).decode().rstrip("=")


def _decode_cursor(wanted: JobFilter, cursor: str) -> JobPlace:
    """The counterpart of `_encode_cursor`.

    Raises:
        ConfigError: it is no cursor, or one of a page in another order.
    """
    try:
        data = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        head, queue, job_id = data.split(b" ", 2)
        kind, value = head[:2].decode(), float(head[2:])
        place = value, unquote(queue.decode(), errors="strict"), job_id
        if not queue or not job_id or math.isnan(value):
            raise ValueError
    except (ValueError, TypeError):
        raise ConfigError(f"after={cursor!r:.100} is no cursor; give the one that came with a page") from None
    if kind != _order_kind(wanted):
        raise ConfigError(
            "after: the cursor is of a page in another order; order_by and reverse must be the same for all pages"
        )
    return place


def _order_kind(wanted: JobFilter) -> str:
    return f"{wanted.order[0]}{'-' if wanted.reverse else '+'}"


P = TypeVar("P", Page, FoundPage)


@dataclass
class _Listing(Generic[P]):
    """Jobs of some queues in one order."""

    queues: Mapping[str, QueueShards]
    wanted: JobFilter
    limit: int
    now: float | None
    redact: Callable[[Any], Any] | None
    make_page: Callable[[_Rows, str | None, int | None], P]
    #: A queue with a key of the wrong type is left out.
    is_lenient: bool

    def __post_init__(self) -> None:
        if self.wanted.before is not None:
            raise ConfigError("before: it bounds bulk actions, not listings")
        limit: object = self.limit
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_LIMIT:
            raise ConfigError(f"limit={limit!r}: a page holds 1 to {MAX_LIMIT} jobs")

    def pages(self, cursor: str | None, interval: float) -> Iterator[P]:
        after = None if cursor is None else _decode_cursor(self.wanted, cursor)
        return (
            self._pages_by_contents(after, interval)
            if self.wanted.asks_for_contents
            else self._plain_pages(after, interval)
        )

    def _plain_pages(self, after: JobPlace | None, interval: float) -> Iterator[P]:
        shown: tuple[list[JobPlace], bool] | None = None
        found: list[JobPlace] = []
        more, page = False, self._page([], None)
        yielded_at = time.monotonic()
        is_watched = interval < math.inf
        for found, more in self._search(self.limit, after):
            if is_watched and (time.monotonic() - yielded_at >= interval or (found and shown is None)):
                if found and (found, more) != shown:
                    rows, end, _ = self._read_jobs(found, more)
                    page, shown = self._page(rows, end), (found, more)
                yield page
                yielded_at = time.monotonic()
        if (found, more) != shown:
            rows, end, _ = self._read_jobs(found, more)
            yield self._page(rows, end)

    def _pages_by_contents(self, after: JobPlace | None, interval: float) -> Iterator[P]:
        """The first ``limit`` jobs that the filter admits, among the next 20,000 or so."""
        kept: _Rows = []
        looked = 0
        yielded_at = time.monotonic()
        while True:
            rows, after, count = self._read_jobs(*deque(self._search(STEP, after), 1).pop())
            looked += count
            for place, job in rows:
                if self.wanted.admits(job, self.redact):
                    kept.append((place, job))
                    if len(kept) == self.limit:
                        yield self._page(kept, place, looked)
                        return
            is_over = after is None or looked >= MAX_LOOKED
            if is_over or time.monotonic() - yielded_at >= interval:
                yield self._page(kept, after, looked)
                yielded_at = time.monotonic()
            if is_over:
                return

    def _page(self, rows: _Rows, after: JobPlace | None, looked: int | None = None) -> P:
        cursor = None if after is None else _encode_cursor(self.wanted, after)
        return self.make_page(rows, cursor, looked)

    def _search(self, limit: int, after: JobPlace | None) -> Iterator[tuple[list[JobPlace], bool]]:
        """The first places after one, as far as they are known, and whether there are more."""
        if not self.queues:
            yield [], False
            return
        client = next(iter(self.queues.values())).client
        queues = {prefix: name for name, queue in self.queues.items() for prefix in queue.prefixes_for(self.wanted)}
        search = Search(client, queues, self.wanted, limit + 1, after, self.now, self.is_lenient)
        for found in search.find():
            yield found[:limit], len(found) > limit

    def _read_jobs(self, places: list[JobPlace], more: bool) -> tuple[_Rows, JobPlace | None, int]:
        """The jobs at these places that are still there, as far as they fit into a page; the place after which the next
        page begins, if there is one; and how many places were looked at.
        """
        ids: dict[str, list[bytes]] = defaultdict(list)
        for _, queue, job_id in places:
            ids[queue].append(job_id)
        room = max(MAX_PAGE_BYTES // max(len(ids), 1), 2**16)
        jobs: dict[tuple[str, bytes], Job] = {}
        left: set[tuple[str, bytes]] = set()
        for queue, some in ids.items():
            found, missing = look_up(self.queues[queue], some, self.wanted.where, self.now, room)
            jobs |= {(queue, job_id): job for job_id, job in found.items()}
            left |= {(queue, job_id) for job_id in missing}
        if left:  # the page ends before the first of them
            most = next(i for i, (_, *key) in enumerate(places) if tuple(key) in left)
            places, more = places[:most], True
        rows: _Rows = []
        for place in places:
            # Once each: one that moved while it was looked for was found at both places.
            job = jobs.pop((place[1], place[2]), None)
            if job is not None and self.wanted.state in (None, job.state):
                rows.append((place, job))
        return rows, places[-1] if more and places else None, len(places)
