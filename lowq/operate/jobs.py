"""Reading only: a queue's jobs and figures, the registries. Every call to Redis is short, every reply bounded.

The answers are of slightly different moments in different shards, and may have changed since.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Unpack
from uuid import UUID

from lowq.backend import Backend
from lowq.codec import MAX_PAYLOAD_DEPTH, decode_id, lookup_id, original_payload
from lowq.errors import ConfigError, RedisUnavailable
from lowq.job import Job, JobId, State
from lowq.observe.counters import Span
from lowq.observe.error_groups import ErrorGroup, read_error_groups
from lowq.observe.flow import read_flows
from lowq.observe.history import History, history
from lowq.observe.slowest import SlowBatch, read_slowest
from lowq.observe.times import Times, TotalTimes, perform_times, read_times, wait_times
from lowq.operate.explain import MAY_BE_LIMITED, Description, LimitState, Why, explain, explain_limited, read_limits
from lowq.operate.job_filter import STATES, FilterOptions, JobFilter
from lowq.operate.nodes import Registries, registry_calls
from lowq.operate.paging import STEP, Chunk, Page, check_limit, decode_cursor, encode_cursor, sift
from lowq.operate.queues import QueueInfo, entry_call, entry_of, find_entry, find_queue
from lowq.operate.stats import (
    Forecast,
    ShardInfo,
    Statistics,
    Stats,
    by_nonce,
    forecast_of,
    node_names,
    read_statistics,
    shard_info,
    stats_of,
)
from lowq.operate.walk import STATS_TOGETHER, Silent, ask, find_page, find_page_in_steps, read_stats
from lowq.retry import MAX_RETRY_COUNT
from lowq.sharding import READ_AGAIN, Layout, Layouts
from lowq.store import Call, Client, untrusted
from lowq.store.shard import ShardScripts
from lowq.store.shard_replies import Position, ShardStats, WhyReply

#: Payloads, and bytes of payloads and errors, of one reply; a single payload always fits.
MAX_PAYLOADS = 1000


MAX_BYTES = 2**20


#: Ids that one call looks up.
MAX_IDS = 200


#: Ids that are described in one round trip: each may bring three times MAX_BYTES.
DESCRIBED_TOGETHER = 10


#: Such calls that go out together: each takes up to 2 or 3 ms.
LOOKS_TOGETHER = 3


#: Bytes of payloads and errors after which a page ends, each payload counted as PAYLOAD_BYTES more: what it takes here.
MAX_PAGE_BYTES, PAYLOAD_BYTES = 4 * 2**20, 100


#: What a payload that can't be decoded is shown as: a str of this and the raw bytes, others than text escaped.
UNDECODABLE = "undecodable payload: "


class Queries:
    """The reading half of a queue's handle. Safe for threads.

    ``now`` (Unix time, seconds) stands for the server's clock wherever it is given.
    """

    def __init__(self, backend: Backend, name: str, shards_count: int | None = None) -> None:
        self.name = name
        self._backend = backend
        self._given_shards_count = shards_count

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @property
    def shards_count(self) -> int:
        """How many shards the queue has.

        Raises:
            UnknownQueueError: it was not given, and nobody has used the queue yet.
        """
        return self.layouts.current.shards_count

    @property
    def layouts(self) -> Layouts:
        """Its layout, and while a reshard is under way the one that its jobs are being moved to; as the registry has
        said in the last second.

        Raises:
            UnknownQueueError: as `shards_count`.
        """
        routes = self._backend.routes_of(self.name)
        return routes.layouts if routes is not None and routes.age < READ_AGAIN else self._read_layouts()

    @property
    def _presumed_layouts(self) -> Layouts:
        """For who asks the registry along with the shards, and so finds out whether that is true."""
        routes = self._backend.routes_of(self.name)
        if routes is not None:
            return routes.layouts
        return self.layouts if self._given_shards_count is None else Layouts.plain(self._given_shards_count)

    def _read_layouts(self) -> Layouts:
        """As the registry says now."""
        given = self._given_shards_count
        if given is None:
            layouts = find_queue(self._backend, self.name).layouts
        else:
            config = self._backend.config
            entry = find_entry(self._client, config.namespace, self.name, config.push_timeout)
            layouts = Layouts.plain(given) if entry is None else entry.layouts
        return self._backend.note_layouts(self.name, layouts).layouts

    @property
    def _declared_count(self) -> int:
        """How many shards the code says that the queue has; without such code the registry."""
        return self.shards_count if self._given_shards_count is None else self._given_shards_count

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of its worker, as they are in the registry; empty when nobody who knows them has used the queue.

        Raises:
            RedisUnavailable
        """
        entry = find_entry(self._client, self._backend.config.namespace, self.name)
        return {} if entry is None else entry.options

    @property
    def max_retry_count(self) -> int:
        """How often its worker tries again; the default when nobody who knows has used the queue.

        Raises:
            RedisUnavailable
        """
        return _max_retry_count(find_entry(self._client, self._backend.config.namespace, self.name))

    @property
    def _client(self) -> Client:
        return self._backend.client

    @property
    def _prefixes(self) -> list[str]:
        return [prefix for layout in self.layouts.all for prefix in layout.prefixes(self._namespace, self.name)]

    @property
    def _namespace(self) -> str:
        return self._backend.config.namespace

    def _prefix(self, layout: Layout, shard: int) -> str:
        return layout.prefix(self._namespace, self.name, shard)

    def _prefixes_of(self, job_id: bytes, layouts: Layouts | None = None) -> list[str]:
        """The shards that may have jobs of an id: while a reshard is under way two, first the one that it leaves."""
        return [self._prefix(layout, layout.shard_of(job_id)) for layout in (layouts or self.layouts).all]

    def _prefix_of(self, job_id: bytes) -> str:
        """Of these the first."""
        return self._prefixes_of(job_id)[0]

    # --- figures ---

    def stats(self, *, now: float | None = None) -> Stats:
        """The queue in figures.

        Raises:
            UnknownQueueError, RedisUnavailable
        """
        stats, _ = self._read_stats(now)
        return stats

    def forecast(self, *, now: float | None = None) -> Forecast:
        """When its backlog is gone, if it goes on as in the last 5 minutes, as its nodes have recorded them.

        Raises:
            UnknownQueueError, RedisUnavailable
        """
        _, forecast = self.stats_and_forecast(now=now)
        return forecast

    def stats_and_forecast(self, *, now: float | None = None, silent: Silent | None = None) -> tuple[Stats, Forecast]:
        """Both, of the same moment; see `stats` and `forecast`. ``silent``: shards whose primary does not answer are
        left out, and entered there.
        """
        stats, is_worked = self._read_stats(now, silent)
        try:
            flow = read_flows(self._backend, [self.name], now).get(self.name)
        except RedisUnavailable:
            if not silent:
                raise
            flow = None
        return stats, forecast_of(stats, flow, is_worked=is_worked)

    def _read_stats(self, now: float | None, silent: Silent | None = None) -> tuple[Stats, bool]:
        """The queue in figures, and whether somebody holds a shard of it."""
        layouts = self._presumed_layouts
        prefixes = [prefix for layout in layouts.all for prefix in layout.prefixes(self._namespace, self.name)]
        calls: list[Call[Any]] = [ShardScripts(prefix).stats(now) for prefix in prefixes]
        if silent is not None:
            silent.clear()
        *replies, entry = ask(self._client, [*calls, entry_call(self._namespace, self.name)], STATS_TOGETHER, silent)
        if silent and len(calls) in silent:
            raise silent[len(calls)]
        info = entry_of(self.name, entry)
        if info is not None and info.layouts != layouts:  # a reshard has begun or ended
            self._backend.note_layouts(self.name, info.layouts)
            return self._read_stats(now, silent)
        shards: list[ShardStats] = [reply for reply in replies if reply is not None]
        options = {} if info is None else info.options
        stats = stats_of(self.name, shards, options, layouts)
        return stats, any(shard.lease is not None for shard in shards)

    def statistics(self, *, now: float | None = None) -> Statistics:
        """Tasks by state and calls by verb, in the words of Tarantool's queue module.

        Raises:
            UnknownQueueError, RedisUnavailable
        """
        return read_statistics(self._client, self.name, self._prefixes, now)

    def rates(self, span: Span = "hour", *, now: float | None = None) -> History:
        """Rates and lag over the last "hour", "day" or "month" (30 days), as its nodes have recorded them.

        Raises:
            ConfigError: an unknown span. RedisUnavailable
        """
        return history(self._backend, self.name, span, now)

    def perform_times(self) -> TotalTimes:
        """How long its performs took, batch by batch, as its nodes have recorded it.

        Raises:
            RedisUnavailable
        """
        return perform_times(self._backend, self.name)

    def wait_times(self) -> TotalTimes:
        """How long its jobs had waited since they were due, when a node took them. As `perform_times`.

        Raises:
            RedisUnavailable
        """
        return wait_times(self._backend, self.name)

    def times(self, span: Span = "hour", *, now: float | None = None) -> Times:
        """How long its jobs waited and were performed over the last "hour", "day" or "month" (30 days), as its nodes
        have recorded it: ``queue.times("day").run.percentile(0.95)``.

        Raises:
            ConfigError: an unknown span. RedisUnavailable
        """
        return read_times(self._backend, self.name, span, now)

    def slowest(self, *, now: float | None = None) -> list[SlowBatch]:
        """The batches of the last hour that took longest, the slowest first: 20 at most, each of another id. What ended
        in its first ten minutes may be missing.

        Raises:
            RedisUnavailable
        """
        return read_slowest(self._backend, self.name, now)

    def error_groups(self) -> list[ErrorGroup]:
        """Its failures in groups of alike errors, as its nodes have recorded them: those seen last first.

        Raises:
            RedisUnavailable
        """
        return read_error_groups(self._backend, [self.name])

    # --- jobs by id ---

    def peek(self, job_id: JobId, state: State | None = None, *, now: float | None = None) -> Job | None:
        """The job of an id, wherever it is; None when it is nowhere.

        An id may be in several places at once: in flight, with newer payloads waiting, and with older ones in the
        morgue. The first of these is meant, unless ``state`` says which.

        Raises:
            JobError: the id is none. UnknownQueueError, RedisUnavailable
        """
        return next(iter(self.fetch([job_id], state, now=now).values()), None)

    def places(self, job_id: JobId, *, now: float | None = None) -> list[Job]:
        """The jobs of an id everywhere: in flight, waiting, in the morgue; at most one each.

        Raises:
            JobError: the id is none. UnknownQueueError, RedisUnavailable
        """
        encoded = lookup_id(job_id)
        calls = self._calls_everywhere(encoded, now)
        return self._jobs_everywhere(encoded, ask(self._client, calls, len(calls)))

    def _calls_everywhere(self, job_id: bytes, now: float | None, layouts: Layouts | None = None) -> list[Call[Any]]:
        # In this order a job that moves on meanwhile is rather met twice than not at all.
        return [
            _fetch_call(prefix, where, [job_id], now)
            for prefix in self._prefixes_of(job_id, layouts)
            for where in ("waiting", "taken", "morgue")
        ]

    def _jobs_everywhere(self, job_id: bytes, replies: Iterable[Any]) -> list[Job]:
        jobs: list[Job] = []
        for (raw,) in replies:
            if raw is not None:
                job = self._job(job_id, raw)
                if all(job.state != other.state for other in jobs):  # of the shard that it leaves, if it is in both
                    jobs.append(job)
        return sorted(jobs, key=lambda job: {"taken": 0, "morgue": 2}.get(job.state, 1))

    def describe(self, job_id: JobId, *, now: float | None = None) -> Description:
        """Everything that is known of an id, in one round trip to Redis, or two: where its payloads are, why it is not
        being performed, its shard, and the node that holds that.

        One round trip is enough where the number of shards is known; otherwise the first one asks for it. In a cluster
        calls go to the servers of the registries and of the shard side by side. At most 1,000 payloads, or
        about 1 MiB, are read from each place; ``Job.payloads_count`` is the number of all.

        Raises:
            JobError: the id is none. UnknownQueueError, RedisUnavailable
        """
        (found,) = self.describe_all([job_id], now=now)
        return found

    def describe_all(self, ids: Iterable[JobId], *, now: float | None = None) -> Iterator[Description]:
        """As `describe`, of several ids in their order, each once: ten of them in a round trip, as they are asked for.

        Raises:
            As `describe`.
        """
        waiting = list(dict.fromkeys(map(lookup_id, ids)))
        for start in range(0, len(waiting), DESCRIBED_TOGETHER):
            yield from self._describe(waiting[start : start + DESCRIBED_TOGETHER], now)

    def _describe(self, ids: Sequence[bytes], now: float | None) -> Iterator[Description]:
        layouts = self._presumed_layouts
        calls: list[Call[Any]] = [*registry_calls(self._backend.config.namespace, self.name)]
        of_registries = len(calls)
        for job_id in ids:
            calls += self._calls_everywhere(job_id, now, layouts)
            for prefix in self._prefixes_of(job_id, layouts):
                scripts = ShardScripts(prefix)
                calls += [scripts.why(job_id, now), scripts.stats(now)]
        replies = list(ask(self._client, calls, len(calls)))
        registries = Registries.of(self.name, replies[:of_registries])
        most, of_each = _max_retry_count(registries.queue), (len(calls) - of_registries) // len(ids)
        if registries.queue is not None and registries.queue.layouts != layouts:
            self._backend.note_layouts(self.name, registries.queue.layouts)
            yield from self._describe(ids, now)
            return
        for number, job_id in enumerate(ids):
            start = of_registries + number * of_each
            count = of_each - 2 * len(layouts.all)
            places, rest = replies[start : start + count], replies[start + count : start + of_each]
            layout, found, stats = _decisive(layouts, rest[::2], rest[1::2])
            shard = layout.shard_of(job_id)
            node = registries.holder(found.lease)
            yield Description(
                queue=self.name,
                id=decode_id(job_id),
                at=found.now,
                why=self._limited(explain(found, (self.name, shard), node, most), registries.queue),
                jobs=tuple(self._jobs_everywhere(job_id, places)),
                shard=shard_info(shard, stats, by_nonce(registries.node_names)),
                node=node,
                max_retry_count=most,
            )

    def shard_of(self, job_id: JobId) -> int:
        """The index of an id's shard.

        Raises:
            JobError: the id is none. UnknownQueueError
        """
        return self.layouts.current.shard_of(lookup_id(job_id))

    def shard(self, index: int, *, now: float | None = None) -> ShardInfo:
        """One of its shards.

        Raises:
            ConfigError: there is no such shard. UnknownQueueError, RedisUnavailable
        """
        if not 0 <= index < self.shards_count:
            raise ConfigError(f"queue {self.name!r} has the shards 0 to {self.shards_count - 1}, not {index}")
        (stats,) = read_stats(self._client, [self._prefix(self.layouts.current, index)], now)
        return shard_info(index, stats, node_names(self._backend))

    def fetch(self, ids: Iterable[JobId], state: State | None = None, *, now: float | None = None) -> dict[str, Job]:
        """The jobs of many ids, id -> job, in the order of ``ids``; those that are nowhere are left out.

        Of long payload lists only the lowest scores are read, 1,000 payloads or about 1 MiB;
        ``Job.payloads_count`` is the number of all. A payload that can't be decoded is shown as the str
        ``"undecodable payload: ..."`` with its raw bytes.

        Raises:
            JobError: an id is none. UnknownQueueError, RedisUnavailable
        """
        if state is not None and state not in STATES:
            raise ConfigError(f"state={state!r}: it is one of {', '.join(STATES)}, or None for wherever the job is")
        where = "" if state is None else state if state in ("taken", "morgue") else "waiting"
        encoded = [lookup_id(job_id) for job_id in as_ids(ids)]
        jobs = self._fetch(encoded, where, now)
        return {job_id: job for job_id, job in jobs.items() if state is None or job.state == state}

    def _fetch(self, ids: Sequence[bytes], where: str, now: float | None) -> dict[str, Job]:
        found, _ = self._look(ids, where, now, float("inf"))
        return {found[job_id].id: found[job_id] for job_id in ids if job_id in found}

    def _look(
        self, ids: Sequence[bytes], where: str, now: float | None, room: float
    ) -> tuple[dict[bytes, Job], set[bytes]]:
        """The jobs of these ids until about so many bytes have come, and the ids that were not looked up any more. At
        least the first one is. Shards take turns, so that what came is about what comes first.
        """
        pending: dict[str, list[bytes]] = defaultdict(list)
        for job_id in dict.fromkeys(ids):
            for prefix in self._prefixes_of(job_id):
                pending[prefix].append(job_id)
        found: dict[bytes, Job] = {}
        while pending and room > 0:
            some = list(pending)[:LOOKS_TOGETHER]
            calls = [_fetch_call(prefix, where, pending[prefix][:MAX_IDS], now) for prefix in some]
            for prefix, reply in zip(some, ask(self._client, calls, LOOKS_TOGETHER), strict=True):
                asked = pending.pop(prefix)
                for job_id, raw in zip(asked, reply, strict=False):
                    if raw is not None and job_id not in found:
                        found[job_id] = self._job(job_id, raw)
                        room -= sum(PAYLOAD_BYTES / 2 + len(part) for part in raw if isinstance(part, bytes))
                if len(reply) < len(asked):
                    pending[prefix] = asked[len(reply) :]
        return found, {job_id for left in pending.values() for job_id in left}

    def _job(self, job_id: bytes, raw: list[Any]) -> Job:
        state, time, retry_count, error, crashes, payloads_count, *pairs = raw
        at, priority, expires_at = _times_in(time)
        buried = state == b"morgue"
        return Job(
            id=decode_id(job_id),
            state=state.decode(),
            payloads=[
                (self._payload(data), untrusted.figure(score, float("nan")))
                for data, score in zip(pairs[::2], pairs[1::2], strict=True)
            ],
            perform_at=None if buried else at,
            retry_count=max(retry_count, -1),
            error=self._error(error) if error else None,
            crashes=untrusted.count(crashes),
            buried_at=at if buried else None,
            payloads_count=payloads_count,
            priority=priority,
            expires_at=expires_at,
        )

    def _payload(self, data: bytes) -> Any:
        try:
            payload = self._backend.config.load_payload(original_payload(data))
        except Exception:
            return UNDECODABLE + data.decode("utf-8", "backslashreplace")
        # Nobody could push it, and not everybody could show it.
        if isinstance(payload, dict | list) and untrusted.deeper_than(payload, MAX_PAYLOAD_DEPTH + 1):
            return UNDECODABLE + data.decode("utf-8", "backslashreplace")
        return payload

    def _error(self, data: bytes) -> str:
        try:
            return self._backend.config.load_error(data)
        except Exception:
            return data.decode("utf-8", "backslashreplace")

    # --- pages of jobs ---

    def jobs(
        self,
        wanted: JobFilter | State | None = None,
        /,
        *,
        limit: int = 50,
        after: str | None = None,
        now: float | None = None,
        **options: Unpack[FilterOptions],
    ) -> Page:
        """A page of jobs, in order over all shards. Give its cursor as ``after`` for the next one.

        Which jobs: a state, the fields of a `JobFilter` by their names, or a `JobFilter`; None means all that wait.
        ``limit``: 1 to 1,000. A page ends earlier, with a cursor, when its payloads and errors take more than 4 MiB.

        A page is the next one after a position in the order, not after a number of jobs: those that stay where
        they are come exactly once, however many come and go meanwhile. ``match``, ``order_by="id"`` and fresh jobs
        by retry_count look at every id, in short steps: two or three seconds per million.

        Raises:
            ConfigError: it names what is allowed. UnknownQueueError, RedisUnavailable
        """
        meant = listed(JobFilter.of(wanted, options))
        check_limit(limit)
        position = None if after is None else decode_cursor(meant, after)
        if meant.looks_inside:
            *_, page = self._sifted(meant, limit, position, math.inf, now, None)
            return page
        found, more = self.positions(meant, limit, position, now)
        return self._page(meant, found, more, now)

    def jobs_in_steps(
        self,
        wanted: JobFilter | State | None = None,
        /,
        *,
        limit: int = 50,
        after: str | None = None,
        interval: float = 0.25,
        now: float | None = None,
        redact: Callable[[Any], Any] | None = None,
        **options: Unpack[FilterOptions],
    ) -> Iterator[Page]:
        """As `jobs`, for listings that take a while: those that look at every id, or at all that one state leaves out.
        What is found so far, at once and about every ``interval`` seconds, and at last the page itself; others give
        just that. While nothing new is found the same page comes again: who stops iterating stops the looking.
        ``redact``: what a payload is looked at as, so that nobody finds by a filter what they may not see.

        Raises:
            As `jobs`.
        """
        meant = listed(JobFilter.of(wanted, options))
        check_limit(limit)
        position = None if after is None else decode_cursor(meant, after)
        if meant.looks_inside:
            return self._sifted(meant, limit, position, interval, now, redact)
        return self._pages(meant, limit, position, interval, now)

    def _pages(
        self, wanted: JobFilter, limit: int, position: Position | None, interval: float, now: float | None
    ) -> Iterator[Page]:
        shown: tuple[list[Position], bool] | None = None
        found: list[Position] = []
        more, page = False, Page([], None)
        yielded_at = time.monotonic()
        for found, more in find_page_in_steps(self._client, self._prefixes_in(wanted), wanted, limit, position, now):
            if time.monotonic() - yielded_at >= interval or (found and shown is None):
                if found and (found, more) != shown:
                    page, shown = self._page(wanted, found, more, now), (found, more)
                yield page
                yielded_at = time.monotonic()
        if (found, more) != shown:
            yield self._page(wanted, found, more, now)

    def _page(self, wanted: JobFilter, found: list[Position], more: bool, now: float | None) -> Page:
        chunk = self._chunk(wanted, found, more, now)
        return Page([job for _, job in chunk.rows], self._cursor(wanted, chunk.cursor))

    @staticmethod
    def _cursor(wanted: JobFilter, position: Position | None) -> str | None:
        return None if position is None else encode_cursor(wanted, position)

    def _chunk(self, wanted: JobFilter, found: list[Position], more: bool, now: float | None) -> Chunk[Position, Job]:
        rows, left = self.jobs_at(wanted, found, now, MAX_PAGE_BYTES)
        if left:  # it ends before the first of them
            most = next(i for i, (_, job_id) in enumerate(found) if job_id in left)
            found, more = found[:most], True
            there = set(found)
            rows = [row for row in rows if row[0] in there]
        return Chunk(rows, found[-1] if more else None, len(found))

    def jobs_at(
        self, wanted: JobFilter, found: Sequence[Position], now: float | None, room: float
    ) -> tuple[list[tuple[Position, Job]], set[bytes]]:
        """The jobs at these positions that are still there, until about so many bytes have come, and the ids that were
        not looked up any more.
        """
        # Once each: one that moved while it was looked for was found at both places.
        at = {job_id: (value, job_id) for value, job_id in reversed(found)}
        jobs, left = self._look([job_id for _, job_id in found], wanted.where, now, room)
        rows = [
            (at[job_id], jobs[job_id])
            for job_id in dict.fromkeys(job_id for _, job_id in found)
            if job_id in jobs and (wanted.state is None or jobs[job_id].state == wanted.state)
        ]
        return rows, left

    def positions(
        self, wanted: JobFilter, limit: int, after: Position | None, now: float | None
    ) -> tuple[list[Position], bool]:
        """The next positions after one, over all shards that are wanted, and whether there are more."""
        return find_page(self._client, self._prefixes_in(wanted), wanted, limit, after, now)

    def _prefixes_in(self, wanted: JobFilter) -> list[str]:
        if wanted.shard is None:
            return self._prefixes
        if wanted.shard >= self.shards_count:
            raise ConfigError(f"shard={wanted.shard}: queue {self.name!r} has the shards 0 to {self.shards_count - 1}")
        return [self._prefix(layout, wanted.shard) for layout in self.layouts.all if wanted.shard < layout.shards_count]

    def _admitted(self, wanted: JobFilter, now: float | None) -> Callable[[Sequence[bytes]], set[bytes]]:
        """Which of some ids have what the filter asks for in them. Jobs are read bit by bit."""

        def admitted(ids: Sequence[bytes]) -> set[bytes]:
            found, left = set[bytes](), ids
            while left:
                jobs, missing = self._look(left, wanted.where, now, MAX_PAGE_BYTES)
                found |= {job_id for job_id, job in jobs.items() if wanted.admits(job)}
                left = [job_id for job_id in left if job_id in missing]
            return found

        return admitted

    def _sifted(
        self,
        wanted: JobFilter,
        limit: int,
        after: Position | None,
        interval: float,
        now: float | None,
        redact: Callable[[Any], Any] | None,
    ) -> Iterator[Page]:
        def read(position: Position | None) -> Chunk[Position, Job]:
            return self._chunk(wanted, *self.positions(wanted, STEP, position, now), now)

        for kept, cursor, looked in sift(read, lambda job: wanted.admits(job, redact), limit, after, interval):
            yield Page(kept, self._cursor(wanted, cursor), looked)

    def why(self, job_id: JobId, *, now: float | None = None) -> Why:
        """Why this id is not being performed right now.

        Raises:
            JobError: the id is none. UnknownQueueError, RedisUnavailable
        """
        encoded = lookup_id(job_id)
        layouts = self._presumed_layouts
        calls = registry_calls(self._backend.config.namespace, self.name)
        of_registries = len(calls)
        calls += [ShardScripts(prefix).why(encoded, now) for prefix in self._prefixes_of(encoded, layouts)]
        replies = list(ask(self._client, calls, len(calls)))
        registries = Registries.of(self.name, replies[:of_registries])
        if registries.queue is not None and registries.queue.layouts != layouts:
            self._backend.note_layouts(self.name, registries.queue.layouts)
            return self.why(job_id, now=now)
        layout, found, _ = _decisive(layouts, replies[of_registries:])
        shard = layout.shard_of(encoded)
        node = registries.holder(found.lease)
        why = explain(found, (self.name, shard), node, _max_retry_count(registries.queue))
        return self._limited(why, registries.queue)

    def limits(self) -> list[LimitState]:
        """The limits of its worker over all nodes, as of the registry, and what is granted of them.

        Raises:
            RedisUnavailable, RedisRefused
        """
        return read_limits(self._client, self._backend.config.namespace, self.name, self.options)

    def _limited(self, why: Why, queue: QueueInfo | None) -> Why:
        """What keeps an id that could be performed, where it is a limit over all nodes."""
        if why.reason not in MAY_BE_LIMITED or queue is None:
            return why
        limits = read_limits(self._client, self._backend.config.namespace, self.name, queue.options)
        return explain_limited(why, limits)


