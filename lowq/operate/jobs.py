"""Jobs by their ids, and pages of jobs of one queue or several, in bounded replies.

A page is the next one after a place in the order, not after a number of jobs. No set in Redis knows the contents of
jobs, so a filter that asks for them reads jobs a few at a time. Such a page ends, with a cursor, after `MAX_LOOKED`
jobs, however few of them match.
"""

import base64
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar
from urllib.parse import quote, unquote

from lowq.codec import MAX_PAYLOAD_DEPTH, decode_id, original_payload
from lowq.errors import ConfigError
from lowq.job import Attempt, Job, State
from lowq.operate.job_filter import JobFilter
from lowq.operate.queues import QueueShards
from lowq.operate.walk import MANY_TOGETHER, JobPlace, Search, ask
from lowq.settings import Config
from lowq.sharding import Layouts
from lowq.store import Call, Client, untrusted
from lowq.store.calls import time_of
from lowq.store.shard_operations import ShardOperations, split_attempts

#: Payloads, and bytes of payloads and errors, of one reply; a single payload always fits.
MAX_PAYLOADS = 1000
MAX_BYTES = 2**20
#: Ids that one call looks up.
MAX_IDS = 200
#: Such calls that go out together: each takes up to 2 or 3 ms. Of more, each takes a part of that.
LOOKS_TOGETHER = 3
#: Bytes of payloads and errors after which a page ends, each payload counted as PAYLOAD_BYTES more: what it takes here.
MAX_PAGE_BYTES, PAYLOAD_BYTES = 4 * 2**20, 100
#: Most jobs of a page.
MAX_LIMIT = 1000
#: Jobs that are read for a page whose filter asks for contents, at most, and in one step.
MAX_LOOKED, STEP = 20_000, 500
#: A payload that can't be decoded is shown as this and its raw bytes, others than text escaped.
UNDECODABLE = "undecodable payload: "
#: The states of a filter for "any", in their order.
PARTS: tuple[State | None, ...] = ("taken", None, "morgue")
#: The name of a queue, and an id.
Key = tuple[str, bytes]