def _decisive(layouts: Layouts, whys: Sequence[WhyReply], stats: Sequence[Any] = ()) -> tuple[Layout, WhyReply, Any]:
    """Of an id's shards, by layout, the one that decides: that which its jobs leave until all were moved."""
    number = next((i for i, reply in enumerate(whys) if not reply.moved), len(whys) - 1)
    return layouts.all[number], whys[number], stats[number] if stats else None


def _fetch_call(prefix: str, where: str, ids: Sequence[bytes], now: float | None) -> Call[list[Any]]:
    return ShardScripts(prefix).fetch_jobs(ids, where, MAX_PAYLOADS, MAX_BYTES, now)


def _max_retry_count(queue: QueueInfo | None) -> int:
    most = None if queue is None else queue.options.get("max_retry_count")
    return most if isinstance(most, int) else MAX_RETRY_COUNT


def listed(wanted: JobFilter) -> JobFilter:
    """The same, if it can be listed.

    Raises:
        ConfigError
    """
    if wanted.before is not None:
        raise ConfigError("before: it bounds bulk actions, not listings")
    return wanted


def as_ids(ids: JobId | Iterable[JobId]) -> Iterable[JobId]:
    """One id, or many."""
    return [ids] if isinstance(ids, str | int | UUID) else ids