def look_up(
    queues: Mapping[str, QueueShards], keys: Iterable[Key], where: str, now: float | None, room: float = math.inf
) -> tuple[dict[Key, Job], set[Key]]:
    """The jobs of these ids until about ``room`` bytes have come, and the ids that were not looked up any more; at
    least one is looked up. Shards take turns, so these are about the first ids. ``where``: taken, waiting or morgue;
    "": the first of these in which the id is.
    """
    pending: dict[tuple[str, str], list[bytes]] = defaultdict(list)
    for name, job_id in dict.fromkeys(keys):
        for prefix in queues[name].prefixes_of(job_id):
            pending[name, prefix].append(job_id)
    found: dict[Key, Job] = {}
    #: Shards of which the first job is too large for a part of a reply.
    large = set[tuple[str, str]]()
    while pending and room > 0:
        some = [shard for shard in pending if shard not in large][:MANY_TOGETHER] or list(pending)[:LOOKS_TOGETHER]
        parts = -(-len(some) // LOOKS_TOGETHER)
        client = queues[some[0][0]].client
        calls = [fetch_call(shard[1], where, pending[shard][: MAX_IDS // parts], now, parts) for shard in some]
        for shard, reply in zip(some, ask(client, calls, len(calls)), strict=True):
            if parts > 1 and _is_cut(reply[0]):
                large.add(shard)
                continue
            name, asked = shard[0], pending.pop(shard)
            for job_id, raw in zip(asked, reply, strict=False):
                if raw is not None and (name, job_id) not in found:
                    found[name, job_id] = decode_job(queues[name].backend.config, job_id, raw)
                    room -= sum(PAYLOAD_BYTES / 2 + len(part) for part in raw if isinstance(part, bytes))
            if len(reply) < len(asked):
                pending[shard] = asked[len(reply) :]
    return found, {(name, job_id) for (name, _), left in pending.items() for job_id in left}


def _is_cut(raw: list[Any] | None) -> bool:
    """Whether a job came without some of the payloads that a reply has room for."""
    return raw is not None and len(raw) - 6 < 2 * min(raw[5], MAX_PAYLOADS)


def fetch_call(prefix: str, where: str, ids: Sequence[bytes], now: float | None, parts: int = 1) -> Call[list[Any]]:
    """Asks for jobs, as many as fit into a reply, or into such a part of one."""
    return ShardOperations(prefix).fetch_jobs(ids, where, MAX_PAYLOADS // parts, MAX_BYTES // parts, now)


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
    error, attempts = split_attempts(error or b"")
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
        attempts=tuple(Attempt(at, seconds, node, _decode_error(config, said)) for at, seconds, node, said in attempts),
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
    queue: QueueShards, wanted: JobFilter, *, limit: int, after: str | None, interval: float = math.inf,
    now: float | None = None, redact: Callable[[Any], Any] | None = None,
) -> Iterator[Page]:  # fmt: skip
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
    queues: Sequence[QueueShards], wanted: JobFilter, *, limit: int, after: str | None, interval: float = math.inf,
    redact: Callable[[Any], Any] | None = None,
) -> Iterator[FoundPage]:  # fmt: skip
    """As `pages_of_queue`, of several queues. One with a key of the wrong type is left out.

    Raises:
        ConfigError: it names what is allowed.
    """
    refuse_shard(wanted)

    def page(rows: _Rows, cursor: str | None, looked: int | None) -> FoundPage:
        return FoundPage([FoundJob(place[1], job) for place, job in rows], cursor, looked)

    by_name = {queue.name: queue for queue in queues}
    listing = _Listing(by_name, wanted, limit, None, redact, page, is_lenient=True)
    return listing.pages(after, interval)


def refuse_shard(wanted: JobFilter) -> None:
    """Refuses a filter by shard, over several queues.

    Raises:
        ConfigError
    """
    if wanted.shard is not None:
        raise ConfigError(f"shard={wanted.shard!r}: which one is only a question within one queue")


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


def _now(client: Client, now: float | None) -> float:
    return time_of(client.command("TIME")) if now is None else now


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
        if self.wanted.state == "any":
            return self._pages_of_any(cursor or "0", interval)
        after = None if cursor is None else _decode_cursor(self.wanted, cursor)
        if not self.queues:
            return iter([self._page([], None, 0 if self.wanted.asks_for_contents else None)])
        client = next(iter(self.queues.values())).client
        self.wanted = self.wanted.aged(partial(_now, client, self.now))
        return (
            self._pages_by_contents(after, interval)
            if self.wanted.asks_for_contents
            else self._plain_pages(after, interval)
        )

    def _pages_of_any(self, cursor: str, interval: float) -> Iterator[P]:
        """The page is filled from one state after the other: those of `PARTS`, whose place a cursor begins with."""
        first, after = "012".find(cursor[0]), cursor[1:] or None
        if first < 0:
            raise ConfigError(f"after={cursor!r:.100} is no cursor of jobs in any state; give the one of a page")
        return self._filled_pages(first, after, interval)

    def _filled_pages(self, first: int, after: str | None, interval: float) -> Iterator[P]:
        before: list[Any] = []
        looked: int | None = None
        for part in range(first, len(PARTS)):
            wanted = replace(self.wanted, state=PARTS[part], order_by=None)
            listing: _Listing[P] = replace(self, wanted=wanted, limit=self.limit - len(before))
            rows: list[Any] = before
            count: int | None = looked
            following: str | None = None
            page: P
            for page in listing.pages(after, interval):
                rows, count = [*before, *page.jobs], None if page.looked is None else page.looked + (looked or 0)
                is_full = len(rows) == self.limit or (count or 0) >= MAX_LOOKED
                following = f"{part + 1}" if is_full and part + 1 < len(PARTS) else None
                following = following if page.cursor is None else f"{part}{page.cursor}"
                yield type(page)(rows, following, count)
            if following is not None:
                return
            before, looked, after = rows, count, None

    def _plain_pages(self, after: JobPlace | None, interval: float) -> Iterator[P]:
        shown: tuple[list[JobPlace], bool] | None = None
        found: list[JobPlace] = []
        more, page = False, self._page([], None)
        yielded_at = time.monotonic()
        is_watched = interval < math.inf
        for places in self._search(self.limit + 1, after).find():
            found, more = places[: self.limit], len(places) > self.limit
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
        steps = self._search(MAX_LOOKED + 1, after).steps()
        # What was found, and not read yet. One search finds all: a new one for each step would ask every shard again.
        places: list[JobPlace] = []
        is_all = False
        yielded_at = time.monotonic()
        while True:
            while len(places) <= STEP and not is_all:
                certain, _ = next(steps, (None, []))
                is_all = certain is None
                places += certain or []
            count = min(STEP, MAX_LOOKED - looked)
            rows, last, count = self._read_jobs(places[:count], len(places) > count)
            del places[:count]
            looked += count
            for place, job in rows:
                if self.wanted.admits(job, self.redact):
                    kept.append((place, job))
                    if len(kept) == self.limit:
                        yield self._page(kept, place, looked)
                        return
            is_over = not places or looked >= MAX_LOOKED
            if is_over or time.monotonic() - yielded_at >= interval:
                yield self._page(kept, last if places else None, looked)
                yielded_at = time.monotonic()
            if is_over:
                return

    def _page(self, rows: _Rows, after: JobPlace | None, looked: int | None = None) -> P:
        cursor = None if after is None else _encode_cursor(self.wanted, after)
        return self.make_page(rows, cursor, looked)

    def _search(self, count: int, after: JobPlace | None) -> Search:
        """The search for the first places after one."""
        client = next(iter(self.queues.values())).client
        queues = {prefix: name for name, queue in self.queues.items() for prefix in queue.prefixes_for(self.wanted)}
        return Search(client, queues, self.wanted, count, after, self.now, self.is_lenient)

    def _read_jobs(self, places: list[JobPlace], more: bool) -> tuple[_Rows, JobPlace | None, int]:
        """The jobs at these places that are still there, as far as they fit into a page; the place after which the next
        page begins, if there is one; and how many places were looked at.
        """
        keys = [(queue, job_id) for _, queue, job_id in places]
        jobs, left = look_up(self.queues, keys, self.wanted.where, self.now, MAX_PAGE_BYTES)
        if left:  # the page ends before the first of them
            most = next(i for i, key in enumerate(keys) if key in left)
            places, more = places[:most], True
        rows: _Rows = []
        for place in places:
            # Once each: one that moved while it was looked for was found at both places.
            job = jobs.pop((place[1], place[2]), None)
            if job is not None and self.wanted.state in (None, job.state):
                rows.append((place, job))
        return rows, places[-1] if more and places else None, len(places)