# --- shards ---


def shards(
    backend: Backend, queue: Queries | str, *, now: float | None = None, silent: Silent | None = None
) -> list[ShardInfo]:
    """The shards of a queue, by index. While a reshard is under way those of the new layout follow. ``silent``: those
    whose primary does not answer are left out, and entered there by their place.

    Raises:
        UnknownQueueError, RedisUnavailable, RedisRefused
    """
    if isinstance(queue, str):
        queue = Queries(backend, queue)
    layouts = queue.layouts
    prefixes = [prefix for layout in layouts.all for prefix in layout.prefixes(backend.config.namespace, queue.name)]
    calls = [ShardScripts(prefix).stats(now) for prefix in prefixes]
    places = [(layout.epoch, index) for layout in layouts.all for index in range(layout.shards_count)]
    replies = list[ShardStats | None](ask(backend.client, calls, STATS_TOGETHER, silent))
    names = node_names(backend)
    return [
        shard_info(index, reply, names, epoch)
        for (epoch, index), reply in zip(places, replies, strict=True)
        if reply is not None
    ]


def _times_in(time: bytes | None) -> tuple[float | None, int, float | None]:
    """perform_at or the time of burial, the priority, and when the first payload expires, as `fetch_jobs` has them."""
    at, level, expires = (*(time or b"").split(), None, None, None)[:3]
    return untrusted.finite(at), untrusted.count(level), untrusted.finite(expires)
